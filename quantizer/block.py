"""One block: its matrices calibrated and solved, group by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..calibration.statistics import InputStatistics
from .experts import Received
from .groups import Group, split_group
from .modules import Target
from .solving import Solving
from .states import States


def quantize_block(
    solving: Solving,
    states: States,
    layer: int,
    block: nn.Module,
    original: nn.Module | None,
    targets: list[Target],
    statistics_bytes: int,
) -> None:
    """Solve the targets of one block and put the solutions in their places.

    Modules that share an input are a stage, with one set of statistics; the stages that do not depend on each other,
    such as a layer's experts, are a group, calibrated in one pass over the batches. With `true_sequential` a group sees
    the outputs of the quantized groups before it; without it no pass sees any quantized module of the block.

    Args:
        solving: What has been decided.
        states: What enters the block.
        layer: Number of the block.
        block: The block.
        original: A copy of it that keeps its weights, for GPTAQ.
        targets: Its matrices.
        statistics_bytes: How much the statistics of one pass may take, as long as one stage fits.
    """
    if not targets:
        return
    by_name = {target.name: target for target in targets}
    twins = dict(zip(block.modules(), original.modules(), strict=True)) if original is not None else None
    groups = states.trace(layer, targets)

    def size(name: str) -> int:
        return by_name[name].weight.shape[1] ** 2 * 8 * (1 if original is None else 2)

    split = [[_Portion(group, part) for part in split_group(group, size, statistics_bytes)] for group in groups]
    total = sum(size(stage[0]) for group in groups for stage in group.stages)
    if not solving.config.true_sequential and total <= statistics_bytes:
        split = [[portion for portions in split for portion in portions]]
        passes = split
    else:
        passes = [[portion] for portions in split for portion in portions]
    pools: dict[int, InputStatistics] = {}
    waiting: list[Target] = []
    for number, portions in enumerate(passes):
        _calibrate(solving, states, layer, portions, by_name, pools, original, twins)
        waiting += [by_name[name] for portion in portions for stage in portion.part.stages for name in stage]
        last = number + 1 == len(passes)
        ends = last or passes[number + 1][0].group is not portions[-1].group
        if last or (solving.config.true_sequential and ends):
            solving.replace(waiting)
            waiting = []


@dataclass(frozen=True, eq=False)
class _Portion:
    """Some stages of a group."""

    group: Group
    part: Group


def _calibrate(
    solving: Solving,
    states: States,
    layer: int,
    portions: Sequence[_Portion],
    by_name: Mapping[str, Target],
    pools: dict[int, InputStatistics],
    original: nn.Module | None,
    twins: Mapping[nn.Module, nn.Module] | None,
) -> None:
    """One pass over the batches, and the solutions of what it serves.

    The first portion of a group of experts also finds out what all of them together receive: their pool, in `pools` by
    the identity of the group.
    """
    stream, batches, device = states.stream, states.batches, states.batches.device
    own: dict[str, InputStatistics] = {}
    fed: dict[str, list[InputStatistics]] = {}
    new_pools: list[InputStatistics] = []
    leaders: list[Target] = []
    for portion in portions:
        first = by_name[portion.part.stages[0][0]]
        # Experts that are modules of their own choose other tokens in the float model: nothing pairs them.
        paired = original is not None and not (portion.group.routed and first.expert is None)
        columns = first.weight.shape[1]
        for stage in portion.part.stages:
            leader = by_name[stage[0]]
            own[leader.name] = InputStatistics(leader.weight.shape[1], device, cross=paired)
            fed[leader.name] = [own[leader.name]]
            leaders.append(leader)
        if portion.group.routed and id(portion.group) not in pools:
            pool = pools[id(portion.group)] = InputStatistics(columns, device, cross=paired)
            new_pools.append(pool)
            for stage in portion.group.stages:
                if stage[0] not in fed:
                    leaders.append(by_name[stage[0]])
                fed.setdefault(stage[0], []).append(pool)
    routed = {stage[0] for portion in portions if portion.group.routed for stage in portion.group.stages}
    with_pair = [leader for leader in leaders if fed[leader.name][0].paired]

    def run(samples: range) -> list[tuple[Received, Received | None]]:
        received, routing = stream.receive(layer, batches[samples], states.quantized.read(samples), leaders)
        in_float: dict[str, Received] = {}
        if with_pair and twins is not None and states.float is not None:
            within = [leader.within(twins[leader.module]) for leader in with_pair]
            found, _ = stream.receive(layer, batches[samples], states.float.read(samples), within, original, routing)
            in_float = {leader.name: one for leader, one in zip(with_pair, found, strict=True)}
        return [(one, in_float.get(leader.name)) for leader, one in zip(leaders, received, strict=True)]

    def use(samples: range, inputs: list[tuple[Received, Received | None]]) -> None:
        for leader, (received, in_float) in zip(leaders, inputs, strict=True):
            batches.add(
                fed[leader.name],
                samples,
                received.rows,
                None if in_float is None else in_float.rows,
                routed=leader.name in routed,
                tokens=received.tokens,
                layer=layer,
                module=leader.name,
                skip=solving.config.skip_nonfinite,
            )

    batches.each(run, use)
    solving.gather(batches, [*own.values(), *new_pools], layer, leaders[0].name)
    for portion in portions:
        names = [(name, own[stage[0]]) for stage in portion.part.stages for name in stage]
        pool_of_group = pools.get(id(portion.group)) if portion.group.routed else None
        solving.solve([by_name[name] for name, _ in names], layer, [one for _, one in names], pool_of_group)


def quantize_head(solving: Solving, states: States, head: Target) -> None:
    """Solve the output layer on what leaves the last block."""
    stream, batches = states.stream, states.batches
    sums = InputStatistics(head.weight.shape[1], batches.device, cross=states.float is not None)

    def run(samples: range) -> tuple[Tensor, Tensor | None]:
        received = stream.tap_head(batches[samples], states.quantized.read(samples), head.module)
        if states.float is None:
            return received, None
        return received, stream.tap_head(batches[samples], states.float.read(samples), head.module)

    def use(samples: range, inputs: tuple[Tensor, Tensor | None]) -> None:
        batches.add([sums], samples, *inputs, layer=None, module=head.name, skip=solving.config.skip_nonfinite)

    batches.each(run, use)
    solving.gather(batches, [sums], None, head.name)
    solving.solve([head], None, [sums], None)
