"""Whether the kernels compute on a GPU what they should: small products and a sweep, compared with the CPU's.

Done once in every process that uses them: where a kernel is wrong on some GPU, torch computes there, and the log says
why.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import product

import torch
from torch import Tensor

from ..quantizer.quantized import QuantizedWeight
from .library import KernelLibrary, library_for
from .ops import BITS, DTYPES, Device, Launcher, Layer, Tuning
from .packing import pack_layer
from .sweep import Sweep, sweep_block

OUTPUTS, INPUTS, GROUP = 96, 416, 32  # one and a half tiles, six and a half units
PRODUCTS = ((1, 3), (16, 1), (24, 3), (70, 1))
"""Rows of x, one number for each of the gemm kernels, and how many blocks share the inputs."""

LARGEST_ERROR = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest value of a product; its result is rounded to 5e-4 and 4e-3 of each."""


def tried_library(device: torch.device) -> tuple[KernelLibrary | None, str]:
    """Return the library that serves a GPU if it was right there in its trial, or None and why, in half a sentence."""
    library, reason = library_for(device)
    wrong = "" if library is None else fault(library, device)
    return (None, f"{wrong} on {torch.cuda.get_device_name(device)}; please report it") if wrong else (library, reason)


def sweep_library(target: Tensor) -> KernelLibrary | None:
    """Return the library that can sweep blocks of `target`, or None: no GPU, no library, not float32.

    A library that is missing where there is a GPU is logged, once.
    """
    if target.device.type != "cuda" or target.dtype != torch.float32:
        return None
    library, reason = tried_library(target.device)
    if library is None:
        _warn(reason)
    return library


@cache
def _warn(reason: str) -> None:
    message = "the solver sweeps columns with torch, which is slower, because %s"
    logging.getLogger("gptqkit").warning(message, reason)


@cache
@torch.no_grad()
def fault(library: KernelLibrary, device: torch.device) -> str:
    """Return what is wrong with the kernels on a device, in half a sentence; nothing where all is right."""
    launcher = Launcher(library, device, Tuning(), Device(1, 1))
    try:
        with torch.device("cpu"):  # whatever the caller makes tensors on
            return _find_fault(launcher)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"the kernels fail: {str(error).splitlines()[0]}"


def _find_fault(launcher: Launcher) -> str:
    generator = torch.Generator().manual_seed(0)
    for bits, free, dtype in product(BITS, (False, True), DTYPES):
        wrong = _wrong_product(launcher, _weight(bits, free=free, generator=generator), dtype, generator)
        if wrong:
            return f"the kernels' {wrong} at {bits} bits in {dtype}"
    if any(_sweeps_wrongly(launcher, generator, shifted=shifted) for shifted in (False, True)):
        return "the kernels' sweep decides on other codes than torch"
    return ""


def _weight(bits: int, *, free: bool, generator: torch.Generator) -> QuantizedWeight:
    """Return a random weight; free offsets are no zero points."""
    scale = (torch.rand(OUTPUTS, INPUTS // GROUP, generator=generator) / 50 + 1e-3).half().float()
    zero = torch.randint(0, 1 << bits, scale.shape, generator=generator)
    return QuantizedWeight(
        codes=torch.randint(0, 1 << bits, (OUTPUTS, INPUTS), generator=generator, dtype=torch.uint8),
        scale=scale,
        offset=-(zero * scale) * (0.9 if free else 1.0),
        group_index=(torch.arange(INPUTS) // GROUP).int(),
        bits=bits,
        group_size=GROUP,
        sym=False,
    )


def _wrong_product(launcher: Launcher, weight: QuantizedWeight, dtype: torch.dtype, generator: torch.Generator) -> str:
    """Return which product with a weight, or whether the weight itself, is wrong."""
    _, words, scale, zero, _ = pack_layer(weight.to(launcher.device))
    sizes = (weight.bits, GROUP, OUTPUTS)
    dense = weight.dequantize(dtype)
    if not torch.equal(launcher.dequantize(words, scale, zero, *sizes, INPUTS, dtype).cpu(), dense):
        return "dequantized weight is wrong"
    packed = Layer(words, scale, zero, None, sizes, INPUTS, dtype, launcher)
    for rows, split in PRODUCTS:
        x = torch.randn(rows, INPUTS, generator=generator).to(dtype)
        expected = x.float() @ dense.float().T
        found = launcher.product(x.to(launcher.device), packed, split).float().cpu()
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < LARGEST_ERROR[dtype]:
            return f"product of {rows} rows is wrong by {error:.2g} of its largest value"
    return ""


def _sweeps_wrongly(launcher: Launcher, generator: torch.Generator, *, shifted: bool) -> bool:
    """Return whether the sweep of one block decides on other codes than the loop that defines it (`csrc/sweep.cu`)."""
    columns, rows, bits = 48, 70, 3
    upper = torch.eye(columns) + torch.rand(columns, columns, generator=generator).triu(1) / columns
    shift = torch.rand(columns, columns, generator=generator).triu(1) / columns if shifted else None
    group = (torch.arange(columns) // 16).int()
    scale = torch.rand(3, rows, generator=generator).half().float() + 0.1
    zero = torch.randint(0, 1 << bits, (3, rows), generator=generator).float()
    block = torch.randn(columns, rows, generator=generator)
    codes, values = torch.zeros(columns, rows, dtype=torch.uint8), torch.zeros(columns, rows)
    given = (block, upper, shift, group, scale, zero, codes, values)
    sweep = Sweep(*(None if tensor is None else tensor.to(launcher.device, copy=True) for tensor in given))  # type: ignore[arg-type]
    sweep_block(launcher.library, sweep, bits=bits)
    for i, at in enumerate(group.tolist()):
        code = ((block[i] / scale[at]).round() + zero[at]).clamp(0, (1 << bits) - 1)
        codes[i] = code
        error = (block[i] - (code - zero[at]) * scale[at]) / upper[i, i]
        block[i + 1 :] -= torch.outer(upper[i, i + 1 :], error)
        if shift is not None:
            block[i + 1 :] += torch.outer(shift[i, i + 1 :], block[i])
    different: Tensor = sweep.codes.cpu() != codes
    return float(different.float().mean()) > 0.01  # a weight on the edge between two codes may take either
