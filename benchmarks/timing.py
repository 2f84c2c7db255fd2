"""Times on a GPU that launches and caches do not blur: graphs replayed over operands that do not fit the L2 cache."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

# Operands rotate through this many times the size of the L2 cache.
PAST_CACHE = 3

LONGEST_GRAPH = 400
FIRST_GRAPH = 10  # calls, by which the length of the other is chosen
HEAD_START = 1_000_000  # clock cycles that the GPU sleeps before a timed graph, so that launching it does not count
WARM_UP = 0.2  # seconds of work until the clocks are up
_warm = False


def warm_up() -> None:
    """Keep the GPU busy once, until its clocks are up."""
    global _warm
    end, square = time.perf_counter() + (0 if _warm else WARM_UP), torch.randn(2048, 2048, device="cuda").half()
    while time.perf_counter() < end:
        torch.mm(square, square)
        torch.cuda.synchronize()
    _warm = True


def find_gpu(parser: argparse.ArgumentParser) -> torch.device:
    """The current GPU; where there is none, the program ends."""
    if not torch.cuda.is_available():
        parser.error("torch sees no NVIDIA GPU")
    return torch.device("cuda", torch.cuda.current_device())


def copies_past_cache(size: int, device: torch.device) -> int:
    """How many operands of `size` bytes it takes until the first has left the L2 cache."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, -(-PAST_CACHE * cache // max(1, size)))


def clone_tensors(value: Any) -> Any:
    """A deep copy of a tensor, or of a list, tuple or dict with tensors."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: clone_tensors(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(clone_tensors(item) for item in value)
    return value


def graph_time(
    work: Callable[[Any], object], operands: Sequence[Any], *, milliseconds: float = 3, rounds: int = 5
) -> float:
    """Seconds of one call of `work`, the median of `rounds` replays of a graph of calls.

    Args:
        work: Takes one of `operands`; launches only on the current stream, and can be captured.
        operands: Used in turn.
        milliseconds: About how long the graph shall run.
        rounds: Timed replays.
    """
    warm_up()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for operand in operands[:2]:
            work(operand)
        once = max(_replay_time(work, operands, FIRST_GRAPH, 1, stream), 1e-3)
        calls = min(LONGEST_GRAPH, max(len(operands), int(milliseconds / once)))
        once = _replay_time(work, operands, calls, rounds, stream)
    torch.cuda.current_stream().wait_stream(stream)
    return once / 1000


def _replay_time(
    work: Callable[[Any], object], operands: Sequence[Any], calls: int, rounds: int, stream: torch.cuda.Stream
) -> float:
    """Milliseconds of one call, the median over `rounds` replays of a graph of `calls`."""
    graph, times = torch.cuda.CUDAGraph(), []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.graph(graph, stream=stream):
        for call in range(calls):
            work(operands[call % len(operands)])
    graph.replay()
    for _ in range(rounds):
        torch.cuda._sleep(HEAD_START)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return sorted(times)[rounds // 2]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy within the GPU's memory."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / graph_time(lambda _: target.copy_(source), [None])


def describe(device: torch.device) -> dict[str, object]:
    """What a table of times must name: the GPU, torch, CUDA."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def write(report: dict, path: Path) -> None:
    """Write what is known so far, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(path)
