"""GPTQ's column sweep over one block as one kernel: columns in sequence, rows in parallel."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from .library import KernelLibrary

MOST_COLUMNS = 384
"""Columns of a block whose weights fit into shared memory; `csrc/sweep.cu` refuses more."""


class Sweep(NamedTuple):
    """The tensors of a sweep, as `gptqkit_sweep` of `csrc/api.h` takes them, contiguous and on one device."""

    block: Tensor
    inverse: Tensor
    shift: Tensor | None
    group: Tensor
    scale: Tensor
    zero: Tensor
    codes: Tensor
    values: Tensor


def sweep_block(library: KernelLibrary, tensors: Sweep, *, bits: int) -> Tensor:
    """Round the columns of a block in turn, each one's error moved onto later ones.

    Args:
        library: See `trial.sweep_library`.
        tensors: Of which `block`, (columns, rows), `codes` and `values` are written.
        bits: Of the codes.

    Returns:
        (w_i - q_i) / U_ii of every column i, (columns, rows) float32.

    Raises:
        ShapeError: A tensor is not contiguous, of another dtype or on another device, or the block is too wide.
    """
    block = tensors.block
    columns, rows = block.shape
    if columns > MOST_COLUMNS:
        raise ShapeError(f"a block of {columns} columns does not fit into shared memory; take at most {MOST_COLUMNS}")
    scaled = torch.empty_like(block)
    pointers = []
    for name, tensor in (*tensors._asdict().items(), ("scaled", scaled)):
        dtype = {"group": torch.int32, "codes": torch.uint8}.get(name, torch.float32)
        if tensor is not None and not (
            tensor.is_contiguous() and tensor.device == block.device and tensor.dtype == dtype
        ):
            raise ShapeError(
                f"the sweep got {name} of {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on "
                f"{tensor.device}; it needs contiguous {dtype} on {block.device}"
            )
        pointers.append(None if tensor is None else tensor.data_ptr())
    on_gpu = block.device.type == "cuda"  # else the emulator
    with torch.cuda.device(block.device) if on_gpu else nullcontext():
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        library.run("sweep", *pointers, columns, rows, bits, stream)
    return scaled
