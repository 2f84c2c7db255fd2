"""Bits where they matter: of every part of a model one of several widths, so that the whole loses least in a budget."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Width:
    """One width that a part may have.

    Attributes:
        bits: Bits per code.
        size: Bits that the part takes, scales and zero points included.
        loss: What it loses; losses of parts add up.
    """

    bits: int
    size: float
    loss: float


def allocate_bits(parts: Mapping[str, Sequence[Width]], budget: float) -> dict[str, int]:
    """Return the bits of every part whose sizes come to `budget` bits at most, and whose losses to as little as can be.

    The steps from each width to larger ones on the lower convex hull of its (size, loss), best return first, until one
    does not fit, which then is left out: optimal but for that last step (Everett 1963, generalized Lagrange
    multipliers; Shoham and Gersho 1988).

    Args:
        parts: The widths that each may have, by name.
        budget: Bits for all.

    Raises:
        ConfigError: Even the smallest widths take more.
    """
    hulls = {name: _hull(widths) for name, widths in parts.items()}
    left = budget - sum(hull[0].size for hull in hulls.values())
    if left < 0:
        least = budget - left
        raise ConfigError(f"the smallest widths take {least:.0f} bits, more than the budget of {budget:.0f}; raise it")
    steps = [
        ((low.loss - high.loss) / (high.size - low.size), name, high, high.size - low.size)
        for name, hull in hulls.items()
        for low, high in itertools.pairwise(hull)
    ]
    chosen = {name: hull[0].bits for name, hull in hulls.items()}
    full: set[str] = set()
    for _, name, high, growth in sorted(steps, key=lambda step: -step[0]):
        if name in full or growth > left:
            full.add(name)  # later steps of the part stand on this one
            continue
        chosen[name] = high.bits
        left -= growth
    return chosen


def _hull(widths: Sequence[Width]) -> list[Width]:
    """Return the widths on the lower convex hull, smallest first: each step brings less than the one before."""
    hull: list[Width] = []
    for width in sorted(widths, key=lambda each: (each.size, each.loss)):
        if hull and width.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], width):
            hull.pop()
        hull.append(width)
    return hull


def _gain(low: Width, high: Width) -> float:
    return (low.loss - high.loss) / (high.size - low.size)
