"""Scales tuned together, codes as they are: Adam on the divergence of the model's predictions from the float model's.

As in PEQA (arXiv 2305.14152) and EfficientQAT (arXiv 2407.11062), whose second phase this is, but with the float model
as the teacher: scale and offset of a group are multiplied by exp(u), and u is learned for the whole model at once.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint as recomputed
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .assembly import most_differ, replace_weights
from .calibration.batches import Batches, in_pieces, out_of_memory, pieces, shuffled
from .calibration.capture import forwards_replaced, running_backwards, without_cache
from .distributed import Processes
from .errors import CheckpointError
from .export.checkpoint import open_checkpoint
from .export.names import StoredNames
from .loading import load
from .model import FloatModel
from .progress import Progress, ProgressCallback
from .quantizer.learned import stretched
from .report import TuningReport
from .targets import find_blocks, matrix

_LOG = logging.getLogger("gptqkit")

BATCH = 4  # samples per step, of all processes
RATE, WARM_UP, BETAS = 0.01, 8, (0.9, 0.95)


class _Stretched(nn.Module):
    """A weight whose groups of columns are multiplied by exp(u), u of (out, groups)."""

    def __init__(self, stretch: nn.Parameter, index: Tensor, transposed: bool) -> None:
        super().__init__()
        self.stretch, self._index, self._transposed = stretch, index, transposed

    def forward(self, weight: Tensor) -> Tensor:
        factor = self.stretch.exp()[:, self._index]
        return (weight.float() * (factor.T if self._transposed else factor)).to(weight.dtype)


def tune(
    directory: Path,
    source: FloatModel,
    batches: Batches,
    processes: Processes,
    *,
    epochs: int,
    dtype: torch.dtype,
    progress: ProgressCallback,
) -> TuningReport:
    """Tune the scales of a complete checkpoint, and write them in their places.

    Some samples are kept aside: after each epoch the divergence on those tells whether these scales are the
    best so far; where none, rounded as the file holds them, are better than those that were there, nothing is written.
    What is written is loaded and run.
    Both models are in memory as a whole, with the activations of a step for backpropagation: where these do not fit,
    of a sample, or at last of one block, at the price of another forward pass. Every process goes through its own
    samples; gradients are added up, as DistributedDataParallel does but for its mean, which Adam does not see.
    `progress` is called once per step.

    Raises:
        CheckpointError: What was written computes something else.
    """
    checkpoint, device = open_checkpoint(directory), processes.device
    teacher = source.whole(device, dtype).requires_grad_(False).eval()
    student = copy.deepcopy(teacher)
    blocks = [block for stack in find_blocks(student) for block in stack.values()]
    names = StoredNames(source.empty.stacked, source.empty.names, checkpoint.float_names)
    modules = {}
    stretches: dict[str, nn.Parameter] = {}
    for name in checkpoint.layers:
        weight = checkpoint.weight(name).to(device)
        modules[name] = student.get_submodule((names.working(f"{name}.weight") or "").removesuffix(".weight"))
        matrix(modules[name]).copy_(weight.dequantize())
        stretches[name] = nn.Parameter(torch.zeros_like(weight.scale))
        own = _Stretched(stretches[name], weight.group_index.long(), isinstance(modules[name], Conv1D))
        parametrize.register_parametrization(modules[name], "weight", own)
    run = _Run(student, teacher, blocks, list(stretches.values()), batches, processes)
    best, before = _copies(stretches), run.score()
    after = before
    for epoch in range(epochs):
        run.epoch(epoch, epochs, progress)
        found = run.score()
        if found < after:
            best, after = _copies(stretches), found
    if after < before:
        weights = {
            name: stretched(checkpoint.weight(name), each.cpu(), checkpoint.format.snap) for name, each in best.items()
        }
        for name, module in modules.items():
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
            matrix(module).copy_(weights[name].dequantize())
        after = min(before, run.score())  # with scales as a file holds them
    if after < before:
        with processes.together():
            if processes.rank == 0:
                replace_weights(checkpoint, weights)
                first = int(batches.counts.int().argmax())  # one that counts
                how = {"device": device, "dtype": dtype, "trust_remote_code": source.trusted}
                _check(directory, student, batches.tensors(range(first, first + 1)), how)
    return TuningReport(divergence=after, divergence_before=before)


class _Run:
    """The divergence of one model's predictions from another's, brought down step by step."""

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        blocks: Sequence[nn.Module],
        parameters: list[nn.Parameter],
        batches: Batches,
        processes: Processes,
    ) -> None:
        self._student, self._teacher, self._blocks, self._parameters = student, teacher, blocks, parameters
        self._recomputes = False
        self._batches, self._processes = batches, processes
        self._samples, self._aside = batches.split()
        self._size = -(-BATCH // processes.size)
        self._piece = min(self._size, batches.size)
        self._optimizer = torch.optim.Adam(parameters, lr=RATE, betas=BETAS)
        self._steps = max(processes.gather(-(-len(self._samples) // self._size)))  # of every process

    def epoch(self, number: int, epochs: int, progress: ProgressCallback) -> None:
        """Go through the samples once, in a new order."""
        generator, total = torch.Generator().manual_seed(number), epochs * self._steps
        draws = shuffled(self._samples, self._size, generator)
        for step in range(number * self._steps, (number + 1) * self._steps):
            batch = next(draws, range(0))
            for parameter, gradient in zip(self._parameters, self._gradients(batch), strict=True):
                self._processes.add_up(gradient)
                parameter.grad = gradient
            rate = 0.5 * RATE * (1 + math.cos(math.pi * step / total)) * min(1.0, (step + 1) / WARM_UP)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            progress(Progress(stage="tune", done=step + 1, total=total))

    @torch.no_grad()
    def score(self) -> float:
        """Return the divergence per token on the samples kept aside."""
        found, self._piece = in_pieces(
            lambda size: [self._divergence(part) for part in self._counted(self._aside, size)], self._piece
        )
        divergence, tokens = self._processes.totals(found)
        return divergence / max(tokens, 1.0)

    def _gradients(self, batch: range) -> list[Tensor]:
        """Return the gradients of some samples, with as much at once as memory holds."""
        try:
            found, self._piece = in_pieces(partial(self._backward, batch), self._piece)
            return found
        except RuntimeError as error:
            if self._recomputes or not out_of_memory(error):
                raise
        _LOG.warning("out of memory with one sample; going on, slower, with the activations of one block at a time")
        self._recomputes, self._piece = True, 1
        return self._backward(batch, 1)

    def _backward(self, batch: range, size: int) -> list[Tensor]:
        sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        forwards = [
            partial(recomputed, block.forward, use_reentrant=False, preserve_rng_state=False)
            for block in self._blocks
            if self._recomputes
        ]
        with torch.enable_grad(), forwards_replaced(self._blocks, forwards):
            for part in self._counted(batch, size):
                divergence, _ = self._divergence(part)
                with running_backwards():
                    found = torch.autograd.grad(divergence, self._parameters, allow_unused=True)
                for total, gradient in zip(sums, found, strict=True):
                    total += 0 if gradient is None else gradient
        return sums

    def _counted(self, samples: range, size: int) -> Iterator[range]:
        """Yield the samples in batches, but for those of which none counts."""
        return (part for part in pieces(samples, size) if self._batches.counts[part.start : part.stop].any())

    def _divergence(self, part: range) -> tuple[Tensor, Tensor]:
        """Return the sum over tokens that count of KL(teacher || student), and how many these are."""
        keep = self._batches.counts[part.start : part.stop].to(self._batches.device)
        tensors = {name: tensor[keep] for name, tensor in self._batches.tensors(part).items()}
        mask = self._batches.mask(part, len(self._batches.parts) - 1)[keep]
        with torch.no_grad():
            expected = _predictions(self._teacher, tensors)
        found = _predictions(self._student, tensors)
        each = (expected.exp() * (expected - found)).sum(-1)
        return each.masked_fill(~mask, 0).sum(), mask.sum()


def _predictions(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(**tensors, **without_cache(model)).logits
    return logits.float().log_softmax(-1)


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _check(directory: Path, student: PreTrainedModel, sample: Mapping[str, Tensor], how: Mapping[str, Any]) -> None:
    """Load what was written, and compare its logits with those of the model in memory."""
    written, _ = load(directory, backend="torch" if how["device"].type == "cpu" else "auto", **how)
    found, expected = (model(**sample, **without_cache(model)).logits.float() for model in (written, student))
    if most_differ(found, expected, how["dtype"]):
        raise CheckpointError(
            f"{directory} computes something other than the model whose scales were tuned; use tune_epochs=0, and "
            "report this model"
        )
