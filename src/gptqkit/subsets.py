"""The order in which the Linears of a block are solved: subsets that share an input, groups calibrated in one pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .targets import Target

_NUMBER = re.compile(r"(?<=[._])\d+(?=\.)")  # as in "experts.3.up_proj" and "experts.expert_3.fc1"

STATISTICS_BYTES = 8 << 30  # what is known of a layer's experts at once; more is done in several passes

Subset = list[Target]
"""Linears that receive the same tensor, and share its statistics."""


@dataclass(frozen=True, eq=False)
class Group:
    """Subsets that do not depend on each other, and are calibrated in one pass over the samples.

    `routed`: they are experts, each of which receives some of the tokens only.
    """

    subsets: list[Subset]
    routed: bool = False


Portion = list[tuple[Group, Subset]]
"""Subsets, each with its group, whose statistics are in memory together."""


def group_subsets(targets: Sequence[Target], found: Iterable[tuple[Sequence[str], bool]]) -> list[Group]:
    """Return the targets of a block in the order of their first calls: the same matrix of all experts is one group.

    Experts are told by their names, which are equal up to a number inside. One that was not called stands beside those
    that were; others that were not called are left out. The order of `targets` is that inside a group; `found` are the
    names that share an input, in the order of the calls, and whether that held some tokens only.
    """
    by_name = {target.inner: target for target in targets}
    place = {name: position for position, name in enumerate(by_name)}
    found = list(found)
    heard = {name for names, _ in found for name in names}
    missing = [name for name in by_name if name not in heard]
    partly = {_pattern(name) for names, partial in found if partial for name in names}
    partly |= {_pattern(name) for name in (*missing, *(name for name in heard if by_name[name].expert is not None))}
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for names, _ in found:
        patterns = tuple(sorted(map(_pattern, names)))
        groups.setdefault(patterns if partly.intersection(patterns) else tuple(names), []).append(list(names))
    for patterns, subsets in groups.items():
        absent: dict[tuple[str, ...], list[str]] = {}
        for name in missing:
            if _pattern(name) in patterns:
                absent.setdefault(tuple(_NUMBER.findall(name)), []).append(name)
        subsets.extend(absent.values())
        subsets.sort(key=lambda subset: place[subset[0]])
    return [
        Group([[by_name[name] for name in subset] for subset in subsets], routed=len(subsets) > 1)
        for subsets in groups.values()
    ]


def portions(groups: Iterable[Group], *, cross: bool) -> Iterator[Portion]:
    """Yield all subsets in as few portions as keep what is known of each input within STATISTICS_BYTES.

    That is H, and with `cross` C, in float32. A portion has one subset at least.
    """
    portion: Portion = []
    used = 0
    for group in groups:
        for subset in group.subsets:
            size = input_bytes(subset[0], cross=cross)
            if portion and used + size > STATISTICS_BYTES:
                yield portion
                portion, used = [], 0
            portion.append((group, subset))
            used += size
    if portion:
        yield portion


def input_bytes(target: Target, *, cross: bool) -> int:
    """Return what H of a Linear's inputs takes, and with `cross` C."""
    return 4 * (1 + cross) * target.shape[1] ** 2


def output_bytes(target: Target) -> int:
    """Return what F, which errors of a Linear's outputs weigh by, takes."""
    return 4 * target.shape[0] ** 2


def _pattern(name: str) -> str:
    """Return `name` with a star for every number that counts modules."""
    return _NUMBER.sub("*", name)
