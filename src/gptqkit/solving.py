"""Linears solved, by one process or by several together, and compared with plain rounding."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .calibration.statistics import InputStatistics
from .distributed import Processes
from .errors import GptqkitError, RankError
from .export.formats import find_snap
from .quantizer.gptq import output_error, solve_rtn
from .quantizer.methods import Moments, Solution, find_method
from .quantizer.quantized import join_rows
from .subsets import Subset
from .targets import Target

ROWS = 32  # modules are cut at multiples of so many rows
TOGETHER = 1 << 25  # weights that are solved as one

Share = list[tuple[Target, range]]
"""Linears, and which of their rows."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Linears that share an input, and what calibration, if any, found out about it.

    Attributes:
        targets: The Linears.
        statistics: Of the input.
        pool: Of experts: what all experts of the layer received.
    """

    targets: Subset
    statistics: InputStatistics | None = None
    pool: InputStatistics | None = None

    def moments(self) -> Moments | None:
        """Return the means that solvers work on; an expert that few tokens reach is filled up with the pool's."""
        if self.statistics is None:
            return None
        filled = self.statistics if self.pool is None else self.statistics.filled_up(self.pool)
        cross, drift = filled.cross(), filled.drift()
        return Moments(hessian=filled.hessian(), cross=cross, drift=drift, tokens=filled.tokens)


@dataclass(frozen=True, eq=False)
class Solved:
    """What solving a Linear, or some rows of one, came to.

    Attributes:
        solution: What the solver found, on the CPU.
        errors: Mean squares per token of W X, (W - Q) X, and (W - R) X for plain rounding R; sums over rows, weighed
            as the solver does.
        seconds: Time of the solver.
    """

    solution: Solution
    errors: tuple[float, ...]
    seconds: float


def solve_all(
    measured: Sequence[Measured],
    weight_of: Callable[[Target], Tensor],
    processes: Processes,
    outputs_of: Callable[[Sequence[Target]], dict[str, Tensor]] | None = None,
) -> Iterator[tuple[Measured, Target, Solved]]:
    """Solve Linears and yield them in order; every process gets, and must take, all results.

    With `two_sided`, those that share an input and settings are solved as one weight, up to a size: their parts, of few
    rows, cost less beside one another. Processes take such in turn; where fewer are left than processes, they share the
    Linears whose rows depend on one another, and the rows of others. `weight_of` gives the float weight of one, (out,
    in); `outputs_of`, when their turn comes, what errors of the outputs of some weigh with one another, (out, out) by
    full name, where that is known.

    Raises:
        GptqkitError: A Linear that cannot be solved, by name.
        RankError: Processes whose arithmetic differs.
    """
    units = [(one, unit) for one in measured for unit in alike(one.targets)]
    known: tuple[Measured, Moments | None] | None = None
    for start in range(0, len(units), processes.size):
        chunk = units[start : start + processes.size]
        outputs = {} if outputs_of is None else outputs_of([target for _, unit in chunk for target in unit])
        mine: dict[str, Solved] = {}
        with processes.together():
            for (one, _), shares in zip(chunk, _divided([unit for _, unit in chunk], outputs, processes), strict=True):
                for share in filter(None, shares):
                    if known is None or known[0] is not one:
                        known = None  # not beside the next
                        known = one, one.moments()
                    weights = [weight_of(target)[rows.start : rows.stop] for target, rows in share]
                    weight = torch.cat([each.to(processes.device, torch.float32) for each in weights])
                    mine |= _solve(share, weight, known[1], outputs)
        outputs.clear()  # not in memory beside the next
        of_all = processes.gather(mine)
        for one, unit in chunk:
            for target in unit:
                yield one, target, merge([each.get(target.name) for each in of_all])


def alike(targets: Subset) -> Iterator[list[Target]]:
    """Yield Linears that share an input, in order, those together that are solved as one weight."""
    unit: list[Target] = []
    for target in targets:
        same = bool(unit) and target.config.two_sided and target.config == unit[0].config
        if unit and not (same and sum(each.weights for each in [*unit, target]) <= TOGETHER):
            yield unit
            unit = []
        unit.append(target)
    yield unit


def _divided(
    units: Sequence[list[Target]], outputs: Mapping[str, Tensor], processes: Processes
) -> Iterator[list[Share]]:
    """Yield of every unit what this process solves: Linears whose rows depend on one another, and others."""
    whole, turns = len(units) == processes.size, itertools.count()
    for number, unit in enumerate(units):
        shares: list[Share] = [[], []]
        for target in unit:
            rows, dependent = range(target.shape[0]), target.name in outputs
            if whole or dependent:
                turn = number if whole else next(turns) % processes.size
                rows = rows if turn == processes.rank else range(0)
            else:
                rows = processes.share(len(rows), ROWS)
            if rows:
                shares[dependent].append((target, rows))
        yield shares


def _solve(share: Share, weight: Tensor, moments: Moments | None, outputs: Mapping[str, Tensor]) -> dict[str, Solved]:
    """Solve rows of Linears, one below the other, and compare their output errors with plain rounding's."""
    config, snap = share[0][0].config, find_snap(share[0][0].config)
    sides = [outputs[target.name].to(weight.device) for target, _ in share if target.name in outputs]
    if moments is not None:
        rows = share[0][1]  # where outputs are added to something, a Linear is by itself
        drift = None if moments.drift is None else moments.drift[rows.start : rows.stop]
        moments = dataclasses.replace(moments, drift=drift, outputs=sides)
    start = time.perf_counter()
    with naming(", ".join(target.name for target, _ in share)):
        whole = find_method(config.method).solve(weight, moments, config, snap)
    if weight.device.type == "cuda":  # which has only been told by now what to do
        torch.cuda.current_stream(weight.device).synchronize()
    seconds = time.perf_counter() - start
    plain = None if moments is None else solve_rtn(weight, None, config.plain_rounding(), snap)
    found: dict[str, Solved] = {}
    stop = 0
    for number, (target, rows) in enumerate(share):
        part = slice(stop, stop := stop + len(rows))
        solution = whole.rows(part)
        errors: tuple[float, ...] = ()
        if moments is not None and plain is not None:
            lost = [weight[part] - each.dequantize() for each in (solution.weight, plain.weight.rows(part))]
            side = sides[number] if sides else None
            errors = tuple(output_error(each, moments.hessian, side) for each in (weight[part], *lost))
        found[target.name] = Solved(solution.to("cpu"), errors, seconds * len(rows) / len(weight))
    return found


@contextmanager
def naming(module: str) -> Iterator[None]:
    """Name the module in errors about it."""
    try:
        yield
    except GptqkitError as problem:
        raise type(problem)(f"{module}: {problem}") from problem


def merge(parts: Sequence[Solved | None]) -> Solved:
    """Return one Linear from its parts, in the order of their rows; RankError where they were solved differently."""
    first, *rest = [part for part in parts if part is not None]
    if not rest:
        return first
    for part in rest:
        damping = first.solution.damp_percent, part.solution.damp_percent
        orders = first.solution.weight.group_index, part.solution.weight.group_index
        if damping[0] != damping[1] or not torch.equal(*orders):
            raise RankError(
                f"processes solved one module with dampings {damping[0]} and {damping[1]} or with other groups, so "
                "their arithmetic differs; run all on one kind of hardware with one version of torch"
            )
    both = [first, *rest]
    stacked: dict[str, Any] = {}
    for name in ("loss", "loss_before", "latent"):
        found = [getattr(part.solution, name) for part in both]
        stacked[name] = None if found[0] is None else torch.cat(found)
    whole = join_rows([part.solution.weight for part in both])
    return Solved(
        dataclasses.replace(first.solution, weight=whole, **stacked),
        tuple(math.fsum(values) for values in zip(*(part.errors for part in both), strict=True)),
        max(part.seconds for part in both),
    )
