"""What each step beyond GPTQ buys: divergence, perplexity and time, alone and together.

    python benchmarks/steps.py [--difficult] [--bits N ...] [--seeds N ...] [--only NAME ...] [--json FILE]

Every row is the real thing from end to end: quantize, write a gptq_v2 checkpoint, reload it, run its quantized layers.
`--calibration` takes several files. `--damp-percent 0.01` damps as published. `--difficult` first rescales the model
so that a few channels that its Linears receive are 30 times as large, as in large models, and its predictions are the
same. Rows that the JSON file already holds for the same settings are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import gptqkit
from gptqkit.loading import load_float

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STEPS: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq", "refine_rounds": 0},
    "gptq + sim": {"method": "gptq", "grid": "sim", "refine_rounds": 0},
    "gptq + tuned": {"method": "gptq", "refine_rounds": 0, "tune_epochs": 4},
    "fast": {"quality": "fast"},
    "gptaq": {"method": "gptaq", "refine_rounds": 0},
    "gptaq + refined": {"method": "gptaq"},
    "qep": {"method": "qep", "refine_rounds": 0},
    "qep + sim": {"method": "qep", "grid": "sim", "refine_rounds": 0},
    "qep + sim + refined": {"method": "qep", "grid": "sim"},
    "loaq + sim + refined": {"method": "loaq", "grid": "sim"},
    "qep + sim + refined + learned": {"method": "qep", "grid": "sim", "learn_iterations": 40},
    "balanced": {"quality": "balanced"},
    "qep + sim + refined + tuned": {"method": "qep", "grid": "sim", "tune_epochs": 4},
    "best": {"quality": "best"},
    "qep + sim + refined + rotated": {"method": "qep", "grid": "sim", "rotated": True},
    "groups of 64": {"method": "qep", "grid": "sim", "group_size": 64},
    "3.3 bits on average": {"method": "qep", "grid": "sim", "target_bits": 3.3},
}
BASE = "gptaq"
TEXTS = {"wikitext2": EXAMPLES / "data/wikitext2-test.txt", "books": EXAMPLES / "data/heldout.txt"}


def make_difficult(path: str, out: Path, *, factor: float = 30.0, count: int = 4) -> None:
    """Write a Llama of which `count` channels behind every norm, and between up and down, are `factor` times as large.

    What reads them has weights that are as much smaller, so that its logits are the same but for rounding.
    """
    model, generator = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), torch.Generator().manual_seed(0)
    behind = torch.randperm(model.config.hidden_size, generator=generator)[:count]
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
            }
            for norm, linears in readers.items():
                norm.weight[behind] *= factor
                for linear in linears:
                    linear.weight[:, behind] /= factor
            between = torch.randperm(model.config.intermediate_size, generator=generator)[:count]
            mlp.up_proj.weight[between] *= factor
            mlp.down_proj.weight[:, between] /= factor
        tokens = torch.arange(256)[None]
        before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(tokens).logits
        apart = float((model(tokens).logits - before).abs().max())
    print(f"difficult: logits differ by at most {apart:.1e}", flush=True)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(path).save_pretrained(out)


def remember(model: Any) -> None:
    """Let a float model answer what it was asked before from memory: all checkpoints get the same tokens."""
    forward, known = model.forward, {}

    def answer(input_ids: torch.Tensor, **rest: Any) -> Any:
        key = (tuple(input_ids.shape), input_ids.numpy().tobytes())
        if key not in known:
            known[key] = forward(input_ids=input_ids, **rest)
        return known[key]

    model.forward = answer


def mean(rows: list[dict[str, Any]], text: str, key: str) -> float:
    """The mean over rows of one score."""
    return statistics.mean(row["scores"][text][key] for row in rows)


def spread(rows: list[dict[str, Any]], text: str, key: str, digits: int) -> str:
    """The same with the largest distance from it."""
    middle = mean(rows, text, key)
    apart = max(abs(row["scores"][text][key] - middle) for row in rows)
    return f"{middle:.{digits}f}" + (f" ± {apart:.{digits}f}" if len(rows) > 1 else "")


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line per width and step: means over seeds with their largest distance from it, and KL beside `BASE`'s."""
    lines = ["| bits | step | seeds | KL | of gptaq's | perplexity | seconds |", "|---|---|---|---|---|---|---|"]
    for bits, step in itertools.product(sorted({row["bits"] for row in rows}, reverse=True), STEPS):
        own = [row for row in rows if (row["bits"], row["step"]) == (bits, step)]
        seeds = {row["seed"] for row in own}
        base = [row for row in rows if (row["bits"], row["step"]) == (bits, BASE) and row["seed"] in seeds]
        if not own:
            continue
        texts = list(own[0]["scores"])

        divergence = " / ".join(spread(own, text, "kl_divergence", 4) for text in texts)
        kept = ((mean(own, text, "kl_divergence"), mean(base, text, "kl_divergence")) for text in texts if base)
        share = " / ".join(f"{100 * mine / its:.0f} %" for mine, its in kept)
        perplexity = " / ".join(spread(own, text, "perplexity", 2) for text in texts)
        times = [row["seconds"] for row in own if row["seconds"] is not None]
        seconds = f"{statistics.mean(times):.0f}" if times else ""
        lines.append(f"| {bits} | {step} | {len(own)} | {divergence} | {share} | {perplexity} | {seconds} |")
    return "\n".join(lines)


def rows_so_far(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return what the JSON file holds for the same settings, `names` among them, or the start of such a report."""
    settings = {name: getattr(arguments, name) for name in names} | {"model": Path(arguments.model).name}
    settings["calibration"] = [Path(file).name for file in arguments.calibration]
    settings |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    before = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    return before if settings.items() <= before.items() else {**settings, "rows": []}


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(EXAMPLES / "models/gutenberg-llama-6m"))
    parser.add_argument("--calibration", nargs="+", default=[str(EXAMPLES / "data/calibration.txt")], metavar="FILE")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows of 512 tokens (default 128)")
    parser.add_argument("--windows", type=int, default=40, help="windows evaluated per text (default 40)")
    parser.add_argument("--damp-percent", type=float, help="for all rows (default: by tokens)")
    parser.add_argument("--difficult", action="store_true", help="with a few channels 30 times as large")
    parser.add_argument("--bits", type=int, nargs="+", default=[2], choices=(2, 3, 4))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=list(STEPS), choices=list(STEPS), metavar="NAME")
    parser.add_argument("--json", type=Path, default=Path("steps.json"))
    arguments = parser.parse_args()
    report = rows_so_far(arguments, "samples", "windows", "difficult", "damp_percent")
    model, tokenizer = load_float(arguments.model, device="cpu")
    remember(model)
    how = gptqkit.Evaluation(sequence_length=512, max_windows=arguments.windows)
    done = {(row["bits"], row["seed"], row["step"]) for row in report["rows"]}
    sources = Path(tempfile.mkdtemp(prefix="steps-"))
    given = sources / "difficult" if arguments.difficult else Path(arguments.model)
    if arguments.difficult:
        make_difficult(arguments.model, given)
    for bits, seed, step in itertools.product(arguments.bits, arguments.seeds, arguments.only):
        if (bits, seed, step) in done:
            continue
        text = gptqkit.Calibration(arguments.calibration, samples=arguments.samples, sequence_length=512, seed=seed)
        how_to = dict(STEPS[step])
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=sources) as folder:
            out, source = Path(folder) / "checkpoint", given
            if how_to.pop("rotated", False):
                source = Path(folder) / "rotated"
                gptqkit.rotate(given, source)
            config = gptqkit.QuantizeConfig(bits=bits, sym=False, damp_percent=arguments.damp_percent, **how_to)
            gptqkit.quantize(source, text, out, config, run=gptqkit.Run(device="cpu"))
            seconds = time.perf_counter() - start
            scores = {
                name: gptqkit.evaluate(out, file, how, reference=model, tokenizer=tokenizer).to_dict()
                for name, file in TEXTS.items()
            }
        report["rows"].append({"bits": bits, "seed": seed, "step": step, "seconds": seconds, "scores": scores})
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
        print(bits, seed, step, {name: round(found["kl_divergence"], 4) for name, found in scores.items()}, flush=True)
    shutil.rmtree(sources)
    print(markdown(report["rows"]))


if __name__ == "__main__":
    main()
