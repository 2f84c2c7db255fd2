"""The fused sweep against its equations, the solver's own path and the textbook loop."""

from itertools import product

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.kernels.sweep import Sweep, sweep_block
from gptqkit.kernels.trial import sweep_library
from gptqkit.quantizer import refine as refinement
from gptqkit.quantizer import sweep as solver
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.grid import GroupGrid, IntegerZeroPoint
from support.reference import correlated, damped, moments, textbook_gptq
from support.solvers import solve_gptaq, solve_gptq

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

    for module in (solver, refinement):
        monkeypatch.setattr(module, "sweep_library", lambda _: emulation.launcher.library)
        monkeypatch.setattr(module, "sweep_block", counted)
    return calls


def grid_of(scale, zero, max_code):
    return GroupGrid(scale, -(zero * scale), max_code)


def loss(weight, approximation, hessian):
    error = weight - approximation.double()
    return float(((error @ hessian) * error).sum())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("bits", "sym", "group_size", "format_", "grid"),
    [
        (2, False, 16, "gptq_v2", "mse"),
        (3, True, 48, "gptq_v2", "mse"),
        (4, False, 32, "gptq", "mse"),
        (4, False, None, "gptq_v2", "minmax"),
        (8, False, 24, "gptq_v2", "minmax"),
        (2, False, 16, "gptq_v2", "sim"),
        (3, True, 48, "gptq", "sim"),
    ],
)
def test_the_solver_on_the_kernel_finds_the_same(fused, monkeypatch, order, bits, sym, group_size, format_, grid):
    weight, inputs = correlated(40, 96, 800)
    hessian, cross = moments(inputs), 0.05 * correlated(96, 96, 1, seed=2)[0]
    config = QuantizeConfig(
        bits=bits,
        sym=sym,
        group_size=group_size,
        format=format_,
        grid=grid,
        block_size=48,
        method="gptaq",
        refine_rounds=0,
        **ORDERS[order],
    )
    on_kernel = solve_gptaq(weight, hessian, cross, config)
    assert len(fused) >= 1
    monkeypatch.setattr(solver, "sweep_library", lambda _: None)
    in_torch = solve_gptaq(weight, hessian, cross, config)
    # The first group's grids see the same weights on both paths, to the bit.
    first = in_torch.weight.group_index[0] if order == "natural" else 0
    if order in ("natural", "desc_act"):
        assert torch.equal(on_kernel.weight.scale[:, first], in_torch.weight.scale[:, first])
        assert torch.equal(on_kernel.weight.offset[:, first], in_torch.weight.offset[:, first])
    assert (on_kernel.weight.codes != in_torch.weight.codes).float().mean() < 0.01
    assert torch.equal(on_kernel.weight.group_index, in_torch.weight.group_index)
    exact = damped(hessian)
    losses = [loss(weight, solution.weight.dequantize(), exact) for solution in (on_kernel, in_torch)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert on_kernel.loss.sum() == pytest.approx(float(in_torch.loss.sum()), rel=1e-3)


KINDS = ("q2_k", "q3_k", "q4_k", "q6_k", "q4_0", "q5_1")
GGUF = [*((kind, "natural") for kind in KINDS), ("q2_k", "act_group_aware"), ("q3_k", "desc_act+static")]
SLOW = [pair for pair in product(KINDS, ("act_group_aware", "desc_act+static")) if pair not in GGUF]


@pytest.mark.parametrize(("kind", "order"), [*GGUF, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_the_solver_on_the_kernel_finds_the_same_for_gguf(fused, monkeypatch, kind, order):
    """Whose offsets are no zero points, and whose scales may be negative: rounds of refinement, too."""
    weight, inputs = correlated(40, 256, 2000)
    weight -= 0.3 * weight.abs()
    hessian, cross = moments(inputs), 0.05 * correlated(256, 256, 1, seed=2)[0]
    config = QuantizeConfig(type=kind, method="gptaq", refine_rounds=1, learn_iterations=1, **ORDERS[order])
    on_kernel = solve_gptaq(weight, hessian, cross, config)
    assert len(fused) >= 2
    for module in (solver, refinement):
        monkeypatch.setattr(module, "sweep_library", lambda _: None)
    in_torch = solve_gptaq(weight, hessian, cross, config)
    assert torch.equal(on_kernel.weight.scale[:, 0], in_torch.weight.scale[:, 0]) or order == "act_group_aware"
    assert (on_kernel.weight.codes != in_torch.weight.codes).float().mean() < 0.01
    exact = damped(hessian)
    losses = [loss(weight, each.weight.dequantize(), exact) for each in (on_kernel, in_torch)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert on_kernel.loss.sum() == pytest.approx(float(in_torch.loss.sum()), rel=2e-3)
    assert float((on_kernel.latent - in_torch.latent).abs().mean()) < 1e-3 * float(weight.abs().mean())


def test_rows_too_long_for_one_call_of_the_kernel_are_swept_in_several(fused, monkeypatch):
    weight, inputs = correlated(24, 400, 1600)
    hessian, cross = moments(inputs), 0.05 * correlated(400, 400, 1, seed=2)[0]
    settings = {"bits": 3, "sym": False, "group_size": None, "grid": "sim", "method": "gptaq", "refine_rounds": 0}
    on_kernel = solve_gptaq(weight, hessian, cross, QuantizeConfig(**settings)).weight
    assert len(fused) % 2 == 0
    assert len(fused) > 4  # on the first 384 columns and the others, on every grid that is tried
    monkeypatch.setattr(solver, "sweep_library", lambda _: None)
    in_torch = solve_gptaq(weight, hessian, cross, QuantizeConfig(**settings)).weight
    differ = (on_kernel.codes != in_torch.codes).any(1)
    assert differ.sum() <= 3  # one early rounding that falls otherwise, as a CPU adds up, changes the rest of its row
    losses = [loss(weight, each.dequantize(), damped(hessian)) for each in (on_kernel, in_torch)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("bits", "sym", "group_size"), [(2, False, 16), (4, True, 96), (3, False, 48)])
def test_refinement_on_the_kernel_finds_the_same(fused, monkeypatch, order, bits, sym, group_size):
    weight, inputs = correlated(40, 96, 800)
    settings = {"bits": bits, "sym": sym, "group_size": group_size, **ORDERS[order]}
    start = solve_gptq(weight, moments(inputs), QuantizeConfig(method="gptq", refine_rounds=0, **settings)).weight
    hessian, target = damped(moments(inputs)).float(), weight.float()
    groups = 96 // group_size
    fused.clear()
    on_kernel = refinement.refine(start, target, hessian, IntegerZeroPoint(), 2)
    assert len(fused) == 2 * groups
    monkeypatch.setattr(refinement, "sweep_library", lambda _: None)
    in_torch = refinement.refine(start, target, hessian, IntegerZeroPoint(), 2)
    assert len(fused) == 2 * groups
    assert (on_kernel.weight.codes != in_torch.weight.codes).float().mean() < 0.01
    assert torch.allclose(on_kernel.latent, in_torch.latent, atol=1e-3 * float(target.abs().max()))
    assert on_kernel.gain.sum() == pytest.approx(float(in_torch.gain.sum()), rel=1e-3)
    before, after = (loss(weight, each.dequantize(), damped(moments(inputs))) for each in (start, on_kernel.weight))
    assert before - after == pytest.approx(float(on_kernel.gain.sum()), rel=1e-3)


def test_codes_equal_the_textbook_loop(fused):
    weight, inputs = correlated(33, 64, 500)
    hessian = moments(inputs)
    settings = {"bits": 3, "group_size": 16, "sym": False, "act_group_aware": False, "block_size": 32}
    config = QuantizeConfig(method="gptq", refine_rounds=0, **settings)
    solved = solve_gptq(weight, hessian, config).weight
    assert len(fused) == 4
    index = solved.group_index.long()
    scale, zero = solved.scale.double()[:, index], solved.zero_point().double()[:, index]
    expected = textbook_gptq(weight, damped(hessian), torch.arange(64), scale, zero, 7)
    assert (solved.codes.double() != expected).float().mean() < 0.002  # float32 against float64


def sweep(place, weight, inverse, grids, *, bits, shift=None):
    """Everything that the kernel writes, by name; `grids` are (scale, zero, group)."""
    found = {"codes": torch.empty_like(weight, dtype=torch.uint8), "values": torch.empty_like(weight)}
    given = {"inverse": inverse, "shift": shift, **dict(zip(("scale", "zero", "group"), grids, strict=True))}
    there = {name: each if each is None else each.to(place.device) for name, each in (given | found).items()}
    block = weight.to(place.device, copy=True)
    scaled = sweep_block(place.launcher.library, Sweep(block=block, **there), bits=bits)
    written = {name: there[name] for name in found} | {"block": block, "scaled": scaled}
    return {name: each.cpu() for name, each in written.items()}


@pytest.mark.parametrize(
    ("columns", "rows", "group_size", "gptaq"),
    [
        (1, 1, 1, True),
        (15, 33, 15, False),
        (17, 31, 4, True),  # the last segment is short
        (37, 45, 7, True),
        (64, 32, 16, False),
        (170, 3, 85, True),
        (384, 2, 128, True),  # this and the next: more than 48 KiB of shared memory
        (250, 2, 50, False),
    ],
)
def test_what_it_writes_obeys_the_equations(place, columns, rows, group_size, gptaq):
    """Every equation of the sweep, in float64, from what the kernel itself wrote; codes to the bit.

    Groups are in any order, and scales of both signs.
    """
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(columns, rows, generator=generator)
    inverse = torch.randn(columns, columns, generator=generator).mul_(0.3 / columns**0.5).triu(1)
    inverse += torch.diag(torch.rand(columns, generator=generator) + 0.5)
    shift = torch.randn(columns, columns, generator=generator).mul_(0.1 / columns**0.5).triu(1) if gptaq else None
    group = (torch.arange(columns) // group_size)[torch.randperm(columns, generator=generator)]
    scale = (torch.rand(int(group.max()) + 1, rows, generator=generator) + 0.1).half().float()
    scale *= torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    grids = scale, torch.randint(0, 8, scale.shape, generator=generator).float(), group.int()
    found = sweep(place, weight, inverse, grids, bits=3, shift=shift)
    block, values, codes, scaled = (found[name] for name in ("block", "values", "codes", "scaled"))
    grid = grid_of(scale[group], grids[1][group], 7)
    assert torch.equal(codes.float(), grid.encode(block))
    assert torch.equal(values, grid.decode(codes.float()))
    assert torch.allclose(scaled, (block - values) / inverse.diagonal()[:, None], rtol=1e-6, atol=0)
    moved = (0 if shift is None else shift.double().T @ block.double()) - inverse.double().triu(1).T @ scaled.double()
    assert torch.allclose(block.double(), weight + moved, rtol=0, atol=1e-5)
    for seed in (1, 2):  # whatever order the threads run in
        place.reorder(seed)
        again = sweep(place, weight, inverse, grids, bits=3, shift=shift)
        assert all(torch.equal(again[name], found[name]) for name in found)


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_on_the_edge_between_two_codes_fall_as_in_torch(place, bits):
    """Half integers times the scale, and their neighbours among the float32 numbers; those far outside, too."""
    generator = torch.Generator().manual_seed(bits)
    scale = torch.exp(torch.empty(1, 96).uniform_(-9, 11, generator=generator)).half().float()
    zero = torch.randint(0, 2**bits, scale.shape, generator=generator).float()
    levels = torch.randint(-(2**bits), 2**bits, (48, 96), generator=generator) + 0.5
    weight = levels * scale
    weight[16:32] = weight[16:32].nextafter(torch.tensor(torch.inf))
    weight[32:] = weight[32:].nextafter(torch.tensor(-torch.inf))
    weight[0], weight[1], weight[2] = 1e30, -1e30, 1e-40
    grids = scale, zero, torch.zeros(48, dtype=torch.int32)
    found = sweep(place, weight, torch.eye(48), grids, bits=bits)
    assert torch.equal(found["codes"].float(), grid_of(scale, zero, 2**bits - 1).encode(weight))


def test_what_the_kernel_cannot_take_is_refused(emulation):
    def refused(block, inverse):
        group = torch.zeros(len(block), dtype=torch.int32)
        tensors = Sweep(block, inverse, None, group, block, block, torch.empty_like(block, dtype=torch.uint8), block)
        sweep_block(emulation.launcher.library, tensors, bits=4)

    with pytest.raises(ShapeError, match="385 columns"):
        refused(torch.empty(385, 1), torch.empty(1, 1))
    with pytest.raises(ShapeError, match=r"strides \(8, 2\)"):
        refused(torch.empty(4, 4), torch.empty(4, 8)[:, ::2])
    with pytest.raises(ShapeError, match=r"torch\.float64"):
        refused(torch.empty(4, 4), torch.empty(4, 4, dtype=torch.float64))


def test_a_missing_library_is_said_once_where_a_gpu_could_use_it(gpu, monkeypatch, caplog):
    monkeypatch.setattr("gptqkit.kernels.library.find_library", lambda: (None, "nvcc is not found"))
    for _ in range(2):
        assert sweep_library(torch.empty(1, 1, device=gpu)) is None
    assert sweep_library(torch.empty(1, 1)) is None
    assert [record.message.rsplit(", ", 1)[1] for record in caplog.records] == ["because nvcc is not found"]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("bits", "sym", "group_size"), [(2, False, 32), (4, True, 128), (8, False, None)])
def test_the_gpu_finds_what_the_cpu_finds(order, bits, sym, group_size):
    """With the real library where there is one; without it this compares the torch path on both devices."""
    weight, inputs = correlated(200, 512, 4000)
    weight, hessian = weight.float(), moments(inputs).float()
    settings = {"bits": bits, "sym": sym, "group_size": group_size}
    config = QuantizeConfig(method="gptq", refine_rounds=0, **settings, **ORDERS[order])
    on_cpu = solve_gptq(weight, hessian, config)
    on_gpu = solve_gptq(weight.cuda(), hessian.cuda(), config)
    assert on_gpu.weight.codes.is_cuda
    assert torch.equal(on_gpu.weight.group_index.cpu(), on_cpu.weight.group_index)
    exact = damped(hessian.double())
    losses = [loss(weight, solution.weight.dequantize().cpu(), exact) for solution in (on_gpu, on_cpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
