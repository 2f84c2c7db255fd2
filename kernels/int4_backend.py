"""Torch's 4-bit CPU kernel for generating text: faster for a few tokens at a time, not exact.

`_weight_int4pack_mm_for_cpu(x, words, group_size, scale_and_zero)` computes (code - 8) * scale + zero, so `zero` is
(8 - z) * scale; `scale_and_zero` has the activations' dtype, and only bfloat16 is vectorised. The kernel knows no
g_idx: columns are sorted by group, and x with them.

Why it is never chosen automatically:
- scale and (8 - z) * scale are each rounded to bfloat16, whereas the other backends round each weight once: an
  evaluation would change without anyone having asked.
- its gain ends early. One thread of an AMD EPYC with AVX-512 BF16, torch 2.13, 4096 x 4096, groups of 128, against a
  dense bfloat16 `F.linear` (`benchmarks/int4.py`): 3.27 times as fast for 1 token, 1.58 for 4, 0.98 for 8, 0.71 for
  16, 0.55 for 32. Inputs of more than 4 tokens (prompts, evaluations) therefore run as in the torch backend, which
  dequantizes at every call.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .packed import PackedWeight
from .torch_backend import TorchLinear

GROUP_SIZES = (32, 64, 128, 256)
MOST_TOKENS = 4  # measured, see above

_OUTPUT_TILE = 16


class CpuInt4Linear(TorchLinear):
    """Torch's int4 kernel up to `MOST_TOKENS` tokens, the torch backend above.

    Holds the layer's words twice, in the checkpoint's order and in the kernel's.
    """

    backend: ClassVar[str] = "cpu-int4"
    summary: ClassVar[str] = "runs torch's 4-bit kernel, with scales and zeros in bfloat16, up to 4 tokens at a time"
    device_type: ClassVar[str | None] = "cpu"

    words: Tensor
    scale_and_zero: Tensor
    order: Tensor | None

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__(packed, dtype)
        codes = packed.codes()
        order = torch.argsort(packed.g_idx, stable=True) if packed.act_order else None
        if order is not None:
            codes = codes[:, order]
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        scales = packed.scales.float()
        scale_and_zero = torch.stack([scales, (8 - packed.zeros()) * scales], dim=-1).to(dtype)
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("scale_and_zero", scale_and_zero, persistent=False)
        self.register_buffer("order", order, persistent=False)

    @classmethod
    def refusal(cls, packed: PackedWeight, dtype: torch.dtype) -> str | None:
        """Why the kernel cannot serve the layer, or None where it can."""
        if packed.qweight.device.type != "cpu":
            return f"it serves the CPU only, and the layer is on {packed.qweight.device}"
        if dtype != torch.bfloat16:
            return f"the activations are {dtype}, and only bfloat16 is fast; load with dtype='bfloat16'"
        if packed.bits != 4:
            return f"the layer has {packed.bits} bits, and the kernel computes with 4"
        if packed.group_size not in GROUP_SIZES or packed.in_features % packed.group_size:
            return (
                f"the layer has groups of {packed.group_size} in {packed.in_features} columns, and the kernel needs "
                f"whole groups of {', '.join(map(str, GROUP_SIZES))}"
            )
        if packed.out_features % _OUTPUT_TILE:
            return f"the layer has {packed.out_features} outputs, and the kernel needs a multiple of {_OUTPUT_TILE}"
        members = torch.bincount(packed.g_idx.long(), minlength=packed.scales.shape[0])
        if not bool((members == packed.group_size).all()):
            return f"g_idx gives some groups more or less than {packed.group_size} columns, so they cannot be sorted"
        return None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, (..., out) in the dtype of `x`, which is (..., in)."""
        if x.dtype != self.scale_and_zero.dtype or x.numel() > MOST_TOKENS * self.in_features:
            return super().forward(x)
        rows = x.reshape(-1, self.in_features)
        rows = rows.contiguous() if self.order is None else rows[:, self.order]
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.words, self.group_size, self.scale_and_zero)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)
