"""The one result of every solver, and what every file and kernel holds: integer codes with the grid they live on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ShapeError


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuantizedWeight:
    """A weight matrix as integer codes: value = code * scale + offset.

    Codes, scales and offsets are decided in the solver and go into the file untouched. Where a file stores an integer
    zero point, offset = -zero_point * scale, which float32 holds exactly, as it does every value.

    Attributes:
        codes: (out, in) uint8, columns in the model's own order, each in 0 ... 2^bits - 1.
        scale: (out, groups) float32; the solver's are positive, but for symmetric ones of GGUF.
        offset: (out, groups) float32.
        group_index: (in,) int32, the group of every input column.
        bits: Bits per code.
        group_size: Columns per group (the number of columns where a group is a whole row).
        sym: Whether every zero point is 2^(bits - 1) by construction.

    Raises:
        ShapeError: Shapes or dtypes that do not fit together.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    group_index: Tensor
    bits: int
    group_size: int
    sym: bool

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = -(-columns // self.group_size)
        for name, tensor, shape, dtype in (
            ("codes", self.codes, (rows, columns), torch.uint8),
            ("scale", self.scale, (rows, groups), torch.float32),
            ("offset", self.offset, (rows, groups), torch.float32),
            ("group_index", self.group_index, (columns,), torch.int32),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ShapeError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; codes of shape {(rows, columns)} with groups of "
                    f"{self.group_size} need {dtype} {shape}"
                )

    def __repr__(self) -> str:
        settings = f"bits={self.bits}, group_size={self.group_size}, sym={self.sym}"
        return f"QuantizedWeight({self.codes.shape[0]} x {self.codes.shape[1]}, {settings})"

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.codes.shape[1]

    @property
    def trivial_group_index(self) -> bool:
        """Whether column k simply belongs to group k // group_size, so that a reader needs no g_idx."""
        return torch.equal(trivial_index(self.in_features, self.group_size, self.group_index.device), self.group_index)

    def zero_point(self) -> Tensor:
        """Return the integer zero points -offset / scale, (out, groups) int16; anything where a file's scale is 0.

        Raises:
            ShapeError: Some offset is no whole multiple of its scale.
        """
        zero, exact = self.nearest_zeros()
        if not exact.all():
            raise ShapeError(f"{int((~exact).sum())} of {zero.numel()} groups have no integer zero point")
        return zero.to(torch.int16)

    def nearest_zeros(self) -> tuple[Tensor, Tensor]:
        """Return the integers nearest to -offset / scale, (out, groups) float32, and where they make the offset.

        Where a scale is 0, as in files of other programs for groups of zeros, any would do.
        """
        zero = torch.where(self.scale == 0, 2.0 ** (self.bits - 1), (-self.offset / self.scale).round())
        return zero, -(zero * self.scale) == self.offset

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight, (out, in) in `dtype`: exact in float32, rounded once from there otherwise."""
        value = self.codes.to(torch.float32, memory_format=torch.contiguous_format)
        if self.trivial_group_index and self.in_features % self.group_size == 0:
            grouped = value.view(self.out_features, -1, self.group_size)
            grouped.mul_(self.scale.unsqueeze(-1)).add_(self.offset.unsqueeze(-1))
        else:
            index = self.group_index.long()
            value.mul_(self.scale[:, index]).add_(self.offset[:, index])
        return value.to(dtype)

    def rows(self, part: slice) -> QuantizedWeight:
        """Return some rows."""
        tensors = {name: getattr(self, name)[part].clone() for name in ("codes", "scale", "offset")}
        return dataclasses.replace(self, **tensors)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the same weight with its tensors on `device`."""
        tensors = {name: getattr(self, name).to(device) for name in ("codes", "scale", "offset", "group_index")}
        return dataclasses.replace(self, **tensors)


def trivial_index(columns: int, group_size: int, device: torch.device | None = None) -> Tensor:
    """Return the group of every column where groups follow the columns, (columns,) int32."""
    return (torch.arange(columns, device=device) // group_size).to(torch.int32)


def join_rows(parts: Sequence[QuantizedWeight], order: Tensor | slice = slice(None)) -> QuantizedWeight:
    """Return one weight from its rows, in order or in that given; groups are those of the first part."""
    stacked: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])[order] for name in ("codes", "scale", "offset")
    }
    return dataclasses.replace(parts[0], **stacked)
