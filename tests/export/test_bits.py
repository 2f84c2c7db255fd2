"""Packing against words written down by hand and against numpy's stream of bits."""

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.export.bits import codes_per_unit, pack, unpack
from support.weights import words


@pytest.mark.parametrize(
    ("bits", "position", "code", "expected"),  # one code set, all others zero
    [
        (2, 15, 0b10, [0x80000000]),
        (4, 1, 0xF, [0x000000F0]),
        (8, 3, 0xAB, [0xAB000000]),
        (3, 9, 0b111, [0b111 << 27, 0, 0]),
        (3, 10, 0b111, [0xC0000000, 1, 0]),  # two bits at the end of word 0, one in word 1
        (3, 21, 0b110, [0, 0, 3]),  # one bit at the end of word 1, two in word 2
        (3, 21, 0b001, [0, 0x80000000, 0]),
        (3, 31, 0b111, [0, 0, 0xE0000000]),
    ],
)
def test_one_code_by_hand(bits, position, code, expected):
    codes = torch.zeros(codes_per_unit(bits), dtype=torch.uint8)
    codes[position] = code
    assert [int(word) & 0xFFFFFFFF for word in pack(codes, bits)] == expected
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_width_is_a_stream_of_bits_whatever_dtype_and_strides(bits, place):
    count = 3 * codes_per_unit(bits)
    codes = torch.randint(0, 1 << bits, (count, 5, 2), generator=torch.Generator().manual_seed(bits), device="cpu")
    codes = codes.to(place).permute(1, 2, 0)
    expected = words(codes.cpu(), bits)
    for dtype in (torch.uint8, torch.int16, torch.int64):
        packed = pack(codes.to(dtype), bits)
        assert torch.equal(packed.cpu(), expected)
        assert packed.is_contiguous()
    strided = packed.transpose(0, 2).contiguous().transpose(0, 2)
    found = unpack(strided, bits)
    assert torch.equal(found.long(), codes)
    found.fill_(1)  # results share no memory with what was given
    assert torch.equal(strided.cpu(), expected)


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
