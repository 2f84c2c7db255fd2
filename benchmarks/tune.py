"""Measure this GPU's constants (`kernels/tuning.py`) and write them to kernels/devices/<its name>.json.

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
from pathlib import Path

import torch
from layers import random_layer
from timing import clone_tensors, copies_past_cache, describe, find_gpu, graph_time

from gptqkit.kernels.gemm import repack
from gptqkit.kernels.launcher import Launcher, launcher_for
from gptqkit.kernels.tuning import Tuning, file_name

BITS = (2, 3, 4, 8)
SHAPES = ((4096, 4096), (4096, 14336), (8192, 28672), (1024, 4096))  # (out, in)
FEW = (1, 8, 16)
MANY = (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
BLOCKS = (1.0, 1.5, 2.0, 3.0, 4.0)
LEAST = (256, 512, 1024)
DENSE_SHAPES = ((8192, 28672), (28672, 8192), (4096, 4096))
DENSE_ROWS = (512, 2048)
DENSE_MEGABYTES = (16, 32, 64, 128, 512)
FOLDER = Path(__file__).parent.parent / "kernels" / "devices"


def operands(shape: tuple[int, int], bits: int, launcher: Launcher) -> list[tuple]:
    """Enough copies of one layer to rotate past the cache."""
    layer = repack(random_layer(*shape, bits=bits, group_size=128, device=launcher.device))
    tensors = (layer.weight, layer.scale, layer.zero)
    copies = copies_past_cache(layer.weight.numel() * 4, launcher.device)
    rest = (None, bits, layer.group_size, layer.out_features)
    return [(*clone_tensors(tensors), *rest) for _ in range(copies)]


def constants(launcher: Launcher, **changes: float) -> Tuning:
    """The launcher's constants with some of them changed."""
    return dataclasses.replace(launcher.tuning, **changes)


def find_split(launcher: Launcher) -> tuple[float, int]:
    """The best blocks per multiprocessor and least inputs per block."""
    choices = list(itertools.product(BLOCKS, LEAST))
    loss = dict.fromkeys(choices, 0.0)
    for shape, bits in itertools.product(SHAPES, BITS):
        weights = operands(shape, bits, launcher)
        for rows in FEW:
            x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
            _, tiles = launcher.library.workspace(rows, *shape, 2)
            seconds: dict[int, float] = {}
            splits = {}
            for blocks, least in choices:
                tuning = constants(launcher, blocks_per_multiprocessor=blocks, least_inputs_per_block=least)
                split = splits[blocks, least] = tuning.split(tiles, shape[1], launcher.multiprocessors)
                if split not in seconds:
                    seconds[split] = graph_time(lambda w, x=x, s=split: launcher.gemm(x, *w, s), weights, rounds=3)
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
            launcher.tuning = constants(launcher, dense_bytes=megabytes << 20)
            seconds = graph_time(lambda w, x=x: launcher.dense_product(x, *w), weights, rounds=3)
            print(f"{shape}, {rows} rows, {megabytes} MB at a time: {seconds * 1e6:.1f}")
            loss[megabytes] += math.log(seconds)
    return min(loss, key=loss.__getitem__) << 20


def find_crossover(launcher: Launcher, bits: int) -> int:
    """The first of `MANY` numbers of rows at which the dense path is not slower, over two shapes."""
    both = [operands(shape, bits, launcher) for shape in SHAPES[:2]]
    for rows in MANY:
        gain = 0.0
        for shape, weights in zip(SHAPES, both, strict=False):
            x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
            _, tiles = launcher.library.workspace(rows, *shape, 2)
            split = launcher.tuning.split(tiles, shape[1], launcher.multiprocessors)
            fused = graph_time(lambda w, x=x, s=split: launcher.gemm(x, *w, s), weights, rounds=3)
            dense = graph_time(lambda w, x=x: launcher.dense_product(x, *w), weights, rounds=3)
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
    launcher.tuning = constants(launcher, blocks_per_multiprocessor=blocks, least_inputs_per_block=least)
    launcher.tuning = constants(launcher, dense_bytes=find_dense_bytes(launcher))
    content = {
        "blocks_per_multiprocessor": blocks,
        "least_inputs_per_block": least,
        "crossover": {str(bits): find_crossover(launcher, bits) for bits in BITS},
        "dense_bytes": launcher.tuning.dense_bytes,
        "measured": measured,
    }
    text = json.dumps(content, indent=2) + "\n"
    print(text)
    if not arguments.dry_run:
        (FOLDER / file_name(str(measured["device"]))).write_text(text)


if __name__ == "__main__":
    main()
