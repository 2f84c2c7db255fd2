"""Errors of outputs that weigh together: as if all weights were one row, whose Hessian is the product of F and H."""

import dataclasses

import pytest
import torch

from gptqkit.errors import ConfigError, ShapeError
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.methods import Moments, find_method
from gptqkit.quantizer.rows import PARTS
from support.reference import correlated, damped, moments, textbook_gptq
from support.solvers import snap_of

COLUMNS = 48


def problem(rows):
    """A weight, H, and F whose rows differ in what they weigh, and weigh much together."""
    weight, inputs = correlated(rows, COLUMNS, 400)
    _, outputs = correlated(1, rows, 20 * rows, seed=1)
    outputs = moments(outputs)
    return weight, moments(inputs), outputs / outputs.diagonal().mean()


def config(**changes):
    usual = {"bits": 2, "group_size": 16, "sym": False, "float64": True, "refine_rounds": 0, "act_group_aware": False}
    return QuantizeConfig(**{"method": "gptq", **usual, **changes})


def solve(weight, hessian, outputs, settings, cross=None, drift=None):
    known = Moments(hessian=hessian, cross=cross, drift=drift, outputs=() if outputs is None else (outputs,))
    return find_method(settings.method).solve(weight, known, settings, snap_of(settings))


def loss(target, weight, hessian, outputs):
    lost = (target - weight.dequantize()).double()
    return float((damped(outputs) @ lost @ damped(hessian) * lost).sum())


@pytest.mark.parametrize("method", ["gptq", "qep", "loaq"])
def test_codes_equal_those_of_the_textbook_loop_over_all_weights(method):
    """Row by row, those that weigh most first, on the grids that the solver chose."""
    weight, hessian, outputs = problem(PARTS)
    settings, cross, drift = config(method=method), None, None
    target, generator = weight, torch.Generator().manual_seed(5)
    if method != "gptq":
        cross, drift = (
            0.3 * torch.randn(rows, COLUMNS, generator=generator, dtype=torch.float64) for rows in (COLUMNS, PARTS)
        )
        moved = weight @ cross + drift * (method == "loaq")
        target = weight + settings.alpha * moved @ torch.linalg.inv(damped(hessian))
    solved = solve(weight, hessian, outputs, settings, cross, drift).weight
    rows = outputs.diagonal().argsort(descending=True)
    order = (rows[:, None] * COLUMNS + torch.arange(COLUMNS)).flatten()
    grid = solved.scale.double().repeat_interleave(16, 1), solved.zero_point().double().repeat_interleave(16, 1)
    both = torch.kron(damped(outputs), damped(hessian))
    scale, zero = (each.reshape(1, -1) for each in grid)
    expected = textbook_gptq(target.reshape(1, -1), both, order, scale, zero, 3)
    assert torch.equal(solved.codes.double(), expected.view(PARTS, COLUMNS))
    alone = solve(weight, hessian, None, settings, cross, drift).weight
    assert int((alone.codes != solved.codes).sum()) > 20


@pytest.mark.parametrize("rows", [4 * PARTS, 5 * PARTS - 3])
@pytest.mark.parametrize(
    "more", [{}, {"desc_act": True, "act_group_aware": None}, {"group_size": None}, {"grid": "sim"}]
)
def test_the_loss_falls_and_falls_on_when_refined(rows, more):
    weight, hessian, outputs = problem(rows)
    found = {}
    for rounds in (0, 2):
        for name, together in (("alone", None), ("together", outputs)):
            settings = config(refine_rounds=rounds, **more)
            found[name, rounds] = loss(weight, solve(weight, hessian, together, settings).weight, hessian, outputs)
    assert found["together", 0] < 0.95 * found["alone", 0]
    assert found["together", 2] < 0.95 * found["alone", 2]
    assert found["together", 2] < found["together", 0]


def test_refining_single_rows_never_does_harm():
    weight, hessian, outputs = problem(PARTS)
    before = None
    for rounds in range(4):
        after = loss(weight, solve(weight, hessian, outputs, config(refine_rounds=rounds)).weight, hessian, outputs)
        assert before is None or after <= before * (1 + 1e-6)  # scales are float16 in both
        before = after


@pytest.mark.parametrize("rounds", [0, 2])
def test_where_outputs_do_not_weigh_together_rows_are_solved_as_if_alone(rounds):
    weight, hessian, outputs = problem(3 * PARTS + 1)
    settings = config(refine_rounds=rounds)
    solved = solve(weight, hessian, torch.diag(outputs.diagonal()), settings).weight
    alone = solve(weight, hessian, None, settings).weight
    for name in ("codes", "scale", "offset", "group_index"):
        assert torch.equal(getattr(solved, name), getattr(alone, name))


@pytest.mark.parametrize("rows", [(3 * PARTS, PARTS + 5, 2), (1, 3)])
@pytest.mark.parametrize("more", [{"refine_rounds": 1}, {"grid": "sim", "learn_iterations": 1}])
def test_weights_one_below_the_other_are_solved_as_if_alone(rows, more):
    problems, settings = [problem(count) for count in rows], config(**more)
    hessian, sides = problems[0][1], [outputs for _, _, outputs in problems]
    known = Moments(hessian=hessian, outputs=sides)
    stacked = torch.cat([weight for weight, _, _ in problems])
    whole, start = find_method(settings.method).solve(stacked, known, settings, snap_of(settings)), 0
    for (weight, _, outputs), count in zip(problems, rows, strict=True):
        own, alone = whole.rows(slice(start, start := start + count)), solve(weight, hessian, outputs, settings)
        for name in ("codes", "scale", "offset", "group_index"):
            assert torch.equal(getattr(own.weight, name), getattr(alone.weight, name))
        assert (own.latent is None) == (alone.latent is None)
        assert own.latent is None or torch.allclose(own.latent, alone.latent, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 2 * PARTS + 5])
def test_an_output_that_changes_nothing_and_few_rows_do_no_harm(rows):
    weight, hessian, outputs = problem(rows)
    outputs[0], outputs[:, 0] = 0, 0
    solution = solve(weight, hessian, outputs, config(refine_rounds=1, learn_iterations=1))
    assert solution.weight.codes.shape == solution.latent.shape == weight.shape
    assert bool(solution.latent.isfinite().all())
    assert bool(solution.weight.scale.isfinite().all())


def test_latents_are_what_was_rounded():
    weight, hessian, outputs = problem(4 * PARTS)
    for rounds in (0, 1):
        solution = solve(weight, hessian, outputs, config(refine_rounds=rounds, learn_iterations=1))
        lattice = dataclasses.replace(solution.weight, codes=torch.zeros_like(solution.weight.codes)).dequantize()
        scale = solution.weight.scale.repeat_interleave(16, 1)
        again = ((solution.latent - lattice) / scale).round().clamp(0, 3)
        assert float((again == solution.weight.codes).float().mean()) > 0.999


def test_what_does_not_fit_is_refused():
    weight, hessian, outputs = problem(6)
    with pytest.raises(ShapeError, match=r"outputs are of \[5\] rows, but a weight of \(6, 48\) needs 6 in all"):
        solve(weight, hessian, outputs[:5, :5], config())
    with pytest.raises(ConfigError, match="two_sided moves errors"):
        QuantizeConfig(method="rtn", two_sided=True)
    assert QuantizeConfig(method="rtn", quality="best").two_sided is False
    assert [QuantizeConfig(quality=each).two_sided for each in ("fast", "balanced", "best")] == [False, True, True]


@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.slow), {"method": "qep", "grid": "sim"}])
def test_a_gpu_finds_the_same(gpu, more):
    weight, hessian, outputs = problem(3 * PARTS + 1)
    settings = config(float64=False, refine_rounds=1, **more)
    found = []
    for device in ("cpu", gpu):
        own = [each.float().to(device) for each in (weight, hessian, outputs, 0.01 * hessian)]
        solution = solve(*own[:3], settings, own[3] if more else None)
        assert {str(solution.weight.codes.device.type)} == {torch.device(device).type}
        found.append(loss(weight, solution.weight.to("cpu"), hessian, outputs))
    assert found[1] == pytest.approx(found[0], rel=0.05)
