"""Measure this GPU's constants (`Tuning` in kernels/ops.py) and write them to kernels/devices/<its name>.json.

    python benchmarks/tune.py [--dry-run]

First the two numbers that decide the split, by the sum of relative times over shapes, bit widths and a few rows of x;
then how much of the dense weight to make at a time; then, for each bit width, the rows from which dequantizing and a
dense product is faster than the fused kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math

import torch
from layers import random_operands
from timing import clone_tensors, copies_past_cache, describe, find_gpu, graph_time

from gptqkit.kernels.ops import BITS, DEVICES, Launcher, file_name, launcher_for

SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672), (1024, 4096))  # (out, in)
FEW = (1, 8, 16)
MANY = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
BLOCKS = (1.0, 1.5, 2.0, 3.0, 4.0)
LEAST = (256, 512, 1024)
DENSE_SHAPES = ((8192, 28672), (28672, 8192), (4096, 4096))
DENSE_ROWS = (512, 2048)
DENSE_MEGABYTES = (16, 32, 64, 128, 512)


def operands(shape: tuple[int, int], bits: int, launcher: Launcher) -> list[tuple]:
    """Enough copies of one layer to rotate past the cache."""
    layer = random_operands(*shape, bits=bits, group_size=128, device=launcher.device)
    return [clone_tensors(layer) for _ in range(copies_past_cache(layer[0].numel() * 4, launcher.device))]


def with_constants(launcher: Launcher, **changes: float) -> Launcher:
    """The launcher with some of its constants changed."""
    tuning = dataclasses.replace(launcher.tuning, **changes)
    return Launcher(launcher.library, launcher.device, tuning, launcher.multiprocessors)


def find_split(launcher: Launcher) -> tuple[float, int]:
    """The best blocks per multiprocessor and least inputs per block."""
    choices = list(itertools.product(BLOCKS, LEAST))
    loss = dict.fromkeys(choices, 0.0)
    for shape, bits in itertools.product(SHAPES, BITS):
        weights = operands(shape, bits, launcher)
        for rows in FEW:
            x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
            seconds: dict[int, float] = {}
            splits = {}
            for blocks, least in choices:
                other = with_constants(launcher, blocks_per_multiprocessor=blocks, least_inputs_per_block=least)
                split = splits[blocks, least] = other.choose_split(bits, rows, *shape)
                if split not in seconds:
                    seconds[split] = graph_time(lambda w, x=x, s=split: launcher.linear(x, *w, s), weights, rounds=3)
            best = min(seconds.values())
            for choice, split in splits.items():
                loss[choice] += math.log(seconds[split] / best)
            print(f"{shape} {bits} bits, {rows} rows: " + ", ".join(f"{s}: {t * 1e6:.1f}" for s, t in seconds.items()))
    return min(choices, key=loss.__getitem__)


def find_dense_bytes(launcher: Launcher) -> int:
    """The best size of the dense weight's parts for 512 and 2048 rows of x, over wide and narrow layers."""
    loss = dict.fromkeys(DENSE_MEGABYTES, 0.0)
    for shape, rows in itertools.product(DENSE_SHAPES, DENSE_ROWS):
        weights = operands(shape, 4, launcher)
        x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
        for megabytes in DENSE_MEGABYTES:
            other = with_constants(launcher, dense_bytes=megabytes << 20)
            seconds = graph_time(lambda w, x=x, other=other: other.linear(x, *w, 0), weights, rounds=3)
            print(f"{shape}, {rows} rows, {megabytes} MB at a time: {seconds * 1e6:.1f}")
            loss[megabytes] += math.log(seconds)
    return min(loss, key=loss.__getitem__) << 20


def find_crossover(launcher: Launcher, bits: int) -> int:
    """The first of `MANY` numbers of rows at which the dense path is not slower, over two shapes."""
    both = [operands(shape, bits, launcher) for shape in SHAPES[:2]]
    always_fused = with_constants(launcher, crossover=dict.fromkeys(BITS, 1 << 30))
    for rows in MANY:
        gain = 0.0
        for shape, weights in zip(SHAPES, both, strict=False):
            x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
            split = always_fused.choose_split(bits, rows, *shape)
            fused = graph_time(lambda w, x=x, s=split: launcher.linear(x, *w, s), weights, rounds=3)
            dense = graph_time(lambda w, x=x: launcher.linear(x, *w, 0), weights, rounds=3)
            gain += math.log(fused / dense)
        print(f"{bits} bits, {rows} rows: the fused kernel takes {math.exp(gain / 2):.2f} of the dense path's time")
        if gain >= 0:
            return rows
    return 2 * MANY[-1]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print the file instead of writing it")
    arguments = parser.parse_args()
    device = find_gpu(parser)
    measured = describe(device)
    launcher = launcher_for(device)
    blocks, least = find_split(launcher)
    launcher = with_constants(launcher, blocks_per_multiprocessor=blocks, least_inputs_per_block=least)
    launcher = with_constants(launcher, dense_bytes=find_dense_bytes(launcher))
    launcher = with_constants(launcher, crossover={bits: find_crossover(launcher, bits) for bits in BITS})
    content = {"measured": measured, "constants": dataclasses.asdict(launcher.tuning)}
    text = json.dumps(content, indent=2) + "\n"
    print(text)
    if not arguments.dry_run:
        DEVICES.mkdir(exist_ok=True)
        (DEVICES / file_name(str(measured["device"]))).write_text(text)


if __name__ == "__main__":
    main()
