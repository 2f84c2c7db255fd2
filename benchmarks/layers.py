"""Random layers for the benchmarks: the times do not depend on the values, only the results must be finite."""

from __future__ import annotations

from dataclasses import replace

import torch

from gptqkit.kernels.cuda import CudaLinear
from gptqkit.kernels.library import Shape
from gptqkit.kernels.ops import DTYPES
from gptqkit.quantizer.quantized import QuantizedWeight


def random_weight(rows: int, columns: int, *, bits: int, group_size: int, device: torch.device) -> QuantizedWeight:
    """Return a weight (rows out, columns in) with random codes and zeros, and scales that keep outputs near 1."""
    groups = -(-columns // group_size)
    scale = ((torch.rand(rows, groups, device=device) + 0.5) * 2**-bits * columns**-0.5).half().float()
    return QuantizedWeight(
        codes=torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, device=device),
        scale=scale,
        offset=-(torch.randint(0, 2**bits, (rows, groups), device=device) * scale),
        group_index=(torch.arange(columns, device=device) // group_size).int(),
        bits=bits,
        group_size=group_size,
        sym=False,
    )


def random_operands(
    rows: int, columns: int, *, bits: int, group_size: int, device: torch.device, free: bool = False
) -> tuple:
    """Return what `torch.ops.gptqkit.linear` takes behind x for such a weight, without a split.

    Free grids have offsets that are no zero points, as K-quants do.
    """
    weight = random_weight(rows, columns, bits=bits, group_size=group_size, device=device)
    if free:
        weight = replace(weight, offset=weight.offset * 0.9)
    layer = CudaLinear(weight, None, torch.float16)
    return layer.packed, layer.scale, layer.zero, None, bits, group_size, rows


def shape_of(operands: tuple, columns: int, dtype: torch.dtype) -> Shape:
    """Return the shape by which a launcher plans for these operands."""
    _, scale, *_, bits, group_size, rows = operands
    return Shape(bits, DTYPES[dtype], rows, columns, group_size, int(scale.dtype == torch.float32))
