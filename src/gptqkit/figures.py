"""Markup that text cannot break out of, and pictures over the blocks of a model as SVG: a heat map and lines."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from .heatmap import Cell, HeatMap, label_every


class Html(str):
    """Markup. Any other string is text, and escaped where it is put into some."""

    __slots__ = ()


def tag(name: str, *parts: object, **attributes: object) -> Html:
    """Return an element; whatever is put into it is escaped, unless it is markup already.

    >>> print(tag("p", "1 < 2 ", tag("b", "yes"), class_="a", font_size=3))
    <p class="a" font-size="3">1 &lt; 2 <b>yes</b></p>
    """
    inside = "".join(part if isinstance(part, Html) else html.escape(str(part)) for part in parts)
    named = {key.rstrip("_").replace("_", "-"): html.escape(str(value)) for key, value in attributes.items()}
    own = "".join(f' {key}="{value}"' for key, value in named.items())
    return Html(f"<{name}{own}>{inside}</{name}>")


def shorten(name: str) -> str:
    """Return a name that fits beside a picture."""
    return name if len(name) <= 28 else f"{name[:13]}…{name[-14:]}"


def heat_map(heat: HeatMap, left: float, side: float) -> Html:
    """Return a row of every kind of module and a column of every block, `side` wide, beside names `left` wide."""
    parts = []
    for row, kind in enumerate(heat.kinds):
        parts.append(tag("text", tag("title", kind), shorten(kind), x=0, y=24 * row + 17))
        for column, block in enumerate(heat.blocks):
            cell = heat.cells.get((kind, block))
            if cell is not None:
                what = f"block {block}, {kind}" + (f", mean of {cell.modules}" if cell.modules > 1 else "")
                note = f"{what}: {cell.error:.4g}, plain rounding {cell.rounding_error:.4g} ({cell.ratio:.2f} x)"
                parts.append(_box(cell, left + side * column, 24 * row + 1, side - 2, tag("title", note)))
    label = "heat map of errors against plain rounding, by block and kind of module"
    return _svg(left + side * len(heat.blocks) + 8, 24 * len(heat.kinds) + 2, parts, label)


def heat_legend() -> Html:
    """Return what the colours of a heat map mean."""
    keys = []
    for ratio in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0):
        keys.append(tag("span", _svg(18, 24, [_box(Cell(ratio, 1.0, 1), 1, 1, 16)]), f"{ratio:g} x", class_="key"))
    return tag("p", *keys)


def line_chart(
    blocks: Sequence[int], lines: Sequence[Sequence[float]], left: float, side: float, *, log: bool = False
) -> Html:
    """Return lines over the blocks, from 0 up; columns as in a heat map, and `log` for values of all sizes."""
    top = max(*map(max, lines), 1e-6)
    step = 10.0 ** math.floor(math.log10(top))
    step *= 0.5 if top < 2.5 * step else 1 if top < 5 * step else 2
    ticks = (
        [0, *(10**n for n in range(1, 15) if 10**n <= top)] if log else [n * step for n in range(int(top / step) + 1)]
    )

    def y(value: float) -> str:
        return f"{170 - 155 * (math.log1p(value) / math.log1p(top) if log else value / top):.1f}"

    right = left + side * len(blocks)
    parts = [tag("text", "block", x=0, y=190)]
    for tick in ticks:
        parts.append(tag("path", d=f"M{left:.1f} {y(tick)}H{right:.1f}", class_="axis"))
        parts.append(tag("text", f"{tick:,.10g}", x=f"{left - 8:.1f}", y=y(tick), dy=4, text_anchor="end"))
    middles = [f"{left + side * (column + 0.5) - 1:.1f}" for column in range(len(blocks))]
    for number, line in enumerate(lines):
        points = [f"{x} {y(value)}" for x, value in zip(middles, line, strict=True)]
        points.insert(0, points[0])  # so that one point alone makes a dot
        parts.append(tag("path", d=f"M{'L'.join(points)}", class_=f"line line{number}"))
    for column in range(0, len(blocks), label_every(blocks, 7, side)):
        parts.append(tag("text", blocks[column], x=middles[column], y=190, text_anchor="middle"))
    return _svg(right + 8, 198, parts, "lines over the blocks")


def line_legend(names: Sequence[str]) -> Html:
    """Return which line of a chart is what."""
    lines = [_svg(24, 8, [tag("path", d="M0 4H24", class_=f"line line{number}")]) for number in range(len(names))]
    return tag("p", *(tag("span", line, name, class_="key") for line, name in zip(lines, names, strict=True)))


def _box(cell: Cell, x: float, y: float, width: float, *parts: Html) -> Html:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": 22}
    colour = {"class": "gain" if cell.ratio < 1 else "loss", "fill_opacity": f"{cell.strength:.2f}"}
    return tag("rect", *parts, **place, **colour)


def _svg(width: float, height: float, parts: Sequence[Html], label: str = "") -> Html:
    """Return a picture that shrinks on narrow screens, by a quarter at most: beyond that one scrolls."""
    size = {"viewBox": f"0 0 {width:.1f} {height:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    return tag("svg", *parts, **size, style=f"min-width: {0.75 * width:.1f}px", role="img", aria_label=label)
