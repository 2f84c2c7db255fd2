"""The repack and dequantize kernels, run by the emulator, bit for bit against the documented layout."""

from pathlib import Path

import numpy as np
import pytest

from support.kernels import BFLOAT16, FLOAT16, KernelError, Kernels, Layer, pack_stream, tiles, to_bits

BITS = (2, 3, 4, 8)


@pytest.fixture(scope="module")
def kernels(emulator_path: Path) -> Kernels:
    return Kernels(emulator_path)


def places(bits: int, i: int, r: int) -> list[tuple[int, int]]:
    """Word and bit of every bit of pair (i, r)'s first code: the table at the top of layout.cuh."""
    if bits == 2:
        word, first = i // 2, 4 * (i % 2) + (0, 2, 8, 10)[r]
    elif bits == 3 and i < 3:
        word, first = i, (0, 3, 6, 9)[r]
    elif bits == 3 and r < 3:
        word, first = (0, 2, 1)[r], 12
    elif bits == 3:
        return [(bit, 15) for bit in range(3)]
    elif bits == 4:
        word, first = i, 4 * r
    else:
        word, first = 2 * i + r % 2, 8 * (r // 2)
    return [(word, first + bit) for bit in range(bits)]


def repacked(codes: np.ndarray, bits: int) -> np.ndarray:
    """The weight as layout.cuh describes it, from codes (k, n), one bit of all units and lanes at a time."""
    k, n = codes.shape
    padded = np.zeros((tiles(k) * 64, tiles(n) * 64), np.int64)
    padded[:k, :n] = codes
    units = padded.reshape(tiles(k), 64, tiles(n), 64).transpose(2, 0, 1, 3)  # column tile, unit, input, column
    words = np.zeros((*units.shape[:2], 4 * bits, 32), np.uint32)
    c, t = np.divmod(np.arange(32), 4)
    for j in range(4):
        for i in range(4):
            for r in range(4):
                for half in range(2):
                    code = units[:, :, 16 * j + 4 * t + 2 * (r >> 1) + half, 16 * i + 8 * (r & 1) + c]
                    for bit, (word, place) in enumerate(places(bits, i, r)):
                        words[:, :, bits * j + word] |= (code >> bit & 1).astype(np.uint32) << (place + 16 * half)
    return words.reshape(*units.shape[:2], bits, 4, 32).swapaxes(3, 4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (96, 32), (128, 160), (32, 224)])
def test_weight(kernels: Kernels, bits: int, n: int, k: int) -> None:
    codes = np.random.default_rng(n).integers(0, 1 << bits, (k, n))
    weight = kernels.repack_weight(bits, pack_stream(codes, bits), n, k)
    np.testing.assert_array_equal(weight, repacked(codes, bits))


@pytest.mark.parametrize("bits", BITS)
def test_weight_with_its_inputs_in_another_order(kernels: Kernels, bits: int) -> None:
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (160, 96))
    rows = random.permutation(160).astype(np.int32)
    weight = kernels.repack_weight(bits, pack_stream(codes, bits), 96, 160, rows)
    np.testing.assert_array_equal(weight, repacked(codes[rows], bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_grid(kernels: Kernels, bits: int, zero_offset: int) -> None:
    random = np.random.default_rng(bits)
    n, groups = 160, 3
    stored = random.integers(0, 1 << bits, (groups, n))
    stored[:, 0], stored[:, -1] = 0, (1 << bits) - 1
    scales = random.integers(0, 1 << 16, (groups, n)).astype(np.uint16)
    qzeros = np.ascontiguousarray(pack_stream(stored.T, bits).T)
    scale, zero = kernels.repack_grid(bits, scales, qzeros, zero_offset, n, groups)
    column = np.arange(n)
    inside = column % 64
    place = column // 64 * 64 + 8 * (inside % 8) + 2 * (inside // 16) + inside // 8 % 2
    if bits < 4:  # the first of two in the low nibble
        zero = np.stack([zero & 15, zero >> 4], axis=-1).reshape(groups, -1)
    padding = np.setdiff1d(np.arange(scale.shape[1]), place)
    np.testing.assert_array_equal(scale[:, place], scales)
    np.testing.assert_array_equal(zero[:, place], stored + zero_offset)
    assert len(padding) == 32
    assert not scale[:, padding].any()
    assert not zero[:, padding].any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize(
    ("n", "k", "group"), [(64, 64, 64), (96, 160, 32), (160, 96, 4), (32, 224, 224), (64, 96, 128)]
)
def test_dequantized_weight_is_rounded_once(
    kernels: Kernels, bits: int, dtype: int, n: int, k: int, group: int
) -> None:
    for zeros, offset in (("random", 1), (0, 0), (1 << bits, 1)):
        layer = Layer(kernels, bits=bits, dtype=dtype, n=n, k=k, group=group, zeros=zeros, zero_offset=offset)
        np.testing.assert_array_equal(kernels.dequantize(layer, 0, n), to_bits(layer.exact, dtype))


def test_dequantized_subnormal_and_overflowing_scales(kernels: Kernels) -> None:
    layer = Layer(kernels, bits=8, dtype=FLOAT16, n=64, k=64, group=32)
    layer.scales[...] = np.random.default_rng(0).integers(1, 0x7C00, layer.scales.shape)
    layer.scale, _ = kernels.repack_grid(8, layer.scales, layer.qzeros, 1, 64, 2)
    scale = layer.scales.view(np.float16).astype(np.float32)[np.arange(64) // 32]
    with np.errstate(over="ignore"):
        expected = to_bits(((layer.codes - layer.zeros[np.arange(64) // 32]) * scale).T, FLOAT16)
    assert np.isinf(expected.view(np.float16)).any()
    np.testing.assert_array_equal(kernels.dequantize(layer, 0, 64), expected)


@pytest.mark.parametrize(("first", "count"), [(0, 64), (64, 64), (10, 100), (63, 2), (159, 1), (5, 0)])
def test_some_rows_of_the_dequantized_weight(kernels: Kernels, first: int, count: int) -> None:
    layer = Layer(kernels, bits=3, dtype=FLOAT16, n=160, k=96, group=32)
    dense = kernels.dequantize(layer, first, count)
    np.testing.assert_array_equal(dense, to_bits(layer.exact[first : first + count], FLOAT16))


def test_what_fits_no_words_or_rows_is_refused(kernels: Kernels) -> None:
    with pytest.raises(KernelError, match="-3: a size"):
        kernels.repack_grid(3, np.zeros((1, 8), np.uint16), np.zeros((1, 1), np.int32), 1, 8, 1)
    with pytest.raises(KernelError, match="-3: a size"):
        kernels.repack_weight(4, np.zeros((5, 64), np.int32), 64, 40)
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=64, k=64, group=32)
    with pytest.raises(KernelError, match="-3: a size"):
        kernels.dequantize(layer, 1, 64)
    layer.group = 6
    with pytest.raises(KernelError, match="-4: the group size"):
        kernels.dequantize(layer, 0, 64)
