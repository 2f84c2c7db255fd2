"""Errors of outputs that weigh with one another: rows solved part by part, errors of some moved onto others.

With F, (out, out), what errors of outputs weigh together, a weight loses tr(F E H ET), E = W - Q, as in YAQA (Tseng et
al. 2025, arXiv 2505.22988). Some rows B, all others O being as they are, lose tr(F_BB (E_B + D) H (E_B + D)T) and what
cannot be changed, D = inv(F_BB) F_BO E_O. So where F_BB is nearly diagonal, they are solved as if alone after D was
added to them: each part is made of rows that weigh little together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..calibration.statistics import full_float32
from .factor import factorize
from .methods import Solution
from .quantized import join_rows

PARTS = 8  # of which each is swept by itself: 32 are little better, and take longer
_DAMPING = 0.01  # of the mean diagonal of F

Sweep = Callable[[Tensor, Tensor], tuple[Solution, Tensor]]
Refine = Callable[[Solution, Tensor], Solution]


@torch.no_grad()
def solve_rows(outputs: Sequence[Tensor], columns: int, sweep: Sweep, refine: Refine, rounds: int) -> Solution:
    """Solve a weight part by part, then refine it part by part, so that tr(F E Hd ET) becomes small.

    Args:
        outputs: F, (out, out), symmetric, in the dtype of the solver; or those of several weights, one below the other,
            whose first parts are solved together, then their second ones, and so on.
        columns: How many W has.
        sweep: Rows, and what is added to them, (rows, in) -> their solution, and W of these rows with the method's
            own correction, without what was added.
        refine: A solution of rows, and W with what is added -> a better one; all other codes and scales stay.
        rounds: How often all parts are refined.
    """
    starts = list(itertools.accumulate(map(len, outputs), initial=0))
    every = [_Rows(each, start) for each, start in zip(outputs, starts[:-1], strict=True)]
    parts = [torch.cat([rows.parts[number] + rows.place.start for rows in every]) for number in range(PARTS)]
    parts = [part for part in parts if len(part)]  # the last ones have no rows if there are few
    target = outputs[0].new_zeros(starts[-1], columns)
    errors, solutions = torch.zeros_like(target), []
    for number, part in enumerate(parts):
        moved = torch.cat([rows.moved_by_earlier(number, errors[rows.place]) for rows in every])
        solution, target[part] = sweep(part, moved)
        errors[part] = target[part] - solution.weight.dequantize()
        solutions.append(solution)
    for _ in range(rounds):
        for number, part in enumerate(parts):
            moved = torch.cat([rows.moved_by_others(number, errors[rows.place]) for rows in every])
            solutions[number] = refine(solutions[number], target[part] + moved)
            errors[part] = target[part] - solutions[number].weight.dequantize()
    back = torch.argsort(torch.cat(parts))
    latents = [each.latent for each in solutions if each.latent is not None]
    return dataclasses.replace(
        solutions[0],
        weight=join_rows([each.weight for each in solutions], back),
        latent=torch.cat(latents)[back] if latents else None,
        loss=None,
        loss_before=None,
    )


class _Rows:
    """The rows of a weight in parts, and what errors of some add to others.

    Attributes:
        parts: Numbers of rows, those that matter most in the first.
        place: Where they are among those of all weights.
    """

    def __init__(self, outputs: Tensor, start: int) -> None:
        self.place = slice(start, start + len(outputs))
        self.parts = list(_apart(outputs))
        self._order = torch.cat(self.parts)
        factor = factorize(outputs, self._order, _DAMPING, outputs.dtype)
        self._upper, self._outputs = factor.upper, outputs.clone()
        self._outputs.diagonal().add_(factor.damping)

    def moved_by_earlier(self, number: int, errors: Tensor) -> Tensor:
        """Return what is added to the rows of a part when all later ones are still free, (rows, in).

        With F = R RT, R upper triangular in the order of the parts, that is inv(R_BBT) R_OBT E_O, O the earlier rows.
        """
        start = sum(map(len, self.parts[:number]))
        inside = slice(start, start + len(self.parts[number]))
        with full_float32():
            pull = self._upper[:start, inside].T @ errors[self._order[:start]]
            moved: Tensor = torch.linalg.solve_triangular(self._upper[inside, inside].T, pull, upper=False)
        return moved

    def moved_by_others(self, number: int, errors: Tensor) -> Tensor:
        """Return what is added to the rows of a part when all others are as they are, (rows, in)."""
        part = self.parts[number]
        across = self._outputs[part]
        inside = across[:, part]
        across[:, part] = 0
        with full_float32():
            return torch.cholesky_solve(across @ errors, torch.linalg.cholesky(inside))


def _apart(outputs: Tensor) -> Iterator[Tensor]:
    """Yield rows that weigh little together, one greedy choice after another, in PARTS parts."""
    importance = outputs.diagonal().clamp(min=torch.finfo(outputs.dtype).tiny)
    together = outputs.square().div_(importance).div_(importance.unsqueeze(1))
    together.fill_diagonal_(torch.inf)  # so that none is taken twice
    taken = torch.zeros_like(importance)  # 0, or infinity
    for size in map(len, torch.arange(len(outputs)).tensor_split(PARTS)):
        part, cost = [(importance - taken).argmax(0, keepdim=True)], taken
        for _ in range(size - 1):
            cost = cost + together[part[-1]].squeeze(0)
            part.append(cost.argmin(0, keepdim=True))
        numbers = torch.cat(part)[:size]
        taken[numbers] = torch.inf
        yield numbers
