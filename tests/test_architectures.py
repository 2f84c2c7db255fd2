"""Every architecture from disk to an evaluated checkpoint: solved = stored = loaded = evaluated."""

import dataclasses
import json
import math
import re
from itertools import product

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import gptqkit
from gptqkit.quantizer import gptq
from support.models import MIXTURES, MODELS, OTHERS, SIZE, build, samples, save
from support.pipeline import assert_close, dequantized, float_matrix, outputs, quantize

# All bits, grids and formats, spread over the architectures beside methods, orders and dtypes of the files.
GRIDS = [
    {"bits": bits, "sym": sym, "format": layout}
    for bits, sym, layout in product((2, 3, 4, 8), (True, False), ("gptq", "gptq_v2"))
]
ORDERS = [
    {},
    {"desc_act": True},
    {"desc_act": True, "static_groups": True},
    {"act_group_aware": False, "true_sequential": False},
    {"group_size": -1},
]
METHODS = ("loaq", "gptq", "rtn")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = {
    name: ({**GRIDS[number % 16], **ORDERS[number % 5], "method": METHODS[number % 3]}, DTYPES[number // 3 % 3])
    for number, name in enumerate([*MODELS, *MIXTURES, *OTHERS])
}


@pytest.fixture
def solved(monkeypatch):
    """What solvers return, by the bytes of the weight that they were given."""
    found = {}
    for name in ("RTN", "GPTQ", "GPTAQ", "LOAQ"):
        method = getattr(gptq, name)

        def solve(weight, *rest, method=method):
            solution = method.solve(weight, *rest)
            found[weight.numpy().tobytes()] = solution.weight
            return solution

        monkeypatch.setattr(gptq, name, dataclasses.replace(method, solve=solve))
    return found


def matrices_of_blocks(source):
    """The names of all matrices in the blocks; gpt_oss and Llama 4 stack those of their four experts.

    Routers are left out, and Mamba's dt_proj, which no forward pass calls.
    """
    found = set()
    for name, tensor in source.items():
        if not re.search(r"\.(layers|layer|h)\.\d", name) or name.startswith(("vision_tower", "model.vision_tower")):
            continue
        if name.endswith("experts.gate_up_proj"):
            parts = ("gate_proj", "up_proj", "down_proj")
            path = name.removesuffix(".gate_up_proj")
            found |= {f"{path}.{number}.{part}.weight" for number in range(4) for part in parts}
        elif name.endswith(".weight") and tensor.ndim == 2:
            found.add(name)
    left = r"\.(mlp|block_sparse_moe|feed_forward)\.(gate|router|shared_expert_gate)\.|\.mixer\.dt_proj\."
    return {name for name in found if not re.search(left, name)}


SLOW = (
    "mistral",
    "qwen2",
    "qwen3",
    "deepseek_v3",
    "gemma2",
    "gpt_neox",
    "falcon",
    "qwen2_moe",
    "qwen3_moe",
    "gemma3",
    "llama4",
    "llava",
    "mamba",
    "opt",
)


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in CASES])
def test_from_disk_to_an_evaluated_checkpoint(name, solved, tmp_path):
    settings, dtype = CASES[name]
    tokens = samples(padded=name in ("mistral", "gpt_neox", "qwen3_moe", "bert"))
    source = save(build(name).to(dtype), tmp_path / "model")
    result = quantize(tmp_path / "model", tmp_path / "out", tokens, **settings)
    modules, checkpoint = result.report.modules, gptqkit.open_checkpoint(tmp_path / "out")

    assert {f"{layer}.weight" for layer in checkpoint.layers} == matrices_of_blocks(source)
    assert len(modules) == len(checkpoint.layers) == len(solved)
    for layer in checkpoint.layers:
        expected = solved[float_matrix(layer, source).float().contiguous().numpy().tobytes()]
        for part in ("codes", "scale", "offset", "group_index"):
            assert torch.equal(getattr(checkpoint.weight(layer), part), getattr(expected, part)), (layer, part)
    replaced = {f"{layer}.{key}" for layer in checkpoint.layers for key in ("qweight", "qzeros", "scales", "g_idx")}
    others = source.keys() - {f"{layer}.weight" for layer in checkpoint.layers}
    if name in ("gpt_oss", "llama4"):
        others = {each for each in others if ".experts." not in each}
        others |= {f"{layer}.bias" for layer in checkpoint.layers if ".experts." in layer and name == "gpt_oss"}
    assert set(checkpoint.tensors.where) == replaced | others
    for each in others & source.keys():
        assert torch.equal(checkpoint.tensor(each), source[each])

    assert {module.method for module in modules} == {settings["method"]}
    errors, rounded = (sum(getattr(module, key) for module in modules) for key in ("error", "rounding_error"))
    assert errors == rounded if settings["method"] == "rtn" else errors < rounded
    assert {module.name for module in modules if module.prior_tokens} <= {
        module.name for module in modules if ".experts." in module.name and module.tokens < module.shape[1]
    }

    theirs = dequantized(tmp_path / "out", tmp_path / "model", tmp_path / "dense")
    expected = outputs(theirs, tokens)
    for backend in ("torch", "cpu"):
        loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend=backend, dtype="float32")
        assert type(loaded) is type(theirs)
        assert_close(outputs(loaded, tokens), expected)
    ids = samples().input_ids
    how = gptqkit.Evaluation(sequence_length=24, device="cpu", dtype="float32")
    scores = gptqkit.evaluate(tmp_path / "out", ids, how, reference=tmp_path / "model")
    if name == "bert":
        assert 0.5 < scores.lowest_cosine <= scores.cosine < 1
        return
    losses = torch.nn.functional.cross_entropy(outputs(theirs)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert scores.perplexity == pytest.approx(math.exp(losses), rel=1e-5)
    assert scores.kl_divergence > 0


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_an_override_leaves_in_floating_point(name, tmp_path):
    save(build(name), tmp_path / "model")
    overrides = {
        r"layers\.0\.mlp\.experts\.[02]\.": gptqkit.ModuleOverride(skip=True),
        r"layers\.1\.mlp\.experts\.\d\.down_proj": gptqkit.ModuleOverride(skip=True),
        r"experts\.3\.": gptqkit.ModuleOverride(bits=8, group_size=16),
    }
    report = quantize(tmp_path / "model", tmp_path / "out", overrides=overrides).report
    assert len(report.modules) == 2 * 4 + 2 * 3 + 4 * 2
    assert {module.bits for module in report.modules if "experts.3" in module.name} == {8}
    theirs = dequantized(tmp_path / "out", tmp_path / "model", tmp_path / "dense")
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend="torch")
    assert_close(outputs(loaded), outputs(theirs))


JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 32}
ODD = {
    "blocks of two kinds": (
        transformers.JambaConfig(
            **SIZE, **JAMBA, intermediate_size=96, num_key_value_heads=2, num_experts=1, num_experts_per_tok=1
        ),
        {r"mamba\.(x|dt)_proj": gptqkit.ModuleOverride(skip=True)},
        12,
    ),
    "blocks that return lists": (
        transformers.OpenAIGPTConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
        {},
        8,
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_architectures(name, tmp_path):
    config, overrides, count = ODD[name]
    torch.manual_seed(0)
    save(transformers.AutoModelForCausalLM.from_config(config), tmp_path / "model")
    report = quantize(tmp_path / "model", tmp_path / "out", overrides=overrides, method="gptaq").report
    assert len(report.modules) == count
    assert not any("router" in module.name for module in report.modules)
    theirs = dequantized(tmp_path / "out", tmp_path / "model", tmp_path / "dense")
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend="torch")
    assert_close(outputs(loaded), outputs(theirs))


def test_nothing_of_the_source_is_lost(tmp_path):
    """Tensors that transformers drops, such as those of a multi-token predictor, and files of processors."""
    model = tmp_path / "model"
    extra = {"model.layers.3.eh_proj.weight": torch.randn(64, 128), "model.layers.3.enorm.weight": torch.randn(64)}
    tensors = save(build("deepseek_v3"), model)
    save_file({**tensors, **extra}, model / "model.safetensors", metadata={"format": "pt"})
    (model / "preprocessor_config.json").write_text('{"size": 16}')
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (model / "modeling.py").write_text("raise SystemExit")
    quantize(model, tmp_path / "out", method="rtn")
    for name, tensor in extra.items():
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], tensor)
    meta = json.loads((tmp_path / "out" / "quantize_config.json").read_text())["meta"]
    assert sorted(meta["passthrough_tensors"]) == sorted(extra)
    assert (tmp_path / "out" / "preprocessor_config.json").exists()
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    assert not (tmp_path / "out" / "modeling.py").exists()
    gptqkit.convert(tmp_path / "out", tmp_path / "other", format="compressed-tensors")
    written = json.loads((tmp_path / "other" / "config.json").read_text())["quantization_config"]
    assert written["meta"]["passthrough_tensors"] == meta["passthrough_tensors"]
    for name in ("out", "other"):
        gptqkit.load(tmp_path / name, device="cpu")


def test_a_tied_weight_may_stand_under_its_other_name(tmp_path):
    tensors = save(build("llama"), tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "expected")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    quantize(tmp_path / "model", tmp_path / "out")
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    expected["lm_head.weight"] = expected.pop("model.embed_tokens.weight")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_the_example_model_from_text_to_perplexity(tmp_path, example_model, small_text):
    """What is measured on the way is what the checkpoint measures, and nothing published names a local path."""
    text, stages = tmp_path / "book.txt", []
    text.write_text(small_text, encoding="utf-8")
    report = gptqkit.quantize(
        example_model,
        gptqkit.Calibration(text, samples=4, sequence_length=128),
        tmp_path / "out",
        gptqkit.QuantizeConfig(bits=3, quality="fast", overrides={r"layers\.[1-5]\.": {"skip": True}}),
        run=gptqkit.Run(device="cpu"),
        evaluate_on=text,
        progress=lambda step: stages.append(step.stage),
    ).report
    assert {"quantize", "evaluate"} <= set(stages)
    assert not any(module.worse_than_rounding for module in report.modules)
    stored = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    [row] = stored["perplexity"]
    how = gptqkit.Evaluation(sequence_length=128, device="cpu")
    scores = gptqkit.evaluate(tmp_path / "out", text, how, reference=example_model)
    assert (row["dataset"], row["perplexity"], row["tokens"]) == ("book.txt", scores.perplexity, scores.tokens)
    assert scores.reference_perplexity < scores.perplexity < 1.3 * scores.reference_perplexity
    assert [module["name"] for module in stored["modules"]] == [module.name for module in report.modules]
    published = "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".md"))
    assert str(tmp_path) not in published
    assert str(example_model.parent) not in published


@pytest.mark.parametrize(
    ("named", "expected"), [(["PhiMoEForCausalLM"], "PhiMoEForCausalLM"), (None, "LlamaForCausalLM")]
)
def test_the_class_that_the_source_names_stays_also_where_transformers_calls_it_otherwise(named, expected, tmp_path):
    """vLLM knows PhiMoE under the name that its files have, transformers as PhimoeForCausalLM."""
    save(build("llama"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": named}))
    gptqkit.quantize(tmp_path / "model", None, tmp_path / "out", {"method": "rtn", "group_size": 32})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [expected]
    assert type(gptqkit.load(tmp_path / "out", device="cpu")[0]).__name__ == "LlamaForCausalLM"
