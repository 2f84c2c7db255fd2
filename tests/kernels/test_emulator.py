"""What only the C interface shows, on the emulator: layouts, distances of 64 bits, refusals, what accesses cost.

test_planted_bugs.py shows that the emulator finds what is wrong.
"""

import itertools
import mmap
import re
from ctypes import addressof

import pytest
import torch

from gptqkit.errors import BackendError
from gptqkit.kernels.library import LayerRecord, Shape
from gptqkit.kernels.packing import pack_codes, pack_grid, pack_zeros
from support import kernel_cases
from support.kernel_cases import make_weight, random, with_free_grids

BITS = (2, 3, 4, 8)
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which mmap has no name for before Python 3.13


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


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (33, 96)])
def test_weights_are_packed_as_the_sources_describe(bits, n, k):
    """One bit at a time."""
    weight = make_weight(bits, n, k, least_zero=1)
    codes, zeros = weight.codes, weight.zero_point()
    zeros[0], zeros[1] = 0, 2**bits
    words, padded = pack_codes(codes, bits).tolist(), torch.nn.functional.pad(codes, (0, 64, 0, 64)).tolist()
    for tile, unit, lane, j, i, r, half in itertools.product(
        range(-(-n // 64)), range(-(-k // 64)), range(32), *[range(4)] * 3, range(2)
    ):
        c, t = divmod(lane, 4)
        code = padded[64 * tile + 8 * c + 2 * i + (r & 1)][64 * unit + 16 * j + 4 * t + 2 * (r >> 1) + half]
        for bit, (word, place) in enumerate(places(bits, i, r)):
            vector, element = divmod(bits * j + word, 4)
            assert words[tile][unit][vector][lane][element] >> place + 16 * half & 1 == code >> bit & 1
    grid, packed = pack_grid(zeros).tolist(), pack_zeros(zeros, bits)
    if bits < 4:  # the first of two in the low nibble
        packed = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    assert packed.tolist() == grid
    for group, column in itertools.product(range(zeros.shape[1]), range(-(-n // 64) * 64)):
        assert grid[group][column] == (zeros[column, group] if column < n else 0)


def test_cases_of_the_sanitizers_and_planted_bugs_are_right(emulation):
    emulation.count_traffic(True)
    assert all(kernel_cases.find_fault(emulation, bits, torch.float16) is None for bits in (3, 4))
    emulation.count_traffic(False)


@pytest.fixture
def call(emulation):
    """Calls a function of the library for a layer, some of its arguments or the layer's fields changed."""
    layer = emulation.linear(make_weight(rows=160), None, torch.float16)
    tensors = {"weight": layer.packed, "scale": layer.scale, "zero": layer.zero}

    def call(name, m=3, **changes):
        x, result = random(m, 96).half(), torch.full((m if name == "gemm" else 160, 96 + 64), torch.nan).half()
        fields = tensors | {"bias": None} | Shape(4, 0, 160, 96, 32)._asdict()
        operands = {"layer": None, "x": x, "ldx": 96, "y": result, "workspace": None, "locks": None, "m": m, "split": 1}
        if name == "dequantize":
            operands = {"layer": None, "dense": result, "first": 0, "count": 160}
        pointers = {key: each.data_ptr() if hasattr(each, "data_ptr") else each for key, each in changes.items()}
        record = LayerRecord(
            *(
                pointers.pop(key, each if not hasattr(each, "data_ptr") else each.data_ptr())
                for key, each in fields.items()
            )
        )
        operands = {key: each.data_ptr() if hasattr(each, "data_ptr") else each for key, each in operands.items()}
        emulation.library.run(name, *(operands | pointers | {"layer": addressof(record)}).values(), None)
        return (
            result.flatten()[: m * 160].view(m, 160) if name == "gemm" else result.flatten()[: 160 * 96].view(160, 96)
        )

    return call


@pytest.mark.parametrize(
    ("names", "change", "words"),
    [
        (("gemm", "dequantize"), {"bits": 5}, "bits is none of 2, 3, 4 and 8 (code -1)"),
        (("gemm", "dequantize"), {"dtype": 2}, "(code -2)"),
        (("gemm", "dequantize"), {"k": 72}, "(code -3)"),
        (("gemm", "dequantize"), {"n": -1}, "(code -3)"),
        (("gemm", "dequantize"), {"group": 24}, "(code -4)"),
        (("gemm", "dequantize"), {"group": 0}, "(code -4)"),
        (("gemm",), {"split": 65}, "(code -5)"),
        (("gemm",), {"split": 0}, "(code -5)"),
        (("gemm",), {"split": 2}, "above 1 without workspace and locks (code -5)"),
        (("gemm",), {"ldx": 100}, "(code -6)"),
        (("gemm",), {"x": torch.zeros(400).half()[1:]}, "a tensor is not aligned as api.h asks (code -6)"),
        (("gemm", "dequantize"), {"scale": torch.zeros(400).half()[1:]}, "(code -6)"),
        (("dequantize",), {"first": 1}, "(code -3)"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(call, names, change, words):
    for name in names:
        with pytest.raises(BackendError, match=re.escape(words)):
            call(name, **change)


@pytest.mark.parametrize(("first", "count"), [(0, 64), (64, 64), (10, 100), (63, 2), (159, 1), (5, 0)])
def test_some_rows_of_the_dequantized_weight(call, first, count):
    whole, some = call("dequantize"), call("dequantize", first=first, count=count)
    assert torch.equal(whole, make_weight(rows=160).dequantize(torch.float16))
    assert torch.equal(some[:count], whole[first : first + count])
    assert some[count:].isnan().all()


@pytest.mark.parametrize("m", [1, 3, 17])
def test_rows_may_lie_apart_also_by_more_than_two_to_the_31_elements(call, m):
    x, expected = random(m, 96).half(), call("gemm", m)
    stride = 2**31 // (m - 1) // 8 * 8 + 8 if m > 1 else 97
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE  # only the pages that are touched take memory
    memory = mmap.mmap(-1, 2 * (stride * (m - 1) + 96), flags=flags)
    apart = torch.frombuffer(memory, dtype=torch.float16)
    for row in range(m):
        apart[row * stride : row * stride + 96] = x[row]
    assert torch.equal(call("gemm", m, x=apart, ldx=stride), expected)


def traffic_of(emulation, run):
    """What every access cost while `run` ran."""
    emulation.count_traffic(True)
    run()
    emulation.count_traffic(False)
    return emulation.traffic()


ACCESSES = [(torch.float16, False), (torch.float16, True), (torch.bfloat16, False)]
ACCESSES.append(pytest.param(torch.bfloat16, True, marks=pytest.mark.slow))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("dtype", "free"), ACCESSES)
def test_accesses_have_no_bank_conflicts_fill_whole_sectors_and_move_no_more_than_y(emulation, bits, dtype, free):
    weight = make_weight(bits, 320, 384, 64)
    layer = emulation.linear(with_free_grids(weight) if free else weight, torch.zeros(320), dtype)
    tensors, sizes = (layer.packed, layer.scale, layer.zero), (bits, 64, 320)
    dense = traffic_of(emulation, lambda: torch.ops.gptqkit.dequantize(*tensors, *sizes, 384, dtype))
    assert all(each.spent == each.least for each in dense)
    for rows, split in ((3, 2), (16, 3), (30, 5), (70, 2)):
        x = random(rows, 384).to(dtype)
        written, operands = 0, (x, *tensors, layer.bias, *sizes, split)
        product = traffic_of(emulation, lambda operands=operands: torch.ops.gptqkit.linear(*operands))
        for each in product:
            # A lock, once per tile, and the bias, at any address, are 4 and 2 bytes.
            assert each.spent == each.least or (each.function, each.bytes) in (
                ("store_global", 4),
                ("load_constant", 2),
            )
            written += each.least if each.bytes == 16 and each.function in ("store_for_blocks", "store_global") else 0
        assert written == 4 * split * rows * 320 + 2 * rows * 320  # sums, y
        kernel = "gemm_small_m.cuh" if rows <= 16 else "gemm_large_m.cuh"
        for_each = {(kernel, name, 16) for name in ("copy_async_from", "load_shared")}  # weights
        assert for_each <= {(each.file, each.function, each.bytes) for each in product}
