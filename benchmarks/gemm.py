"""Time of y = x weightT on packed weights, beside cuBLAS, torch's int4 kernel and a copy, in one run on one GPU.

    python benchmarks/gemm.py [--out benchmarks/results] [--bits 4] [--rows 1 16] [--shapes 4096x4096] [--seconds 300]

Every time is one of CUDA-graph replays over operands that rotate past the L2 cache. Columns: microseconds of the path
that the library chooses (bytes per second of weight, x and y as a share of what a copy within the GPU's memory moves;
speed-up over the dense product of the same dtype by cuBLAS); the file has both paths' times. Before it is timed, every
product is compared with that of the dequantized weight, at every split up to eight; wrong ones are listed in the file,
and make the program end with 1. "tinygemm" is torch's own int4 kernel, which computes in bfloat16 only; "Q4_K", on the
first shape, are 4 bits with float32 scales and offsets of groups of 32. Writes gemm.json after every column and, where
matplotlib is installed, gemm.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from pathlib import Path

import torch
from layers import random_operands, shape_of
from timing import clone_tensors, copies_past_cache, copy_bandwidth, describe, find_gpu, graph_time, write
from torch.nn import functional

from gptqkit.kernels.ops import BITS, Launcher, launcher_for

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SHAPES = ("8192x28672", "4096x4096", "4096x14336", "1024x4096")  # out x in
SPLITS = (None, *range(9))  # the library's choice, the dense path, one to eight blocks
LARGEST_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of a product, relative: four roundings of the dtype
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TINYGEMM = "tinygemm"
LONGEST_FUSED = 512  # rows of x: beyond them the dense path is faster by far


def size_of(tensors: tuple[torch.Tensor, ...]) -> int:
    """Bytes of all `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def rotate(tensors: tuple[torch.Tensor, ...], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """As many copies of a weight as it takes to leave the cache between two uses of one."""
    return [tensors, *(clone_tensors(tensors) for _ in range(copies_past_cache(size_of(tensors), device) - 1))]


def time_of(product, weights: list[tuple[torch.Tensor, ...]], x: torch.Tensor, outputs: int) -> dict:
    """Seconds of one product, and the bytes that it has to move."""
    moved = size_of(weights[0]) + x.element_size() * x.shape[0] * (x.shape[1] + outputs)
    return {"seconds": graph_time(lambda weight: product(x, *weight), weights), "bytes": moved}


def measure_dense(shape, dtype, rows, device) -> dict:
    """The product with a dense weight, by cuBLAS."""
    weights = rotate((torch.randn(shape, device=device, dtype=dtype),), device)
    inputs = [torch.randn(count, shape[1], device=device, dtype=dtype) for count in rows]
    return {len(x): time_of(functional.linear, weights, x, shape[0]) for x in inputs}


def measure_packed(shape, dtype, rows, device, bits, group_size, wrong: list[str], free: bool = False) -> dict:
    """The product with a packed weight, on both paths and at every split; what is not right is added to `wrong`."""
    operands = random_operands(*shape, bits=bits, group_size=group_size, device=device, free=free)
    *tensors, bias, bits, group_size, outputs = operands
    sizes = (bits, group_size, outputs)
    launcher, shape_of_layer = launcher_for(device), shape_of(operands, shape[1], dtype)
    weights = rotate(tuple(tensors), device)
    dense = torch.ops.gptqkit.dequantize(*tensors, *sizes, shape[1], dtype)
    results = {}
    for count in rows:
        x = torch.randn(count, shape[1], device=device, dtype=dtype)
        expected = functional.linear(x, dense).float()
        for split in SPLITS if count <= LONGEST_FUSED else SPLITS[:2]:
            error = torch.ops.gptqkit.linear(x, *tensors, bias, *sizes, split).float().sub_(expected).norm()
            if not error <= LARGEST_ERROR[dtype] * expected.norm():
                grids = f"{bits} bits in groups of {group_size}"
                wrong.append(f"{shape}, {grids}, {dtype}, {count} rows, split {split}: {error / expected.norm()}")
                print(f"wrong: {wrong[-1]}", flush=True)
        chosen = launcher.plan(shape_of_layer, count).split
        fused = chosen or unlimited(launcher).plan(shape_of_layer, count).split
        paths = {"fused": fused, "dense": 0} if chosen or count <= LONGEST_FUSED else {"dense": 0}
        times = {}
        for path, split in paths.items():
            times[path] = time_of(
                lambda x, *weight, split=split: torch.ops.gptqkit.linear(x, *weight, bias, *sizes, split),
                weights,
                x,
                outputs,
            )
        path = "fused" if chosen else "dense"
        seconds = {f"{name}_seconds": result["seconds"] for name, result in times.items()}
        results[count] = {**times[path], **seconds, "path": path, "split": fused}
    return results


def unlimited(launcher: Launcher) -> Launcher:
    """The launcher, always on the fused path."""
    tuning = dataclasses.replace(launcher.tuning, crossover=dict.fromkeys(BITS, 1 << 30))
    return Launcher(launcher.library, launcher.device, tuning, launcher.properties)


def measure_tinygemm(shape, rows, device, group_size) -> dict:
    """The product by torch's int4 kernel."""
    outputs, inputs = shape
    words = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(words, 8)
    grid = torch.rand(inputs // group_size, outputs, 2, dtype=torch.bfloat16, device=device) * inputs**-0.5
    weights = rotate((packed, grid), device)

    def product(x: torch.Tensor, packed: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, packed, group_size, grid)

    activations = [torch.randn(count, inputs, device=device, dtype=torch.bfloat16) for count in rows]
    return {len(x): time_of(product, weights, x, outputs) for x in activations}


def print_table(title: str, columns: dict[str, dict], copy: float) -> None:
    """One shape and dtype: a line per number of rows; the first column is the dense product."""
    print(f"\n{title}")
    print(f"{'rows':>5} | " + " | ".join(f"{name:^22}" for name in columns))
    dense = next(iter(columns.values()))
    for count in dense:
        cells = []
        for results in columns.values():
            result = results[count]
            share = result["bytes"] / result["seconds"] / copy
            speedup = dense[count]["seconds"] / result["seconds"]
            cells.append(f"{result['seconds'] * 1e6:8.1f} ({share:4.0%}; {speedup:4.2f}x)")
        print(f"{count:>5} | " + " | ".join(f"{cell:>22}" for cell in cells), flush=True)


def plot(report: dict, path: Path) -> None:
    """Speed-up over cuBLAS against the rows of x, a panel per shape and dtype; skipped without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = report["tables"]
    wide = max(1, len({table["shape"] for table in tables}))
    high = -(-len(tables) // wide)
    figure, panels = pyplot.subplots(high, wide, figsize=(4 * wide, 3.2 * high), squeeze=False, sharex=True)
    for panel, table in zip(panels.flat, tables, strict=False):
        dense = table["columns"]["cuBLAS"]
        for name, results in table["columns"].items():
            speedups = [dense[count]["seconds"] / results[count]["seconds"] for count in results]
            panel.plot([int(count) for count in results], speedups, marker=".", label=name)
        panel.set_xscale("log", base=2)
        panel.set_title(f"{table['shape']} {table['dtype']}", fontsize=9)
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.supxlabel("rows of x")
    figure.supylabel("speed-up over cuBLAS")
    figure.suptitle(f"{report['device']}, torch {report['torch']}, groups of {report['group_size']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=(4, 2, 3, 8))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of x")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTxIN")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=600, help="start no further table after these (default 600)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    arguments = parser.parse_args()
    device = find_gpu(parser)
    start = time.monotonic()
    copy = copy_bandwidth(device)
    report = {**describe(device), "copy_bytes_per_second": copy, "group_size": arguments.group_size}
    report |= {"wrong": [], "tables": []}
    print(f"{report['device']}, torch {report['torch']}, a copy moves {copy / 1e12:.2f} TB/s")
    for dtype_name, shape_name in itertools.product(arguments.dtypes, arguments.shapes):
        if time.monotonic() - start > arguments.seconds:
            print(f"\nout of time: {shape_name} {dtype_name} and what follows is not measured")
            break
        shape, dtype = tuple(map(int, shape_name.split("x"))), DTYPES[dtype_name]
        columns = {"cuBLAS": measure_dense(shape, dtype, arguments.rows, device)}
        report["tables"].append({"shape": shape_name, "dtype": dtype_name, "columns": columns})
        for bits in arguments.bits:
            how = (shape, dtype, arguments.rows, device, bits, arguments.group_size)
            columns[f"{bits} bits"] = measure_packed(*how, report["wrong"])
            write(report, arguments.out / "gemm.json")  # a late failure loses nothing
        if shape_name == arguments.shapes[0] and 4 in arguments.bits:
            columns["Q4_K"] = measure_packed(shape, dtype, arguments.rows, device, 4, 32, report["wrong"], free=True)
        if dtype == torch.bfloat16 and 4 in arguments.bits:
            try:
                columns[TINYGEMM] = measure_tinygemm(shape, arguments.rows, device, arguments.group_size)
            except RuntimeError as error:  # torch's own, which must not end ours
                print(f"{TINYGEMM}: {error}")
        print_table(f"{shape_name} (out x in), {dtype_name}", columns, copy)
        write(report, arguments.out / "gemm.json")
    plot(report, arguments.out / "gemm.png")
    if report["wrong"]:
        raise SystemExit(f"{len(report['wrong'])} products are wrong")


if __name__ == "__main__":
    main()
