"""What is recommended: sizes as files have them, the rules of readers, figures as they were measured."""

import json
import shlex

import pytest
import torch
import transformers

import gptqkit
from gptqkit import cli
from gptqkit.errors import ArchitectureError, ConfigError, DoesNotFitError
from gptqkit.recommending import cache_bytes
from support.models import SIZE, build

PLENTY = 1 << 40


def choices(model, reader, **how):
    return {
        choice.type or (choice.bits, choice.group_size): choice
        for choice in gptqkit.recommend(model, PLENTY, reader, **how)
    }


@pytest.mark.parametrize(
    ("reader", "key"),
    [
        ("vllm", (4, 128)),
        pytest.param("llama.cpp", "Q4_K_M", marks=pytest.mark.slow),
        *(pytest.param("transformers", (bits, 32), marks=pytest.mark.slow) for bits in (4, 3, 2)),
        *(pytest.param("autogptq", (bits, 128), marks=pytest.mark.slow) for bits in (8, 3)),
        *(pytest.param("llama.cpp", name, marks=pytest.mark.slow) for name in ("Q8_0", "Q5_K_S", "Q3_K_L", "Q2_K")),
    ],
)
def test_the_command_makes_files_of_the_size_that_was_told(example_model, tmp_path, capsys, reader, key):
    choice = choices(example_model, reader)[key]
    words = shlex.split(choice.command)
    assert words[:3] == ["gptqkit", "quantize", str(example_model)]
    words[3] = str(tmp_path / "out")
    words.remove("--calibration")
    words.remove("wikitext2")
    assert cli.main([*words[1:], "--method", "rtn"]) == 0
    capsys.readouterr()
    [file] = [file for name in ("*.safetensors", "*.gguf") for file in (tmp_path / "out").glob(name)]
    found = gptqkit.inspect(tmp_path / "out")
    assert choice.checkpoint_bytes == pytest.approx(found.packed_bytes + found.other_bytes, rel=1e-4)
    if choice.type is None:
        assert choice.checkpoint_bytes == pytest.approx(file.stat().st_size, rel=0.01)
    assert choice.bits_per_weight == pytest.approx(found.bits_per_weight, rel=1e-6)
    assert found.reader(reader).loads
    assert found.reader(reader).warnings == choice.warnings


def test_what_fits_is_shown_and_what_does_not_is_not(example_model):
    found = gptqkit.recommend(example_model, PLENTY, "llama.cpp")
    widths = [choice.bits_per_weight for choice in found]
    assert widths == sorted(widths, reverse=True)
    assert all(each.total_bytes == each.checkpoint_bytes + each.cache_bytes for each in found)
    assert gptqkit.recommend(example_model, found[3].total_bytes, "llama.cpp") == found[3:]
    assert gptqkit.recommend(example_model, f"{found[3].total_bytes}B", "llama.cpp") == found[3:]
    with pytest.raises(ConfigError, match="memory: 'much' is no size; give one such as 8GiB"):
        gptqkit.recommend(example_model, "much", "llama.cpp")
    with pytest.raises(DoesNotFitError, match=r"the smallest choice needs \(Q2_K; 1.50 MiB .* and there is .* MiB;"):
        gptqkit.recommend(example_model, found[-1].total_bytes - 1, "llama.cpp")
    shorter = gptqkit.recommend(example_model, found[-1].total_bytes - 1, "llama.cpp", context=64)
    assert shorter[-1].cache_bytes * 8 == found[-1].cache_bytes


def test_readers_get_what_they_load(example_model):
    """Servers know asymmetric groups in awq only, and version 2 is nothing for AutoGPTQ."""
    formats = {
        name: {key: (each.format, each.sym) for key, each in choices(example_model, name).items()}
        for name in ("vLLM", "AutoGPTQ", "transformers", "SGLang")
    }
    awq = {(4, size): ("awq", False) for size in (32, 64, 128)}
    assert formats["vLLM"] == {(8, 128): ("gptq", True), **awq}
    assert set(formats["AutoGPTQ"].values()) == {("gptq", False)}
    assert set(formats["transformers"].values()) == {("gptq_v2", False)}
    assert formats["SGLang"][4, 128] == ("gptq", True)  # which is fast there
    assert formats["SGLang"][3, 128] == ("gptq_v2", False)


def test_layouts_that_leave_layers_in_floating_point_come_last(tmp_path):
    """Of 192 columns awq has no groups of 128, since all of its groups have one length; compressed-tensors has."""
    config = transformers.LlamaConfig(**{**SIZE, "hidden_size": 192}, intermediate_size=384)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    formats = {key: choice.format for key, choice in choices(tmp_path, "vllm").items()}
    assert (formats[4, 64], formats[4, 128]) == ("awq", "compressed-tensors")


@pytest.mark.parametrize(
    ("config", "reader", "error", "why"),
    [
        (
            transformers.BertConfig(**SIZE),
            "vllm",
            ConfigError,
            "loads this model in no format: .*causal language models",
        ),
        (transformers.MixtralConfig(**SIZE), "gptqmodel", ConfigError, "looks for experts under other names"),
        (transformers.FalconConfig(**SIZE), "llama.cpp", ArchitectureError, "'falcon' are not written as GGUF"),
        (transformers.LlamaConfig(**SIZE), "lama.cpp", ConfigError, "did you mean llama.cpp"),
        (transformers.LlamaConfig(**SIZE), "vllm", ConfigError, "context is 65; this model takes 1 to 64 tokens"),
        (transformers.LlamaConfig(**SIZE), "vllm", ConfigError, "context is '9'; this model takes 1 to 64 tokens"),
    ],
)
def test_refusals(tmp_path, config, reader, error, why):
    config.architectures = [
        type(config).__name__.replace("Config", "Model" if why.endswith("models") else "ForCausalLM")
    ]
    config.save_pretrained(tmp_path)
    with pytest.raises(error, match=why):
        gptqkit.recommend(tmp_path, PLENTY, reader, context={"65;": 65, "'9';": "9"}.get(why.split()[2]))


def test_layouts_that_cannot_hold_the_model_are_no_choice(tmp_path):
    """Of 40 columns GPTQ packs no 3 bits, and GGUF no block."""
    config = transformers.LlamaConfig(**{**SIZE, "hidden_size": 40}, intermediate_size=80)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    formats = {key: choice.format for key, choice in choices(tmp_path, "transformers").items()}
    assert formats[4, 128] == formats[3, 128] == "compressed-tensors"
    with pytest.raises(ArchitectureError, match=r"q_proj: it has 40 columns, and GGUF's blocks need multiples of 32"):
        choices(tmp_path, "llama.cpp")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "opt"])
def test_keys_and_values_are_those_that_transformers_keeps(name):
    model, tokens = build(name), 6  # within gemma's window of 8
    with torch.no_grad():
        cache = model(torch.ones(1, tokens, dtype=torch.int64), use_cache=True).past_key_values
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert cache_bytes(model.config, tokens) == 2 * kept


def test_windows_and_compressed_attention():
    gemma = build("gemma3").config  # two blocks, one with a window of 8, each with 2 heads of 16 columns
    assert cache_bytes(gemma, 64) == 2 * 2 * 2 * 16 * (8 + 64)
    deepseek = build("deepseek_v3").config  # three blocks, which keep 32 numbers and 32 for positions
    assert cache_bytes(deepseek, 10) == 2 * 3 * 10 * (32 + 32)


def test_quality_is_as_it_was_measured(example_model, root):
    """And more bits mean less divergence in both tables, which is why the widest comes first."""
    results = {
        name: json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text())
        for name in ("quality", "llamacpp")
    }
    scores = {
        (row["bits"], row["sym"]): row["scores"]["wikitext2"]
        for row in results["quality"]["rows"]
        if (row["method"], row["order"]) == ("balanced", "act_group_aware")
    }
    shown = {
        (each.bits, each.sym): each
        for name in ("transformers", "vllm", "sglang")
        for each in gptqkit.recommend(example_model, PLENTY, name)
        if each.group_size == 128 and each.bits < 8
    }
    for key, each in shown.items():
        assert each.kl_divergence == round(scores[key]["kl_divergence"], 4)
        assert each.perplexity_ratio == round(scores[key]["perplexity"] / scores[key]["reference_perplexity"], 4)
    assert {(4, False), (4, True), (3, False), (2, False)} <= set(shown)
    rows = {(row["type"], row["by"]): row["scores"]["wikitext2"] for row in results["llamacpp"]["rows"]}
    types = {name: each for name, each in choices(example_model, "llama.cpp").items() if each.kl_divergence is not None}
    assert set(types) == {name for name, by in rows if by == "balanced"}
    for name, each in types.items():
        assert each.kl_divergence == round(rows[name, "balanced"]["kl_divergence"], 4)
        ratio = rows[name, "balanced"]["perplexity"] / rows["float16", ""]["perplexity"]
        assert each.perplexity_ratio == round(ratio, 4)
    for found in (
        list(types.values()),
        [each for each in choices(example_model, "transformers").values() if each.kl_divergence],
    ):
        divergences = [each.kl_divergence for each in found]
        assert divergences == sorted(divergences)
