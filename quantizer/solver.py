"""Plain rounding, GPTQ and GPTAQ: a weight and the statistics of its inputs -> integer codes, scales and zeros.

Weights are swept column by column, all rows at once, so everything inside is held columns first: (in, out). Names
follow the papers: R upper triangular with H = R RT, U = inv(R), E = W - Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.hessian import full_float32
from ..errors import NonFiniteError, ShapeError
from ..kernels.library import KernelLibrary
from ..kernels.sweep import MOST_COLUMNS, sweep_block, sweep_library
from .config import QuantizeConfig
from .factor import HessianFactor, factorize
from .grid import GroupGrid, fit_grid
from .order import ColumnOrder, column_order
from .quantized import QuantizedWeight

_SEGMENT = 16  # columns swept one by one before the rest of the block is updated with one matrix product


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """What a solver found.

    Attributes:
        weight: Codes, scales and zeros.
        loss: tr(E Hd ET), E = W - Q, summed along the sweep; Hd is the damped Hessian, and for GPTAQ W includes its
            correction. None for plain rounding.
        damp: Share of mean(diag H) added to the diagonal in the end; None for plain rounding.
        damp_escalations: How often damping had to grow.
        dead_columns: Columns whose inputs were always zero.
    """

    weight: QuantizedWeight
    loss: float | None = None
    damp: float | None = None
    damp_escalations: int = 0
    dead_columns: int = 0


def solve_rtn(weight: Tensor, config: QuantizeConfig, hessian: Tensor | None = None) -> Solution:
    """Round every weight to the nearest point of its group's grid.

    Args:
        weight: W, (out, in), any float dtype; not modified.
        config: Bits, groups, sym, format; with `mse`, grids are searched.
        hessian: H, (in, in): its diagonal weighs the search.

    Raises:
        ConfigError: `group_size` does not divide the columns.
        NonFiniteError: The weight holds NaN or infinity.
    """
    target = _columns_first(weight, torch.float32)
    columns = target.shape[0]
    ones = torch.ones(columns, device=target.device)
    importance = ones if hessian is None else hessian.diagonal().float()
    order = column_order(ones, config.group_size or columns, desc_act=False, static_groups=True, act_group_aware=False)
    sweep = _Sweep(target, order, config)
    sweep.fit_static_grids(importance)
    for start in range(0, columns, sweep.group_size):
        sweep.round(slice(start, start + sweep.group_size), target[start : start + sweep.group_size])
    return Solution(weight=sweep.quantized_weight())


def solve_gptq(weight: Tensor, hessian: Tensor, config: QuantizeConfig) -> Solution:
    """Round `weight` column by column, moving each column's error onto later ones.

    Algorithm 1 of Frantar et al. 2022 (arXiv 2210.17323) in its left-looking form: one matrix product per block of
    columns brings the block up to date, so that group grids are always fitted to compensated weights.

    Args:
        weight: W, (out, in), any float dtype; not modified.
        hessian: H, (in, in), the mean over tokens of x xT; not modified.
        config: The grid, the order of columns and the damping.

    Raises:
        ConfigError: `group_size` does not divide the columns.
        ShapeError: H does not fit W.
        NonFiniteError: W or H holds NaN or infinity.
        SingularHessianError: H is not positive definite at the largest damping allowed.
    """
    return _solve(weight, hessian, None, config)


def solve_gptaq(weight: Tensor, hessian: Tensor, cross: Tensor, config: QuantizeConfig) -> Solution:
    """Round `weight` so that its outputs on the quantized model's inputs match those of the float model on its own.

    GPTAQ (arXiv 2504.02692): besides GPTQ's update, every column i adds w_i P[i, i+1:] to later columns,
    P = alpha * triu(C UT, 1) U. With C = 0 this is GPTQ.

    Args:
        weight: W, (out, in), any float dtype; not modified.
        hessian: H, (in, in), the mean over tokens of x xT, x the quantized model's inputs; not modified.
        cross: C, (in, in), the mean over tokens of (x~ - x) xT, x~ the float model's inputs; not modified.
        config: The grid, the order of columns, the damping and `alpha`.

    Raises:
        ConfigError, ShapeError, NonFiniteError, SingularHessianError: As `solve_gptq`.
    """
    return _solve(weight, hessian, cross, config)


def correction(cross: Tensor, factor: Tensor, alpha: float) -> Tensor:
    """P = alpha * triu(C UT, 1) U, (in, in), strictly upper.

    Row q holds alpha * C[q, F] inv(Hd[F, F]), F the columns after q (arXiv 2504.02692, Theorem 4.2); U = inv(R) is
    applied by triangular solves.

    Args:
        cross: C in the order of the sweep, (in, in).
        factor: R, (in, in) upper triangular.
        alpha: Strength.
    """
    rotated: Tensor = torch.linalg.solve_triangular(factor, cross.T, upper=True).T.triu(1)
    shift: Tensor = torch.linalg.solve_triangular(factor, rotated, upper=True, left=False)
    return shift.mul_(alpha)


def output_power(weight: Tensor, hessian: Tensor) -> float:
    """tr(W H WT): the mean over tokens of ||W x||^2.

    Args:
        weight: W, (out, in) float32; or a difference of weights.
        hessian: H, (in, in) float32, not damped.
    """
    with full_float32():
        return max(0.0, float(((weight @ hessian) * weight).sum(dtype=torch.float64)))


@torch.no_grad()
def _solve(weight: Tensor, hessian: Tensor, cross: Tensor | None, config: QuantizeConfig) -> Solution:
    dtype = torch.float64 if config.float64 else torch.float32
    target = _columns_first(weight, dtype)
    columns = target.shape[0]
    for name, matrix in (("hessian", hessian), ("cross", cross)):
        if matrix is not None and tuple(matrix.shape) != (columns, columns):
            raise ShapeError(
                f"{name} is {tuple(matrix.shape)}, but a weight of {tuple(weight.shape)} needs {(columns, columns)}"
            )
    group_size = config.group_size or columns
    order = column_order(
        hessian.diagonal(),
        group_size,
        desc_act=config.desc_act,
        static_groups=config.static_groups,
        act_group_aware=bool(config.act_group_aware),
    )
    factor = factorize(hessian, order.permutation, config.damp, dtype)
    with full_float32():
        shift = None
        if cross is not None:
            in_order = cross[order.permutation][:, order.permutation].to(dtype)
            shift = correction(in_order, factor.upper, config.alpha)
        sweep = _Sweep(target[order.permutation], order, config)
        if order.static:
            sweep.fit_static_grids(hessian.diagonal()[order.permutation].to(dtype))
        loss = _sweep_blocks(sweep, factor, shift, _block_size(config.block_size, group_size, columns))
    return Solution(
        weight=sweep.quantized_weight(),
        loss=loss,
        damp=factor.damp,
        damp_escalations=factor.escalations,
        dead_columns=factor.dead_columns,
    )


def _sweep_blocks(sweep: _Sweep, factor: HessianFactor, shift: Tensor | None, block_size: int) -> float:
    """Sweep all columns; the sum of ((w_i - q_i) R_ii)^2, which equals tr(E Hd ET)."""
    upper = factor.upper
    importance = upper.diagonal().square()
    library = sweep_library(sweep.target) if block_size <= MOST_COLUMNS else None
    target = sweep.target  # W in the order of the sweep; GPTAQ's correction is added block by block
    error = torch.empty_like(target)  # E = W - Q
    current = torch.empty_like(target) if shift is not None else None  # w at the moment it was rounded
    loss = torch.zeros((), dtype=torch.float64, device=target.device)  # read at the end: a GPU is not waited for
    for start in range(0, target.shape[0], block_size):
        stop = min(start + block_size, target.shape[0])
        if shift is not None and current is not None:
            target[start:stop].addmm_(shift[:start, start:stop].T, current[:start])
        block = target[start:stop].clone()
        identity = torch.eye(stop - start, dtype=upper.dtype, device=upper.device)
        inverse = torch.linalg.solve_triangular(upper[start:stop, start:stop], identity, upper=True)
        if start:
            block.addmm_(inverse.T, upper[:start, start:stop].T @ error[:start])
        inner = shift[start:stop, start:stop] if shift is not None else None
        if library is None:
            scaled = _sweep_block(sweep, block, start, inverse, inner, importance)
        else:
            scaled = _sweep_block_fused(library, sweep, block, start, inverse, inner, importance)
        loss += scaled.square().sum(dtype=torch.float64)
        if inner is not None and current is not None:
            current[start:stop] = block
            target[start:stop].addmm_(inner.T, block)
        error[start:stop] = target[start:stop] - sweep.values[start:stop]
    return float(loss)


def _sweep_block(
    sweep: _Sweep, block: Tensor, start: int, inverse: Tensor, shift: Tensor | None, importance: Tensor
) -> Tensor:
    """Round the columns of one block in turn; (w_i - q_i) / U_ii of each, (columns, rows).

    `block` enters up to date with all earlier blocks and leaves as the weights at the moment they were rounded. Columns
    of one segment are updated one by one, those beyond it with one matrix product per segment; segments end where
    groups begin, so that a group's grid sees up-to-date weights.
    """
    scaled = torch.empty_like(block)
    width = block.shape[0]
    begin = 0
    while begin < width:
        if sweep.starts_group(start + begin):
            sweep.fit_grid(start + begin, sweep.members(block, begin), importance[start + begin :][: sweep.group_size])
        end = sweep.segment_end(start, begin, width)
        for i in range(begin, end):
            rounded = sweep.round(start + i, block[i])
            scaled[i] = (block[i] - rounded) / inverse[i, i]
            if i + 1 < end:
                block[i + 1 : end].addr_(inverse[i, i + 1 : end], scaled[i], alpha=-1)
                if shift is not None:
                    block[i + 1 : end].addr_(shift[i, i + 1 : end], block[i])
        if end < width:
            block[end:].addmm_(inverse[begin:end, end:].T, scaled[begin:end], alpha=-1)
            if shift is not None:
                block[end:].addmm_(shift[begin:end, end:].T, block[begin:end])
        begin = end
    return scaled


def _sweep_block_fused(
    library: KernelLibrary,
    sweep: _Sweep,
    block: Tensor,
    start: int,
    inverse: Tensor,
    shift: Tensor | None,
    importance: Tensor,
) -> Tensor:
    """`_sweep_block` as one kernel, whose sums run in another order: a code on the edge between two may differ."""
    width = block.shape[0]
    positions = slice(start, start + width)
    fits_inside = not sweep.order.static and sweep.group_size <= width
    if not fits_inside and sweep.starts_group(start):
        sweep.fit_grid(start, sweep.members(block, 0), importance[start:][: sweep.group_size])
    groups = sweep.order.group[positions]
    first = groups[:: sweep.group_size]  # the groups that begin inside, in the order of the sweep
    scale = sweep.scale.new_empty(first.numel(), block.shape[1]) if fits_inside else sweep.scale
    zero = torch.empty_like(scale) if fits_inside else sweep.zero
    scaled = sweep_block(
        library,
        block,
        inverse.contiguous(),
        shift=None if shift is None else shift.contiguous(),
        importance=importance[positions] if sweep.config.mse else None,
        group=None if fits_inside else groups.to(torch.int32),
        group_size=sweep.group_size,
        scale=scale,
        zero=zero,
        codes=sweep.codes[positions],
        values=sweep.values[positions],
        bits=sweep.config.bits,
        sym=sweep.config.sym,
        min_zero=sweep.config.min_zero,
    )
    if fits_inside:
        sweep.scale[first] = scale
        sweep.zero[first] = zero
    return scaled


class _Sweep:
    """The codes and grids of one weight while they are being decided, columns in the order of the sweep.

    Attributes:
        target: W, (columns, rows).
        order: Which column stands at each position, and its group.
        config: Bits, grids, format.
        group_size: Columns per group.
        codes: (columns, rows) uint8, decided position by position.
        values: (columns, rows), what the codes stand for.
        scale: (groups, rows), in the dtype of `target`; every value is a float16 number.
        zero: (groups, rows), likewise; every value is an integer.
    """

    def __init__(self, target: Tensor, order: ColumnOrder, config: QuantizeConfig) -> None:
        columns, rows = target.shape
        self.target = target
        self.order = order
        self.config = config
        self.group_size = config.group_size or columns
        self.codes = torch.empty(columns, rows, dtype=torch.uint8, device=target.device)
        self.values = torch.empty_like(target)
        self.scale = target.new_empty(columns // self.group_size, rows)
        self.zero = torch.empty_like(self.scale)
        self._group: list[int] = order.group.tolist()

    def starts_group(self, position: int) -> bool:
        """Whether the grid of a group must be fitted before the column at `position` is rounded."""
        return not self.order.static and position % self.group_size == 0

    def members(self, block: Tensor, begin: int) -> Tensor:
        """The up-to-date weights of the group that begins at `begin` of `block`, (columns, rows).

        A group wider than its block (one group per row) begins before anything was moved onto it.
        """
        return block[begin : begin + self.group_size] if self.group_size <= block.shape[0] else self.target

    def segment_end(self, start: int, begin: int, width: int) -> int:
        """Where the segment that begins at `begin` of the block at `start` ends: at the latest where a group begins."""
        position = start + begin
        next_group = position - position % self.group_size + self.group_size - start
        return min(begin + _SEGMENT, next_group, width)

    def fit_grid(self, position: int, weight: Tensor, importance: Tensor) -> None:
        """Fit the grid of the group of `position` to the compensated weights of its columns, (columns, rows)."""
        grid = fit_grid(
            weight,
            bits=self.config.bits,
            sym=self.config.sym,
            min_zero=self.config.min_zero,
            importance=importance if self.config.mse else None,
        )
        self.scale[self._group[position]] = grid.scale
        self.zero[self._group[position]] = grid.zero

    def fit_static_grids(self, importance: Tensor) -> None:
        """Fit every group's grid to the original weights of its original columns."""
        for group in range(self.scale.shape[0]):
            members = (self.order.group == group).nonzero().flatten()
            self.fit_grid(int(members[0]), self.target[members], importance[members])

    def round(self, positions: int | slice, weight: Tensor) -> Tensor:
        """Decide the codes at `positions`, all of one group, from their weights; the values that they stand for."""
        group = self._group[positions.start if isinstance(positions, slice) else positions]
        grid = GroupGrid(self.scale[group], self.zero[group], 2**self.config.bits - 1)
        codes = grid.encode(weight)
        self.codes[positions] = codes
        self.values[positions] = grid.decode(codes)
        return self.values[positions]

    def quantized_weight(self) -> QuantizedWeight:
        """The result, columns back in the model's order."""
        back = torch.argsort(self.order.permutation)
        return QuantizedWeight(
            codes=self.codes[back].T.contiguous(),
            scale=self.scale.T.half().contiguous(),
            zero=self.zero.T.to(torch.int16).contiguous(),
            group_index=self.order.group[back].to(torch.int32),
            bits=self.config.bits,
            group_size=self.group_size,
            sym=self.config.sym,
        )


def _block_size(wanted: int, group_size: int, columns: int) -> int:
    """The block that `wanted` comes to: whole groups, unless one group spans the row."""
    if group_size == columns:
        return wanted
    return max(1, wanted // group_size) * group_size


def _columns_first(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` transposed, as a new contiguous (in, out) tensor of `dtype`."""
    if weight.dim() != 2:
        raise ShapeError(f"the weight has shape {tuple(weight.shape)}; solvers take a matrix (out, in)")
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError("the weight holds NaN or infinity; check the file that the model was loaded from")
    return torch.empty(weight.shape[::-1], dtype=dtype, device=weight.device).copy_(weight.detach().T)
