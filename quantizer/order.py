"""In which order the solver takes the columns, and which group each column belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True, eq=False)
class ColumnOrder:
    """The order of the columns of one weight.

    Attributes:
        permutation: (in,) int64, the original column at each position of the sweep.
        group: (in,) int64, the group of the column at each position.
        static: Whether the groups' grids are fixed before the sweep instead of when it reaches them.
    """

    permutation: Tensor
    group: Tensor
    static: bool


def column_order(
    diagonal: Tensor, group_size: int, *, desc_act: bool, static_groups: bool, act_group_aware: bool
) -> ColumnOrder:
    """Return the order for a Hessian with this diagonal, (in,).

    Natural order; or `desc_act`: falling diagonal, groups following the sweep (g_idx is then not monotonic) or, with
    `static_groups`, the original columns; or `act_group_aware`: falling diagonal inside each group, groups by their
    largest diagonal.

    Raises:
        ConfigError: `group_size` does not divide the columns.
    """
    columns = diagonal.numel()
    if columns % group_size:
        raise ConfigError(
            f"{columns} columns are not a multiple of group_size {group_size}; choose a divisor, or -1 for one group "
            "per row"
        )
    natural_group = torch.arange(columns, device=diagonal.device) // group_size
    if desc_act:
        permutation = torch.argsort(diagonal, descending=True, stable=True)
        group = natural_group[permutation] if static_groups else natural_group
    elif act_group_aware:
        by_group = diagonal.view(-1, group_size)
        inside = torch.argsort(by_group, dim=1, descending=True, stable=True)
        inside += torch.arange(0, columns, group_size, device=diagonal.device)[:, None]
        permutation = inside[torch.argsort(by_group.amax(1), descending=True, stable=True)].reshape(-1)
        group = natural_group[permutation]
    else:
        permutation = torch.arange(columns, device=diagonal.device)
        group = natural_group
    return ColumnOrder(permutation, group, static_groups)
