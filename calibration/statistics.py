"""What the solvers need to know of a Linear's inputs: second moments, summed batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import CalibrationError

SLAB = 256  # rows of a sum made by one product; smaller ones leave less below the diagonal, and run less well


class InputStatistics:
    """Running sums over tokens of x xT and, for methods that compare with the float model, of (x~ - x) xT and d xT.

    One instance serves all modules that receive the same tensor. H is symmetric, so only its upper triangle is summed,
    slab by slab, and mirrored once at the end. Sums are float32: double precision was measured to cost 3 to 8 % of the
    time and twice the memory, and to move the perplexity of the example model no more than another order does.
    Products of float16 or bfloat16 on a GPU are exact in float32, and run on tensor cores.

    With `cross`, C is accumulated as well, and with `drift`, a number of rows, D. `tokens` is how many were added.
    """

    def __init__(self, columns: int, device: torch.device, *, cross: bool = False, drift: int = 0) -> None:
        self.tokens = 0
        self._hessian = torch.zeros(columns, columns, dtype=torch.float32, device=device)
        self._cross = torch.zeros_like(self._hessian) if cross else None
        self._drift = torch.zeros(drift, columns, dtype=torch.float32, device=device) if drift else None

    @property
    def paired(self) -> bool:
        """Whether C is accumulated."""
        return self._cross is not None

    @property
    def sums(self) -> list[Tensor]:
        """The sums themselves: of H, above the diagonal, then of C and D. Who adds to them, adds tokens."""
        return [each for each in (self._hessian, self._cross, self._drift) if each is not None]

    def update(self, inputs: Tensor, float_inputs: Tensor | None = None, drift: Tensor | None = None) -> None:
        """Add a batch of tokens.

        Args:
            inputs: x, (tokens, in), any float dtype: what the partly quantized model feeds the modules.
            float_inputs: x~, the same tokens in the float model; needed exactly when `cross` was asked for.
            drift: d, (tokens, out), how far what the module's outputs are added to is from where it is in the float
                model; needed exactly when that was asked for.
        """
        with full_float32():
            for start in range(0, inputs.shape[1], SLAB):
                slab = slice(start, start + SLAB)
                add_product(self._hessian[slab, start:], inputs[:, slab], inputs[:, start:])
                if self._cross is not None and float_inputs is not None:
                    add_product(self._cross[slab], float_inputs[:, slab] - inputs[:, slab], inputs)
            if self._drift is not None and drift is not None:
                add_product(self._drift, drift, inputs)
        self.tokens += inputs.shape[0]

    def absorb(self, other: InputStatistics) -> None:
        """Count the tokens of `other`, over as many columns, in this one too."""
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine += theirs
        self.tokens += other.tokens

    def filled_up(self, pool: InputStatistics) -> InputStatistics:
        """Return these where they have as many tokens as columns; else filled up to that with means of `pool`.

        The pool is that of all experts that these are one of. With n tokens over m columns
        H = (sum of x xT + (m - n) * mean of the pool) / m, and likewise C.
        """
        columns = len(self._hessian)
        missing = columns - self.tokens
        if missing <= 0:
            return self
        pool._check()
        filled = InputStatistics(columns, self._hessian.device, cross=self.paired)
        for total, own, shared in zip(filled.sums, self.sums, pool.sums, strict=True):
            torch.add(own, shared, alpha=missing / pool.tokens, out=total)
        filled.tokens = columns
        return filled

    def hessian(self) -> Tensor:
        """Return H = mean over tokens of x xT, (in, in) float32; CalibrationError where there is no token."""
        self._check()
        return mirror(self._hessian / self.tokens)

    def cross(self) -> Tensor | None:
        """Return C = mean over tokens of (x~ - x) xT, (in, in) float32 (arXiv 2504.02692, dXXT), where asked for."""
        self._check()
        return None if self._cross is None else self._cross / self.tokens

    def drift(self) -> Tensor | None:
        """Return D = mean over tokens of d xT, (out, in) float32 (arXiv 2509.06297), where asked for."""
        self._check()
        return None if self._drift is None else self._drift / self.tokens

    def _check(self) -> None:
        if self.tokens == 0:
            raise CalibrationError("no calibration token reached this module; give more or other calibration text")


def mirror(upper: Tensor) -> Tensor:
    """Complete a symmetric matrix, in place, of which rows are known from the diagonal on; return it."""
    for start in range(0, len(upper), SLAB):
        slab, after = slice(start, start + SLAB), slice(start + SLAB, None)
        upper[after, slab] = upper[slab, after].T
        upper[slab, slab] = upper[slab, slab].triu() + upper[slab, slab].triu(1).T
    return upper


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add aT b, of (tokens, some) and (tokens, others) in any float dtype, to float32 sums."""
    if a.device.type == "cuda" and a.dtype in (torch.float16, torch.bfloat16):
        total += torch.mm(a.T, b, out_dtype=torch.float32)
    else:
        total.addmm_(a.float().T, b.float())


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32: TF32 and the like are off inside, as before outside.

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
