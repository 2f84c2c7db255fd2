"""Calls that may run at the same time never share locks."""

import itertools

import pytest
import torch

from gptqkit.kernels import ops
from gptqkit.kernels.ops import LOCKS, USERS, Locks


@pytest.fixture
def capture(gpu, monkeypatch):  # noqa: ARG001
    """A simulated GPU where the capture of number `capture.number` is going on, unless that is None."""

    class Capture:
        number = None

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Capture.number is not None)
    monkeypatch.setattr(ops, "_capture_number", lambda _: Capture.number)
    return Capture


@pytest.fixture
def locks(capture):  # noqa: ARG001
    return Locks(torch.device("cuda"))


def clear(*sets):
    """Whether all hold 0 and none overlaps another."""
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in sets)
    apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    return apart and not any(each.any() for each in sets)


@pytest.mark.parametrize("gpu", ["simulated"], indirect=True)
def test_calls_of_one_stream_or_capture_share_and_others_do_not(capture, locks):
    eager, other = locks.take(10, 1), locks.take(LOCKS, 2)
    assert eager.dtype == torch.int32
    assert locks.take(LOCKS, 1) is eager
    capture.number = 7
    one = locks.take(10, 1)
    assert locks.take(20, 1) is one
    capture.number = 8
    two, forked = locks.take(10, 1), locks.take(10, 2)
    assert clear(eager, other, one, two, forked)
    assert min(each.numel() for each in (eager, other, one, two, forked)) >= LOCKS
    capture.number = None
    assert locks.take(10, 1) is eager


@pytest.mark.parametrize("gpu", ["simulated"], indirect=True)
def test_without_locks_that_are_ready_every_call_clears_its_own(capture, locks):
    capture.number = 0
    assert clear(locks.take(10, 1), locks.take(10, 1))  # nothing is made ready within a capture
    capture.number = None
    many = [locks.take(LOCKS + 1, 1) for _ in range(2)]
    assert clear(*many)
    assert many[0].numel() > LOCKS
    taken = [locks.take(1, stream) for stream in range(USERS + 3)]
    assert clear(*taken)
    assert locks.take(1, USERS + 1) is not taken[USERS + 1]
    assert locks.take(1, 5) is taken[5]
