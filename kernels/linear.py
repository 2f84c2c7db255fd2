"""What every backend's linear layer has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from .packed import PackedWeight


class QuantLinear(nn.Module, ABC):
    """y = x weightT + bias on a quantized weight: the base of every backend's layer.

    A backend keeps the words of the layer, or another form of them, in buffers; nothing in it is trained.

    Attributes:
        backend: The name under which callers choose the backend.
        summary: What the backend does, in half a sentence, for the log.
        name: The module's name in the model.
        in_features: Size of x's last axis.
        out_features: Size of y's last axis.
        bits: Bits per code.
        group_size: Columns per group.
        act_order: Whether groups are scattered over the columns.
    """

    backend: ClassVar[str]
    summary: ClassVar[str]

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        """Take over `packed`, whose device becomes the layer's, for activations of `dtype`."""
        super().__init__()
        self.name = packed.name
        self.in_features = packed.in_features
        self.out_features = packed.out_features
        self.bits = packed.bits
        self.group_size = packed.group_size
        self.act_order = packed.act_order
        self.bias: Tensor | None
        self.register_buffer("bias", None if packed.bias is None else packed.bias.to(dtype))

    @classmethod
    @abstractmethod
    def refusal(cls, packed: PackedWeight, dtype: torch.dtype) -> str | None:
        """Why this backend cannot serve `packed` for activations of `dtype`, or None where it can."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, (..., out) in the dtype of `x`, which is (..., in)."""

    def extra_repr(self) -> str:
        """The line that `print(model)` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, "
            f"group_size={self.group_size}, act_order={self.act_order}, bias={self.bias is not None}"
        )
