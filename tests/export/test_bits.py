"""Packing against words written down by hand and against a stream of Python integers."""

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.export.bits import codes_per_unit, pack, unpack


def stream_words(codes: list[int], bits: int) -> list[int]:
    """The same words by arithmetic on one big integer: code k times 2^(k * bits)."""
    stream = sum(code << (k * bits) for k, code in enumerate(codes))
    words = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(len(codes) * bits // 32)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def unsigned(words: torch.Tensor) -> list[int]:
    return [int(word) & 0xFFFFFFFF for word in words.flatten()]


# One code set, all others zero: (bits, number of codes, position, code, words by hand).
BY_HAND = [
    (2, 16, 0, 0b11, [0x00000003]),
    (2, 16, 15, 0b10, [0x80000000]),
    (4, 8, 1, 0xF, [0x000000F0]),
    (4, 8, 7, 0x9, [0x90000000]),
    (8, 4, 3, 0xAB, [0xAB000000]),
    (8, 4, 0, 0xFF, [0x000000FF]),
    (3, 32, 0, 0b101, [0b101, 0, 0]),
    (3, 32, 9, 0b111, [0b111 << 27, 0, 0]),
    # code 10: its low two bits are bits 30 and 31 of word 0, its high bit is bit 0 of word 1
    (3, 32, 10, 0b001, [1 << 30, 0, 0]),
    (3, 32, 10, 0b010, [1 << 31, 0, 0]),
    (3, 32, 10, 0b100, [0, 1, 0]),
    (3, 32, 10, 0b111, [0xC0000000, 0x00000001, 0]),
    (3, 32, 11, 0b111, [0, 0b1110, 0]),
    # code 21: its low bit is bit 31 of word 1, its high two bits are bits 0 and 1 of word 2
    (3, 32, 21, 0b001, [0, 1 << 31, 0]),
    (3, 32, 21, 0b010, [0, 0, 1]),
    (3, 32, 21, 0b100, [0, 0, 2]),
    (3, 32, 21, 0b111, [0, 0x80000000, 0x00000003]),
    (3, 32, 22, 0b111, [0, 0, 0b11100]),
    (3, 32, 31, 0b111, [0, 0, 0xE0000000]),
]


@pytest.mark.parametrize(("bits", "count", "position", "code", "words"), BY_HAND)
def test_one_code_by_hand(bits: int, count: int, position: int, code: int, words: list[int]) -> None:
    codes = torch.zeros(count, dtype=torch.uint8)
    codes[position] = code
    assert unsigned(pack(codes, bits)) == words
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


def test_all_ones_every_three_bits() -> None:
    assert unsigned(pack(torch.ones(32, dtype=torch.uint8), 3)) == [0x49249249, 0x92492492, 0x24924924]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("units", [1, 3])
def test_agrees_with_one_big_integer(bits: int, units: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    count = units * codes_per_unit(bits)
    codes = torch.randint(0, 1 << bits, (3, 2, count), generator=generator)
    before = codes.clone()
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (3, 2, count * bits // 32)
    assert words.is_contiguous()
    for i in range(3):
        for j in range(2):
            assert words[i, j].tolist() == stream_words(codes[i, j].tolist(), bits)
    assert torch.equal(unpack(words, bits).long(), codes)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_any_dtype_and_stride(bits: int, dtype: torch.dtype) -> None:
    top = min((1 << bits) - 1, torch.iinfo(dtype).max)
    codes = (torch.arange(64 * 5) % (top + 1)).reshape(64, 5).to(dtype).t()
    assert torch.equal(pack(codes, bits), pack(codes.contiguous().to(torch.uint8), bits))
    strided = pack(codes, bits).t().contiguous().t()
    assert torch.equal(unpack(strided, bits), codes.to(torch.uint8))


@pytest.mark.parametrize(("bits", "count"), [(2, 8), (3, 16), (4, 12), (8, 6)])
def test_codes_that_do_not_fill_words_are_refused(bits: int, count: int) -> None:
    with pytest.raises(ShapeError, match=f"the last axis has {count} codes, not a multiple of"):
        pack(torch.zeros(2, count, dtype=torch.uint8), bits)


@pytest.mark.parametrize("bad", [-1, 8])
def test_codes_out_of_range_are_refused(bad: int) -> None:
    codes = torch.zeros(32, dtype=torch.int16)
    codes[5] = bad
    with pytest.raises(ShapeError, match=r"3 bits hold 0 \.\.\. 7"):
        pack(codes, 3)


def test_words_that_hold_no_whole_number_of_codes_are_refused() -> None:
    with pytest.raises(ShapeError, match="2 int32 words"):
        unpack(torch.zeros(2, dtype=torch.int32), 3)
    with pytest.raises(ShapeError, match=r"torch\.int64"):
        unpack(torch.zeros(3, dtype=torch.int64), 3)


def test_unpacked_codes_do_not_alias_the_words() -> None:
    words = torch.zeros(1, dtype=torch.int32)
    unpack(words, 8).fill_(1)
    assert words.item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gpu_gives_the_same_words(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (7, 96), generator=torch.Generator().manual_seed(0))
    words = pack(codes.cuda(), bits)
    assert torch.equal(words.cpu(), pack(codes, bits))
    assert torch.equal(unpack(words, bits).cpu().long(), codes)
