"""Linears solved, by one process or by several together, and compared with plain rounding."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
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

    Processes take whole Linears in turn, and share the rows of each where fewer are left than processes, unless rows
    depend on one another. `weight_of` gives the float weight of one, (out, in); `outputs_of`, when their turn comes,
    what errors of the outputs of some weigh with one another, (out, out) by full name, where that is known.

    Raises:
        GptqkitError: A Linear that cannot be solved, by name.
        RankError: Processes whose arithmetic differs.
    """
    items = [(one, target) for one in measured for target in one.targets]
    known: tuple[Measured, Moments | None] | None = None
    for start in range(0, len(items), processes.size):
        chunk = items[start : start + processes.size]
        mine: list[Solved | None] = [None] * len(chunk)
        outputs = {} if outputs_of is None else outputs_of([target for _, target in chunk])
        with processes.together():
            for number, (one, target) in enumerate(chunk):
                rows = range(target.shape[0] if number == processes.rank else 0)
                if len(chunk) < processes.size and target.name not in outputs:
                    rows = processes.share(target.shape[0], ROWS)
                if rows:
                    if known is None or known[0] is not one:
                        known = None  # not beside the next
                        known = one, one.moments()
                    weight = weight_of(target)[rows.start : rows.stop].to(processes.device, torch.float32)
                    moments = known[1]
                    if moments is not None and moments.drift is not None:
                        moments = dataclasses.replace(moments, drift=moments.drift[rows.start : rows.stop])
                    mine[number] = _solve(target, weight, moments, outputs.get(target.name))
        outputs.clear()  # not in memory beside the next
        of_all = processes.gather(mine)
        for number, (one, target) in enumerate(chunk):
            yield one, target, merge([each[number] for each in of_all])


def _solve(target: Target, weight: Tensor, moments: Moments | None, outputs: Tensor | None) -> Solved:
    """Solve some rows of one Linear, and compare their output errors with plain rounding's."""
    config, snap = target.config, find_snap(target.config)
    if moments is not None and outputs is not None:
        moments = dataclasses.replace(moments, outputs=outputs.to(weight.device))
    start = time.perf_counter()
    with naming(target.name):
        solution = find_method(config.method).solve(weight, moments, config, snap)
    seconds = time.perf_counter() - start
    errors: tuple[float, ...] = ()
    if moments is not None:
        plain = solve_rtn(weight, None, config.plain_rounding(), snap)
        lost = [weight - each.weight.dequantize() for each in (solution, plain)]
        errors = tuple(output_error(each, moments.hessian, moments.outputs) for each in (weight, *lost))
    return Solved(solution.to("cpu"), errors, seconds)


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
    losses: dict[str, Any] = {}
    for name in ("loss", "loss_before"):
        found = [getattr(part.solution, name) for part in both]
        losses[name] = None if None in found else math.fsum(found)
    whole = join_rows([part.solution.weight for part in both])
    latents = [part.solution.latent for part in both if part.solution.latent is not None]
    return Solved(
        dataclasses.replace(
            first.solution,
            weight=whole,
            **losses,
            latent=torch.cat(latents) if latents else None,
        ),
        tuple(math.fsum(values) for values in zip(*(part.errors for part in both), strict=True)),
        max(part.seconds for part in both),
    )
