"""A few small calls of every kernel, for `compute-sanitizer --tool racecheck python benchmarks/sanitize.py`.

With --profile: three large products, one for each of the gemm kernels for 1, 16 and 64 rows, for ncu.
"""

from __future__ import annotations

import itertools
import sys

import torch
from layers import random_operands

from gptqkit.kernels.library import KernelLibrary
from gptqkit.kernels.ops import launcher_for
from gptqkit.kernels.sweep import Sweep, sweep_block

BITS = (2, 3, 4, 8)
DTYPES = (torch.float16, torch.bfloat16)
ROWS = (1, 16, 24, 70)  # one for each kernel
SPLITS = (1, 3)
GRIDS = ((16, False), (32, False), (128, False), (32, True))  # groups, and whether offsets are no zero points
COLUMNS = (48, 256)  # the second needs more shared memory than every block may have
LARGE = (8192, 28672)  # out, in
OUTPUTS, INPUTS = 96, 416  # one and a half tiles, six and a half units


def run_products(device: torch.device) -> None:
    """Every gemm kernel and dequantize."""
    for bits in BITS:
        for group_size, free in GRIDS:
            layer = random_operands(OUTPUTS, INPUTS, bits=bits, group_size=group_size, device=device, free=free)
            tensors, sizes = layer[:3], layer[4:]
            for dtype in DTYPES:
                torch.ops.gptqkit.dequantize(*tensors, *sizes, INPUTS, dtype)
                bias = torch.zeros(OUTPUTS, dtype=dtype, device=device)
                for rows in ROWS:
                    x = torch.randn(rows, INPUTS, device=device).to(dtype)
                    for split in SPLITS:
                        torch.ops.gptqkit.linear(x, *tensors, bias, *sizes, split)


def run_sweeps(device: torch.device, library: KernelLibrary) -> None:
    """The sweep of GPTQ and GPTAQ, with a ragged block of rows."""
    rows, group_size = 70, 20
    for columns, bits, gptaq in itertools.product(COLUMNS, BITS, (False, True)):
        upper = torch.eye(columns, device=device) + torch.rand(columns, columns, device=device).triu(1) / columns
        group = (torch.arange(columns, device=device) // group_size).int()
        scale, zero = torch.rand(2, -(-columns // group_size), rows, device=device).unbind()
        block = torch.randn(columns, rows, device=device)
        shift, codes = upper.triu(1) if gptaq else None, torch.empty_like(block, dtype=torch.uint8)
        tensors = (block, upper, shift, group, scale, zero.round(), codes, torch.empty_like(block))
        sweep_block(library, Sweep(*tensors), bits=bits)


def run_large(device: torch.device) -> None:
    """Three products at 4 bits, bound by memory."""
    layer = random_operands(*LARGE, bits=4, group_size=128, device=device)
    for rows in (1, 16, 64):
        torch.ops.gptqkit.linear(torch.randn(rows, LARGE[1], device=device).half(), *layer)
    torch.cuda.synchronize()


def main() -> None:
    """Run; the sanitizer reports."""
    device = torch.device("cuda", torch.cuda.current_device())
    if "--profile" in sys.argv:
        run_large(device)
        return
    run_products(device)
    run_sweeps(device, launcher_for(device).library)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
