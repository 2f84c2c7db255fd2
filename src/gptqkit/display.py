"""What the command line shows: progress on stderr, results as aligned text."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from .progress import Progress
from .report import QuantizationReport
from .units import counted, size_text

if TYPE_CHECKING:
    from tqdm import tqdm

    from .export.inspect import CheckpointSummary

_EXAMPLE = """\
KL divergence from the float model, and perplexity over its own (the ratio), are the example model's (6 million
parameters, WikiText-2, --quality balanced), not this one's: gptqkit compare shows those. Activations come on top of the
total."""

_DIFFERENCES = {
    "codes": "share of them that differ",
    "scales": "share of them that differ",
    "distance": "||A - B|| / ||A|| of the weights",
}


class ProgressDisplay:
    """A progress callback that draws bars on a terminal and in notebooks, and writes a line per layer anywhere else.

    Lines end with the seconds since the stage's first step was done, and about how many are left.

    Args:
        stream: Where to write; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar: tqdm[Any] | None = None
        self._stage: str | None = None
        self._began, self._done_before, self._done, self._told, self._wrote = 0.0, 0, 0, 0, 0.0
        self._came = 0.0  # when the last of the steps that were not told yet was done
        self._untold: list[Progress] = []  # steps of a layer, or of a tenth of another stage

    def __call__(self, step: Progress) -> None:
        """Show `step`; a step of another stage closes the bar of the one before, unless a block learns meanwhile.

        Where nothing can be written, such as to a full disk or a closed pipe, the work goes on unseen.
        """
        with suppress(OSError):
            self._show(step)

    def _show(self, step: Progress) -> None:
        """Show `step`."""
        if step.stage == "learn":
            self._learn(step)
            return
        if step.stage != self._stage or step.done <= self._done:  # two in a row may be called the same
            self.close()
            self._stage, self._began = step.stage, time.monotonic()
            self._done_before, self._told = step.done, step.done - 1
            if self._stream.isatty() or "ipykernel" in sys.modules:
                from tqdm.auto import tqdm  # a widget where there are widgets

                settings: dict[str, Any] = {"total": step.total, "initial": step.done, "dynamic_ncols": True}
                self._bar = tqdm(desc=step.stage, file=self._stream, **settings)
        self._done = step.done
        if self._bar is not None:
            if step.module is not None:
                errors = "" if step.error is None else f" error {step.error:.4f}, rounding {step.rounding_error:.4f}"
                self._bar.set_postfix_str(step.module + errors, False)
            self._bar.update(step.done - self._bar.n)
            return
        if self._untold and self._untold[-1].layer != step.layer:
            self._tell()
        self._untold.append(step)
        self._came = time.monotonic()
        tenth = step.done * 10 // step.total > self._told * 10 // step.total
        if step.done == step.total or (tenth and step.module is None):
            self._tell()

    def close(self) -> None:
        """End the current bar or layer, if there is one."""
        bar, self._bar, self._stage = self._bar, None, None
        with suppress(OSError):
            if bar is not None:
                bar.close()
            self._tell()

    def _learn(self, step: Progress) -> None:
        """Show how far the rounding of a block is learned: beside the bar, or in a line every minute and at the end."""
        where = f"layer {step.layer}, {step.done} of {step.total}"
        if self._bar is not None:
            self._bar.set_postfix_str(f"learning {where}")
            return
        self._tell()
        if step.done == step.total or time.monotonic() - self._wrote > 60:
            self._write(f"learn: {where}")

    def _tell(self) -> None:
        """Write the line of the steps that were not told yet."""
        if not self._untold:
            return
        last, errors = self._untold[-1], [step.error for step in self._untold if step.error is not None]
        rounding = [step.rounding_error for step in self._untold if step.rounding_error is not None]
        where = "" if last.module is None else f"{last.module}, " if last.layer is None else f"layer {last.layer}, "
        line = f"{last.stage}: {where}{last.done} of {last.total}"
        if errors:
            line += f", mean error {sum(errors) / len(errors):.4f} (rounding {sum(rounding) / len(errors):.4f})"
        if last.done > self._done_before:  # how long the first step took is not known
            now = time.monotonic()
            a_step = (now - self._began) / (self._done - self._done_before)  # also the step after `last`, if it is done
            left = max(0.0, a_step * (last.total - last.done) - (now - self._came))
            line += f", {now - self._began:.1f} s" + (f" (about {left:.0f} s left)" if left else "")
        self._write(line)
        self._told, self._untold = last.done, []

    def _write(self, line: str) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()
        self._wrote = time.monotonic()


def key_values(values: Mapping[str, Any]) -> str:
    """Return nested plain values as aligned lines of text; None is left out.

    >>> print(key_values({"bits": 4, "readers": {"vllm": "loads it"}, "reference": None, "effective_bits": 4.15625}))
    bits             4
    readers
      vllm           loads it
    effective bits   4.1562
    """
    lines = list(_lines(values, 0))
    width = max((len(label) for label, _ in lines), default=0) + 3
    return "\n".join(f"{label:{width}}{text}".rstrip() for label, text in lines)


def quantization_summary(report: QuantizationReport, checkpoint: CheckpointSummary) -> str:
    """Return what a quantization report says, and what `inspect` says of the checkpoint's size, in a few lines."""
    modules, widths = report.modules, checkpoint.bits
    errors = {module.name: module.error for module in modules if module.error is not None}
    rounding = [module.rounding_error for module in modules if module.rounding_error is not None]
    worst = max(errors, key=lambda name: errors[name], default="")
    few = sorted((module for module in modules if module.prior_tokens), key=lambda module: module.tokens or 0)
    fewest = f"; filled up from their layers', the fewest {few[0].tokens} of their own" if few else ""
    left = 1 - report.quantized_weights / max(1, report.block_weights)
    refined = [module.refined for module in modules if module.refined is not None]
    learned = [_from_to(block.error_before, block.error) for block in report.blocks]
    learnable = {module.layer for module in modules if module.layer is not None and report.config.learn_iterations}
    unlearned = _names(f"block {layer}" for layer in sorted(learnable - {block.layer for block in report.blocks}))
    tuned = report.tuning and _from_to(report.tuning.divergence_before, report.tuning.divergence)
    unfit = [f"{count} ({why})" for why, count in Counter(report.left_in_float.values()).most_common(4)]
    summary = {
        "modules": len(modules),
        "widths": ", ".join(f"{bits} bits ({count})" for bits, count in widths.items()) if len(widths) > 1 else None,
        "bits per weight": checkpoint.bits_per_weight,
        "size": size_text(checkpoint.packed_bytes + checkpoint.other_bytes),
        "seconds": report.seconds or None,  # of a job that was finished before nothing is known
        "mean error": sum(errors.values()) / len(errors) if errors else None,
        "mean error of rounding": sum(rounding) / len(rounding) if rounding else None,
        "largest error": f"{_text(errors[worst])} in {worst}" if errors else None,
        "worse than plain rounding": _names(module.name for module in modules if module.worse_than_rounding),
        "damping raised": _names(module.name for module in modules if module.damp_escalations),
        "dead input columns": sum(module.dead_columns for module in modules) or None,
        "experts with few tokens": f"{_names(module.name for module in few)}{fewest}" if few else None,
        "left in floating point": f"{left:.1%} of the weights in the blocks" if left > 0 else None,
        "Linears left in floating point": "; ".join(unfit) or None,
        "left-out samples": report.excluded_samples or None,
        "refinement left": f"{sum(refined) / len(refined):.1%} of squared errors" if refined else None,
        "learned rounding": f"errors of blocks, kept aside: {', '.join(learned)}" if learned else None,
        "not learned, for want of memory": unlearned,
        "tuned scales": f"divergence, kept aside: {tuned}" if tuned else None,
    }
    return key_values(summary | {f"perplexity on {row['dataset']}": row["perplexity"] for row in report.perplexity})


def _from_to(before: float, after: float) -> str:
    return f"{before:.4g} to {after:.4g}"


def checkpoint_summary(summary: Mapping[str, Any]) -> str:
    """Return what `inspect` found (`CheckpointSummary.to_dict()`), a line for every fact and every reader.

    >>> reader = {"name": "vLLM", "loads": False, "reasons": ["serves 4 and 8 bits", "serves symmetric groups"]}
    >>> print(checkpoint_summary({"bits": {2: 7, 3: 35}, "group_sizes": {-1: 42}, "readers": [reader]}))
    bits          2 (7 layers), 3 (35 layers)
    group sizes   per row (42 layers)
    readers
      vLLM        no: serves 4 and 8 bits; serves symmetric groups
    """
    shown = dict(summary)
    for key in ("bits", "group_sizes"):
        kinds = {"per row" if value == -1 else value: layers for value, layers in summary[key].items()}
        shown[key] = ", ".join(f"{kind} ({counted(layers, 'layer')})" for kind, layers in kinds.items())
    shown["float_modules"] = _names(summary.get("float_modules") or ())
    shown["readers"] = {each["name"]: "; ".join(each["reasons"]) for each in summary["readers"]}
    shown["readers"] = {name: f"no: {reasons}" if reasons else "yes" for name, reasons in shown["readers"].items()}
    return key_values(shown)


def reader_advice(reader: Mapping[str, Any]) -> str:
    """Return what is known of one reader of a checkpoint, a line for every reason and warning.

    >>> said = {"reasons": ["serves 4 bits"], "warnings": ["pads layers"]}
    >>> print(reader_advice({"name": "vLLM", "loads": False, **said}))
    vLLM: does not load it
      because it serves 4 bits
      mind that it pads layers
    """
    lines = [f"{reader['name']}: {'loads it' if reader['loads'] else 'does not load it'}"]
    lines += [f"  because it {reason}" for reason in reader["reasons"]]
    return "\n".join([*lines, *(f"  mind that it {warning}" for warning in reader["warnings"])])


def recommendation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return choices (`Choice.to_dict()`), the best first, as a table, with the command of the best.

    >>> row = {"type": "Q4_0", "bits": 4, "group_size": 32, "bits_per_weight": 4.5, "perplexity_ratio": 1.0054}
    >>> row |= {"checkpoint_bytes": 2048, "cache_bytes": 10, "total_bytes": 2058, "warnings": [], "command": "gptqkit"}
    >>> print(recommendation_table([row]).splitlines()[1])
    Q4_0      4           32               4.5     2.00 KiB    10 B   2.01 KiB               -             1.0054
    """
    sizes = ["checkpoint", "cache", "total"]
    shown = [{**row, **{key: size_text(row[f"{key}_bytes"]) for key in sizes}} for row in rows]
    own = ["type", "bits", "group_size"] if rows[0]["type"] else ["format", "bits", "group_size", "sym"]
    table = _table(shown, [*own, "bits_per_weight", *sizes, "kl_divergence", "perplexity_ratio"])
    notes = [f"  mind that the program {warning}" for warning in rows[0]["warnings"]]
    return "\n".join([table, "", _EXAMPLE, "", "the best of these:", f"  {rows[0]['command']}", *notes])


def plan_summary(plan: Mapping[str, Any]) -> str:
    """Return what an estimate (`MemoryEstimate.to_dict()`) says: what is needed of everything, part by part.

    >>> need = {"parts": {"one block": 2048, "hidden states": 100}, "total": 2148, "available": None}
    >>> print(plan_summary({"blocks": 2, "source_bytes": 4096, "output_bytes": 1024, "needs": {"RAM": need}}))
    blocks            2
    model             4.00 KiB
    checkpoint        1.00 KiB
    RAM
      one block       2.00 KiB
      hidden states   100 B
      total           2.10 KiB
      available       not known
    """
    shown = {key: value for key, value in plan.items() if key not in ("needs", "source_bytes", "output_bytes")}
    shown |= {"model": size_text(plan["source_bytes"]), "checkpoint": size_text(plan["output_bytes"])}
    for name, need in plan["needs"].items():
        parts = {part: size_text(size) for part, size in need["parts"].items() if size}
        available = "not known" if need["available"] is None else size_text(need["available"])
        shown[name] = {**parts, "total": size_text(need["total"]), "available": available}
    return key_values(shown)


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows of measurements (`Comparison.to_dict()`) as a table; what no row has is left out.

    >>> print(comparison_table([{"checkpoint": "a", "size": 2048, "perplexity": 40.5}, {"checkpoint": "bb"}]))
    checkpoint       size   perplexity
    a            2.00 KiB         40.5
    bb                  -            -
    """
    measured = ("perplexity", "kl_divergence", "top1_agreement", "cosine", "lowest_cosine", "rank_agreement")
    keys = ["size", "bits_per_weight", *measured]
    keys = ["checkpoint", *(key for key in keys if any(row.get(key) is not None for row in rows))]
    shown = [{**row, "size": None if row.get("size") is None else size_text(row["size"])} for row in rows]
    return _table(shown, keys)


def difference_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the layers that differ (`LayerDifference.to_dict()`) as a table, and what its columns mean.

    >>> print(difference_table([{"name": "lm_head", "first": "float16 (8, 8)", "second": None}]))
    name               first   second
    lm_head   float16 (8, 8)        -
    >>> row = {"name": "lm_head", "first": "4 bits", "second": "4 bits", "codes": 0.125, "distance": 0.02}
    >>> print(difference_table([row]))
    name       first   second   codes   distance
    lm_head   4 bits   4 bits   0.125       0.02
    <BLANKLINE>
    codes: share of them that differ
    distance: ||A - B|| / ||A|| of the weights
    >>> print(difference_table([]))
    nothing differs
    """
    optional = [key for key in ("codes", "scales", "distance") if any(row.get(key) is not None for row in rows)]
    if not rows:
        return "nothing differs"
    notes = [f"{key}: {_DIFFERENCES[key]}" for key in optional]
    return "\n".join([_table(rows, ["name", "first", "second", *optional]), *([""] if notes else []), *notes])


def _table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    lines = [[key.replace("_", " ") for key in keys]]
    lines += [["-" if row.get(key) is None else _text(row[key]) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{name:{widths[0]}}" + "".join(f"   {text:>{width}}" for text, width in zip(texts, widths[1:], strict=True))
        for name, *texts in lines
    )


def _lines(values: Mapping[str, Any], depth: int) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        label = "  " * depth + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            yield label, ""
            yield from _lines(value, depth + 1)
        elif value is not None:
            yield label, _text(value)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _names(names: Iterable[str]) -> str | None:
    """Return a few names, of many also their number; the report has them all."""
    listed = list(names)
    few = ", ".join(listed[:4])
    return f"{len(listed)} of them: {few}, ..." if len(listed) > 4 else few or None
