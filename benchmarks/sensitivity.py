"""Whether `target_bits` knows where bits matter: predicted losses beside the KL divergence that each part causes alone.

    python benchmarks/sensitivity.py [--samples 32] [--count 32] [--json FILE]

Some parts of the example model (Linears that share an input), each with some bits and group size, are drawn; each is
quantized alone, all else in floating point, and the divergence of the whole model is measured. Prints the correlation
of ranks. A quarter of an hour on one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from pathlib import Path

import torch

import gptqkit
from gptqkit.calibration.samples import load_samples
from gptqkit.distributed import join
from gptqkit.loading import load_float
from gptqkit.model import FloatModel
from gptqkit.progress import silent
from gptqkit.sensitivity import PLAIN, sensitivities
from gptqkit.walking import FloatWalk

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL = EXAMPLES / "models" / "gutenberg-llama-6m"
TEXT = EXAMPLES / "data" / "heldout.txt"


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's, of two lists without ties."""
    ranks = [torch.tensor(each, dtype=torch.float64).argsort().argsort().double() for each in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def main() -> None:
    """Predict, measure, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="calibration windows of 512 tokens (default 32)")
    parser.add_argument("--windows", type=int, default=16, help="windows of 512 tokens evaluated (default 16)")
    parser.add_argument("--count", type=int, default=32, help="how many are drawn (default 32)")
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    arguments = parser.parse_args()
    text = gptqkit.Calibration(EXAMPLES / "data/calibration.txt", samples=arguments.samples, sequence_length=512)
    run = gptqkit.Run(device="cpu", overwrite=True)
    reference, tokenizer = load_float(MODEL, device="cpu")
    with join(torch.device("cpu")) as processes, tempfile.TemporaryDirectory() as folder:
        config = gptqkit.QuantizeConfig(sym=False, method="gptq", target_bits=4, **PLAIN)
        samples = load_samples(text, tokenizer, sequence_length=512)
        walk = FloatWalk(FloatModel(MODEL), samples, processes, run, Path(folder) / "out")
        parts, members, _ = sensitivities(walk, config, silent)
    every = [(name, candidate) for name, candidates in parts.items() for candidate in candidates if candidate.loss]
    how, rows = gptqkit.Evaluation(sequence_length=512, max_windows=arguments.windows), []
    for name, candidate in random.Random(0).sample(every, arguments.count):
        own = "|".join(re.escape(each.name) for each in members[name])
        config = gptqkit.QuantizeConfig(
            bits=candidate.bits,
            group_size=candidate.group_size,
            sym=False,
            method="gptq",
            overrides={rf"^(?!({own})$)": {"skip": True}},
            **PLAIN,
        )
        with tempfile.TemporaryDirectory() as folder:
            gptqkit.quantize(MODEL, text, Path(folder) / "out", config, run=run)
            scores = gptqkit.evaluate(Path(folder) / "out", TEXT, how, reference=reference, tokenizer=tokenizer)
        row = {"part": name, "bits": candidate.bits, "group_size": candidate.group_size}
        rows.append({**row, "predicted": candidate.loss, "kl_divergence": scores.kl_divergence})
        print(*rows[-1].values(), flush=True)
    found = rank_correlation([row["predicted"] for row in rows], [row["kl_divergence"] for row in rows])
    print(f"correlation of ranks: {found:.3f}")
    if arguments.json:
        settings = {"samples": arguments.samples, "windows": arguments.windows, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**settings, "rank_correlation": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
