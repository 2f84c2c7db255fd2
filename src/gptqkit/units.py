"""Bytes and seconds as people read them."""

from __future__ import annotations


def size_text(size: int) -> str:
    """Three digits and a binary unit.

    >>> [size_text(size) for size in (0, 1023, 1536, 20 << 20, 1350 << 30)]
    ['0 B', '1023 B', '1.50 KiB', '20.0 MiB', '1.32 TiB']
    """
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1 and size >= 1024:
        value, units = value / 1024, units[1:]
    if units[0] == "B":
        return f"{size} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[0]}"


def time_text(seconds: float) -> str:
    """Two units at most.

    >>> [time_text(seconds) for seconds in (0.21, 75, 3599.9, 8100, 180000)]
    ['0.2 s', '1 min 15 s', '1 h 0 min', '2 h 15 min', '2 d 2 h']
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    for small, large, size, most in (("s", "min", 1, 60), ("min", "h", 60, 48)):
        whole, rest = divmod(round(seconds / size), 60)
        if whole < most:
            return f"{whole} {large} {rest} {small}"
    return "{} d {} h".format(*divmod(round(seconds / 3600), 24))
