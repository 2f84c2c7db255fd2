"""The fused sweep, run by the emulator, against the solver's own path and the textbook loop."""

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.kernels.sweep import sweep_block
from gptqkit.quantizer import solver
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.grid import fit_grid
from support.reference import correlated, damped, moments, textbook_gptq

ORDERS = {
    "natural": {"act_group_aware": False},
    "act_group_aware": {"act_group_aware": True},
    "desc_act": {"desc_act": True},
    "desc_act+static": {"desc_act": True, "static_groups": True},
}


@pytest.fixture
def fused(emulation, monkeypatch):
    """Lets the solver take the emulator's kernel on the CPU; counts its calls."""
    calls = []

    def counted(*arguments, **settings):
        calls.append(1)
        return sweep_block(*arguments, **settings)

    monkeypatch.setattr(solver, "sweep_library", lambda _: emulation.launcher.library)
    monkeypatch.setattr(solver, "sweep_block", counted)
    return calls


def loss(weight, approximation, hessian):
    error = weight - approximation.double()
    return float(((error @ hessian) * error).sum())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("bits", "sym", "group_size", "format_", "mse"),
    [
        (2, False, 16, "gptq_v2", True),
        (3, True, 48, "gptq_v2", True),
        (4, False, 32, "gptq", True),
        (4, False, None, "gptq_v2", False),
        (8, False, 24, "gptq_v2", False),
    ],
)
def test_the_solver_on_the_kernel_finds_the_same(fused, monkeypatch, order, bits, sym, group_size, format_, mse):
    weight, inputs = correlated(40, 96, 800)
    hessian, cross = moments(inputs), 0.05 * correlated(96, 96, 1, seed=2)[0]
    config = QuantizeConfig(
        bits=bits,
        sym=sym,
        group_size=group_size,
        format=format_,
        mse=mse,
        block_size=48,
        method="gptaq",
        **ORDERS[order],
    )
    on_kernel = solver.solve_gptaq(weight, hessian, cross, config)
    assert len(fused) >= 1
    monkeypatch.setattr(solver, "sweep_library", lambda _: None)
    in_torch = solver.solve_gptaq(weight, hessian, cross, config)
    # The first group's grids see the same weights on both paths, to the bit.
    first = in_torch.weight.group_index[0] if order == "natural" else 0
    if order in ("natural", "desc_act"):
        assert torch.equal(on_kernel.weight.scale[:, first], in_torch.weight.scale[:, first])
        assert torch.equal(on_kernel.weight.zero[:, first], in_torch.weight.zero[:, first])
    assert (on_kernel.weight.codes != in_torch.weight.codes).float().mean() < 0.01
    assert torch.equal(on_kernel.weight.group_index, in_torch.weight.group_index)
    exact = damped(hessian)
    losses = [loss(weight, solution.weight.dequantize(), exact) for solution in (on_kernel, in_torch)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert on_kernel.loss == pytest.approx(in_torch.loss, rel=1e-3)


def test_codes_equal_the_textbook_loop(fused):
    weight, inputs = correlated(33, 64, 500)
    hessian = moments(inputs)
    config = QuantizeConfig(bits=3, group_size=16, sym=False, act_group_aware=False, block_size=32)
    solved = solver.solve_gptq(weight, hessian, config).weight
    assert len(fused) == 2
    index = solved.group_index.long()
    scale, zero = solved.scale.double()[:, index], solved.zero.double()[:, index]
    expected = textbook_gptq(weight, damped(hessian), torch.arange(64), scale, zero, 7)
    assert (solved.codes.double() != expected).float().mean() < 0.002  # float32 against float64


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("min_zero", [0, 1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_grids_equal_fit_grid(emulation, bits, min_zero, sym):
    """Without propagation (U = 1) every group's grid is that of torch, for weights of all signs and sizes."""
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(32, 70, generator=generator)
    weight[:, 0] = 0
    weight[:, 1].abs_()
    weight[:, 2].abs_().neg_()
    weight[:, 3] *= 1e-7
    weight[:, 4] *= 1e6
    importance = torch.rand(32, generator=generator)
    scale, zero = torch.empty(2, 70), torch.empty(2, 70)
    codes, values = torch.empty(32, 70, dtype=torch.uint8), torch.empty(32, 70)
    block = weight.clone()
    scaled = sweep_block(
        emulation.launcher.library,
        block,
        torch.eye(32),
        shift=None,
        importance=importance,
        group=None,
        group_size=16,
        scale=scale,
        zero=zero,
        codes=codes,
        values=values,
        bits=bits,
        sym=sym,
        min_zero=min_zero,
    )
    assert torch.equal(block, weight)
    for group in range(2):
        part = weight[16 * group : 16 * group + 16]
        grid = fit_grid(part, bits=bits, sym=sym, min_zero=min_zero, importance=importance[16 * group :][:16])
        same = (scale[group] == grid.scale) & (zero[group] == grid.zero)
        assert same.float().mean() > 0.97  # ties between candidates fall either way, as sums round differently
        found = codes[16 * group : 16 * group + 16]
        assert torch.equal(found.float()[:, same], grid.encode(part)[:, same])
        assert torch.equal(values[16 * group :][:16][:, same], grid.decode(grid.encode(part))[:, same])
    assert torch.equal(scaled, weight - values)


def test_what_the_kernel_cannot_take_is_refused(emulation):
    def sweep(block, inverse):
        codes = torch.empty_like(block, dtype=torch.uint8)
        grids = {"scale": block, "zero": block, "codes": codes, "values": block, "group_size": 16}
        choices = {"shift": None, "importance": None, "group": None, "bits": 4, "sym": True, "min_zero": 0}
        sweep_block(emulation.launcher.library, block, inverse, **grids, **choices)

    with pytest.raises(ShapeError, match="385 columns"):
        sweep(torch.empty(385, 1), torch.empty(1, 1))
    with pytest.raises(ShapeError, match=r"strides \(8, 2\)"):
        sweep(torch.empty(4, 4), torch.empty(4, 8)[:, ::2])
    with pytest.raises(ShapeError, match=r"torch\.float64"):
        sweep(torch.empty(4, 4), torch.empty(4, 4, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("bits", "sym", "group_size"), [(2, False, 32), (4, True, 128), (8, False, None)])
def test_the_gpu_finds_what_the_cpu_finds(order, bits, sym, group_size):
    """With the real library where there is one; without it this compares the torch path on both devices."""
    weight, inputs = correlated(200, 512, 4000)
    weight, hessian = weight.float(), moments(inputs).float()
    config = QuantizeConfig(bits=bits, sym=sym, group_size=group_size, **ORDERS[order])
    on_cpu = solver.solve_gptq(weight, hessian, config)
    on_gpu = solver.solve_gptq(weight.cuda(), hessian.cuda(), config)
    assert on_gpu.weight.codes.is_cuda
    assert torch.equal(on_gpu.weight.group_index.cpu(), on_cpu.weight.group_index)
    exact = damped(hessian.double())
    losses = [loss(weight, solution.weight.dequantize().cpu(), exact) for solution in (on_gpu, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
