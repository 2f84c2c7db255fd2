"""What a sweep decided, decided again with everything else known: scales refitted, codes moved one by one.

A sweep decides every code before those that come after it. Here the loss tr(E H ET), E = W - Q, is brought down by
coordinate descent (QuantEase, Behdin et al. 2023, arXiv 2309.01885): over scales as well as codes, all rows at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.statistics import full_float32
from ..kernels.library import KernelLibrary
from ..kernels.sweep import MOST_COLUMNS, Sweep, sweep_block
from ..kernels.trial import sweep_library
from .grid import GroupGrid, Snap
from .quantized import QuantizedWeight

_SEGMENT = 16  # columns decided one by one before the rest of their group is updated with one matrix product


@dataclass(frozen=True, kw_only=True, eq=False)
class Refined:
    """What refinement came to.

    Attributes:
        weight: The new codes, scales and offsets.
        gain: (out,) float64, by how much E H ET of every row fell; it rises in none.
        latent: (out, in), the values that were rounded last: each the best for its code, all others being as they are.
    """

    weight: QuantizedWeight
    gain: Tensor
    latent: Tensor


@torch.no_grad()
def refine(weight: QuantizedWeight, target: Tensor, hessian: Tensor, snap: Snap | None, rounds: int) -> Refined:
    """Bring down tr(E H ET), E = W - Q, without an increase in any row.

    In every round, group by group: the group's scale becomes the best one for the codes as they are, then each of its
    codes the best one for the scale, everything else being fixed.

    Args:
        weight: Q, to begin with.
        target: W, (out, in), float32 or float64.
        hessian: H, (in, in) of the same dtype, positive definite; columns in the order of W's.
        snap: What the file can hold; None where only codes may move.
        rounds: How often all groups are gone through.
    """
    order = torch.argsort(weight.group_index.long(), stable=True)
    inside = hessian if weight.trivial_group_index else hessian[order][:, order]
    descent = _Descent(weight, order, target.T[order], inside, sweep_library(target))
    with full_float32():
        for _ in range(rounds):
            for number in range(weight.scale.shape[1]):
                descent.visit(number, snap)
    back = torch.argsort(order)
    refined = dataclasses.replace(
        weight,
        codes=descent.codes[back].T.to(torch.uint8).contiguous(),
        scale=torch.stack([grid.scale for grid in descent.grids], 1).float(),
        offset=torch.stack([grid.offset for grid in descent.grids], 1).float(),
    )
    return Refined(weight=refined, gain=descent.gain, latent=descent.latent[back].T)


class _Descent:
    """Codes and grids while they are moved; columns first, (in, out), those of a group side by side."""

    def __init__(
        self, weight: QuantizedWeight, order: Tensor, target: Tensor, hessian: Tensor, library: KernelLibrary | None
    ) -> None:
        dtype, top = target.dtype, 2**weight.bits - 1
        scales, offsets = (each.T.to(dtype).contiguous() for each in (weight.scale, weight.offset))
        self.grids = [GroupGrid(scale, offset, top) for scale, offset in zip(scales, offsets, strict=True)]
        self.codes = weight.codes.T[order].to(dtype)
        self.gain = torch.zeros_like(target[0], dtype=torch.float64)
        self.latent = torch.empty_like(target)
        self._weight, self._hessian = weight, hessian
        self._library = library if weight.group_size <= MOST_COLUMNS else None  # the kernel takes no more
        index = weight.group_index[order].long()
        self._values = self.codes * scales[index] + offsets[index]
        self._error = target - self._values
        if self._library is not None:
            size = weight.group_size
            inner = hessian.view(len(self.grids), size, -1, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            self._shift = (inner / -inner.diagonal(dim1=1, dim2=2).unsqueeze(1)).triu(1)
            self._inverse = self._shift + torch.eye(size, dtype=dtype, device=target.device)
            self._alike = torch.zeros(size, dtype=torch.int32, device=target.device)

    def visit(self, number: int, snap: Snap | None) -> None:
        """Decide the scale and the codes of one group."""
        part = slice(number * self._weight.group_size, (number + 1) * self._weight.group_size)
        pull, inner = self._hessian[part] @ self._error, self._hessian[part, part]
        before = self._values[part].clone()
        if snap is not None:
            self._move_scale(number, part, snap, pull, inner)
        self._move_codes(number, part, pull, inner)
        self._error[part] -= self._values[part] - before

    def _move_scale(self, number: int, part: slice, snap: Snap, pull: Tensor, inner: Tensor) -> None:
        """Take the scale of least loss, where what the file holds of it is better; `pull` is H E of the group."""
        grid, values = self.grids[number], self._values[part]
        along = (values * pull).sum(0) / (values * (inner @ values)).sum(0)
        factor = 1 + along.nan_to_num(0.0, 0.0, 0.0).clamp(-0.5, 1.0)
        wanted = snap(grid.scale * factor, None if self._weight.sym else grid.offset * factor, self._weight.bits)
        moved = self.codes[part] * wanted[0] + wanted[1] - values
        effect = inner @ moved
        gain = (moved * (2 * pull - effect)).sum(0)
        better = gain > 0
        scale = torch.where(better, wanted[0], grid.scale)
        offset = torch.where(better, wanted[1], grid.offset)
        self.grids[number] = GroupGrid(scale, offset, grid.max_code)
        self._values[part] = self.codes[part] * scale + offset
        pull -= effect * better
        self.gain += gain * better

    def _move_codes(self, number: int, part: slice, pull: Tensor, inner: Tensor) -> None:
        """Take the best code of each column in turn."""
        if self._library is not None:
            self._move_codes_fused(self._library, number, part, pull, inner)
            return
        grid, diagonal = self.grids[number], inner.diagonal()
        values, codes, latent = self._values[part], self.codes[part], self.latent[part]  # views
        start, moved = pull.clone(), torch.empty_like(values)
        for begin in range(0, len(values), _SEGMENT):
            end = min(begin + _SEGMENT, len(values))
            for i in range(begin, end):
                latent[i] = values[i] + pull[i] / diagonal[i]
                codes[i] = grid.encode(latent[i])
                moved[i] = grid.decode(codes[i]) - values[i]
                pull[i + 1 : end].addr_(inner[i, i + 1 : end], moved[i], alpha=-1)
            pull[end:].addmm_(inner[begin:end, end:].T, moved[begin:end], alpha=-1)
        values += moved
        self.gain += (moved * (2 * start - inner @ moved)).sum(0, dtype=torch.float64)

    def _move_codes_fused(self, library: KernelLibrary, number: int, part: slice, pull: Tensor, inner: Tensor) -> None:
        """Do the same in the kernel of the sweep.

        A latent l_i = v_i + (pull_i - sum over k < i of H_ki (q_k - v_k)) / H_ii, v the value before and q after it, is
        what the kernel makes of a block b with inverse 1 - A and shift -A, A = triu(H_ki / H_ii, 1), where errors are
        l_k - q_k: l_i = b_i - sum A_ki l_k + sum A_ki (l_k - q_k), b_i = v_i + pull_i / H_ii + sum A_ki v_k. All of
        these are less what zero points leave of offsets, of which the kernel knows nothing.
        """
        grid, values, shift = self.grids[number], self._values[part], self._shift[number]
        before, latent = values - grid.rest, self.latent[part]
        latent.copy_(before + pull / inner.diagonal().unsqueeze(1) - shift.T @ before)
        after, codes = torch.empty_like(values), torch.empty_like(values, dtype=torch.uint8)
        sweep = Sweep(
            block=latent,
            inverse=self._inverse[number],
            shift=shift,
            group=self._alike,
            scale=grid.scale.unsqueeze(0),
            zero=grid.zero.unsqueeze(0),
            codes=codes,
            values=after,
        )
        sweep_block(library, sweep, bits=self._weight.bits)
        latent += grid.rest
        self.codes[part] = codes.to(values.dtype)
        moved = grid.decode(self.codes[part]) - values
        values += moved
        self.gain += (moved * (2 * pull - inner @ moved)).sum(0, dtype=torch.float64)
