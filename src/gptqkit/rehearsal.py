"""The walk through one block by shapes alone: its own code on the meta device, where only the solver is left out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .calibration.batches import CalibrationBatches
from .calibration.hessian import InputStatistics
from .calibration.windows import TokenWindows
from .footprint import Footprint, dry_run
from .matrices import solver_bytes
from .progress import silent
from .quantizer.block import quantize_block, quantize_head
from .quantizer.modules import Target
from .quantizer.ranks import Ranks
from .quantizer.solving import Solving
from .quantizer.states import States
from .quantizer.stream import BlockStream, float_copy
from .workload import LARGEST_BATCH, Workload

_META = torch.device("meta")

# What a model raises where shapes depend on numbers, on those that stand in for them, or where an operator has no meta
# kernel. If it is wrong with the model, the run says so itself.
UNTRACEABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The most that a forward pass, or the solving of a module, holds at a time beside weights and its input, in bytes.

    Attributes:
        solved: The module that is solved; None in a forward pass.
        statistics: Sums over what modules receive, in a single pass.
        stage: Those among them that share an input, where they take most; passes can be split down to these.
        fixed: All else, whatever the number of samples in a pass.
        sample: And for each of them.
    """

    solved: str | None
    statistics: int
    stage: int
    fixed: int
    sample: int


def rehearse(
    model: PreTrainedModel, blocks: nn.ModuleList, layer: int | None, targets: list[Target], workload: Workload
) -> tuple[list[Phase], bool]:
    """The phases of the work on one block, and whether they were followed; if not, they are coarse estimates.

    Batches of one sample and of the largest size are walked; sizes between them are taken to lie on a line, which is
    never below what they need.

    Args:
        model: On the meta device, in the dtype in which it works.
        blocks: Its blocks.
        layer: Number of the block; None for the output layer.
        targets: What is quantized in it.
        workload: What is asked for.
    """
    if not workload.samples:
        return [_solving(targets, [], workload)], True
    largest = max(LARGEST_BATCH, workload.batch_size or 0)
    try:
        one, most = (_walk(model, blocks, layer, targets, workload, samples) for samples in (1, largest))
    except UNTRACEABLE:
        return _guess(targets, workload, next(model.parameters()).itemsize), False
    phases = []
    for few, many in zip(one, most, strict=True):
        slope = (many.fixed - few.fixed) // (largest - 1)
        phases.append(replace(many, fixed=many.fixed - slope * largest, sample=slope))
    return phases, True


def _walk(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    layer: int | None,
    targets: list[Target],
    workload: Workload,
    samples: int,
) -> list[Phase]:
    """The phases with one batch of `samples`, all in `fixed`."""
    tokens = TokenWindows(torch.zeros(samples, workload.sequence_length, dtype=torch.int64))
    batches, stream = _Batches(tokens, samples), BlockStream(model, blocks)
    paired, dtype = workload.streams == 2, next(model.parameters()).dtype
    with dry_run(experts=1 + max((target.expert or 0 for target in targets), default=0)) as footprint:
        states = States(stream, batches, Ranks.alone(), None, dtype, "device", None, paired=paired)
        original = float_copy(blocks[layer]) if paired and targets and layer is not None else None
        solving = _Solving(workload, footprint)
        if layer is None:
            quantize_head(solving, states, targets[0])
        else:
            quantize_block(solving, states, layer, blocks[layer], original, targets, statistics_bytes=sys.maxsize)
            states.advance(layer, original)
            solving.passed([])
    return solving.phases


def _guess(targets: list[Target], workload: Workload, itemsize: int) -> list[Phase]:
    """Three times the inputs and outputs of all but experts, beside the statistics of all modules."""
    sums = [8 * workload.streams * target.weight.shape[1] ** 2 for target in targets]
    features = sum(sum(target.weight.shape) for target in targets if not target.expert)
    sample = 3 * workload.sequence_length * features * itemsize
    solving = _solving(targets, sums, workload)
    return [replace(solving, solved=None, fixed=0, sample=sample), solving]


def _solving(targets: list[Target], sums: list[int], workload: Workload) -> Phase:
    """The solving of that one of `targets` which takes most, beside statistics of the sizes `sums`."""
    sizes = {target.name: solver_bytes(target, calibrated=workload.samples > 0) for target in targets}
    solved = max(sizes, key=lambda name: sizes[name], default=None)
    fixed = sizes.get(solved or "", 0)
    return Phase(solved=solved, statistics=sum(sums), stage=max(sums, default=0), fixed=fixed, sample=0)


class _Batches(CalibrationBatches):
    """Adds inputs to statistics without looking at their numbers.

    Attributes:
        pools: Identities of what gathers the inputs of several modules.
    """

    def __init__(self, tokens: TokenWindows, samples: int) -> None:
        super().__init__(tokens, samples, _META)
        self.pools: set[int] = set()

    def add(
        self,
        statistics: Sequence[InputStatistics],
        samples: range,  # noqa: ARG002
        inputs: Tensor,
        float_inputs: Tensor | None,
        **_: Any,
    ) -> None:
        streams = [stream.flatten(0, -2) for stream in (inputs, float_inputs) if stream is not None]
        for stream in streams:
            torch.isfinite(stream)
        for one in statistics:
            one.update(*streams)
        self.pools.update(map(id, statistics[1:]))


class _Solving(Solving):
    """Notes what is held, and solves nothing.

    Attributes:
        phases: So far.
    """

    def __init__(self, workload: Workload, footprint: Footprint) -> None:
        super().__init__(workload.config, Ranks.alone(), silent, 0, None, None)
        self.phases: list[Phase] = []
        self._workload, self._footprint = workload, footprint
        self._before = footprint.peak = footprint.live
        self._sums: list[int] = []

    def passed(self, sums: list[int]) -> None:
        """A forward pass has ended, and left statistics of these sizes."""
        self._sums = sums
        held = self._footprint.peak - self._before - sum(sums)
        phase = Phase(solved=None, statistics=sum(sums), stage=max(sums, default=0), fixed=held, sample=0)
        self.phases.append(phase)
        self._footprint.peak = self._footprint.live - sum(sums)  # which are gone when the next pass begins

    def gather(self, batches: Any, statistics: list[InputStatistics], *_: Any) -> None:
        self.passed([_size(one) for one in statistics if id(one) not in batches.pools])

    def solve(
        self,
        targets: list[Target],
        layer: int | None,  # noqa: ARG002
        statistics: Sequence[InputStatistics | None],
        pool: InputStatistics | None,
    ) -> None:
        phase = _solving(targets, self._sums, self._workload)
        beside = self._footprint.live - self._before - sum(self._sums)  # pools
        if pool is not None:  # statistics are filled up with it: two more sets of sums
            beside += 2 * max(_size(one) for one in statistics if one is not None)
        self.phases.append(replace(phase, fixed=phase.fixed + beside))

    def replace(self, targets: Any) -> None:
        pass


def _size(statistics: InputStatistics) -> int:
    return sum(each.nbytes for each in statistics.sums)
