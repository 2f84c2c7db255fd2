"""A small valid checkpoint as AutoGPTQ would write it, made without gptqkit's writer, for the tests to damage."""

import json

import pytest
import torch
from safetensors.torch import save_file

NAME = "model.layers.0.mlp.up_proj"  # 64 inputs, 32 outputs, 4 bits, groups of 32
CONFIG = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "quant_method": "gptq"}


@pytest.fixture
def build(tmp_path):
    """Write the checkpoint with some tensors replaced (None: left out) and some settings changed."""

    def write(tensors=None, **config):
        held = {
            f"{NAME}.qweight": torch.arange(256, dtype=torch.int32).view(8, 32) * 0x01010101,
            f"{NAME}.qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
            f"{NAME}.scales": torch.full((2, 32), 0.5).half(),
            f"{NAME}.g_idx": (torch.arange(64) // 32).int(),
            f"{NAME}.bias": torch.zeros(32).half(),
            "model.norm.weight": torch.ones(64).half(),
            **(tensors or {}),
        }
        present = {name: tensor for name, tensor in held.items() if tensor is not None}
        save_file(present, tmp_path / "model.safetensors")
        settings = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
        return tmp_path

    return write
