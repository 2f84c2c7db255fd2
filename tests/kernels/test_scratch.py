"""Calls that may run at the same time share neither locks nor workspace."""

import itertools

import pytest
import torch

from gptqkit.kernels.ops import LOCKS, USERS, WORKSPACE, Scratch


@pytest.fixture
def scratch():
    return Scratch(torch.device("cpu"))


def apart(*taken):
    """Whether all locks hold 0 and no memory overlaps another."""
    tensors = [tensor for _, _, kept in taken for tensor in kept]
    spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors if each.numel())
    alone = all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    return alone and not any(kept[0].any() for _, _, kept in taken)


def sizes(taken):
    locks, workspace, kept = taken
    assert (locks, workspace) == tuple(each.data_ptr() for each in kept)
    return [each.numel() for each in kept]


def test_calls_of_one_stream_or_capture_share_and_others_do_not(scratch):
    eager, other = scratch.take(1, 7, LOCKS, WORKSPACE), scratch.take(2, 8, 10, 10)
    one, two, forked = scratch.take(-1, 7, LOCKS, 10), scratch.take(-2, 7, 10, 20), scratch.take(-2, 8, 10, 20)
    assert scratch.take(1, 7, 10, 0) == eager
    assert scratch.take(-1, 7, 20, 10)[0] == one[0]
    assert scratch.take(-2, 8, 20, 10)[0] == forked[0]
    captured = (one, two, forked)
    assert apart(eager, other, *captured)
    for taken in (eager, other, *captured):
        locks, floats = sizes(taken)
        assert locks >= LOCKS
        assert floats >= (10 if taken in captured else WORKSPACE)
    assert scratch.take(3, 7, 1, 1)[0] != eager[0]  # another stream with the handle of the first


def test_what_is_too_small_or_used_up_is_made_for_the_call(scratch):
    assert apart(scratch.take(-7, 1, 10, 5), scratch.take(-7, 1, 10, 5))  # nothing is made ready within a capture
    many = [scratch.take(1, 1, *wanted) for wanted in ((LOCKS + 1, 1), (LOCKS + 1, 1), (0, WORKSPACE + 1))]
    assert apart(*many[:2])
    assert sizes(many[0])[0] > LOCKS
    assert sizes(many[2])[1] > WORKSPACE
    taken = [scratch.take(stream, stream, 1, 0) for stream in range(1, USERS + 4)]
    assert apart(*taken)
    assert scratch.take(USERS + 2, 1, 1, 0)[0] != taken[USERS + 1][0]
    assert scratch.take(5, 5, 1, 0) == taken[4]
