"""Errors of a quantization against plain rounding, by block and kind of module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import NamedTuple

MOST_BLOCKS, MOST_KINDS = 512, 64
"""More are not drawn: a damaged report must not become an endless picture."""


class Module(NamedTuple):
    """What a report says of one module; see `ModuleReport`."""

    name: str
    layer: int | None
    error: float | None
    rounding_error: float | None
    tokens: int | None
    prior_tokens: int | None


class Cell(NamedTuple):
    """The mean errors of the modules of one kind in one block, which are several where there are experts."""

    error: float
    rounding_error: float
    modules: int

    @property
    def ratio(self) -> float:
        """The error as a multiple of plain rounding's."""
        if self.rounding_error == 0:
            return 1.0 if self.error == 0 else float("inf")
        return self.error / self.rounding_error

    @property
    def strength(self) -> float:
        """How deep the colour is: 0 for the error of plain rounding, one half for half of it and for twice as much."""
        return 1 - min(self.ratio, 1 / self.ratio if self.ratio else 0.0)


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Errors by kind of module and block.

    Attributes:
        kinds: Names of modules inside their blocks, in the order of solving; experts count as one, "experts.*".
        blocks: Numbers of the blocks.
        cells: Means, by kind and block, of what was measured.
        left_out: Kinds and blocks that are too many to be drawn.
    """

    kinds: Sequence[str]
    blocks: Sequence[int]
    cells: dict[tuple[str, int], Cell]
    left_out: int

    @classmethod
    def of(cls, modules: Sequence[Module]) -> HeatMap:
        """Return the errors of those modules that are in blocks and whose error was measured.

        >>> names = ["m.0.attn.q", "m.0.experts.0.up", "m.0.experts.1.up"]
        >>> found = HeatMap.of([Module(name, 0, 0.1, 0.2, None, 0) for name in names])
        >>> found.kinds, found.blocks, found.cells["experts.*.up", 0]
        (['attn.q', 'experts.*.up'], [0], Cell(error=0.1, rounding_error=0.2, modules=2))
        """
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for module in modules:
            if module.layer is not None and module.error is not None and module.rounding_error is not None:
                errors = (module.error, module.rounding_error)
                found.setdefault((_pattern(module.name), module.layer), []).append(errors)
        patterns = list(dict.fromkeys(pattern for pattern, _ in found))
        blocks = sorted({block for _, block in found})
        left_out = len(patterns[MOST_KINDS:]) + len(blocks[MOST_BLOCKS:])
        parts = [pattern.split(".") for pattern in patterns]
        columns = zip(*(part[:-1] for part in parts), strict=False)
        shared = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
        short = {pattern: ".".join(part[shared:]) for pattern, part in zip(patterns[:MOST_KINDS], parts, strict=False)}
        kept = set(blocks[:MOST_BLOCKS])
        cells = {
            (short[pattern], block): Cell(fmean(e for e, _ in errors), fmean(r for _, r in errors), len(errors))
            for (pattern, block), errors in found.items()
            if pattern in short and block in kept
        }
        return cls(kinds=list(short.values()), blocks=sorted(kept), cells=cells, left_out=left_out)


def _pattern(name: str) -> str:
    """Return the name of a module without the numbers of its block, which is the first one, and of its expert."""
    name = re.sub(r"\.\d+\.", ".*.", f".{name}", count=1)
    return re.sub(r"(experts)\.(?:expert_)?\d+\.", r"\1.*.", name)
