"""The kernels as operators, `torch.ops.gptqkit.*`, for eager code, torch.compile, torch.export and CUDA graphs.

    linear      x WT + bias, (..., out); split is None for the faster of two paths, 0 for the dense one, or how many
                blocks of the fused kernel share the inputs of an output tile, at most 64
    dequantize  W, (out, in): exact in float32, rounded once to the dtype given

Few rows of x run on the fused kernel, which reads the packed weight once. Many rows are bound by arithmetic: the weight
is dequantized, into a buffer no larger than the GPU's cache if that leaves each part of the product enough to do, and
goes through torch's dense product.

The kernels trust pointers and sizes, so the operators check that `weight`, `scale` and `zero` are a packed layer, as
`CudaLinear` holds it. There are implementations for CUDA only; the tests add one for the CPU, which runs the same
sources on an emulator.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from ctypes import addressof
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BackendError, ShapeError
from .library import KernelLibrary, LayerRecord, Shape, library_for

DTYPES = {torch.float16: 0, torch.bfloat16: 1}
"""Of activations, with the interface's number."""

BITS = (2, 3, 4, 8)
DEVICES = Path(__file__).parent / "devices"
MOST_SPLITS = 64  # the interface's limit
DENSE_STEP = 256  # rows of a dense weight come in multiples of these
PRODUCT_TILE = 128 * 128  # elements of a product that one multiprocessor makes at a time
USERS, LOCKS = 1024, 1024  # streams and captures with locks of their own: more than there are tiles where splits pay
WORKSPACE = 1 << 19  # floats that each stream keeps: enough for up to 16 rows of x

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


class Layer:
    """A packed layer: tensors and sizes that were checked, so that the kernels may trust them, and their pointers.

    `weight`, `scale` and `zero` are what `csrc/api.h` calls the packed form, `sizes` bits, group size and outputs, and
    `dtype` is that of the activations. ShapeError for tensors that have not the forms that the sizes ask for.
    """

    __slots__ = ("address", "dtype", "launcher", "padded", "plans", "record", "shape", "tensors")

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        zero: Tensor,
        bias: Tensor | None,
        sizes: tuple[int, int, int],
        in_features: int,
        dtype: torch.dtype,
        launcher: Launcher,
    ) -> None:
        self.launcher, device = launcher, launcher.device
        bits, group_size, out_features = sizes
        group_size = min(group_size, max(in_features, 1))  # one group per row, however large: the record has 32 bits
        tiles, groups = -(-out_features // 64), -(-in_features // max(group_size, 1))  # the library refuses groups of 0
        _check("weight", weight, torch.int32, (tiles, -(-in_features // 64), bits, 32, 4), device)
        free = scale.dtype is torch.float32
        kind = torch.float32 if free else torch.int16 if bits > 4 else torch.uint8
        _check("scale", scale, torch.float32 if free else torch.float16, (groups, tiles * 64), device)
        _check("zero", zero, kind, (groups, tiles * (32 if bits < 4 and not free else 64)), device)
        if dtype not in DTYPES:
            raise ShapeError(f"x is {dtype}, and the kernels compute in float16 or bfloat16; convert it")
        if bias is not None:
            _check("bias", bias, dtype, (out_features,), device)
        self.tensors, self.dtype = (weight, scale, zero, bias), dtype
        self.shape = Shape(bits, DTYPES[dtype], out_features, in_features, group_size, int(free))
        self.padded = -(-out_features // 8) * 8  # the kernels store eight columns at a time
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        self.record = LayerRecord(*pointers, *self.shape)
        self.address = addressof(self.record)
        self.plans: dict[int, Plan] = {}  # by rows of x


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
        block_inputs: Inputs whose reading takes a block as long as its begin and end; sharing a tile takes that again.
        part_bytes: Of partial sums that a multiprocessor moves in the time that an input takes.
        crossover: For each bit width the rows of x from which the dense path is faster.
        dense_bytes: Of the dense weight that exists at a time on that path; None for the size of the L2 cache.
    """

    block_inputs: int = 256
    part_bytes: int = 1024
    crossover: Mapping[int, int] = field(default_factory=lambda: dict.fromkeys(BITS, 256))
    dense_bytes: int | None = None


class Plan(NamedTuple):
    """How a product runs: blocks that share a tile's inputs (0: the dense path), floats of workspace, locks."""

    split: int
    floats: int = 0
    locks: int = 0


class Device(NamedTuple):
    """What the choice of a plan asks about a GPU."""

    multiprocessors: int
    cache_bytes: int  # of the L2 cache


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


class Scratch:
    """What blocks that share an output tile need: a workspace for sums, and locks by which the last one knows itself.

    Locks are 0 between calls. Calls of one stream follow each other and share both; a user is a stream, or a stream in
    a capture (`gptqkit_user`). A captured graph can be replayed beside anything, so every capture gets locks that
    nothing else uses, cleared before it begins. Where those made with the first call on the device are used up or too
    few, a call clears some of its own, which takes a launch; where the workspace is too small, and in captures, it
    allocates one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mutex = threading.Lock()
        self._free: list[Tensor] | None = None
        self._taken: dict[int | tuple[int, int], tuple[int, int, list[Tensor]]] = {}

    def take(self, user: int, stream: int, locks: int, floats: int) -> tuple[int, int, list[Tensor]]:
        """Return pointers to `locks` locks or more and to `floats` floats or more, and what keeps them.

        `user` is above 0 for a stream and below 0 for a capture, of which each `stream` is a user of its own. The next
        call of the user may have the same.
        """
        key = user if user > 0 else (user, stream)
        taken = self._taken.get(key) or self._enter(key)
        if taken and locks <= LOCKS and floats <= (WORKSPACE if user > 0 else 0):
            return taken
        own_locks = self._clear(locks) if locks > LOCKS or not taken else taken[2][0]
        workspace = self._allocate(floats)
        return own_locks.data_ptr(), workspace.data_ptr(), [own_locks, workspace]

    def _enter(self, key: int | tuple[int, int]) -> tuple[int, int, list[Tensor]] | None:
        """Give a new user its own, if there is some to give."""
        is_stream = isinstance(key, int)
        with self._mutex:
            # In another thread: a memory pool that this one opened, as torch.compile does, must not hold what stays.
            with ThreadPoolExecutor(1) as thread:
                if self._free is None and is_stream:
                    self._free = thread.submit(self._make_locks).result()
                if key not in self._taken and self._free:
                    workspace = thread.submit(self._allocate, WORKSPACE if is_stream else 0).result()
                    if is_stream and self.device.type == "cuda":  # whose memory was that of another stream just now
                        stream = torch.cuda.current_stream(self.device)
                        stream.wait_stream(torch.cuda.default_stream(self.device))
                    tensors = [self._free.pop(), workspace]
                    self._taken[key] = tensors[0].data_ptr(), workspace.data_ptr(), tensors
            return self._taken.get(key)

    def _make_locks(self) -> list[Tensor]:
        array = self._clear(USERS * LOCKS)
        if self.device.type == "cuda":  # its users run on other streams than the clearing
            torch.cuda.current_stream(self.device).synchronize()
        return list(array.view(USERS, LOCKS))

    def _allocate(self, floats: int) -> Tensor:
        return torch.empty(floats, dtype=torch.float32, device=self.device)

    def _clear(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)


class Launcher:
    """One device with the library and the constants that serve it; `linear` and `dequantize` are the operators."""

    def __init__(self, library: KernelLibrary, device: torch.device, tuning: Tuning, properties: Device) -> None:
        self.library, self.device, self.tuning, self.properties = library, device, tuning, properties
        self._on_gpu, self._index = device.type == "cuda", device.index  # else the emulator
        self._scratch = Scratch(device)
        self._gemm = library.functions["gemm"]  # at hand for the one call that many small products wait for
        self._plan = lru_cache(maxsize=16384)(self.plan)

    def linear(self, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        """Return x WT + bias."""
        bits, group_size, out_features, *split = rest
        sizes = (bits, group_size, out_features)
        return self.product(x, Layer(weight, scale, zero, bias, sizes, x.shape[-1], x.dtype, self), *split)

    def dequantize(self, weight: Tensor, scale: Tensor, zero: Tensor, *rest: Any) -> Tensor:
        """Return W, its columns in packed order."""
        bits, group_size, out_features, in_features, dtype = rest
        if dtype not in DTYPES:
            raise ShapeError(f"{dtype} is asked for, and the kernels write float16 or bfloat16; convert one of them")
        layer = Layer(weight, scale, zero, None, (bits, group_size, out_features), in_features, dtype, self)
        dense = weight.new_empty((out_features, in_features), dtype=dtype)
        with torch.cuda.device(self.device) if self._on_gpu else nullcontext():
            self._write_rows(dense, 0, layer)
        return dense

    def plan(self, shape: Shape, rows: int, split: int | None = None) -> Plan:
        """Return how to run a product with `rows` rows of x on the current device, by choice or with a given `split`.

        The choice is for the shortest time, counted in inputs: waves of as many blocks as the device holds at a time,
        each with its begin and end and its share of the inputs, and the way of partial sums to memory and back.
        """
        if split is None and rows >= self.tuning.crossover.get(shape.bits, 0):
            return Plan(0)
        kernel = self.library.kernel(shape, rows)
        tiles = -(-rows // kernel.tokens) * -(-shape.n // kernel.columns)
        tile_bytes = 4 * kernel.tokens * kernel.columns

        def cost(split: int) -> float:
            waves = -(-tiles * split // (kernel.blocks * self.properties.multiprocessors))
            inputs = -(-shape.k // (64 * split * kernel.sharing)) * 64 * kernel.sharing
            parts = 2 * tiles * split * tile_bytes / (self.properties.multiprocessors * self.tuning.part_bytes)
            return waves * (inputs + self.tuning.block_inputs) + (split > 1) * (self.tuning.block_inputs + parts)

        if split is None:
            split = min(range(1, max(1, min(MOST_SPLITS, shape.k // 64)) + 1), key=cost)
        return Plan(split, *((split * tiles * tile_bytes // 4, tiles * kernel.locks) if split > 1 else ()))

    def product(self, x: Tensor, layer: Layer, split: int | None = None) -> Tensor:
        """Return x WT + bias; x has the layer's width, dtype and device."""
        if self._on_gpu and torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self.device):
                return self.product(x, layer, split)
        (_, _, n, k, _, _), padded = layer.shape, layer.padded
        m = x.numel() // k if n and k else 0
        if not m:
            return x.new_zeros((*x.shape[:-1], n))
        plan = layer.plans.get(m)
        if plan is None or split is not None:
            plan = self._plan(layer.shape, m, split)
            if split is None:
                layer.plans[m] = plan
        split, floats, locks = plan
        if not split:
            return self._dense_product(x.reshape(m, k), layer).view(*x.shape[:-1], n)
        if not x.is_contiguous() or x.data_ptr() % 16:
            x = x.clone(memory_format=torch.contiguous_format)
        y = x.new_empty((m, padded) if x.dim() == 2 else (*x.shape[:-1], padded))
        stream = torch._C._cuda_getCurrentRawStream(self._index) if self._on_gpu else 0
        lock = workspace = None
        if floats:  # `_kept` stays until the launch is queued; whoever gets its memory comes later on the stream
            lock, workspace, _kept = self._scratch.take(self.library.user(stream), stream, locks, floats)
        code = self._gemm(layer.address, x.data_ptr(), k, y.data_ptr(), workspace, lock, m, split, stream)
        if code:
            self.library.fail("gemm", code)
        return y if n == padded else y[..., :n].contiguous()

    def _dense_product(self, x: Tensor, layer: Layer) -> Tensor:
        (m, k), n, bias = x.shape, layer.shape.n, layer.tensors[3]
        y, step = x.new_empty((m, n)), self._dense_rows(m, n, k)
        buffer = x.new_empty((step, k))  # torch's allocator hands out the same one at every call
        for first in range(0, n, step):
            part = slice(first, min(first + step, n))
            dense = buffer[: part.stop - first]
            self._write_rows(dense, first, layer)
            if bias is None:
                torch.mm(x, dense.t(), out=y[:, part])
            else:
                torch.addmm(bias[part], x, dense.t(), out=y[:, part])
        return y

    def _dense_rows(self, m: int, n: int, k: int) -> int:
        """Return how many rows of the weight to make at a time.

        As many as fit the cache, but no fewer than give every multiprocessor a tile of the product; in equal parts.
        """
        in_cache = (self.tuning.dense_bytes or self.properties.cache_bytes) // (2 * k * DENSE_STEP) * DENSE_STEP
        to_fill = -(-PRODUCT_TILE * self.properties.multiprocessors // m)
        parts = max(1, min(-(-n // max(DENSE_STEP, in_cache)), n // to_fill))
        return min(n, -(-n // (parts * DENSE_STEP)) * DENSE_STEP)

    def _write_rows(self, dense: Tensor, first: int, layer: Layer) -> None:
        """Write the weight's rows from `first` on into `dense`, (count, in); the device is the current one."""
        stream = torch._C._cuda_getCurrentRawStream(self._index) if self._on_gpu else 0
        self.library.run("dequantize", layer.address, dense.data_ptr(), first, dense.shape[0], stream)


@cache
def launcher_for(device: torch.device) -> Launcher:
    """Return the launcher of a GPU, unless there is no library for it or `device` is none."""
    if device.type != "cuda":
        raise ShapeError(f"the first operand is on {device}, and others are on a GPU; move it there")
    library, reason = library_for(device)
    if library is None:
        raise BackendError(reason)
    properties = torch.cuda.get_device_properties(device)
    found = Device(properties.multi_processor_count, properties.L2_cache_size)
    return Launcher(library, device, tuning_for(properties.name), found)


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
