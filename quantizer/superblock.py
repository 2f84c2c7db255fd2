"""Grids of GGUF's blocks: float16 scales with offsets of their own, and scales and offsets of two levels.

In a K-quant the groups of a super-block of 256 columns share two float16 numbers, d and dmin: the scale of a group is
a whole multiple of d, and its offset a negative whole multiple of dmin. So the grids of a super-block are decided
together, before the first of its columns is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from .grid import GroupGrid, as_float16, beside, best_of, fit_grid

_AROUND = (0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0)  # whole multiples tried around the nearest one
_REFITS = 2  # of d and dmin; grids without offsets would gain next to nothing
_LEAST, _MOST = 2.0**-24, 65504.0  # of float16; d of small weights is below its normal numbers
_as_float16 = partial(as_float16, least=_LEAST)


@dataclass(frozen=True)
class Float16Offset:
    """A `Snap`: float16 scales, negative ones too, and float16 offsets (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0)."""

    def __call__(self, scale: Tensor, offset: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
        """Return both as float16 holds them."""
        stored = _as_float16(scale)
        if offset is None:
            return stored, stored * -(2 ** (bits - 1))
        return stored, offset.clamp(-_MOST, _MOST).half().to(offset.dtype)


@dataclass(frozen=True)
class TwoLevel:
    """A `Snap` of the groups of a super-block: `fit` decides their grids; what a single one can hold is anything.

    Attributes:
        scales: Least and largest whole multiple of d; negative ones where grids are symmetric.
        offsets: Largest whole multiple of dmin; 0 where grids are symmetric.
        columns: Of a super-block.
    """

    scales: tuple[int, int]
    offsets: int = 0
    columns: int = 256

    @property
    def signed(self) -> bool:
        """Whether scales may be negative."""
        return self.scales[0] < 0

    def __call__(self, scale: Tensor, offset: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
        """Return a grid of which nothing is rounded yet: offsets are never positive."""
        scale = torch.where(scale.abs() < _LEAST, _LEAST, scale)
        return scale, scale * -(2 ** (bits - 1)) if offset is None else offset.clamp(max=0)

    def fit(self, weight: Tensor, *, bits: int, sym: bool, importance: Tensor | None) -> GroupGrid:
        """Return the grids of all groups of a super-block, for every row.

        Every group's grid is fitted by itself; d and dmin are chosen so that the largest scale and offset are reached.
        With `importance` every group then takes the best of the multiples next to the nearest ones, and d and dmin are
        fitted again to the codes by least squares.

        Args:
            weight: (columns of a group, groups, rows).
            bits: Bits per code.
            sym: Symmetric grids.
            importance: (columns of a group, groups), the weight of each column's squared error.

        Returns:
            Scales and offsets (groups, rows).
        """
        alone = fit_grid(weight, bits=bits, sym=sym, snap=self, importance=importance, tight=True)
        widest = alone.scale.gather(0, alone.scale.abs().argmax(0, keepdim=True))
        unit = _as_float16(widest / (self.scales[0] if self.signed else self.scales[1]))
        floor = _as_float16(-alone.offset.amin(0, keepdim=True) / max(self.offsets, 1))
        if importance is None:
            return self._near(alone, unit, floor, 0, 0)
        best = self._search(alone, unit, floor, weight, importance)
        for _ in range(0 if sym else _REFITS):
            again = _refit(best, unit, floor, weight, importance)
            other = self._search(best, *again, weight, importance)
            better = other.error(weight, importance).sum(0) < best.error(weight, importance).sum(0)
            scale = torch.where(better, other.scale, best.scale)
            best = GroupGrid(scale, torch.where(better, other.offset, best.offset), best.max_code)
            unit, floor = torch.where(better, again[0], unit), torch.where(better, again[1], floor)
        return best

    def _near(
        self, grid: GroupGrid, unit: Tensor, floor: Tensor, steps: Tensor | int, downs: Tensor | int
    ) -> GroupGrid:
        """Return the grids of the multiples of d and dmin, (1, rows), so many beside those nearest to `grid`."""
        least, most = self.scales
        times = ((grid.scale / unit).round_() + steps).clamp_(least if self.signed else 1, most)
        scale = unit * torch.where(times == 0, 1.0, times)
        if not self.offsets:
            return GroupGrid(scale, scale * -((grid.max_code + 1) // 2), grid.max_code)
        depth = ((-grid.offset / floor).round_() + downs).clamp_(0, self.offsets)
        return GroupGrid(scale, -(depth * floor), grid.max_code)

    def _search(self, grid: GroupGrid, unit: Tensor, floor: Tensor, weight: Tensor, importance: Tensor) -> GroupGrid:
        """Return of every group the best of the multiples around `grid`."""
        steps, downs = zip(*product(_AROUND, _AROUND if self.offsets else (0.0,)), strict=True)
        near = self._near(grid, unit, floor, beside(steps, grid.scale), beside(downs, grid.scale))
        return best_of(near, weight, partial(GroupGrid.error, importance=importance))[0]


def _refit(grid: GroupGrid, unit: Tensor, floor: Tensor, weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return d and dmin of least weighted squared error for the codes and multiples of `grid`, (1, rows) each."""
    rises = grid.encode(weight) * (grid.scale / unit).round_()  # value = d * rises - dmin * falls
    falls = (-grid.offset / floor).round_().expand_as(rises)
    heavy = importance.unsqueeze(-1)
    a, b, c, u, v = (
        (heavy * left * right).sum((0, 1))
        for left, right in ((rises, rises), (rises, falls), (falls, falls), (rises, weight), (falls, weight))
    )
    determinant = a * c - b * b
    found = (u * c - v * b) / determinant, (u * b - v * a) / determinant
    good = [torch.where((new > 0) & new.isfinite(), new, old) for new, old in zip(found, (unit, floor), strict=True)]
    return _as_float16(good[0]), _as_float16(good[1])
