"""What the kernels take: dtypes and shapes of a layer's tensors, and the refusal of any others.

The kernels trust pointers and sizes, so a tensor of another shape would make them read what is not theirs. Every call
is checked.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..errors import ShapeError

DTYPES = {torch.float16: 0, torch.bfloat16: 1}
"""Of activations, with the interface's number."""

TILE = 64

Form = tuple[torch.dtype, tuple[int, ...]]


def weight_form(out_features: int, in_features: int, bits: int) -> Form:
    """Dtype and shape of codes in the kernels' layout; see `csrc/api.h`."""
    return torch.int32, (_tiles(out_features), _tiles(in_features), bits, 32, 4)


def scale_form(groups: int, out_features: int) -> Form:
    """Dtype and shape of scales in the kernels' order."""
    return torch.float16, (groups, _tiles(out_features) * TILE)


def zero_form(groups: int, out_features: int, bits: int) -> Form:
    """Dtype and shape of zeros 0 ... 2^bits: nibbles at 2 and 3 bits, int16 for the interface's uint16 at 8 bits."""
    columns = _tiles(out_features) * TILE
    if bits < 4:
        return torch.uint8, (groups, columns // 2)
    return torch.uint8 if bits == 4 else torch.int16, (groups, columns)


def check_input(x: Tensor, bias: Tensor | None, out_features: int) -> None:
    """Refuse activations and biases that the kernels cannot read.

    Raises:
        ShapeError: With what came and what is needed.
    """
    if x.dtype not in DTYPES:
        raise ShapeError(f"x is {x.dtype}, and the kernels compute in float16 or bfloat16; convert it to one of them")
    if bias is not None:
        _check("bias", bias, (x.dtype, (out_features,)), x.device)


def check_layer(
    device: torch.device,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor,
    bits: int,
    group_size: int,
    out_features: int,
    in_features: int,
) -> None:
    """Refuse tensors that are no repacked layer of these sizes on `device`.

    Raises:
        ShapeError: With what came and what is needed.
    """
    forms = _layer_forms(bits, group_size, out_features, in_features)
    _check("weight", weight, forms[0], device)
    _check("scale", scale, forms[1], device)
    _check("zero", zero, forms[2], device)


def check_words(qweight: Tensor, rows: Tensor | None, bits: int) -> None:
    """Refuse what cannot be a checkpoint's codes, int32 (in * bits / 32, out), and an order of inputs, int32 (in,).

    Raises:
        ShapeError: With what came and what is needed.
    """
    words, outputs = _matrix("qweight", qweight)
    _check("qweight", qweight, (torch.int32, (words, outputs)), qweight.device)
    if rows is not None:
        _check("rows", rows, (torch.int32, (words * 32 // bits,)), qweight.device)


def check_grid(scales: Tensor, qzeros: Tensor, bits: int) -> None:
    """Refuse what cannot be a checkpoint's scales, float16 (groups, out), and zeros, int32 (groups, out * bits / 32).

    Raises:
        ShapeError: With what came and what is needed.
    """
    groups, outputs = _matrix("scales", scales)
    _check("scales", scales, (torch.float16, (groups, outputs)), scales.device)
    _check("qzeros", qzeros, (torch.int32, (groups, outputs * bits // 32)), scales.device)


@lru_cache(maxsize=4096)
def _layer_forms(bits: int, group_size: int, out_features: int, in_features: int) -> tuple[Form, Form, Form]:
    groups = -(-in_features // max(group_size, 1))  # the library refuses groups of 0
    return (
        weight_form(out_features, in_features, bits),
        scale_form(groups, out_features),
        zero_form(groups, out_features, bits),
    )


def _check(name: str, tensor: Tensor, form: Form, device: torch.device) -> None:
    dtype, shape = form
    if tensor.dtype == dtype and tensor.shape == shape and tensor.device == device and tensor.is_contiguous():
        return
    layout = "" if tensor.is_contiguous() else "not contiguous "
    raise ShapeError(
        f"{name} is {layout}{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and contiguous {dtype} {shape} on "
        f"{device} is needed beside the other operands; take the tensors and sizes of one layer, with x of its width"
    )


def _matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ShapeError(f"{name} has the shape {tuple(tensor.shape)}, and two axes are needed")
    return tensor.shape[0], tensor.shape[1]


def _tiles(size: int) -> int:
    return -(-size // TILE)
