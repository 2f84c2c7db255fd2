"""The damped Hessian's triangular factor, without an explicit inverse."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.statistics import full_float32
from ..errors import NonFiniteError, SingularHessianError

ESCALATION = 10.0
MAX_ESCALATIONS = 5


@dataclass(frozen=True, eq=False)
class HessianFactor:
    """R with H + D = R RT, D diagonal.

    Attributes:
        upper: R, (in, in), upper triangular, rows and columns in the order of the sweep.
        damp_percent: The mean of D, as a share of H's mean diagonal.
        damping: The diagonal of D, (in,), in H's own order.
        escalations: How often it had to be multiplied by 10.
        dead_columns: Columns whose input was always zero: their weights do not matter, and damping alone keeps them.
    """

    upper: Tensor
    damp_percent: float
    damping: Tensor
    escalations: int
    dead_columns: int


def factorize(
    hessian: Tensor, permutation: Tensor, damp: float, dtype: torch.dtype, shrink: float = 0.0
) -> HessianFactor:
    """Return the upper factor R of the damped Hessian, columns permuted.

    The published U = cholesky(inv(H), upper) is inv(R); R comes from one Cholesky factorisation of the matrix flipped
    in both axes, with no inverse. Where the matrix is not positive definite, damping grows tenfold, at most 5 times.

    Args:
        hessian: H, (in, in); not modified.
        permutation: (in,) int64, the column at each position of the sweep.
        damp: Share of m = mean(diag H) added to the diagonal.
        dtype: float32 or float64.
        shrink: Share of itself added besides to every entry of the diagonal, beside which all others count less.

    Raises:
        NonFiniteError: H holds NaN or infinity.
        SingularHessianError: H is not positive definite at the largest damping.
    """
    diagonal = hessian.diagonal().to(dtype)
    mean = diagonal.mean()
    if not bool(hessian.sum().isfinite()):
        raise NonFiniteError("the Hessian holds NaN or infinity; check the calibration activations")
    if float(mean) == 0:  # no input ever arrived: every column is dead, and the sweep comes to plain rounding
        mean = torch.ones_like(mean)
    backwards = permutation.flip(0)
    for escalations in range(MAX_ESCALATIONS + 1):
        share, besides = (each * ESCALATION**escalations for each in (damp, shrink))
        damped = hessian[backwards][:, backwards].to(dtype)
        damping = share * mean + besides * diagonal
        damped.diagonal().add_(damping[backwards])
        with full_float32():
            lower, info = torch.linalg.cholesky_ex(damped)
        del damped
        if besides:
            share = float(damping.mean() / mean)
        if int(info) == 0:
            dead = int((diagonal == 0).sum())
            return HessianFactor(lower.flip(0, 1).contiguous(), share, damping, escalations, dead)
    raise SingularHessianError(
        f"the Hessian is not positive definite even with damping {share:g} of its mean diagonal; give more calibration "
        "tokens, or set float64=True"
    )
