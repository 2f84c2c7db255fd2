"""A small checkpoint with two blocks and what it was made of, and a disk that stores something else."""

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gptqkit.quantizer.config import QuantizeConfig
from support.checkpoints import write_checkpoint
from support.weights import random_weight

MODULES = {"self_attn.q_proj": (64, 64), "mlp.down_proj": (64, 96)}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float16",
    "_name_or_path": "/home/somebody/model",
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}


@dataclass
class Material:
    """Everything that `write_checkpoint` needs."""

    config: QuantizeConfig
    weights: dict[str, Any]
    other_tensors: dict[str, Any]
    model_config: dict[str, Any] = field(default_factory=LLAMA.copy)
    report: dict[str, Any] = field(default_factory=lambda: {"model": "org/name", "samples": 4, "sequence_length": 64})

    def write(self, out, **options):
        write_checkpoint(out, **{**vars(self), **options})
        return out


@pytest.fixture
def material():
    """Make the material of a two-block checkpoint with the given settings."""

    def make(**settings):
        config = QuantizeConfig(**{"group_size": 32, **settings})
        generator = torch.Generator().manual_seed(0)
        others = {"model.embed_tokens.weight": torch.randn(10, 64, generator=generator).bfloat16()}
        weights = {}
        for block in range(2):
            for number, (inner, shape) in enumerate(MODULES.items()):
                name = f"model.layers.{block}.{inner}"
                own, seed = config.for_module(name), 10 * block + number
                if own is None:
                    others[f"{name}.weight"] = torch.randn(shape, generator=generator).half()
                else:
                    weights[name] = random_weight(own.bits, *shape, own.group_size, sym=own.sym, seed=seed)
            others[f"model.layers.{block}.self_attn.q_proj.bias"] = torch.randn(64, generator=generator).half()
            others[f"model.layers.{block}.norm.weight"] = torch.ones(64)
        return Material(config, weights, others)

    return make


@pytest.fixture
def faulty_disk(monkeypatch):
    """Make the disk store another last byte in safetensors files whose path contains some text."""
    sync = os.fsync

    def start(text):
        def flip(descriptor):
            sync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if text in path and path.endswith(".safetensors"):
                with open(path, "r+b") as file:
                    last = file.seek(-1, os.SEEK_END)
                    byte = file.read(1)[0]
                    file.seek(last)
                    file.write(bytes([byte ^ 1]))

        monkeypatch.setattr(os, "fsync", flip)

    return start
