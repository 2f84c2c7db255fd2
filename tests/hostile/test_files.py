"""Damaged files, indices that point elsewhere, and pickles are refused by name."""

import json
import pickle
import struct

import pytest

import gptqkit
from gptqkit.errors import CheckpointError
from gptqkit.export.checkpoint import open_checkpoint

INDEX = "model.safetensors.index.json"


def test_the_undamaged_checkpoint_opens(build):
    assert list(open_checkpoint(build()).layers) == ["model.layers.0.mlp.up_proj"]


def raw(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(begin, end, shape, dtype="I32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        *(slice(keep) for keep in (0, 4, 8, 100, -1, -1000)),  # truncated
        raw({"a.qweight": entry(0, 8, [2]), "b": entry(4, 12, [2])}, 12),  # overlap
        raw({"a.qweight": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20),  # hole
        raw({"a.qweight": entry(0, 1 << 40, [1 << 38])}, 12),  # beyond the end
        raw({"a.qweight": entry(8, 0, [2])}, 12),  # backwards
        raw({"a.qweight": entry(0, 8, [3])}, 8),  # shape and offsets disagree
        raw({"a.qweight": entry(0, 8, [1 << 62, 1 << 62])}, 8),  # shape overflows
        raw({"a.qweight": entry(0, 8, [2], "I31")}, 8),  # no such dtype
        raw(b"{not json", 8),
        raw(b"[]", 8),
        struct.pack("<Q", 1 << 62) + bytes(16),  # header length beyond the file
        b"\x80\x04" + bytes(64),  # a pickle's first bytes
    ],
)
def test_damaged_tensors(build, content):
    file = build() / "model.safetensors"
    file.write_bytes(file.read_bytes()[content] if isinstance(content, slice) else content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged or cut off .*fetch it again"):
        open_checkpoint(file.parent)


ELSEWHERE = ["../model.safetensors", "/etc/passwd", "/tmp/model.safetensors", "sub/model.safetensors"]
NO_NAMES = ["C:model.safetensors", "..\\model.safetensors", "..", "", "model.bin", "model.safetensors\0", 7, None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(({"weight_map": {"x": target}}, "files beside the index are opened") for target in ELSEWHERE + NO_NAMES),
        *(({"weight_map": nothing}, r"index\.json has no weight_map") for nothing in ({}, [], None)),
        ({"weight_map": {"x": "model-00002-of-00002.safetensors"}}, r"model-00002-of-00002\.safetensors is missing"),
        ({"weight_map": {"lost.weight": "model.safetensors"}}, r"puts lost\.weight into .*, which does not hold it"),
    ],
)
def test_an_index_that_does_not_fit_the_files_or_points_elsewhere(build, content, message):
    (build() / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(build())


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was opened",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "gptq_model-4bit-128g.pt", "model.pth"])
def test_pickles_are_never_opened(build, name):
    path = build()
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        open_checkpoint(path)
    (path / name).write_bytes(pickle.dumps(Bomb()))
    for read in (open_checkpoint, gptqkit.load):
        with pytest.raises(CheckpointError, match=r"only pickled weights .*can run any code.*safetensors"):
            read(path)


@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", INDEX])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"gptq"', b"\xff\xfe\x00", b"null", b"[" * 200_000])
def test_json_that_is_none(build, file, content):
    path = build()
    (path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        open_checkpoint(path)


def test_no_checkpoint_at_all(tmp_path):
    for content, message in ((None, r"config\.json is missing"), ("{}", "is not quantized")):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=message):
            gptqkit.inspect(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        gptqkit.inspect(tmp_path / "nowhere")
