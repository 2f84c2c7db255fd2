"""Tensors and configs that contradict each other are refused with the tensor's name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gptqkit.errors import CheckpointError
from gptqkit.export.reader import open_checkpoint

Build = Callable[..., Path]

NAME = "model.layers.0.mlp.up_proj"
ESCAPED = NAME.replace(".", r"\.")


@pytest.mark.parametrize("key", ["qweight", "qzeros", "scales"])
def test_missing(build: Build, key: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.{key} is missing"):
        open_checkpoint(build({f"{NAME}.{key}": None}))


def test_a_layer_of_which_only_the_index_is_left(build: Build) -> None:
    with pytest.raises(CheckpointError, match=r"lost\.qweight is missing"):
        open_checkpoint(build({"lost.g_idx": torch.zeros(4, dtype=torch.int32)}))


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        ("qweight", torch.zeros(8, 32, dtype=torch.int64)),
        ("qweight", torch.zeros(8, 32, dtype=torch.uint8)),
        ("qweight", torch.zeros(8, 32)),
        ("qweight", torch.zeros(256, dtype=torch.int32)),
        ("qweight", torch.zeros(0, 32, dtype=torch.int32)),
        ("qweight", torch.zeros(8, 0, dtype=torch.int32)),
        ("qweight", torch.zeros(8, 31, dtype=torch.int32)),
        ("qzeros", torch.zeros(2, 4, dtype=torch.int16)),
        ("qzeros", torch.zeros(3, 4, dtype=torch.int32)),
        ("qzeros", torch.zeros(2, 32, dtype=torch.int32)),
        ("qzeros", torch.zeros((), dtype=torch.int32)),
        ("scales", torch.ones(2, 32)),
        ("scales", torch.ones(2, 32, dtype=torch.int8)),
        ("scales", torch.ones(1, 32).half()),
        ("scales", torch.ones(32, 2).half()),
        ("g_idx", torch.zeros(64)),
        ("g_idx", torch.zeros(64, dtype=torch.int64)),
        ("g_idx", torch.zeros(0, dtype=torch.int32)),
        ("g_idx", torch.zeros(63, dtype=torch.int32)),
        ("g_idx", torch.full((64,), 2, dtype=torch.int32)),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32)),
        ("g_idx", torch.full((64,), 2**31 - 1, dtype=torch.int32)),
        ("bias", torch.zeros(33).half()),
        ("bias", torch.zeros(32, dtype=torch.int32)),
    ],
)
def test_wrong_dtype_shape_or_range(build: Build, key: str, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match=ESCAPED):
        open_checkpoint(build({f"{NAME}.{key}": tensor}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_not_finite(build: Build, value: float) -> None:
    checkpoint = open_checkpoint(build({f"{NAME}.scales": torch.full((2, 32), value).half()}))
    for read in (checkpoint.layer, checkpoint.quantized_weight):
        with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.scales holds NaN or infinity"):
            read(NAME)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_bits_that_contradict_the_tensors(build: Build, bits: int) -> None:
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.\w+ .*config"):
        open_checkpoint(build(bits=bits))


@pytest.mark.parametrize("group_size", [-1, 16, 64, 10**9])
def test_group_size_that_contradicts_the_tensors(build: Build, group_size: int) -> None:
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.\w+ has shape"):
        open_checkpoint(build(group_size=group_size))


def test_dynamic_bits_that_contradict_the_tensors(build: Build) -> None:
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.\w+ .*8 bits"):
        open_checkpoint(build(dynamic={"+:.*up_proj": {"bits": 8}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
        ({"quant_method": 4}, "quant_method is 4"),
        ({"checkpoint_format": "marlin"}, "checkpoint format is 'marlin'"),
        ({"format": "gptq_v3"}, "checkpoint format is 'gptq_v3'"),
        ({"checkpoint_format": "bitblas", "format": "gptq"}, "checkpoint format is 'bitblas'"),
        ({"checkpoint_format": ["gptq"]}, r"checkpoint format is \['gptq'\]"),
        ({"is_marlin_format": True}, "checkpoint format is 'marlin'"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": None}, "group_size is missing"),
        ({"bits": 5}, "bits is 5"),
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": True}, "bits is True"),
        ({"bits": 4.0}, "bits is 4.0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": -2}, "group_size is -2"),
        ({"group_size": "128"}, "group_size is '128'"),
        ({"dynamic": []}, None),
        ({"dynamic": ["x"]}, "dynamic must map"),
        ({"dynamic": {"x": 4}}, "dynamic must map"),
        ({"dynamic": {"+:(": {}}}, "no regular expression"),
        ({"dynamic": {".*": {"bits": 7}}}, "bits is 7"),
    ],
)
def test_settings_that_cannot_be(build: Build, change: dict[str, Any], message: str | None) -> None:
    path = build(**change)
    if message is None:
        open_checkpoint(path)
        return
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(("key", "value"), [("bits", 3), ("group_size", 128), ("checkpoint_format", "gptq_v2")])
def test_two_configs_that_contradict_each_other(build: Build, key: str, value: object) -> None:
    path = build(checkpoint_format="gptq")
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    (path / "quantize_config.json").write_text(json.dumps(settings))
    open_checkpoint(path)
    (path / "quantize_config.json").write_text(json.dumps({**settings, key: value}))
    with pytest.raises(CheckpointError, match=f"config.json says {key} .* but quantize_config.json says"):
        open_checkpoint(path)


def test_no_quantized_tensor(build: Build) -> None:
    path = build()
    save_file({"model.norm.weight": torch.ones(4)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"none ends in \.qweight"):
        open_checkpoint(path)


def test_unknown_names(build: Build) -> None:
    checkpoint = open_checkpoint(build())
    with pytest.raises(CheckpointError, match="no tensor 'nowhere'"):
        checkpoint.tensor("nowhere")
    for read in (checkpoint.layer, checkpoint.quantized_weight, checkpoint.zeros):
        with pytest.raises(CheckpointError, match="no quantized layer 'nowhere'"):
            read("nowhere")
