"""Slow textbook versions of the solvers, in float64, for the tests to compare with."""

import torch


def correlated(rows, columns, tokens, seed=0):
    """A weight and inputs with correlated columns and a few loud ones: (rows, columns), (tokens, columns) float64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    loud = torch.exp(0.7 * torch.randn(columns, generator=generator, dtype=torch.float64))
    inputs = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ (mix + torch.eye(columns)) * loud
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, inputs


def moments(inputs):
    return inputs.T @ inputs / len(inputs)


def damped(hessian, damp=0.01):
    return hessian + damp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)


def round_to(weight, scale, zero, max_code):
    """Codes of a column, (rows,)."""
    return (torch.round(weight / scale) + zero).clamp(0, max_code)


def first_of_inverse(hessian):
    """The first row of the inverse."""
    unit = torch.zeros(len(hessian), 1, dtype=hessian.dtype)
    unit[0] = 1
    return torch.cholesky_solve(unit, torch.linalg.cholesky(hessian))[:, 0]


def textbook_gptq(weight, hessian, permutation, scale, zero, max_code, cross=None, alpha=0.25):
    """GPTQ (GPTAQ with `cross`) that factorizes the remaining Hessian again at every column.

    scale and zero are (rows, columns): the grid of every weight. Codes come back in the order of the columns.
    """
    w = weight.clone()
    codes = torch.empty_like(w)
    for position, column in enumerate(permutation.tolist()):
        rest = permutation[position:]
        first = first_of_inverse(hessian[rest][:, rest])
        now = w[:, column].clone()
        codes[:, column] = round_to(now, scale[:, column], zero[:, column], max_code)
        rounded = scale[:, column] * (codes[:, column] - zero[:, column])
        w[:, rest] -= ((now - rounded) / first[0])[:, None] * first
        after = permutation[position + 1 :]
        if cross is not None and len(after):
            w[:, after] += alpha * now[:, None] * (cross[column, after] @ torch.linalg.inv(hessian[after][:, after]))
    return codes


def nearest_plane(weight, hessian, scale, zero, max_code):
    """Babai's nearest plane on the lattice basis diag(s) R, natural order."""
    upper = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    target = weight @ upper
    codes = torch.empty_like(weight)
    for column in range(weight.shape[1]):
        centre = target[:, column] / upper[column, column]
        codes[:, column] = round_to(centre, scale[:, column], zero[:, column], max_code)
        rounded = scale[:, column] * (codes[:, column] - zero[:, column])
        target = target - rounded[:, None] * upper[column]
    return codes
