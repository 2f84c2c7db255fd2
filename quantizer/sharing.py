"""The solving of a stage's modules spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import RankError
from .ranks import Ranks, share_of
from .solver import Solution

ROWS = 32
"""Modules are cut at multiples of so many rows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """What solving a module, or some rows of one, came to.

    Attributes:
        solution: What the solver found.
        sums: Any sums over rows, such as the powers of errors: those of a module are the sums of its parts'.
    """

    solution: Solution
    sums: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Unit:
    """Some rows of one module, and the rank that solves them."""

    module: int
    rows: slice
    rank: int


def solve_shared(
    ranks: Ranks, shapes: Sequence[tuple[int, int]], solve: Callable[[int, slice], Solved]
) -> Iterator[Solved]:
    """Solve modules together; every rank gets all results, in order.

    Whole modules are spread where there are at least as many as ranks, rows of every module otherwise. All ranks must
    call it with equal arguments and take all that it yields. One process alone solves each module when it is asked for;
    several solve all before the first is handed out.

    Args:
        ranks: The processes.
        shapes: (out, in) of every module, in the order wanted.
        solve: Solves the given rows of the module of that index, on `ranks.device`.

    Raises:
        RankError: Parts of a module that do not fit together; a rank failed.
    """
    if ranks.size == 1:
        for module, (rows, _) in enumerate(shapes):
            yield solve(module, slice(0, rows))
        return
    units = plan(shapes, ranks.size)
    mine = {index: solve(unit.module, unit.rows) for index, unit in enumerate(units) if unit.rank == ranks.rank}
    described = {index: part for of_rank in ranks.gather(_describe(mine)) for index, part in of_rank.items()}
    for module in range(len(shapes)):
        parts = [
            _hand_round(ranks, unit.rank, mine.pop(index, None), described[index])
            for index, unit in enumerate(units)
            if unit.module == module
        ]
        yield merge(parts)


def plan(shapes: Sequence[tuple[int, int]], size: int) -> list[_Unit]:
    """Who solves what, units of one module in the order of their rows.

    Modules go, the most expensive first, to the rank that has least to do: sweeping costs rows * columns^2, factorising
    columns^3. Ranks that share a module all factorise its Hessian.
    """
    if len(shapes) < size:
        return [
            _Unit(module, slice(rows.start, rows.stop), rank)
            for module, (count, _) in enumerate(shapes)
            for rank in range(size)
            if (rows := share_of(rank, size, count, ROWS))
        ]
    load = [0] * size
    owner = [0] * len(shapes)
    cost = [rows * columns**2 + columns**3 for rows, columns in shapes]
    for module in sorted(range(len(shapes)), key=lambda module: -cost[module]):
        owner[module] = load.index(min(load))
        load[owner[module]] += cost[module]
    return [_Unit(module, slice(0, rows), owner[module]) for module, (rows, _) in enumerate(shapes)]


def merge(parts: Sequence[Solved]) -> Solved:
    """One module from its parts, in the order of their rows.

    Raises:
        RankError: They were solved with another damping or order of columns.
    """
    first = parts[0].solution
    if len(parts) == 1:
        return parts[0]
    for part in parts[1:]:
        other = part.solution
        if (first.damp, first.damp_escalations) != (other.damp, other.damp_escalations) or not torch.equal(
            first.weight.group_index, other.weight.group_index
        ):
            raise RankError(
                f"ranks solved one module with dampings {first.damp} and {other.damp} or with other groups, so their "
                "arithmetic differs; run all ranks on one kind of hardware with one version of torch"
            )
    weights = [part.solution.weight for part in parts]
    losses = [part.solution.loss for part in parts if part.solution.loss is not None]
    whole = replace(
        first.weight,
        codes=torch.cat([weight.codes for weight in weights]),
        scale=torch.cat([weight.scale for weight in weights]),
        zero=torch.cat([weight.zero for weight in weights]),
    )
    return Solved(
        solution=replace(first, weight=whole, loss=math.fsum(losses) if losses else None),
        sums=tuple(math.fsum(values) for values in zip(*(part.sums for part in parts), strict=True)),
    )


_TENSORS = ("group_index", "scale", "zero", "codes")  # as they lie in one run of bytes, each aligned


def _with_tensors(part: Solved, tensors: Iterable[Tensor]) -> Solved:
    """The same with other tensors, in the order of `_TENSORS`."""
    held: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
    return replace(part, solution=replace(part.solution, weight=replace(part.solution.weight, **held)))


def _tensors(part: Solved) -> list[Tensor]:
    return [getattr(part.solution.weight, name) for name in _TENSORS]


def _describe(mine: dict[int, Solved]) -> dict[int, Solved]:
    """The same without storage: what fits into a small message."""
    return {key: _with_tensors(part, (tensor.to("meta") for tensor in _tensors(part))) for key, part in mine.items()}


def _hand_round(ranks: Ranks, source: int, part: Solved | None, described: Solved) -> Solved:
    """The part that `source` has, on all ranks."""
    hollow = _tensors(described)
    sizes = [tensor.numel() * tensor.element_size() for tensor in hollow]
    if part is None:
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=ranks.device)
    else:
        message = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in _tensors(part)])
    ranks.broadcast(message, source)
    runs = torch.split(message, sizes)
    return _with_tensors(
        described, (run.clone().view(tensor.dtype).view(tensor.shape) for run, tensor in zip(runs, hollow, strict=True))
    )
