"""Random settings on tiny models of several families: what is written is what the solver had.

    python tests/random_settings.py [--first 0] [--count 100] [--json FILE]

For each number a family and settings are drawn from it. The results:

    ok       the loaded model computes what the float model does with the checkpoint's weights in it; a job stopped
             somewhere and resumed wrote the same bytes; another format, where it can hold them, has the same weights
    refused  one line said why, before any work
    FAILED   anything else; the exit code is then 1
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers

import families
import gptqkit
from support.jobs import contents

FAMILIES = {
    "language model": "bloom deepseek_v3 falcon gpt2 gpt_oss jamba llama mamba mixtral olmo2 opt phi3 qwen3_moe "
    "qwen3_next",
    "encoder": "bert modernbert",
    "encoder-decoder": "bart t5",
    "composite": "llava qwen2_vl",
}
FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors")
CHOICES = {  # by setting: how often it is drawn, and from what
    "bits": (0.8, (2, 3, 4, 8)),
    "group_size": (0.8, (-1, 16, 32, 64, 128)),
    "sym": (0.6, (True, False)),
    "format": (0.6, FORMATS),
    "quality": (0.6, ("fast", "balanced", "best")),
    "method": (0.4, ("rtn", "gptq", "gptaq", "qep", "loaq")),
    "desc_act": (0.3, (True,)),
    "static_groups": (0.3, (True,)),
    "damp_percent": (0.2, (1e-6, 0.01, 0.1)),
    "grid": (0.3, ("minmax", "mse", "sim")),
    "refine_rounds": (0.3, (0, 1, 3)),
    "two_sided": (0.3, (True, False)),
    "true_sequential": (0.2, (False,)),
    "block_size": (0.1, (1, 7, 32)),
    "float64": (0.1, (True,)),
    "skip_nonfinite": (0.1, (True,)),
    "lm_head": (0.1, (True,)),
    "target_bits": (0.1, (2.6, 3.3, 5.7)),
    "learn_iterations": (1.0, (0, 2)),
    "tune_epochs": (1.0, (0, 0, 1)),
    "overrides": (0.2, ({r"\.0\.": {"bits": 8}}, {r"\.1\.": {"skip": True}}, {r"\.1\.": {"group_size": -1}})),
}
RUNS = {
    "batch_size": (0.5, (1, 2, 3, 64)),
    "activations": (0.5, ("memory", "disk")),
    "shard_size": (0.2, (1000, 50000, "1MiB")),
}


def draw(choices, dice):
    return {name: dice.choice(values) for name, (share, values) in choices.items() if dice.random() < share}


class Trial:
    """A model in files, what it is called with, and settings and samples that were drawn."""

    def __init__(self, number, folder):
        self.dice, self.folder = random.Random(number), folder
        pairs = [(kind, family) for kind, names in FAMILIES.items() for family in names.split()]
        kind, self.family = self.dice.choice(pairs)
        self.settings, self.run = draw(CHOICES, self.dice), draw(RUNS, self.dice)
        model, self.inputs = families.build(kind, self.family, folder / "float")
        model.to(self.dice.choice((torch.bfloat16, torch.float16, torch.float32))).save_pretrained(folder / "float")
        self.model = type(model).from_pretrained(folder / "float", dtype=torch.float32).eval()
        samples, length = self.dice.choice((1, 2, 4, 33)), self.dice.choice((1, 3, 32, 32))
        ids = torch.randint(3, 200, (samples, length), generator=torch.Generator().manual_seed(number))
        lengths = torch.tensor([self.dice.randint(1, length) if self.dice.random() < 0.3 else length for _ in ids])
        mask = (torch.arange(length) < lengths[:, None]).long()
        self.calibration = gptqkit.Calibration({"input_ids": ids, "attention_mask": mask})

    def quantize(self, name, progress=lambda _: None, **run):
        """Quantize to a folder of that name."""
        source, out, where = self.folder / "float", self.folder / name, {**self.run, **run}
        return gptqkit.quantize(source, self.calibration, out, self.settings, run=where, progress=progress).report

    def wrong_output(self, report):
        """What is wrong with what the loaded model computes, or None."""
        quantized, _ = gptqkit.load(self.folder / "out", dtype="float32")
        with torch.no_grad():
            found = quantized(**self.inputs)[0]
            names = [module.name for module in report.modules]
            families.put_quantized(self.model, self.folder / "float", self.folder / "out", names)
            expected = self.model(**self.inputs)[0]
        off = float((found - expected).norm() / expected.norm())
        return None if off < 1e-4 else f"the loaded model is off by {off}"

    def wrong_resuming(self, steps):
        """What is wrong with a job that is stopped after one of `steps` and goes on, or None."""
        left = iter(range(self.dice.randrange(len(steps))))

        def stop(_):
            if next(left, None) is None:
                raise KeyboardInterrupt

        try:
            self.quantize("again", stop)
        except KeyboardInterrupt:
            self.quantize("again", resume=True)
        first, second = (contents(self.folder / name) for name in ("out", "again"))
        different = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
        return f"resumed, it ends in other {different}" if different else None

    def wrong_conversion(self):
        """What is wrong with the checkpoint in another format, or None."""
        try:
            gptqkit.convert(self.folder / "out", self.folder / "other", format=self.dice.choice(FORMATS))
        except gptqkit.ConversionError:  # there already, or it cannot hold them
            return None
        before, after = (gptqkit.open_checkpoint(self.folder / name) for name in ("out", "other"))
        for name in before.layers:
            if not torch.equal(before.weight(name).dequantize(), after.weight(name).dequantize()):
                return f"as {after.declared.format}, {name} is another"
        return None


def outcome(number, folder):
    """Make, quantize, load, resume and convert one; return what became of it as plain values."""
    trial, steps = Trial(number, folder), []
    row = {"number": number, "family": trial.family, "settings": trial.settings, "run": trial.run}
    try:
        report = trial.quantize("out", steps.append)
        why = trial.wrong_output(report) or trial.wrong_resuming(steps) or trial.wrong_conversion()
    except gptqkit.GptqkitError as error:
        return {**row, "result": "FAILED" if steps else "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {**row, "result": "FAILED", "why": f"raw {type(error).__name__}: {error}"}
    return {**row, "result": "FAILED", "why": why} if why else {**row, "result": "ok"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows = []
    for number in range(arguments.first, arguments.first + arguments.count):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(outcome(number, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    counts = Counter(row["result"] for row in rows)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return counts["FAILED"] > 0


if __name__ == "__main__":
    sys.exit(main())
