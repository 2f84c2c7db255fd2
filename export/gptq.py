"""GPTQ versions 1 and 2.

Of a layer with K inputs, N outputs and G groups:

    qweight   int32 (K * bits / 32, N)     codes, a bit stream along K
    qzeros    int32 (G, N * bits / 32)     zero points, a bit stream along N; version 1 stores (zero - 1) mod 2^bits
    scales    float16 (G, N)               (bfloat16 is read, never written)
    g_idx     int32 (K,)                   group of every input column; may be missing where desc_act is off

Version 1 therefore holds zero points 1 ... 2^bits and version 2 holds 0 ... 2^bits - 1; nothing else differs. The
solver's grids for version 1 stay below 2^bits, which only files of other programs hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, ConversionError
from ..quantizer.grid import IntegerZeroPoint
from ..quantizer.quantized import QuantizedWeight
from .bits import codes_per_unit, pack, unpack
from .formats import Declared, Format, LayerSpec
from .gptq_config import read_config, write_config

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")

_DTYPES = {
    "qweight": (2, (torch.int32,)),
    "qzeros": (2, (torch.int32,)),
    "scales": (2, (torch.float16, torch.bfloat16)),
    "g_idx": (1, (torch.int32,)),
    "bias": (1, (torch.float16, torch.bfloat16, torch.float32)),
}

# GPTQModel before 7.0 turned 3-bit zeros into version 1 with the constants of words 0 and 2 swapped: of every 32 zeros
# it took these amounts off instead of 1. Symmetric files (zero 4) show it. Code 21 also loses a borrow between words.
_SWAPPED_OFFSETS = torch.tensor([4] * 10 + [0] + [1] * 10 + [3] + [2] * 10, dtype=torch.int16)
_BORROWING_CODE = 21


def check_shape(shape: tuple[int, int], bits: int) -> None:
    """Raise ConfigError where codes or zero points of a weight of this shape, (out, in), do not fill int32 words."""
    unit = codes_per_unit(bits)
    if shape[0] % unit or shape[1] % unit:
        raise ConfigError(f"{shape} is its shape, and packed {bits}-bit weights need multiples of {unit} both ways")


def pack_layer(weight: QuantizedWeight, *, offset: int) -> dict[str, Tensor]:
    """Return the tensors of one layer, exact and contiguous; stored zero points are `offset` less than true ones.

    Raises:
        ShapeError: Rows or columns do not fill whole int32 words.
        ConversionError: Zero points that the version cannot hold, or scales that float16 cannot.
    """
    if weight.bits not in (2, 3, 4, 8):
        raise ConversionError(f"GPTQ files hold 2, 3, 4 and 8 bits, not {weight.bits}")
    zero = weight.zero_point()
    outside = int(((zero < offset) | (zero >= offset + (1 << weight.bits))).sum())
    if outside:
        raise ConversionError(
            f"{outside} of {zero.numel()} zero points lie outside {offset} ... {offset + (1 << weight.bits) - 1}, "
            f"which is what {_name(offset)} holds at {weight.bits} bits; keep {_name(1 - offset)}, or quantize again"
        )
    scales = weight.scale.to(torch.float16)
    if not torch.equal(scales.float(), weight.scale):
        raise ConversionError("some scales are no float16 values, which GPTQ files hold; quantize again")
    return {
        "qweight": pack(weight.codes, weight.bits).t().contiguous(),
        "qzeros": pack(zero.t() - offset, weight.bits),
        "scales": scales.t().contiguous(),
        "g_idx": weight.group_index.contiguous(),
    }


def layer_spec(name: str, tensors: Mapping[str, Tensor], declared: Declared) -> LayerSpec:
    """Return what a layer's tensors are; of their values only g_idx is read.

    Raises:
        CheckpointError: A tensor is missing, or its dtype, shape or g_idx contradicts the config or the others.
    """
    bits, group_size, sym = declared.for_module(name)
    for key in ("qweight", "qzeros", "scales"):
        if key not in tensors:
            raise CheckpointError(f"{name}.{key} is missing; a GPTQ layer needs qweight, qzeros and scales")
    for key, tensor in tensors.items():
        axes, dtypes = _DTYPES[key]
        if tensor.ndim != axes or tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{name}.{key} is {tensor.dtype} {tuple(tensor.shape)}; {' or '.join(map(str, dtypes))} with {axes} "
                "axes is needed"
            )
    words, outputs = tensors["qweight"].shape
    columns = words * 32 // bits
    if not words or columns % codes_per_unit(bits):
        raise CheckpointError(
            f"{name}.qweight has {words} rows of words, which do not hold whole {bits}-bit codes: the bits in the "
            "quantization config contradict the tensor"
        )
    if not outputs or outputs % codes_per_unit(bits):
        raise CheckpointError(
            f"{name}.qweight has {outputs} outputs; {bits}-bit zeros need a multiple of {codes_per_unit(bits)}"
        )
    size = columns if group_size is None else group_size
    groups = -(-columns // size)
    shapes = {"g_idx": (columns,), "qzeros": (groups, outputs * bits // 32), "scales": (groups, outputs)}
    for key, shape in {**shapes, "bias": (outputs,)}.items():
        if key in tensors and tuple(tensors[key].shape) != shape:
            grouping = "one group per row" if group_size is None else f"groups of {size}"
            raise CheckpointError(
                f"{name}.{key} has shape {tuple(tensors[key].shape)}; qweight {(words, outputs)} with {bits} bits and "
                f"{grouping}, as the quantization config says, needs {shape}. Correct the config or fetch the files "
                "again"
            )
    index = tensors.get("g_idx")
    if index is None and groups > 1 and declared.desc_act and not declared.static_groups:
        raise CheckpointError(
            f"{name}.g_idx is missing; with desc_act it says to which group a column belongs. Fetch the files again"
        )
    if index is not None and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"{name}.g_idx spans {int(index.min())} ... {int(index.max())}; the layer has groups 0 ... {groups - 1}. "
            "The file is damaged: fetch it again"
        )
    return LayerSpec(
        in_features=columns,
        out_features=outputs,
        bits=bits,
        group_size=size,
        sym=sym,
        act_order=index is not None and not index.equal(_trivial_index(columns, size)),
    )


def unpack_layer(name: str, tensors: Mapping[str, Tensor], spec: LayerSpec, *, offset: int) -> QuantizedWeight:
    """Return the weight that a layer's tensors hold, exactly; `offset` as for `pack_layer`.

    Raises:
        CheckpointError: Scales that are not finite, or the 3-bit zeros that GPTQModel before 7.0 shifted wrongly.
    """
    scale = tensors["scales"].float().t().contiguous()
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"{name}.scales holds NaN or infinity; fetch the file again or quantize again")
    stored = unpack(tensors["qzeros"], spec.bits)
    if spec.bits == 3 and spec.sym and offset:
        swapped = stored.view(-1, 32) == (4 - _SWAPPED_OFFSETS).to(stored.device)
        swapped[:, _BORROWING_CODE] = True
        if bool(swapped.all()):
            raise CheckpointError(
                f"{name}.qzeros carries the 3-bit zeros that GPTQModel before 7.0 shifted by wrong constants; load the "
                "checkpoint with that GPTQModel and save it again as gptq_v2"
            )
    zero = (stored.to(torch.int16) + offset).t()
    index = tensors.get("g_idx")
    return QuantizedWeight(
        codes=unpack(tensors["qweight"].t(), spec.bits),
        scale=scale,
        offset=-(zero * scale),
        group_index=_trivial_index(spec.in_features, spec.group_size).to(scale.device) if index is None else index,
        bits=spec.bits,
        group_size=spec.group_size,
        sym=spec.sym and bool((zero == 1 << (spec.bits - 1)).all()),
    )


def _trivial_index(columns: int, group_size: int) -> Tensor:
    return (torch.arange(columns) // group_size).to(torch.int32)


def _name(offset: int) -> str:
    return "gptq" if offset else "gptq_v2"


def _version(offset: int) -> Format:
    return Format(
        suffixes=SUFFIXES,
        snap=IntegerZeroPoint(least=offset),
        check=check_shape,
        pack=partial(pack_layer, offset=offset),
        spec=layer_spec,
        unpack=partial(unpack_layer, offset=offset),
        write_config=write_config,
        read_config=read_config,
    )


V1 = _version(1)
V2 = _version(0)
