"""Learned rounding of one block: its output on the quantized model's hidden states against that of its float twin."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .calibration.batches import in_pieces, pieces, shuffled
from .distributed import Processes
from .export.formats import find_format
from .progress import Progress, ProgressCallback
from .quantizer.config import QuantizeConfig
from .quantizer.learned import Learned, learn
from .quantizer.methods import Solution
from .streams import Streams
from .targets import matrix

BATCH = 2  # samples per step, of all processes


def learn_block(
    layer: int,
    solved: Mapping[str, Solution],
    streams: Streams,
    processes: Processes,
    config: QuantizeConfig,
    progress: ProgressCallback,
) -> Learned:
    """Learn the rounding of a block's Linears together; the block itself is left with other weights.

    Some samples are kept aside: what comes nearest to the float model on those counts, be it where learning
    began.

    Args:
        layer: Number of the block, whose input the stream "hidden" holds, and whose output "float".
        solved: Solutions, with their latents, by full name.
        streams: The calibration samples.
        processes: Those that share them.
        config: Format and number of iterations.
        progress: Called once per iteration.

    Raises:
        ArchitectureError: A block through which no gradients flow.
    """
    fit, layout, steps = _Fit(layer, list(solved), streams, processes), find_format(config.format), itertools.count(1)

    def gradients(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = fit.gradients(values)
        progress(Progress(stage="learn", done=next(steps), total=config.learn_iterations, layer=layer))
        return found

    return learn(
        {name: one.to(processes.device) for name, one in solved.items()},
        None if layout.snaps else layout.snap,  # scales that depend on one another stay
        iterations=config.learn_iterations,
        gradients=gradients,
        score=fit.score,
    )


class _Fit:
    """How far the output of a block is from that of its float twin, for whatever weights its Linears have."""

    def __init__(self, layer: int, names: Sequence[str], streams: Streams, processes: Processes) -> None:
        self._layer, self._streams, self._processes = layer, streams, processes
        self._modules = {name: streams.model.model.get_submodule(name) for name in names}
        samples, self._aside = streams.batches.split()
        size = -(-BATCH // processes.size)
        self._piece = min(size, streams.batches.size)
        generator = torch.Generator().manual_seed(layer)
        rounds = (shuffled(samples, size, generator) for _ in itertools.count())
        self._draws = itertools.chain.from_iterable(rounds) if samples else itertools.repeat(samples)

    def gradients(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the gradients of the squared distance with respect to each matrix, on the next samples."""
        batch = next(self._draws)
        sums, self._piece = in_pieces(partial(self._backward, values, batch), self._piece)
        for each in sums.values():
            self._processes.add_up(each)
        return sums

    def score(self, values: Mapping[str, Tensor]) -> float:
        """Return the distance, relative to the float output, on the samples kept aside."""
        self._install(values)
        found = [self._streams.distance(self._layer, part) for part in pieces(self._aside, self._piece)]
        own = [sum(float(each) for each in column) for column in zip(*found, strict=True)] or [0.0, 0.0]
        distance, size = (sum(column) for column in zip(*self._processes.gather(own), strict=True))
        return float((distance / size) ** 0.5) if size else 0.0

    def _backward(self, values: Mapping[str, Tensor], batch: range, size: int) -> dict[str, Tensor]:
        self._install(values)
        sums = {name: torch.zeros_like(value) for name, value in values.items()}
        weights = [module.weight for module in self._modules.values()]
        with torch.enable_grad():
            for weight in weights:
                weight.requires_grad_()
            try:
                for part in pieces(batch, size):
                    distance, _ = self._streams.distance(self._layer, part)
                    found = torch.autograd.grad(distance, weights, allow_unused=True)
                    for (name, module), gradient in zip(self._modules.items(), found, strict=True):
                        if gradient is not None:
                            sums[name] += gradient.T if isinstance(module, Conv1D) else gradient
            finally:
                for weight in weights:
                    weight.requires_grad_(False)
        return sums

    def _install(self, values: Mapping[str, Tensor]) -> None:
        for name, module in self._modules.items():
            matrix(module).copy_(values[name])
