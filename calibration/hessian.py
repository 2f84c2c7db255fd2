"""What the solvers need to know of a Linear's inputs: second moments, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import CalibrationError, ShapeError

_SLAB = 1024  # rows of a product made at once where it cannot be added in place


class InputStatistics:
    """Running sums over tokens of x xT and, for GPTAQ, of (x_float - x) xT.

    One instance serves all modules that receive the same tensor. Products of a batch are float32 with TF32 off; nothing
    but the sums is kept. These are float64, so that the products of batches are added nearly always without rounding,
    and their order, or who added which, does not show.

    Args:
        columns: Input features of the modules.
        device: Where the sums live.
        cross: Accumulate C as well.
    """

    def __init__(self, columns: int, device: torch.device, *, cross: bool = False) -> None:
        self.tokens = 0
        self._hessian = torch.zeros(columns, columns, device=device, dtype=torch.float64)
        self._cross = torch.zeros_like(self._hessian) if cross else None

    @property
    def paired(self) -> bool:
        """Whether C is accumulated."""
        return self._cross is not None

    @property
    def sums(self) -> list[Tensor]:
        """The sums themselves, (in, in) each: of H, then of C where asked for. Whoever changes them sets `tokens`."""
        return [self._hessian] if self._cross is None else [self._hessian, self._cross]

    def update(self, inputs: Tensor, float_inputs: Tensor | None = None) -> None:
        """Add a batch of tokens.

        Args:
            inputs: x, (tokens, in), any float dtype: what the partly quantized model feeds the modules.
            float_inputs: x~, the same tokens in the float model; needed exactly when `cross` was asked for.

        Raises:
            ShapeError: The two streams differ in shape, or only one came where both are needed.
        """
        if (float_inputs is None) != (self._cross is None):
            raise ShapeError(
                "float_inputs must come with every update, or with none: cross statistics pair the streams"
            )
        if float_inputs is not None and float_inputs.shape != inputs.shape:
            raise ShapeError(
                f"the float model's inputs are {tuple(float_inputs.shape)}, the quantized model's "
                f"{tuple(inputs.shape)}; GPTAQ pairs them token by token"
            )
        x = inputs.float()
        with full_float32():
            _add_product(self._hessian, x, x)
            if self._cross is not None and float_inputs is not None:
                _add_product(self._cross, float_inputs.float() - x, x)
        self.tokens += x.shape[0]

    def absorb(self, other: InputStatistics) -> None:
        """Count the tokens of `other`, over as many columns, in this one too."""
        self._hessian += other._hessian
        if self._cross is not None and other._cross is not None:
            self._cross += other._cross
        self.tokens += other.tokens

    def filled_up(self, pool: InputStatistics) -> InputStatistics:
        """These statistics where they have as many tokens as columns; else filled up to that with means of `pool`.

        What few tokens leave open, the shared statistics say: with n tokens over m columns
        H = (sum of x xT + (m - n) * mean of the pool) / m, and likewise C. Without a token it is the pool's mean.

        Args:
            pool: Of all experts that these are one of, over the same columns.
        """
        columns = len(self._hessian)
        missing = columns - self.tokens
        if missing <= 0:
            return self
        filled = InputStatistics(columns, self._hessian.device, cross=self._cross is not None)
        filled._hessian = self._hessian + missing * pool.hessian()
        cross = pool.cross()
        if self._cross is not None and cross is not None:
            filled._cross = self._cross + missing * cross
        filled.tokens = columns
        return filled

    def hessian(self) -> Tensor:
        """H = mean over tokens of x xT, (in, in) float32."""
        return self._mean(self._hessian)

    def cross(self) -> Tensor | None:
        """C = mean over tokens of (x~ - x) xT, (in, in) float32 (arXiv 2504.02692, dXXT); None where not asked for."""
        return None if self._cross is None else self._mean(self._cross)

    def _mean(self, total: Tensor) -> Tensor:
        if self.tokens == 0:
            raise CalibrationError("no calibration token reached this module; give more or other calibration text")
        return total.to(torch.float32, copy=True).div_(self.tokens)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add aT b, computed in float32 from (tokens, in) each, to `total`, (in, in) float64, some rows at a time."""
    for rows, columns in zip(torch.split(total, _SLAB), torch.split(a, _SLAB, dim=1), strict=True):
        rows += columns.T @ b


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products of float32 in float32: TF32 and the like are off inside, as before outside.

    Set per backend, because torch.get_float32_matmul_precision raises once a program has done so.
    """
    mkldnn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
