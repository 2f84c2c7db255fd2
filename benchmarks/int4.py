"""Torch's 4-bit CPU kernel against a dense bfloat16 product: from which number of tokens on it loses.

    python benchmarks/int4.py [--threads 1] [--seconds 0.5]

Both run in this process on the same layer; the ratio is dense time over 4-bit time, so above 1 the 4-bit kernel wins.
Times are the best within --seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

GROUP_SIZE = 128
SIZES = (1024, 4096)
TOKENS = (1, 4, 8, 16, 32, 64)


def best_time(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest run."""
    work()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Measure every size and number of tokens and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement (default 0.5)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {arguments.threads} threads, groups of {GROUP_SIZE}; dense time / 4-bit time")
    print("tokens     " + "".join(f"{tokens:>7}" for tokens in TOKENS))
    for size in SIZES:
        codes = torch.randint(0, 16, (size, size), dtype=torch.int32)
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        grid = torch.rand(size // GROUP_SIZE, size, 2).bfloat16()
        dense = torch.randn(size, size).bfloat16()
        ratios = []
        for tokens in TOKENS:
            x = torch.randn(tokens, size).bfloat16()
            packed = best_time(
                lambda x=x, words=words, grid=grid: torch.ops.aten._weight_int4pack_mm_for_cpu(
                    x, words, GROUP_SIZE, grid
                ),
                arguments.seconds,
            )
            ratios.append(best_time(lambda x=x, dense=dense: F.linear(x, dense), arguments.seconds) / packed)
        print(f"{size:>4} x {size:<4}" + "".join(f"{ratio:7.2f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
