"""Bits where they matter: every part of a model is kept in one of several ways, so that the whole loses least."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way of keeping a part.

    Attributes:
        bits: Bits per code; None where the part stays in floating point.
        group_size: Columns per group; None for one group per row.
        size: Bits that the part takes, scales and zero points included.
        loss: What it loses; losses of parts add up.
    """

    bits: int | None
    group_size: int | None
    size: float
    loss: float


def allocate_bits(parts: Mapping[str, Sequence[Candidate]], budget: float) -> dict[str, Candidate]:
    """Return one candidate for every part: sizes come to `budget` bits at most, and losses to as little as can be.

    The steps from each candidate to larger ones on the lower convex hull of (size, loss), best return first, until one
    does not fit, which then is left out: optimal but for that last step (Everett 1963, generalized Lagrange
    multipliers; Shoham and Gersho 1988).

    Args:
        parts: The candidates of each, by name.
        budget: Bits for all.

    Raises:
        ConfigError: Even the smallest candidates take more.
    """
    hulls = {name: _hull(candidates) for name, candidates in parts.items()}
    left = budget - sum(hull[0].size for hull in hulls.values())
    if left < 0:
        least = budget - left
        raise ConfigError(f"the smallest choices take {least:.0f} bits, more than the budget of {budget:.0f}; raise it")
    steps = [
        (_gain(low, high), name, high, high.size - low.size)
        for name, hull in hulls.items()
        for low, high in itertools.pairwise(hull)
    ]
    chosen = {name: hull[0] for name, hull in hulls.items()}
    full: set[str] = set()
    for _, name, high, growth in sorted(steps, key=lambda step: -step[0]):
        if name in full or growth > left:
            full.add(name)  # later steps of the part stand on this one
            continue
        chosen[name] = high
        left -= growth
    return chosen


def _hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return those on the lower convex hull, smallest first: each step brings less than the one before."""
    hull: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda each: (each.size, each.loss)):
        if hull and candidate.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], candidate):
            hull.pop()
        hull.append(candidate)
    return hull


def _gain(low: Candidate, high: Candidate) -> float:
    return (low.loss - high.loss) / (high.size - low.size)
