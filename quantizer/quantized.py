"""The one result of every solver: integer codes with the grid that they live on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight matrix as integer codes: value = (code - zero) * scale.

    Codes, scales and zeros are decided in the solver and go into the file untouched.

    Attributes:
        codes: (out, in) uint8, columns in the model's own order, each in 0 ... 2^bits - 1.
        scale: (out, groups) float16, positive.
        zero: (out, groups) int16, in 0 ... 2^bits (2^bits occurs only in version 1 files).
        group_index: (in,) int32, the group of every input column.
        bits: 2, 3, 4 or 8.
        group_size: Columns per group (the number of columns where a group is a whole row).
        sym: Whether every zero is 2^(bits - 1) by construction.

    Raises:
        ShapeError: Shapes, dtypes or group numbers that do not fit together.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group_index: Tensor
    bits: int
    group_size: int
    sym: bool

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = -(-columns // self.group_size)
        for name, tensor, shape, dtype in (
            ("codes", self.codes, (rows, columns), torch.uint8),
            ("scale", self.scale, (rows, groups), torch.float16),
            ("zero", self.zero, (rows, groups), torch.int16),
            ("group_index", self.group_index, (columns,), torch.int32),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ShapeError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; codes of shape {(rows, columns)} with groups of "
                    f"{self.group_size} need {dtype} {shape}"
                )

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
        natural = torch.arange(self.in_features, device=self.group_index.device) // self.group_size
        return bool(torch.equal(natural.to(torch.int32), self.group_index))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, (out, in) in `dtype`: exact in float32, rounded once from there otherwise."""
        index = self.group_index.long()
        value = (self.codes.to(torch.int16) - self.zero[:, index]).float() * self.scale.float()[:, index]
        return value.to(dtype)

    def rows(self, rows: slice) -> QuantizedWeight:
        """Some of its rows: rows are quantized each by itself, so codes, scales and zeros stay what they are."""
        return dataclasses.replace(self, codes=self.codes[rows], scale=self.scale[rows], zero=self.zero[rows])

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight with its tensors on `device`."""
        return QuantizedWeight(
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=self.zero.to(device),
            group_index=self.group_index.to(device),
            bits=self.bits,
            group_size=self.group_size,
            sym=self.sym,
        )
