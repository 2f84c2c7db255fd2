"""Time and GPU memory of quantizing a random model with the shapes of Llama 8B from end to end, on one GPU.

    python benchmarks/quantizing.py [--out benchmarks/results] [--quality fast balanced] [--blocks 2] [--samples 32]

Seconds per block, with reading, solving, checking and writing; of these, what passed before a Linear was solved, and
before a step of learning was done. The weights are random: speed hardly depends on them, and quality is not
measured here. Writes quantizing.json.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from timing import describe, find_gpu, write
from transformers import LlamaConfig, LlamaForCausalLM

import gptqkit
from gptqkit.progress import Progress

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
VOCABULARY = 1024


def measure(folder: Path, tokens: torch.Tensor, config: gptqkit.QuantizeConfig, device: torch.device) -> dict[str, Any]:
    """One row: seconds in all and by stage, and the most memory in use."""
    seconds: defaultdict[str, float] = defaultdict(float)
    last = start = time.perf_counter()

    def note(step: Progress) -> None:
        nonlocal last
        seconds[step.stage] += time.perf_counter() - last
        last = time.perf_counter()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run, samples = gptqkit.Run(device=str(device)), gptqkit.Calibration(tokens, sequence_length=tokens.shape[1])
    gptqkit.quantize(folder / "float", samples, folder / "quantized", config, run=run, progress=note)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"seconds": time.perf_counter() - start, "stages": seconds, "peak_bytes": peak}


def main() -> None:
    """Measure every quality and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--quality", nargs="+", default=["fast", "balanced"], choices=("fast", "balanced", "best"))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    arguments = parser.parse_args()
    device = find_gpu(parser)
    settings = {name: getattr(arguments, name) for name in ("bits", "blocks", "samples", "length")}
    report: dict[str, Any] = {**describe(device), **settings, "qualities": {}}
    sizes = {**SIZES, "num_hidden_layers": arguments.blocks, "vocab_size": VOCABULARY}
    tokens = torch.randint(VOCABULARY, (arguments.samples, arguments.length))
    for quality in arguments.quality:
        with tempfile.TemporaryDirectory() as folder:
            config = LlamaConfig(**sizes, dtype=torch.bfloat16, max_position_embeddings=arguments.length)
            with device:
                LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(Path(folder) / "float")
            how = gptqkit.QuantizeConfig(bits=arguments.bits, sym=False, quality=quality)
            row = measure(Path(folder), tokens, how, device)
        report["qualities"][quality] = row
        write(report, arguments.out / "quantizing.json")  # a late failure loses nothing
        stages = ", ".join(f"{stage} {each / arguments.blocks:.1f}" for stage, each in row["stages"].items())
        each, peak = row["seconds"] / arguments.blocks, row["peak_bytes"] / 2**30
        print(f"{quality}: {each:.1f} s per block ({stages}), {peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
