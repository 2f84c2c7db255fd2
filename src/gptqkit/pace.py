"""How long a run takes, from its first block: read, run on a few tokens, and solved by the walk itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .calibration.windows import TokenWindows
from .quantizer.journal import Resumed, Step
from .quantizer.walk import quantize_blocks
from .quantizer.weights import Weights
from .sizes import Sizes
from .source import FloatModel
from .workload import Workload

FEW_TOKENS = 32
MANY_TOKENS = 512  # in a sample: on a CPU, the passes of a large block over more would take minutes
LONG_ENOUGH = 2.0  # seconds of passes that can be told from those of few tokens


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds that the first block took.

    Attributes:
        outside: Reading what is outside the blocks, once.
        block: Reading the block, and solving all of its modules.
        token: All passes over the block, per calibration token.
    """

    outside: float
    block: float
    token: float

    def total(self, sizes: Sizes, workload: Workload) -> float:
        """Seconds of a whole run but for writing: other blocks take longer as their weights are more."""
        blocks = sum(kind.count * kind.weights for kind in sizes.blocks) / sizes.blocks[0].weights
        tokens = workload.samples * workload.sequence_length
        return self.outside + blocks * (self.block + tokens * self.token)


def measure_pace(source: FloatModel, workload: Workload) -> Pace:
    """Time the first block of `source` on random tokens, few and many, with the settings of `workload`.

    Solving takes as long on few tokens as on many, so what the many take longer is the passes' time.
    """
    if not workload.samples:
        timed = _time(source, workload, None)
        return Pace(outside=0.0, block=timed.read + timed.worked, token=0.0)
    few = (1, min(FEW_TOKENS, workload.sequence_length // 2))
    if workload.device.type == "cuda":
        _time(source, workload, few)  # libraries load their kernels when they are first called
    short = _time(source, workload, few)
    samples, length = 1, min(workload.sequence_length, MANY_TOKENS)
    while True:
        long = _time(source, workload, (samples, length))
        if long.worked - long.solved > LONG_ENOUGH or samples >= workload.samples:
            break
        samples = min(8 * samples, workload.samples)
    more = samples * length - few[0] * few[1]
    token = max(0.0, (long.worked - long.solved) - (short.worked - short.solved)) / more
    block = short.read + (short.worked - few[0] * few[1] * token)
    return Pace(outside=short.outside_read, block=max(block, short.solved), token=token)


class _Enough(Exception):  # noqa: N818 - leaves the walk after one block; no error
    pass


class _Stopwatch:
    """The weights and the journal of a walk that times its first block and ends there.

    Attributes:
        outside_read: Seconds of reading what is outside the blocks.
        read: Seconds of reading the block.
        worked: Seconds from there to the finished block.
        solved: Seconds of the solver among these.
    """

    def __init__(self, weights: Weights, device: torch.device) -> None:
        self.outside_read = self.read = self.worked = self.solved = 0.0
        self._weights = weights
        self._device = device
        self._entered = 0.0

    @contextmanager
    def outside(self, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
        """Everything but the blocks."""
        start = time.perf_counter()
        with self._weights.outside(device, dtype):
            self.outside_read = time.perf_counter() - start
            yield

    @contextmanager
    def block(self, layer: int, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
        """One block."""
        start = time.perf_counter()
        with self._weights.block(layer, device, dtype):
            self._entered = time.perf_counter()
            self.read = self._entered - start
            yield

    def head(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """The output layer."""
        return self._weights.head(device, dtype)

    def resumed(self) -> Resumed | None:
        """Nothing: every walk is new."""

    def file(self, stream: str, layer: int) -> Path:
        """A name that is never used: hidden states are in memory."""
        return Path(f"{stream}-{layer}")

    def keep(self, step: Step) -> None:
        """Note the time of the first block, and end the walk."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.worked = time.perf_counter() - self._entered
        self.solved = sum(report.seconds for report in step.reports)
        raise _Enough


def _time(source: FloatModel, workload: Workload, shape: tuple[int, int] | None) -> _Stopwatch:
    """The times of the first block on (samples, tokens) random tokens, or None for a walk without."""
    windows = None
    if shape is not None:
        vocabulary = source.model.get_input_embeddings().weight.shape[0]
        windows = TokenWindows(torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)))
    watch = _Stopwatch(source.weights, workload.device)
    with suppress(_Enough):
        quantize_blocks(
            source.model,
            windows,
            workload.config,
            device=workload.device,
            batch_size=workload.batch_size or 1,
            weights=watch,
            journal=watch,
        )
    return watch
