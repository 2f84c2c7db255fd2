"""Markup that text cannot break out of, and pictures as SVG: a heat map and lines over blocks, named points."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence

from .heatmap import Cell, HeatMap

PALETTE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1b1f24; --faint: #59636e; --rule: #d5dae0;
  --gain: #1565c0; --loss: #d95f02 }
@media (prefers-color-scheme: dark) {
  :root { --back: #14171b; --ink: #e6e9ed; --faint: #9aa4af; --rule: #3a424b; --gain: #58a6ff; --loss: #ff9d45 } }
rect { stroke: var(--rule) }
.gain { fill: var(--gain) }
.loss { fill: var(--loss) }"""
"""Gains are blue and losses orange: apart for the colour-blind, too."""

_ALONE = """
svg { font: 12px system-ui, sans-serif; background: var(--back) }
text { fill: var(--ink); paint-order: stroke; stroke: var(--back); stroke-width: 3px }
path { stroke: var(--rule) }
circle { fill: var(--gain) }
"""
_SIDES = (("start", 9, 4), ("end", -9, 4), ("middle", 0, -10), ("middle", 0, 19), ("start", 9, -11), ("start", 9, 19))


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
    label = "heat map of errors against plain rounding, by block and kind of module"
    return _svg(left + side * len(heat.blocks) + 8, 24 * len(heat.kinds) + 2, _heat_parts(heat, left, side), label)


def heat_file(heat: HeatMap, left: float, side: float) -> str:
    """Return the same as an SVG that stands alone, with the numbers of the blocks and what the colours mean."""
    below, caption = 24 * len(heat.kinds), "error: blue below plain rounding, orange above"
    parts = [*_heat_parts(heat, left, side), *_numbers(heat.blocks, left, side, below + 17)]
    parts.append(tag("text", caption, x=0, y=below + 41))
    return _alone(max(left + side * len(heat.blocks), 7 * len(caption)) + 8, below + 50, parts, caption)


def _heat_parts(heat: HeatMap, left: float, side: float) -> list[Html]:
    parts = []
    for row, kind in enumerate(heat.kinds):
        parts.append(tag("text", tag("title", kind), shorten(kind), x=0, y=24 * row + 17))
        for column, block in enumerate(heat.blocks):
            cell = heat.cells.get((kind, block))
            if cell is not None:
                what = f"block {block}, {kind}" + (f", mean of {cell.modules}" if cell.modules > 1 else "")
                note = f"{what}: {cell.error:.4g}, plain rounding {cell.rounding_error:.4g} ({cell.ratio:.2f} x)"
                parts.append(_box(cell, left + side * column, 24 * row + 1, side - 2, tag("title", note)))
    return parts


def _numbers(blocks: Sequence[int], left: float, side: float, y: float) -> Iterator[Html]:
    """Yield the numbers of as many blocks as there is room for."""
    every = -int(-7 * (len(str(max(blocks, default=0))) + 1) // side)
    for column in range(0, len(blocks), every):
        yield tag("text", blocks[column], x=f"{left + side * (column + 0.5) - 1:.1f}", y=y, text_anchor="middle")


def line_chart(
    blocks: Sequence[int], lines: Sequence[Sequence[float]], left: float, side: float, *, log: bool = False
) -> Html:
    """Return lines over the blocks, from 0 up; columns as in a heat map, and `log` for values of all sizes."""
    top = max(*map(max, lines), 1e-6)
    step = _step(top)
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
    parts += _numbers(blocks, left, side, 190)
    return _svg(right + 8, 198, parts, "lines over the blocks")


def line_legend(names: Sequence[str]) -> Html:
    """Return which line of a chart is what."""
    lines = [_svg(24, 8, [tag("path", d="M0 4H24", class_=f"line line{number}")]) for number in range(len(names))]
    return tag("p", *(tag("span", line, name, class_="key") for line, name in zip(lines, names, strict=True)))


def scatter(points: Sequence[tuple[str, float, float]], across: str, up: str) -> str:
    """Return points, each with a name, x and y, as an SVG that stands alone; `across` and `up` name the axes."""
    left, right, top, bottom = 80, 700, 36, 400
    names, xs, ys = zip(*points, strict=True)
    x, columns = _axis(xs, left, right)
    y, rows = _axis(ys, bottom, top)
    parts = []
    for tick in columns:
        parts.append(tag("path", d=f"M{x(tick):.1f} {top}V{bottom}"))
        parts.append(tag("text", f"{tick:.10g}", x=f"{x(tick):.1f}", y=bottom + 18, text_anchor="middle"))
    for tick in rows:
        parts.append(tag("path", d=f"M{left} {y(tick):.1f}H{right}"))
        parts.append(tag("text", f"{tick:.10g}", x=left - 8, y=f"{y(tick):.1f}", dy=4, text_anchor="end"))
    parts += [tag("text", across, x=right, y=bottom + 38, text_anchor="end"), tag("text", up, x=left, y=top - 14)]
    places = list(zip(map(x, xs), map(y, ys), strict=True))
    taken = [(0, 0, left, bottom), (right, 0, math.inf, bottom), *((x - 6, y - 6, x + 6, y + 6) for x, y in places)]
    for name, (column, row) in zip(names, places, strict=True):
        parts.append(tag("circle", tag("title", name), cx=f"{column:.1f}", cy=f"{row:.1f}", r=5))
        parts.append(_label(shorten(name), column, row, taken))
    return _alone(720, 450, parts, f"{up} against {across}")


def _axis(values: Sequence[float], start: float, stop: float) -> tuple[Callable[[float], float], list[float]]:
    """Return where values stand on an axis, which is logarithmic if they differ tenfold, and a few round ones."""
    log = 0 < 10 * min(values) < max(values)
    scale: Callable[[float], float] = math.log10 if log else float
    low, high = scale(min(values)), scale(max(values))
    room = 0.08 * (high - low) or 0.1 * abs(low) or 1.0
    low, high = low - room, high + room
    if log:
        digits, decades = (1, 2, 5) if high - low < 2.5 else (1,), range(math.floor(low), math.ceil(high))
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    else:
        step = _step((high - low) / 1.6)
        ticks = [number * step for number in range(math.floor(low / step), math.ceil(high / step))]
    inside = [tick for tick in ticks if low <= scale(tick) <= high]
    return lambda value: start + (stop - start) * (scale(value) - low) / (high - low), inside


def _step(span: float) -> float:
    """Return a round number that goes two to five times into a span."""
    step: float = 10.0 ** math.floor(math.log10(span))
    return step * (0.5 if span < 2.5 * step else 1 if span < 5 * step else 2)


def _label(name: str, x: float, y: float, taken: list[tuple[float, float, float, float]]) -> Html:
    """Return a name on the side of its point where it meets least of the boxes `taken`, to which it is added."""
    width, sides = 7 * len(name), []
    for anchor, across, down in _SIDES:
        start = x + across - width * ("start", "middle", "end").index(anchor) / 2
        box = start, y + down - 11, start + width, y + down + 3
        met = sum(box[0] < x2 and x1 < box[2] and box[1] < y2 and y1 < box[3] for x1, y1, x2, y2 in taken)
        text = tag("text", name, x=f"{x + across:.1f}", y=f"{y + down:.1f}", text_anchor=anchor)
        sides.append((met, box, text))
    _, box, text = min(sides, key=lambda side: side[0])
    taken.append(box)
    return text


def _box(cell: Cell, x: float, y: float, width: float, *parts: Html) -> Html:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": 22}
    colour = {"class": "gain" if cell.ratio < 1 else "loss", "fill_opacity": f"{cell.strength:.2f}"}
    return tag("rect", *parts, **place, **colour)


def _svg(width: float, height: float, parts: Sequence[Html], label: str = "", **more: str) -> Html:
    """Return a picture that shrinks on narrow screens, by a quarter at most: beyond that one scrolls."""
    size = {"viewBox": f"0 0 {width:.1f} {height:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    return tag("svg", *parts, **size, style=f"min-width: {0.75 * width:.1f}px", role="img", aria_label=label, **more)


def _alone(width: float, height: float, parts: Sequence[Html], label: str) -> str:
    """Return a picture as a file of its own; characters that XML does not have are replaced."""
    style = tag("style", Html(PALETTE + _ALONE))
    svg = _svg(width, height, [style, *parts], label, xmlns="http://www.w3.org/2000/svg")
    return "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in svg) + "\n"
