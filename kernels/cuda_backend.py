"""The default on NVIDIA GPUs: products directly on the packed weight.

The values are those of the torch backend: scales stay float16, as checkpoints have them. Up to 16 rows of x run on a
fused kernel that applies them to sums in float32, more on one that rounds each weight once, many on torch's dense
product. The results differ from the torch backend's by the order of summation and, up to 16 rows, by the rounding of
weights that does not happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from .gemm import product, refusal, repack
from .library import OLDEST_CAPABILITY, find_library
from .linear import QuantLinear
from .packed import PackedWeight


class CudaLinear(QuantLinear):
    """Holds the layer in the kernels' layout only; the checkpoint's words are freed."""

    backend: ClassVar[str] = "cuda"
    summary: ClassVar[str] = "computes on the packed words with the bundled CUDA kernels"
    device_type: ClassVar[str | None] = "cuda"

    weight: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__(packed, dtype)
        repacked = repack(packed)
        self.register_buffer("weight", repacked.weight)
        self.register_buffer("scale", repacked.scale)
        self.register_buffer("zero", repacked.zero)
        self.register_buffer("order", repacked.order)

    @classmethod
    def refusal(cls, packed: PackedWeight, dtype: torch.dtype) -> str | None:
        """Why the kernels cannot serve the layer, or None where they can; may build them, once."""
        device = packed.qweight.device
        if device.type != "cuda":
            return f"it serves NVIDIA GPUs only, and the layer is on {device}"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} has compute capability {capability}, and 8.0 is needed"
        unfit = refusal(packed, dtype)
        return unfit if unfit is not None else find_library().reason or None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, (..., out) in the dtype of `x`, which is (..., in) in that of the bias."""
        own = self._buffers  # attributes of a module cost a microsecond each
        layer = (own["weight"], own["scale"], own["zero"], own["order"], own["bias"])
        sizes = (self.bits, self.group_size, self.out_features, self.in_features)
        return product(x, *layer, *sizes)  # type: ignore[arg-type]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move as every module does, but keep the scales' dtype: `model.to(dtype)` must not round the weights."""
        scale = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scale.dtype != scale.dtype:
            self.scale = scale.to(self.scale.device)
        return self
