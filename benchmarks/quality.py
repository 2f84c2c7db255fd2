"""Perplexity of the example model for every method, width, grid and order of columns.

    python benchmarks/quality.py [--dataset NAME=FILE ...] [--windows N] [--json FILE]

Every row is the real thing from end to end: quantize, write a gptq_v2 checkpoint, reload it, run its quantized layers.
{rtn, gptq, gptaq} x {4, 3, 2 bits} x {sym, asym} x {plain, act_group_aware, desc_act, desc_act + static_groups}, the
sweeps as they are; gptq and qep refined, and the default, in the default order; all damped by 0.01 as published.
Rounding has no order of columns. Rows that the JSON file already holds for the same settings are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gptqkit
from gptqkit.loading import load_float

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ORDERS: dict[str, dict[str, bool]] = {
    "plain": {"act_group_aware": False},
    "act_group_aware": {"act_group_aware": True},
    "desc_act": {"desc_act": True},
    "desc_act + static": {"desc_act": True, "static_groups": True},
}
METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "gptq": {"method": "gptq", "refine_rounds": 0},
    "gptaq": {"method": "gptaq", "refine_rounds": 0},
    "gptq + refined": {"method": "gptq"},
    "qep + refined": {"method": "qep"},
    "balanced": {"quality": "balanced"},
}
KINDS = [
    ("rtn", "plain"),
    *itertools.product(("gptq", "gptaq"), ORDERS),
    *itertools.product(("gptq + refined", "qep + refined", "balanced"), ("act_group_aware",)),
]


def rows() -> Iterator[dict[str, Any]]:
    """Every combination of method, bits, grid and order."""
    for bits, sym, (method, order) in itertools.product((4, 3, 2), (False, True), KINDS):
        yield {"method": method, "bits": bits, "sym": sym, "order": order}


def markdown(report: dict[str, Any]) -> str:
    """The rows as a table, one line per method, grid and order, one pair of columns per width."""
    names = list(report["datasets"])
    lines = [
        "| method | grid | order | " + " | ".join(f"{bits} bits: {' / '.join(names)}, KL" for bits in (4, 3, 2)) + " |",
        "|---|---|---|---|---|---|",
    ]
    by_key = {(row["method"], row["sym"], row["order"], row["bits"]): row for row in report["rows"]}
    for sym in (False, True):
        for method, order in KINDS:
            cells = []
            for bits in (4, 3, 2):
                row = by_key.get((method, sym, order, bits))
                if row is None:
                    cells.append("")
                    continue
                perplexities = " / ".join(f"{row['scores'][name]['perplexity']:.2f}" for name in names)
                cells.append(f"{perplexities}, {row['scores'][names[0]]['kl_divergence']:.4f}")
            grid = "sym" if sym else "asym"
            lines.append(f"| {method} | {grid} | {'' if method == 'rtn' else order} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EXAMPLES / "models/gutenberg-llama-6m"))
    parser.add_argument("--calibration", default=str(EXAMPLES / "data/calibration.txt"))
    parser.add_argument("--samples", type=int, default=32, help="calibration windows (default 32)")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens per window (default 512)")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--windows", type=int, default=48, help="windows evaluated per data set (default 48)")
    parser.add_argument("--dataset", action="append", metavar="NAME=FILE", help="default: both examples/data sets")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=Path("quality.json"))
    arguments = parser.parse_args()
    given = arguments.dataset or [
        f"wikitext2={EXAMPLES / 'data/wikitext2-test.txt'}",
        f"books={EXAMPLES / 'data/heldout.txt'}",
    ]
    datasets = dict(item.split("=", 1) for item in given)
    settings = {
        "model": Path(arguments.model).name,
        "calibration": Path(arguments.calibration).name,
        "samples": arguments.samples,
        "group_size": arguments.group_size,
        "datasets": {name: Path(file).name for name, file in datasets.items()},
        "windows": arguments.windows,
        "sequence_length": arguments.sequence_length,
    }
    report: dict[str, Any] = {**settings, "rows": []}
    if arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        if {key: before.get(key) for key in settings} == settings:
            report = before
    model, tokenizer = load_float(arguments.model, device=arguments.device)
    calibration = gptqkit.Calibration(
        arguments.calibration, samples=arguments.samples, sequence_length=arguments.sequence_length
    )
    how = gptqkit.Evaluation(
        sequence_length=arguments.sequence_length, max_windows=arguments.windows, device=arguments.device
    )

    def scores_of(what: Any, reference: Any | None) -> dict[str, Any]:
        return {
            name: gptqkit.evaluate(what, file, how, reference=reference, tokenizer=tokenizer).to_dict()
            for name, file in datasets.items()
        }

    if "float" not in report:
        report["float"] = scores_of(model, None)
    report["device"] = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.machine()
    report["versions"] = {"gptqkit": gptqkit.__version__, "torch": torch.__version__}
    print("float", {name: round(scores["perplexity"], 3) for name, scores in report["float"].items()}, flush=True)
    done = {(row["method"], row["bits"], row["sym"], row["order"]) for row in report["rows"]}
    for row in rows():
        if (row["method"], row["bits"], row["sym"], row["order"]) in done:
            continue
        config = gptqkit.QuantizeConfig(
            **METHODS[row["method"]],
            bits=row["bits"],
            sym=row["sym"],
            group_size=arguments.group_size,
            damp_percent=0.01,
            **ORDERS[row["order"]],
        )
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "checkpoint"
            run = gptqkit.Run(device=arguments.device)
            result = gptqkit.quantize(arguments.model, calibration, out, config, run=run)
            seconds = time.perf_counter() - start
            scores = scores_of(out, model)
        modules = result.report.modules
        report["rows"].append(
            {
                **row,
                "scores": scores,
                "seconds": seconds,
                "mean_error": sum(module.error or 0.0 for module in modules) / len(modules),
                "worse_than_rounding": sum(module.worse_than_rounding for module in modules),
            }
        )
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(row, {name: round(found["perplexity"], 3) for name, found in scores.items()}, flush=True)
    print(markdown(report))


if __name__ == "__main__":
    main()
