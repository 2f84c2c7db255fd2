"""Tensors are spread over files as transformers spreads them, and what is written is on the disk as it was given."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit.errors import CheckpointError
from gptqkit.export import shards
from gptqkit.export.shards import Shards, join_files, same_bits, write_files


def tensors(*sizes):
    """float16 tensors of so many bytes."""
    generator = torch.Generator().manual_seed(0)
    return {f"t{number}": torch.randn(size // 2, generator=generator).half() for number, size in enumerate(sizes)}


def contents(files):
    return [list(load_file(file)) for file in files]


def test_a_file_is_full_before_the_next_one_begins(tmp_path):
    given = tensors(600, 300, 200, 2000, 100, 100)
    files = write_files(tmp_path / "part", given.items(), max_bytes=1000)
    assert [file.name for file in files] == [f"part.{number}.safetensors" for number in range(4)]
    assert contents(files) == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]  # t3 is too large and has its own
    found = Shards.of_files(files)
    assert list(found.where) == list(given)
    assert all(torch.equal(found.get(name), tensor) for name, tensor in given.items())
    assert contents(write_files(tmp_path / "none", iter(()))) == [[]]


def test_tensors_are_made_one_after_the_other(tmp_path):
    """A file is written as soon as a tensor was made that does not fit."""
    seen = []

    def make():
        for name, tensor in tensors(600, 600, 600).items():
            seen.append(len(list(tmp_path.iterdir())))
            yield name, tensor

    write_files(tmp_path / "part", make(), max_bytes=1000)
    assert seen == [0, 0, 1]


def test_the_index_is_like_that_of_transformers(tmp_path):
    given = tensors(600, 300, 2000, 700, 100)
    files = write_files(tmp_path / "part", given.items(), max_bytes=1000)
    out = tmp_path / "out"
    out.mkdir()
    join_files(files, out, max_bytes=1000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted(file.name for file in out.glob("*.safetensors"))
    assert names == [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == {name: file for file in names for name in load_file(out / file)}
    assert list(index["weight_map"]) == sorted(given)
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in given.values())}
    found = Shards.of_folder(out)
    assert all(torch.equal(found.get(name), tensor) for name, tensor in given.items())


def test_small_files_are_joined_and_large_ones_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "JOINED_BYTES", 4000)
    sizes = (300, 300, 300, 6000, 300, 6000, 6000)
    files = [
        write_files(tmp_path / f"p{number}", [(name, tensor)])[0]
        for number, (name, tensor) in enumerate(tensors(*sizes).items())
    ]
    before = [file.read_bytes() for file in files]
    out = tmp_path / "out"
    out.mkdir()
    join_files(files, out, max_bytes=8000)
    made = sorted(out.glob("*.safetensors"))
    assert contents(made) == [["t0", "t1", "t2"], ["t3"], ["t4"], ["t5"], ["t6"]]
    assert [file.stat().st_ino for file in made[1:]] == [file.stat().st_ino for file in files[3:]]  # nothing was copied
    assert [file.read_bytes() for file in files] == before
    single = tmp_path / "single"
    single.mkdir()
    join_files(files[:2], single)
    assert [file.name for file in single.iterdir()] == ["model.safetensors"]


def test_without_hard_links_files_are_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files = write_files(tmp_path / "part", tensors(100).items())
    (tmp_path / "out").mkdir()
    join_files(files, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == files[0].read_bytes()


def test_tensors_of_one_name_in_two_files_are_refused(tmp_path):
    files = [write_files(tmp_path / name, tensors(100).items())[0] for name in "ab"]
    with pytest.raises(CheckpointError, match=r"t0 stands in two files, .*a\.0\.safetensors and .*b\.0\.safetensors"):
        join_files(files, tmp_path)


def test_views_and_shared_memory_are_written_without_what_surrounds_them(tmp_path):
    whole = torch.randn(400, 8)
    given = {"a": whole[:2], "b": whole[2:4], "c": torch.randn(8, 3).t(), "d": whole[:2], "e": whole[:2].view(16)}
    given |= {"scalar": torch.tensor(3), "empty": torch.zeros(0, 4)}
    before = {name: tensor.clone() for name, tensor in given.items()}
    [file] = write_files(tmp_path / "part", given.items())
    assert file.stat().st_size < 1500
    found = load_file(file)
    assert all(same_bits(found[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


def test_every_file_is_synced_when_it_is_complete(tmp_path, monkeypatch):
    sizes = {}
    sync = os.fsync

    def record(descriptor):
        sync(descriptor)
        sizes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", record)
    (tmp_path / "out").mkdir()
    join_files(write_files(tmp_path / "part", tensors(600, 600, 100).items(), max_bytes=1000), tmp_path / "out")
    for file in tmp_path.rglob("*.safetensors"):
        assert sizes[file.stat().st_ino] == file.stat().st_size


def test_a_byte_that_reads_back_differently_is_noticed(tmp_path, faulty_disk):
    files = write_files(tmp_path / "part", tensors(100, 100).items(), max_bytes=100)
    (tmp_path / "out").mkdir()
    faulty_disk("out")
    with pytest.raises(CheckpointError, match=r"t\d in .*model\.safetensors reads back differently"):
        join_files(files, tmp_path / "out")


def test_same_bits_looks_at_bits():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, torch.tensor([-0.0, 1.0]))
    assert not same_bits(zero, zero.double())
    assert not same_bits(zero, zero[None])
    assert same_bits(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())


def test_a_damaged_part_is_named(tmp_path):
    files = write_files(tmp_path / "part", tensors(600, 600).items(), max_bytes=1000)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"part\.1\.safetensors is damaged or cut off"):
        join_files(files, tmp_path)


def test_a_file_named_by_its_config_is_preferred_to_others(tmp_path):
    save_file(tensors(100), tmp_path / "gptq_model-4bit-32g.safetensors")
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert list(Shards.of_folder(tmp_path, "gptq_model-4bit-32g").where) == ["t0"]
    with pytest.raises(CheckpointError, match="2 safetensors files .* and no index"):
        Shards.of_folder(tmp_path, "../elsewhere")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(Shards.of_folder(tmp_path, "other").where) == ["x"]


def test_several_indices_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="several indices"):
        Shards.of_folder(tmp_path)
