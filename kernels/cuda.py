"""The default on NVIDIA GPUs: products directly on packed weights, with the kernels of `csrc`.

Float16 scales and whole zero points are kept as they are, any others as float32 scales and offsets; codes of 5 and 6
bits take 8. The values are those of the torch backend. Up to 16 rows of x run on a fused kernel that applies scales to
sums in float32, more on one that rounds each weight once, many on torch's dense product. The results differ from the
torch backend's by the order of summation and, up to 16 rows, by the rounding of weights that does not happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from ..errors import ShapeError
from ..quantizer.quantized import QuantizedWeight
from .linear import QuantLinear
from .ops import DTYPES, Launcher, Layer, launcher_for
from .packing import pack_layer
from .trial import tried_library

_linear = torch.ops.gptqkit.linear.default


class CudaLinear(QuantLinear):
    """Holds what `csrc/api.h` describes, and for act-order the order of the inputs in the codes."""

    summary: ClassVar[str] = "computes on the packed words with the bundled CUDA kernels"
    device_type: ClassVar[str | None] = "cuda"
    exact: ClassVar[tuple[str, ...]] = ("scale", "zero")

    _layer: Layer | None = None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        form = pack_layer(weight)
        self._sizes = (form.bits, self.group_size, self.out_features)
        for name in ("packed", "scale", "zero", "order"):
            self.register_buffer(name, getattr(form, name))

    @classmethod
    def refusal(cls, weight: QuantizedWeight, dtype: torch.dtype) -> str | None:
        """Return why the kernels cannot serve the layer, or None where they can; may build them, once."""
        return super().refusal(weight, dtype) or unfit(weight, dtype) or tried_library(weight.codes.device)[1] or None

    @property
    def weight(self) -> Tensor:
        """What stands for the weight, (out, in): models that look at its dtype, such as T5, find it, but no values."""
        return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (..., out) in the dtype of `x`, which is (..., in) in that of the bias.

        Differentiable in x, by way of the dense weight.
        """
        own = cast("dict[str, Tensor]", self._buffers)  # attributes of a module cost a microsecond each
        weight, scale, zero, order, bias = own["packed"], own["scale"], own["zero"], own["order"], own["bias"]
        device, width = x.device, x.shape[-1]
        if width != self.in_features or device != weight.device:
            needed = f"{self.in_features} columns on {weight.device}"
            raise ShapeError(f"x has {width} columns on {device}, and the layer takes {needed}")
        if x.dtype is torch.float32 and torch.is_autocast_enabled(device.type):  # as F.linear does
            x = x.to(torch.get_autocast_dtype(device.type))
            bias = bias if bias is None else bias.to(x.dtype)
        if order is not None:
            x = x.index_select(-1, order)
        if x.requires_grad and torch.is_grad_enabled():
            dense = torch.ops.gptqkit.dequantize(weight, scale, zero, *self._sizes, self.in_features, x.dtype)
            return functional.linear(x, dense, bias)
        watched = is_compiling() or torch._C._get_tracing_state() or torch._C._len_torch_dispatch_stack()
        if watched or type(x) is not Tensor:
            return cast(Tensor, _linear(x, weight, scale, zero, bias, *self._sizes))
        # Eager calls spare the dispatcher and, as long as the tensors are the same, their check.
        layer = self._layer
        if layer is not None and layer.dtype is x.dtype:
            held = layer.tensors
            if held[0] is weight and held[1] is scale and held[2] is zero and held[3] is bias:
                return layer.launcher.product(x, layer)
        layer = Layer(weight, scale, zero, bias, self._sizes, self.in_features, x.dtype, self.launcher(device))
        self._layer = layer
        return layer.launcher.product(x, layer)

    @staticmethod
    def launcher(device: torch.device) -> Launcher:
        """Return what runs the kernels on `device`."""
        return launcher_for(device)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and save the tensors alone: a copy has pointers of its own."""
        return {**self.__dict__, "_layer": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._layer = None  # lets go of the tensors that move
        return super()._apply(fn, recurse)


def unfit(weight: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Return why the kernels cannot compute with the layer, whatever the device, or None where they can."""
    if dtype not in DTYPES:
        return f"the activations are {dtype}, and the kernels compute in float16 or bfloat16; load with such a dtype"
    size, columns = weight.group_size, weight.in_features
    if columns % 32 or (size % 16 and size < columns):
        return (
            f"the layer has groups of {size} in {columns} columns, and the kernels take a multiple of 32 columns and "
            "groups of a multiple of 16"
        )
    members = torch.bincount(weight.group_index, minlength=weight.scale.shape[1])  # the last may be shorter
    even = bool((members[:-1] == size).all())
    return None if even else f"some groups have more or less than {size} columns and cannot be sorted"
