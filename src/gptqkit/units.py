"""Bytes and counts as people read and write them."""

from __future__ import annotations

import re
from fractions import Fraction


def counted(count: int, thing: str) -> str:
    """Return how many there are of a thing.

    >>> counted(1, "layer"), counted(0, "layer"), counted(2000, "layer")
    ('1 layer', '0 layers', '2,000 layers')
    """
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def size_text(size: int) -> str:
    """Return three digits and a binary unit.

    >>> [size_text(size) for size in (0, 1023, 1536, 20 << 20, 1350 << 30)]
    ['0 B', '1023 B', '1.50 KiB', '20.0 MiB', '1.32 TiB']
    """
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1 and size >= 1024:
        value, units = value / 1024, units[1:]
    if units[0] == "B":
        return f"{size} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[0]}"


def parse_size(text: str) -> int:
    """Return the bytes in `8GiB`, `6.5GB`, `500 mib` or a plain number; ValueError for anything else.

    >>> parse_size("8GiB"), parse_size("6.5GB"), parse_size("500 mib"), parse_size("4096")
    (8589934592, 6500000000, 524288000, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(I?)B?", text.upper())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size; give one such as 8GiB or 500MiB")
    return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
