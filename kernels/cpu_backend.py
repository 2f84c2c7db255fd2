"""The default on a CPU: dequantize each layer once, then run dense matrix products."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from .linear import QuantLinear
from .packed import PackedWeight


class CpuLinear(QuantLinear):
    """Holds the dense weight in the activations' dtype and frees the words.

    The weight is bit for bit the one that the torch backend makes at every call, so the outputs are equal too. It
    takes the memory of the unquantized layer; where that is too much, choose the torch backend.
    """

    backend: ClassVar[str] = "cpu"
    summary: ClassVar[str] = "dequantizes each layer once and keeps the dense weight"

    weight: Tensor

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__(packed, dtype)
        self.register_buffer("weight", packed.dequantize(dtype))

    @classmethod
    def refusal(cls, packed: PackedWeight, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        """Why the layer cannot be served: only its device can be wrong."""
        device = packed.qweight.device
        return None if device.type == "cpu" else f"it serves the CPU only, and the layer is on {device}"

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, (..., out) in the dtype of `x`, which is (..., in)."""
        return functional.linear(x, self.weight, self.bias)
