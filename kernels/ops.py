"""The kernels as operators, `torch.ops.gptqkit.*`, for eager code, torch.compile, torch.export and CUDA graphs.

    linear      x WT + bias, (..., out); split is None for the faster of two paths, 0 for the dense one, or how many
                blocks of the fused kernel share the inputs of an output tile, at most 64
    dequantize  W, (out, in): exact in float32, rounded once to the dtype given

Few rows of x run on the fused kernel, which reads the packed weight once. Many rows are bound by arithmetic: the weight
is dequantized, a few output rows at a time into one small buffer that stays in the GPU's cache, and each part goes
through torch's dense product. `Tuning` says where one becomes the other.

The kernels trust pointers and sizes, so the operators check that `weight`, `scale` and `zero` are a packed layer, as
`CudaLinear` holds it. There are implementations for CUDA only; the tests add one for the CPU, which runs the same
sources on an emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BackendError, ShapeError
from .library import KernelLibrary, library_for
from .locks import Locks
from .tuning import Tuning, tuning_for

DTYPES = {torch.float16: 0, torch.bfloat16: 1}
"""Of activations, with the interface's number."""

_LAYER = "Tensor weight, Tensor scale, Tensor zero"
_SIZES = "int bits, int group_size, int out_features"
SCHEMAS = {
    "linear": f"(Tensor x, {_LAYER}, Tensor? bias, {_SIZES}, int? split=None) -> Tensor",
    "dequantize": f"({_LAYER}, {_SIZES}, int in_features, ScalarType dtype) -> Tensor",
}

# What the operators return, without values.
FAKES: dict[str, Callable[..., Tensor]] = {
    "linear": lambda x, w, s, z, b, bits, group_size, out, split=None: x.new_empty((*x.shape[:-1], out)),  # noqa: ARG005
    "dequantize": lambda weight, *rest: weight.new_empty(rest[-3:-1], dtype=rest[-1]),
}


class Layer(NamedTuple):
    """The operands that are a packed layer; the kernels may trust them once `check` has passed."""

    weight: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group_size: int
    out_features: int
    in_features: int

    def check(self, device: torch.device) -> Layer:
        """Return the layer itself, if its tensors have the forms that its sizes ask for.

        Raises:
            ShapeError: With what came and what is needed.
        """
        bits, tiles = self.bits, -(-self.out_features // 64)
        groups = -(-self.in_features // max(self.group_size, 1))  # the library refuses groups of 0
        _check("weight", self.weight, torch.int32, (tiles, -(-self.in_features // 64), bits, 32, 4), device)
        _check("scale", self.scale, torch.float16, (groups, tiles * 64), device)
        zeros = groups, tiles * (32 if bits < 4 else 64)
        _check("zero", self.zero, torch.int16 if bits > 4 else torch.uint8, zeros, device)
        return self


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.dtype == dtype and tensor.shape == shape and tensor.device == device and tensor.is_contiguous():
        return
    layout = "" if tensor.is_contiguous() else "not contiguous "
    raise ShapeError(
        f"{name} is {layout}{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and contiguous {dtype} {shape} on "
        f"{device} is needed beside the other operands; take the tensors and sizes of one layer, with x of its width"
    )


class Launcher:
    """One device with the library and the constants that serve it; `linear` and `dequantize` are the operators."""

    def __init__(self, library: KernelLibrary, device: torch.device, tuning: Tuning, multiprocessors: int) -> None:
        self.library, self.device, self.tuning, self.multiprocessors = library, device, tuning, multiprocessors
        self._locks = Locks(device)
        self._split = lru_cache(maxsize=4096)(self.choose_split)
        self._workspace = lru_cache(maxsize=4096)(library.workspace)

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """Return x WT + bias."""
        bits, group_size, out_features, *split = rest
        layer = Layer(weight, scale, zero, bits, group_size, out_features, x.shape[-1]).check(x.device)
        return self.product(x, layer, bias, *split)

    def dequantize(self, weight: Tensor, scale: Tensor, zero: Tensor, *rest: Any) -> Tensor:
        """Return W, its columns in packed order."""
        layer, dtype = Layer(weight, scale, zero, *rest[:-1]).check(weight.device), rest[-1]
        if dtype not in DTYPES:
            raise ShapeError(f"{dtype} is asked for, and the kernels write float16 or bfloat16; convert one of them")
        dense = weight.new_empty((layer.out_features, layer.in_features), dtype=dtype)
        self._write_rows(dense, 0, layer)
        return dense

    def choose_split(self, bits: int, rows: int, out_features: int, in_features: int) -> int:
        """Return the faster `split` for `rows` rows of x."""
        if rows >= self.tuning.crossover.get(bits, 0):
            return 0
        _, tiles = self.library.workspace(rows, out_features, in_features, 2)  # one lock per tile
        return self.tuning.split(max(1, tiles), in_features, self.multiprocessors)

    def product(self, x: Tensor, layer: Layer, bias: Tensor | None, split: int | None = None) -> Tensor:
        """Return x WT + bias for a layer that was checked."""
        n, k = layer.out_features, layer.in_features
        if x.dtype not in DTYPES:
            raise ShapeError(f"x is {x.dtype}, and the kernels compute in float16 or bfloat16; convert it")
        if bias is not None:
            _check("bias", bias, x.dtype, (n,), x.device)
        y = x.new_empty((*x.shape[:-1], n))
        if not y.numel():
            return y
        m = y.numel() // n
        if split is None:
            split = self._split(layer.bits, m, n, k)
        if not split:
            self._dense_product(x.reshape(m, k), layer, bias, y.view(m, n))
            return y
        if not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        with self._current():
            stream, workspace, locks = self._stream(), None, None
            if split > 1:
                floats, count = self._workspace(m, n, k, split)
                workspace = x.new_empty(floats, dtype=torch.float32)
                locks = self._locks.take(count, stream)
            operands = (layer.weight, layer.scale, layer.zero, bias, y, workspace, locks)
            pointers = [None if operand is None else operand.data_ptr() for operand in operands]
            sizes = (m, n, k, layer.group_size, split)
            self.library.run("gptqkit_gemm", layer.bits, DTYPES[x.dtype], x.data_ptr(), k, *pointers, *sizes, stream)
        return y

    def _dense_product(self, x: Tensor, layer: Layer, bias: Tensor | None, y: Tensor) -> None:
        step = min(y.shape[1], self.tuning.dense_rows(x.element_size() * x.shape[1]))
        buffer = x.new_empty((step, x.shape[1]))  # torch's allocator hands out the same one at every call
        for first in range(0, y.shape[1], step):
            part = slice(first, min(first + step, y.shape[1]))
            dense = buffer[: part.stop - first]
            self._write_rows(dense, first, layer)
            if bias is None:
                torch.mm(x, dense.t(), out=y[:, part])
            else:
                torch.addmm(bias[part], x, dense.t(), out=y[:, part])

    def _write_rows(self, dense: Tensor, first: int, layer: Layer) -> None:
        """Write the weight's rows from `first` on into `dense`, (count, in)."""
        pointers = [operand.data_ptr() for operand in (layer.weight, layer.scale, layer.zero, dense)]
        sizes = (first, dense.shape[0], layer.out_features, layer.in_features, layer.group_size)
        with self._current():
            self.library.run("gptqkit_dequantize", layer.bits, DTYPES[dense.dtype], *pointers, *sizes, self._stream())

    def _current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self.device.index)) if self.device.type == "cuda" else 0


@cache
def launcher_for(device: torch.device) -> Launcher:
    """Return the launcher of a GPU.

    Raises:
        ShapeError: The device is none.
        BackendError: There is no library for it.
    """
    if device.type != "cuda":
        raise ShapeError(f"the first operand is on {device}, and others are on a GPU; move it there")
    library, reason = library_for(device)
    if library is None:
        raise BackendError(reason)
    properties = torch.cuda.get_device_properties(device)
    return Launcher(library, device, tuning_for(properties.name), properties.multi_processor_count)


def implement(operators: torch.library.Library, key: str, find: Callable[[torch.device], Launcher]) -> None:
    """Register the operators' implementations for the dispatch key "CUDA" or "CPU", on the launcher that is found."""
    for name in SCHEMAS:

        def run(first: Tensor, *rest: Any, name: str = name) -> Any:
            return getattr(find(first.device), name)(first, *rest)

        operators.impl(name, run, key)  # type: ignore[no-untyped-call]


_OPERATORS = torch.library.Library("gptqkit", "DEF")  # type: ignore[no-untyped-call]
for _name, _schema in SCHEMAS.items():
    _OPERATORS.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"gptqkit::{_name}", FAKES[_name], lib=_OPERATORS)
implement(_OPERATORS, "CUDA", launcher_for)
