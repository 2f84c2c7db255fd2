"""Calls that may run at the same time never share counters."""

import pytest
import torch

from gptqkit.kernels import tickets as module
from gptqkit.kernels.tickets import READY, SET, Tickets


@pytest.fixture
def capture(monkeypatch):
    """Makes Tickets believe that capture `capture.id` is going on, unless it is None."""

    class Capture:
        id = None

    monkeypatch.setattr(Tickets, "_capturing", lambda _: Capture.id is not None)
    monkeypatch.setattr(module, "_capture_id", lambda _: Capture.id)
    return Capture


def overlap(first, second):
    starts = [tensor.data_ptr() for tensor in (first, second)]
    ends = [start + tensor.nbytes for start, tensor in zip(starts, (first, second), strict=True)]
    return max(starts) < min(ends)


def test_calls_of_one_stream_share_and_others_do_not():
    tickets = Tickets(torch.device("cpu"))
    first = tickets.take(10, 1)
    assert first.dtype == torch.int32
    assert not first.any()
    assert tickets.take(SET, 1) is first
    assert not overlap(first, tickets.take(10, 2))
    assert tickets.take(SET + 1, 1).numel() > SET


def test_every_capture_has_its_own(capture):
    tickets = Tickets(torch.device("cpu"))
    eager = tickets.take(10, 1)
    capture.id = 7
    one = tickets.take(10, 1)
    assert overlap(one, tickets.take(20, 1))
    capture.id = 8
    two, forked = tickets.take(10, 1), tickets.take(10, 2)
    sets = [eager, one, two, forked]
    assert not any(overlap(a, b) for i, a in enumerate(sets) for b in sets[:i])


def test_captures_find_no_counters_left_and_clear_their_own(capture):
    tickets = Tickets(torch.device("cpu"))
    taken = []
    for number in range(READY // SET + 2):
        capture.id = number
        taken.append(tickets.take(10, 1))
    assert len({tensor.data_ptr() for tensor in taken}) == len(taken)
    assert not any(bool(tensor.any()) for tensor in taken)
    capture.id = None
    tickets.take(10, 3)  # refills
    capture.id = READY
    assert not any(overlap(tickets.take(10, 1), tensor) for tensor in taken)


def test_a_known_stream_refills_for_captures(capture):
    tickets = Tickets(torch.device("cpu"))
    eager = tickets.take(10, 1)
    for number in range(READY // SET):
        capture.id = number
        tickets.take(10, 1)
    capture.id = None
    assert tickets.take(10, 1) is eager
    capture.id = READY
    assert overlap(tickets.take(10, 1), tickets._arenas[-1])


def test_streams_hold_no_memory_of_their_own():
    tickets = Tickets(torch.device("cpu"))
    assert overlap(tickets.take(10, 1), tickets._arenas[0])
    assert tickets.take(READY + 1, 1).numel() > READY  # unless they need more than there is


def test_first_use_within_a_capture(capture):
    capture.id = 1
    assert Tickets(torch.device("cpu")).take(10, 1).numel() == 10
