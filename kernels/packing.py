"""Quantized weights in the form that the CUDA kernels read, see `csrc/api.h` and `csrc/layout.cuh`."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..quantizer.quantized import QuantizedWeight
from .linear import whole_zero_points
from .ops import BITS


class PackedForm(NamedTuple):
    """The tensors of `gptqkit_layer`, and of act-order the order of the inputs in the codes."""

    bits: int
    packed: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None


def pack_layer(weight: QuantizedWeight) -> PackedForm:
    """Return a weight with float16 scales and whole zero points where it has such, else with float32 offsets."""
    bits = next(each for each in BITS if each >= weight.bits)
    order = None if weight.trivial_group_index else torch.argsort(weight.group_index, stable=True)
    packed = pack_codes(weight.codes if order is None else weight.codes[:, order], bits)
    zeros = whole_zero_points(weight) if torch.equal(weight.scale.half().float(), weight.scale) else None
    scale = pack_free(weight.scale) if zeros is None else pack_grid(weight.scale.half())
    zero = pack_free(weight.offset) if zeros is None else pack_zeros(zeros, bits)
    return PackedForm(bits, packed, scale, zero, None if order is None else order.to(torch.int32))


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes, uint8 (out, in), in the kernels' layout, int32 (out tiles, in tiles, bits, 32, 4).

    `csrc/layout.cuh` says which bits of which word hold the pair (i, r) of a lane; codes beyond the last are 0.
    """
    parts = (codes[first : first + 1024] for first in range(0, codes.shape[0] or 1, 1024))  # to take less memory
    return torch.cat([_pack_rows(part, bits) for part in parts])


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    padded = functional.pad(codes, (0, -codes.shape[1] % 64, 0, -codes.shape[0] % 64))
    # Outputs are (tile, c, i, r & 1), inputs (unit, step, t, r >> 1, element of the pair).
    parts = padded.view(-1, 8, 4, 2, padded.shape[1] // 64, 4, 4, 2, 2).permute(0, 4, 5, 1, 6, 2, 7, 3, 8).flatten(6, 7)
    pairs = parts[..., 0].int() | parts[..., 1].int() << 16
    words = pairs.new_zeros(*pairs.shape[:5], bits)  # tile, unit, step, c, t
    for i, r in product(range(4), range(4)):
        pair = pairs[..., i, r]
        if bits == 2:
            words[..., i // 2] |= pair << 4 * (i % 2) + (0, 2, 8, 10)[r]
        elif bits == 4:
            words[..., i] |= pair << 4 * r
        elif bits == 8:
            words[..., 2 * i + r % 2] |= pair << 8 * (r // 2)
        elif i < 3:
            words[..., i] |= pair << 3 * r
        elif r < 3:
            words[..., -r % 3] |= pair << 12
        else:
            for bit in range(3):
                words[..., bit] |= (pair >> bit & 0x00010001) << 15
    lanes = words.permute(0, 1, 3, 4, 2, 5).reshape(*words.shape[:2], 32, bits, 4)
    return lanes.transpose(2, 3).contiguous()


def pack_grid(values: Tensor) -> Tensor:
    """Return values of groups, (out, groups), as the kernels read them, (groups, out padded to 64)."""
    return functional.pad(values.t(), (0, -values.shape[0] % 64)).contiguous()


def pack_free(values: Tensor) -> Tensor:
    """Return float32 values of groups, (out, groups), as the kernels read them, (groups, out padded to 64)."""
    return pack_grid(values).view(values.shape[1], -1, 8, 2, 4).transpose(2, 3).flatten(1)


def pack_zeros(zeros: Tensor, bits: int) -> Tensor:
    """Return zero points, int16 (out, groups), as the kernels read them: in nibbles, bytes or int16."""
    ordered = pack_grid(zeros) if bits == 8 else pack_grid(zeros).to(torch.uint8)
    return ordered if bits >= 4 else ordered[:, ::2] | ordered[:, 1::2] << 4
