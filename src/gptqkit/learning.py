"""Learned rounding of one block: its output on the quantized model's hidden states against that of its float twin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .calibration.batches import out_of_memory
from .distributed import Processes
from .export.formats import find_format
from .quantizer.config import QuantizeConfig
from .quantizer.learned import Learned, learn
from .quantizer.methods import Solution
from .streams import Streams
from .targets import matrix

BATCH = 8  # samples per step, of all processes
ASIDE = 8  # one sample in so many is kept aside to choose by


def learn_block(
    layer: int, solved: Mapping[str, Solution], streams: Streams, processes: Processes, config: QuantizeConfig
) -> Learned:
    """Learn the rounding of a block's Linears together; the block itself is left with other weights.

    One sample in `ASIDE` is kept aside: what comes nearest to the float model on those counts, be it where learning
    began.

    Args:
        layer: Number of the block, whose input the stream "hidden" holds, and whose output "float".
        solved: Solutions, with their latents, by full name.
        streams: The calibration samples.
        processes: Those that share them.
        config: Format and number of iterations.

    Raises:
        ArchitectureError: A block through which no gradients flow.
    """
    fit = _Fit(layer, list(solved), streams, processes)
    return learn(
        {name: one.to(processes.device) for name, one in solved.items()},
        find_format(config.format).snap,
        iterations=config.learn_iterations,
        gradients=fit.gradients,
        score=fit.score,
    )


class _Fit:
    """How far the output of a block is from that of its float twin, for whatever weights its Linears have."""

    def __init__(self, layer: int, names: Sequence[str], streams: Streams, processes: Processes) -> None:
        self._layer, self._streams, self._processes = layer, streams, processes
        self._modules = {name: streams.model.model.get_submodule(name) for name in names}
        mine = streams.batches.mine
        self._aside = mine[len(mine) - max(1, len(mine) // ASIDE) :] if mine else mine
        self._size = -(-BATCH // processes.size)
        self._piece = min(self._size, streams.batches.size)
        self._draws = self._drawn(mine[: -len(self._aside)] or mine)

    def gradients(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the gradients of the squared distance with respect to each matrix, on the next samples."""
        batch = next(self._draws)
        while True:
            try:
                sums = self._backward(values, batch)
                break
            except RuntimeError as error:
                if self._piece == 1 or not out_of_memory(error):
                    raise
                self._piece //= 2
        for each in sums.values():
            self._processes.add_up(each)
        return sums

    def score(self, values: Mapping[str, Tensor]) -> float:
        """Return the distance, relative to the float output, on the samples kept aside."""
        self._install(values)
        found = [self._streams.distance(self._layer, part) for part in self._pieces(self._aside)]
        own = [sum(float(each) for each in column) for column in zip(*found, strict=True)] or [0.0, 0.0]
        distance, size = (sum(column) for column in zip(*self._processes.gather(own), strict=True))
        return float((distance / size) ** 0.5) if size else 0.0

    def _backward(self, values: Mapping[str, Tensor], batch: range) -> dict[str, Tensor]:
        self._install(values)
        sums = {name: torch.zeros_like(value) for name, value in values.items()}
        weights = [module.weight for module in self._modules.values()]
        with torch.enable_grad():
            for weight in weights:
                weight.requires_grad_()
            try:
                for part in self._pieces(batch):
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

    def _pieces(self, batch: range) -> Iterator[range]:
        for start in range(0, len(batch), self._piece):
            yield batch[start : start + self._piece]

    def _drawn(self, samples: range) -> Iterator[range]:
        """Yield neighbouring samples, which are no neighbours in the text, again and again in another order."""
        generator = torch.Generator().manual_seed(self._layer)
        starts = range(0, max(1, len(samples)), self._size)
        while True:
            for number in torch.randperm(len(starts), generator=generator).tolist():
                yield samples[starts[number] : starts[number] + self._size]
