"""A small valid checkpoint as AutoGPTQ would write it, made without gptqkit's writer, for the tests to damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

NAME = "model.layers.0.mlp.up_proj"  # 64 inputs, 32 outputs, 4 bits, groups of 32


def valid_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{NAME}.qweight": torch.randint(-(1 << 31), 1 << 31, (8, 32), generator=generator).int(),
        f"{NAME}.qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
        f"{NAME}.scales": torch.rand(2, 32, generator=generator).half(),
        f"{NAME}.g_idx": (torch.arange(64) // 32).int(),
        f"{NAME}.bias": torch.zeros(32).half(),
        "model.norm.weight": torch.ones(64).half(),
    }


CONFIG: dict[str, Any] = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "quant_method": "gptq"}

Build = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Write the checkpoint with some tensors replaced (None: left out) and some settings changed."""

    def write(tensors: dict[str, Tensor | None] | None = None, file: str = "model.safetensors", **config: Any) -> Path:
        held = {**valid_tensors(), **(tensors or {})}
        save_file({name: tensor for name, tensor in held.items() if tensor is not None}, tmp_path / file)
        settings = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
        return tmp_path

    return write
