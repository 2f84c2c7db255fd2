"""What the command line shows: progress on stderr, results as aligned text."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from .progress import Progress
from .units import size_text


class ProgressDisplay:
    """A progress callback that draws bars on a terminal, and writes one line per layer anywhere else.

    Lines end with the seconds since the stage began, and about how many are left.

    Args:
        stream: Where to write; standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar: tqdm[Any] | None = None
        self._stage: str | None = None
        self._began, self._done_before = 0.0, 0
        self._layer: list[Progress] = []
        self._tenths = 0

    def __call__(self, step: Progress) -> None:
        """Show `step`; a step of another stage closes the bar of the one before."""
        if step.stage != self._stage:
            self.close()
            self._stage, self._began, self._done_before = step.stage, time.monotonic(), step.done - 1
            if self._stream.isatty():
                self._bar = tqdm(
                    desc=step.stage,
                    total=step.total,
                    initial=self._done_before,
                    file=self._stream,
                    dynamic_ncols=True,
                )
        if self._bar is not None:
            if step.module is not None:
                errors = "" if step.error is None else f" error {step.error:.4f}, rounding {step.rounding_error:.4f}"
                self._bar.set_postfix_str(step.module + errors, False)
            self._bar.update(step.done - self._bar.n)
        elif step.module is not None:
            if self._layer and self._layer[-1].layer != step.layer:
                self._flush_layer()
            self._layer.append(step)
            if step.done == step.total:
                self._flush_layer()
        elif step.done == step.total or step.done * 10 // step.total > self._tenths:
            self._tenths = step.done * 10 // step.total
            self._write(f"{step.stage}: {step.done} of {step.total}", step)

    def close(self) -> None:
        """End the current bar or layer, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._flush_layer()
        self._stage = None
        self._tenths = 0

    def _flush_layer(self) -> None:
        if not self._layer:
            return
        last = self._layer[-1]
        where = last.module if last.layer is None else f"layer {last.layer}"
        line = f"{last.stage}: {where}, {last.done} of {last.total}"
        errors = [step.error for step in self._layer if step.error is not None]
        rounding = [step.rounding_error for step in self._layer if step.rounding_error is not None]
        if errors:
            line += f", mean error {sum(errors) / len(errors):.4f}"
        if rounding:
            line += f" (rounding {sum(rounding) / len(rounding):.4f})"
        self._layer = []
        self._write(line, last)

    def _write(self, line: str, step: Progress) -> None:
        taken = time.monotonic() - self._began
        left = taken / (step.done - self._done_before) * (step.total - step.done)
        self._stream.write(f"{line}, {taken:.1f} s" + (f" (about {left:.0f} s left)" if left else "") + "\n")
        self._stream.flush()


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


def quantization_summary(report: Mapping[str, Any]) -> str:
    """Return what a quantization report (`QuantizationReport.to_dict()`) says, in a few lines.

    >>> module = {"name": "a", "error": 0.02, "rounding_error": 0.03, "worse_than_rounding": False}
    >>> print(quantization_summary({"seconds": 12.5, "modules": [module], "perplexity": []}))
    modules                     1
    seconds                     12.5
    mean error                  0.02
    mean error of rounding      0.03
    largest error               0.02 in a
    worse than plain rounding   none
    """
    modules = report["modules"]
    errors = {m["name"]: m["error"] for m in modules if m.get("error") is not None}
    rounding = [m["rounding_error"] for m in modules if m.get("rounding_error") is not None]
    summary: dict[str, Any] = {"modules": len(modules), "seconds": report.get("seconds")}
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        summary["mean error"] = sum(errors.values()) / len(errors)
        summary["mean error of rounding"] = sum(rounding) / len(rounding) if rounding else None
        summary["largest error"] = f"{_text(errors[worst])} in {worst}"
        summary["worse than plain rounding"] = _names(m for m in modules if m.get("worse_than_rounding"))
    if any(m.get("damp_escalations") for m in modules):
        summary["damping raised"] = _names(m for m in modules if m.get("damp_escalations"))
    if any(m.get("dead_columns") for m in modules):
        summary["dead input columns"] = sum(m.get("dead_columns") or 0 for m in modules)
    if any(m.get("prior_tokens") for m in modules):
        few = sorted((m for m in modules if m.get("prior_tokens")), key=lambda module: int(module["tokens"]))
        summary["experts with few tokens"] = (
            f"{_names(few)}; filled up from their layers', the fewest {few[0]['tokens']} of their own"
        )
    quantized, weights = report.get("quantized_weights"), report.get("block_weights")
    if quantized and weights and quantized < weights:
        summary["left in floating point"] = f"{100 - 100 * quantized / weights:.1f} % of the weights in the blocks"
    if report.get("left_in_float"):
        kinds = Counter(report["left_in_float"].values())
        summary["Linears left in floating point"] = {why: f"{count} Linears" for why, count in kinds.items()}
    summary["left-out samples"] = report.get("excluded_samples") or None
    for row in report.get("perplexity") or []:
        summary[f"perplexity on {row['dataset']}"] = row["perplexity"]
    return key_values(summary)


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
        shown[key] = ", ".join(
            f"{'per row' if int(value) == -1 else value} ({layers} layers)" for value, layers in summary[key].items()
        )
    shown["readers"] = {
        reader["name"]: "yes" if reader["loads"] else "no: " + "; ".join(reader["reasons"])
        for reader in summary["readers"]
    }
    return key_values(shown)


def plan_summary(plan: Mapping[str, Any]) -> str:
    """Return what an estimate (`MemoryEstimate.to_dict()`) says: what is needed of everything, part by part.

    >>> need = {"parts": {"one block": 2048, "hidden states": 100}, "total": 2148, "available": 4096}
    >>> print(plan_summary({"blocks": 2, "source_bytes": 4096, "output_bytes": 1024, "needs": {"RAM": need}}))
    blocks       2
    model        4.00 KiB
    checkpoint   1.00 KiB
    <BLANKLINE>
    RAM               2.10 KiB
      one block       2.00 KiB
      hidden states      100 B
      available       4.00 KiB
    """
    sizes = {"model": size_text(plan["source_bytes"]), "checkpoint": size_text(plan["output_bytes"])}
    shown = {key: value for key, value in plan.items() if key not in ("needs", "source_bytes", "output_bytes")}
    rows = []
    for name, need in plan["needs"].items():
        rows.append((name, need["total"]))
        rows += [(f"  {part}", size) for part, size in need["parts"].items() if size]
        rows.append(("  available", need["available"]))
    width = max(len(name) for name, _ in rows)
    texts = ["not known" if size is None else size_text(size) for _, size in rows]
    column = max(len(text) for text in texts)
    lines = [f"{name:{width}}   {text:>{column}}" for (name, _), text in zip(rows, texts, strict=True)]
    return "\n".join([key_values({**shown, **sizes}), "", *lines])


def _lines(values: Mapping[str, Any], depth: int) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        label = "  " * depth + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            yield label, ""
            yield from _lines(value, depth + 1)
        elif value is not None:
            yield label, _text(value)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.5g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(_text(item) for item in value)
    return str(value)


def _names(modules: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(str(module["name"]) for module in modules) or "none"
