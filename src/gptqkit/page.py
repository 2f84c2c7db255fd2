"""The report of a quantization as one HTML page that needs no network and no script, and its heat map as an SVG."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .errors import CheckpointError
from .export.checkpoint import REPORT
from .export.shards import read_json, some
from .figures import PALETTE, Html, heat_file, heat_map, line_chart, line_legend, shorten, tag
from .heatmap import MOST_BLOCKS, HeatMap, Module
from .hub import at_home

_WORST = 10
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = f"""{PALETTE}
body {{ margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: .5rem 0 }}
h2 {{ font-size: 1.2rem; margin: 2.5rem 0 .5rem }}
p {{ margin: .5rem 0; max-width: 45rem }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; margin: .75rem 0; font-variant-numeric: tabular-nums }}
th, td {{ text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0; border-bottom: 1px solid var(--rule) }}
th {{ color: var(--faint); font-weight: normal }}
td {{ min-width: 4.5rem }}
td:first-child {{ min-width: min(17rem, 44vw) }}
.key {{ display: inline-flex; align-items: center; gap: .4rem; margin-right: 1.25rem; white-space: nowrap }}
svg {{ display: block; font: 12px system-ui, sans-serif; max-width: 100%; height: auto }}
text {{ fill: currentColor }}
.axis {{ stroke: var(--rule) }}
.line {{ fill: none; stroke-width: 2; stroke: var(--gain); stroke-linecap: round }}
.line1 {{ stroke: var(--loss); stroke-dasharray: 6 4 }}
.line2 {{ stroke: var(--faint); stroke-dasharray: 1 4 }}
"""


def report_html(checkpoint: str | Path) -> str:
    """Return a page about a quantization: errors against plain rounding, experts, perplexity, settings.

    Args:
        checkpoint: A directory with a quantization_report.json.

    Raises:
        CheckpointError: There is no report, or it is damaged.
    """
    report, modules = _read(Path(at_home(checkpoint)))
    name = report.get("model") or "Checkpoint"
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        tag("title", f"{name}: quantization report"),
        Html(f"<style>{_STYLE}</style>"),
    )
    sections = [_summary(report, modules), _errors(modules), _experts(modules), _perplexity(report), _settings(report)]
    body = tag("body", tag("h1", name), *(part for section in sections for part in section))
    page = f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
    return page.encode("utf-8", "replace").decode()  # names in JSON can hold halves of characters


def report_svg(checkpoint: str | Path) -> str:
    """Return the heat map of a quantization's errors against plain rounding, an SVG, for a model card.

    Args:
        checkpoint: A directory with a quantization_report.json.

    Raises:
        CheckpointError: There is no report, it is damaged, or it has no errors.
    """
    heat = HeatMap.of(_read(Path(at_home(checkpoint)))[1])
    if not heat.cells:
        raise CheckpointError(f"the report of {checkpoint} has no errors to draw; quantize with calibration text")
    return heat_file(heat, *_places(heat))


def _read(path: Path) -> tuple[dict[str, Any], list[Module]]:
    """Return a report and its modules; the values that the page counts on have their types."""
    file = path / REPORT
    report = read_json(file)
    kinds = {"model": str, "config": dict, "versions": dict, "left_in_float": dict, "modules": list, "perplexity": list}
    for key, kind in kinds.items():
        _field(report, key, kind, file)
    for row in report.get("perplexity") or ():
        _field(row, "perplexity", float, file)
    numbers = {"layer": int, "error": float, "rounding_error": float, "tokens": int, "prior_tokens": int}
    modules = [
        Module(_field(row, "name", str, file) or "", *(_field(row, key, kind, file) for key, kind in numbers.items()))
        for row in report.get("modules") or ()
    ]
    return report, modules


def _field(row: Any, key: str, kind: type, file: Path) -> Any:
    """Return a value of a JSON object, None where it is missing; numbers are finite and not negative."""
    if not isinstance(row, dict):
        raise CheckpointError(f"{file} has {reprlib.repr(row)} where an object with {key} should be; fetch it again")
    value = row.get(key)
    fits = isinstance(value, (float, int) if kind is float else kind) and not isinstance(value, bool)
    if value is None or (fits and (kind not in (int, float) or 0 <= value < 1e15)):
        return value
    raise CheckpointError(f"{file} has {reprlib.repr(value)} as {key}; fetch it again")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    lines = [tag("tr", *(tag("th", title) for title in head))] if head else []
    lines += [tag("tr", *(tag("td", _text(value)) for value in row)) for row in rows]
    return tag("div", tag("table", *lines), class_="wide")


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict) and all(isinstance(each, (str, int, float, type(None))) for each in value.values()):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items() if each is not None)
    return f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else reprlib.repr(value)


def _summary(report: Mapping[str, Any], modules: Sequence[Module]) -> Iterable[Html]:
    config = report.get("config") or {}
    yield tag("p", f"{_text(config.get('bits'))} bits, {_text(config.get('method'))}, {_text(config.get('format'))}")
    facts: list[tuple[str, object]] = [("quantized modules", len(modules))]
    known = [(m.error, m.rounding_error) for m in modules if m.error is not None and m.rounding_error is not None]
    if known:
        error, rounding = map(fmean, zip(*known, strict=True))
        worse = sum(error > rounding for error, rounding in known)
        facts += [
            ("mean error", error),
            ("mean error of plain rounding", rounding),
            ("worse than plain rounding", worse),
        ]
    if report.get("left_in_float"):
        left = (f"{_text(name)} ({_text(why)})" for name, why in report["left_in_float"].items())
        facts.append(("left in floating point", some(left)))
    for row in report.get("perplexity") or ():
        facts.append((f"perplexity on {_text(row.get('dataset'))}", row.get("perplexity")))
    yield _table((), facts)


def _errors(modules: Sequence[Module]) -> Iterable[Html]:
    heat = HeatMap.of(modules)
    yield tag("h2", "Errors against plain rounding")
    if not heat.cells:
        yield tag("p", "No errors were measured: there was no calibration.")
        return
    yield tag(
        "p",
        "Relative output error ||(W - Q) X|| / ||W X|| on the calibration inputs. Above: the mean of every block's "
        "modules. Below: every kind of module against plain rounding: blue is less, orange more. Half of the colour "
        "stands for half of that error, or for twice.",
    )
    left, side = _places(heat)
    cells = [[heat.cells[kind, block] for kind in heat.kinds if (kind, block) in heat.cells] for block in heat.blocks]
    lines = [[fmean(cell[measure] for cell in block) for block in cells] for measure in (0, 1)]
    yield line_legend(["error", "plain rounding"])
    yield tag("div", line_chart(heat.blocks, lines, left, side), heat_map(heat, left, side), class_="wide")
    if heat.left_out:
        yield tag("p", f"{heat.left_out:,} more kinds of modules and blocks are not drawn.")
    worst = sorted((m for m in modules if m.error is not None), key=lambda module: -(module.error or 0))[:_WORST]
    yield tag("h2", "Largest errors")
    yield _table(("module", "error", "plain rounding"), [(m.name, m.error, m.rounding_error) for m in worst])


def _places(heat: HeatMap) -> tuple[float, float]:
    """Return where the columns of a heat map begin, and how wide they are."""
    return 7 * max(map(len, map(shorten, heat.kinds))) + 14, _side(heat.blocks)


def _side(blocks: Sequence[int]) -> float:
    return min(48.0, max(14.0, 800 / len(blocks)))


def _experts(modules: Sequence[Module]) -> Iterable[Html]:
    own: dict[int, dict[str, int]] = {}
    filled = set()
    for module in modules:
        expert = re.match(r"(.*\bexperts\.\d+)\.", module.name)
        if expert is not None and module.layer is not None and module.tokens is not None:
            own.setdefault(module.layer, {}).setdefault(expert[1], module.tokens)
            if module.prior_tokens:
                filled.add(expert[1])
    if not own:
        return
    tokens = sorted((count, name) for block in own.values() for name, count in block.items())
    yield tag("h2", "Calibration tokens of the experts")
    yield tag(
        "p",
        f"{len(filled):,} of {len(tokens):,} experts got fewer tokens than they have input columns, and were filled up "
        "with the mean of what their layer received.",
    )
    blocks = sorted(own)[:MOST_BLOCKS]
    lines = [[float(measure(own[block].values())) for block in blocks] for measure in (min, median, max)]
    yield line_legend(["fewest tokens", "median", "most"])
    yield tag("div", line_chart(blocks, lines, 80, _side(blocks), log=True), class_="wide")
    yield _table(("expert", "tokens"), [(name, count) for count, name in tokens[:_WORST]])


def _perplexity(report: Mapping[str, Any]) -> Iterable[Html]:
    rows = report.get("perplexity") or []
    if rows:
        shown = list(dict.fromkeys(key for row in rows for key, value in row.items() if value is not None))
        yield tag("h2", "Perplexity")
        yield _table([key.replace("_", " ") for key in shown], [[row.get(key) for key in shown] for row in rows])


def _settings(report: Mapping[str, Any]) -> Iterable[Html]:
    settings = dict(report.get("config") or {})
    if settings.get("group_size", 0) is None:
        settings["group_size"] = "one group per row"
    overrides = settings.pop("overrides", None)
    if isinstance(overrides, dict):
        settings |= {f"override of {pattern}": change for pattern, change in overrides.items()}
    settings |= {key: report.get(key) for key in ("samples", "sequence_length", "seed", "tokens", "device")}
    yield tag("h2", "Settings")
    yield _table((), settings.items())
    yield tag("h2", "Versions")
    yield _table((), (report.get("versions") or {}).items())
