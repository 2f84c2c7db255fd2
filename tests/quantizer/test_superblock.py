"""Two-level grids: decided per super-block from compensated weights, ordinary GPTQ columns on them."""

import itertools

import pytest
import torch

from gptqkit.export.blocks import BLOCKS, encode
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.gptq import output_error, solve_gptaq, solve_gptq, solve_rtn
from gptqkit.quantizer.methods import Moments
from gptqkit.quantizer.order import column_order
from support.reference import correlated, damped, first_of_inverse, moments

WIDE = [name for name in BLOCKS if name.endswith("_k")]
ORDERS = {
    "plain": {"act_group_aware": False},
    "act_group_aware": {},
    "static": {"desc_act": True, "static_groups": True},
}


def problem(rows=12, columns=512):
    weight, inputs = correlated(rows, columns, 3 * columns)
    return weight * 0.02, moments(inputs)


def config(kind, **settings):
    return QuantizeConfig(type=kind, float64=True, **{"quality": "fast", "refine_rounds": 0, **settings})


def textbook(weight, hessian, permutation, scale, offset, most):
    """GPTQ on given grids, (rows, columns), that factorizes the remaining Hessian again at every column."""
    w, codes = weight.clone(), torch.empty_like(weight)
    for position, column in enumerate(permutation.tolist()):
        rest = permutation[position:]
        first = first_of_inverse(hessian[rest][:, rest])
        grid = scale[:, column], offset[:, column]
        codes[:, column] = ((w[:, column] - grid[1]) / grid[0]).round().clamp(0, most)
        lost = w[:, column] - (codes[:, column] * grid[0] + grid[1])
        w[:, rest] -= (lost / first[0])[:, None] * first
    return codes


STATIC = pytest.param("q3_k", "static", marks=pytest.mark.slow)


@pytest.mark.parametrize(("kind", "order"), [("q2_k", "plain"), ("q3_k", "act_group_aware"), STATIC])
def test_codes_equal_the_textbook_loop_on_the_grids_that_were_chosen(kind, order):
    weight, hessian = problem()
    settings = config(kind, **ORDERS[order])
    solution = solve_gptq(weight, Moments(hessian=hessian), settings, BLOCKS[kind].snap)
    found = solution.weight
    flags = {name: bool(getattr(settings, name)) for name in ("desc_act", "static_groups", "act_group_aware")}
    permutation = column_order(hessian.diagonal(), 256, **flags).permutation
    scale, offset = (each.double()[:, found.group_index.long()] for each in (found.scale, found.offset))
    expected = textbook(weight, damped(hessian), permutation, scale, offset, 2**found.bits - 1)
    assert torch.equal(found.codes.double(), expected)
    assert found.trivial_group_index
    error = weight - found.dequantize().double()
    assert solution.loss.tolist() == pytest.approx((error @ damped(hessian) * error).sum(1).tolist(), rel=1e-3)


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_type_is_solved_on_its_own_blocks_and_beats_rounding(kind):
    weight, hessian = problem()
    snap, settings = BLOCKS[kind].snap, config(kind, method="gptaq")
    cross = torch.zeros_like(hessian)
    errors = {}
    for name, solve, given in (
        ("rounding", solve_rtn, None),
        ("gptq", solve_gptq, Moments(hessian=hessian)),
        ("gptaq", solve_gptaq, Moments(hessian=hessian, cross=cross)),
    ):
        found = solve(weight.float() if given is None else weight, given, settings, snap).weight
        assert encode(BLOCKS[kind], found) is not None
        errors[name] = output_error(weight - found.dequantize().double(), hessian)
    assert errors["gptq"] < 0.8 * errors["rounding"]
    assert errors["gptaq"] == pytest.approx(errors["gptq"], rel=1e-6)


@pytest.mark.parametrize("kind", WIDE)
def test_the_search_weighs_by_importance(kind):
    """Weighted errors of fitted grids are below those of plain ones, for any importance; scales of 0 never occur."""
    generator = torch.Generator().manual_seed(0)
    block = BLOCKS[kind]
    groups = 256 // block.group_size
    weight = torch.randn(block.group_size, groups, 40, generator=generator) * torch.rand(
        groups, 40, generator=generator
    )
    weight[:, 0, 0] = 0
    weight[:, :, 1] = 0
    importance = torch.rand(block.group_size, groups, generator=generator) ** 4
    fitted, plain = (
        block.snap.fit(weight, bits=block.bits, sym=block.sym, importance=each) for each in (importance, None)
    )
    lost = [
        ((grid.decode(grid.encode(weight)) - weight).square() * importance[..., None]).sum((0, 1))
        for grid in (fitted, plain)
    ]
    assert bool((lost[0] <= lost[1]).all())
    assert lost[0].sum() < 0.9 * lost[1].sum()
    assert bool((fitted.scale != 0).all())
    assert lost[0][1] == 0


def least_error(weight, importance, bits, most):
    """Least weighted error, (rows,), over many d and dmin, every group with the best of all multiples of them."""
    low, high = weight.amin((0, 1)), (weight.amax(0) - weight.amin(0)).amax(0)
    factors = torch.linspace(0.6, 1.1, 9)
    d = (high / (2**bits - 1) / most * factors[:, None]).half().float()[:, None, None, None]
    dmin = (-low / most * factors[:, None]).half().float()[None, :, None, None]
    lost = torch.full((len(factors), len(factors), *weight.shape[1:]), torch.inf)
    for rise, fall in itertools.product(range(1, most + 1), range(most + 1)):
        scale, offset = rise * d, -fall * dmin
        rounded = ((weight - offset) / scale).round().clamp(0, 2**bits - 1) * scale + offset
        lost = torch.minimum(lost, ((rounded - weight).square() * importance[..., None]).sum(2))
    return lost.sum(2).amin((0, 1))


def test_two_level_grids_are_nearly_the_best_of_all():
    generator = torch.Generator().manual_seed(0)
    sizes = 0.5 + torch.rand(16, 6, generator=generator)
    weight, importance = torch.randn(16, 16, 6, generator=generator) * sizes, torch.rand(16, 16, generator=generator)
    block = BLOCKS["q2_k"]
    found = block.snap.fit(weight, bits=2, sym=False, importance=importance**2)
    lost = ((found.decode(found.encode(weight)) - weight).square() * importance[..., None] ** 2).sum((0, 1))
    assert lost.sum() < 1.05 * least_error(weight, importance**2, 2, 15).sum()


def test_one_input_may_feed_blocks_of_several_sizes():
    weight, inputs = correlated(12, 512, 1500)
    together = Moments(hessian=moments(inputs))
    for kind in ("q4_k", "q4_0", "q4_k"):
        settings = QuantizeConfig(type=kind, quality="fast", refine_rounds=0, float64=True)
        found, expected = (
            solve_gptq(weight, each, settings, BLOCKS[kind].snap).weight
            for each in (together, Moments(hessian=moments(inputs)))
        )
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)
