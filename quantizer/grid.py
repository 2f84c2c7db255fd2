"""The grid that codes live on: value = (code - zero) * scale.

Weights are held columns first, (columns, rows), so that one column of all rows is contiguous; a grid has one scale and
one zero per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Candidate ranges of the search, as shares of the range from minimum to maximum.
_COARSE = tuple(1.0 - 0.05 * step for step in range(1, 13))
_FINE = (-0.025, 0.025, -0.0125, 0.0125)


@dataclass(frozen=True, eq=False)
class GroupGrid:
    """The grids of one group of columns: value = (code - zero) * scale.

    Attributes:
        scale: (rows,) in the solver's dtype; every value is a float16 number.
        zero: (rows,) in the solver's dtype; every value is an integer in 0 ... max_code.
        max_code: 2^bits - 1.
    """

    scale: Tensor
    zero: Tensor
    max_code: int

    def encode(self, weight: Tensor) -> Tensor:
        """The nearest codes, as integers in the dtype of `weight`, (..., rows)."""
        return (weight / self.scale).round_().add_(self.zero).clamp_(0, self.max_code)

    def decode(self, codes: Tensor) -> Tensor:
        """The values of `codes`, (..., rows)."""
        return (codes - self.zero) * self.scale


def fit_grid(weight: Tensor, *, bits: int, sym: bool, min_zero: int = 0, importance: Tensor | None = None) -> GroupGrid:
    """The grid of one group for every row.

    Without `importance` the grid spans minimum to maximum (zero always representable): asymmetric
    s = (hi - lo) / (2^b - 1), z = round(-lo / s); symmetric s = 2 max|w| / (2^b - 1), z = 2^(b-1). With it, shrunken
    ranges and, where asymmetric, neighbouring zeros are tried, and every row keeps the one of least weighted squared
    error. Scales are rounded to float16 before they are used.

    Args:
        weight: (columns, rows) of one group, float.
        bits: Bits per code.
        sym: Symmetric grids.
        min_zero: The smallest zero allowed: 1 where the file stores zero - 1.
        importance: (columns,) weight of each column's squared error, such as the Hessian's (conditional) diagonal.
    """
    max_code = 2**bits - 1
    low = weight.amin(0).clamp_(max=0)
    high = weight.amax(0).clamp_(min=0)
    if sym:
        high = torch.maximum(-low, high)
        low = -high

    def shrunk(share: Tensor | float) -> tuple[Tensor, Tensor]:
        scale = _as_float16((high - low) * (share / max_code))
        if sym:
            return scale, torch.full_like(scale, 2 ** (bits - 1))
        zero = (-low * share / scale).round_().clamp_(0, max_code)
        if min_zero:  # a range that starts at zero gives up its lowest code
            zero = zero.clamp_(min=min_zero)
            wider = _as_float16(torch.maximum(scale, high * (share / (max_code - min_zero))))
            scale = torch.where(zero == min_zero, wider, scale)
        return scale, zero

    scale, zero = shrunk(1.0)
    if importance is None:
        return GroupGrid(scale, zero, max_code)

    def loss(scale: Tensor, zero: Tensor) -> Tensor:
        return _weighted_error(weight, scale, zero, max_code, importance)

    best = loss(scale, zero)
    share = torch.ones_like(scale)

    def keep_better(candidate: tuple[Tensor, Tensor], candidate_share: Tensor | float) -> None:
        nonlocal best, scale, zero, share
        error = loss(*candidate)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, candidate[0], scale)
        zero = torch.where(better, candidate[1], zero)
        share = torch.where(better, candidate_share, share)

    for coarse in _COARSE:
        keep_better(shrunk(coarse), coarse)
    centre = share
    for fine in _FINE:
        keep_better(shrunk(centre + fine), centre + fine)
    if not sym:
        for step in (-1, 1):
            keep_better((scale, (zero + step).clamp(min_zero, max_code)), share)
    return GroupGrid(scale, zero, max_code)


def _as_float16(scale: Tensor) -> Tensor:
    """`scale` rounded to the float16 that will be stored, kept normal and finite, in its own dtype."""
    limits = torch.finfo(torch.float16)
    return scale.clamp(limits.tiny, limits.max).half().to(scale.dtype)


def _weighted_error(weight: Tensor, scale: Tensor, zero: Tensor, max_code: int, importance: Tensor) -> Tensor:
    """Sum over columns of importance * (rounded - weight)^2, (rows,)."""
    codes = weight / scale
    codes.round_().add_(zero).clamp_(0, max_code).sub_(zero).mul_(scale).sub_(weight)
    return importance @ codes.square_()
