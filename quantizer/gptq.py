"""Plain rounding, GPTQ, GPTAQ, QEP, LoaQ: a weight and moments of its inputs -> integer codes, scales and offsets.

Weights are swept column by column, all rows at once, so everything inside is held columns first: (in, out). Names
follow the papers: R upper triangular with H = R RT, U = inv(R), E = W - Q.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property, partial

import torch
from torch import Tensor

from ..calibration.statistics import full_float32
from ..errors import CalibrationError, NonFiniteError, ShapeError
from .config import QuantizeConfig
from .factor import HessianFactor, factorize
from .grid import Snap
from .methods import Method, Moments, Solution
from .order import ColumnOrder, column_order
from .refine import refine
from .rows import solve_rows
from .superblock import TwoLevel
from .sweep import ColumnSweep

DAMPING = 0.01


def solve_rtn(weight: Tensor, moments: Moments | None, config: QuantizeConfig, snap: Snap) -> Solution:
    """Round every weight to the nearest point of its group's grid; where `grid` searches for it, weighed by diag(H).

    Args:
        weight: W, (out, in), any float dtype; not modified.
        moments: H, where there is one.
        config: Bits, groups, sym and grid.
        snap: What the file can hold.

    Raises:
        ConfigError: `group_size` does not divide the columns.
        NonFiniteError: The weight holds NaN or infinity.
    """
    target = _columns_first(weight, torch.float32)
    columns = target.shape[0]
    diagonal = torch.ones_like(target[:, 0]) if moments is None else moments.hessian.diagonal().float()
    group_size = config.group_size or columns
    order = column_order(diagonal, group_size, desc_act=False, static_groups=True, act_group_aware=False)
    sweep = ColumnSweep(target, order, config, snap)
    sweep.tight = True  # no weight moves
    sweep.fit_static_grids(diagonal)
    for start in range(0, columns, group_size):
        sweep.round(slice(start, start + group_size), target[start : start + group_size])
    return Solution(weight=sweep.quantized_weight(), latent=target.T.float() if config.learn_iterations else None)


def solve_gptq(weight: Tensor, moments: Moments | None, config: QuantizeConfig, snap: Snap) -> Solution:
    """Round `weight` column by column, moving each column's error onto later ones.

    Algorithm 1 of Frantar et al. 2022 (arXiv 2210.17323) in its left-looking form: one matrix product per block of
    columns brings the block up to date, so that group grids are always fitted to compensated weights.

    Args:
        weight: W, (out, in), any float dtype; not modified.
        moments: H, and F where errors of outputs weigh together; C is not looked at.
        config: The grid, the order of columns, the damping, and how often what was solved is refined.
        snap: What the file can hold.

    Raises:
        CalibrationError: There are no moments.
        ConfigError: `group_size` does not divide the columns.
        ShapeError: H does not fit W.
        NonFiniteError: W, H or C holds NaN or infinity.
        SingularHessianError: H is not positive definite at the largest damping allowed.
    """
    alone = None if moments is None else dataclasses.replace(moments, cross=None)
    return _solve(weight, alone, config, snap, upfront=False)


def solve_gptaq(weight: Tensor, moments: Moments | None, config: QuantizeConfig, snap: Snap) -> Solution:
    """Round `weight` so that its outputs on the quantized model's inputs match those of the float model on its own.

    GPTAQ (arXiv 2504.02692): besides GPTQ's update, every column i adds w_i P[i, i+1:] to later columns,
    P = alpha * triu(C UT, 1) U. Without C, or where it is 0, this is GPTQ.

    Arguments and errors are those of `solve_gptq`.
    """
    return _solve(weight, moments, config, snap, upfront=False)


def solve_qep(weight: Tensor, moments: Moments | None, config: QuantizeConfig, snap: Snap) -> Solution:
    """Apply GPTQ to the weight whose outputs on the quantized model's inputs match those of the float model on its own.

    QEP (arXiv 2504.09629): W + alpha * W C inv(Hd), the whole of what GPTAQ moves onto later columns only. Without C,
    or where it is 0, this is GPTQ.

    Arguments and errors are those of `solve_gptq`.
    """
    alone = None if moments is None else dataclasses.replace(moments, drift=None)
    return _solve(weight, alone, config, snap, upfront=True)


def solve_loaq(weight: Tensor, moments: Moments | None, config: QuantizeConfig, snap: Snap) -> Solution:
    """Apply GPTQ to the weight whose outputs, and what they are added to, match the float model's sum of both.

    LoaQ (arXiv 2509.06297): W + alpha * (W C + D) inv(Hd): layers that write into the residual stream also make up for
    where it already is. Without D this is QEP.

    Arguments and errors are those of `solve_gptq`.
    """
    return _solve(weight, moments, config, snap, upfront=True)


@torch.no_grad()
def _solve(weight: Tensor, moments: Moments | None, config: QuantizeConfig, snap: Snap, *, upfront: bool) -> Solution:
    """Sweep a weight, whose columns are corrected `upfront` or on the way, and refine what came of it."""
    if moments is None:
        raise CalibrationError(f"{config.method} needs calibration; give text, or use the method rtn")
    dtype = torch.float64 if config.float64 else torch.float32
    target = _columns_first(weight, dtype)
    rows, columns = weight.shape
    for name, matrix, shape in (
        ("hessian", moments.hessian, (columns, columns)),
        ("cross", moments.cross, (columns, columns)),
        ("drift", moments.drift, (rows, columns)),
    ):
        if matrix is not None and tuple(matrix.shape) != shape:
            raise ShapeError(f"{name} is {tuple(matrix.shape)}, but a weight of {tuple(weight.shape)} needs {shape}")
    sides = [len(each) for each in moments.outputs]
    if sides and sum(sides) != rows:
        raise ShapeError(f"outputs are of {sides} rows, but a weight of {(rows, columns)} needs {rows} in all")
    solver = _Solver(moments, config, snap, columns, upfront)
    target = solver.corrected(target)
    if not moments.outputs:
        solution, corrected = solver.sweep(target)
        return solver.refine(solution, corrected, config.refine_rounds)

    def sweep(part: Tensor, moved: Tensor) -> tuple[Solution, Tensor]:
        solution, corrected = solver.sweep(target[:, part], moved.T)
        return solution, corrected - moved

    refine = partial(solver.refine, rounds=1)
    return solve_rows([each.to(dtype) for each in moments.outputs], columns, sweep, refine, config.refine_rounds)


class _Solver:
    """What rows of weights that receive the same inputs are solved by, each as if it were alone."""

    def __init__(self, moments: Moments, config: QuantizeConfig, snap: Snap, columns: int, upfront: bool) -> None:
        self._moments, self._config, self._snap, self._upfront = moments, config, snap, upfront
        self._dtype = torch.float64 if config.float64 else torch.float32
        self._group_size = config.group_size or columns
        self._span = snap.columns if isinstance(snap, TwoLevel) else self._group_size
        self._order, self._factor, self._shift = self._prepared()

    def _prepared(self) -> tuple[ColumnOrder, HessianFactor, Tensor | None]:
        """Return the order of columns, R and the correction: the same for every weight that receives the same inputs.

        The columns of groups whose grids are decided together, a span of them, are ordered like those of one group.
        """
        moments, config, group_size, span = self._moments, self._config, self._group_size, self._span
        names = ("desc_act", "static_groups", "act_group_aware")
        orders = {name: bool(getattr(config, name)) for name in names}
        damp, shrink = usual_damping(moments) if config.damp_percent is None else (config.damp_percent, 0.0)
        how = group_size, span, damp, shrink, config.alpha, self._dtype, moments.cross is None, self._upfront
        key = (*how, *orders.values())
        if key not in moments.prepared:
            order = column_order(moments.hessian.diagonal(), span, **orders)
            if span != group_size:
                order = ColumnOrder(order.permutation, order.permutation // group_size, order.static)
            factor = factorize(moments.hessian, order.permutation, damp, self._dtype, shrink)
            shift = None
            if moments.cross is not None:
                _check_finite(moments.cross, "C")
                with full_float32():
                    in_order = moments.cross[order.permutation][:, order.permutation].to(self._dtype)
                    shift = (propagation if self._upfront else correction)(in_order, factor.upper, config.alpha)
            moments.prepared[key] = (order, factor, shift)
        found: tuple[ColumnOrder, HessianFactor, Tensor | None] = moments.prepared[key]
        return found

    def corrected(self, target: Tensor) -> Tensor:
        """Return W, (in, out), in the order of the sweep, with what makes up for earlier layers, if that is upfront."""
        shift, drift, permutation = self._shift, self._moments.drift, self._order.permutation
        target = target[permutation]
        if not self._upfront:
            return target
        with full_float32():
            whole = target if shift is None else target + shift.T @ target
            if drift is not None:
                _check_finite(drift, "D")
                in_order = drift.to(self._dtype)[:, permutation]
                whole = whole + propagation(in_order, self._factor.upper, self._config.alpha).T
        return whole

    def sweep(self, target: Tensor, moved: Tensor | None = None) -> tuple[Solution, Tensor]:
        """Return what comes of some rows of `corrected`, (in, rows), and of what is added to them.

        Also returns what the codes stand in for, (rows, in): W with its correction and what was added.
        """
        config, order, factor, span = self._config, self._order, self._factor, self._span
        with full_float32():
            if moved is not None:
                target = target + moved[order.permutation]
            sweep = ColumnSweep(target, order, config, self._snap)
            if order.static:
                sweep.fit_static_grids(self._moments.hessian.diagonal()[order.permutation].to(self._dtype))
            # A block is whole groups, unless one group spans the row.
            whole = config.block_size // span * span
            apart = self._group_size == len(target) and config.grid != "sim"  # a simulation takes the whole group
            shift = None if self._upfront else self._shift
            loss = sweep.run(factor.upper, shift, config.block_size if apart else max(whole, span))
        solution = Solution(
            weight=sweep.quantized_weight(),
            loss=loss,
            damp_percent=factor.damp_percent,
            damp_escalations=factor.escalations,
            dead_columns=factor.dead_columns,
            latent=sweep.latent(),
        )
        return solution, sweep.corrected()

    @cached_property
    def _damped(self) -> Tensor:
        hessian = self._moments.hessian.to(self._dtype, copy=True)
        hessian.diagonal().add_(self._factor.damping)
        return hessian

    def refine(self, solution: Solution, target: Tensor, rounds: int) -> Solution:
        """Return a solution of rows refined, where W with all that moved it is `target`, (rows, in)."""
        if not rounds:
            return solution
        scales = None if isinstance(self._snap, TwoLevel) else self._snap  # scales that depend on one another stay
        refined = refine(solution.weight, target, self._damped, scales, rounds)
        latent = refined.latent.float() if self._config.learn_iterations else None
        loss = None if solution.loss is None else solution.loss - refined.gain
        return dataclasses.replace(solution, weight=refined.weight, loss=loss, loss_before=solution.loss, latent=latent)


RTN = Method(solve=solve_rtn)
GPTQ = Method(solve=solve_gptq, needs=frozenset({"hessian"}))
GPTAQ = Method(solve=solve_gptaq, needs=frozenset({"hessian", "cross"}))
QEP = Method(solve=solve_qep, needs=frozenset({"hessian", "cross"}))
LOAQ = Method(solve=solve_loaq, needs=frozenset({"hessian", "cross", "drift"}))


def _check_finite(moment: Tensor, name: str) -> None:
    if not bool(moment.sum().isfinite()):
        raise NonFiniteError(f"{name} holds NaN or infinity; check the calibration activations of both models")


def usual_damping(moments: Moments) -> tuple[float, float]:
    """Return how much to damp, and to shrink, a Hessian that is a mean over some tokens (see `factorize`).

    A mean over n tokens is off by about sqrt(columns / n) of itself in directions that nothing sets apart, and what is
    beside the diagonal is trusted that much less.
    """
    columns_per_token = 0.0 if moments.tokens is None else len(moments.hessian) / moments.tokens
    return DAMPING, min(math.sqrt(columns_per_token), 1.0)


def correction(cross: Tensor, factor: Tensor, alpha: float) -> Tensor:
    """Return P = alpha * triu(C UT, 1) U, (in, in), strictly upper, from C in the order of the sweep and R.

    Row q holds alpha * C[q, F] inv(Hd[F, F]), F the columns after q (arXiv 2504.02692, Theorem 4.2); U = inv(R) is
    applied by triangular solves.
    """
    rotated: Tensor = torch.linalg.solve_triangular(factor, cross.T, upper=True).T.triu(1)
    shift: Tensor = torch.linalg.solve_triangular(factor, rotated, upper=True, left=False)
    return shift.mul_(alpha)


def propagation(cross: Tensor, factor: Tensor, alpha: float) -> Tensor:
    """Return alpha * C inv(Hd), the same without the triangle (arXiv 2504.09629); of D alike, (out, in)."""
    half: Tensor = torch.linalg.solve_triangular(factor.T, cross, upper=False, left=False)
    whole: Tensor = torch.linalg.solve_triangular(factor, half, upper=True, left=False)
    return whole.mul_(alpha)


def output_error(weight: Tensor, hessian: Tensor, outputs: Tensor | None = None) -> float:
    """Return tr(F W H WT), the mean over tokens of xT WT F W x, of a weight or a difference of weights, (out, in).

    F is `outputs`, (out, out); None for the identity.
    """
    with full_float32():
        weighed = weight if outputs is None else outputs @ weight
        return max(0.0, float(((weight @ hessian) * weighed).sum(dtype=torch.float64)))


def _columns_first(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight` transposed, as a new contiguous (in, out) tensor of `dtype`."""
    if weight.dim() != 2:
        raise ShapeError(f"the weight has shape {tuple(weight.shape)}; solvers take a matrix (out, in)")
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError("the weight holds NaN or infinity; check the file that the model was loaded from")
    return torch.empty(weight.shape[::-1], dtype=dtype, device=weight.device).copy_(weight.detach().T)
