"""The passes over one block, run by shapes alone: what each gathers, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ArchitectureError
from .footprint import dry_run
from .quantizer.groups import Group, split_group
from .quantizer.modules import Target
from .quantizer.stream import BlockStream


@dataclass(frozen=True, kw_only=True)
class Height:
    """Bytes that grow with the samples of a batch.

    Attributes:
        fixed: Whatever their number.
        sample: For each of them.
    """

    fixed: int
    sample: int


NOTHING = Height(fixed=0, sample=0)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A pass over the samples that gathers what some modules receive.

    Attributes:
        groups: The stages that it serves: names of modules, those that share an input together.
        top: The most that is held at a time, beside the block's input.
        kept: What is held when it ends: the inputs of the modules.
        widest: The largest of them.
    """

    groups: tuple[Group, ...]
    top: Height
    kept: Height
    widest: Height


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What happens to one block.

    Attributes:
        passes: In their order.
        through: The most that the pass through the whole block holds, its result included.
        exact: Whether shapes could be followed; otherwise everything is guessed from the sizes of the modules.
    """

    passes: tuple[Pass, ...]
    through: Height
    exact: bool


def trace_block(
    stream: BlockStream,
    layer: int,
    targets: Sequence[Target],
    *,
    length: int,
    arrange: Callable[[Sequence[Group]], list[list[Group]]],
) -> Trace:
    """The passes over block `layer` of a model on the meta device.

    Args:
        stream: The model, in the dtype in which it works.
        layer: Number of the block.
        targets: What is quantized in it.
        length: Tokens per sample.
        arrange: Which groups are served by the same pass; see `arrange_passes`.
    """
    by_name = {target.name: target for target in targets}
    experts = 1 + max((target.expert or 0 for target in targets), default=0)
    try:
        with dry_run(experts):
            batch = _batch(1, length)
            groups = stream.trace(layer, batch, stream.embed(batch), targets)
        passes = []
        for served in arrange(groups):
            leaders = [by_name[stage[0]] for group in served for stage in group.stages]

            def receive(batch: Mapping[str, Tensor], hidden: Tensor, leaders: list[Target] = leaders) -> list[Tensor]:
                return [received.rows for received in stream.receive(layer, batch, hidden, leaders)[0]]

            top, kept, widest = _run(stream, length, experts, receive)
            passes.append(Pass(groups=tuple(served), top=top, kept=kept, widest=widest))
        through, _, _ = _run(stream, length, experts, lambda batch, hidden: [stream.run(layer, batch, hidden)])
        return Trace(passes=tuple(passes), through=through, exact=True)
    except (ArchitectureError, RuntimeError):  # shapes that depend on numbers, or operators without a meta kernel
        return _guess(targets, length, arrange)


def arrange_passes(
    groups: Sequence[Group], size: Callable[[str], int], statistics_bytes: int, *, true_sequential: bool
) -> list[list[Group]]:
    """The groups of each pass, as `quantizer.block.quantize_block` takes them.

    Args:
        groups: In the order of their calls.
        size: Bytes of the statistics of a stage, by the name of its first module.
        statistics_bytes: How much the statistics of one pass may take, as long as one stage fits.
        true_sequential: Whether a group waits for those before it.
    """
    total = sum(size(stage[0]) for group in groups for stage in group.stages)
    if not true_sequential and total <= statistics_bytes:
        return [list(groups)] if groups else []
    return [[part] for group in groups for part in split_group(group, size, statistics_bytes)]


def _batch(samples: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(samples, length, dtype=torch.int64, device="meta")}


def _run(
    stream: BlockStream,
    length: int,
    experts: int,
    work: Callable[[Mapping[str, Tensor], Tensor], list[Tensor]],
) -> tuple[Height, Height, Height]:
    """What `work` holds at its height and at its end, and the largest of what it returns."""
    found = []
    for samples in (1, 2):
        batch = _batch(samples, length)
        with dry_run(experts) as footprint:
            hidden = stream.embed(batch)
            before, footprint.peak = footprint.live, footprint.live
            result = work(batch, hidden)
            kept = footprint.live - before
        found.append((footprint.peak - before, kept, max((tensor.nbytes for tensor in result), default=0)))
        del result
    top, kept_at_end, widest = (_line(one, two) for one, two in zip(*found, strict=True))
    return top, kept_at_end, widest


def _line(one: int, two: int) -> Height:
    return Height(fixed=max(0, 2 * one - two), sample=two - one)


def _guess(targets: Sequence[Target], length: int, arrange: Callable[[Sequence[Group]], list[list[Group]]]) -> Trace:
    """Every module by itself; a pass holds three times the inputs and outputs of all but experts, of these of one."""
    dense = [target for target in targets if not target.expert]
    features = sum(sum(target.weight.shape) for target in dense)
    size = targets[0].weight.element_size() if targets else 0
    top = Height(fixed=0, sample=3 * length * features * size)
    passes = []
    for served in arrange([Group([[target.name]]) for target in targets]):
        inputs = {stage[0] for group in served for stage in group.stages}
        columns = [target.weight.shape[1] for target in targets if target.name in inputs]
        kept = Height(fixed=0, sample=length * sum(columns) * size)
        passes.append(
            Pass(groups=tuple(served), top=top, kept=kept, widest=Height(fixed=0, sample=length * max(columns) * size))
        )
    return Trace(passes=tuple(passes), through=top, exact=False)
