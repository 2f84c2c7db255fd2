"""A few small calls of every kernel, for `compute-sanitizer --tool racecheck python benchmarks/sanitize.py`."""

from __future__ import annotations

import dataclasses

import torch
from layers import random_layer

from gptqkit.kernels.gemm import dequantize, matmul, repack
from gptqkit.kernels.launcher import launcher_for
from gptqkit.kernels.library import KernelLibrary
from gptqkit.kernels.sweep import sweep_block

BITS = (2, 3, 4, 8)
DTYPES = (torch.float16, torch.bfloat16)
ROWS = (1, 16, 24, 70)  # one for each kernel
SPLITS = (1, 3)
OUTPUTS, INPUTS = 96, 384


def run_products(device: torch.device) -> None:
    """Every gemm kernel, dequantize and both repacks."""
    for bits in BITS:
        for group_size in (16, 32, 128):
            packed = random_layer(OUTPUTS, INPUTS, bits=bits, group_size=group_size, device=device)
            layer = repack(packed)
            tensors = (layer.weight, layer.scale, layer.zero)
            for dtype in DTYPES:
                dequantize(layer, dtype)
                bias = torch.zeros(OUTPUTS, dtype=dtype, device=device)
                for rows in ROWS:
                    x = torch.randn(rows, INPUTS, device=device).to(dtype)
                    for split in SPLITS:
                        torch.ops.gptqkit.gemm(x, *tensors, bias, bits, group_size, OUTPUTS, split)
            shuffled = packed.g_idx[torch.randperm(INPUTS, device=device)]
            act_order = repack(dataclasses.replace(packed, g_idx=shuffled, act_order=True))
            matmul(torch.randn(ROWS[0], INPUTS, device=device).half(), act_order)


def run_sweeps(device: torch.device, library: KernelLibrary) -> None:
    """The sweep with grids that it fits, searches for or is given, for GPTQ and GPTAQ, with a ragged block of rows."""
    for columns in (48, 256):  # the second needs more shared memory than every block may have
        _run_sweeps(device, library, columns, rows=70, group_size=20)


def _run_sweeps(device: torch.device, library: KernelLibrary, columns: int, rows: int, group_size: int) -> None:
    upper = torch.eye(columns, device=device) + torch.rand(columns, columns, device=device).triu(1) / columns
    importance = torch.rand(columns, device=device)
    group = (torch.arange(columns, device=device) // group_size).int()
    for bits in BITS:
        for sym in (False, True):
            for shift in (None, upper.triu(1)):
                scale, zero = torch.empty(2, -(-columns // group_size), rows, device=device).unbind()
                for search, given in ((None, None), (importance, None), (None, group)):
                    sweep_block(
                        library,
                        torch.randn(columns, rows, device=device),
                        upper,
                        shift=shift,
                        importance=search,
                        group=given,
                        group_size=group_size,
                        scale=scale,
                        zero=zero,
                        codes=torch.empty(columns, rows, dtype=torch.uint8, device=device),
                        values=torch.empty(columns, rows, device=device),
                        bits=bits,
                        sym=sym,
                        min_zero=0,
                    )


def main() -> None:
    """Run; the sanitizer reports."""
    device = torch.device("cuda", torch.cuda.current_device())
    run_products(device)
    run_sweeps(device, launcher_for(device).library)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
