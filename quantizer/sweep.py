"""The sweep over columns that GPTQ, GPTAQ and QEP share: grids where groups begin, codes column by column.

All rows go at once, so everything inside is held columns first: (in, out). Names are those of `gptq.py`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..kernels.library import KernelLibrary
from ..kernels.sweep import MOST_COLUMNS, Sweep, sweep_block
from ..kernels.trial import sweep_library
from .config import QuantizeConfig
from .grid import GroupGrid, IntegerZeroPoint, Snap, fit_grid, improve_grid
from .order import ColumnOrder
from .quantized import QuantizedWeight
from .superblock import TwoLevel

_SEGMENT = 16  # columns swept one by one before the rest of the block is updated with one matrix product


class _Moves(NamedTuple):
    """What rounding some columns does to later ones: U, and GPTAQ's P where there is a correction on the way."""

    inverse: Tensor
    shift: Tensor | None

    def inside(self, part: slice) -> _Moves:
        """Return what some of the columns do to one another."""
        return _Moves(self.inverse[part, part], None if self.shift is None else self.shift[part, part])

    def onto_later(self, block: Tensor, part: slice, scaled: Tensor) -> None:
        """Bring what comes after some columns of a block up to date with them, `scaled` being (w_i - q_i) / U_ii."""
        rest = slice(part.stop, None)
        block[rest].addmm_(self.inverse[part, rest].T, scaled, alpha=-1)
        if self.shift is not None:
            block[rest].addmm_(self.shift[part, rest].T, block[part])


class ColumnSweep:
    """The codes and grids of one weight while they are being decided, columns in the order of the sweep.

    Attributes:
        target: W, (columns, rows); GPTAQ's correction is added block by block.
        order: Which column stands at each position, and its group.
        codes: (columns, rows) uint8, decided position by position.
        values: (columns, rows), what the codes stand for.
        rounded: (columns, rows), w at the moment it was rounded, where the rounding is learned afterwards.
        grids: By number of the group, once they are fitted.
        span: Columns whose grids are fitted together: one group, or those of a super-block.
    """

    def __init__(self, target: Tensor, order: ColumnOrder, config: QuantizeConfig, snap: Snap) -> None:
        columns, rows = target.shape
        self.target, self.order, self.config, self.snap = target, order, config, snap
        self.group_size = config.group_size or columns
        self.span = snap.columns if isinstance(snap, TwoLevel) else self.group_size
        self.codes = torch.empty(columns, rows, dtype=torch.uint8, device=target.device)
        self.values = torch.empty_like(target)
        self.rounded = torch.empty_like(target) if config.learn_iterations and not config.refine_rounds else None
        # What learning rounds has not moved far; nor have GGUF's groups of 16 or 32, of which tight grids did no worse.
        self.tight = config.learn_iterations > 0 or config.type is not None
        self.grids: dict[int, GroupGrid] = {}
        self._group: list[int] = order.group.tolist()
        self._library: KernelLibrary | None = None

    def run(self, upper: Tensor, shift: Tensor | None, block_size: int) -> Tensor:
        """Sweep all columns; return the sum of ((w_i - q_i) R_ii)^2 of every row, which equals E Hd ET, (rows,)."""
        target, importance = self.target, upper.diagonal().square()
        self._library = sweep_library(target)
        error = torch.empty_like(target)  # E = W - Q
        current = self.rounded  # w at the moment it was rounded
        if current is None and shift is not None:
            current = torch.empty_like(target)
        loss = torch.zeros_like(target[0], dtype=torch.float64)
        for start in range(0, target.shape[0], block_size):
            stop = min(start + block_size, target.shape[0])
            if shift is not None and current is not None:
                target[start:stop].addmm_(shift[:start, start:stop].T, current[:start])
            block = target[start:stop].clone()
            identity = torch.eye(stop - start, dtype=upper.dtype, device=upper.device)
            inverse = torch.linalg.solve_triangular(upper[start:stop, start:stop], identity, upper=True)
            if start:
                block.addmm_(inverse.T, upper[:start, start:stop].T @ error[:start])
            inner = None if shift is None else shift[start:stop, start:stop]
            scaled = self._sweep_block(block, start, _Moves(inverse, inner), importance)
            loss += scaled.square().sum(0, dtype=torch.float64)
            if current is not None:
                current[start:stop] = block
            if inner is not None:
                target[start:stop].addmm_(inner.T, block)
            error[start:stop] = target[start:stop] - self.values[start:stop]
        return loss

    def _sweep_block(self, block: Tensor, start: int, moves: _Moves, importance: Tensor) -> Tensor:
        """Round the columns of one block in turn; return (w_i - q_i) / U_ii of each, (columns, rows).

        `block` enters up to date with all earlier blocks and leaves as the weights at the moment they were rounded.
        Grids are fitted where their groups begin, to up-to-date weights.
        """
        scaled = torch.empty_like(block)
        for begin in range(0, len(block), self.span):
            part = slice(begin, begin + self.span)
            inside = moves.inside(part)
            self._begin_group(start + begin, block[part], inside, importance)
            places = slice(start + begin, start + begin + len(block[part]))
            grids = [self.grids[group] for group in self._group[places]]
            decided = self.codes[places], self.values[places]
            scaled[part] = self._sweep_columns(block[part], grids, *decided, inside)
            moves.onto_later(block, part, scaled[part])
        return scaled

    def _sweep_columns(
        self, block: Tensor, grids: list[GroupGrid], codes: Tensor, values: Tensor, moves: _Moves
    ) -> Tensor:
        """Decide the codes of columns, each on its grid, and what they stand for.

        Columns of one segment are updated one by one, or in one kernel, which sums in another order: a code on the
        edge may differ. Those beyond it are updated with one matrix product per segment.
        """
        scaled, fused = torch.empty_like(block), self._library is not None
        segment = MOST_COLUMNS if fused else _SEGMENT
        for begin in range(0, len(block), segment):
            part = slice(begin, begin + segment)
            sweep = self._sweep_segment_fused if fused else _sweep_segment
            scaled[part] = sweep(block[part], grids[part], codes[part], values[part], moves.inside(part))
            moves.onto_later(block, part, scaled[part])
        return scaled

    def _sweep_segment_fused(
        self, block: Tensor, grids: list[GroupGrid], codes: Tensor, values: Tensor, moves: _Moves
    ) -> Tensor:
        """Do what `_sweep_segment` does in one kernel.

        Whose grids have zero points: what those leave of other offsets is taken off the weights as long as it runs.
        """
        inverse, shift = moves
        number = {grid: place for place, grid in enumerate(dict.fromkeys(grids))}
        scale, zero = (torch.stack([getattr(grid, name) for grid in number]) for name in ("scale", "zero"))
        group = torch.zeros(len(block), dtype=torch.int32, device=block.device)
        if len(number) > 1:
            group.copy_(torch.tensor([number[grid] for grid in grids]))
        sweep = Sweep(
            block=block,
            inverse=inverse.contiguous(),
            shift=None if shift is None else shift.contiguous(),
            group=group,
            scale=scale,
            zero=zero,
            codes=codes,
            values=values,
        )
        if isinstance(self.snap, IntegerZeroPoint):
            return sweep_block(cast(KernelLibrary, self._library), sweep, bits=self.config.bits)
        rest = torch.stack([grid.rest for grid in number])[group]
        block -= rest if shift is None else rest - shift.T @ rest
        scaled = sweep_block(cast(KernelLibrary, self._library), sweep, bits=self.config.bits)
        block += rest
        offset = torch.stack([grid.offset for grid in number])[group]
        torch.addcmul(offset, codes.to(scale.dtype), scale[group], out=values)
        return scaled

    def _begin_group(self, position: int, block: Tensor, moves: _Moves, importance: Tensor) -> None:
        """Fit the grids of the groups that begin at `position`, with the columns of `block`, if any do."""
        if self.order.static or position % self.span:
            return
        # A group wider than its block (one group per row) begins before anything was moved onto it.
        group, inside = self._group[position], self.span <= len(block)
        groups = self._group[position:][: self.span]
        self._fit_grids(groups, block if inside else self.target, importance[position:][: self.span])
        if self.config.grid == "sim" and inside and not isinstance(self.snap, TwoLevel):
            lost = partial(self._simulate, moves=moves)
            self.grids[group] = improve_grid(
                self.grids[group], block, lost, bits=self.config.bits, sym=self.config.sym, snap=self.snap
            )

    def _simulate(self, grid: GroupGrid, block: Tensor, moves: _Moves) -> Tensor:
        """Return what the sweep of a group would lose on a grid, (rows,); `block` is used up."""
        codes, values = torch.empty_like(block, dtype=torch.uint8), torch.empty_like(block)
        scaled = self._sweep_columns(block, [grid] * len(block), codes, values, moves)
        return scaled.square_().sum(0)

    def _fit_grids(self, groups: list[int], weight: Tensor, importance: Tensor) -> None:
        """Fit the grid of a group, or those of a super-block, to the weights of their columns, (columns, rows)."""
        bits, sym = self.config.bits, self.config.sym
        judges = None if self.config.grid == "minmax" else importance
        if not isinstance(self.snap, TwoLevel):
            grid = fit_grid(weight, bits=bits, sym=sym, snap=self.snap, importance=judges, tight=self.tight)
            self.grids[groups[0]] = grid
            return
        places = sorted(range(len(groups)), key=groups.__getitem__)
        members = torch.tensor(places, device=weight.device).view(-1, self.group_size).T  # (columns of a group, groups)
        judges = None if judges is None else judges[members]
        fitted = self.snap.fit(weight[members], bits=bits, sym=sym, importance=judges)
        for group, scale, offset in zip(sorted(set(groups)), fitted.scale, fitted.offset, strict=True):
            self.grids[group] = GroupGrid(scale, offset, fitted.max_code)

    def fit_static_grids(self, importance: Tensor) -> None:
        """Fit every group's grid to the original weights of its original columns."""
        together = torch.argsort(self.order.group // (self.span // self.group_size), stable=True)
        groups = self.order.group[together].tolist()
        for start in range(0, self.target.shape[0], self.span):
            members = together[start : start + self.span]
            self._fit_grids(groups[start : start + self.span], self.target[members], importance[members])

    def round(self, positions: slice, weight: Tensor) -> None:
        """Decide the codes at `positions`, all of one group, from their weights."""
        _round(self.grids[self._group[positions.start]], weight, self.codes[positions], self.values[positions])

    def corrected(self) -> Tensor:
        """Return W with its correction, (rows, columns) in the model's order."""
        return self.target[torch.argsort(self.order.permutation)].T

    def latent(self) -> Tensor | None:
        """Return what was rounded, (rows, columns) float32 in the model's order, where it was kept."""
        return None if self.rounded is None else self.rounded[torch.argsort(self.order.permutation)].T.float()

    def quantized_weight(self) -> QuantizedWeight:
        """Return the result, columns back in the model's order."""
        back = torch.argsort(self.order.permutation)
        grids = [self.grids[group] for group in range(len(self.grids))]
        return QuantizedWeight(
            codes=self.codes[back].T.contiguous(),
            scale=torch.stack([grid.scale for grid in grids], 1).float(),
            offset=torch.stack([grid.offset for grid in grids], 1).float(),
            group_index=self.order.group[back].to(torch.int32),
            bits=self.config.bits,
            group_size=self.group_size,
            sym=self.config.sym,
        )


def _sweep_segment(block: Tensor, grids: list[GroupGrid], codes: Tensor, values: Tensor, moves: _Moves) -> Tensor:
    """Do what `_sweep_columns` does, column by column."""
    inverse, shift = moves
    scaled = torch.empty_like(block)
    for i, grid in enumerate(grids):
        _round(grid, block[i], codes[i], values[i])
        scaled[i] = (block[i] - values[i]) / inverse[i, i]
        block[i + 1 :].addr_(inverse[i, i + 1 :], scaled[i], alpha=-1)
        if shift is not None:
            block[i + 1 :].addr_(shift[i, i + 1 :], block[i])
    return scaled


def _round(grid: GroupGrid, weight: Tensor, codes: Tensor, values: Tensor) -> None:
    """Write the nearest codes of weights, and what they stand for."""
    nearest = grid.encode(weight)
    codes.copy_(nearest)
    values.copy_(grid.decode(nearest))
