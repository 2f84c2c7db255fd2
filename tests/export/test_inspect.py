"""What `inspect` says against sizes counted by hand and against what is known of the readers."""

import json
import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit.export.inspect import inspect
from gptqkit.quantizer.config import ModuleOverride

ALL = {"gptqkit", "GPTQModel", "transformers+gptqmodel", "vLLM", "SGLang", "AutoGPTQ"}


def test_sizes_by_hand(material, tmp_path):
    summary = inspect(material(bits=3).write(tmp_path / "out"))
    weights = 2 * (64 * 64 + 64 * 96)
    codes, groups = weights * 3 // 8, 2 * (64 * 2 + 64 * 3)
    packed = codes + groups * 2 + groups * 3 // 8 + 2 * 4 * (64 + 96)  # codes, scales, zeros, g_idx
    assert summary.quantized_weights == weights
    assert summary.packed_bytes == packed
    assert summary.bits_per_weight == packed * 8 / weights
    assert summary.other_parameters == 640 + 2 * (64 + 64)
    assert summary.other_bytes == 640 * 2 + 2 * (64 * 2 + 64 * 4)
    assert (summary.format, summary.bits, summary.group_sizes) == ("gptq_v2", {3: 4}, {32: 4})
    assert summary.writer is not None
    assert summary.writer.startswith("gptqkit:")
    assert json.loads(json.dumps(summary.to_dict()))["quantized_layers"] == 4


def loaders(path):
    """The reasons of the readers that refuse."""
    summary = inspect(path)
    assert {reader.name for reader in summary.readers} == ALL
    assert all(reader.loads != bool(reader.reasons) for reader in summary.readers)
    return {reader.name: reader.reasons for reader in summary.readers if not reader.loads}


@pytest.mark.parametrize(
    ("settings", "refusing"),
    [
        ({"bits": 4, "sym": True, "format": "gptq"}, {"vLLM"}),  # 64 and 96 inputs are no multiples of 128
        ({"bits": 4, "sym": True, "format": "gptq_v2"}, {"vLLM", "AutoGPTQ"}),
        ({"bits": 4, "sym": False, "format": "gptq"}, {"vLLM", "GPTQModel"}),
        ({"bits": 3, "sym": True, "format": "gptq"}, {"vLLM"}),
    ],
)
def test_readers_by_format(material, tmp_path, settings, refusing):
    assert set(loaders(material(**settings).write(tmp_path / "out"))) == refusing


def test_vllm_reasons(material, tmp_path):
    reasons = " ".join(loaders(material(bits=3, sym=False).write(tmp_path / "a"))["vLLM"])
    assert "serves 4 and 8 bits, not 3" in reasons
    assert "symmetric checkpoints only" in reasons
    assert "has 96 and 64" in reasons
    made = material(desc_act=True)
    made.weights["model.layers.0.mlp.down_proj"].group_index.copy_(torch.arange(96) % 3)
    reasons = " ".join(loaders(made.write(tmp_path / "b"))["vLLM"])
    assert "rejects desc_act" in reasons
    assert "ignores g_idx" in reasons


def test_sglang_computes_other_kinds_in_float16_only(material, tmp_path):
    made = material(bits=2)
    made.model_config["dtype"] = "bfloat16"
    assert "float16 only" in loaders(made.write(tmp_path / "out"))["SGLang"][0]


def test_mixed_settings_and_skipped_modules(material, tmp_path):
    mixed = loaders(material(format="gptq", overrides={"q_proj": ModuleOverride(bits=8)}).write(tmp_path / "a"))
    assert set(mixed) == {"vLLM", "transformers+gptqmodel", "AutoGPTQ"}
    everywhere = {"down_proj": ModuleOverride(skip=True)}
    assert set(loaders(material(format="gptq", overrides=everywhere).write(tmp_path / "b"))) == {"vLLM", "AutoGPTQ"}
    in_one = {r"0\.mlp": ModuleOverride(skip=True)}
    reasons = loaders(material(format="gptq", overrides=in_one).write(tmp_path / "c"))
    assert "in some blocks" in reasons["transformers+gptqmodel"][0]


def test_missing_group_index(material, tmp_path):
    out = material(format="gptq").write(tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if not name.endswith("g_idx")},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert "needs g_idx, which 4 layers lack" in loaders(out)["transformers+gptqmodel"]


def test_fused_projections_must_agree(material, tmp_path):
    made = material()
    for block in range(2):
        source = f"model.layers.{block}.self_attn.q_proj"
        made.weights[source.replace("q_proj", "v_proj")] = made.weights[source]
        made.other_tensors[source.replace("q_proj", "k_proj.weight")] = torch.randn(64, 64)
    reasons = loaders(made.write(tmp_path / "out"))
    assert any("qkv_proj quantized alike" in reason for reason in reasons["SGLang"])


def test_kinds_of_models_that_were_not_tried_are_not_promised(material, tmp_path):
    made = material(format="gptq")
    made.model_config["architectures"] = ["LlavaForConditionalGeneration"]
    reasons = loaders(made.write(tmp_path / "composite"))
    assert set(reasons) == ALL - {"gptqkit"}
    assert all("not with LlavaForConditionalGeneration" in each[0] for each in reasons.values())
    made = material(format="gptq")
    weight = made.weights["model.layers.0.self_attn.q_proj"]
    made.weights["model.layers.0.mlp.experts.0.gate_proj"] = weight
    assert set(loaders(made.write(tmp_path / "mixture"))) == ALL - {"gptqkit", "GPTQModel"}
    made.weights["model.layers.0.block_sparse_moe.experts.0.w1"] = weight
    assert "under other names" in loaders(made.write(tmp_path / "mixtral"))["GPTQModel"][0]
