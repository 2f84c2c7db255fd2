"""Packing against words written down by hand and against numpy's stream of bits."""

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.export.bits import codes_per_unit, pack, unpack
from support.weights import words


def unsigned(packed):
    return [int(word) & 0xFFFFFFFF for word in packed.flatten()]


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
    (3, 32, 11, 0b111, [0, 0b1110, 0]),
    # code 21: its low bit is bit 31 of word 1, its high two bits are bits 0 and 1 of word 2
    (3, 32, 21, 0b001, [0, 1 << 31, 0]),
    (3, 32, 21, 0b010, [0, 0, 1]),
    (3, 32, 21, 0b100, [0, 0, 2]),
    (3, 32, 31, 0b111, [0, 0, 0xE0000000]),
]


@pytest.mark.parametrize(("bits", "count", "position", "code", "expected"), BY_HAND)
def test_one_code_by_hand(bits, count, position, code, expected):
    codes = torch.zeros(count, dtype=torch.uint8)
    codes[position] = code
    assert unsigned(pack(codes, bits)) == expected
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width_is_a_stream_of_bits(bits):
    codes = torch.randint(0, 1 << bits, (3, 2, 3 * codes_per_unit(bits)), generator=torch.Generator().manual_seed(bits))
    before = codes.clone()
    packed = pack(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.is_contiguous()
    assert torch.equal(packed, words(codes, bits))
    assert torch.equal(unpack(packed, bits).long(), codes)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64])
def test_any_dtype_and_stride(bits, dtype):
    top = min((1 << bits) - 1, torch.iinfo(dtype).max)
    codes = (torch.arange(64 * 5) % (top + 1)).reshape(64, 5).to(dtype).t()
    assert torch.equal(pack(codes, bits), words(codes, bits))
    strided = pack(codes, bits).t().contiguous().t()
    assert torch.equal(unpack(strided, bits), codes.to(torch.uint8))


def test_what_cannot_be_packed_is_refused():
    for bits, count in ((2, 8), (3, 16), (4, 12), (8, 6)):
        with pytest.raises(ShapeError, match=f"the last axis has {count} codes, not a multiple of"):
            pack(torch.zeros(2, count, dtype=torch.uint8), bits)
    for bad in (-1, 8):
        with pytest.raises(ShapeError, match=r"3 bits hold 0 \.\.\. 7"):
            pack(torch.full((32,), bad, dtype=torch.int16), 3)
    with pytest.raises(ShapeError, match="2 int32 words"):
        unpack(torch.zeros(2, dtype=torch.int32), 3)
    with pytest.raises(ShapeError, match=r"torch\.int64"):
        unpack(torch.zeros(3, dtype=torch.int64), 3)


@pytest.mark.parametrize("bits", [3, 8])
def test_results_do_not_share_memory_with_what_was_given(bits):
    packed = torch.zeros(3, dtype=torch.int32)
    unpack(packed, bits).fill_(1)
    codes = torch.zeros(32, dtype=torch.uint8)
    pack(codes, bits).fill_(-1)
    assert not packed.any()
    assert not codes.any()


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gpu_gives_the_same_words(bits):
    codes = torch.randint(0, 1 << bits, (7, 96), generator=torch.Generator().manual_seed(0))
    packed = pack(codes.cuda(), bits)
    assert torch.equal(packed.cpu(), words(codes, bits))
    assert torch.equal(unpack(packed, bits).cpu().long(), codes)
