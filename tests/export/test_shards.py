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


def write(path, *sizes):
    return write_files(path / "part", tensors(*sizes).items(), max_bytes=1000)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_a_file_is_full_before_the_next_one_begins(tmp_path):
    files = write(tmp_path, 600, 300, 200, 2000, 100, 100)
    assert [file.name for file in files] == [f"part.{number}.safetensors" for number in range(4)]
    assert [list(load_file(file)) for file in files] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]  # t3 is too large
    assert [list(load_file(file)) for file in write(tmp_path)] == [[]]


def test_the_index_is_like_that_of_transformers(tmp_path, out):
    given = tensors(600, 300, 2000, 700, 100)
    join_files(write_files(tmp_path / "part", given.items(), max_bytes=1000), out, max_bytes=1000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted(file.name for file in out.glob("*.safetensors"))
    assert names == [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == {name: file for file in names for name in load_file(out / file)}
    assert list(index["weight_map"]) == sorted(given)
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in given.values())}
    found = Shards.of_folder(out)
    assert all(torch.equal(found.get(name), tensor) for name, tensor in given.items())


@pytest.mark.parametrize("links", [True, False])
def test_small_files_are_joined_and_large_ones_stay_as_they_are(tmp_path, out, monkeypatch, links):
    """Every file is synced when it is complete; without hard links large ones are copied."""
    sizes, sync = {}, os.fsync

    def record(descriptor):
        sync(descriptor)
        sizes[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def refuse(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fsync", record)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shards, "JOINED_BYTES", 2500)
    files = write(tmp_path, 600, 600, 600, 4000, 600, 4000, 4000)
    before = [file.read_bytes() for file in files]
    join_files(files, out)
    made = sorted(out.glob("*.safetensors"))
    assert [list(load_file(file)) for file in made] == [["t0", "t1", "t2"], ["t3"], ["t4"], ["t5"], ["t6"]]
    assert [file.read_bytes() for file in made[1:]] == before[-4:]
    assert [file.samefile(part) for file, part in zip(made[1:], files[-4:], strict=True)] == [links] * 4
    assert [file.read_bytes() for file in files] == before
    for file in [*files, made[0]]:
        assert sizes[file.stat().st_ino] == file.stat().st_size


def test_parts_that_do_not_fit_together_are_refused(tmp_path, out):
    [one], other = write_files(tmp_path / "a", tensors(100).items()), write(tmp_path, 600, 600)
    with pytest.raises(CheckpointError, match=r"t0 stands in two files, .*a\.0\.safetensors and .*part\.0\."):
        join_files([one, *other], out)
    other[1].write_bytes(other[1].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"part\.1\.safetensors is damaged or cut off"):
        join_files(other, out)


def test_views_and_shared_memory_are_written_without_what_surrounds_them(tmp_path):
    whole = torch.randn(400, 8)
    given = {"a": whole[:2], "b": whole[2:4], "c": torch.randn(8, 3).t(), "d": whole[:2], "e": whole[1:3].view(16)}
    given |= {"scalar": torch.tensor(3), "empty": torch.zeros(0, 4)}
    before = {name: tensor.clone() for name, tensor in given.items()}
    [file] = write_files(tmp_path / "part", given.items())
    assert file.stat().st_size < 1500
    found = load_file(file)
    assert all(same_bits(found[name], tensor) for name, tensor in before.items())
    assert all(torch.equal(given[name], tensor) for name, tensor in before.items())


def test_a_byte_that_reads_back_differently_is_noticed(tmp_path, out, faulty_disk):
    files = write(tmp_path, 600, 600)
    faulty_disk("out")
    with pytest.raises(CheckpointError, match=r"t\d in .*model\.safetensors reads back differently"):
        join_files(files, out)


def test_same_bits_looks_at_bits():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    for other in (torch.tensor([-0.0, 1.0]), zero.double(), zero[None]):
        assert not same_bits(zero, other)


def test_a_file_named_by_its_config_is_preferred_to_others(tmp_path):
    save_file(tensors(100), tmp_path / "gptq_model-4bit-32g.safetensors")
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert list(Shards.of_folder(tmp_path, "gptq_model-4bit-32g").where) == ["t0"]
    with pytest.raises(CheckpointError, match=r"2 files of weights .* and no index"):
        Shards.of_folder(tmp_path, "../elsewhere")
    (tmp_path / "other.safetensors").unlink()
    (tmp_path / "gptq_model-4bit-32g.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"1 files of weights .* and no index"):
        Shards.of_folder(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    assert list(Shards.of_folder(tmp_path).where) == ["t0"]
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="several indices"):
        Shards.of_folder(tmp_path)
