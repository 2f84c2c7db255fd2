"""Bytes as people read them."""

from __future__ import annotations


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
