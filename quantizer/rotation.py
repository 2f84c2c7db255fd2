"""Rotations that spread over all channels what a few carry (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406)."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotation:
    """A random orthogonal matrix Q of (size, size), which is never built where `size` is a power of two.

    Random signs, then Hadamard's matrix of the largest power of two that divides `size`, and beside it, where something
    is left, a random orthogonal matrix of what is left.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._power = size & -size
        self._signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
        rest = size // self._power
        normal = torch.randn(rest, rest, generator=generator, dtype=torch.float64)
        self._rest = torch.linalg.qr(normal)[0] if rest > 1 else torch.ones(1, 1, dtype=torch.float64)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return rows Q of rows (..., size), in float64."""
        turned = (rows.double() * self._signs).view(*rows.shape[:-1], -1, self._power)
        width = 1
        while width < self._power:
            left, right = turned.view(*turned.shape[:-1], -1, 2, width).unbind(-2)
            turned = torch.stack((left + right, left - right), -2).flatten(-3)
            width *= 2
        whole: Tensor = self._rest @ turned
        return whole.flatten(-2).div_(self._power**0.5)
