"""The reference backend: plain torch on any device, dequantizing at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .linear import QuantLinear
from .packed import PackedWeight


class TorchLinear(QuantLinear):
    """Keeps the checkpoint's words as they are and makes the dense weight anew at every call.

    The least memory of all backends, and the definition of what the others must compute: weight in float32, exactly,
    rounded once to the dtype of the activations, then `F.linear`.
    """

    backend: ClassVar[str] = "torch"
    summary: ClassVar[str] = "keeps the packed words and dequantizes them at every call"

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__(packed, dtype)
        self.zero_offset = packed.zero_offset
        self.register_buffer("qweight", packed.qweight)
        self.register_buffer("qzeros", packed.qzeros)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("g_idx", packed.g_idx)

    @classmethod
    def refusal(cls, packed: PackedWeight, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        """None: this backend serves every layer."""
        return None

    def packed(self) -> PackedWeight:
        """The layer's words where they now are."""
        return PackedWeight(
            name=self.name,
            qweight=self.qweight,
            qzeros=self.qzeros,
            scales=self.scales,
            g_idx=self.g_idx,
            bias=self.bias,
            bits=self.bits,
            group_size=self.group_size,
            zero_offset=self.zero_offset,
            act_order=self.act_order,
        )

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, (..., out) in the dtype of `x`, which is (..., in)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.packed().dequantize(x.dtype), bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move as every module does, but keep the scales' dtype: `model.to(dtype)` must not round the weights."""
        scales = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self
