"""Grids of GGUF's blocks: float16 scales with offsets of their own, and scales and offsets of two levels.

In a K-quant the groups of a super-block of 256 columns share two float16 numbers, d and dmin: the scale of a group is
a whole multiple of d, and its offset a negative whole multiple of dmin. So the grids of a super-block are decided
together, before the first of its columns is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .grid import GroupGrid, fit_grid, keep_better

_NEIGHBOURS = (0, 1, -1)  # whole multiples tried around the nearest one
_LEAST, _MOST = 2.0**-24, 65504.0  # of float16; d of small weights is below its normal numbers


@dataclass(frozen=True)
class Float16Offset:
    """A `Snap`: float16 scales, negative ones too, and float16 offsets (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0).

    Attributes:
        signed: Symmetric grids reach one step further on one side; the sign of the scale chooses the side.
    """

    signed: bool = True

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
        With `importance` every group then takes the best of the multiples next to the nearest ones.

        Args:
            weight: (columns of a group, groups, rows).
            bits: Bits per code.
            sym: Symmetric grids.
            importance: (columns of a group, groups), the weight of each column's squared error.

        Returns:
            Scales and offsets (groups, rows).
        """
        alone = fit_grid(weight, bits=bits, sym=sym, snap=self, importance=importance)
        least, most = self.scales
        widest = alone.scale.gather(0, alone.scale.abs().argmax(0, keepdim=True))
        unit = _as_float16(widest / (least if self.signed else most))
        floor = _as_float16(-alone.offset.amin(0, keepdim=True) / max(self.offsets, 1))
        multiple = (alone.scale / unit).round_()
        depth = (-alone.offset / floor).round_()

        def grid(step: int, down: int) -> GroupGrid:
            times = (multiple + step).clamp_(least if self.signed else 1, most)
            scale = unit * torch.where(times == 0, 1.0, times)
            offset = scale * -(2 ** (bits - 1)) if sym else -((depth + down).clamp_(0, self.offsets) * floor)
            return GroupGrid(scale, offset, 2**bits - 1)

        best = grid(0, 0)
        if importance is None:
            return best
        error = best.error(weight, importance)
        for step in _NEIGHBOURS:
            for down in (0,) if sym else _NEIGHBOURS:
                if step or down:
                    best, error, _ = keep_better(best, error, grid(step, down), weight, importance)
        return best


def _as_float16(values: Tensor) -> Tensor:
    """Return `values` rounded to float16, kept finite and away from 0, in their own dtype."""
    return torch.where(values < 0, -1.0, 1.0) * values.abs().clamp(_LEAST, _MOST).half().to(values.dtype)
