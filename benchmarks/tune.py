"""Measure this GPU's constants (`Tuning` in kernels/ops.py) and write them to kernels/devices/<its name>.json.

    python benchmarks/tune.py [--out benchmarks/results] [--dry-run]

First the two numbers that decide the split, by the sum of relative times over shapes, bit widths and rows of x, beside
the times of other splits, which tell whether any two numbers decide well; then how much of the dense weight to make at
a time; then, for each bit width, the rows from which dequantizing and a dense product is faster than the fused kernel.
Both files, the constants and all times behind them (tune.json in --out), are
written after every phase, so that a run that is cut off leaves what it found.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from pathlib import Path

import torch
from layers import random_operands, shape_of
from timing import clone_tensors, copies_past_cache, describe, find_gpu, graph_time, write

from gptqkit.kernels.ops import BITS, DEVICES, Launcher, Tuning, file_name, launcher_for

SHAPES = ((8192, 28672), (4096, 4096), (4096, 14336), (1024, 4096))  # (out, in)
ROWS = (1, 8, 16, 32, 64)
BLOCK_INPUTS = (64, 128, 256, 512, 1024)
PART_BYTES = (256, 1024, 4096)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # timed whatever the numbers say: most of those agree
DENSE_SHAPES = ((8192, 28672), (28672, 8192), (4096, 4096))
DENSE_ROWS = (512, 2048)
DENSE_MEGABYTES = (16, 32, 64, 128, 512)
MANY = (64, 96, 128, 160, 192, 256, 320, 384, 512, 768)
ALWAYS = dict.fromkeys(BITS, 1 << 30)


def operands(shape: tuple[int, int], bits: int, launcher: Launcher) -> list[tuple]:
    """Enough copies of one layer to rotate past the cache."""
    layer = random_operands(*shape, bits=bits, group_size=128, device=launcher.device)
    return [clone_tensors(layer) for _ in range(copies_past_cache(layer[0].numel() * 4, launcher.device))]


def with_constants(launcher: Launcher, **changes: object) -> Launcher:
    """The launcher with some of its constants changed."""
    tuning = dataclasses.replace(launcher.tuning, **changes)
    return Launcher(launcher.library, launcher.device, tuning, launcher.properties)


def time_split(launcher: Launcher, weights: list[tuple], x: torch.Tensor, split: int) -> float:
    """Seconds of a product; split 0 is the dense path."""
    return graph_time(lambda weight: launcher.linear(x, *weight, split), weights, rounds=3)


def find_split(launcher: Launcher, times: list) -> dict[str, int]:
    """The constants whose plans take the least time; of those that plan alike, the nearest to the defaults."""
    choices = list(itertools.product(BLOCK_INPUTS, PART_BYTES))
    loss = dict.fromkeys(choices, 0.0)
    for shape, bits in itertools.product(SHAPES, BITS):
        weights = operands(shape, bits, launcher)
        fresh = with_constants(launcher)  # a graph keeps its locks for good, and there are not enough for all of these
        for rows in ROWS:
            x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
            splits = {}
            for choice in choices:
                other = with_constants(launcher, block_inputs=choice[0], part_bytes=choice[1], crossover=ALWAYS)
                splits[choice] = other.plan(shape_of(weights[0], shape[1], x.dtype), rows).split
            tried = sorted({*splits.values(), *(split for split in SPLITS if split <= shape[1] // 64)})
            seconds = {split: time_split(fresh, weights, x, split) for split in tried}
            best = min(seconds.values())
            for choice, split in splits.items():
                loss[choice] += math.log(seconds[split] / best)
            times.append({"shape": shape, "bits": bits, "rows": rows, "seconds_by_split": seconds})
            print(f"{shape} {bits} bits, {rows} rows: " + ", ".join(f"{s}: {t * 1e6:.1f}" for s, t in seconds.items()))

    def far(choice: tuple[int, int]) -> float:
        return abs(math.log(choice[0] / Tuning.block_inputs)) + abs(math.log(choice[1] / Tuning.part_bytes))

    found = min(choices, key=lambda choice: (loss[choice], far(choice)))
    print(f"plans take {math.exp(loss[found] / len(times)):.3f} times as long as the best splits, on average")
    return dict(zip(("block_inputs", "part_bytes"), found, strict=True))


def find_dense_bytes(launcher: Launcher, times: list) -> int:
    """The best size of the dense weight's parts, over wide and narrow layers."""
    loss = dict.fromkeys(DENSE_MEGABYTES, 0.0)
    for shape, rows in itertools.product(DENSE_SHAPES, DENSE_ROWS):
        weights = operands(shape, 4, launcher)
        x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
        for megabytes in DENSE_MEGABYTES:
            seconds = time_split(with_constants(launcher, dense_bytes=megabytes << 20), weights, x, 0)
            print(f"{shape}, {rows} rows, {megabytes} MB at a time: {seconds * 1e6:.1f}")
            times.append({"shape": shape, "rows": rows, "dense_megabytes": megabytes, "seconds": seconds})
            loss[megabytes] += math.log(seconds)
    return min(loss, key=loss.__getitem__) << 20


def find_crossover(launcher: Launcher, bits: int, times: list) -> int:
    """The number of rows from which the dense path loses the least time over the first two shapes, of all of `MANY`."""
    gains = dict.fromkeys(MANY, 0.0)  # of the dense path, as logarithms
    for shape in SHAPES[:2]:
        weights = operands(shape, bits, launcher)
        for rows in MANY:
            x = torch.randn(rows, shape[1], dtype=torch.float16, device=launcher.device)
            plan = with_constants(launcher, crossover=ALWAYS).plan(shape_of(weights[0], shape[1], x.dtype), rows)
            fused, dense = (time_split(launcher, weights, x, split) for split in (plan.split, 0))
            print(f"{shape} {bits} bits, {rows} rows: fused {fused * 1e6:.1f}, dense {dense * 1e6:.1f}")
            times.append({"shape": shape, "bits": bits, "rows": rows, "fused_seconds": fused, "dense_seconds": dense})
            gains[rows] += math.log(fused / dense)
    return max((*MANY, 2 * MANY[-1]), key=lambda first: sum(gain for rows, gain in gains.items() if rows >= first))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for tune.json")
    parser.add_argument("--dry-run", action="store_true", help="leave the constants as they are")
    arguments = parser.parse_args()
    device = find_gpu(parser)
    measured, times = describe(device), []
    launcher = launcher_for(device)

    def keep(**changes: object) -> Launcher:
        changed = with_constants(launcher, **changes)
        report = {"measured": measured, "constants": dataclasses.asdict(changed.tuning)}
        write({**report, "times": times}, arguments.out / "tune.json")
        if not arguments.dry_run:
            write(report, DEVICES / file_name(str(measured["device"])))
        print(changed.tuning, flush=True)
        return changed

    launcher = keep(**find_split(launcher, times))
    launcher = keep(dense_bytes=find_dense_bytes(launcher, times))
    for bits in BITS:
        launcher = keep(crossover={**launcher.tuning.crossover, bits: find_crossover(launcher, bits, times)})


if __name__ == "__main__":
    main()
