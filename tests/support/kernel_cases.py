"""Random weights, how good a product with one is, and products that straddle every edge of the gemm kernels.

    PYTHONPATH=src:tests python tests/support/kernel_cases.py LIBRARY            the products at all bits and dtypes
    PYTHONPATH=src:tests python tests/support/kernel_cases.py LIBRARY --bits 4   float16 products at these bits only

Ends with 1 and a line that says what is wrong at the first wrong result. A process of its own, because a planted bug
may crash it and because the sanitizers want to be loaded first.
"""

import sys
from argparse import ArgumentParser
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch.nn.functional import linear

from gptqkit.errors import BackendError
from gptqkit.quantizer.quantized import QuantizedWeight

# Tokens, outputs, inputs, group, split, free grids: each kernel with whole and ragged tiles, groups within and across
# units.
CASES = (
    (5, 96, 288, 32, 5, False),
    (8, 64, 608, 128, 1, False),
    (13, 96, 352, 128, 3, False),
    (16, 160, 96, 16, 1, False),
    (20, 320, 160, 32, 2, False),
    (33, 96, 352, 64, 5, False),
    (66, 288, 96, 48, 1, False),
    (7, 96, 288, 16, 5, True),
    (13, 160, 96, 32, 1, True),
    (20, 96, 352, 64, 2, True),
    (66, 288, 96, 16, 1, True),
)
LARGEST_ERROR = 1.06
"""Of the dense product's. Measured: 0.6 to 0.9 for up to 16 tokens, whose weights are not rounded, 1.0 for more."""


def random(*shape, seed=7):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_weight(bits=4, rows=64, columns=96, group_size=32, least_zero=0, zeros=None, scale=None, index=None, seed=0):
    """A random weight; zeros span 0 ... 2^bits - 1, from `least_zero` on, or are the one number given."""
    generator = torch.Generator().manual_seed(seed)
    if scale is None:
        scale = (torch.rand(rows, -(-columns // group_size), generator=generator) / 50 + 1e-3).half().float()
        scale *= torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    zero = torch.randint(least_zero, least_zero + 2**bits, scale.shape, generator=generator)
    zero = zero if zeros is None else torch.full_like(zero, zeros)
    return QuantizedWeight(
        codes=torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8),
        scale=scale,
        offset=-(zero * scale),
        group_index=(torch.arange(columns) // group_size if index is None else index).int(),
        bits=bits,
        group_size=group_size,
        sym=False,
    )


def with_free_grids(weight):
    """The weight with scales and offsets as K-quants have them: products of float16 numbers and whole ones."""
    generator = torch.Generator().manual_seed(5)
    unit, floor = (torch.rand(2, len(weight.codes), 1, generator=generator) / 100 + 1e-3).half().float()
    times, depth = torch.randint(1, 64, (2, *weight.scale.shape), generator=generator)
    return replace(weight, scale=unit * times, offset=-(floor * depth))


def relative_error(y, exact):
    return float((y.cpu().double() - exact).norm() / exact.norm())


def product_error(y, x, weight, bias=None):
    """The error of y, over that of a dense product at the same dtype, whose weight and result are rounded once each."""
    bias = None if bias is None else bias.to(x.dtype)
    exact = linear(x.double(), weight.dequantize(torch.float64), None if bias is None else bias.double())
    dense = linear(x, weight.dequantize(x.dtype), bias)
    assert (y.shape, y.dtype) == (dense.shape, dense.dtype)
    return relative_error(y, exact) / relative_error(dense, exact)


def find_fault(emulation, bits, dtype):
    """What is wrong with the products at these bits and dtype, or None."""
    for seed, (m, n, k, group, split, free) in enumerate(CASES):
        case = f"bits {bits}, {dtype}, m {m}, n {n}, k {k}, group {group}, split {split}, free grids {free}"
        emulation.reorder(seed)
        weight, x, bias = make_weight(bits, n, k, group, seed=seed), random(m, k).to(dtype), torch.linspace(-3, 3, n)
        weight = with_free_grids(weight) if free else weight
        layer = emulation.linear(weight, bias, dtype)
        tensors, sizes = (layer.packed, layer.scale, layer.zero), (bits, group, n)
        y = torch.ops.gptqkit.linear(x, *tensors, layer.bias, *sizes, split)
        for each in emulation.traffic():
            if each.conflicts:
                place = f"{each.file}:{each.line}, {each.function}"
                return f"{case}: bank conflicts in {place}: {each.spent / each.least:.3g} times the transfers"
        error = product_error(y, x, weight, bias)
        if not error < LARGEST_ERROR:
            return f"{case}: {error:.3g} times the dense product's error"
        if not torch.equal(torch.ops.gptqkit.dequantize(*tensors, *sizes, k, dtype), weight.dequantize(dtype)):
            return f"{case}: another dequantized weight"
    return None


def main():
    from support.emulation import Emulation

    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--bits", type=int)
    options = parser.parse_args()
    emulation = Emulation(options.library)
    emulation.count_traffic(True)
    kinds = product((2, 3, 4, 8), (torch.float16, torch.bfloat16))
    try:
        for bits, dtype in kinds if options.bits is None else [(options.bits, torch.float16)]:
            fault = find_fault(emulation, bits, dtype)
            if fault is not None:
                return fault
    except BackendError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
