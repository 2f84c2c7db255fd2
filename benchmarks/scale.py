"""Peak memory and time of quantizing models of 4, 8, 16 and 32 blocks: memory must not grow with them.

    python benchmarks/scale.py [--json FILE] [--blocks 4 8 16 32] [--width 768]

Random Llama models in float32 files are quantized on the CPU (gptq, 4 bits, groups of 128; 16 samples of 128 tokens),
with hidden states in memory and on disk, each in a process of its own. Memory is what the process holds (RssAnon of
/proc, without the pages of mapped files, which the kernel takes back when it needs them), beyond what it had before the
call. glibc is told to give back what is freed (MALLOC_MMAP_THRESHOLD_), which takes time; else it keeps some tens of
MiB, now more, now less. "estimate" is what `gptqkit plan` says beforehand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import gptqkit
from gptqkit.units import size_text

SAMPLES, LENGTH = 16, 128


def make_model(blocks: int, width: int, folder: Path) -> None:
    """Write a random Llama with the usual proportions."""
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=-(-width * 11 // 512) * 128,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=512,
        dtype="float32",
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def held() -> int:
    """Return the bytes that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def run_point(model: Path, out: Path, place: str) -> dict[str, Any]:
    """Quantize and measure; in a process that does nothing else."""
    tokens = torch.randint(512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    calibration = gptqkit.Calibration(tokens, samples=SAMPLES, sequence_length=LENGTH)
    run = gptqkit.Run(device="cpu", activations=place)
    estimate = gptqkit.plan(model, out, calibration=calibration, run=run)
    before = peak = held()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    gptqkit.quantize(model, calibration, out, {"quality": "fast"}, run=run)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {
        "seconds": seconds,
        "memory": peak - before,
        "estimate": estimate.total("RAM"),
        "model_bytes": sum(file.stat().st_size for file in model.glob("*.safetensors")),
    }


def main() -> None:
    """Measure all points, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("scale.json"))
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--width", type=int, default=768, help="hidden size (default 768)")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.point:
        folder, place = arguments.point
        print(json.dumps(run_point(Path(folder) / "model", Path(folder) / "out", place)))
        return
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "load_average": os.getloadavg()}
    report: dict[str, Any] = {**machine, "torch": torch.__version__, "width": arguments.width, "points": []}
    for place in ("memory", "disk"):
        for blocks in arguments.blocks:
            with tempfile.TemporaryDirectory() as folder:
                make_model(blocks, arguments.width, Path(folder) / "model")
                command = [sys.executable, __file__, "--point", folder, place]
                settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=settings).stdout)
            report["points"].append({"blocks": blocks, "activations": place, **found})
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")  # a late failure loses nothing
            sizes = ", ".join(f"{name} {size_text(found[name])}" for name in ("memory", "estimate", "model_bytes"))
            print(f"{blocks:3} blocks, states in {place:6}: {found['seconds']:6.1f} s, {sizes}", flush=True)


if __name__ == "__main__":
    main()
