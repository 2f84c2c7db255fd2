"""Hidden states between blocks, wherever they are kept."""

import pytest
import torch

from gptqkit.calibration import cache
from gptqkit.calibration.cache import ActivationCache
from gptqkit.errors import CheckpointError, ShapeError

CPU, PLACES = torch.device("cpu"), ("device", "memory", "disk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
def test_states_are_read_as_they_were_written_also_by_other_processes(place, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_SLICE", 100)  # less than two samples
    expected = torch.randn(7, 3, 5).to(dtype)
    shares = {tmp_path / "first": range(4), tmp_path / "second": range(4, 7), tmp_path / "none": range(7, 7)}
    for file, share in shares.items():
        states = ActivationCache(share, (3, 5), dtype, CPU, place, file)
        for sample in share:
            states.write(range(sample, sample + 1), expected[sample : sample + 1])
        assert torch.equal(states.read(share), expected[share.start : share.stop])
        states.save(file)
    for samples in (range(7), range(3, 6), range(2)):
        for other in PLACES:
            loaded = ActivationCache(samples, (3, 5), dtype, CPU, other, tmp_path / "again")
            for file, share in shares.items():
                loaded.load(file, share)
            assert torch.equal(loaded.read(samples), expected[samples.start : samples.stop])


@pytest.mark.parametrize("place", PLACES)
def test_only_on_disk_are_the_states_before_a_block_kept(place, tmp_path):
    before = ActivationCache(range(2), (3,), torch.float32, CPU, place, tmp_path / "before")
    before.write(range(2), torch.ones(2, 3))
    after = before.successor(tmp_path / "after")
    after.write(range(2), torch.zeros(2, 3))
    assert not after.read(range(2)).any()
    assert bool(before.read(range(2)).any()) == (place == "disk")
    assert (tmp_path / "before").exists() == (tmp_path / "after").exists() == (place == "disk")


def test_what_would_be_read_wrongly_is_refused(tmp_path):
    states = ActivationCache(range(2), (3, 5), torch.float32, CPU, "memory")
    for wrong in (torch.zeros(2, 3, 5, dtype=torch.float16), torch.zeros(2, 5, 3)):
        with pytest.raises(ShapeError, match=r"those of 2 samples that entered the first block were torch\.float32"):
            states.write(range(2), wrong)
    states.write(range(2), torch.zeros(2, 3, 5))
    states.save(tmp_path / "states")
    (tmp_path / "states").write_bytes((tmp_path / "states").read_bytes()[:-1])
    for file in ("states", "missing"):
        with pytest.raises(CheckpointError, match=f"{file} is not 120 bytes long"):
            states.load(tmp_path / file, range(2))
    with pytest.raises(OSError, match="nowhere"):
        ActivationCache(range(2), (3, 5), torch.float32, CPU, "disk", tmp_path / "nowhere" / "states")
