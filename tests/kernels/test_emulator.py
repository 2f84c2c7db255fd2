"""What only the C interface shows, on the emulator: layouts, distances of 64 bits, refusals, what accesses cost.

test_planted_bugs.py shows that the emulator finds what is wrong.
"""

import mmap
import sys

import numpy as np
import pytest
import torch

from gptqkit.kernels.cuda import pack_codes, pack_grid, pack_zeros
from support import kernel_cases
from support.kernel_cases import (
    BFLOAT16,
    FLOAT16,
    LARGEST_ERROR,
    KernelError,
    Kernels,
    Layer,
    activations,
    aligned,
    gemm_error,
    to_bits,
)

BITS = (2, 3, 4, 8)
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which mmap has no name for before Python 3.13


@pytest.fixture(scope="module")
def kernels(emulator_path):
    kernels = Kernels(emulator_path)
    kernels.handle.gptqkit_emulator_count(1)
    yield kernels
    kernels.handle.gptqkit_emulator_count(0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (96, 32), (128, 160), (33, 224)])
def test_weights_are_packed_as_the_sources_describe(bits, n, k):
    random = np.random.default_rng(n)
    codes, zeros = random.integers(0, 1 << bits, (n, k)), random.integers(0, (1 << bits) + 1, (3, n))
    scales = random.integers(0, 1 << 15, (3, n)).astype(np.int16)
    packed = pack_codes(torch.from_numpy(codes.astype(np.uint8)), bits)
    np.testing.assert_array_equal(packed.numpy().view(np.uint32), kernel_cases.packed_codes(codes, bits))
    np.testing.assert_array_equal(pack_grid(torch.from_numpy(scales.T)).numpy(), kernel_cases.packed_grid(scales))
    packed = pack_zeros(torch.from_numpy(zeros.T.astype(np.int16)), bits)
    np.testing.assert_array_equal(packed.numpy(), kernel_cases.packed_zeros(zeros, bits).astype(packed.numpy().dtype))


def test_cases_of_the_sanitizers_and_planted_bugs_are_right(emulator_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kernel_cases", str(emulator_path)])
    assert kernel_cases.main() is None


@pytest.mark.parametrize(("first", "count"), [(0, 64), (64, 64), (10, 100), (63, 2), (159, 1), (5, 0)])
def test_some_rows_of_the_dequantized_weight(kernels, first, count):
    layer = Layer(bits=3, dtype=FLOAT16, n=160, k=96, group=32)
    expected = to_bits(layer.exact[first : first + count], FLOAT16)
    np.testing.assert_array_equal(kernels.dequantize(layer, first, count), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 5}, "-1: bits"),
        ({"dtype": 2}, "-2: dtype"),
        ({"k": 72}, "-3: a size"),
        ({"group": 24}, "-4: the group size"),
        ({"group": 0}, "-4: the group size"),
        ({"split": 65}, "-5: split"),
        ({"split": 0}, "-5: split"),
        ({"ldx": 100}, "-6: a tensor"),
        ({"x": aligned(np.uint16(0), 200)[1:193].reshape(2, 96)}, "-6: a tensor"),
        ({"first": 1}, "-3: a size"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(kernels, change, words):
    layer = Layer(bits=4, dtype=FLOAT16, n=64, k=96, group=32)
    options = {name: value for name, value in change.items() if name in ("split", "ldx")}
    for name in change.keys() & vars(layer).keys():
        setattr(layer, name, change[name])
    if not options and "x" not in change:
        with pytest.raises(KernelError, match=words):
            kernels.dequantize(layer, change.get("first", 0), 64)
    if "first" not in change:
        with pytest.raises(KernelError, match=words):
            kernels.gemm(layer, change.get("x", activations(2, 96, FLOAT16)), **options)


def test_one_row_of_any_stride_and_no_rows(kernels):
    layer, x = Layer(bits=4, dtype=FLOAT16, n=64, k=96, group=32), activations(1, 96, FLOAT16)
    np.testing.assert_array_equal(kernels.gemm(layer, x, ldx=97), kernels.gemm(layer, x))
    assert kernels.gemm(layer, activations(0, 96, FLOAT16)).shape == (0, 64)
    layer.n = 0
    assert kernels.gemm(layer, x).shape == (1, 0)


@pytest.mark.parametrize("m", [3, 17])
def test_rows_more_than_two_to_the_31_elements_apart(kernels, m):
    layer, x = Layer(bits=4, dtype=FLOAT16, n=32, k=64, group=32), activations(m, 64, FLOAT16)
    stride = 2**31 // (m - 1) // 8 * 8 + 8
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE  # only the pages that are touched take memory
    with mmap.mmap(-1, 2 * (stride * (m - 1) + 64), flags=flags) as memory:
        apart = np.frombuffer(memory, np.uint16)
        for row in range(m):
            apart[row * stride : row * stride + 64] = x[row]
        y = kernels.gemm(layer, apart, m=m, ldx=stride)
        del apart
    np.testing.assert_array_equal(y, kernels.gemm(layer, x))


@pytest.mark.parametrize("m", [1, 20])
def test_inputs_beyond_the_last_do_not_overflow(kernels, m):
    # All weights are (15 - 16) * 30000; a padded code 0 would be -480000, infinite in float16.
    layer = Layer(bits=4, dtype=FLOAT16, n=32, k=96, group=96, zeros=16, scales=np.full((1, 32), 30000.0))
    layer.weight = kernel_cases.packed_codes(np.full((32, 96), 15), 4)
    x = aligned(to_bits(np.full((m, 96), 2**-10), FLOAT16))
    np.testing.assert_array_equal(kernels.gemm(layer, x).view(np.float16), np.float16(-30000 * 96 / 1024))


def excesses(traffic):
    """The worst spent / least of each kind of access: file, function, bytes of a lane."""
    worst = {}
    for each in traffic:
        kind = (each.file, each.function, each.bytes)
        worst[kind] = max(worst.get(kind, 0), each.spent / each.least)
    return worst


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("m", "dtype"), [(3, FLOAT16), (16, BFLOAT16), (30, FLOAT16), (70, BFLOAT16)])
def test_gemm_has_no_bank_conflicts_and_reads_and_writes_whole_sectors(kernels, bits, m, dtype):
    layer, x = Layer(bits=bits, dtype=dtype, n=320, k=384, group=64), activations(m, 384, dtype)
    bias = aligned(np.uint16(0), 320)
    assert gemm_error(kernels.gemm(layer, x, split=2, bias=bias), x, layer, bias) < LARGEST_ERROR
    traffic = excesses(kernels.traffic())
    assert traffic.pop(("gemm.cuh", "store_global", 4)) == 8  # a lock, once per tile
    assert set(traffic.values()) == {1}
    kernel = "gemm_small_m.cuh" if m <= 16 else "gemm_large_m.cuh"
    assert set(traffic) >= {
        (kernel, "copy_async_from", 16),  # the weight
        (kernel, "copy_async_to", 16),
        (kernel, "load_shared", 16),
        (kernel, "store_shared", 4),  # the sums
        ("gemm.cuh", "load_shared", 4),
        ("gemm.cuh", "store_for_blocks", 4),  # the workspace
        ("gemm.cuh", "load_from_blocks", 4),
        ("gemm.cuh", "load_constant", 16),  # scales
        ("gemm.cuh", "load_constant", 16 if bits == 8 else 8 if bits == 4 else 4),  # zeros
        ("gemm.cuh", "load_constant", 2),  # bias
        ("gemm.cuh", "store_global", 2),  # y
    }
    assert (kernel, 8) in {(file, size) for file, _, size in traffic}  # x


@pytest.mark.parametrize("bits", BITS)
def test_dequantize_reads_and_writes_whole_sectors(kernels, bits):
    kernels.dequantize(Layer(bits=bits, dtype=FLOAT16, n=128, k=192, group=64), 0, 128)
    assert set(excesses(kernels.traffic()).values()) == {1}
