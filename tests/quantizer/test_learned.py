"""Learned rounding: its steps are those of automatic differentiation, and it never ends worse than it began."""

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.export.formats import find_snap
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.learned import LearnedWeight, learn, stretched
from gptqkit.quantizer.methods import Moments, find_method
from support.solvers import snap_of

ROWS, COLUMNS = 24, 64


def problem(**settings):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(200, COLUMNS, generator=generator) + torch.randn(200, 1, generator=generator)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    config = QuantizeConfig(bits=2, group_size=16, learn_iterations=30, **settings)
    hessian = inputs.T @ inputs / len(inputs)
    return (
        weight,
        hessian,
        config,
        find_method(config.method).solve(weight, Moments(hessian=hessian), config, snap_of(config)),
    )


class Rounded(torch.autograd.Function):
    """The nearest code up to a last one, with the gradient of its argument where that rounds to a code."""

    @staticmethod
    def forward(context, value, top):
        rounded = value.round()
        context.inside = (rounded >= 0) & (rounded <= top)
        return rounded.clamp(0, top)

    @staticmethod
    def backward(context, gradient):
        return gradient * context.inside, None


@pytest.mark.parametrize("settings", [{"sym": False}, {"sym": True}, {"sym": False, "desc_act": True}], ids=str)
def test_steps_are_signs_of_the_gradients_of_rounded_latents(settings):
    weight, hessian, config, solution = problem(**settings)
    index, its = solution.weight.group_index.long(), solution.weight
    moving = LearnedWeight(solution, snap_of(config))
    position = (solution.latent - its.offset[:, index]) / its.scale[:, index]
    move, stretch = torch.zeros(ROWS, COLUMNS, requires_grad=True), torch.zeros_like(its.scale, requires_grad=True)
    slope = 0
    for _ in range(3):
        codes = Rounded.apply(position + move, 3)
        value = (codes * its.scale[:, index] + its.offset[:, index]) * stretch.exp()[:, index]
        assert torch.allclose(moving.value(), value, rtol=1e-6, atol=1e-7)
        loss = (((value - weight) @ hessian) * (value - weight)).sum()
        (by_value,) = torch.autograd.grad(loss, value, retain_graph=True)
        slope = 0.5 * slope + by_value  # momentum
        gradients = torch.autograd.grad(value, [move, stretch], slope)
        with torch.no_grad():
            for parameter, gradient, step in zip((move, stretch), gradients, (0.2, 0.01), strict=True):
                parameter -= step * gradient.sign()
            move.clamp_(-0.5, 0.5)
        moving.descend(by_value, 0.2, 0.01)
    stored = moving.stored()
    assert torch.equal(stored.codes, (position + move).round().clamp(0, 3).to(torch.uint8))
    assert torch.equal(stored.scale, stored.scale.half().float())
    assert torch.allclose(stored.scale, its.scale * stretch.exp(), rtol=1e-3)
    assert torch.equal(stored.zero_point(), its.zero_point())


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q3_k", "q6_k"])
def test_codes_on_negative_scales_go_down_the_gradients_too(kind):
    """Symmetric groups of which the largest weight is positive have negative scales."""
    config = QuantizeConfig(type=kind, learn_iterations=1, quality="fast")
    weight = torch.randn(ROWS, 256, generator=torch.Generator().manual_seed(0))
    solution = find_method("gptq").solve(weight, Moments(hessian=torch.eye(256)), config, find_snap(config))
    its, index = solution.weight, solution.weight.group_index.long()
    assert 0.2 < float((its.scale < 0).float().mean()) < 0.8
    moving, move = LearnedWeight(solution, None), torch.zeros(ROWS, 256, requires_grad=True)
    position = (solution.latent - its.offset[:, index]) / its.scale[:, index]
    codes = Rounded.apply(position + move, 2**its.bits - 1)
    value = codes * its.scale[:, index] + its.offset[:, index]
    by_value = torch.autograd.grad((value - weight).pow(4).sum(), value, retain_graph=True)[0]
    (gradient,) = torch.autograd.grad((value - weight).pow(4).sum(), move)
    moving.descend(by_value, 0.3, 0.0)
    expected = (position - 0.3 * gradient.sign()).round().clamp(0, 2**its.bits - 1)
    assert torch.equal(moving.stored().codes, expected.to(torch.uint8))
    assert not torch.equal(moving.stored().codes, its.codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_ways_are_shorter_on_finer_grids(bits):
    """Of a weight whose gradient never changes: 0.3 codes at 2 bits, and in proportion."""
    config = QuantizeConfig(method="rtn", bits=bits, group_size=16, learn_iterations=40)
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    solution = find_method("rtn").solve(weight, None, config, snap_of(config))
    its, index = solution.weight, solution.weight.group_index.long()
    position = (solution.latent - its.offset[:, index]) / its.scale[:, index]
    up, scores = torch.full_like(weight, -1.0), iter((2.0, 1.0))
    found = learn(
        {"only": solution},
        None,
        iterations=40,
        gradients=lambda values: {name: up for name, _ in values},
        score=lambda values: [list(values), next(scores)][1],
    ).weights["only"]
    way = 0.3 * 2 / bits * 41 / 40 * its.scale.sign()[:, index]
    assert torch.equal(found.codes, (position + way).round().clamp(0, 2**bits - 1).to(torch.uint8))
    assert not torch.equal(found.codes, its.codes)


@pytest.mark.parametrize("settings", [{"sym": False}, {"sym": True, "desc_act": True}, {"method": "rtn"}], ids=str)
def test_the_loss_falls_or_nothing_changes(settings):
    """The aim is another one than the sweep's."""
    weight, hessian, config, solution = problem(**settings)
    aim = weight + 0.5 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))

    def loss(values):
        ((_, value),) = values
        lost = value - aim
        return float(((lost @ hessian) * lost).sum())

    def gradients(values):
        ((name, value),) = values
        return {name: 2 * (value - aim) @ hessian}

    start = solution.weight
    learned = learn({"only": solution}, snap_of(config), iterations=100, gradients=gradients, score=loss)
    assert learned.before == loss([("only", start.dequantize())])
    assert learned.after == loss([("only", learned.weights["only"].dequantize())]) < 0.8 * learned.before

    codes_alone = learn({"only": solution}, None, iterations=100, gradients=gradients, score=loss).weights["only"]
    for part in ("scale", "offset"):
        assert torch.equal(getattr(codes_alone, part), getattr(start, part))
        assert not torch.equal(getattr(learned.weights["only"], part), getattr(start, part))
    for weight in (codes_alone, learned.weights["only"]):
        assert not torch.equal(weight.codes, start.codes)

    uphill = learn(
        {"only": solution},
        snap_of(config),
        iterations=30,
        gradients=lambda values: {"only": -gradients(values)["only"]},
        score=loss,
    )
    assert uphill.after == uphill.before
    for part in ("codes", "scale", "offset"):
        assert torch.equal(getattr(uphill.weights["only"], part), getattr(start, part))


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zero_points_stay_where_float16_ends(sym, version):
    """Small weights at 8 bits want smaller scales than there are: codes must not come to stand for other values."""
    config = QuantizeConfig(method="rtn", bits=8, group_size=16, sym=sym, format=version)
    small = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.002
    for weight, least, most in ((small, 0.95, 1.0), (small * 1e8, 1.0, 1.05), (small * 100, 0.95, 1.05)):
        solved = find_method("rtn").solve(weight, None, config, snap_of(config)).weight
        for factor in (least, 1.0, most):
            found = stretched(solved, torch.full_like(solved.scale, factor).log(), snap_of(config))
            assert torch.equal(found.zero_point(), solved.zero_point())
            limits = torch.finfo(torch.float16)
            wanted = solved.scale.sign() * (solved.scale.abs() * factor).clamp(limits.tiny, limits.max)
            assert torch.allclose(found.scale, wanted, rtol=2**-10, atol=0)
            assert torch.equal(found.scale.half().float(), found.scale)


@pytest.mark.parametrize("bits", [2, 8])
def test_stretched_scales_take_their_zero_points_along(bits):
    config = QuantizeConfig(bits=bits, group_size=16, sym=False, method="rtn")
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)) - 0.5
    weight = find_method("rtn").solve(values, None, config, snap_of(config)).weight
    stretch = torch.linspace(-0.05, 0.05, weight.scale.numel()).view_as(weight.scale)
    found = stretched(weight, stretch, snap_of(config))
    assert torch.equal(found.codes, weight.codes)
    assert torch.equal(found.zero_point(), weight.zero_point())
    assert torch.allclose(found.dequantize(), weight.dequantize() * stretch.exp()[:, weight.group_index], rtol=2e-3)


def test_a_solution_without_its_latent_is_refused():
    weight, hessian, config, _ = problem()
    config = QuantizeConfig(bits=2, group_size=16, method="gptq")
    solution = find_method("gptq").solve(weight, Moments(hessian=hessian), config, snap_of(config))
    with pytest.raises(ShapeError, match="latent"):
        LearnedWeight(solution, snap_of(config))
