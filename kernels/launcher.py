"""The kernels of a library on tensors: allocation, choice of the path, streams.

Two paths compute x WT + bias. Few rows of x run on the fused kernel, which reads the packed weight once. Many rows are
bound by arithmetic: the weight is dequantized, a few output rows at a time into one small buffer that stays in the
cache of the GPU, and each part goes through torch's dense product. `Tuning` says where one becomes the other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import BackendError, ShapeError
from .library import KernelLibrary, find_library
from .operands import (
    DTYPES,
    Form,
    check_grid,
    check_input,
    check_layer,
    check_words,
    scale_form,
    weight_form,
    zero_form,
)
from .tickets import Tickets
from .tuning import Tuning, tuning_for


class Launcher:
    """One device with the library and the constants that serve it."""

    def __init__(self, library: KernelLibrary, device: torch.device, tuning: Tuning, multiprocessors: int) -> None:
        self.library = library
        self.device = device
        self.tuning = tuning
        self.multiprocessors = multiprocessors
        self.tickets = Tickets(device)
        self._split = lru_cache(maxsize=4096)(self._choose_split)
        self._workspace = lru_cache(maxsize=4096)(library.workspace)

    def repack_weight(self, qweight: Tensor, rows: Tensor | None, bits: int) -> Tensor:
        """Codes in the kernel's layout; see `ops.repack_weight`."""
        qweight, rows = qweight.contiguous(), None if rows is None else rows.contiguous()
        check_words(qweight, rows, bits)
        n, k = qweight.shape[1], qweight.shape[0] * 32 // bits
        weight = _empty(qweight, weight_form(n, k, bits))
        with self._current():
            arguments = (bits, _pointer(qweight), _pointer(rows), _pointer(weight), n, k, self._stream())
            self.library.run("gptqkit_repack_weight", *arguments)
        return weight

    def repack_grid(self, scales: Tensor, qzeros: Tensor, bits: int, zero_offset: int) -> tuple[Tensor, Tensor]:
        """Scales and zeros in the kernel's order; see `ops.repack_grid`."""
        scales, qzeros = scales.contiguous(), qzeros.contiguous()  # copies must live until the kernel is started
        check_grid(scales, qzeros, bits)
        groups, n = scales.shape
        scale, zero = _empty(scales, scale_form(groups, n)), _empty(scales, zero_form(groups, n, bits))
        with self._current():
            sources = (_pointer(scales), _pointer(qzeros))
            arguments = (*sources, zero_offset, _pointer(scale), _pointer(zero), n, groups, self._stream())
            self.library.run("gptqkit_repack_grid", bits, *arguments)
        return scale, zero

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        bias: Tensor | None,
        bits: int,
        group_size: int,
        out_features: int,
    ) -> Tensor:
        """The product x WT + bias on the path that is faster; see `ops.linear`."""
        check_input(x, bias, out_features)
        check_layer(x.device, weight, scale, zero, bits, group_size, out_features, x.shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        layer = (weight, scale, zero, bias, bits, group_size, out_features)
        if self.tuning.fused(bits, rows.shape[0]):
            y = self.fused_product(rows, *layer, self._split(*rows.shape, out_features))
        else:
            y = self.dense_product(rows, *layer)
        return y.view(*x.shape[:-1], out_features)

    def gemm(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        bias: Tensor | None,
        bits: int,
        group_size: int,
        out_features: int,
        split: int,
    ) -> Tensor:
        """The product x WT + bias on the fused kernel; see `ops.gemm`."""
        if x.dim() != 2:
            raise ShapeError(f"x has the shape {tuple(x.shape)}, and two axes are needed; reshape it, or use `linear`")
        check_input(x, bias, out_features)
        check_layer(x.device, weight, scale, zero, bits, group_size, out_features, x.shape[1])
        return self.fused_product(x, weight, scale, zero, bias, bits, group_size, out_features, split)

    def fused_product(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        bias: Tensor | None,
        bits: int,
        group_size: int,
        out_features: int,
        split: int,
    ) -> Tensor:
        """What `gemm` returns, for operands that fit."""
        m, k = x.shape
        x = _aligned(x)
        y = x.new_empty((m, out_features))
        if m == 0:
            return y
        with self._current():
            stream = self._stream()
            workspace = tickets = None
            if split > 1:
                floats, count = self._workspace(m, out_features, k, split)
                workspace = x.new_empty(floats, dtype=torch.float32)
                tickets = self.tickets.take(count, stream)
            arguments = (*map(_pointer, (weight, scale, zero, bias, y, workspace, tickets)), m, out_features, k)
            code, step = DTYPES[x.dtype], x.stride(0) if m > 1 else k
            self.library.run("gptqkit_gemm", bits, code, _pointer(x), step, *arguments, group_size, split, stream)
        return y

    def dequantize(
        self,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        bits: int,
        group_size: int,
        out_features: int,
        columns: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The dense weight; see `ops.dequantize`."""
        if dtype not in DTYPES:
            raise ShapeError(f"{dtype} is asked for, and the kernels write float16 or bfloat16; convert one of them")
        check_layer(weight.device, weight, scale, zero, bits, group_size, out_features, columns)
        dense = scale.new_empty((out_features, columns), dtype=dtype)
        self._dequantize(dense, 0, weight, scale, zero, bits, group_size, out_features)
        return dense

    def dense_product(
        self,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        bias: Tensor | None,
        bits: int,
        group_size: int,
        out_features: int,
    ) -> Tensor:
        """The product x WT + bias by torch, on the weight dequantized a part at a time; for operands that fit."""
        y = x.new_empty((x.shape[0], out_features))
        step = min(out_features, self.tuning.dense_rows(x.element_size() * x.shape[1]))
        buffer = x.new_empty((step, x.shape[1]))  # torch's allocator hands out the same one at every call
        for first in range(0, out_features, step):
            part = slice(first, min(first + step, out_features))
            dense = buffer[: part.stop - first]
            self._dequantize(dense, first, weight, scale, zero, bits, group_size, out_features)
            if bias is None:
                torch.mm(x, dense.t(), out=y[:, part])
            else:
                torch.addmm(bias[part], x, dense.t(), out=y[:, part])
        return y

    def _dequantize(
        self,
        dense: Tensor,
        first: int,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        bits: int,
        group_size: int,
        out_features: int,
    ) -> None:
        """Write the weight's rows from `first` on into `dense`, (count, in)."""
        with self._current():
            sizes = (first, dense.shape[0], out_features, dense.shape[1], group_size)
            tensors = map(_pointer, (weight, scale, zero, dense))
            self.library.run("gptqkit_dequantize", bits, DTYPES[dense.dtype], *tensors, *sizes, self._stream())

    def _choose_split(self, rows: int, columns: int, out_features: int) -> int:
        _, tiles = self.library.workspace(rows, out_features, columns, 2)  # one ticket per tile
        return self.tuning.split(max(1, tiles), columns, self.multiprocessors)

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _stream(self) -> int:
        if self.device.type != "cuda":
            return 0
        return int(torch._C._cuda_getCurrentRawStream(self.device.index))


@cache
def launcher_for(device: torch.device) -> Launcher:
    """The launcher of a GPU.

    Raises:
        ShapeError: The device is none.
        BackendError: There is no library for it.
    """
    if device.type != "cuda":
        raise ShapeError(f"the first operand is on {device}, and others are on a GPU; move it there")
    search = find_library()
    if search.library is None:
        raise BackendError(search.reason)
    properties = torch.cuda.get_device_properties(device)
    return Launcher(search.library, device, tuning_for(properties.name), properties.multi_processor_count)


def _empty(beside: Tensor, form: Form) -> Tensor:
    dtype, shape = form
    return beside.new_empty(shape, dtype=dtype)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _aligned(x: Tensor) -> Tensor:
    """`x`, (rows, columns), or a copy where the kernel cannot read it in steps of eight elements."""
    readable = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (x.shape[0] <= 1 or x.stride(0) % 8 == 0)
    return x if readable else x.clone(memory_format=torch.contiguous_format)
