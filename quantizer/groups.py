"""The order in which the matrices of a block are solved: stages that share an input, groups that share a pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Stages that are calibrated in one pass over the batches, because none of them depends on another.

    Attributes:
        stages: Names of matrices; those of one stage receive the same tensor.
        routed: Whether the stages are experts, each of which receives some of the tokens only.
    """

    stages: list[list[str]]
    routed: bool = False


def group_stages(
    stages: Sequence[Sequence[str]], names: Sequence[str], routed: Collection[str]
) -> tuple[list[Group], list[str]]:
    """Stages as groups, in the order of their first calls: the same matrix of all experts is one group.

    Experts are told by their names, which are equal up to a number inside. One that was not called stands beside those
    that were.

    Args:
        stages: The names that share an input, in the order of the calls.
        names: All names, in the order wanted inside a group.
        routed: Those that are known to receive some of the tokens only.

    Returns:
        The groups, and the names that were not called and are no experts beside others that were.

    >>> groups, silent = group_stages(
    ...     [["q"], ["e.1.up"], ["e.1.down"]], ["q", "e.0.up", "e.0.down", "e.1.up", "e.1.down", "spare"], ["e.1.up"]
    ... )
    >>> [group.stages for group in groups], silent
    ([[['q']], [['e.0.up'], ['e.1.up']], [['e.0.down'], ['e.1.down']]], ['spare'])
    """
    called = {_pattern(name) for stage in stages for name in stage}
    heard = {name for stage in stages for name in stage}
    missing = [name for name in names if name not in heard]
    silent = [name for name in missing if _pattern(name) not in called]
    merged = {_pattern(name) for name in (*routed, *missing)}
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for stage in stages:
        patterns = tuple(sorted(map(_pattern, stage)))
        key = patterns if merged.intersection(patterns) else tuple(stage)
        found.setdefault(key, []).append(list(stage))
    place = {name: position for position, name in enumerate(names)}
    for key, group in found.items():
        absent: dict[tuple[str, ...], list[str]] = {}
        for name in missing:
            if _pattern(name) in key and name not in silent:
                absent.setdefault(_numbers(name), []).append(name)
        group.extend(absent.values())
        group.sort(key=lambda stage: place[stage[0]])
    return [Group(group, routed=len(group) > 1) for group in found.values()], silent


def split_group(group: Group, size: Callable[[str], int], budget: int) -> list[Group]:
    """`group` in as few passes as keep the statistics of each within `budget`; a pass has one stage at least.

    Args:
        group: The group.
        size: Bytes of the statistics of a stage, by the name of its first matrix.
        budget: Bytes.

    >>> [part.stages for part in split_group(Group([["a"], ["b"], ["c"]]), lambda name: 10, 20)]
    [[['a'], ['b']], [['c']]]
    """
    passes: list[list[list[str]]] = []
    used = 0
    for stage in group.stages:
        needed = size(stage[0])
        if not passes or used + needed > budget:
            passes.append([])
            used = 0
        passes[-1].append(stage)
        used += needed
    return [Group(stages, group.routed) for stages in passes]


def _pattern(name: str) -> str:
    """`name` with a star for every number that stands between dots."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"(?<=\.)\d+(?=\.)", name))
