"""Which rows of what a module receives count."""

import math

import pytest
import torch

from gptqkit.calibration.batches import Batches
from gptqkit.calibration.samples import Samples
from gptqkit.errors import NonFiniteError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf, math.inf]])
def test_numbers_whose_sum_overflows_are_none_that_are_not_finite(bad, dtype):
    samples = Samples(torch.ones(3, 4, dtype=torch.int64))
    batches = Batches(samples, [samples], range(3), 3, torch.device("cpu"))
    rows = torch.full((12, 64), torch.finfo(dtype).max, dtype=dtype)
    assert not rows.sum(-1).isfinite().any()
    assert batches.counted(range(3), [rows], None, "here", routed=False, skip=False)[0].equal(rows)
    rows[7, : len(bad)] = torch.tensor(bad, dtype=dtype)
    with pytest.raises(NonFiniteError, match="here, calibration sample 1;"):
        batches.counted(range(3), [torch.ones_like(rows), rows], None, "here", routed=False, skip=False)
    kept = batches.counted(range(3), [rows], None, "here", routed=False, skip=True)[0]
    assert kept.equal(torch.cat([rows[:4], rows[8:]]))
    assert batches.counts.tolist() == [True, False, True]
