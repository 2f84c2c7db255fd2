"""The C interface of the kernels on NumPy arrays, what it should compute written a second time, and cases of it.

    python tests/support/kernel_cases.py LIBRARY            products and dequantized weights of all bits and dtypes
    python tests/support/kernel_cases.py LIBRARY --bits 4   float16 products at these bits only

Ends with 1 and a line that says what is wrong at the first wrong result. A process of its own, without torch, because a
planted bug may crash it and because the sanitizers want to be loaded first.
"""

import argparse
import ctypes
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_void_p
from itertools import product
from typing import NamedTuple

import numpy as np

FLOAT16, BFLOAT16 = 0, 1

# Tokens, outputs, inputs, group, split: each kernel with whole and ragged tiles, groups within and across units.
CASES = (
    (5, 96, 288, 32, 2),
    (8, 64, 608, 128, 1),
    (13, 96, 352, 128, 3),
    (16, 160, 96, 16, 1),
    (20, 320, 160, 32, 2),
    (33, 96, 352, 64, 2),
    (66, 288, 96, 48, 1),
)
LARGEST_ERROR = 1.05
"""Of the dense product's. Measured: 0.6 to 0.9 for up to 16 tokens, whose weights are not rounded, 1.0 for more."""


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
    def conflicts(self):
        return self.function in ("load_shared", "store_shared", "copy_async_to") and self.spent > self.least


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


def aligned(fill, shape=None):
    """An array that begins at a multiple of 256 bytes, as allocators of GPUs give them."""
    fill = np.asarray(fill)
    shape = fill.shape if shape is None else shape
    size = int(np.prod(shape)) * fill.itemsize
    memory = np.empty(size + 256, np.uint8)
    start = -memory.ctypes.data % 256
    array = memory[start : start + size].view(fill.dtype).reshape(shape)
    array[...] = fill
    return array


def places(bits, i, r):
    """Word and bit of every bit of pair (i, r)'s first code: the table at the top of layout.cuh."""
    if bits == 2:
        word, first = i // 2, 4 * (i % 2) + (0, 2, 8, 10)[r]
    elif bits == 3 and i < 3:
        word, first = i, (0, 3, 6, 9)[r]
    elif bits == 3 and r < 3:
        word, first = (0, 2, 1)[r], 12
    elif bits == 3:
        return [(bit, 15) for bit in range(3)]
    else:
        word, first = (i, 4 * r) if bits == 4 else (2 * i + r % 2, 8 * (r // 2))
    return [(word, first + bit) for bit in range(bits)]


def packed_codes(codes, bits):
    """Codes (n, k) as layout.cuh describes them, one bit of all units and lanes at a time."""
    padded = np.pad(codes.astype(np.uint32), [(0, -size % 64) for size in codes.shape])
    units = padded.reshape(len(padded) // 64, 64, -1, 64).transpose(0, 2, 3, 1)  # column tile, unit, input, column
    words = np.zeros((*units.shape[:2], 4 * bits, 32), np.uint32)
    c, t = np.divmod(np.arange(32), 4)
    for j, i, r, half in np.ndindex(4, 4, 4, 2):
        code = units[:, :, 16 * j + 4 * t + 2 * (r >> 1) + half, 16 * i + 8 * (r & 1) + c]
        for bit, (word, place) in enumerate(places(bits, i, r)):
            words[:, :, bits * j + word] |= (code >> bit & 1) << (place + 16 * half)
    return aligned(words.reshape(*units.shape[:2], bits, 4, 32).swapaxes(3, 4))


def packed_grid(values):
    """Values of groups, (groups, n), with column 16i + 8h + c of a tile at 8c + 2i + h, padded with 0."""
    column = np.arange(values.shape[1])
    inside = column % 64
    packed = aligned(values.dtype.type(0), (len(values), -(-values.shape[1] // 64) * 64))
    packed[:, column - inside + 8 * (inside % 8) + 2 * (inside // 16) + inside // 8 % 2] = values
    return packed


def packed_zeros(zeros, bits):
    """Zeros (groups, n), as `packed_grid` orders them, in nibbles, bytes or 16 bits."""
    packed = packed_grid(zeros.astype(np.uint16 if bits == 8 else np.uint8))
    return packed if bits >= 4 else aligned(packed[:, ::2] | packed[:, 1::2] << 4)


class Layer:
    """A random layer and its exact weight, (n, k); `zeros` span 0 ... 2^bits or are the one number given."""

    def __init__(self, *, bits, dtype, n, k, group, zeros=None, scales=None, seed=0):
        random = np.random.default_rng(seed)
        self.bits, self.dtype, self.n, self.k, self.group = bits, dtype, n, k, group
        groups, index = -(-k // group), np.arange(k) // group
        codes = random.integers(0, 1 << bits, (n, k))
        zeros = random.integers(0, (1 << bits) + 1, (groups, n)) if zeros is None else np.full((groups, n), zeros)
        scales = to_bits(random.uniform(0.005, 0.015, (groups, n)) if scales is None else scales, FLOAT16)
        self.exact = (codes - zeros[index].T) * from_bits(scales, FLOAT16).astype(np.float64)[index].T
        self.weight, self.scale, self.zero = packed_codes(codes, bits), packed_grid(scales), packed_zeros(zeros, bits)


class Kernels:
    """The library at `path`, for arrays in the CPU's memory."""

    def __init__(self, path):
        self.handle = ctypes.CDLL(str(path))
        self.handle.gptqkit_error.restype = self.handle.gptqkit_emulator_traffic.restype = c_char_p
        i, p = c_int, c_void_p
        self.handle.gptqkit_workspace.argtypes = [i] * 4 + [POINTER(c_int64)] * 2
        self.handle.gptqkit_gemm.argtypes = [i, i, p, c_int64, *[p] * 7, *[i] * 5, p]
        self.handle.gptqkit_dequantize.argtypes = [i, i, *[p] * 4, *[i] * 5, p]

    def call(self, name, *arguments):
        pointers = (each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments)
        code = getattr(self.handle, name)(*pointers)
        if code:
            raise KernelError(f"{code}: {self.handle.gptqkit_error(code).decode()}")

    def traffic(self):
        """The traffic of the last launch, counted since gptqkit_emulator_count(1)."""
        words = [line.split() for line in self.handle.gptqkit_emulator_traffic().decode().splitlines()]
        return [Traffic(file, int(line), name, *map(int, numbers)) for file, line, name, *numbers in words]

    def gemm(self, layer, x, *, split=1, bias=None, ldx=None, m=None):
        """y as bits, (m, n), from x as bits; also checks that the locks are 0 again."""
        m, ldx = len(x) if m is None else m, layer.k if ldx is None else ldx
        floats, locks = c_int64(), c_int64()
        self.call("gptqkit_workspace", m, layer.n, layer.k, split, byref(floats), byref(locks))
        workspace, lock = aligned(np.float32(np.nan), floats.value), np.zeros(locks.value, np.int32)
        y = aligned(np.uint16(0x7FFF), (m, layer.n))
        operands = (x, ldx, layer.weight, layer.scale, layer.zero, bias, y, workspace, lock)
        sizes = (m, layer.n, layer.k, layer.group, split)
        self.call("gptqkit_gemm", layer.bits, layer.dtype, *operands, *sizes, None)
        if lock.any():
            raise KernelError("the locks are not 0 after the call")
        return y

    def dequantize(self, layer, first, count):
        dense = aligned(np.uint16(0x7FFF), (count, layer.k))
        operands = (layer.weight, layer.scale, layer.zero, dense)
        sizes = (first, count, layer.n, layer.k, layer.group)
        self.call("gptqkit_dequantize", layer.bits, layer.dtype, *operands, *sizes, None)
        return dense


def activations(m, k, dtype, *, ldx=None, seed=0):
    """Random x as bits, (m, ldx), of which the columns from k on are NaN."""
    x = aligned(np.uint16(0x7FFF), (m, ldx or k))
    x[:, :k] = to_bits(np.random.default_rng(seed).standard_normal((m, k)), dtype)
    return x


def gemm_error(y, x, layer, bias=None):
    """The error of y over that of a dense product at the same dtype, whose weight and result are rounded once each."""
    dtype = layer.dtype
    x = from_bits(np.ascontiguousarray(x[:, : layer.k]), dtype).astype(np.float64)
    offset = 0 if bias is None else from_bits(bias, dtype).astype(np.float64)
    exact = x @ layer.exact.T + offset
    rounded_weight = from_bits(to_bits(layer.exact, dtype), dtype)
    dense = from_bits(to_bits(x.astype(np.float32) @ rounded_weight.T + np.float32(offset), dtype), dtype)
    return np.linalg.norm(from_bits(y, dtype) - exact) / np.linalg.norm(dense - exact)


def wrong_product(kernels, bits, dtype):
    """What is wrong with the products at these bits and dtype, or None."""
    for seed, (m, n, k, group, split) in enumerate(CASES):
        kernels.handle.gptqkit_emulator_seed(seed)
        layer = Layer(bits=bits, dtype=dtype, n=n, k=k, group=group, seed=seed)
        x = activations(m, k, dtype, ldx=k + 8)
        bias = to_bits(np.linspace(-3, 3, n), dtype)
        error = gemm_error(kernels.gemm(layer, x, split=split, bias=bias, ldx=k + 8), x, layer, bias)
        case = f"bits {bits}, dtype {dtype}, m {m}, n {n}, k {k}, group {group}, split {split}"
        if not error < LARGEST_ERROR:
            return f"{case}: {error:.3g} times the dense product's error"
        for each in kernels.traffic():
            if each.conflicts:
                place = f"{each.file}:{each.line}, {each.function}"
                return f"{case}: bank conflicts in {place}: {each.spent / each.least:.3g} times the transfers"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--bits", type=int)
    options = parser.parse_args()
    kernels = Kernels(options.library)
    kernels.handle.gptqkit_emulator_count(1)
    try:
        if options.bits is not None:
            return wrong_product(kernels, options.bits, FLOAT16)
        for bits, dtype in product((2, 3, 4, 8), (FLOAT16, BFLOAT16)):
            if wrong := wrong_product(kernels, bits, dtype):
                return wrong
            layer = Layer(bits=bits, dtype=dtype, n=96, k=160, group=32)
            if (kernels.dequantize(layer, 1, 90) != to_bits(layer.exact, dtype)[1:91]).any():
                return f"bits {bits}, dtype {dtype}: dequantized rows differ"
    except KernelError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
