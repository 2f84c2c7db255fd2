"""What readers ask of checkpoints, and what it costs them, told of models whose sizes are known."""

from dataclasses import replace

import pytest

from gptqkit.errors import ConfigError
from gptqkit.export.formats import Declared, LayerSpec
from gptqkit.export.inspect import inspect
from gptqkit.export.readers import Facts, readers_of
from support.weights import random_weight


def llama(hidden=4096, inner=11008, heads=32, shared=32, group=128, count=1, composite=False, **settings):
    """What one reader says of a Llama of these sizes, whose layers `count` GPUs share, by its name."""
    values = {"format": "gptq", "bits": 4, "sym": True, "act_order": False, "dtype": "float16", **settings}
    values = {"desc_act": values["act_order"], "writer": None, **values}
    keys = hidden * shared // heads
    shapes = {
        **{f"self_attn.{name}_proj": (hidden, rows) for name, rows in (("q", hidden), ("k", keys), ("v", keys))},
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    own = {name: values[name] for name in ("bits", "sym", "act_order")}
    layers = {
        f"model.layers.0.{name}": LayerSpec(
            in_features=k, out_features=n, group_size=k if group is None else group, **own
        )
        for name, (k, n) in shapes.items()
    }
    declared = {name: values[name] for name in ("format", "bits", "sym", "desc_act", "writer")}
    model = {"num_attention_heads": heads, "num_key_value_heads": shared, "dtype": values["dtype"]}
    found = readers_of(
        Facts(
            declared=Declared(group_size=group, **declared),
            layers=layers,
            skipped=[],
            model_config={"architectures": ["LlamaForCausalLM"], **({"text_config": model} if composite else model)},
            quantization_config={},
            tensor_parallel=count,
        )
    )
    return {reader.name: reader for reader in found}


@pytest.mark.parametrize(
    ("sizes", "count", "reason"),
    [
        ({}, 1, ""),
        ({}, 2, ""),
        ({}, 4, "down_proj has 2752 inputs on each GPU and groups of 128"),  # 11008 / 4 is 21.5 groups
        ({"group": 32}, 4, ""),
        ({"group": 64}, 4, ""),
        ({"group": None}, 4, ""),  # every GPU has the scales of whole rows
        ({"group": None, "format": "awq"}, 4, "o_proj has 1024 inputs on each GPU and groups of 4096"),
        ({"group": None, "format": "compressed-tensors"}, 4, ""),
        ({}, 3, "whole heads: of 32"),
        ({"composite": True}, 3, "whole heads: of 32"),
        ({"inner": 14336, "shared": 8}, 8, ""),
        ({"inner": 14336, "shared": 8, "group": 32}, 16, ""),  # two GPUs have the same keys and values
        ({"hidden": 384, "inner": 768, "heads": 12, "shared": 1, "group": 32}, 12, ""),  # all have the one head of keys
        ({"hidden": 5120, "inner": 13824, "heads": 40, "shared": 10, "group": 64}, 4, "key-value heads: of 10"),
        ({"inner": 11006, "group": None}, 4, "cannot share model.layers.0.mlp.gate_proj evenly"),
        ({"inner": 4 * 36, "group": None}, 4, "inputs that are multiples of 32 and outputs of 32"),
    ],
)
def test_what_gpus_can_share(sizes, count, reason):
    """Sizes of Llama 2 7B and 13B and of Llama 3 8B."""
    found = llama(count=count, **sizes)["vLLM"]
    assert found.loads == (not reason), found.reasons
    assert reason in " ".join(found.reasons)


def test_sizes_that_do_not_fit_are_those_that_were_judged():
    fused = llama(hidden=256, inner=768, heads=16, shared=1)["vLLM"].warnings  # 256 + 16 + 16 outputs together
    assert "q_proj, with what it is fused with, has 256 and 288" in " ".join(fused)
    alone = llama(inner=4 * 36, count=4, group=None)["vLLM"].reasons
    assert "down_proj has 36 and 4096" in " ".join(alone)


def test_words_are_not_cut_between_gpus():
    assert llama(inner=48, group=None)["SGLang"].loads
    assert llama(inner=48, group=None, count=2)["SGLang"].loads
    assert "packed words" in llama(inner=48, group=None, count=4)["SGLang"].reasons[0]


@pytest.mark.parametrize(
    ("writer", "loads"),
    [("gptqmodel:0.8.9", False), ("GPTQModel:0.9.0", True), ("gptqmodel:7.5.0", True), ("auto_gptq:0.9", False)],
)
def test_asymmetric_files_of_version_1_are_trusted_by_their_writer_alone(writer, loads):
    assert llama(sym=False, writer=writer)["GPTQModel"].loads == loads
    assert llama(writer=writer)["GPTQModel"].loads
    assert llama(sym=False, format="gptq_v2", writer=writer)["GPTQModel"].loads


def test_one_group_per_row_has_no_order():
    for name in ("vLLM", "SGLang"):
        assert llama(desc_act=True, group=None)[name].loads
    assert "rejects desc_act" in llama(desc_act=True)["vLLM"].reasons[0]


def noted(name, text, **sizes):
    return any(text in warning for warning in llama(**sizes)[name].warnings)


def test_what_loads_but_costs():
    plain = llama()
    assert not any(reader.warnings for reader in plain.values())
    for name in ("GPTQModel", "transformers", "SGLang", "AutoGPTQ"):
        assert noted(name, "g_idx", act_order=True)
    assert noted("SGLang", "slower kernel for shared layers", act_order=True, count=2)
    assert noted("SGLang", "fast kernels for symmetric 4 and 8 bits", bits=3)
    assert noted("SGLang", "fast kernels for symmetric 4 and 8 bits", sym=False)
    assert noted("vLLM", "4 bits only", bits=8)
    assert noted("transformers", "BACKEND.GPTQ_TORCH", group=None)
    for name in ("vLLM", "transformers"):
        assert noted(name, "bfloat16", dtype="bfloat16")
    assert not noted("SGLang", "bfloat16", dtype="bfloat16")
    assert not noted("transformers", "bfloat16", dtype="bfloat16", format="gguf")
    # 64 outputs and 128 inputs, or 128 and 64, fill a tile of vLLM's kernel; its parts are 2752 and 5504 on 4 GPUs
    assert not noted("vLLM", "pads", group=32, count=4)
    assert noted("vLLM", "pads", inner=11008 - 32, group=32)
    assert noted("transformers", "not looked at", count=2)


def test_an_output_layer_that_is_not_read(material, tmp_path):
    """vLLM knows of it by lm_head, and leaves it out where the config lists other modules or ties it."""
    made = material(format="gptq")
    made.weights["lm_head"] = random_weight(rows=128, columns=128, sym=True)
    plain = inspect(made.write(tmp_path / "plain"))
    assert plain.reader("vllm").loads
    with pytest.raises(ConfigError, match=r"'transformer' is none of .*; did you mean transformers"):
        plain.reader("transformer")
    made.model_config["tie_word_embeddings"] = True
    assert "takes the embedding" in inspect(made.write(tmp_path / "tied")).reader("vllm").reasons[0]
    skipping = material(format="gptq", overrides={"down_proj": {"skip": True}})
    skipping.weights["lm_head"] = made.weights["lm_head"]
    assert "takes lm_head for floating point" in inspect(skipping.write(tmp_path / "out")).reader("vLLM").reasons[0]


def test_zero_points_of_version_1_that_are_all_ones_are_counted(material, tmp_path):
    made = material(format="gptq", sym=False)
    name = "model.layers.1.mlp.down_proj"
    made.weights[name] = random_weight(zeros=(14, 16))
    count = int((made.weights[name].zero_point() == 16).sum())
    assert count
    summary = inspect(made.write(tmp_path / "out"))
    for reader in ("gptqkit", "transformers", "AutoGPTQ"):
        assert any(f"{count} zero points" in warning for warning in summary.reader(reader).warnings)
    made = material(format="gptq", sym=False)
    assert not any(
        "zero points" in text for each in inspect(made.write(tmp_path / "fine")).readers for text in each.warnings
    )


@pytest.mark.parametrize("other", [{}, {"sym": False}, {"group_size": 32}, {"bits": 8}], ids=str)
def test_fused_parts_must_be_quantized_alike(other):
    facts = {"declared": Declared(format="gptq", bits=4, group_size=64, sym=True, desc_act=False), "skipped": []}
    usual = {"in_features": 128, "out_features": 128, "bits": 4, "group_size": 64, "sym": True, "act_order": False}
    q, k = LayerSpec(**usual), LayerSpec(**{**usual, **other})
    layers = {"model.layers.0.self_attn.q_proj": q, "model.layers.0.self_attn.k_proj": k}
    found = readers_of(Facts(layers=layers, model_config={}, quantization_config={}, **facts))
    for name in ("vLLM", "SGLang"):
        [reader] = [reader for reader in found if reader.name == name]
        assert any("qkv_proj quantized alike" in reason for reason in reader.reasons) == bool(other)
    facts["declared"] = replace(facts["declared"], format="gguf")  # which they do not read, whatever is in it
    found = readers_of(Facts(layers=layers, model_config={}, quantization_config={}, tensor_parallel=3, **facts))
    assert [len(reader.reasons) for reader in found if reader.name in ("vLLM", "SGLang")] == [1, 1]
