"""Our methods beside other programs': the same tokens, the same evaluation, divergence, perplexity and time.

    python benchmarks/peers.py --work FOLDER [--environments FOLDER] [--bits N ...] [--only NAME ...] [--json FILE]

Others run by `peer.py` in their own environments (`tests/clients/environments gptqmodel llmcompressor autoround`).
Groups of 128 (or `--group-size`), asymmetric (or `--sym`). What each writes is read by our `evaluate`; auto-round
writes its weights multiplied out. `--damp-percent 0.01` damps ours as published. Time is from the loaded program to the
written checkpoint, with all threads. Rows that the JSON file already holds for the same settings are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from steps import EXAMPLES, TEXTS, remember, rows_so_far

import gptqkit
from gptqkit.calibration.samples import load_samples
from gptqkit.loading import load_float

GPTAQ = {"alpha": 0.25}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTQModel": ("gptqmodel", {}),
    "GPTQModel, mse": ("gptqmodel", {"mse": 2.4}),
    "GPTQModel, mse, gptaq": ("gptqmodel", {"mse": 2.4, "gptaq": GPTAQ}),
    "GPTQModel, mse, gptaq, desc_act": ("gptqmodel", {"mse": 2.4, "gptaq": GPTAQ, "desc_act": True}),
    "llm-compressor": ("llmcompressor", {}),
    "llm-compressor, mse, static order": ("llmcompressor", {"observer": "mse", "actorder": "static"}),
    "auto-round, light": ("autoround", {"iters": 50, "lr": 5e-3}),
    "auto-round": ("autoround", {}),
    "auto-round, 1000 steps": ("autoround", {"iters": 1000}),
}
OURS: dict[str, dict[str, Any]] = {
    "gptqkit, fast": {"quality": "fast"},
    "gptqkit, qep, sim": {"method": "qep", "grid": "sim"},
    "gptqkit, loaq, sim": {"method": "loaq", "grid": "sim"},
    "gptqkit, loaq, sim, learned": {"method": "loaq", "grid": "sim", "learn_iterations": 40},
    "gptqkit, qep, sim, learned": {"method": "qep", "grid": "sim", "learn_iterations": 40},
    "gptqkit, balanced": {"quality": "balanced"},
    "gptqkit, best": {"quality": "best"},
}
VARIABLES = {"GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1"}  # GPTQModel's own count may be too few for its pool


def run_peer(name: str, bits: int, arguments: argparse.Namespace, tokens: Path) -> tuple[Path, float]:
    """Return what another program wrote, and its seconds."""
    program, settings = PEERS[name]
    out = arguments.work / f"{name.replace(', ', '-').replace(' ', '-')}-w{bits}"
    shutil.rmtree(out, ignore_errors=True)
    how = ["--tokens", tokens, "--out", out, "--group-size", arguments.group_size]
    how += ["--settings", json.dumps({"bits": bits, "sym": arguments.sym, **settings})]
    script, python = Path(__file__).with_name("peer.py"), arguments.environments.absolute() / program / "bin/python"
    with out.with_suffix(".log").open("w") as log:
        command = [str(each) for each in (python, script, program, Path(arguments.model).absolute(), *how)]
        where = {"cwd": arguments.work, "env": os.environ | VARIABLES}  # some leave logs where they are started
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, **where)
        log.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"{name} failed; see {log.name}")
    folder = next(out.glob("**/config.json")).parent
    return folder, json.loads(done.stdout.splitlines()[-1])["seconds"]


def run_ours(name: str, bits: int, arguments: argparse.Namespace, tokens: Path) -> tuple[Path, float]:
    """Return what we wrote, and our seconds."""
    out, grid = arguments.work / "ours", {"bits": bits, "group_size": arguments.group_size, "sym": arguments.sym}
    config = gptqkit.QuantizeConfig(**grid, damp_percent=arguments.damp_percent, **OURS[name])
    start = time.perf_counter()
    run = gptqkit.Run(device="cpu", overwrite=True)
    gptqkit.quantize(arguments.model, gptqkit.Calibration(tokens), out, config, run=run)
    return out, time.perf_counter() - start


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line per width and program."""
    lines = ["| bits | program | KL | perplexity | seconds |", "|---|---|---|---|---|"]
    for bits, name in itertools.product(sorted({row["bits"] for row in rows}, reverse=True), [*PEERS, *OURS]):
        for row in rows:
            if (row["bits"], row["name"]) == (bits, name):
                divergence = " / ".join(f"{scores['kl_divergence']:.4f}" for scores in row["scores"].values())
                perplexity = " / ".join(f"{scores['perplexity']:.2f}" for scores in row["scores"].values())
                seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
                lines.append(f"| {bits} | {name} | {divergence} | {perplexity} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=lambda text: Path(text).absolute(), required=True, help="folder for what they write"
    )
    parser.add_argument("--environments", type=Path, default=Path(".clients"))
    parser.add_argument("--model", default=str(EXAMPLES / "models/gutenberg-llama-6m"))
    parser.add_argument("--calibration", nargs="+", default=[str(EXAMPLES / "data/calibration.txt")], metavar="FILE")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows of 512 tokens (default 128)")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--sym", action="store_true", help="symmetric groups")
    parser.add_argument("--damp-percent", type=float, help="for our rows (default: by tokens)")
    parser.add_argument("--windows", type=int, default=40, help="windows evaluated per text (default 40)")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2], choices=(2, 3, 4))
    parser.add_argument("--only", nargs="+", default=[*PEERS, *OURS], choices=[*PEERS, *OURS], metavar="NAME")
    parser.add_argument("--json", type=Path, default=Path("peers.json"))
    arguments = parser.parse_args()
    report = rows_so_far(arguments, "samples", "windows", "group_size", "sym", "damp_percent")
    model, tokenizer = load_float(arguments.model, device="cpu")
    remember(model)
    text = gptqkit.Calibration(arguments.calibration, samples=arguments.samples, sequence_length=512)
    tokens = arguments.work / "tokens.safetensors"
    arguments.work.mkdir(parents=True, exist_ok=True)
    save_file({"input_ids": load_samples(text, tokenizer, sequence_length=512).input_ids}, tokens)
    how = gptqkit.Evaluation(sequence_length=512, max_windows=arguments.windows)
    done = {(row["bits"], row["name"]) for row in report["rows"]}
    for bits, name in itertools.product(arguments.bits, arguments.only):
        if (bits, name) in done:
            continue
        out, seconds = (run_peer if name in PEERS else run_ours)(name, bits, arguments, tokens)
        scores = {
            each: gptqkit.evaluate(out, file, how, reference=model, tokenizer=tokenizer).to_dict()
            for each, file in TEXTS.items()
        }
        report["rows"].append({"bits": bits, "name": name, "seconds": seconds, "scores": scores})
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        found = {each: round(value["kl_divergence"], 4) for each, value in scores.items()}
        print(bits, name, round(seconds), found, file=sys.stderr, flush=True)
    print(markdown(report["rows"]))


if __name__ == "__main__":
    main()
