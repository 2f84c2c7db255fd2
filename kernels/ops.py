"""The kernels as operators, `torch.ops.gptqkit.*`, for eager code, torch.compile, torch.export and CUDA graphs.

    linear      x WT + bias, (..., out); split is None for the faster of two paths, 0 for the dense one, or how many
                blocks of the fused kernel share the inputs of an output tile, at most 64
    dequantize  W, (out, in): exact in float32, rounded once to the dtype given

Few rows of x run on the fused kernel, which reads the packed weight once. Many rows are bound by arithmetic: the weight
is dequantized, a few output rows at a time into one small buffer that stays in the GPU's cache, and each part goes
through torch's dense product.

The kernels trust pointers and sizes, so the operators check that `weight`, `scale` and `zero` are a packed layer, as
`CudaLinear` holds it. There are implementations for CUDA only; the tests add one for the CPU, which runs the same
sources on an emulator.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BackendError, ShapeError
from .library import KernelLibrary, library_for

DTYPES = {torch.float16: 0, torch.bfloat16: 1}
"""Of activations, with the interface's number."""

BITS = (2, 3, 4, 8)
DEVICES = Path(__file__).parent / "devices"
MOST_SPLITS = 64  # the interface's limit
LEAST_DENSE_ROWS, DENSE_TILE = 1024, 256  # fewer output rows at a time leave parts of a large GPU idle
USERS, LOCKS = 256, 1024  # streams and captures with locks of their own: more than there are tiles where splits pay

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
        """Return the layer itself, if its tensors have the forms that its sizes ask for."""
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


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a product is divided over a device; the defaults are calculated, benchmarks/tune.py measures.

    Attributes:
        blocks_per_multiprocessor: Blocks to aim at; fewer column tiles than that are split along the inputs.
        least_inputs_per_block: Inputs that make a block's work worth its reduction.
        crossover: For each bit width the rows of x from which the dense path is faster.
        dense_bytes: Of the dense weight that exists at a time on that path, for the L2 cache.
    """

    blocks_per_multiprocessor: float = 2.0
    least_inputs_per_block: int = 512
    crossover: Mapping[int, int] = field(default_factory=lambda: dict.fromkeys(BITS, 128))
    dense_bytes: int = 32 << 20


def tuning_for(device: str, folder: Path = DEVICES) -> Tuning:
    """Return the constants measured on a device of that name, or the defaults."""
    path = folder / file_name(device)
    if not path.exists():
        return Tuning()
    constants = json.loads(path.read_text(encoding="utf-8"))["constants"]
    return Tuning(**constants | {"crossover": {int(bits): rows for bits, rows in constants["crossover"].items()}})


def file_name(device: str) -> str:
    """Return the name of the file with a device's constants.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


class Locks:
    """The int32 by which the last of several blocks that share an output tile knows that it is the last, 0 in between.

    Calls of one stream follow each other and share theirs. A captured graph can be replayed beside anything, so every
    capture gets locks that nothing else uses, cleared before it begins. Where those made with the first call on the
    device are used up or too few, a call clears locks of its own, which takes a launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mutex = threading.Lock()
        self._free: list[Tensor] | None = None
        self._taken: dict[tuple[int, int], Tensor] = {}  # by stream and capture, 0 for none

    def take(self, count: int, stream: int) -> Tensor:
        """Return `count` locks or more for the next call on `stream`."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        user = (stream, _capture_number(stream) if capturing else 0)
        with self._mutex:
            if self._free is None and not capturing:
                # In a thread of its own: a memory pool that this one opened, as torch.compile does, must not hold them.
                with ThreadPoolExecutor(1) as thread:
                    self._free = thread.submit(self._make).result()
            if user not in self._taken and self._free:
                self._taken[user] = self._free.pop()
            locks = self._taken.get(user)
        return self._cleared(count) if locks is None or count > LOCKS else locks

    def _make(self) -> list[Tensor]:
        array = self._cleared(USERS * LOCKS)
        if self.device.type == "cuda":  # its users run on other streams than the clearing
            torch.cuda.current_stream(self.device).synchronize()
        return list(array.view(USERS, LOCKS))

    def _cleared(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)


def _capture_number(stream: int) -> int:
    """Return the number that the driver gives the capture on `stream`; no two captures of a process have the same."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    inquire = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    code = inquire(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if code:
        raise RuntimeError(f"cuStreamGetCaptureInfo: CUDA driver error {code}")
    return number.value


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
        *sizes, dtype = rest
        layer = Layer(weight, scale, zero, *sizes).check(weight.device)
        if dtype not in DTYPES:
            raise ShapeError(f"{dtype} is asked for, and the kernels write float16 or bfloat16; convert one of them")
        dense = weight.new_empty((layer.out_features, layer.in_features), dtype=dtype)
        self._write_rows(dense, 0, layer)
        return dense

    def choose_split(self, bits: int, rows: int, out_features: int, in_features: int) -> int:
        """Return the faster `split` for `rows` rows of x, where all blocks come near what the device can hold."""
        if rows >= self.tuning.crossover.get(bits, 0):
            return 0
        _, tiles = self.library.workspace(rows, out_features, in_features, 2)  # one lock per tile
        wanted = round(self.tuning.blocks_per_multiprocessor * self.multiprocessors / max(1, tiles))
        return max(1, min(wanted, in_features // self.tuning.least_inputs_per_block, MOST_SPLITS))

    def product(self, x: Tensor, layer: Layer, bias: Tensor | None, split: int | None = None) -> Tensor:
        """Return x WT + bias for a layer that was checked."""
        n, k = layer.out_features, layer.in_features
        if x.dtype not in DTYPES:
            raise ShapeError(f"x is {x.dtype}, and the kernels compute in float16 or bfloat16; convert it")
        if bias is not None:
            _check("bias", bias, x.dtype, (n,), x.device)
        padded = -(-n // 8) * 8  # the kernels store eight columns at a time
        y = x.new_empty((*x.shape[:-1], padded))
        if not y.numel():
            return y[..., :n]
        m = y.numel() // padded
        if split is None:
            split = self._split(layer.bits, m, n, k)
        if not split:
            self._dense_product(x.reshape(m, k), layer, bias, y.view(m, padded)[:, :n])
            return y if n == padded else y[..., :n].contiguous()
        if not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        if bias is not None and (n != padded or bias.data_ptr() % 16):
            bias = x.new_zeros(padded).index_copy_(0, torch.arange(n, device=x.device), bias)
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
        return y if n == padded else y[..., :n].contiguous()

    def _dense_product(self, x: Tensor, layer: Layer, bias: Tensor | None, y: Tensor) -> None:
        n, k = y.shape[1], x.shape[1]
        whole_tiles = self.tuning.dense_bytes // (x.element_size() * max(k, 1)) // DENSE_TILE * DENSE_TILE
        step = min(n, max(LEAST_DENSE_ROWS, whole_tiles))
        buffer = x.new_empty((step, k))  # torch's allocator hands out the same one at every call
        for first in range(0, n, step):
            part = slice(first, min(first + step, n))
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
    """Return the launcher of a GPU, unless there is no library for it or `device` is none."""
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
