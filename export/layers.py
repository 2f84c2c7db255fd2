"""What all formats ask of the tensors of a layer that they read, and of a weight that they are to hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, ConversionError
from ..quantizer.quantized import QuantizedWeight, trivial_index
from .formats import LayerSpec

WORDS = (2, (torch.int32,))
SCALES = (2, (torch.float16, torch.bfloat16))
INDEX = (1, (torch.int32,))
BIAS = (1, (torch.float16, torch.bfloat16, torch.float32))
"""Kinds of tensors: their number of axes, and the dtypes that they may have."""

Kinds = Mapping[str, tuple[int, tuple[torch.dtype, ...]]]


def stored_grid(weight: QuantizedWeight, holder: str, *, least: int = 0) -> tuple[Tensor, Tensor]:
    """Return the zero points, int16, and the float16 scales of a weight, (out, groups), where a file can hold them.

    `least` is the least of the 2^bits zero points that the format, called `holder` in messages, has.

    Raises:
        ShapeError: Offsets that are no whole multiples of their scales.
        ConversionError: Zero points that the format cannot hold, or scales that float16 cannot.
    """
    zero, most = weight.zero_point(), least + (1 << weight.bits) - 1
    outside = int(((zero < least) | (zero > most)).sum())
    if outside:
        raise ConversionError(
            f"{outside} of {zero.numel()} zero points lie outside {least} ... {most}, which is what {holder} holds at "
            f"{weight.bits} bits; choose another format, or quantize again"
        )
    scales = weight.scale.to(torch.float16)
    if not torch.equal(scales.float(), weight.scale):
        raise ConversionError(f"some scales are no float16 values, which {holder} files hold; quantize again")
    return zero, scales


def refuse_act_order(spec: LayerSpec, holder: str) -> None:
    """Raise ConfigError where groups follow an order of their own, for a format that has no g_idx."""
    if spec.act_order:
        raise ConfigError(
            f"with desc_act groups follow an order of their own, and {holder} has no g_idx to say so; quantize with "
            "static_groups or act_group_aware, which need none"
        )


def check_kinds(name: str, tensors: Mapping[str, Tensor], kinds: Kinds, needed: Sequence[str]) -> None:
    """Raise CheckpointError where a tensor of a layer is missing, or has another dtype or number of axes than it may.

    All are told by their suffixes.
    """
    for key in needed:
        if key not in tensors:
            raise CheckpointError(f"{name}.{key} is missing; a layer needs {', '.join(needed)}. Fetch the files again")
    for key, tensor in tensors.items():
        axes, dtypes = kinds[key]
        if tensor.ndim != axes or tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{name}.{key} is {tensor.dtype} {tuple(tensor.shape)}; {' or '.join(map(str, dtypes))} with {axes} "
                "axes is needed"
            )


def check_shapes(
    name: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], given: str, size: int | None
) -> None:
    """Raise CheckpointError where a tensor of a layer has another shape than the config says, if it is there at all.

    `given` is what the shapes follow from, for messages, beside the declared columns per group, None for whole rows.
    """
    for key, shape in shapes.items():
        if key in tensors and tuple(tensors[key].shape) != shape:
            grouping = "one group per row" if size is None else f"groups of {size}"
            raise CheckpointError(
                f"{name}.{key} has shape {tuple(tensors[key].shape)}; {given} and {grouping}, as the quantization "
                f"config says, needs {shape}. Correct the config or fetch the files again"
            )


def is_act_order(name: str, index: Tensor | None, columns: int, size: int, *, declared: bool) -> bool:
    """Return whether a layer's g_idx, (columns,) int32, is not simply k // size.

    One on the meta device is as the config declared. CheckpointError where it is missing though needed, or names groups
    that do not exist; `name` is that of the tensor, for messages.
    """
    groups = -(-columns // size)
    if index is None:
        if declared and groups > 1:
            raise CheckpointError(
                f"{name} is missing; with act-order it says to which group a column belongs. Fetch the files again"
            )
        return False
    if index.is_meta:
        return declared and groups > 1
    if not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"{name} spans {int(index.min())} ... {int(index.max())}; the layer has groups 0 ... {groups - 1}. "
            "The file is damaged: fetch it again"
        )
    return not index.equal(trivial_index(columns, size))


def make_weight(
    spec: LayerSpec, codes: Tensor, scale: Tensor, zero: Tensor | None, index: Tensor | None = None, *, where: str
) -> QuantizedWeight:
    """Return the weight that a layer's tensors hold, exactly; CheckpointError for scales, `where`, that are not finite.

    Codes are (out, in) uint8, scales and zero points (out, groups), the latter of any integer dtype, or None where they
    are 2^(bits - 1) everywhere; `index`, (in,) int32, is the group of every column, None for k // group_size.
    """
    scale = scale.float().contiguous()
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"{where} holds NaN or infinity; fetch the file again or quantize again")
    middle = 1 << (spec.bits - 1)
    offset = scale * (middle if zero is None else zero.to(torch.int16))
    return QuantizedWeight(
        codes=codes,
        scale=scale,
        offset=-offset,
        group_index=trivial_index(spec.in_features, spec.group_size, scale.device) if index is None else index,
        bits=spec.bits,
        group_size=spec.group_size,
        sym=spec.sym and (zero is None or bool((zero == middle).all())),
    )
