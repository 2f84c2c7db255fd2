"""Damaged files, indices that point elsewhere, and pickles are refused by name."""

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

import gptqkit
from gptqkit.errors import CheckpointError
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.inspect import inspect

INDEX = "model.safetensors.index.json"


def test_the_undamaged_checkpoint_opens(build):
    assert list(open_checkpoint(build()).layers) == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_truncated(build, keep):
    file = build() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut off .*fetch it again"):
        open_checkpoint(file.parent)


def raw(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin, end, shape, dtype="I32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        raw({"a.qweight": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),  # overlap
        raw({"a.qweight": entry(0, 8, [2]), "b": entry(12, 20, [2])}, bytes(20)),  # hole
        raw({"a.qweight": entry(0, 1 << 40, [1 << 38])}, bytes(12)),  # beyond the end
        raw({"a.qweight": entry(8, 0, [2])}, bytes(12)),  # backwards
        raw({"a.qweight": entry(0, 8, [3])}, bytes(8)),  # shape and offsets disagree
        raw({"a.qweight": entry(0, 8, [1 << 62, 1 << 62])}, bytes(8)),  # shape overflows
        raw({"a.qweight": entry(0, 8, [2], "I31")}, bytes(8)),  # no such dtype
        raw(b"{not json", bytes(8)),
        raw(b"[]", bytes(8)),
        struct.pack("<Q", 1 << 62) + bytes(16),  # header length beyond the file
        b"\x80\x04" + bytes(64),  # a pickle's first bytes
    ],
)
def test_bad_headers(build, content):
    file = build() / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_checkpoint(file.parent)


@pytest.mark.parametrize(
    "target",
    [
        "../model.safetensors",
        "/etc/passwd",
        "/tmp/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "..",
        "",
        "model.bin",
        "model.safetensors\0",
        7,
        None,
    ],
)
def test_an_index_that_points_elsewhere(build, target):
    path = build()
    (path / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": target}}))
    with pytest.raises(CheckpointError, match="only safetensors files beside the index are opened"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, r"index\.json has no weight_map"),
        ({"weight_map": {}}, r"index\.json has no weight_map"),
        ({"weight_map": []}, r"index\.json has no weight_map"),
        ({"weight_map": {"x": "model-00002-of-00002.safetensors"}}, r"model-00002-of-00002\.safetensors is missing"),
        ({"weight_map": {"lost.weight": "model.safetensors"}}, r"puts lost\.weight into .*, which does not hold it"),
    ],
)
def test_an_index_that_does_not_fit_the_files(build, content, message):
    path = build()
    (path / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "gptq_model-4bit-128g.pt", "model.pth"])
def test_pickles_are_never_opened(build, name):
    path = build()
    (path / "model.safetensors").unlink()
    (path / name).write_bytes(pickle.dumps(Bomb()))
    for read in (open_checkpoint, gptqkit.load):
        with pytest.raises(CheckpointError, match=r"only pickled weights .*can run any code.*safetensors"):
            read(path)


def test_no_weights_or_too_many(build):
    path = build()
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, path / name)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(a\.safetensors, b\.safetensors\) and no index"):
        open_checkpoint(path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        open_checkpoint(path)


@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", INDEX])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"gptq"', b"\xff\xfe\x00", b"null", b"[" * 200_000])
def test_json_that_is_none(build, file, content):
    path = build()
    (path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        open_checkpoint(path)


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        inspect(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        inspect(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not quantized"):
        inspect(tmp_path)
