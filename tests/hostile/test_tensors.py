"""Tensors and configs that contradict each other are refused with the tensor's name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from gptqkit.errors import CheckpointError
from gptqkit.export.checkpoint import open_checkpoint

NAME = "model.layers.0.mlp.up_proj"
ESCAPED = NAME.replace(".", r"\.")


@pytest.mark.parametrize("key", ["qweight", "qzeros", "scales"])
def test_missing(build, key):
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.{key} is missing"):
        open_checkpoint(build({f"{NAME}.{key}": None}))


def test_a_layer_of_which_only_the_index_is_left(build):
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
def test_wrong_dtype_shape_or_range(build, key, tensor):
    with pytest.raises(CheckpointError, match=ESCAPED):
        open_checkpoint(build({f"{NAME}.{key}": tensor}))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_not_finite(build, value):
    checkpoint = open_checkpoint(build({f"{NAME}.scales": torch.full((2, 32), value).half()}))
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.scales holds NaN or infinity"):
        checkpoint.weight(NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 2}, "config"),
        ({"bits": 3}, "config"),
        ({"bits": 8}, "config"),
        ({"group_size": -1}, "one group per row, as the quantization config says"),
        ({"group_size": 16}, "groups of 16, as the quantization config says"),
        ({"group_size": 10**9}, "has shape"),
        ({"dynamic": {"+:.*up_proj": {"bits": 8}}}, "8 bits"),
        ({"dynamic": {"+:.*up_proj": {"group_size": 64}}}, "has shape"),
    ],
)
def test_settings_that_contradict_the_tensors(build, change, message):
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.\w+ .*{message}"):
        open_checkpoint(build(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "the checkpoint format is 'awq'; gptq, gptq_v2 are read here"),
        ({"quant_method": 4}, "checkpoint format is '4'"),
        ({"checkpoint_format": "marlin"}, "checkpoint format is 'marlin'"),
        ({"format": "gptq_v3"}, "checkpoint format is 'gptq_v3'"),
        ({"checkpoint_format": "bitblas", "format": "gptq"}, "checkpoint format is 'bitblas'"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint format is"),
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
        ({"dynamic": ["x"]}, "dynamic must map"),
        ({"dynamic": {"x": 4}}, "dynamic must map"),
        ({"dynamic": {"+:(": {}}}, "not a regular expression"),
        ({"dynamic": {".*": {"bits": 7}}}, "bits is 7"),
    ],
)
def test_settings_that_cannot_be(build, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(build(**change))


@pytest.mark.parametrize(("key", "value"), [("bits", 3), ("group_size", 128), ("checkpoint_format", "gptq_v2")])
def test_two_configs_that_contradict_each_other(build, key, value):
    path = build(checkpoint_format="gptq")
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    (path / "quantize_config.json").write_text(json.dumps(settings))
    open_checkpoint(path)
    (path / "quantize_config.json").write_text(json.dumps({**settings, key: value}))
    with pytest.raises(CheckpointError, match=f"config.json says {key} .* but quantize_config.json says"):
        open_checkpoint(path)


def test_no_quantized_tensor(build):
    path = build()
    save_file({"model.norm.weight": torch.ones(4)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"none ends in \.qweight"):
        open_checkpoint(path)


def test_unknown_names(build):
    checkpoint = open_checkpoint(build())
    with pytest.raises(CheckpointError, match="no tensor 'nowhere'"):
        checkpoint.tensor("nowhere")
    with pytest.raises(CheckpointError, match="no quantized layer 'nowhere'"):
        checkpoint.weight("nowhere")
