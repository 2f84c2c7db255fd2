"""Time and GPU memory of quantizing a random model with the shapes of Llama 8B from end to end, on one GPU.

    python benchmarks/quantizing.py [--out benchmarks/results] [--quality fast balanced] [--blocks 2] [--samples 32]

Seconds per block, with reading, solving, checking and writing; of these, what passed before gradients of some samples
were measured, before a Linear was solved, and before a step of learning was done. A small model goes before, so that
loading CUDA's libraries does not count. The weights are random: speed hardly depends on them, and quality is not
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
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
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


def measure_random(
    sizes: dict[str, int], tokens: torch.Tensor, config: gptqkit.QuantizeConfig, device: torch.device
) -> dict[str, Any]:
    """The row of a random model of given sizes, in bfloat16."""
    shape = LlamaConfig(**sizes, vocab_size=VOCABULARY, dtype=torch.bfloat16, max_position_embeddings=tokens.shape[1])
    with tempfile.TemporaryDirectory() as folder:
        with device:
            LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(Path(folder) / "float")
        return measure(Path(folder), tokens, config, device)


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
    tokens = torch.randint(VOCABULARY, (arguments.samples, arguments.length))
    how = {
        quality: gptqkit.QuantizeConfig(bits=arguments.bits, sym=False, quality=quality)
        for quality in arguments.quality
    }
    measure_random({**SMALL, "num_hidden_layers": 1}, tokens[:2], how[arguments.quality[-1]], device)
    for quality, config in how.items():
        row = measure_random({**SIZES, "num_hidden_layers": arguments.blocks}, tokens, config, device)
        report["qualities"][quality] = row
        write(report, arguments.out / "quantizing.json")  # a late failure loses nothing
        stages = ", ".join(f"{stage} {each / arguments.blocks:.1f}" for stage, each in row["stages"].items())
        each, peak = row["seconds"] / arguments.blocks, row["peak_bytes"] / 2**30
        print(f"{quality}: {each:.1f} s per block ({stages}), {peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
