"""Linear layers on quantized weights, and the choice of the backend that runs them.

Every backend computes with the values of its `QuantizedWeight`, exact in float32 and rounded once to the dtype of the
activations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import BackendError
from ..export.bits import pack_stream, unpack_stream
from ..quantizer.quantized import QuantizedWeight
from .backends import BACKENDS, check_backend


@dataclass(frozen=True)
class BackendChoice:
    """What runs a layer, or a model's layers: names joined by "+", why, and whether a better one was passed over."""

    name: str
    reason: str
    fallback: bool = False

    def __str__(self) -> str:
        """Return one line for logs and terminals."""
        return f"{self.name}: {self.reason}"


class QuantLinear(nn.Module, ABC):
    """y = x weightT + bias on a quantized weight, kept in buffers of a form of its own: the base of every backend.

    Args:
        weight: The weight, on the device that the layer is to run on.
        bias: (out,) in any float dtype, or None.
        dtype: Of the activations.

    Attributes:
        summary: What the backend does, in half a sentence, for the log.
        device_type: The kind of device that it is made for; None for any.
        exact: Names of float buffers that keep their dtype, whatever `model.to(dtype)` asks for.
        choice: Which backend this is and why; set by `make_linear`.
    """

    summary: ClassVar[str]
    device_type: ClassVar[str | None] = None
    exact: ClassVar[tuple[str, ...]] = ()
    choice: BackendChoice
    bias: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.bits, self.group_size, self.dtype = weight.bits, weight.group_size, dtype
        self.act_order = not weight.trivial_group_index
        self.register_buffer("bias", None if bias is None else bias.to(weight.codes.device, dtype))

    @classmethod
    def refusal(cls, weight: QuantizedWeight, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        """Return why this backend cannot serve `weight` for activations of `dtype`, or None where it can."""
        if cls.device_type in (weight.codes.device.type, None):
            return None
        return f"it serves {cls.device_type} devices only, and the layer is on {weight.codes.device}"

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (..., out) in the dtype of `x`, which is (..., in)."""

    def extra_repr(self) -> str:
        """Return the line that `print(model)` shows."""
        names = ("in_features", "out_features", "bits", "group_size", "act_order")
        return ", ".join([*(f"{name}={getattr(self, name)}" for name in names), f"bias={self.bias is not None}"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move as every module does; `exact` buffers keep their dtype."""
        before = {name: buffer for name in self.exact if (buffer := self._buffers[name]) is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            if (moved := self.get_buffer(name)).dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self


class TorchLinear(QuantLinear):
    """The reference: plain torch on any device, keeping packed words and making the dense weight anew at every call.

    Takes the least memory of all backends: codes and zero points as bit streams, scales in the smallest dtype that
    holds them. Offsets without whole zero points stay float32.
    """

    summary: ClassVar[str] = "keeps the packed words and dequantizes them at every call"
    exact: ClassVar[tuple[str, ...]] = ("scale", "offset")

    words: Tensor
    scale: Tensor
    offset: Tensor  # None where there are zeros
    zeros: Tensor | None
    least_zero: Tensor
    group_index: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        whole, zeros, least = whole_zero_points(weight), None, None
        if whole is not None and whole.max() - whole.min() < 2**self.bits:  # as in files: from 0 on, or from 1 on
            least = whole.min()
            zeros = pack_stream((whole - least).flatten(), self.bits)
        natural = not self.act_order and self.in_features % self.group_size == 0
        self.register_buffer("words", pack_stream(weight.codes.flatten(), self.bits))
        self.register_buffer("scale", _narrowed(weight.scale))
        self.register_buffer("zeros", zeros)
        self.register_buffer("least_zero", least)
        self.register_buffer("offset", weight.offset if zeros is None else None)
        self.register_buffer("group_index", None if natural else weight.group_index)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (out, in): what `QuantizedWeight.dequantize` gives, to the bit."""
        scale, offset = self.scale.float(), self.offset
        if self.zeros is not None:
            zeros = unpack_stream(self.zeros, self.bits, scale.numel()).view(scale.shape)
            offset = -((zeros.float() + self.least_zero) * scale)
        codes = unpack_stream(self.words, self.bits, self.out_features * self.in_features)
        value = codes.view(self.out_features, self.in_features).float()
        if self.group_index is None:
            grouped = value.view(self.out_features, -1, self.group_size)
            grouped.mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1))
        else:
            value.mul_(scale.index_select(1, self.group_index)).add_(offset.index_select(1, self.group_index))
        return value.to(dtype)

    @property
    def weight(self) -> Tensor:
        """The weight, (out, in), in the dtype of the activations, for models that look at it, such as T5."""
        return self.dequantize(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (..., out) in the dtype of `x`, which is (..., in)."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.dequantize(x.dtype), bias)


class CpuLinear(QuantLinear):
    """The default on a CPU: keeps the dense weight in the activations' dtype, bit for bit the torch backend's."""

    summary: ClassVar[str] = "dequantizes each layer once and keeps the dense weight"
    device_type: ClassVar[str | None] = "cpu"

    dense: Tensor

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        self.register_buffer("dense", weight.dequantize(dtype))

    @property
    def weight(self) -> Tensor:
        """The weight, (out, in), for models that look at it."""
        return self.dense

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (..., out) in the dtype of `x`, which is (..., in)."""
        return functional.linear(x, self.dense, self.bias)


def find_backend(name: str) -> type[QuantLinear]:
    """Return the class of the backend called `name`, one of `BACKENDS`."""
    return cast("type[QuantLinear]", resolve_name(f"gptqkit.{BACKENDS[name]}"))


def make_linear(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, *, name: str, backend: str = "auto"
) -> QuantLinear:
    """Return the layer that runs `weight` where its tensors are, on activations of `dtype`.

    With "auto" that is the first of `BACKENDS` which is made for the device and can serve the layer; `name` is the
    module's, for messages.

    Raises:
        BackendError: No such backend, or it cannot serve the layer.
    """
    check_backend(backend)
    how = "chosen automatically" if backend == "auto" else "as asked for"
    refusals: list[str] = []
    for candidate in BACKENDS if backend == "auto" else (backend,):
        kind = find_backend(candidate)
        if backend == "auto" and kind.device_type not in (weight.codes.device.type, None):
            continue
        refusal = kind.refusal(weight, dtype)
        if refusal is None:
            layer = kind(weight, bias, dtype)
            layer.choice = BackendChoice(candidate, "; ".join([kind.summary, how, *refusals]), bool(refusals))
            return layer
        refusals.append(f"not {candidate}, because {refusal}")
    raise BackendError(f"backend {backend!r} cannot serve {name}: {'; '.join(refusals)}")


def summarize(model: nn.Module) -> BackendChoice:
    """Return the choices for a model's quantized layers as one, each with the number of layers that it holds for."""
    counted = Counter(layer.choice for layer in model.modules() if isinstance(layer, QuantLinear))
    names = dict.fromkeys(choice.name for choice in counted)
    lines = [
        f"{choice.reason if len(names) == 1 else choice} ({count} layer{'s' if count > 1 else ''})"
        for choice, count in counted.items()
    ]
    return BackendChoice("+".join(names), " | ".join(lines), any(choice.fallback for choice in counted))


def whole_zero_points(weight: QuantizedWeight) -> Tensor | None:
    """Return the zero points -offset / scale, (out, groups) int16, or None unless all are whole and in 0 ... 2^bits."""
    zero, exact = weight.nearest_zeros()
    return zero.to(torch.int16) if exact.all() and zero.min() >= 0 and zero.max() <= 2**weight.bits else None


def _narrowed(scale: Tensor) -> Tensor:
    """Return `scale` in the smallest dtype that holds every value exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype)
    return scale
