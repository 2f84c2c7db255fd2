"""The grid that codes live on: value = code * scale + offset.

Weights are held columns first, (columns, rows), so that one column of all rows is contiguous; a grid has one scale and
one offset per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeAlias

import torch
from torch import Tensor

# Candidate ranges of the search, as shares of the range from minimum to maximum; then others beside the best of them.
_COARSE = tuple(1 - step / 32 for step in range(9))
_FINE = (0.0, -1 / 64, 1 / 64, -1 / 128, 1 / 128)
_TIGHT_COARSE = tuple(1.0 - 0.05 * step for step in range(13))
_TIGHT_FINE = (0.0, -0.025, 0.025, -0.0125, 0.0125)
_NEAR = (1.0, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3)  # of scales, in the search by simulation
_STEPS = (0.0, 1.0, -1.0)  # of offsets, in scales
_NOISE = 1e-5  # of an error
_FITTED, _SIMULATED, _ON_GPU = 2**16, 2**20, 2**24  # weights on which grids are tried at once: on a CPU, and on a GPU

Snap: TypeAlias = Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]]
"""(scale, offset, bits) -> the nearest scale and offset that a file can hold, element by element, in the same dtype.

Without an offset the grid is symmetric: the offset is -2^(bits - 1) times the scale that the file holds.
"""


@dataclass(frozen=True)
class IntegerZeroPoint:
    """A `Snap`: float16 scales, and offsets that are -zero_point * scale with zero points of as many bits as codes.

    Attributes:
        least: The least zero point that the file can hold. GPTQ version 1 stores zero_point - 1, so 1: there a range
            that starts at zero gives up its lowest code, and the scale grows so that its end is still reached.
    """

    least: int = 0

    def __call__(self, scale: Tensor, offset: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
        """Return the scale as float16 holds it, normal and finite, and the offset of the nearest zero point."""
        max_code = 2**bits - 1
        stored = as_float16(scale)
        if offset is None:
            return stored, stored * -(2 ** (bits - 1))
        zero = (-offset / stored).round_().clamp_(self.least, max_code).add_(0.0)  # 0, never -0, as it is read back
        if self.least:
            high = (scale * max_code + offset).clamp_(min=0)
            wider = as_float16(torch.maximum(stored, high / (max_code - self.least)))
            stored = torch.where(zero == self.least, wider, stored)
        return stored, -(zero * stored)


@dataclass(frozen=True, eq=False)
class GroupGrid:
    """The grids of one group of columns: scale and offset are (rows,) in the solver's dtype, max_code is 2^bits - 1."""

    scale: Tensor
    offset: Tensor
    max_code: int

    @cached_property
    def zero(self) -> Tensor:
        """The integer nearest to -offset / scale, (rows,): the zero point where there is one."""
        return (-self.offset / self.scale).round_()

    @cached_property
    def rest(self) -> Tensor:
        """What `zero` leaves of the offset, (rows,): 0 where it is a zero point."""
        return self.offset + self.zero * self.scale

    def number(self, which: Tensor) -> GroupGrid:
        """Return of every row the one of that number among several grids, (candidates, ..., rows)."""
        picked = which.unsqueeze(0)
        return GroupGrid(self.scale.gather(0, picked)[0], self.offset.gather(0, picked)[0], self.max_code)

    def _steps(self, weight: Tensor) -> Tensor:
        """Return code - zero of the nearest codes to `weight`, which is less the rest."""
        return (weight / self.scale).round_().clamp_(-self.zero, self.max_code - self.zero)

    def encode(self, weight: Tensor) -> Tensor:
        """Return the nearest codes, as integers in the dtype of `weight`, (..., rows)."""
        return self._steps(weight - self.rest).add_(self.zero)

    def decode(self, codes: Tensor) -> Tensor:
        """Return the values of `codes`, (..., rows)."""
        return codes * self.scale + self.offset

    def error(self, weight: Tensor, importance: Tensor, *, tight: bool = True) -> Tensor:
        """Return the sum over columns of importance * |rounded - weight|^p, (rows,) or (groups, rows).

        p is 2, where the grid need not be `tight` 3.
        """
        shifted = weight - self.rest
        lost = self._steps(shifted).mul_(self.scale).sub_(shifted)
        powers = lost.square_() if tight else lost.square().mul_(lost.abs_())
        return importance @ powers if importance.dim() == 1 else powers.mul_(importance.unsqueeze(-1)).sum(0)


def fit_grid(
    weight: Tensor, *, bits: int, sym: bool, snap: Snap, importance: Tensor | None = None, tight: bool = False
) -> GroupGrid:
    """Return the grid of one group for every row.

    Without `importance` the grid spans minimum to maximum: asymmetric s = (hi - lo) / (2^b - 1), offset = lo, zero
    always representable; symmetric |s| = 2 max|w| / (2^b - 1), offset = -2^(b-1) s, s below 0 where the largest weight
    is positive, so that the side that reaches one step further is its own. With it, shrunken ranges and, where
    asymmetric, offsets one scale away are tried, where symmetric, scales of the other sign, and every row keeps the one
    of least `GroupGrid.error`. Every candidate is snapped to what the file can hold before it is used.

    Args:
        weight: (columns, rows) of one group, float; or (columns, groups, rows) of several.
        bits: Bits per code.
        sym: Symmetric grids.
        snap: What the file can hold.
        importance: (columns,) or (columns, groups): weight of each column's error, such as the Hessian's
            (conditional) diagonal.
        tight: Try ranges down to 0.4 of the whole and count squares, which is best for the weights as they are. A sweep
            moves weights before their turn comes, by what others lost, and such grids clip them: it wants ranges of
            3/4 and more, and cubes.
    """
    max_code = 2**bits - 1
    low = weight.amin(0).clamp_(max=0)
    high = weight.amax(0).clamp_(min=0)
    whole = high - low
    if sym:
        whole = torch.where(high > -low, -2.0, 2.0) * torch.maximum(-low, high)

    def shrunk(share: Tensor) -> GroupGrid:
        return GroupGrid(*snap(whole * (share / max_code), None if sym else low * share, bits), max_code)

    if importance is None:
        return shrunk(torch.ones_like(whole))

    def error(grid: GroupGrid, weight: Tensor) -> Tensor:
        return grid.error(weight, importance, tight=tight)

    coarse, fine = (beside(each, whole) for each in ((_TIGHT_COARSE, _TIGHT_FINE) if tight else (_COARSE, _FINE)))
    if sym:  # the further step on the other side
        coarse = torch.cat([coarse, -coarse])
    _, first = best_of(shrunk(coarse), weight, error)
    share = coarse.flatten()[first]
    grid, _ = best_of(shrunk(share + fine), weight, error)
    return grid if sym else best_of(stepped(grid, bits, snap), weight, error)[0]


def best_of(
    grids: GroupGrid, weight: Tensor, error: Callable[[GroupGrid, Tensor], Tensor], most: int = _FITTED
) -> tuple[GroupGrid, Tensor]:
    """Return of every row the best of several grids, the first where another is hardly better, and its number.

    Where no weight is clipped, a grid and the one a scale beside it lose the same, but for how their sums are rounded.

    Args:
        grids: Scales and offsets (candidates, ..., rows).
        weight: (columns, ..., rows).
        error: What a grid comes to on weights, which it may use up, (..., rows).
        most: Weights on which grids are tried at once, side by side, on a CPU.
    """
    if weight.device.type == "cuda":
        most = _ON_GPU
    count = max(1, most // weight.numel())
    tried = []
    for scale, offset in zip(torch.split(grids.scale, count), torch.split(grids.offset, count), strict=True):
        wide = weight.repeat(*[1] * (weight.dim() - 1), len(scale))
        scale, offset = (each.movedim(0, -2) for each in (scale, offset))
        together = GroupGrid(scale.flatten(-2), offset.flatten(-2), grids.max_code)
        tried.append(error(together, wide).view(scale.shape).movedim(-2, 0))
    errors = torch.cat(tried)
    errors[0] *= 1 - _NOISE
    number = errors.argmin(0)
    return grids.number(number), number


def stepped(grid: GroupGrid, bits: int, snap: Snap) -> GroupGrid:
    """Return a grid, and those one scale up and down, (candidates, ..., rows)."""
    offset = grid.offset + grid.scale * beside(_STEPS, grid.scale)
    return GroupGrid(*snap(grid.scale.expand_as(offset), offset, bits), grid.max_code)


def improve_grid(
    grid: GroupGrid,
    weight: Tensor,
    error: Callable[[GroupGrid, Tensor], Tensor],
    *,
    bits: int,
    sym: bool,
    snap: Snap,
) -> GroupGrid:
    """Return, for every row, the best of a grid and some near it: wider, narrower, and one scale up or down.

    Args:
        grid: Where to begin.
        weight: (columns, rows).
        error: As `best_of` takes it.
        bits: Bits per code.
        sym: Symmetric grids.
        snap: What the file can hold.
    """
    near = beside(_NEAR, grid.scale)
    wider = GroupGrid(*snap(grid.scale * near, None if sym else grid.offset * near, bits), grid.max_code)
    grid, _ = best_of(wider, weight, error, _SIMULATED)
    return grid if sym else best_of(stepped(grid, bits, snap), weight, error, _SIMULATED)[0]


def beside(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return numbers as a tensor (candidates, 1, ...), to multiply `like` by all of them."""
    return _constants(values, like.dtype, like.device).view(-1, *[1] * like.dim())


@cache
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor, copied to a GPU once."""
    return torch.tensor(values, dtype=dtype, device=device)


def as_float16(scale: Tensor, least: float = torch.finfo(torch.float16).tiny) -> Tensor:
    """Return `scale` rounded to float16, kept finite and, by default, normal, in its own dtype."""
    size = scale.abs().clamp(least, torch.finfo(torch.float16).max).half().to(scale.dtype)
    return torch.where(scale < 0, -size, size)
