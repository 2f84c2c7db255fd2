"""The C interface of the kernel library on NumPy arrays, and what it should compute, written a second time.

NumPy only: the planted-bug runs and the sanitizers load this in processes of their own.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_uint, c_void_p
from typing import NamedTuple

import numpy as np

FLOAT16, BFLOAT16 = 0, 1


class KernelError(RuntimeError):
    pass


class Traffic(NamedTuple):
    """What one access in the sources cost: `spent` and `least` are transfers for shared memory, bytes for global."""

    file: str
    line: int
    function: str
    bytes: int  # of a lane
    instructions: int  # of warps
    spent: int
    least: int

    @property
    def shared(self):
        return self.function in ("load_shared", "store_shared", "copy_async_to")

    @property
    def excess(self):
        return self.spent / self.least


def from_bits(bits, dtype):
    """The float32 values of 16-bit patterns."""
    if dtype == FLOAT16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bits(values, dtype):
    """16-bit patterns of float32 values, to nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == FLOAT16:
        return values.astype(np.float16).view(np.uint16)
    word = values.view(np.uint32)
    return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).astype(np.uint16)


def pack_stream(codes, bits):
    """The little-endian bit stream of codes along axis 0, one bit at a time: (n, ...) -> int32 (n * bits / 32, ...)."""
    stream = (codes[:, None] >> np.arange(bits).reshape(-1, *[1] * (codes.ndim - 1))) & 1
    stream = stream.reshape(len(codes) * bits // 32, 32, *codes.shape[1:]).astype(np.uint64)
    weights = (np.uint64(1) << np.arange(32, dtype=np.uint64)).reshape(-1, *[1] * (codes.ndim - 1))
    return (stream * weights).sum(1).astype(np.uint32).view(np.int32)


def aligned(shape, dtype, fill):
    """An array that begins at a multiple of 256 bytes, as allocators of GPUs give them."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 256, np.uint8)
    start = -memory.ctypes.data % 256
    array = memory[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def tiles(size):
    return -(-size // 64)


class Kernels:
    """The library at `path`, for arrays in the CPU's memory."""

    def __init__(self, path):
        self.handle = ctypes.CDLL(str(path))
        self.handle.gptqkit_error.restype = self.handle.gptqkit_emulator_traffic.restype = c_char_p
        signatures = {
            "gptqkit_repack_weight": [c_int, *[c_void_p] * 3, c_int, c_int, c_void_p],
            "gptqkit_repack_grid": [c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int, c_int, c_void_p],
            "gptqkit_workspace": [c_int] * 4 + [POINTER(c_int64)] * 2,
            "gptqkit_gemm": [c_int, c_int, c_void_p, c_int64, *[c_void_p] * 7, *[c_int] * 5, c_void_p],
            "gptqkit_dequantize": [c_int, c_int, *[c_void_p] * 4, *[c_int] * 5, c_void_p],
            "gptqkit_emulator_seed": [c_uint],
            "gptqkit_emulator_count": [c_int],
            "gptqkit_emulator_traffic": [],
        }
        for name, arguments in signatures.items():
            getattr(self.handle, name).argtypes = arguments

    def call(self, name, *arguments):
        code = getattr(self.handle, name)(*map(_pointer, arguments))
        if code:
            raise KernelError(f"{code}: {self.handle.gptqkit_error(code).decode()}")

    def traffic(self):
        """The traffic of the last launch, counted since gptqkit_emulator_count(1)."""
        words = [line.split() for line in self.handle.gptqkit_emulator_traffic().decode().splitlines()]
        return [Traffic(file, int(line), name, *map(int, numbers)) for file, line, name, *numbers in words]

    def repack_weight(self, bits, qweight, n, k, rows=None):
        weight = aligned((tiles(n), tiles(k), bits, 32, 4), np.uint32, 0xAAAAAAAA)
        self.call("gptqkit_repack_weight", bits, qweight, rows, weight, n, k, None)
        return weight

    def repack_grid(self, bits, scales, qzeros, zero_offset, n, groups):
        scale = aligned((groups, tiles(n) * 64), np.uint16, 0xAAAA)
        zero = aligned((groups, tiles(n) * (32 if bits < 4 else 64)), np.uint16 if bits == 8 else np.uint8, 0xAA)
        self.call("gptqkit_repack_grid", bits, scales, qzeros, zero_offset, scale, zero, n, groups, None)
        return scale, zero

    def gemm(self, layer, x, *, split=1, bias=None, ldx=None, m=None):
        """y as bits, (m, n), from x as bits; also checks that the tickets are 0 again."""
        m = len(x) if m is None else m
        floats, tickets = c_int64(), c_int64()
        self.call("gptqkit_workspace", m, layer.n, layer.k, split, byref(floats), byref(tickets))
        workspace = aligned(floats.value, np.float32, np.nan)
        ticket = np.zeros(tickets.value, np.int32)
        y = aligned((m, layer.n), np.uint16, 0x7FFF)
        self.call(
            "gptqkit_gemm", layer.bits, layer.dtype, x, layer.k if ldx is None else ldx, layer.weight, layer.scale,
            layer.zero, bias, y, workspace, ticket, m, layer.n, layer.k, layer.group, split, None,
        )  # fmt: skip
        if ticket.any():
            raise KernelError("the tickets are not 0 after the call")
        return y

    def dequantize(self, layer, first, count):
        dense = aligned((count, layer.k), np.uint16, 0x7FFF)
        self.call(
            "gptqkit_dequantize", layer.bits, layer.dtype, layer.weight, layer.scale, layer.zero, dense, first, count,
            layer.n, layer.k, layer.group, None,
        )  # fmt: skip
        return dense


def _pointer(argument):
    return argument.ctypes.data if isinstance(argument, np.ndarray) else argument


class Layer:
    """A random layer: what a checkpoint holds, its repacked form, and the exact weight.

    `zeros` is "random", spanning 0 ... 2^bits, or the one zero that all groups have. `scales`, (groups, n), are float16
    whatever `dtype` x and y have; None makes random ones.
    """

    def __init__(self, kernels, *, bits, dtype, n, k, group, zeros="random", zero_offset=1, scales=None, seed=0):
        random = np.random.default_rng(seed)
        self.bits, self.dtype, self.n, self.k, self.group = bits, dtype, n, k, group
        self.zero_offset = zero_offset
        groups = -(-k // group)
        self.codes = random.integers(0, 1 << bits, (k, n), dtype=np.int64)
        stored = random.integers(0, 1 << bits, (groups, n), dtype=np.int64)
        if zeros != "random":
            stored[...] = zeros - zero_offset
        self.zeros = stored + zero_offset
        self.scales = to_bits(random.uniform(0.005, 0.015, (groups, n)) if scales is None else scales, FLOAT16)
        index = np.arange(k) // group
        scale = from_bits(self.scales, FLOAT16).astype(np.float64)
        self.exact = ((self.codes - self.zeros[index]) * scale[index]).T
        self.qweight = pack_stream(self.codes, bits)
        self.qzeros = np.ascontiguousarray(pack_stream(stored.T, bits).T)
        self.weight = kernels.repack_weight(bits, self.qweight, n, k)
        self.scale, self.zero = kernels.repack_grid(bits, self.scales, self.qzeros, zero_offset, n, groups)


def activations(m, k, dtype, *, ldx=None, seed=0):
    """Random x as bits, (m, ldx), of which the columns from k on are NaN."""
    x = aligned((m, ldx or k), np.uint16, 0x7FFF)
    x[:, :k] = to_bits(np.random.default_rng(seed).standard_normal((m, k)), dtype)
    return x


def gemm_error(y, x, layer, bias=None):
    """The error of y over that of a dense product at the same dtype, whose weight and result are rounded once each.

    Both errors are against float64, in the Frobenius norm.
    """
    k, dtype = layer.k, layer.dtype
    exact_x = from_bits(np.ascontiguousarray(x[:, :k]), dtype).astype(np.float64)
    offset = 0 if bias is None else from_bits(bias, dtype).astype(np.float64)
    exact = exact_x @ layer.exact.T + offset
    rounded_weight = from_bits(to_bits(layer.exact, dtype), dtype)
    dense = from_bits(to_bits(exact_x.astype(np.float32) @ rounded_weight.T + np.float32(offset), dtype), dtype)
    return np.linalg.norm(from_bits(y, dtype) - exact) / np.linalg.norm(dense - exact)
