"""Damaged files, indices that point elsewhere, and pickles are refused by name."""

import json
import os
import pickle
import re
import resource
import struct
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import gptqkit
from gptqkit.cli import main
from gptqkit.errors import CheckpointError, DatasetUnavailableError
from gptqkit.export.checkpoint import open_checkpoint
from support.jobs import processes
from support.models import build as make_model
from support.models import save
from support.pipeline import quantize

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
    [damage] = gptqkit.doctor(file.parent).damage
    assert re.search(r"model\.safetensors is damaged or cut off .*; no repair: download again$", str(damage))


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
    [damage] = gptqkit.doctor(build()).damage
    assert (damage.repair is None) == any(lost in str(content) for lost in ("lost", "00002"))


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
    with pytest.raises(DatasetUnavailableError, match=r"there is no folder .*nowhere"):
        gptqkit.inspect(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.model"])
@pytest.mark.parametrize("kind", ["pipe", "device", "secret", "outside", "loop", "folder"])
def test_only_regular_files_of_the_folder_are_opened(build, tmp_path_factory, file, kind):
    path, away = build(), tmp_path_factory.mktemp("away")
    (away / "secret").write_bytes((path / file).read_bytes() if (path / file).exists() else b"secret")
    (path / file).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path / file)
    elif kind == "folder":
        (path / file).mkdir()
    else:
        target = {"device": "/dev/zero", "secret": away / "secret", "outside": "../secret", "loop": file}[kind]
        (path.parent / "secret").write_bytes(b"secret")
        (path / file).symlink_to(target)
    convert = partial(gptqkit.convert, target=away / "out", format="gptq_v2")
    for attempt in (gptqkit.load, gptqkit.inspect, gptqkit.doctor, convert):
        with pytest.raises(
            CheckpointError, match=rf"{file} (is no regular file|is a link that leaves|cannot be opened)"
        ):
            attempt(path)
    assert not (away / "out").exists()


def test_links_inside_the_hub_cache_are_how_the_hub_stores_files(build, tmp_path):
    repository = tmp_path / "models--someone--model"
    snapshot, blobs = repository / "snapshots" / "1f2e", repository / "blobs"
    for folder in (snapshot / "1_Pooling", blobs):
        folder.mkdir(parents=True)
    path = build()
    for number, file in enumerate(("config.json", "model.safetensors")):
        (path / file).rename(blobs / str(number))
        (snapshot / file).symlink_to(f"../../blobs/{number}")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/0")
    gptqkit.convert(snapshot, tmp_path / "out", format="gptq_v2")
    assert not (tmp_path / "out" / "1_Pooling" / "config.json").is_symlink()
    (tmp_path / "secret").write_text("secret")
    (snapshot / "notes.txt").symlink_to("../../../secret")
    with pytest.raises(CheckpointError, match=r"notes\.txt is a link that leaves"):
        open_checkpoint(snapshot)


def test_code_and_pickles_in_folders_are_never_copied(tmp_path):
    source = tmp_path / "model"
    save(make_model("llama"), source)
    for file in (
        "1_Pooling/config.json",
        "1_Pooling/evil.py",
        "1_Pooling/deep/pytorch_model.bin",
        "1_Pooling/deep/a.txt",
    ):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text("{}")
    out = quantize(source, tmp_path / "q", method="rtn").path
    (out / "more").mkdir()
    (out / "more" / "evil.py").write_text("")
    gptqkit.convert(out, tmp_path / "converted", format="gptq")
    for made in (out / "1_Pooling", tmp_path / "converted" / "1_Pooling"):
        assert sorted(str(each.relative_to(made)) for each in made.rglob("*")) == ["config.json", "deep", "deep/a.txt"]
    assert list((tmp_path / "converted" / "more").iterdir()) == []
    (source / "1_Pooling" / "passwords").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="passwords is a link that leaves"):
        quantize(source, tmp_path / "again", method="rtn")


def test_json_and_other_text_up_to_a_size_is_read(build):
    path = build()
    for name in ("config.json", "tokenizer.json"):
        (path / name).touch()
        before = (path / name).stat().st_size
        os.truncate(path / name, 1 << 40)  # takes no room on the disk
        with pytest.raises(CheckpointError, match=rf"{name} has 1099511627776 bytes; no more than 268435456 are read"):
            open_checkpoint(path)
        os.truncate(path / name, before)
    open_checkpoint(path)


@pytest.mark.parametrize("content", [b'{"a": "\\ud800"}', b'{"a": "\xed\xa0\x80"}', b'{"a": ' + b"9" * 5000 + b"}"])
def test_text_that_nobody_could_write_again(build, content):
    path = build()
    (path / "quantize_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"quantize_config\.json is not JSON"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["1." * 40_000, "a" * 501, "a\nb", "a\x1b[2J", "\N{SUPERSCRIPT TWO}.weight", "\u202e"])
def test_names_of_tensors_are_short_and_plain(build, name):
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"model\.safetensors holds a tensor called .*printable ASCII") as caught:
        open_checkpoint(build({name: torch.zeros(1)}))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert time.monotonic() - begin < 1


def limited(folder, out, room):
    """Run two commands with so much memory beyond what the imports took."""
    assert main(["inspect", str(folder)]) == 0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + room, -1))
    codes = [main(["inspect", str(folder)]), main(["convert", str(folder), str(out), "--format", "gptq_v2"])]
    sys.exit(10 * codes[0] + codes[1])


@pytest.mark.parametrize("room", [pytest.param(1 << 20, marks=pytest.mark.slow), 160 << 20])
def test_too_little_memory_is_one_line(build, tmp_path_factory, room):
    """Too little to map the file, and enough for that, but not to write it."""
    path = build({"lm_head.weight": torch.ones(32 << 20).half()})
    out = tmp_path_factory.mktemp("made") / "out"
    [ended] = processes(limited, path, out, room, log=out.with_name("say"))
    assert ended.code == (11 if room < 2 << 20 else 1), ended.text
    assert re.search(r"gptqkit: error: .*memory", ended.text)
    assert "Traceback" not in ended.text
    assert [each.name for each in out.parent.iterdir()] == ["say-0"]
