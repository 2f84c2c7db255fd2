"""Learned rounding of one block: its output on the quantized model's hidden states against that of its float twin."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers.pytorch_utils import Conv1D

from .calibration.batches import in_pieces, out_of_memory, pieces, shuffled
from .calibration.capture import running_backwards
from .export.formats import find_format
from .progress import Progress, ProgressCallback
from .quantizer.config import QuantizeConfig
from .quantizer.learned import Learned, Matrices, learn
from .quantizer.methods import Solution
from .streams import Streams
from .targets import matrix

_LOG = logging.getLogger("gptqkit")
_Result = TypeVar("_Result")

BATCH = 2  # samples per step, of all processes


class _NoRoomError(Exception):
    """Memory ran out with a single sample, in this process or in another."""


def learn_block(
    layer: int,
    solved: Mapping[str, Solution],
    streams: Streams,
    metric: Tensor | None,
    config: QuantizeConfig,
    progress: ProgressCallback,
) -> Learned | None:
    """Learn the rounding of a block's Linears together; the block itself is left with other weights.

    Some samples are kept aside: where these come no nearer to the float model, nothing changes. Where memory runs out
    with a single sample in any process, what was solved stays, and a warning says so: None.

    Args:
        layer: Number of the block, whose input the stream "hidden" holds, and whose output "float".
        solved: Solutions, with their latents, by full name.
        streams: The calibration samples.
        metric: What errors of the output weigh by, (width, width); None where all weigh the same.
        config: Format and number of iterations.
        progress: Called once per iteration.
    """
    processes, layout, steps = streams.processes, find_format(config.format), itertools.count(1)
    fit = _Fit(layer, list(solved), streams, metric)

    def gradients(values: Matrices) -> Mapping[str, Tensor]:
        found = fit.gradients(values)
        progress(Progress(stage="learn", done=next(steps), total=config.learn_iterations, layer=layer))
        return found

    try:
        return learn(
            {name: one.to(processes.device) for name, one in solved.items()},
            None if layout.snaps else layout.snap,  # scales that depend on one another stay
            iterations=config.learn_iterations,
            gradients=gradients,
            score=fit.score,
        )
    except _NoRoomError:
        pass  # and with the error, what its frames hold is given back
    except RuntimeError as error:  # in what learning itself keeps; of one of several processes, others wait for it
        if processes.size > 1 or not out_of_memory(error):
            raise
    if processes.rank == 0:
        _LOG.warning("block %d does not fit into memory with what learning needs: it keeps what was solved", layer)
    return None


class _Fit:
    """How far the output of a block is from that of its float twin, for whatever weights its Linears have."""

    def __init__(self, layer: int, names: Sequence[str], streams: Streams, metric: Tensor | None) -> None:
        self._layer, self._streams, self._metric, self._processes = layer, streams, metric, streams.processes
        self._modules = {name: streams.model.model.get_submodule(name) for name in names}
        samples, self._aside = streams.batches.split()
        size = -(-BATCH // self._processes.size)
        self._piece = min(size, streams.batches.size)
        generator = torch.Generator().manual_seed(layer)
        rounds = (shuffled(samples, size, generator) for _ in itertools.count())
        self._draws = itertools.chain.from_iterable(rounds) if samples else itertools.repeat(samples)

    def gradients(self, values: Matrices) -> Mapping[str, Tensor]:
        """Return the gradients of the squared distance with respect to each matrix, on the next samples."""
        sums = self._in_room(values, partial(self._backward, next(self._draws)))
        for each in sums.values():
            self._processes.add_up(each)
        return sums

    def score(self, values: Matrices) -> float:
        """Return the distance, relative to the float output, on the samples kept aside."""
        distance, size = self._processes.totals(self._in_room(values, self._distances))
        return float((distance / size) ** 0.5) if size else 0.0

    def _in_room(self, values: Matrices, work: Callable[[int], _Result]) -> _Result:
        """Return what `work` does with the values in place, with as many samples at once as memory holds.

        Where that is none, in one process or another, all stop learning.
        """
        with self._processes.trying() as fits:
            for name, value in values:
                matrix(self._modules[name]).copy_(value)
            found, self._piece = in_pieces(work, self._piece)
        if not fits():
            raise _NoRoomError
        return found

    def _distances(self, size: int) -> list[tuple[Tensor, Tensor]]:
        return [self._streams.distance(self._layer, part, self._metric) for part in pieces(self._aside, size)]

    def _backward(self, batch: range, size: int) -> dict[str, Tensor]:
        """Return the gradients of some samples, each added up as soon as it is there: not all at once in memory."""
        sums = {name: torch.zeros_like(matrix(module), dtype=torch.float32) for name, module in self._modules.items()}
        with ExitStack() as hooks:
            for module, total in zip(self._modules.values(), sums.values(), strict=True):
                take = partial(_take, total.T if isinstance(module, Conv1D) else total)
                hooks.callback(module.weight.requires_grad_, False)
                hooks.callback(module.weight.requires_grad_().register_post_accumulate_grad_hook(take).remove)
            for part in pieces(batch, size):
                with torch.enable_grad():
                    distance, _ = self._streams.distance(self._layer, part, self._metric)
                    if distance.requires_grad:  # else no gradient flows through this block, and nothing moves
                        with running_backwards():
                            torch.autograd.backward(distance)
        return sums


def _take(total: Tensor, weight: Parameter) -> None:
    """Add a gradient to a sum, and give it back; what float16 cannot hold of it becomes its largest number."""
    if weight.grad is not None:
        total += weight.grad.nan_to_num()
    weight.grad = None
