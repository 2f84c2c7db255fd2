"""Time of y = x weightT on packed weights, beside cuBLAS, torch's int4 kernel and a copy, in one run on one GPU.

    python benchmarks/gemm.py [--out benchmarks/results] [--bits 4] [--rows 1 16] [--shapes 4096x4096] [--seconds 300]

Every time is one of CUDA-graph replays over operands that rotate past the L2 cache. Columns: microseconds (bytes per
second of weight, x and y as a share of what a copy within the GPU's memory moves; speed-up over the dense product of
the same dtype by cuBLAS). "tinygemm" is torch's own int4 kernel, which computes in bfloat16 only. Writes gemm.json and,
where matplotlib is installed, gemm.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from layers import random_operands
from timing import clone_tensors, copies_past_cache, copy_bandwidth, describe, find_gpu, graph_time

from gptqkit.kernels.ops import launcher_for

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SHAPES = ("4096x4096", "8192x28672", "28672x8192", "4096x14336")  # out x in
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TINYGEMM = "tinygemm"


def size_of(tensors: tuple[torch.Tensor, ...]) -> int:
    """Bytes of all `tensors`."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def rotate(tensors: tuple[torch.Tensor, ...], device: torch.device) -> list[tuple[torch.Tensor, ...]]:
    """As many copies of a weight as it takes to leave the cache between two uses of one."""
    return [tensors, *(clone_tensors(tensors) for _ in range(copies_past_cache(size_of(tensors), device) - 1))]


def measure(weights: list[tuple[torch.Tensor, ...]], product, shape, dtype, rows, device) -> dict:
    """Seconds per number of rows of x, and the bytes that one product has to move."""
    outputs, inputs = shape
    results = {}
    for count in rows:
        x = torch.randn(count, inputs, device=device, dtype=dtype)
        seconds = graph_time(lambda weight, x=x: product(x, *weight), weights)
        moved = size_of(weights[0]) + x.element_size() * count * (inputs + outputs)
        results[count] = {"seconds": seconds, "bytes": moved}
    return results


def measure_dense(shape, dtype, rows, device) -> dict:
    """The product with a dense weight, by cuBLAS."""
    weight = (torch.randn(shape, device=device, dtype=dtype),)
    return measure(rotate(weight, device), torch.nn.functional.linear, shape, dtype, rows, device)


def measure_packed(shape, dtype, rows, device, bits, group_size) -> dict:
    """The product with a packed weight, on the path that the library chooses."""
    *tensors, bias, bits, group_size, outputs = random_operands(*shape, bits=bits, group_size=group_size, device=device)

    def product(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.gptqkit.linear(x, *weight, bias, bits, group_size, outputs)

    results = measure(rotate(tuple(tensors), device), product, shape, dtype, rows, device)
    for count, result in results.items():
        result["path"] = "fused" if launcher_for(device).choose_split(bits, count, *shape) else "dense"
    return results


def measure_tinygemm(shape, rows, device, group_size) -> dict:
    """The product by torch's int4 kernel."""
    outputs, inputs = shape
    words = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    packed = torch.ops.aten._convert_weight_to_int4pack(words, 8)
    grid = torch.rand(inputs // group_size, outputs, 2, dtype=torch.bfloat16, device=device) * inputs**-0.5

    def product(x: torch.Tensor, packed: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, packed, group_size, grid)

    return measure(rotate((packed, grid), device), product, shape, torch.bfloat16, rows, device)


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
    parser.add_argument("--bits", type=int, nargs="+", default=(2, 3, 4, 8))
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
    report = {**describe(device), "copy_bytes_per_second": copy, "group_size": arguments.group_size, "tables": []}
    print(f"{report['device']}, torch {report['torch']}, a copy moves {copy / 1e12:.2f} TB/s")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for dtype_name, shape_name in itertools.product(arguments.dtypes, arguments.shapes):
        if time.monotonic() - start > arguments.seconds:
            print(f"\nout of time: {shape_name} {dtype_name} and what follows is not measured")
            break
        shape, dtype = tuple(map(int, shape_name.split("x"))), DTYPES[dtype_name]
        columns = {"cuBLAS": measure_dense(shape, dtype, arguments.rows, device)}
        for bits in arguments.bits:
            columns[f"{bits} bits"] = measure_packed(shape, dtype, arguments.rows, device, bits, arguments.group_size)
        if dtype == torch.bfloat16 and 4 in arguments.bits:
            columns[TINYGEMM] = measure_tinygemm(shape, arguments.rows, device, arguments.group_size)
        print_table(f"{shape_name} (out x in), {dtype_name}", columns, copy)
        report["tables"].append({"shape": shape_name, "dtype": dtype_name, "columns": columns})
        (arguments.out / "gemm.json").write_text(json.dumps(report, indent=1) + "\n")  # a late failure loses nothing
    plot(report, arguments.out / "gemm.png")


if __name__ == "__main__":
    main()
