"""A quantized weight in the kernel's layout, and products with it.

The original words are not kept: a repacked layer takes the place of the packed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError
from . import ops  # noqa: F401  (defines torch.ops.gptqkit)
from .operands import DTYPES
from .packed import PackedWeight

_STEP = 16
_linear = torch.ops.gptqkit.linear.default


@dataclass(frozen=True, kw_only=True, eq=False)
class RepackedWeight:
    """One layer as the kernels read it; layouts in `csrc/api.h`.

    Attributes:
        weight: Codes, int32 (tiles of 64 outputs, tiles of 64 inputs, bits, 32, 4), padded with 0.
        scale: (groups, out padded to 64) float16, whatever dtype the activations have.
        zero: In the same order: uint8, two to a byte at 2 and 3 bits, or int16 at 8 bits.
        order: For act-order, the inputs in the order that the codes have, int32 (in,); else None.
        bits: Bits per code.
        group_size: Columns per group, in that order.
        in_features: Columns of the weight.
        out_features: Rows of the weight.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None
    bits: int
    group_size: int
    in_features: int
    out_features: int


def repack(packed: PackedWeight) -> RepackedWeight:
    """`packed` as the kernels read it, on its device and to the bit; there must be no `refusal`."""
    order = torch.argsort(packed.g_idx, stable=True).to(torch.int32) if packed.act_order else None
    scale, zero = torch.ops.gptqkit.repack_grid(packed.scales.half(), packed.qzeros, packed.bits, packed.zero_offset)
    return RepackedWeight(
        weight=torch.ops.gptqkit.repack_weight(packed.qweight, order, packed.bits),
        scale=scale,
        zero=zero,
        order=order,
        bits=packed.bits,
        group_size=packed.group_size,
        in_features=packed.in_features,
        out_features=packed.out_features,
    )


def matmul(x: Tensor, weight: RepackedWeight, bias: Tensor | None = None) -> Tensor:
    """The product x weightT + bias, (..., out), for x (..., in) and bias in float16 or bfloat16.

    Differentiable in x, by way of the dense weight.
    """
    layer = (weight.weight, weight.scale, weight.zero, weight.order)
    return product(x, *layer, bias, weight.bits, weight.group_size, weight.out_features, weight.in_features)


def product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    out_features: int,
    in_features: int,
) -> Tensor:
    """What `matmul` returns, for a layer given by its tensors and sizes.

    Raises:
        ShapeError: x or the tensors do not fit the sizes.
    """
    if x.shape[-1] != in_features:
        raise ShapeError(f"x has {x.shape[-1]} columns, and the layer takes {in_features}; it belongs to another layer")
    ordered = x if order is None else x.index_select(-1, order)
    if x.requires_grad and torch.is_grad_enabled():
        dense = torch.ops.gptqkit.dequantize(weight, scale, zero, bits, group_size, out_features, in_features, x.dtype)
        return torch.nn.functional.linear(ordered, dense, bias)
    y: Tensor = _linear(ordered, weight, scale, zero, bias, bits, group_size, out_features)
    return y


def dequantize(weight: RepackedWeight, dtype: torch.dtype) -> Tensor:
    """The dense weight, (out, in) in float16 or bfloat16, its columns in the order of `weight.order`."""
    dense: Tensor = torch.ops.gptqkit.dequantize(
        weight.weight,
        weight.scale,
        weight.zero,
        weight.bits,
        weight.group_size,
        weight.out_features,
        weight.in_features,
        dtype,
    )
    return dense


def refusal(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot compute with the layer, whatever the device, or None where they can."""
    if dtype not in DTYPES:
        return f"the activations are {dtype}, and the kernels compute in float16 or bfloat16; load with such a dtype"
    if packed.bits not in (2, 3, 4, 8):
        return f"the layer has {packed.bits} bits, and the kernels know 2, 3, 4 and 8"
    if packed.in_features % 32:
        return f"the layer has {packed.in_features} inputs, and the kernels need a multiple of 32"
    if packed.group_size % _STEP and packed.group_size < packed.in_features:
        return f"the layer has groups of {packed.group_size} columns, and the kernels need a multiple of {_STEP}"
    scales = packed.scales
    if scales.dtype != torch.float16 and not torch.equal(scales.half().to(scales.dtype), scales):
        return "some of the layer's bfloat16 scales are no float16 values, which the kernels need"
    if packed.act_order:
        members = torch.bincount(packed.g_idx.long(), minlength=packed.scales.shape[0])
        if bool((members[:-1] != packed.group_size).any()):
            return f"g_idx gives some groups more or less than {packed.group_size} columns, so they cannot be sorted"
    return None
