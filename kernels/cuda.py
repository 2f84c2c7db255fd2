"""The default on NVIDIA GPUs: products directly on packed weights, with the kernels of `csrc`.

Float16 scales and whole zero points are kept as they are, any others as float32 scales and offsets; codes of 5 and 6
bits take 8. The values are those of the torch backend. Up to 16 rows of x run on a fused kernel that applies scales to
sums in float32, more on one that rounds each weight once, many on torch's dense product. The results differ from the
torch backend's by the order of summation and, up to 16 rows, by the rounding of weights that does not happen.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from ..errors import ShapeError
from ..quantizer.quantized import QuantizedWeight
from .library import tried_library
from .linear import QuantLinear, whole_zero_points
from .ops import BITS, DTYPES, Launcher, Layer, launcher_for

_linear = torch.ops.gptqkit.linear.default


class CudaLinear(QuantLinear):
    """Holds what `csrc/api.h` describes, and for act-order the order of the inputs in the codes."""

    summary: ClassVar[str] = "computes on the packed words with the bundled CUDA kernels"
    device_type: ClassVar[str | None] = "cuda"
    exact: ClassVar[tuple[str, ...]] = ("scale", "zero")

    _layer: Layer | None = None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        bits = next(each for each in BITS if each >= self.bits)
        self._sizes = (bits, self.group_size, self.out_features)
        order = torch.argsort(weight.group_index, stable=True) if self.act_order else None
        zeros = whole_zero_points(weight) if torch.equal(weight.scale.half().float(), weight.scale) else None
        self.register_buffer("packed", pack_codes(weight.codes if order is None else weight.codes[:, order], bits))
        self.register_buffer("scale", pack_free(weight.scale) if zeros is None else pack_grid(weight.scale.half()))
        self.register_buffer("zero", pack_free(weight.offset) if zeros is None else pack_zeros(zeros, bits))
        self.register_buffer("order", None if order is None else order.to(torch.int32))

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
