"""What `inspect` says against sizes counted by hand and against what is known of the readers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit.errors import ConfigError
from gptqkit.export.inspect import inspect
from gptqkit.quantizer.config import ModuleOverride
from support.weights import random_weight

SKIP = ModuleOverride(skip=True)


def test_sizes_by_hand(material, tmp_path):
    summary = inspect(material(bits=3).write(tmp_path / "out"))
    weights = 2 * (64 * 64 + 64 * 96)
    codes, groups = weights * 3 // 8, 2 * (64 * 2 + 64 * 3)
    packed = codes + groups * 2 + groups * 3 // 8 + 2 * 4 * (64 + 96)  # codes, scales, zeros, g_idx
    assert (summary.quantized_weights, summary.packed_bytes) == (weights, packed)
    assert summary.bits_per_weight == packed * 8 / weights
    assert summary.other_parameters == 640 + 2 * (64 + 64)
    assert summary.other_bytes == 640 * 2 + 2 * (64 * 2 + 64 * 4)
    assert (summary.format, summary.bits, summary.group_sizes) == ("gptq_v2", {3: 4}, {32: 4})
    assert summary.writer.startswith("gptqkit:")
    assert json.loads(json.dumps(summary.to_dict()))["quantized_layers"] == 4
    for count in (0, 1.5, "2"):
        with pytest.raises(ConfigError, match=f"tensor_parallel is {count!r}; give the number of GPUs"):
            inspect(tmp_path / "out", tensor_parallel=count)


def refusals(path, **how):
    """The reasons of the readers of safetensors that do not load it."""
    readers = inspect(path, **how).readers
    names = ["gptqkit", "GPTQModel", "transformers", "vLLM", "SGLang", "AutoGPTQ", "llama.cpp"]
    assert [reader.name for reader in readers] == names
    assert all(reader.loads != bool(reader.reasons) for reader in readers)
    assert "reads GGUF only" in readers[-1].reasons[0]
    return {reader.name: " ".join(reader.reasons) for reader in readers[:-1] if not reader.loads}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"format": "gptq_v2"}, {"AutoGPTQ": "every zero off by one"}),
        ({"sym": False}, {"vLLM": "symmetric checkpoints only", "GPTQModel": "refuses asymmetric version 1"}),
        ({"bits": 3}, {"vLLM": "serves 4 and 8 bits, not 3"}),
        (
            {"overrides": {"q_proj": ModuleOverride(bits=8)}},
            {"transformers": "knows one setting", "AutoGPTQ": "knows one setting"},
        ),
        ({"overrides": {"down_proj": SKIP}}, {"AutoGPTQ": "cannot leave modules"}),
        ({"overrides": {r"0\.mlp": SKIP}}, {"transformers": "in some blocks", "AutoGPTQ": ""}),
    ],
)
def test_readers_by_settings(material, tmp_path, settings, expected):
    found = refusals(material(**{"format": "gptq", **settings}).write(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(reason in found[name] for name, reason in expected.items())


OTHERS = ["GPTQModel", "transformers", "vLLM", "SGLang", "AutoGPTQ"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"format": "awq", "sym": False}, {"SGLang": "not tried with awq", "AutoGPTQ": "convert to gptq"}),
        (
            {"format": "awq", "group_size": 8},
            dict.fromkeys(OTHERS[:3], "groups of") | {"SGLang": "", "AutoGPTQ": ""},
        ),
        (
            {"format": "awq", "overrides": {"down_proj": SKIP}},
            {"SGLang": "", "AutoGPTQ": ""},
        ),
        (
            {"format": "compressed-tensors", "sym": False},
            {"GPTQModel": "convert to gptq_v2", "SGLang": "not tried", "AutoGPTQ": ""},
        ),
        (
            {"format": "compressed-tensors", "bits": 3, "overrides": {"down_proj": ModuleOverride(bits=8)}},
            {"GPTQModel": "", "SGLang": "", "AutoGPTQ": "", "vLLM": "serves 4 and 8 bits, not 3"},
        ),
        (
            {"format": "compressed-tensors", "bits": 8, "sym": False, "group_size": 16},
            {
                "GPTQModel": "",
                "SGLang": "",
                "AutoGPTQ": "",
                "vLLM": "8 bits symmetric only; quantize with sym has kernels for groups of",
            },
        ),
    ],
)
def test_readers_of_other_formats(material, tmp_path, settings, expected):
    found = refusals(material(**settings).write(tmp_path / "out"))
    assert found.keys() == expected.keys()
    assert all(reason in found[name] for name, reason in expected.items())


def test_no_reader_loads_marlin_files_and_act_order_is_given_up_in_compressed_tensors(material, tmp_path):
    made = material(format="marlin", group_size=128)
    made.weights = {"model.layers.0.mlp.down_proj": random_weight(4, 256, 128, None, sym=True)}
    found = refusals(made.write(tmp_path / "marlin"))
    assert found.keys() == set(OTHERS)
    assert all("no checkpoints in marlin's layout" in reason for reason in found.values())
    made = material(format="compressed-tensors")
    made.weights = {"model.layers.0.mlp.down_proj": random_weight(act_order=True)}
    found = refusals(made.write(tmp_path / "out"))
    assert all("given up g_idx; quantize with static_groups" in found[name] for name in ("transformers", "vLLM"))


def test_readers_by_tensors(material, tmp_path):
    made = material(bits=2, format="gptq")
    made.model_config["dtype"] = "bfloat16"
    name = "model.layers.0.mlp.down_proj"
    made.weights[name] = random_weight(2, act_order=True)
    for block in range(2):
        stem = f"model.layers.{block}.self_attn"
        made.weights[f"{stem}.v_proj"] = made.weights[f"{stem}.q_proj"]
        made.other_tensors[f"{stem}.k_proj.weight"] = torch.randn(64, 64)
    out = made.write(tmp_path / "out")
    found = refusals(out)
    assert "rejects desc_act" in found["vLLM"]
    assert "ignores g_idx" in found["vLLM"]
    assert "float16 only" in found["SGLang"]
    assert "qkv_proj quantized alike" in found["SGLang"]
    plain = material(format="gptq").write(tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    save_file(kept, plain / "model.safetensors", metadata={"format": "pt"})
    assert "needs g_idx, which 4 layers lack" in refusals(plain)["transformers"]


def test_every_reader_loads_what_suits_it_and_fused_projections_count_together(material, tmp_path):
    made = material(format="gptq")
    made.weights = {
        f"model.layers.{block}.self_attn.{name}": random_weight(rows=rows, columns=128, sym=True)
        for block in range(2)
        for name, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))
    }
    assert refusals(made.write(tmp_path / "out")) == {}


def test_kinds_of_models_that_were_not_tried_are_not_promised(material, tmp_path):
    others = {"GPTQModel", "transformers", "vLLM", "SGLang", "AutoGPTQ"}
    made = material(format="gptq")
    made.weights["model.layers.0.mlp.experts.0.gate_proj"] = made.weights["model.layers.0.self_attn.q_proj"]
    found = refusals(made.write(tmp_path / "mixture"))
    assert found.keys() == others
    assert "not tried with the experts of llama" in found["GPTQModel"]
    assert "leaves experts at random values" in found["transformers"]
    made.model_config["architectures"] = ["LlavaForConditionalGeneration"]
    reasons = refusals(made.write(tmp_path / "composite"))
    assert reasons.keys() == others
    assert all("not with LlavaForConditionalGeneration" in each for each in reasons.values())


@pytest.mark.parametrize(
    ("kind", "experts", "loads"),
    [
        ("qwen3_moe", "mlp.experts.0.gate_proj", {"GPTQModel", "vLLM"}),
        ("deepseek_v3", "mlp.experts.0.gate_proj", {"GPTQModel"}),
        ("gpt_oss", "mlp.experts.0.gate_proj", {"GPTQModel"}),
        ("mixtral", "block_sparse_moe.experts.0.w1", {"vLLM"}),
        ("phimoe", "block_sparse_moe.experts.0.w1", set()),
    ],
)
def test_readers_of_mixtures_of_experts(material, tmp_path, kind, experts, loads):
    """As `make clients` shows of small ones."""
    made = material(format="gptq")
    made.model_config["model_type"] = kind
    made.weights = {f"model.layers.{n}.{experts}": random_weight(rows=64, columns=128, sym=True) for n in range(2)}
    others = {"GPTQModel", "transformers", "vLLM", "SGLang", "AutoGPTQ"}
    assert refusals(made.write(tmp_path / "out")).keys() == others - loads


EXPERTS = "model.layers.1.mlp.experts"
OTHER = ModuleOverride(group_size=64)
UNLIKE = f"needs the parts of {EXPERTS} quantized alike"
MISREAD = f"builds {EXPERTS} as dynamic says of that name, not as its experts are"


def mixture(material, overrides, hidden=128, size=32):
    """The material of a Qwen3-MoE with two experts in its second block, by `overrides` of a common setting."""
    made = material(format="gptq", group_size=size, overrides=overrides)
    made.model_config |= {"model_type": "qwen3_moe", "hidden_size": hidden, "moe_intermediate_size": 64}
    made.weights, made.other_tensors = {}, {}
    shapes = {"model.layers.0.self_attn.o_proj": (128, 128)}
    for expert in range(2):
        shapes |= {f"{EXPERTS}.{expert}.{part}_proj": (64, hidden) for part in ("gate", "up")}
        shapes[f"{EXPERTS}.{expert}.down_proj"] = (hidden, 64)
    for name, shape in shapes.items():
        if (own := made.config.for_module(name)) is None:
            made.other_tensors[f"{name}.weight"] = torch.randn(shape).half()
        else:
            made.weights[name] = random_weight(own.bits, *shape, own.group_size, sym=True)
    return made


def change_dynamic(path, change):
    """Let another program, or an earlier version, have written what `dynamic` says."""
    for name in ("config.json", "quantize_config.json"):
        values = json.loads((path / name).read_text())
        inner = values.get("quantization_config", values)
        inner["dynamic"] = change(inner.get("dynamic", {}))
        (path / name).write_text(json.dumps(values))


def without_experts(dynamic):
    """Patterns of single experts alone."""
    return {pattern.replace(r"(?:\..+)?", r"\..+"): rule for pattern, rule in dynamic.items()}


@pytest.mark.parametrize(
    ("overrides", "reason", "before"),
    [
        ({}, "", ""),
        ({"experts": OTHER}, "", MISREAD),
        ({"experts": ModuleOverride(bits=8)}, "", MISREAD),
        ({"experts": SKIP}, "", MISREAD),
        ({r"experts\.1": OTHER}, UNLIKE, UNLIKE),
        ({r"experts\.1": SKIP}, UNLIKE, UNLIKE),
        ({"down_proj": OTHER}, UNLIKE, UNLIKE),
        ({"up_proj": SKIP}, UNLIKE, UNLIKE),
        ({"down_proj": SKIP}, UNLIKE, UNLIKE),
    ],
)
def test_vllm_loads_experts_that_are_alike_and_are_what_the_config_says(material, tmp_path, overrides, reason, before):
    """As vLLM 0.32 does on a CPU with experts in floating point, and as its lookup is written."""
    out = mixture(material, overrides).write(tmp_path / "out")
    found = refusals(out)
    assert "GPTQModel" not in found
    assert ("transformers" in found) == (overrides != {"experts": SKIP})
    assert found.get("vLLM", "").startswith(reason)
    assert bool(reason) == ("vLLM" in found)
    assert "not tried with mixtures of experts" in found["SGLang"]
    assert "not tried with mixtures of experts" in found["AutoGPTQ"]
    change_dynamic(out, without_experts)  # as earlier versions wrote
    assert refusals(out).get("vLLM", "").startswith(before)
    assert bool(before) == ("vLLM" in refusals(out))


@pytest.mark.parametrize(
    ("overrides", "dynamic", "loads"),
    [
        ({"experts": OTHER}, {r"+:.*experts": {"group_size": 64}}, True),
        ({"experts": OTHER}, {r"+:.*\.experts\..*": {"group_size": 64}}, False),  # GPTQModel's; it needs a dot behind
        ({"experts": SKIP}, {r"-:.*\.mlp": {}}, True),
        ({"experts": SKIP}, {r"-:.*\.\d\.\w+_proj": {}}, False),
        ({}, {r"-:.*\.mlp": {}}, False),
        ({}, {r"+:.*experts$": {"bits": 8}, r"-:.*\.mlp": {}}, False),
        ({}, {r".*experts$": {"bits": 4}, r"-:.*\.mlp": {}}, True),
    ],
)
def test_patterns_of_other_programs_are_asked_as_vllm_asks_them(material, tmp_path, overrides, dynamic, loads):
    out = mixture(material, overrides).write(tmp_path / "out")
    change_dynamic(out, lambda _: dynamic)
    found = refusals(out)
    assert ("vLLM" not in found) == loads
    assert loads or MISREAD in found["vLLM"]


def test_experts_whose_sizes_no_marlin_kernel_has_are_built_with_the_common_setting(material, tmp_path):
    """Then vLLM takes kernels that do not look at dynamic, and know no group of a whole row."""

    def vllm(overrides, how=None, **sizes):
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return refusals(mixture(material, overrides, **sizes).write(out), **(how or {})).get("vLLM", "")

    assert not vllm({}, hidden=192)
    assert not vllm({"experts": OTHER})
    assert "no Marlin kernel" in vllm({"experts": OTHER}, hidden=192)
    assert "no Marlin kernel" in vllm({"experts": SKIP}, hidden=192)
    assert "no Marlin kernel" in vllm({}, hidden=192, size=None)
    assert not vllm({}, size=None)
    assert not vllm({"experts": SKIP}, size=64)
    assert "no Marlin kernel" in vllm({"experts": SKIP}, {"tensor_parallel": 2}, size=64)


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_experts_in_floating_point_make_a_mixture_too(material, tmp_path, format):
    made = material(format=format)
    made.model_config["model_type"] = "qwen2_moe"
    made.other_tensors["model.layers.0.mlp.experts.0.gate_proj.weight"] = torch.randn(64, 64)
    found = refusals(made.write(tmp_path / "one"))
    del made.other_tensors["model.layers.0.mlp.experts.0.gate_proj.weight"]
    made.other_tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.randn(2, 64, 64)
    stacked = refusals(made.write(tmp_path / "stacked"))
    for each in (found, stacked):
        gptq = format.startswith("gptq")
        assert "not tried with the experts of qwen2_moe" in each["vLLM"] if gptq else "mixtures" in each["vLLM"]
        assert "mixtures of experts" in each["SGLang"]
        assert ("transformers" in each) != gptq
    assert "stacks" not in found["GPTQModel"]
    assert "stacks of model.layers.0.mlp.experts" in stacked["GPTQModel"] or not format.startswith("gptq")
    assert inspect(tmp_path / "stacked").float_modules == ("model.layers.0.mlp.experts",)


def test_vllm_loads_gpt_oss_in_none_of_our_formats(material, tmp_path):
    """It calls attention otherwise than the files do."""
    made = material(format="gptq")
    made.model_config["model_type"] = "gpt_oss"
    assert "MXFP4 and floating point only" in refusals(made.write(tmp_path / "out"))["vLLM"]


def test_the_experts_of_llama_4_were_tried_with_gptqmodel_alone(material, tmp_path):
    made = mixture(material, {})
    made.model_config["model_type"] = "llama4_text"
    found = refusals(made.write(tmp_path / "out"))
    assert "GPTQModel" not in found
    assert "not tried with the experts of llama4_text" in found["vLLM"]
