"""Time of the solver, split into its parts, each beside the time of the matrix products that it cannot do without.

    python benchmarks/solver.py [--device cpu] [--json FILE] [--tokens 8192] [--repeats 3]

Parts: statistics (H from tokens), factorisation, sweep (grids, codes, error propagation), refinement (two rounds),
packing. Floors, in brackets and from the same process: the product x xT; a product with the Cholesky factorisation's
n^3 / 3 operations; the two products per block that bring a block up to date; two products H E. Times are the best of
the repeats, in seconds. Beside the statistics stand those of full products summed in float64, 1024 rows at a time, and
on a GPU ours of bfloat16, which blocks give there; beside the sweep, one with simulated grids, and where it ran on our
kernel also the same in torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from gptqkit.calibration.statistics import InputStatistics, full_float32
from gptqkit.export.formats import find_format
from gptqkit.kernels.trial import sweep_library
from gptqkit.quantizer import gptq, sweep
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.factor import factorize
from gptqkit.quantizer.methods import Moments
from gptqkit.quantizer.order import column_order
from gptqkit.quantizer.refine import refine

PARTS = ("statistics", "factorisation", "sweep", "refinement", "packing")
IN_FULL = "statistics of full products in float64"
IN_BFLOAT16 = "statistics of bfloat16"
IN_TORCH = "sweep in torch"
SIMULATED = "sweep with simulated grids"
FULL_ROWS = 1024
SHAPES = ((1024, 1024), (4096, 4096), (4096, 11008))  # (out, in)


def best_time(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def add_full_products(inputs: torch.Tensor) -> None:
    """The sum of x xT, both triangles, in float64."""
    total = torch.zeros(inputs.shape[1], inputs.shape[1], device=inputs.device, dtype=torch.float64)
    with full_float32():
        for part, columns in zip(total.split(FULL_ROWS), inputs.split(FULL_ROWS, dim=1), strict=True):
            part += columns.T @ inputs


def measure(rows: int, columns: int, config: QuantizeConfig, device: torch.device, tokens: int, repeats: int) -> dict:
    """One row of the table: parts and floors in seconds."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(device)
    inputs = torch.randn(tokens, columns, generator=generator).mul_(torch.rand(columns, generator=generator) + 0.1)
    inputs = inputs.to(device)
    statistics = InputStatistics(columns, device)
    statistics.update(inputs)
    hessian = statistics.hessian()
    order = column_order(
        hessian.diagonal(),
        config.group_size or columns,
        desc_act=config.desc_act,
        static_groups=config.static_groups,
        act_group_aware=bool(config.act_group_aware),
    )
    parts = {
        "statistics": best_time(lambda: InputStatistics(columns, device).update(inputs), device, repeats),
        IN_FULL: best_time(lambda: add_full_products(inputs), device, repeats),
        "factorisation": best_time(
            lambda: factorize(hessian, order.permutation, gptq.DAMPING, torch.float32), device, repeats
        ),
    }
    if device.type == "cuda":
        half = inputs.bfloat16()
        parts[IN_BFLOAT16] = best_time(lambda: InputStatistics(columns, device).update(half), device, repeats)
    layout = find_format(config.format)
    moments = Moments(hessian=hessian)  # keeps the factor, so that only the first of these solutions makes one
    solved = gptq.solve_gptq(weight, moments, config, layout.snap)
    parts["sweep"] = best_time(lambda: gptq.solve_gptq(weight, moments, config, layout.snap), device, repeats)
    sim = dataclasses.replace(config, grid="sim")
    parts[SIMULATED] = best_time(lambda: gptq.solve_gptq(weight, moments, sim, layout.snap), device, repeats)
    if sweep_library(weight) is not None:
        with mock.patch.object(sweep, "sweep_library", return_value=None):
            parts[IN_TORCH] = best_time(lambda: gptq.solve_gptq(weight, moments, config, layout.snap), device, repeats)
    damped, rounds = hessian.clone(), QuantizeConfig().refine_rounds
    damped.diagonal().add_(gptq.DAMPING * hessian.diagonal().mean())
    parts["refinement"] = best_time(lambda: refine(solved.weight, weight, damped, layout.snap, rounds), device, repeats)
    parts["packing"] = best_time(lambda: layout.pack(solved.weight), device, repeats)

    block = config.block_size
    error = weight.T.contiguous()
    upper = hessian
    inverse = hessian[:block, :block].contiguous()

    def products() -> None:
        for start in range(block, columns, block):
            error[start : start + block].addmm(inverse.T, upper[:start, start : start + block].T @ error[:start])

    floors = {
        "statistics": best_time(lambda: inputs.T @ inputs, device, repeats),
        "factorisation": best_time(lambda: hessian @ hessian[:, : columns // 6].contiguous(), device, repeats),
        "sweep": best_time(products, device, repeats),
        "refinement": rounds * best_time(lambda: hessian @ error, device, repeats),
    }
    quantizing = sum(parts[part] for part in PARTS[1:])
    ratio = quantizing / sum(floors[part] for part in PARTS[1:-1])
    return {"shape": [rows, columns], "seconds": parts, "floor_seconds": floors, "times_floor": ratio}


def main() -> None:
    """Measure every shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8192, help="calibration tokens of the statistics (default 8192)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    settings = {"bits": arguments.bits, "group_size": arguments.group_size}
    config = QuantizeConfig(method="gptq", sym=False, refine_rounds=0, **settings)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = torch.get_num_threads()
    print(f"{name}, {threads} threads, torch {torch.__version__}")
    print(f"{config.bits} bits, groups of {config.group_size}, asymmetric, {arguments.tokens} tokens; seconds (floor)")
    print(f"{'out x in':>14} | " + " | ".join(f"{part:>15}" for part in PARTS))
    results = []
    for rows, columns in SHAPES:
        result = measure(rows, columns, config, device, arguments.tokens, arguments.repeats)
        results.append(result)
        cells = []
        for part in PARTS:
            seconds = result["seconds"][part]
            floor = result["floor_seconds"].get(part)
            cells.append(f"{seconds:7.3f}" + (f" ({floor:.3f})" if floor is not None else ""))
        print(
            f"{rows:>6} x {columns:>5} | "
            + " | ".join(f"{cell:>15}" for cell in cells)
            + f" | all but statistics = {result['times_floor']:.2f} x their matrix products"
            + f" | {IN_FULL} {result['seconds'][IN_FULL]:.3f}"
            + f" = {result['seconds'][IN_FULL] / result['seconds']['statistics']:.2f} x ours"
            + "".join(
                f" | {name} {result['seconds'][name]:.3f}"
                for name in (IN_BFLOAT16, SIMULATED, IN_TORCH)
                if name in result["seconds"]
            ),
            flush=True,
        )
        if arguments.json:
            settings = {"bits": config.bits, "group_size": config.group_size, "tokens": arguments.tokens}
            report = {"device": name, "threads": threads, "torch": torch.__version__, **settings, "results": results}
            arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
