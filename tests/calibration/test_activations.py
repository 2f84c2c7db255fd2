"""Hidden states between blocks, wherever they are kept."""

import pytest
import torch

from gptqkit.calibration import activations
from gptqkit.calibration.activations import PLACES, HiddenStates
from gptqkit.errors import CheckpointError, ShapeError

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
def test_states_are_read_as_they_were_written_also_by_others(place, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(activations, "_SLICE", 100)  # less than two samples
    expected = torch.randn(7, 3, 5).to(dtype)
    shares = [range(4), range(4, 7)]
    for share in shares:  # two processes, one file
        states = HiddenStates(share, (3, 5), dtype, CPU, place, tmp_path / "states")
        for sample in share:
            states.write(range(sample, sample + 1), expected[sample : sample + 1])
        assert torch.equal(states.read(share), expected[share.start : share.stop])
        states.save(tmp_path / "states")
    for samples in (range(7), range(3, 6)):
        for other in PLACES:
            loaded = HiddenStates(samples, (3, 5), dtype, CPU, other, tmp_path / "states")
            loaded.load(tmp_path / "states")
            assert torch.equal(loaded.read(samples), expected[samples.start : samples.stop])


def test_what_would_be_read_wrongly_is_refused(tmp_path):
    states = HiddenStates(range(2), (3, 5), torch.float32, CPU, "disk", tmp_path / "states")
    with pytest.raises(ShapeError, match="float16"):
        states.write(range(2), torch.zeros(2, 3, 5, dtype=torch.float16))
    states.write(range(2), torch.zeros(2, 3, 5))
    (tmp_path / "states").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="is cut off"):
        states.read(range(2))
