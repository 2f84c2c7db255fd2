"""Damaged and deceiving awq, marlin and compressed-tensors files: refused by name, and nothing is read past them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from gptqkit.errors import CheckpointError
from gptqkit.export import formats
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.formats import find_format
from support.weights import random_weight

NAME = "model.layers.0.mlp.up_proj"
ESCAPED = NAME.replace(".", r"\.")
WEIGHTS = {
    "awq": random_weight(4, 64, 96, 32),
    "marlin": random_weight(4, 256, 256, 128, sym=True),
    "compressed-tensors": random_weight(4, 64, 96, 32),
}
GRID = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
GROUP = {"targets": ["Linear"], "weights": GRID}
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "marlin": {"bits": 4, "group_size": 128, "sym": True, "is_marlin_format": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": GROUP},
    },
}
WORDS = torch.int32


@pytest.fixture
def build(tmp_path):
    """Write a checkpoint of one layer with some of its tensors replaced (None: left out) and settings changed."""

    def write(layout, tensors=(), **config):
        held = find_format(layout).pack(WEIGHTS[layout]) | {"bias": torch.zeros(WEIGHTS[layout].out_features).half()}
        held |= dict(tensors)
        named = {f"{NAME}.{key}": tensor for key, tensor in held.items() if tensor is not None}
        save_file({**named, "model.norm.weight": torch.ones(64).half()}, tmp_path / "model.safetensors")
        settings = {key: value for key, value in {**CONFIGS[layout], **config}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
        return tmp_path

    return write


@pytest.mark.parametrize("layout", WEIGHTS)
def test_the_undamaged_checkpoint_is_read(build, layout):
    found = open_checkpoint(build(layout))
    assert torch.equal(found.weight(NAME).codes, WEIGHTS[layout].codes)
    assert found.declared.format == layout


ZEROS = torch.zeros
DAMAGE = [
    *(
        ("awq", key, None, "is missing; a layer needs qweight, qzeros, scales")
        for key in ("qweight", "qzeros", "scales")
    ),
    ("awq", "qweight", ZEROS(96, 8), "is torch.float32"),
    ("awq", "qweight", ZEROS(96, 8, 1, dtype=WORDS), "with 2 axes is needed"),
    ("awq", "qweight", ZEROS(90, 8, dtype=WORDS), "not a whole number of groups of 32 columns"),
    ("awq", "qweight", ZEROS(0, 8, dtype=WORDS), "not a whole number of groups"),
    ("awq", "qweight", ZEROS(96, 7, dtype=WORDS), "has shape"),
    ("awq", "qzeros", ZEROS(2, 8, dtype=WORDS), r"has shape \(2, 8\); .* needs \(3, 8\)"),
    ("awq", "scales", ZEROS(3, 32).half(), "has shape"),
    ("awq", "scales", ZEROS(3, 64), "is torch.float32"),
    ("awq", "bias", ZEROS(63), "has shape"),
    *(("marlin", key, None, "is missing; a layer needs B, s") for key in ("B", "s")),
    ("marlin", "B", ZEROS(15, 512, dtype=WORDS), "no multiples of 128 columns and 256 rows"),
    ("marlin", "B", ZEROS(16, 500, dtype=WORDS), "no multiples of 128 columns and 256 rows"),
    ("marlin", "B", ZEROS(0, 512, dtype=WORDS), "no multiples of 128 columns and 256 rows"),
    ("marlin", "s", ZEROS(1, 256).half(), "has shape"),
    ("marlin", "workspace", ZEROS(31, dtype=WORDS), "has shape"),
    ("marlin", "workspace", ZEROS(2, 16, dtype=WORDS), "with 1 axes is needed"),
    *(
        ("compressed-tensors", key, None, "is missing; a layer needs weight_packed")
        for key in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    ),
    ("compressed-tensors", "weight_packed", ZEROS(64, 12), "is torch.float32"),
    ("compressed-tensors", "weight_packed", ZEROS(64, 11, dtype=WORDS), "has shape"),
    ("compressed-tensors", "weight_scale", ZEROS(64, 2).half(), "has shape"),
    ("compressed-tensors", "weight_zero_point", ZEROS(64, 3, dtype=WORDS), "has shape"),
    *(
        ("compressed-tensors", "weight_shape", torch.tensor(shape), "is no shape")
        for shape in ([64], [64, 96, 1], [0, 96], [64, -96])
    ),
    ("compressed-tensors", "weight_shape", torch.tensor([64, 96]).short(), "is torch.int16"),
    ("compressed-tensors", "weight_shape", torch.tensor([2**62, 2**62]), "has shape"),
    ("compressed-tensors", "weight_shape", torch.tensor([96, 64]), "has shape"),
    ("compressed-tensors", "weight_g_idx", torch.full((96,), 3, dtype=WORDS), r"spans 3 \.\.\. 3"),
    ("compressed-tensors", "weight_g_idx", torch.full((96,), -1, dtype=WORDS), r"spans -1 \.\.\. -1"),
    ("compressed-tensors", "weight_g_idx", ZEROS(95, dtype=WORDS), "has shape"),
]


@pytest.mark.parametrize(("layout", "key", "tensor", "message"), DAMAGE)
def test_tensors_that_cannot_be(build, layout, key, tensor, message):
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.\w+ .*{message}"):
        open_checkpoint(build(layout, {key: tensor}))


@pytest.mark.parametrize(
    ("layout", "key"), [("awq", "scales"), ("marlin", "s"), ("compressed-tensors", "weight_scale")]
)
def test_scales_that_are_no_numbers(build, layout, key):
    shape = find_format(layout).pack(WEIGHTS[layout])[key].shape
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.{key} holds NaN or infinity"):
        open_checkpoint(build(layout, {key: torch.full(shape, torch.inf).half()})).weight(NAME)


def group(**changes):
    return {"config_groups": {"group_0": {**GROUP, **changes}}}


def grid(**changes):
    return group(weights={**GRID, **changes})


CONFIG_DAMAGE = [
    ("awq", {"bits": 8}, "bits is 8; awq is read here with 4 bits only"),
    ("awq", {"bits": True}, "bits is True"),
    ("awq", {"bits": None}, "bits is None"),
    ("awq", {"group_size": None}, "group_size is missing"),
    ("awq", {"group_size": 0}, "group_size is 0"),
    ("awq", {"group_size": 64}, "groups of 64 columns"),
    ("awq", {"group_size": -1}, "one group per row"),
    ("awq", {"version": "gemv"}, "checkpoint format is 'awq, gemv'"),
    ("awq", {"version": ["gemm"]}, r"checkpoint format is .awq, \['gemm'\]"),
    ("awq", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
    ("awq", {"modules_to_not_convert": [4]}, "modules_to_not_convert must be a list of names"),
    ("marlin", {"group_size": 64}, "group_size 64"),
    ("marlin", {"group_size": -1}, "one group per row"),
    ("marlin", {"bits": 8}, "bits is 8"),
    ("marlin", {"sym": False}, "sym False"),
    ("marlin", {"desc_act": True}, "desc_act True"),
    ("compressed-tensors", {"format": "float-quantized"}, "checkpoint format is 'compressed-tensors, float-quantized'"),
    ("compressed-tensors", {"format": "marlin-24"}, "checkpoint format is 'compressed-tensors, marlin-24'"),
    *(("compressed-tensors", {"config_groups": bad}, "config_groups must map") for bad in (None, {}, [], {"x": 4})),
    ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is set"),
    ("compressed-tensors", {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is set"),
    ("compressed-tensors", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is set"),
    ("compressed-tensors", {"ignore": "lm_head"}, "ignore must be a list of names"),
    ("compressed-tensors", {"ignore": ["re:("]}, r"ignore's 're:\(' is not a regular expression"),
    ("compressed-tensors", {"ignore": ["re:" + "(" * 5000]}, "is not a regular expression"),
    ("compressed-tensors", group(targets=["re:["]), r"targets' 're:\[' is not a regular expression"),
    ("compressed-tensors", group(targets=[4]), "targets must be a list of names"),
    ("compressed-tensors", group(targets=[]), "no group of config_groups has targets"),
    ("compressed-tensors", group(input_activations={"num_bits": 8}), "quantizes input activations"),
    ("compressed-tensors", group(output_activations={}), "quantizes output activations"),
    ("compressed-tensors", group(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
    ("compressed-tensors", group(weights=None), "has no weights"),
    ("compressed-tensors", grid(type="float"), "type of its weights is 'float'"),
    ("compressed-tensors", grid(dynamic=True), "dynamic of its weights is True"),
    ("compressed-tensors", grid(block_structure=[128, 128]), "block_structure of its weights"),
    ("compressed-tensors", grid(strategy="tensor", group_size=None), "strategy 'tensor'"),
    ("compressed-tensors", grid(strategy="channel"), "strategy 'channel' with group_size 32"),
    ("compressed-tensors", grid(group_size=None), "strategy 'group' with group_size None"),
    ("compressed-tensors", grid(group_size="32"), "group_size is '32'"),
    ("compressed-tensors", grid(num_bits=6), "bits is 6"),
    ("compressed-tensors", grid(num_bits=None), "num_bits of its weights is null"),
    ("compressed-tensors", grid(num_bits=8), "has shape"),
    ("compressed-tensors", grid(symmetric="yes"), "symmetric is 'yes'"),
    ("compressed-tensors", grid(symmetric=True), "says symmetric"),
    ("compressed-tensors", grid(actorder="up"), "actorder 'up'"),
    ("compressed-tensors", grid(actorder="group"), r"weight_g_idx is missing; with act-order"),
    ("compressed-tensors", grid(group_size=48), "has shape"),
]


@pytest.mark.parametrize(("layout", "change", "message"), CONFIG_DAMAGE)
def test_configs_that_cannot_be_or_say_more_than_is_read_here(build, layout, change, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(build(layout, **change))


def test_targets_take_no_more_than_their_time(build, monkeypatch):
    monkeypatch.setattr(formats, "MATCHING_SECONDS", 0.2)
    patterns = [r"re:(\w|.)*(\w|.)*(\w|.)*(?<!j)$", r"re:(\w+\.?)+!", "re:" + "(.*)+" * 20 + "!"]
    groups = {"group_0": GROUP, "group_1": {"targets": patterns, "weights": GRID}}
    with pytest.raises(CheckpointError, match=r"takes more than 0\.2 seconds to match"):
        open_checkpoint(build("compressed-tensors", config_groups=groups))
