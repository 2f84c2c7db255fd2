import dataclasses

import pytest
import torch

from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.refine import refine
from support.reference import correlated, damped, moments
from support.solvers import snap_of, solve_gptq, solve_qep

CASES = {
    "asymmetric": {"bits": 2, "sym": False},
    "symmetric": {"bits": 3, "sym": True},
    "one group per row": {"bits": 4, "sym": False, "group_size": None},
    "groups out of order": {"bits": 2, "sym": False, "desc_act": True},
    "without zero point 0": {"bits": 2, "sym": False, "format": "gptq"},
}


def solved(case, rows=24, columns=96):
    weight, inputs = correlated(rows, columns, 800)
    settings = QuantizeConfig(
        **{"method": "gptq", "group_size": 32, "float64": True, "refine_rounds": 0, **CASES[case]}
    )
    hessian = moments(inputs)
    return weight, damped(hessian), settings, solve_gptq(weight, hessian, settings)


def row_losses(weight, hessian, quantized):
    index = quantized.group_index.long()
    values = quantized.codes.double() * quantized.scale[:, index].double() + quantized.offset[:, index].double()
    return (((weight - values) @ hessian) * (weight - values)).sum(-1)


@pytest.mark.parametrize("scales", [True, False], ids=["scales and codes", "codes"])
@pytest.mark.parametrize("case", CASES)
def test_the_loss_falls_in_no_row_less_than_said(case, scales):
    weight, hessian, settings, start = solved(case)
    snap = snap_of(settings) if scales else None
    before, weights = row_losses(weight, hessian, start.weight), [start.weight]
    for _ in range(3):
        refined = refine(weights[-1], weight, hessian, snap, 1)
        after = row_losses(weight, hessian, refined.weight)
        assert bool((after <= before * (1 + 1e-12)).all())
        assert refined.gain.tolist() == pytest.approx((before - after).tolist(), rel=1e-6, abs=1e-9)
        before, weights = after, [*weights, refined.weight]
    assert before.sum() < 0.98 * start.loss.sum()
    assert torch.equal(weights[-1].scale, weights[0].scale) == (not scales)
    assert int(weights[-1].codes.max()) <= 2**settings.bits - 1
    assert torch.equal(weights[-1].scale.half().float(), weights[-1].scale)
    assert int(weights[-1].zero_point().min()) >= (settings.format == "gptq")


@pytest.mark.parametrize("case", CASES)
def test_in_the_end_no_other_code_and_no_other_scale_is_better(case):
    weight, hessian, settings, start = solved(case, rows=6, columns=32 if case != "groups out of order" else 64)
    found = refine(start.weight, weight, hessian, snap_of(settings), 60).weight
    best = row_losses(weight, hessian, found)
    for column in range(weight.shape[1]):
        for step in (-1, 1):
            codes = found.codes.to(torch.int16)
            codes[:, column] += step
            held = (codes[:, column] >= 0) & (codes[:, column] < 2**settings.bits)
            other = row_losses(weight, hessian, dataclasses.replace(found, codes=codes.clamp(0, 255).to(torch.uint8)))
            assert bool((other >= best * (1 - 1e-12))[held].all())
    for group in range(found.scale.shape[1]):
        for factor in (1 - 2**-10, 1 + 2**-10):
            scale = found.scale.clone()
            scale[:, group] = (scale[:, group] * factor).half().float()
            other = dataclasses.replace(found, scale=scale, offset=-found.zero_point() * scale)
            assert bool((row_losses(weight, hessian, other) >= best * (1 - 1e-12)).all())


@pytest.mark.parametrize("float64", [True, False])
def test_what_was_rounded_last_rounds_to_the_codes(float64):
    """Learning begins there: at its latents, a code is the nearest one."""
    weight, hessian, settings, _ = solved("asymmetric")
    settings = dataclasses.replace(settings, float64=float64, refine_rounds=2, learn_iterations=1)
    solution = solve_gptq(weight, hessian, settings)
    index = solution.weight.group_index.long()
    position = (solution.latent - solution.weight.offset[:, index]) / solution.weight.scale[:, index]
    assert float((position.clamp(0, 3) - solution.weight.codes).abs().max()) <= 0.5 + 1e-3
    damping = damped(hessian)
    assert solution.loss.tolist() == pytest.approx(row_losses(weight, damping, solution.weight).tolist(), rel=1e-4)
    plain = solve_gptq(weight, hessian, dataclasses.replace(settings, refine_rounds=0))
    assert solution.loss.sum() < solution.loss_before.sum()
    assert torch.equal(solution.loss_before, plain.loss)
    dtype = torch.float64 if float64 else torch.float32
    found = refine(plain.weight, weight.to(dtype), damping.to(dtype), snap_of(settings), 2)
    values = found.weight.dequantize().double()
    pull = ((weight - values) @ damping)[:, -1] / damping[-1, -1]  # of the last column, all others being as they are
    assert torch.allclose(found.latent[:, -1].double(), values[:, -1] + pull, rtol=1e-3, atol=1e-4)


def test_a_scale_that_the_file_can_only_hold_worse_stays():
    weight, inputs = correlated(24, 96, 800)
    hessian = moments(inputs)
    settings = QuantizeConfig(method="gptq", bits=3, sym=True, group_size=32, float64=True, refine_rounds=0)
    start = solve_gptq(weight, hessian, settings).weight

    def powers(scale, _, bits):
        stored = scale.sign() * scale.abs().log2().round().exp2()
        return stored, stored * -(2 ** (bits - 1))

    def losses(found):
        lost = weight - found.dequantize().double()
        return ((lost @ damped(hessian)) * lost).sum(1)

    refined = refine(start, weight, damped(hessian), powers, 1)
    assert bool((losses(refined.weight) <= losses(start) * (1 + 1e-9)).all())
    assert refined.gain.tolist() == pytest.approx((losses(start) - losses(refined.weight)).tolist(), rel=1e-6, abs=1e-9)


def test_what_is_refined_is_the_loss_against_the_corrected_weight():
    weight, inputs = correlated(24, 96, 800)
    others = inputs + 0.3 * correlated(24, 96, 800, seed=1)[1]
    hessian, cross = moments(inputs), (others - inputs).T @ inputs / len(inputs)
    settings = QuantizeConfig(
        method="qep", quality="fast", bits=3, group_size=32, sym=False, float64=True, refine_rounds=2, damp_percent=0.01
    )
    solution = solve_qep(weight, hessian, cross, settings)
    target = weight + settings.alpha * weight @ cross @ torch.linalg.inv(damped(hessian))
    lost = target - solution.weight.dequantize().double()
    assert solution.loss.tolist() == pytest.approx(((lost @ damped(hessian)) * lost).sum(1).tolist(), rel=1e-6)
