"""Which rows of what a module receives count."""

import math

import pytest
import torch

from gptqkit.calibration.batches import Batches, in_pieces
from gptqkit.calibration.samples import Samples
from gptqkit.errors import ArchitectureError, NonFiniteError


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


@pytest.mark.parametrize("across", [False, True])
def test_what_stands_in_padding_is_not_looked_at(across):
    """Rows are the tokens of one sample after another, or where hidden states are (length, samples) the other way."""
    mask = torch.tensor([[True, True, True, True], [True, True, False, False], [True, False, False, False]])
    samples = Samples(torch.ones(3, 4, dtype=torch.int64), mask)
    batches = Batches(samples, [samples], range(3), 3, torch.device("cpu"))
    batches.across = across
    states = torch.arange(24.0).view(3, 4, 2).masked_fill(~mask.unsqueeze(-1), math.nan)
    wanted = states[mask]
    if across:
        states, wanted = states.transpose(0, 1), states.transpose(0, 1)[mask.T]
    assert batches.counted(range(3), [states], None, "here", routed=False, skip=False)[0].equal(wanted)
    states[(0, 1) if across else (1, 0)] = math.nan  # the first token of the second
    with pytest.raises(NonFiniteError, match="here, calibration sample 1;"):
        batches.counted(range(3), [states], None, "here", routed=False, skip=False)


def test_rows_that_are_no_tokens_count_where_no_token_is_padding():
    """Such as PEGASUS-X's global ones: what its encoder adds behind the tokens is no padding of theirs."""
    for mask in (None, torch.ones(3, 4, dtype=torch.bool).tril(1)):
        samples = Samples(torch.ones(3, 4, dtype=torch.int64), mask)
        batches = Batches(samples, [samples], range(3), 3, torch.device("cpu"))
        batches.added = [4]
        tokens, others = torch.randn(3, 8, 2), torch.randn(3, 5, 2)
        found = batches.counted(range(3), [tokens], None, "here", routed=False, skip=False)[0]
        assert found.equal(tokens[:, :4].flatten(0, 1) if mask is None else tokens[:, :4][mask])
        if mask is None:
            assert batches.counted(range(3), [others], None, "here", routed=False, skip=False)[0].equal(
                others.flatten(0, 1)
            )
        else:
            with pytest.raises(ArchitectureError, match="here receives 15 rows for 12 tokens, so padding"):
                batches.counted(range(3), [others], None, "here", routed=False, skip=False)


@pytest.mark.parametrize(
    ("count", "left_out", "learned", "aside"),
    [
        (16, [], range(14), range(14, 16)),
        (16, [3, 15], range(14), range(14, 15)),  # the last one that counts is kept aside
        (5, [], range(4), range(4, 5)),
        (1, [], range(1), range(1)),
    ],
)
def test_some_samples_are_kept_aside_to_choose_by(count, left_out, learned, aside):
    samples = Samples(torch.ones(count, 4, dtype=torch.int64))
    batches = Batches(samples, [samples], range(count), 3, torch.device("cpu"))
    batches.counts[left_out] = False
    assert batches.split() == (learned, aside)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_is_known_by_whatever_says_it(error, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))

    def work(size):
        if size > 1:
            raise error
        return "done"

    assert in_pieces(work, 4) == ("done", 1)
    assert emptied == [1, 1]
    with pytest.raises(RuntimeError, match="shapes"):
        in_pieces(lambda _: (_ for _ in ()).throw(RuntimeError("shapes do not fit")), 4)
