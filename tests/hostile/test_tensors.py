"""Tensors and configs that contradict each other are refused with the tensor's name."""

import json
import time

import pytest
import torch

from gptqkit import doctor
from gptqkit.errors import CheckpointError
from gptqkit.export import formats
from gptqkit.export.checkpoint import open_checkpoint

NAME = "model.layers.0.mlp.up_proj"
ESCAPED = NAME.replace(".", r"\.")
WORDS = torch.int32


@pytest.mark.parametrize(
    ("key", "tensor"),
    [
        *((key, None) for key in ("qweight", "qzeros", "scales")),
        *(("qweight", torch.zeros(8, 32, dtype=dtype)) for dtype in (torch.int64, torch.float32)),
        *(("qweight", torch.zeros(shape, dtype=WORDS)) for shape in ((256,), (0, 32), (8, 0), (8, 31))),
        ("qzeros", torch.zeros(2, 4, dtype=torch.int16)),
        *(("qzeros", torch.zeros(shape, dtype=WORDS)) for shape in ((3, 4), (2, 32), ())),
        *(("scales", torch.ones(2, 32, dtype=dtype)) for dtype in (torch.float32, torch.int8)),
        *(("scales", torch.ones(shape).half()) for shape in ((1, 32), (32, 2))),
        *(("g_idx", torch.zeros(64, dtype=dtype)) for dtype in (torch.float32, torch.int64)),
        *(("g_idx", torch.zeros(size, dtype=WORDS)) for size in (0, 63)),
        *(("g_idx", torch.full((64,), group, dtype=WORDS)) for group in (2, -1, 2**31 - 1)),
        ("bias", torch.zeros(33).half()),
        ("bias", torch.zeros(32, dtype=WORDS)),
    ],
)
def test_wrong_dtype_shape_or_range_and_what_is_missing(build, key, tensor):
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.{'' if key == 'qweight' else key}"):
        open_checkpoint(build({f"{NAME}.{key}": tensor}))
    for lost in ({}, {"bits": None, "group_size": None}):  # which doctor then finds out from other tensors
        damage = doctor(build({f"{NAME}.{key}": tensor}, **lost)).damage
        assert any(each.repair is None and "\n" not in str(each) for each in damage)


def test_values_and_names_that_nobody_could_use(build):
    for value in (float("nan"), float("inf"), float("-inf")):
        checkpoint = open_checkpoint(build({f"{NAME}.scales": torch.full((2, 32), value).half()}))
        with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.scales holds NaN or infinity"):
            checkpoint.weight(NAME)
        with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.bias holds NaN or infinity"):
            open_checkpoint(build({f"{NAME}.bias": torch.full((32,), value).half()})).bias(NAME)
    with pytest.raises(CheckpointError, match="no tensor 'nowhere'"):
        checkpoint.tensor("nowhere")
    for read in (checkpoint.weight, checkpoint.bias):
        with pytest.raises(CheckpointError, match="no quantized layer 'nowhere'"):
            read("nowhere")
    with pytest.raises(CheckpointError, match=r"lost\.qweight is missing"):
        open_checkpoint(build({"lost.g_idx": torch.zeros(4, dtype=WORDS)}))
    nothing = {f"{NAME}.{key}": None for key in ("qweight", "qzeros", "scales", "g_idx")}
    with pytest.raises(CheckpointError, match=r"none ends in \.qweight"):
        open_checkpoint(build(nothing))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"bits": bits}, "config") for bits in (2, 3, 8)),
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
        ({"quant_method": "aqlm"}, "the checkpoint format is 'aqlm'; gptq, gptq_v2, awq, marlin, "),
        ({"quant_method": 4}, "checkpoint format is '4'"),
        ({"checkpoint_format": "bitblas", "format": "gptq"}, "checkpoint format is 'bitblas'"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint format is"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        *(({key: None}, f"{key} is missing") for key in ("bits", "group_size")),
        *(({"bits": bits}, f"bits is {bits!r}") for bits in (5, "4", True, 4.0, [4])),
        *(({"group_size": size}, f"group_size is {size!r}") for size in (0, -2, "128", True)),
        *(({"dynamic": dynamic}, "dynamic must map") for dynamic in (["x"], {"x": 4})),
        ({"dynamic": {"+:(": {}}}, "not a regular expression"),
        ({"dynamic": {".*": {"bits": 7}}}, "bits is 7"),
    ],
)
def test_settings_that_cannot_be(build, change, message):
    with pytest.raises(CheckpointError, match=message.replace("[", r"\[")):
        open_checkpoint(build(**change))


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "a{9999999999999999999}", "(?P<x", "[a"])
def test_patterns_that_cannot_be(build, pattern):
    with pytest.raises(CheckpointError, match="is not a regular expression"):
        open_checkpoint(build(dynamic={pattern: {}}))


def test_patterns_take_no_more_than_their_time(build, monkeypatch):
    """With Python's own `re` all of these take longer than the world is old."""
    monkeypatch.setattr(formats, "MATCHING_SECONDS", 0.2)
    name = f"model.layers.{'0' * 300}.mlp.up_proj"
    tensors = {f"{name}.qweight": torch.zeros(8, 32, dtype=WORDS), f"{name}.qzeros": torch.zeros(2, 4, dtype=WORDS)}
    tensors |= {f"{name}.scales": torch.ones(2, 32).half()}
    stopped = 0
    for pattern in (
        r"(\w|.)*(\w|.)*(\w|.)*(?<!j)$",
        r"(\w+\.?)+!",
        r"((.*)*)*(?<=zz)$",
        r"(?=(.+)+!)x",
        "(.*)+" * 20 + "!",
    ):
        path, begin = build(tensors, dynamic={f"+:{pattern}": {"sym": False}}), time.monotonic()
        try:
            assert open_checkpoint(path).layers[NAME].sym
        except CheckpointError as error:
            assert str(error).endswith("takes more than 0.2 seconds to match; make it simpler")  # noqa: PT017
            stopped += 1
        assert time.monotonic() - begin < 2
    assert stopped


def test_group_indices_that_are_lost(build):
    """Without them the groups of an act-order checkpoint are unknown, unless there is one, or they are in order."""
    for config in ({}, {"desc_act": True, "static_groups": True}):
        assert not open_checkpoint(build({f"{NAME}.g_idx": None}, **config)).layers[NAME].act_order
    whole = {f"{NAME}.qzeros": torch.full((1, 4), 7, dtype=WORDS), f"{NAME}.scales": torch.ones(1, 32).half()}
    open_checkpoint(build({f"{NAME}.g_idx": None, **whole}, desc_act=True, group_size=-1))
    with pytest.raises(CheckpointError, match=rf"{ESCAPED}\.g_idx is missing; with act-order it says"):
        open_checkpoint(build({f"{NAME}.g_idx": None}, desc_act=True))


@pytest.mark.parametrize(("key", "value"), [("bits", 3), ("group_size", 128), ("checkpoint_format", "gptq_v2")])
def test_two_configs_that_contradict_each_other(build, key, value):
    path = build(checkpoint_format="gptq")
    settings = json.loads((path / "config.json").read_text())["quantization_config"]
    (path / "quantize_config.json").write_text(json.dumps(settings))
    open_checkpoint(path)
    (path / "quantize_config.json").write_text(json.dumps({**settings, key: value}))
    with pytest.raises(CheckpointError, match=f"config.json says {key} .* but quantize_config.json says"):
        open_checkpoint(path)
