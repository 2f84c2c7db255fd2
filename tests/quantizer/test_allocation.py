"""Bits per part: within the budget, and near the bound that no combination of widths can beat."""

import itertools
import random

import pytest

from gptqkit.errors import ConfigError
from gptqkit.quantizer.allocation import Candidate, allocate_bits

BITS = (2, 3, 4, 8)


def parts(count, seed):
    draw = random.Random(seed)
    found = {}
    for number in range(count):
        size, loss, base = draw.choice((64, 128, 512)), draw.uniform(0.01, 10), draw.uniform(3, 5)
        noise = {bits: draw.uniform(0.7, 1.3) for bits in BITS}
        found[str(number)] = [
            Candidate(bits=b, group_size=None, size=size * b, loss=noise[b] * loss * base**-b) for b in BITS
        ]
    return found


def totals(chosen):
    return sum(each.size for each in chosen.values()), sum(each.loss for each in chosen.values())


def bound(of, budget):
    """The best of Lagrange's lower bounds: min over widths of loss + price * size, less price * budget."""
    prices = [
        max(0.0, (low.loss - high.loss) / (high.size - low.size))
        for widths in of.values()
        for low, high in itertools.combinations(widths, 2)
    ]
    return max(
        sum(min(width.loss + price * width.size for width in widths) for widths in of.values()) - price * budget
        for price in (0.0, *prices)
    )


@pytest.mark.parametrize("seed", range(8))
def test_many_parts_come_near_the_lower_bound(seed):
    of = parts(60, seed)
    smallest, largest = (sum(pick(w.size for w in widths) for widths in of.values()) for pick in (min, max))
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        budget = smallest + share * (largest - smallest)
        size, loss = totals(allocate_bits(of, budget))
        assert size <= budget
        assert bound(of, budget) <= loss * (1 + 1e-9)
        assert loss <= 1.06 * bound(of, budget)


@pytest.mark.parametrize("seed", range(4))
def test_few_parts_are_never_far_from_the_best_combination(seed):
    of = parts(5, seed)
    budget = 3.4 * sum(widths[0].size / 2 for widths in of.values())
    size, loss = totals(allocate_bits(of, budget))
    every = (totals(dict(zip(of, each, strict=True))) for each in itertools.product(*of.values()))
    assert loss <= 1.6 * min(loss for size, loss in every if size <= budget)
    assert size <= budget


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="raise it"):
        allocate_bits(parts(3, 0), 10)


def test_a_step_that_does_not_fit_takes_those_above_it_along():
    sizes = ((10, 10.0), (100, 5.0), (110, 4.6))
    part = [Candidate(bits=4, group_size=None, size=size, loss=loss) for size, loss in sizes]
    assert allocate_bits({"a": part}, 30)["a"].size == 10
