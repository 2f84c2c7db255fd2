"""How much a model's predictions depend on what leaves its blocks and Linears, to weigh errors by.

With g the gradient of -log p(token) with respect to what leaves a block at one position, tokens drawn from the model's
own predictions, F = E[g gT] is the Fisher information: an error d there changes the predictions by about dT F d / 2
nats. BRECQ (Li et al. 2021, arXiv 2102.05426) takes its diagonal; this is all of it, for learned rounding the mean over
the blocks. Some samples go forward through the float model, block by block, and gradients back; when a block's turn
comes, those behind it go back to its Linears, whose F is that of K-FAC (Martens and Grosse 2015, arXiv 1503.05671).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .calibration.batches import Batches, pieces
from .calibration.cache import ActivationCache, Handed
from .calibration.capture import running_backwards
from .calibration.samples import Samples
from .calibration.statistics import SLAB, add_product, full_float32, mirror
from .distributed import Processes
from .evaluating import is_encoder
from .job import states_file
from .model import FloatModel
from .progress import Progress, ProgressCallback
from .run import Run
from .streams import Streams
from .subsets import STATISTICS_BYTES, output_bytes
from .targets import Target
from .walking import FloatWalk

_LOG = logging.getLogger("gptqkit")

SAMPLES = 32  # evenly spaced among those of the calibration
AT_ONCE = 8  # of each process, of which the states behind every block are kept


@dataclass(frozen=True, kw_only=True, eq=False)
class Fisher:
    """What a model's predictions depend on, and the gradients that told so.

    Attributes:
        metric: F, (width, width) float32, with 1 for the mean of its diagonal: the mean over the blocks of the last
            stack, each with the same weight. Where tokens are few, what is beside the diagonal is mostly chance: it
            counts n / (n + width) for n tokens.
        samples: Numbers of the calibration samples whose gradients this process holds.
        behind: These gradients with respect to what leaves each block of the last stack, by its number, in bfloat16.
    """

    metric: Tensor
    samples: Sequence[int]
    behind: Mapping[int, ActivationCache]


@torch.no_grad()
def measure_fisher(
    model: FloatModel,
    batches: Batches,
    processes: Processes,
    run: Run,
    out: Path,
    folder: Path,
    progress: ProgressCallback,
) -> Fisher | None:
    """Return what the predictions of a float model depend on; every process measures samples of its own.

    `folder` is where the gradients are, if `run` keeps activations on disk. Other arguments are those of
    `FloatWalk`; `progress` tells of this process.

    Returns:
        None where it cannot be known: the model predicts nothing, or memory runs out with a single sample.
    """
    if is_encoder(model.model, model.path):
        return None
    ids, mask = batches.samples.input_ids, batches.samples.attention_mask
    chosen = [sample for sample in _evenly(len(ids)) if sample in batches.mine]
    parts = list(pieces(range(len(chosen)), AT_ONCE))
    run = dataclasses.replace(run, batch_size=min(run.batch_size or AT_ONCE, AT_ONCE))
    total, tokens = torch.zeros((), dtype=torch.float32, device=processes.device), 0
    behind: dict[int, ActivationCache] = {}
    with processes.trying() as fits:
        for step, part in enumerate(parts, 1):
            numbers = chosen[part.start : part.stop]
            few = Samples(ids[numbers], None if mask is None else mask[numbers])
            with FloatWalk(model, few, Processes(0, 1, processes.device), run, out).streams() as streams:
                for layer in () if behind else streams.stacks[-1].blocks:
                    file = states_file(folder, "gradients", layer, processes.rank)
                    kept = range(len(chosen)), streams.stacks[-1].shape, torch.bfloat16, processes.device
                    behind[layer] = ActivationCache(*kept, run.activations, file)
                found, count = _Gradients(streams, behind, part.start, numbers).moments()
            total, tokens = found.add_(total), tokens + count
            progress(Progress(stage="measure", done=step, total=len(parts)))
    if not fits():
        if processes.rank == 0:
            _LOG.warning("predictions of a sample do not fit into memory; all errors are taken alike")
        return None
    width = max(processes.gather(total.shape[-1] if total.dim() else 0))
    total = total if total.dim() else total.new_zeros(width, width)  # of a process without samples
    processes.add_up(total)
    tokens = sum(processes.gather(tokens))
    metric = _scaled(total, tokens / (tokens + len(total)))
    if metric is None and processes.rank == 0:
        _LOG.warning("no finite gradient reaches the blocks; all errors are taken alike")
    return None if metric is None else Fisher(metric=metric, samples=chosen, behind=behind)


@torch.no_grad()
def pull_back(streams: Streams, layer: int, targets: Sequence[Target], fisher: Fisher) -> dict[str, Tensor]:
    """Return what errors of Linears' outputs weigh with one another, by what they change of predictions.

    That is the mean over tokens of g gT, g the gradient at the Linear's output: gradients behind the block go back
    through it, as it is by now. 1 is the mean of its diagonal; what is beside that is shrunk by how much of it is
    chance, as samples differ (Schäfer and Strimmer 2005, target D): few tokens, such as the first, can have nearly all
    of the gradient.

    Args:
        streams: The samples.
        layer: Number of the block, whose input the stream "hidden" holds.
        targets: The Linears.
        fisher: The gradients.

    Returns:
        (out, out) float32 by full name, without Linears that no gradient reaches; nothing where memory runs out.
    """
    batches, processes = streams.batches, streams.processes
    sums: dict[str, _Sum] = {}
    with processes.trying() as fits:
        block = _twin(streams.model.blocks[layer])
        sums |= {
            each.inner: _Sum(torch.zeros(each.shape[0], each.shape[0], dtype=torch.float32, device=processes.device))
            for each in targets
        }
        for place, sample in enumerate(fisher.samples):
            if batches.counts[sample]:
                behind = fisher.behind[layer].read(range(place, place + 1))
                _add_moments(sums, streams, layer, block, range(sample, sample + 1), behind)
    if not fits():
        if processes.rank == 0:
            _LOG.warning("block %d does not fit into memory backwards; errors of its outputs are taken alike", layer)
        return {}
    found: dict[str, Tensor] = {}
    for target in targets:
        one = sums.pop(target.inner)
        processes.add_up(one.total)
        mirror(one.total)
        one.samples, one.squares = sum(processes.gather(one.samples)), sum(processes.gather(one.squares))
        scaled = _scaled(one.total, one.share())
        if scaled is not None:
            found[target.name] = scaled
    return found


class Outputs:
    """What errors of the outputs of a block's Linears weigh, measured for as many of them at once as memory holds.

    Arguments are those of `pull_back`, the Linears in the order in which they are solved.
    """

    def __init__(self, streams: Streams, layer: int, targets: Sequence[Target], fisher: Fisher) -> None:
        self._measure, self._ahead = partial(pull_back, streams, layer, fisher=fisher), list(targets)
        self._known: dict[str, Tensor] = {}

    def of(self, targets: Sequence[Target]) -> dict[str, Tensor]:
        """Return those of some Linears, and keep them no longer."""
        while any(target in self._ahead for target in targets):
            kept = sum(each.nbytes for each in self._known.values())
            sizes = itertools.accumulate(map(output_bytes, self._ahead))
            count = max(1, sum(kept + size <= STATISTICS_BYTES for size in sizes))
            self._known |= self._measure(self._ahead[:count])
            del self._ahead[:count]
        return {each.name: self._known.pop(each.name) for each in targets if each.name in self._known}


@dataclass(eq=False)
class _Sum:
    """The sum of gT g over samples.

    Attributes:
        total: (out, out) float32, rows from the diagonal on.
        samples: How many have such gradients.
        squares: What entries of each sample beside the diagonal have as sum of squares, over the samples.
    """

    total: Tensor
    samples: int = 0
    squares: float = 0.0

    def add(self, rows: Tensor) -> None:
        """Add one sample's gradients, (tokens, out) in any float dtype."""
        for start in range(0, rows.shape[1], SLAB):
            own = torch.zeros_like(self.total[start : start + SLAB, start:])
            with full_float32():
                add_product(own, rows[:, start : start + SLAB], rows[:, start:])
            self.total[start : start + SLAB, start:] += own
            own.fill_diagonal_(0)
            twice = own[:, SLAB:]  # of what stands below the diagonal, too
            self.squares += float(own.norm().double().square() + twice.norm().double().square())
        self.samples += bool(rows.any())

    def share(self) -> float:
        """Return what part of the entries beside the diagonal of the whole sum, mirrored, is no chance."""
        whole = _beside(self.total)
        if self.samples < 2 or not 0 < whole < math.inf:
            return 0.0
        chance = (self.samples * self.squares / whole - 1) / (self.samples - 1)
        return min(max(1 - chance, 0.0), 1.0)


def _beside(matrix: Tensor) -> float:
    """Return the sum of squares of all entries but those of the diagonal."""
    return float(matrix.norm().double().square() - matrix.diagonal().norm().double().square())


def _add_moments(
    sums: Mapping[str, _Sum], streams: Streams, layer: int, block: nn.Module, sample: range, behind: Tensor
) -> None:
    """Add to the sums of gT g, g a sample's gradients at the outputs of the modules of `block` so named.

    `behind` are those with respect to what leaves the block, on any scale.
    """
    outputs: list[tuple[str, Tensor]] = []

    def leave(name: str, _module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        outputs.append((name, output if output.requires_grad else output.requires_grad_()))
        return outputs[-1][1].clone()  # which may be written into

    with torch.enable_grad(), ExitStack() as hooks:
        for name in sums:
            hooks.callback(block.get_submodule(name).register_forward_hook(partial(leave, name)).remove)
        leaving = streams.through(sample, layer, block, streams.caches["hidden"].read(sample))
    along = streams.of_tokens(behind, sample).to(leaving.dtype)
    if not leaving.requires_grad:
        return
    with running_backwards():
        gradients = torch.autograd.grad(leaving, [each for _, each in outputs], along, allow_unused=True)
    for (name, _), gradient in zip(outputs, gradients, strict=True):
        if gradient is not None:
            sums[name].add(gradient.reshape(-1, gradient.shape[-1]).nan_to_num(0, 0, 0))


def _twin(block: nn.Module) -> nn.Module:
    """Return the same block with the same parameters: some keep states, which would have gradients afterwards."""
    return copy.deepcopy(block, {id(each): each for each in block.parameters()})


def _evenly(count: int) -> list[int]:
    """Return the numbers of the samples that are looked at."""
    return torch.linspace(0, count - 1, min(SAMPLES, count)).round().long().tolist()


def _scaled(total: Tensor, share: float) -> Tensor | None:
    """Return a sum over tokens with 1 for the mean of its diagonal, and a share of what is beside it.

    None where it is 0, or overflowed.
    """
    mean = total.diagonal().mean()
    if not 0 < float(mean) < math.inf:
        return None
    diagonal = total.diagonal().clone()
    total *= share
    total.diagonal().copy_(diagonal)
    return total.div_(mean)


class _Gradients:
    """The gradients of some samples behind the blocks of the last stack, while what `streams` needs is there.

    They are kept in the caches `kept`, by block, from the sample `start` on. `numbers` are those among all samples.
    What blocks hand on beside hidden states is taken as given: no gradient goes through it.
    """

    def __init__(
        self, streams: Streams, kept: Mapping[int, ActivationCache], start: int, numbers: Sequence[int]
    ) -> None:
        self._streams, self._kept, self._start, self._numbers = streams, kept, start, numbers
        self._blocks = streams.stacks[-1].blocks
        self._behind: dict[int, ActivationCache] = {}  # each block: states, until gradients take their places
        self._handed: dict[int, dict[str, Handed]] = {}  # to each block

    def moments(self) -> tuple[Tensor, int]:
        """Return the sum of g gT over tokens, with 1 for the mean of its diagonal per token and block; their number."""
        streams, batches = self._streams, self._streams.batches
        for layer, block in enumerate(streams.model.blocks):
            streams.enter(layer)
            self._handed[layer] = {name: each.as_now() for name, each in streams.handed.items()}
            with streams.block(layer):
                streams.advance("hidden", layer, block, resumable=False)
            if layer in self._blocks:
                self._behind[layer] = streams.room(layer)
                for batch, states in batches.results(streams.caches["hidden"].read):
                    self._behind[layer].write(batch, states)
        with streams.head():
            for sample in batches.mine:
                self._predicted(range(sample, sample + 1))
        tokens = int(batches.mask(batches.mine, len(batches.parts) - 1).sum())
        total = self._moment(self._blocks[-1])
        for layer in reversed(self._blocks[1:]):
            streams.handed = self._handed.pop(layer)
            with streams.block(layer):
                twin = _twin(streams.model.blocks[layer])
                for batch, gradients in batches.results(partial(self._back, layer, twin)):
                    self._behind[layer - 1].write(batch, gradients)
            del self._behind[layer]
            total += self._moment(layer - 1)
        return total * (tokens / len(self._blocks)), tokens

    def _moment(self, layer: int) -> Tensor:
        """Keep the gradients behind a block; return the sum of g gT, with 1 for the mean of its diagonal, 0 where 0."""
        states = self._behind[layer]
        width = states.shape[-1]
        total = torch.zeros(width, width, dtype=torch.float32, device=states.device)
        for sample in states.samples:
            gradients = states.read(range(sample, sample + 1))
            place = self._start + sample
            self._kept[layer].write(range(place, place + 1), gradients.to(self._kept[layer].dtype))
            rows = gradients.reshape(-1, width)
            with full_float32():
                add_product(total, rows, rows)
        return total / total.diagonal().mean().clamp(min=torch.finfo(total.dtype).tiny)

    def _predicted(self, sample: range) -> None:
        """Put the gradients of a sample's drawn tokens in the place of what left the last block."""
        batches, states = self._streams.batches, self._behind[self._blocks[-1]]
        hidden = states.read(sample)
        mask = batches.mask(sample, len(batches.parts) - 1)
        generator = torch.Generator().manual_seed(self._numbers[sample.start])
        draws = torch.rand(mask.shape, generator=generator, dtype=torch.float32).to(batches.device)
        with torch.enable_grad():
            logits = self._streams.predict(sample, hidden.requires_grad_().clone())  # it may be written into
        chances = logits.detach().float().softmax(-1)
        drawn = torch.searchsorted(chances.cumsum(-1), draws.unsqueeze(-1)).clamp_(max=chances.shape[-1] - 1)
        chances.scatter_add_(-1, drawn, torch.full_like(drawn, -1, dtype=chances.dtype))
        along = chances.mul_(mask.unsqueeze(-1)).to(logits.dtype)
        states.write(sample, _gradients(logits, hidden, along))

    def _back(self, layer: int, block: nn.Module, batch: range) -> Tensor:
        """Return the gradients of a batch behind the block before, from those behind `block`, of number `layer`."""
        hidden = self._behind[layer - 1].read(batch).requires_grad_()
        with torch.enable_grad():
            leaving = self._streams.through(batch, layer, block, hidden)
        return _gradients(leaving, hidden, self._behind[layer].read(batch))


def _gradients(states: Tensor, entered: Tensor, along: Tensor) -> Tensor:
    """Return the gradients with respect to what entered, from those with respect to what left; 0 for NaN."""
    if not states.requires_grad:
        return torch.zeros_like(entered)
    with running_backwards():
        (found,) = torch.autograd.grad(states, entered, along, allow_unused=True)
    return torch.zeros_like(entered) if found is None else found.nan_to_num(0, 0, 0)
