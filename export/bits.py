"""Integer codes <-> little-endian bit streams in int32 words.

Along the last axis code k occupies bits k*b ... k*b + b - 1 of the stream, and bit j of the stream is bit j % 32 of
word j // 32. With 3 bits a code may straddle two words: code 10 is bits 30 and 31 of word 0 and bit 0 of word 1.

Eight codes of b bits always fill b whole bytes, so both directions work on such octets and need no case for straddling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ShapeError

_OCTET = 8


def codes_per_unit(bits: int) -> int:
    """Return the smallest number of codes that fills whole int32 words: 16, 32, 8 and 4 codes of 2, 3, 4 and 8 bits.

    >>> [codes_per_unit(bits) for bits in (2, 3, 4, 8)]
    [16, 32, 8, 4]
    """
    return 32 // math.gcd(bits, 32)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return the bit stream of `codes`, (..., n) of any integer dtype, along their last axis.

    Returns:
        (..., n * bits / 32) int32, contiguous, on the same device.

    Raises:
        ShapeError: n codes do not fill whole words, or a code is not in 0 ... 2^bits - 1.

    >>> pack(torch.arange(8), 4).item() == 0x76543210
    True
    """
    count = codes.shape[-1]
    unit = codes_per_unit(bits)
    if count % unit:
        raise ShapeError(
            f"the last axis has {count} codes, not a multiple of {unit} ({unit} {bits}-bit codes fill whole int32 "
            "words); pad it first"
        )
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << bits:
        raise ShapeError(
            f"codes span {int(codes.min())} ... {int(codes.max())}; {bits} bits hold 0 ... {(1 << bits) - 1}"
        )
    if bits == _OCTET:  # the codes are the bytes
        return _fresh(codes.to(torch.uint8)).view(torch.int32)
    octets = codes.new_zeros((*codes.shape[:-1], count // _OCTET), dtype=torch.int64)
    for position in range(_OCTET):
        octets |= codes[..., position::_OCTET].to(torch.int64) << (bits * position)
    stream = octets.unsqueeze(-1).view(torch.uint8)[..., :bits]
    return _fresh(stream).view(*codes.shape[:-1], count * bits // 8).view(torch.int32)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of a bit stream, (..., w) int32: the inverse of `pack`.

    Returns:
        (..., w * 32 / bits) uint8, contiguous, on the same device.

    Raises:
        ShapeError: `words` are not int32, or w words do not hold a whole number of codes.

    >>> unpack(torch.tensor([0x76543210], dtype=torch.int32), 4).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if words.dtype != torch.int32:
        raise ShapeError(f"packed words are {words.dtype}; int32 is needed")
    count = words.shape[-1] * 32 // bits
    if count % codes_per_unit(bits):
        raise ShapeError(f"{words.shape[-1]} int32 words do not hold a whole number of {bits}-bit codes")
    stream = _fresh(words).view(torch.uint8)
    if bits == _OCTET:
        return stream
    octets = stream.new_zeros((*words.shape[:-1], count // _OCTET, _OCTET))
    octets[..., :bits] = stream.reshape(*words.shape[:-1], count // _OCTET, bits)
    value = octets.view(torch.int64).squeeze(-1)
    codes = stream.new_empty((*words.shape[:-1], count))
    for position in range(_OCTET):
        codes[..., position::_OCTET] = (value >> (bits * position)) & ((1 << bits) - 1)
    return codes


def pack_stream(values: Tensor, bits: int) -> Tensor:
    """Return the bit stream of any number of codes along the last axis, whose last word may be filled in part."""
    count = values.shape[-1]
    return pack(functional.pad(values, (0, -count % 32)), bits)[..., : -(-count * bits // 32)].contiguous()


def unpack_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """Return what `pack_stream` packed, (..., count) uint8."""
    return unpack(functional.pad(words, (0, -words.shape[-1] % bits)), bits)[..., :count].contiguous()


def _fresh(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of its shape, also along axes of length 1, where `contiguous` does not care."""
    return tensor.clone(memory_format=torch.contiguous_format)
