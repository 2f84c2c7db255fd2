"""A small checkpoint with two blocks, and what it was made of."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.quantized import QuantizedWeight
from support.checkpoints import write_checkpoint

MODULES = {"self_attn.q_proj": (64, 64), "mlp.down_proj": (64, 96)}


def random_weight(
    rows: int, columns: int, bits: int, group_size: int | None, *, sym: bool, low: int = 1, seed: int = 0
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed + bits)
    size = group_size or columns
    groups = -(-columns // size)
    zero = torch.randint(low, 1 << bits, (rows, groups), generator=generator, dtype=torch.int16)
    return QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8),
        scale=(torch.rand(rows, groups, generator=generator) / 7 + 1e-4).half(),
        zero=zero.fill_(1 << (bits - 1)) if sym else zero,
        group_index=(torch.arange(columns) // size).to(torch.int32),
        bits=bits,
        group_size=size,
        sym=sym,
    )


@dataclass
class Material:
    """Everything that `write_checkpoint` needs."""

    config: QuantizeConfig
    weights: dict[str, QuantizedWeight]
    other_tensors: dict[str, Tensor]
    model_config: dict[str, Any] = field(
        default_factory=lambda: {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float16",
            "_name_or_path": "/home/somebody/model",
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        }
    )
    report: dict[str, Any] = field(default_factory=lambda: {"model": "org/name", "samples": 4, "sequence_length": 64})

    def write(self, out: Path, **options: Any) -> Path:
        write_checkpoint(
            out,
            config=self.config,
            weights=self.weights,
            other_tensors=self.other_tensors,
            model_config=self.model_config,
            report=self.report,
            **options,
        )
        return out


@pytest.fixture
def material() -> Callable[..., Material]:
    """Make the material of a two-block checkpoint with the given settings."""

    def make(*, low: int = 1, **settings: Any) -> Material:
        config = QuantizeConfig(**{"group_size": 32, **settings})
        weights = {}
        others: dict[str, Tensor] = {"model.embed_tokens.weight": torch.randn(10, 64).bfloat16()}
        for block in range(2):
            for number, (inner, (rows, columns)) in enumerate(MODULES.items()):
                name = f"model.layers.{block}.{inner}"
                own = config.for_module(name)
                if own is None:
                    others[f"{name}.weight"] = torch.randn(rows, columns).half()
                    continue
                seed = 100 * block + 10 * number
                weights[name] = random_weight(rows, columns, own.bits, own.group_size, sym=own.sym, low=low, seed=seed)
            others[f"model.layers.{block}.self_attn.q_proj.bias"] = torch.randn(64).half()
            others[f"model.layers.{block}.norm.weight"] = torch.ones(64)
        return Material(config, weights, others)

    return make
