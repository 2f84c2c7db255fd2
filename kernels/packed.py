"""The packed tensors of one quantized layer, and the dense weight that they stand for.

With K inputs, N outputs and G groups:

    qweight   int32 (K * bits / 32, N)     codes, a bit stream along K
    qzeros    int32 (G, N * bits / 32)     zeros less `zero_offset`, a bit stream along N
    scales    float16 or bfloat16 (G, N)
    g_idx     int32 (K,)                   group of every input column

weight[n, k] = (code[k, n] - zero[g, n]) * scale[g, n] with g = g_idx[k]. A code less a zero has at most 9 bits and a
scale 11, so float32 holds every product exactly: the only rounding is the one to the wanted dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..export.pack import unpack


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeight:
    """One layer as its checkpoint holds it; the tensors lie on one device and fit together.

    Attributes:
        name: The module's name, for messages.
        qweight: Codes, int32 (in * bits / 32, out).
        qzeros: Zeros less `zero_offset`, int32 (groups, out * bits / 32).
        scales: float16 or bfloat16 (groups, out).
        g_idx: Group of every input column, int32 (in,).
        bias: (out,) in any float dtype, or None.
        bits: Bits per code.
        group_size: Columns per group (the last may have fewer).
        zero_offset: What to add to a stored zero: 1 in GPTQ version 1, 0 in version 2.
        act_order: Whether some column k belongs to another group than k // group_size.
    """

    name: str
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor
    bias: Tensor | None
    bits: int
    group_size: int
    zero_offset: int
    act_order: bool

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.g_idx.shape[0]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.qweight.shape[1]

    def codes(self) -> Tensor:
        """The unsigned codes, (out, in) uint8."""
        return unpack(self.qweight.t(), self.bits)

    def zeros(self) -> Tensor:
        """The zeros, (groups, out) int16, in 0 ... 2^bits."""
        return unpack(self.qzeros, self.bits).to(torch.int16) + self.zero_offset

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight, (out, in): exact in float32, rounded once from there to any other `dtype`."""
        value = self.codes().float()
        zeros, scales = self.zeros().t().float(), self.scales.t().float()
        if self.act_order or self.in_features % self.group_size:
            group = self.g_idx.long()
            return value.sub_(zeros[:, group]).mul_(scales[:, group]).to(dtype)
        grouped = value.view(self.out_features, -1, self.group_size)
        grouped.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1))
        return value.to(dtype)
