"""Learned rounding: a block's codes and scales, moved until its output comes nearest to the float model's.

Signed gradient descent as in AutoRound (Cheng et al. 2023, arXiv 2309.05516), but with momentum, and around the values
that a sweep rounded instead of the float weights, so that what the sweep gained is kept. A weight is (value of code) *
exp(u), u of its group, code = round(t + v), t the sweep's latent in units of codes, v in [-0.5, 0.5]; u and v begin
at 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import ShapeError
from .grid import Snap
from .methods import Solution
from .quantized import QuantizedWeight

_MOMENTUM = 0.5  # a few samples at a time give noisy gradients, of which only the signs count
_WAY = 1.2  # over bits, in units of codes: twice how far steps of one sign take a weight; finer grids gain less by it
_SCALE_STEP = 0.002  # times _WAY over bits: of the logarithm of scales, in the first iteration


class LearnedWeight:
    """One weight while its rounding and its scales are learned.

    Args:
        solution: What the sweep decided, and the latent that it rounded.
        snap: What the file can hold; None where only codes move.

    Raises:
        ShapeError: A solution without its latent.
    """

    def __init__(self, solution: Solution, snap: Snap | None) -> None:
        weight, latent = solution.weight, solution.latent
        if latent is None:
            raise ShapeError("a solution without its latent; solve with learn_iterations in the settings")
        self._weight, self._snap, self._top = weight, snap, 2**weight.bits - 1
        self._back = None if weight.trivial_group_index else _inverse(weight.group_index)
        grouped = latent if self._back is None else latent[:, torch.argsort(self._back)]
        self._scale, self._offset = weight.scale.unsqueeze(-1), weight.offset.unsqueeze(-1)
        self._position = (grouped.view(*weight.scale.shape, -1) - self._offset) / self._scale
        self._move = torch.zeros_like(self._position)
        self._stretch = torch.zeros_like(self._scale)
        self._slope = torch.zeros_like(self._position)

    def value(self) -> Tensor:
        """Return the weight, (out, in) float32, with scales that no file has rounded yet."""
        return self._in_order(self._codes().mul_(self._scale).add_(self._offset).mul_(self._stretch.exp()))

    def descend(self, gradient: Tensor, step: float, scale_step: float) -> None:
        """Go one step against the signs of what the gradients with respect to `value()`, (out, in), add up to."""
        gradient = gradient.float() if self._back is None else gradient.float()[:, torch.argsort(self._back)]
        self._slope.mul_(_MOMENTUM).add_(gradient.reshape(self._position.shape))
        along = (self._slope * self._codes().mul_(self._scale).add_(self._offset)).sum(-1, keepdim=True)
        # Symmetric grids may have negative scales. A code beyond the end of its grid stays there however moved.
        self._move.sub_(self._slope.sign().mul_(self._scale.sign()), alpha=step).clamp_(-0.5, 0.5)
        if self._snap is not None:
            self._stretch.sub_(along.sign_(), alpha=scale_step)

    def stored(self) -> QuantizedWeight:
        """Return the weight as a file holds it."""
        codes = self._in_order(self._codes()).to(torch.uint8)
        weight = dataclasses.replace(self._weight, codes=codes)
        return weight if self._snap is None else stretched(weight, self._stretch.squeeze(-1), self._snap)

    def _codes(self) -> Tensor:
        return (self._position + self._move).round_().clamp_(0, self._top)

    def _in_order(self, grouped: Tensor) -> Tensor:
        flat = grouped.flatten(1)
        return flat if self._back is None else flat[:, self._back]


def stretched(weight: QuantizedWeight, stretch: Tensor, snap: Snap) -> QuantizedWeight:
    """Return a weight with scales multiplied by exp(stretch), (out, groups), as a file can hold them.

    Offsets follow: zero points stay, also where a scale is the least or the largest that there is.
    """
    scale, _ = snap(weight.scale * stretch.exp(), None, weight.bits)
    return dataclasses.replace(weight, scale=scale, offset=weight.offset / weight.scale * scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class Learned:
    """What learning came to.

    Attributes:
        weights: The weights by name, as files hold them; those that learning began with, where these score better.
        before: The score of what it began with.
        after: The score of these.
    """

    weights: Mapping[str, QuantizedWeight]
    before: float
    after: float


Matrices: TypeAlias = Iterable[tuple[str, Tensor]]  # each made when its turn comes: not all at once in memory
Gradients: TypeAlias = Callable[[Matrices], Mapping[str, Tensor]]
Score: TypeAlias = Callable[[Matrices], float]


def learn(
    solutions: Mapping[str, Solution], snap: Snap | None, *, iterations: int, gradients: Gradients, score: Score
) -> Learned:
    """Learn the rounding of some weights together.

    Args:
        solutions: What a sweep decided, and the latents that it rounded.
        snap: What the file can hold; None where only codes move.
        iterations: Steps, each shorter than the one before it.
        gradients: Names and matrices, (out, in) float32 -> the loss's gradients by name, on some samples or others.
        score: The same as files hold them -> how far they are from their aim, on samples kept aside; less is better.
    """
    moving = {name: LearnedWeight(one, snap) for name, one in solutions.items()}
    start = {name: one.weight for name, one in solutions.items()}
    before = score((name, weight.dequantize()) for name, weight in start.items())
    for step in range(iterations):
        rest = 1 - step / iterations
        for name, gradient in gradients((name, one.value()) for name, one in moving.items()).items():
            part = rest * _WAY / solutions[name].weight.bits
            moving[name].descend(gradient, part / iterations, part * _SCALE_STEP)
    stored = {name: one.stored() for name, one in moving.items()}
    after = score((name, weight.dequantize()) for name, weight in stored.items())
    if not after < before:
        stored, after = start, before
    return Learned(weights=stored, before=before, after=after)


def _inverse(group_index: Tensor) -> Tensor:
    """Return where each column stands when columns are sorted by their groups."""
    return torch.argsort(torch.argsort(group_index, stable=True))
