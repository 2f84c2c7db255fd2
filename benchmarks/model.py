"""Speed of a random model with the shapes of Llama 8B at each bit width, beside float16, on one GPU.

    python benchmarks/model.py [--out benchmarks/results] [--bits 4] [--batches 1 16] [--layers 32] [--minutes 8]

Tokens per second of generation: one token for each sequence of a batch after a context of 512, as a replayed CUDA
graph, so that neither Python nor the launches count, and eager, where they do. Perplexity: seconds for windows of 2048
tokens, logits and losses included, without a graph. Memory is what the weights take. The weights are random: speed does
not depend on them, and quality is not measured here. Writes model.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from decoder import Decoder, Sizes
from layers import random_weight
from timing import describe, find_gpu, graph_time, write
from torch import nn

from gptqkit.kernels.cuda import CudaLinear

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 512
WINDOW = 2048
WINDOWS = 4
STEPS = 8
EAGER_BATCHES = (1, 16)
FLOAT = 16


def make_model(bits: int, sizes: Sizes, group_size: int, device: torch.device) -> Decoder:
    """The model with `bits` bits per weight; 16 stands for dense float16."""

    def make(rows: int, columns: int) -> nn.Module:
        if bits == FLOAT:
            linear = nn.Linear(columns, rows, bias=False, device=device, dtype=torch.float16)
            return linear.requires_grad_(False)
        weight = random_weight(rows, columns, bits=bits, group_size=group_size, device=device)
        return CudaLinear(weight, None, torch.float16)

    return Decoder(sizes, make, device, torch.float16)


def generation_speed(model: Decoder, batch: int, device: torch.device) -> float:
    """Tokens per second of a whole batch."""
    caches = model.make_cache(batch, CONTEXT)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    seconds = graph_time(lambda _: model(ids, CONTEXT - 1, caches), [None], milliseconds=0)
    return batch / seconds


def eager_speed(model: Decoder, batch: int, device: torch.device) -> float:
    """Tokens per second of a whole batch without a graph."""
    caches = model.make_cache(batch, CONTEXT)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    for index in range(STEPS + 2):
        if index == 2:  # the first ones warm up
            torch.cuda.synchronize(device)
            start = time.perf_counter()
        model(ids, CONTEXT - 1, caches)
    torch.cuda.synchronize(device)
    return batch * STEPS / (time.perf_counter() - start)


def perplexity_seconds(model: Decoder, device: torch.device) -> float:
    """Seconds per window."""
    ids = torch.randint(model.sizes.vocabulary, (WINDOWS + 1, WINDOW), device=device)
    for index in range(WINDOWS + 1):
        if index == 1:  # the first one warms up
            torch.cuda.synchronize(device)
            start = time.perf_counter()
        logits = model(ids[index : index + 1])[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, ids[index, 1:])
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / WINDOWS


@torch.inference_mode()
def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, nargs="+", default=(FLOAT, 8, 4, 3, 2))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=10, help="start no further bit width after this (default 10)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for model.json")
    arguments = parser.parse_args()
    device = find_gpu(parser)
    sizes = Sizes(layers=arguments.layers)
    begin = time.monotonic()
    report = {**describe(device), "layers": sizes.layers, "group_size": arguments.group_size, "context": CONTEXT}
    report["results"] = []
    print(f"{report['device']}, torch {report['torch']}, {sizes.layers} blocks; tokens per second by batch")
    batches = " ".join(f"{batch:>8}" for batch in arguments.batches)
    print(f"{'bits':>4} | {'GB':>6} | {'load s':>6} | {'s per window':>12} | {batches}")
    for bits in arguments.bits:
        if time.monotonic() - begin > 60 * arguments.minutes:
            print(f"out of time: {bits} bits and what follows is not measured")
            break
        before, start = torch.cuda.memory_allocated(device), time.perf_counter()
        model = make_model(bits, sizes, arguments.group_size, device)
        torch.cuda.synchronize(device)
        result = {"bits": bits, "load_seconds": time.perf_counter() - start}
        result["bytes"] = torch.cuda.memory_allocated(device) - before
        result["seconds_per_window"] = perplexity_seconds(model, device)
        result["tokens_per_second"] = {}
        for batch in arguments.batches:
            result["tokens_per_second"][batch] = generation_speed(model, batch, device)
            torch.cuda.empty_cache()
        result["eager_tokens_per_second"] = {
            batch: eager_speed(model, batch, device) for batch in EAGER_BATCHES if batch in arguments.batches
        }
        speeds = " ".join(f"{speed:8.0f}" for speed in result["tokens_per_second"].values())
        print(
            f"{bits:>4} | {result['bytes'] / 1e9:6.2f} | {result['load_seconds']:6.1f} | "
            f"{result['seconds_per_window']:12.3f} | {speeds}",
            flush=True,
        )
        report["results"].append(result)
        write(report, arguments.out / "model.json")
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
