"""The kernels as operators, `torch.ops.gptqkit.*`, for eager code, torch.compile, torch.export and CUDA graphs.

    linear          x WT + bias, (..., out), on the faster of two paths
    gemm            the same for x (rows, in) on the fused kernel, with the split given
    dequantize      W, (out, in): exact in float32, rounded once to the dtype given
    repack_weight   a checkpoint's words in the kernel's layout
    repack_grid     a checkpoint's scales and zeros in the kernel's order

`weight`, `scale` and `zero` are always a repacked layer, as `gemm.RepackedWeight` holds it. There are implementations
for CUDA only; the tests add one for the CPU, which runs the same sources on an emulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .launcher import Launcher, launcher_for
from .operands import Form, scale_form, weight_form, zero_form

_LAYER = "Tensor weight, Tensor scale, Tensor zero"
_SIZES = "int bits, int group_size, int out_features"

SCHEMAS = {
    "linear": f"(Tensor x, {_LAYER}, Tensor? bias, {_SIZES}) -> Tensor",
    "gemm": f"(Tensor x, {_LAYER}, Tensor? bias, {_SIZES}, int split) -> Tensor",
    "dequantize": f"({_LAYER}, {_SIZES}, int in_features, ScalarType dtype) -> Tensor",
    "repack_weight": "(Tensor qweight, Tensor? rows, int bits) -> Tensor",
    "repack_grid": "(Tensor scales, Tensor qzeros, int bits, int zero_offset) -> (Tensor, Tensor)",
}


def linear_result(x: Tensor, *layer: Any) -> Tensor:
    """What `linear` returns, without values."""
    return x.new_empty((*x.shape[:-1], layer[-1]))


def gemm_result(x: Tensor, *layer: Any) -> Tensor:
    """What `gemm` returns, without values."""
    return x.new_empty((x.shape[0], layer[-2]))


def dequantize_result(weight: Tensor, scale: Tensor, *layer: Any) -> Tensor:  # noqa: ARG001
    """What `dequantize` returns, without values."""
    return scale.new_empty(layer[-3:-1], dtype=layer[-1])


def repack_weight_result(qweight: Tensor, rows: Tensor | None, bits: int) -> Tensor:  # noqa: ARG001
    """What `repack_weight` returns, without values."""
    return _without_values(qweight, weight_form(qweight.shape[1], qweight.shape[0] * 32 // bits, bits))


def repack_grid_result(scales: Tensor, qzeros: Tensor, bits: int, zero_offset: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """What `repack_grid` returns, without values."""
    groups, outputs = scales.shape
    scale, zero = scale_form(groups, outputs), zero_form(groups, outputs, bits)
    return _without_values(scales, scale), _without_values(scales, zero)


def _without_values(beside: Tensor, form: Form) -> Tensor:
    dtype, shape = form
    return beside.new_empty(shape, dtype=dtype)


FAKES: dict[str, Callable[..., Any]] = {
    "linear": linear_result,
    "gemm": gemm_result,
    "dequantize": dequantize_result,
    "repack_weight": repack_weight_result,
    "repack_grid": repack_grid_result,
}


def implement(operators: torch.library.Library, key: str, launcher: Launcher | None = None) -> None:
    """Register the operators' implementations for a dispatch key.

    Args:
        operators: A library of the namespace "gptqkit".
        key: "CUDA" or "CPU".
        launcher: What runs them; None for the launcher of the first tensor's device.
    """
    for name in SCHEMAS:

        def run(first: Tensor, *rest: Any, name: str = name) -> Any:
            return getattr(launcher or launcher_for(first.device), name)(first, *rest)

        operators.impl(name, run, key)  # type: ignore[no-untyped-call]


_OPERATORS = torch.library.Library("gptqkit", "DEF")  # type: ignore[no-untyped-call]
for _name, _schema in SCHEMAS.items():
    _OPERATORS.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"gptqkit::{_name}", FAKES[_name], lib=_OPERATORS)
implement(_OPERATORS, "CUDA")
