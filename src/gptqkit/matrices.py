"""How large one matrix is: while it is solved, once it is quantized, and in a checkpoint.

The solver of one module, weight (n, k), in bytes; s is 4, or 8 with `float64`; g columns share a group, b a block:

    kept       4 k^2 H + 4 k^2 C (gptaq) + 4 n k (W in float32, where the block is not) + s n k (W, columns first)
    factor     kept + 3 s k^2                                        Cholesky factor of H, flipped, in order
    correction kept + 4 s k^2                                        R, C in order, two triangular solutions
    sweep      kept + s k^2 (R) + 2 s k^2 (gptaq: P and C in order)
                    + s n k (W in order, values, error; gptaq: w when rounded) + n k (codes)
                    + 2 s n k / g + s n (3 b + g) + 2 s b^2          grids; a block and its copies, a trial of a grid
    rounding   4 k^2 + 4 n k + 10 n k + 12 n g                       plain rounding beside the result
    errors     4 k^2 + 4 n k + 14 n k                                output errors of both

The largest of them counts. `quantizer/solver.py` and `quantizer/walk.py` are what is modelled; a test counts the bytes
of real runs.
"""

from __future__ import annotations

from .quantizer.modules import Target, pieces


def solver_bytes(target: Target, *, calibrated: bool) -> int:
    """What solving and judging one module takes beside its statistics, by the formulas above.

    Args:
        target: The module, in the dtype in which it works.
        calibrated: Whether there is a Hessian.
    """
    config, (rows, columns) = target.config, target.weight.shape
    size = 8 if config.float64 else 4
    weight, square = rows * columns, columns * columns
    group = config.group_size or columns
    grids = 2 * size * weight // group  # scales and zeros
    kept = 4 * square * calibrated + 4 * weight * (target.weight.itemsize != 4)
    rounding = kept + 9 * weight + grids + max(2 * weight, 12 * rows * group)
    judging = max(rounding + weight, kept + 14 * weight) if calibrated else rounding
    if config.method == "rtn":
        return judging
    paired = config.method == "gptaq"
    kept += 4 * square * paired + size * weight
    factor = kept + size * square * (4 if paired else 3)  # or the correction
    block = config.block_size if group == columns else max(group, config.block_size // group * group)
    width = min(block, columns)
    sweep = kept + size * square * (3 if paired else 1) + weight * (size * (4 if paired else 3) + 1)
    sweep += grids + size * rows * (3 * width + group) + 2 * size * width * width
    return max(factor, sweep, judging)


def stored_bytes(target: Target) -> int:
    """qweight, qzeros, scales and g_idx of one matrix in a checkpoint; gate and up projections of an expert are two."""
    (rows, columns), bits = target.weight.shape, target.config.bits
    groups = columns // (target.config.group_size or columns)
    return rows * columns * bits // 8 + groups * rows * bits // 8 + groups * rows * 2 + 4 * columns * pieces(target)


def decided_bytes(target: Target) -> int:
    """Codes, scales, zeros and group index of one matrix in memory."""
    rows, columns = target.weight.shape
    groups = columns // (target.config.group_size or columns)
    return rows * columns + groups * rows * 4 + columns * 4
