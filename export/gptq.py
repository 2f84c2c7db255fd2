"""Quantized weights <-> the tensors of GPTQ version 1 and 2 checkpoints.

Of a layer with K inputs, N outputs and G groups:

    qweight   int32 (K * bits / 32, N)     codes, a bit stream along K
    qzeros    int32 (G, N * bits / 32)     zeros, a bit stream along N; version 1 stores (zero - 1) mod 2^bits
    scales    float16 (G, N)               (bfloat16 is read, never written)
    g_idx     int32 (K,)                   group of every input column; may be missing where it is trivial

Version 1 therefore holds zeros 1 ... 2^bits and version 2 holds 0 ... 2^bits - 1; nothing else differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointError, ConversionError
from ..quantizer.config import Format
from ..quantizer.quantized import QuantizedWeight
from .bits import codes_per_unit, pack, unpack

ZERO_OFFSET: dict[Format, int] = {"gptq": 1, "gptq_v2": 0}

# GPTQModel before 7.0 turned 3-bit zeros into version 1 with the constants of words 0 and 2 swapped: of every 32 zeros
# it took these amounts off instead of 1. Symmetric files (zero 4) show it. Code 21 also loses a borrow between words.
_SWAPPED_OFFSETS = torch.tensor([4] * 10 + [0] + [1] * 10 + [3] + [2] * 10, dtype=torch.int16)
_BORROWING_CODE = 21


def to_tensors(weight: QuantizedWeight, format: Format) -> dict[str, Tensor]:  # noqa: A002
    """The tensors qweight, qzeros, scales and g_idx of one layer, exact and contiguous, on the weight's device.

    Raises:
        ShapeError: Rows or columns do not fill whole int32 words.
        ConversionError: Zeros that `format` cannot hold.
    """
    return {
        "qweight": pack(weight.codes, weight.bits).t().contiguous(),
        "qzeros": encode_zeros(weight.zero.t(), weight.bits, format),
        "scales": weight.scale.t().contiguous(),
        "g_idx": weight.group_index.contiguous(),
    }


def from_tensors(
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    bits: int,
    group_size: int | None,
    sym: bool,
    format: Format,  # noqa: A002
) -> QuantizedWeight:
    """The quantized weight that a layer's tensors hold, exactly.

    Args:
        name: The layer's name, for messages.
        tensors: "qweight", "qzeros", "scales" and optionally "g_idx"; anything else is ignored.
        bits: Bits per code.
        group_size: Columns per group; None for one group per row.
        sym: Whether the file declares its groups symmetric; the result is so only where all zeros agree.
        format: "gptq" or "gptq_v2".

    Raises:
        CheckpointError: A tensor is missing, or its dtype, shape or values contradict the others. bfloat16 scales are
            taken where float16 holds the same values, and refused otherwise.
    """
    size = check_layer(name, tensors, bits=bits, group_size=group_size)
    check_values(name, tensors, bits=bits, sym=sym, format=format)
    columns = tensors["qweight"].shape[0] * 32 // bits
    zero = decode_zeros(tensors["qzeros"], bits, format).t().contiguous()
    scales = tensors["scales"]
    scale = scales.to(torch.float16)
    if not torch.equal(scale.to(scales.dtype), scales):
        raise CheckpointError(
            f"{name}.scales holds bfloat16 values that float16 cannot; load the model instead of rewriting it"
        )
    index = tensors.get("g_idx")
    return QuantizedWeight(
        codes=unpack(tensors["qweight"].t(), bits),
        scale=scale.t().contiguous(),
        zero=zero,
        group_index=trivial_index(columns, size).to(zero.device) if index is None else index,
        bits=bits,
        group_size=size,
        sym=sym and bool((zero == 1 << (bits - 1)).all()),
    )


def encode_zeros(zero: Tensor, bits: int, format: Format) -> Tensor:  # noqa: A002
    """The words of `zero`, (groups, out) of any integer dtype: (groups, out * bits / 32) int32.

    Raises:
        ConversionError: Zeros that `format` cannot hold, with their number.
    """
    outside = count_outside(zero, bits, format)
    if outside:
        low = ZERO_OFFSET[format]
        raise ConversionError(
            f"{outside} of {zero.numel()} zeros lie outside {low} ... {low + (1 << bits) - 1}, which is what {format} "
            f"holds at {bits} bits; keep {'gptq_v2' if format == 'gptq' else 'gptq'}, or quantize again for {format}"
        )
    return pack(zero - ZERO_OFFSET[format], bits)


def count_outside(zero: Tensor, bits: int, format: Format) -> int:  # noqa: A002
    """How many zeros `format` cannot hold: version 1 holds 1 ... 2^bits, version 2 holds 0 ... 2^bits - 1."""
    low = ZERO_OFFSET[format]
    return int(((zero < low) | (zero > low + (1 << bits) - 1)).sum())


def decode_zeros(qzeros: Tensor, bits: int, format: Format) -> Tensor:  # noqa: A002
    """The zeros of `qzeros`, (groups, out * bits / 32) int32: (groups, out) int16; 2^bits can occur in version 1."""
    return unpack(qzeros, bits).to(torch.int16) + ZERO_OFFSET[format]


def trivial_index(columns: int, group_size: int) -> Tensor:
    """The group k // group_size of every column k, (columns,) int32."""
    return (torch.arange(columns) // group_size).to(torch.int32)


def check_layer(name: str, tensors: Mapping[str, Tensor], *, bits: int, group_size: int | None) -> int:
    """The columns per group of a layer whose tensors fit together; their values are not read.

    Args:
        name: The layer's name, for messages.
        tensors: "qweight", "qzeros", "scales" and optionally "g_idx" and "bias".
        bits: Declared bits per code.
        group_size: Declared columns per group; None for one group per row.

    Raises:
        CheckpointError: A tensor is missing, or its dtype or shape contradicts the declaration or the other tensors.
    """
    for key in ("qweight", "qzeros", "scales"):
        if key not in tensors:
            raise CheckpointError(f"{name}.{key} is missing; a GPTQ layer needs qweight, qzeros and scales")
    allowed = {
        "qweight": (2, (torch.int32,)),
        "qzeros": (2, (torch.int32,)),
        "scales": (2, (torch.float16, torch.bfloat16)),
        "g_idx": (1, (torch.int32,)),
        "bias": (1, (torch.float16, torch.bfloat16, torch.float32)),
    }
    for key, (axes, dtypes) in allowed.items():
        tensor = tensors.get(key)
        if tensor is not None and (tensor.ndim != axes or tensor.dtype not in dtypes):
            raise CheckpointError(
                f"{name}.{key} is {tensor.dtype} {tuple(tensor.shape)}; {' or '.join(map(str, dtypes))} with {axes} "
                f"axes is needed"
            )
    words, outputs = tensors["qweight"].shape
    unit = codes_per_unit(bits)
    columns = words * 32 // bits
    if not words or columns % unit:
        raise CheckpointError(
            f"{name}.qweight has {words} rows of words, which do not hold whole {bits}-bit codes: the bits in the "
            "quantization config contradict the tensor"
        )
    if not outputs or outputs % unit:
        raise CheckpointError(f"{name}.qweight has {outputs} outputs; {bits}-bit zeros need a multiple of {unit}")
    size = columns if group_size is None else group_size
    groups = -(-columns // size)
    declared = f"{bits} bits and {'one group per row' if group_size is None else f'groups of {size}'}"
    for key, shape in (
        ("g_idx", (columns,)),
        ("qzeros", (groups, outputs * bits // 32)),
        ("scales", (groups, outputs)),
        ("bias", (outputs,)),
    ):
        tensor = tensors.get(key)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{name}.{key} has shape {tuple(tensor.shape)}; qweight {(words, outputs)} with {declared}, as the "
                f"quantization config says, needs {shape}. Correct the config or fetch the files again"
            )
    return size


def check_values(
    name: str,
    tensors: Mapping[str, Tensor],
    *,
    bits: int,
    sym: bool,
    format: Format,  # noqa: A002
) -> None:
    """Read a layer's small tensors and refuse values that no reader could use.

    Raises:
        CheckpointError: g_idx outside the groups, scales that are not finite, or the 3-bit zeros that GPTQModel before
            7.0 shifted wrongly.
    """
    check_index(name, tensors)
    if not bool(tensors["scales"].isfinite().all()):
        raise CheckpointError(f"{name}.scales holds NaN or infinity; fetch the file again or quantize again")
    if bits == 3 and sym and format == "gptq":
        stored = unpack(tensors["qzeros"], bits).view(-1, 32)
        swapped = stored == (4 - _SWAPPED_OFFSETS).to(stored.device)
        swapped[:, _BORROWING_CODE] = True
        if bool(swapped.all()):
            raise CheckpointError(
                f"{name}.qzeros carries the 3-bit zeros that GPTQModel before 7.0 shifted by wrong constants; load the "
                "checkpoint with that GPTQModel and save it again as gptq_v2"
            )


def check_index(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a g_idx that points outside the groups.

    Raises:
        CheckpointError: With the values found.
    """
    index = tensors.get("g_idx")
    groups = tensors["scales"].shape[0]
    if index is not None and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise CheckpointError(
            f"{name}.g_idx spans {int(index.min())} ... {int(index.max())}; the layer has groups 0 ... {groups - 1}. "
            "The file is damaged: fetch it again"
        )
