"""GPTQ's column sweep over one block as one kernel: columns in sequence, rows in parallel."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from ..errors import ShapeError
from .library import OLDEST_CAPABILITY, KernelLibrary, find_library

MOST_COLUMNS = 384
"""Columns of a block whose weights fit into shared memory; `csrc/sweep.cu` refuses more."""

_LOG = logging.getLogger("gptqkit")


def sweep_library(target: Tensor) -> KernelLibrary | None:
    """The library that can sweep blocks of `target`, or None: no GPU or too old a one, no library, not float32.

    A library that is missing where a GPU could use it is logged, once.
    """
    if target.device.type != "cuda" or target.dtype != torch.float32:
        return None
    if torch.cuda.get_device_capability(target.device) < OLDEST_CAPABILITY:
        return None
    return _library()


@cache
def _library() -> KernelLibrary | None:
    search = find_library()
    if search.library is None:
        _LOG.warning("the solver sweeps columns with torch, which is slower, because %s", search.reason)
    return search.library


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

    Returns:
        (w_i - q_i) / U_ii of every column i, (columns, rows) float32.

    Args:
        library: What to run it on.
        block: (columns, rows) float32, up to date with earlier blocks; leaves as the weights when they were rounded.
        inverse: U of the block, (columns, columns) float32, upper triangular.
        shift: GPTAQ's P of the block, (columns, columns) float32, or None.
        importance: (columns,) float32 weight of every column's error in the search of grids; None spans min to max.
        group: (columns,) int32: rows of `scale` and `zero`, which are then given; None fits a grid every `group_size`
            columns and writes them.
        group_size: Columns per group.
        scale: (groups, rows) float32.
        zero: (groups, rows) float32.
        codes: (columns, rows) uint8, written.
        values: (columns, rows) float32, written: what the codes stand for.
        bits: 2, 3, 4 or 8.
        sym: Symmetric grids.
        min_zero: The smallest zero allowed.

    Raises:
        ShapeError: A tensor is not contiguous, of another dtype or on another device, or the block is too wide.
    """
    columns, rows = block.shape
    if columns > MOST_COLUMNS:
        raise ShapeError(f"a block of {columns} columns does not fit into shared memory; take at most {MOST_COLUMNS}")
    scaled = torch.empty_like(block)
    tensors = (block, inverse, shift, importance, group, scale, zero, codes, values, scaled)
    for tensor in tensors:
        dtype = torch.int32 if tensor is group else torch.uint8 if tensor is codes else torch.float32
        if tensor is None:
            continue
        if not tensor.is_contiguous() or tensor.device != block.device or tensor.dtype != dtype:
            raise ShapeError(
                f"the sweep got {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}; "
                f"it needs contiguous {dtype} on {block.device}"
            )
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    settings = (columns, rows, group_size, bits, int(sym), min_zero)
    if block.device.type == "cuda":
        with torch.cuda.device(block.device):
            library.run("gptqkit_sweep", *pointers, *settings, torch.cuda.current_stream().cuda_stream)
    else:  # the emulator
        library.run("gptqkit_sweep", *pointers, *settings, None)
    return scaled
