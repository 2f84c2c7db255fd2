"""Errors of a quantization against plain rounding, by block and kind of module, and as a PNG."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import NamedTuple

MOST_BLOCKS, MOST_KINDS = 512, 64
"""More are not drawn: a damaged report must not become an endless picture."""

GAIN, LOSS = (0x15, 0x65, 0xC0), (0xD9, 0x5F, 0x02)
"""Colours, red, green and blue, of errors below and above those of plain rounding; apart for the colour-blind, too."""

_FRAME = b"\xc8\xc8\xc8"
_CAPTION = "error: blue below plain rounding, orange above"
_LETTERS = "*-._:,0123456789abcdefghijklmnopqrstuvwxyz"
_COLUMNS = bytes.fromhex(
    "2a1c7f1c2a 0808080808 0060600000 4040404040 0036360000 0050300000 3e5149453e 00427f4000 7249494946 2141494d33 "
    "1814127f10 2745454539 3c4a494931 4121110907 3649494936 464949291e 2054547840 7f28444438 3844444428 384444287f "
    "3854545418 00087e0902 18a4a49c78 7f08040478 00447d4000 2040403d00 7f10284400 00417f4000 7c04780478 7c08040478 "
    "3844444438 fc18242418 18242418fc 7c08040408 4854545424 04043f4424 3c4040207c 1c2040201c 3c4030403c 4428102844 "
    "4c9090907c 4464544c44"
)
"""Five columns of every letter, the top row in the lowest bit."""


class Module(NamedTuple):
    """What a report says of one module; see `ModuleReport`."""

    name: str
    layer: int | None
    error: float | None
    rounding_error: float | None
    tokens: int | None
    prior_tokens: int


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

    def png(self) -> bytes:
        """Return the picture on white: a row for every kind, a column for every block, and their names."""
        side = 28  # pixels of a cell
        names = [kind if len(kind) <= 32 else f"{kind[:15]}..{kind[-15:]}" for kind in self.kinds]
        left, top = 12 * max(map(len, names), default=0) + 12, 32
        width = max(left + side * len(self.blocks), 12 * len(_CAPTION)) + 8
        pixels = [bytearray(b"\xff" * 3 * width) for _ in range(top + side * len(names) + 32)]
        _write(pixels, 4, len(pixels) - 22, _CAPTION)
        for row, (kind, name) in enumerate(zip(self.kinds, names, strict=True)):
            y = top + row * side
            _write(pixels, 4, y + (side - 14) // 2, name)
            for column, block in enumerate(self.blocks):
                cell = self.cells.get((kind, block))
                if cell is not None:
                    colour = bytes(round(255 + (c - 255) * cell.strength) for c in (GAIN if cell.ratio < 1 else LOSS))
                    x = left + column * side
                    for line in pixels[y + 1 : y + side]:
                        line[3 * x + 3 : 3 * (x + side)] = _FRAME * (side - 1)
                    for line in pixels[y + 2 : y + side - 1]:
                        line[3 * x + 6 : 3 * (x + side - 1)] = colour * (side - 3)
        every = label_every(self.blocks, 12, side)
        for column, block in enumerate(self.blocks):
            if column % every == 0:
                _write(pixels, left + column * side + 6, 8, str(block))
        return _png(pixels, width)


def label_every(blocks: Sequence[int], letter: float, side: float) -> int:
    """Return how many columns one label of a block needs."""
    return -int(-letter * (len(str(max(blocks, default=0))) + 1) // side)


def _pattern(name: str) -> str:
    """Return the name of a module without the numbers of its block, which is the first one, and of its expert."""
    name = re.sub(r"\.\d+\.", ".*.", f".{name}", count=1)
    return re.sub(r"(experts)\.(?:expert_)?\d+\.", r"\1.*.", name)


def _write(pixels: list[bytearray], x: int, y: int, text: str) -> None:
    """Draw text in black, every glyph twice its size; what has none is blank, what lies outside left out."""
    for number, character in enumerate(text):
        for column, bits in enumerate(_glyph(character)):
            at = 3 * (x + 12 * number + 2 * column)
            for row in range(16):
                if bits >> row // 2 & 1 and at + 6 <= len(pixels[y + row]):
                    pixels[y + row][at : at + 6] = bytes(6)


def _glyph(character: str) -> bytes:
    at = 5 * _LETTERS.find(character.lower())
    return _COLUMNS[at : at + 5] if at >= 0 else b""


def _png(pixels: Sequence[bytearray], width: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(pixels), 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"".join(b"\0" + bytes(line) for line in pixels)))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")
