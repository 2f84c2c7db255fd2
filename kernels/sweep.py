"""GPTQ's column sweep over one block as one kernel: columns in sequence, rows in parallel."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor

from ..errors import ShapeError
from .library import KernelLibrary, library_for

MOST_COLUMNS = 384
"""Columns of a block whose weights fit into shared memory; `csrc/sweep.cu` refuses more."""


def sweep_library(target: Tensor) -> KernelLibrary | None:
    """Return the library that can sweep blocks of `target`, or None: no GPU, no library, not float32.

    A library that is missing where there is a GPU is logged, once.
    """
    if target.device.type != "cuda" or target.dtype != torch.float32:
        return None
    library, reason = library_for(target.device)
    if library is None:
        _warn(reason)
    return library


@cache
def _warn(reason: str) -> None:
    message = "the solver sweeps columns with torch, which is slower, because %s"
    logging.getLogger("gptqkit").warning(message, reason)


def sweep_block(
    library: KernelLibrary,
    block: Tensor,
    inverse: Tensor,
    *,
    shift: Tensor | None,
    importance: Tensor | None,
    group: Tensor | None,
    group_size: int,
    scale: Tensor,
    zero: Tensor,
    codes: Tensor,
    values: Tensor,
    bits: int,
    sym: bool,
    min_zero: int,
) -> Tensor:
    """Round the columns of a block in turn, each one's error moved onto later ones.

    `gptqkit_sweep` of `csrc/api.h` says what the tensors are and which of them are written; they lie on one device.

    Returns:
        (w_i - q_i) / U_ii of every column i, (columns, rows) float32.

    Raises:
        ShapeError: A tensor is not contiguous, of another dtype or on another device, or the block is too wide.
    """
    columns, rows = block.shape
    if columns > MOST_COLUMNS:
        raise ShapeError(f"a block of {columns} columns does not fit into shared memory; take at most {MOST_COLUMNS}")
    scaled = torch.empty_like(block)
    tensors = (block, inverse, shift, importance, group, scale, zero, codes, values, scaled)
    for tensor in tensors:
        if tensor is None:
            continue
        dtype = torch.int32 if tensor is group else torch.uint8 if tensor is codes else torch.float32
        if not tensor.is_contiguous() or tensor.device != block.device or tensor.dtype != dtype:
            raise ShapeError(
                f"the sweep got {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}; "
                f"it needs contiguous {dtype} on {block.device}"
            )
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    settings = (columns, rows, group_size, bits, int(sym), min_zero)
    on_gpu = block.device.type == "cuda"  # else the emulator
    with torch.cuda.device(block.device) if on_gpu else nullcontext():
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else None
        library.run("gptqkit_sweep", *pointers, *settings, stream)
    return scaled
