"""Products that straddle every edge of the gemm kernels, for a library given on the command line.

    python tests/support/kernel_cases.py LIBRARY            all bits and dtypes, repack in another order, dequantize
    python tests/support/kernel_cases.py LIBRARY --bits 4   float16 products at these bits only

Ends with 1 and a line that says what is wrong at the first wrong result. A process of its own, because a planted bug
may crash it and because the sanitizers want to be loaded first.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.kernels import BFLOAT16, FLOAT16, KernelError, Kernels, Layer, activations, gemm_error, to_bits

# Tokens, outputs, inputs, group, split: each kernel with whole and ragged tiles, groups within and across units.
CASES = (
    (5, 96, 288, 32, 2),
    (8, 64, 608, 128, 1),
    (13, 96, 352, 128, 3),
    (16, 160, 96, 16, 1),
    (20, 320, 160, 32, 2),
    (33, 96, 352, 64, 2),
    (66, 288, 96, 48, 1),
)


def wrong_product(kernels, bits, dtype):
    """What is wrong with the products at these bits and dtype, or None."""
    for seed, (m, n, k, group, split) in enumerate(CASES):
        kernels.handle.gptqkit_emulator_seed(seed)
        layer = Layer(kernels, bits=bits, dtype=dtype, n=n, k=k, group=group, seed=seed)
        x = activations(m, k, dtype, ldx=k + 8)
        bias = to_bits(np.linspace(-3, 3, n), dtype)
        error = gemm_error(kernels.gemm(layer, x, split=split, bias=bias, ldx=k + 8), x, layer, bias)
        case = f"m {m}, n {n}, k {k}, group {group}, split {split}"
        if not error < 1.05:
            return f"{case}: {error:.3g} times the dense product's error"
        for traffic in kernels.traffic():
            if traffic.shared and traffic.spent > traffic.least:
                place = f"{traffic.file}:{traffic.line}, {traffic.function}"
                return f"{case}: bank conflicts in {place}: {traffic.excess:.3g} times the transfers"
    return None


def wrong_rest(kernels, bits, dtype):
    """What is wrong with the other kernels, or None."""
    layer = Layer(kernels, bits=bits, dtype=dtype, n=96, k=160, group=32)
    if (kernels.dequantize(layer, 1, 90) != to_bits(layer.exact, dtype)[1:91]).any():
        return "dequantized rows differ"
    rows = np.random.default_rng(0).permutation(160).astype(np.int32)
    layer.weight = kernels.repack_weight(bits, layer.qweight, 96, 160, rows)
    layer.group, layer.scale, layer.zero = 160, layer.scale[:1], layer.zero[:1]
    scale = layer.scales[:1].view(np.float16).astype(np.float32)
    expected = to_bits(((layer.codes[rows] - layer.zeros[:1]) * scale).T, dtype)
    if (kernels.dequantize(layer, 0, 96) != expected).any():
        return "the order of inputs is wrong"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--bits", type=int)
    options = parser.parse_args()
    kernels = Kernels(options.library)
    kernels.handle.gptqkit_emulator_count(1)
    try:
        if options.bits is not None:
            return wrong_product(kernels, options.bits, FLOAT16)
        for bits in (2, 3, 4, 8):
            for dtype in (FLOAT16, BFLOAT16):
                wrong = wrong_product(kernels, bits, dtype) or wrong_rest(kernels, bits, dtype)
                if wrong:
                    return f"bits {bits}, dtype {dtype}: {wrong}"
    except KernelError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
