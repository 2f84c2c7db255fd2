"""What the commands of `gptqkit` do with their arguments: call a function of the package, and print what it returns."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import gptqkit

from .calibration.config import Calibration
from .display import (
    ProgressDisplay,
    checkpoint_summary,
    comparison_table,
    difference_table,
    key_values,
    plan_summary,
    quantization_summary,
    reader_advice,
    recommendation_table,
)
from .errors import CheckpointError
from .evaluation.config import Evaluation
from .hub import at_home
from .options import config_from_options, from_options, refuse
from .quantizer.methods import needs_calibration
from .run import Run


def quantize(arguments: argparse.Namespace) -> None:
    """Quantize a model and write a checkpoint."""
    config, run, calibration = config_from_options(arguments), from_options(arguments, Run), _calibration(arguments)
    if calibration is None and (why := needs_calibration(config)):
        refuse(arguments, f"{why} needs text to calibrate on; give --calibration, or --method rtn, which needs none")
    _quieten_libraries(arguments.verbose)
    speaks = launched_rank() == 0
    if not speaks:
        logging.getLogger("gptqkit").setLevel(logging.ERROR)
    with closing(ProgressDisplay()) as progress:
        how: dict[str, Any] = {"run": run, "evaluate_on": arguments.evaluate_on, "progress": progress}
        how["tokenizer"] = arguments.tokenizer
        result = gptqkit.quantize(arguments.model, calibration, arguments.out, config, **how)
    if speaks:
        print(quantization_summary(result.report, gptqkit.inspect(result.path)))
        done = "left as it was finished before:" if result.was_finished else "written to"
        print(f"{done} {arguments.out}" + (f" and uploaded to {result.url}" if result.url else ""))


def _calibration(arguments: argparse.Namespace) -> Calibration | None:
    first, *more = arguments.calibration or [None]
    source = [Path(value) for value in (first, *more)] if more else first
    calibration = from_options(arguments, Calibration, source=source)
    return None if source is None else calibration


def imatrix(arguments: argparse.Namespace) -> None:
    """Write an importance matrix for llama.cpp's own quantizer."""
    run, calibration = from_options(arguments, Run), _calibration(arguments)
    _quieten_libraries(arguments.verbose)
    with closing(ProgressDisplay()) as progress:
        how: dict[str, Any] = {"run": run, "tokenizer": arguments.tokenizer, "progress": progress}
        gptqkit.imatrix(arguments.model, calibration, arguments.out, **how)
    print(f"written to {arguments.out}")


def plan(arguments: argparse.Namespace) -> None:
    """Estimate the memory and disk space that quantizing a model needs."""
    config, run = config_from_options(arguments), from_options(arguments, Run)
    calibration = from_options(arguments, Calibration, source=None)
    _quieten_libraries(arguments.verbose)
    needed = gptqkit.plan(arguments.model, arguments.out, config, calibration=calibration, run=run)
    values = needed.to_dict()
    print(json.dumps(values, indent=2) if arguments.json else plan_summary(values))
    sys.stdout.flush()
    needed.check()


def rotate(arguments: argparse.Namespace) -> None:
    """Write a float model that is the same, but has no channels that stand out."""
    _quieten_libraries(arguments.verbose)
    gptqkit.rotate(arguments.model, arguments.out, seed=arguments.seed, revision=arguments.revision)
    print(f"written to {arguments.out}")


def recommend(arguments: argparse.Namespace) -> None:
    """Show which formats and widths of a model fit into a memory."""
    _quieten_libraries(arguments.verbose)
    how = {name: getattr(arguments, name) for name in ("context", "revision", "trust_remote_code")}
    found = gptqkit.recommend(arguments.model, arguments.memory, arguments.reader, **how)
    rows = [choice.to_dict() for choice in found]
    print(json.dumps(rows, indent=2) if arguments.json else recommendation_table(rows))


def evaluate(arguments: argparse.Namespace) -> None:
    """Measure a model's perplexity, and how far it is from a reference."""
    config = from_options(arguments, Evaluation)
    _quieten_libraries(arguments.verbose)
    with closing(ProgressDisplay()) as progress:
        how: dict[str, Any] = {"reference": arguments.reference, "tokenizer": arguments.tokenizer}
        scores = gptqkit.evaluate(arguments.model, arguments.dataset, config, **how, progress=progress)
    question = {"model": arguments.model, "dataset": arguments.dataset, "reference": arguments.reference}
    answer = {**question, **scores.to_dict()}
    print(json.dumps(answer, indent=2) if arguments.json else key_values(answer))


def compare(arguments: argparse.Namespace) -> None:
    """Measure several checkpoints of one model, and show them side by side."""
    config, reference, plot = from_options(arguments, Evaluation), arguments.reference, arguments.plot
    _quieten_libraries(arguments.verbose)
    with closing(ProgressDisplay()) as progress:
        found = gptqkit.compare(
            arguments.checkpoints, arguments.dataset, config, reference=reference, progress=progress
        )
    rows = [each.to_dict() for each in found]
    if reference is not None and not arguments.json:
        size = sum(file.stat().st_size for file in Path(at_home(reference)).glob("*.safetensors")) or None
        rows.insert(0, {"checkpoint": reference, "size": size, "perplexity": rows[0].get("reference_perplexity")})
    answer = {"dataset": arguments.dataset, "reference": reference, "checkpoints": rows}
    print(json.dumps(answer, indent=2) if arguments.json else comparison_table(rows))
    if plot:
        incomplete = plot.with_name(f".{plot.name}.gptqkit-incomplete")
        incomplete.write_text(gptqkit.comparison_svg(found), encoding="utf-8")
        incomplete.replace(plot)
        print(f"written to {plot}", file=sys.stderr if arguments.json else sys.stdout)


def report(arguments: argparse.Namespace) -> None:
    """Draw a checkpoint's quantization report as a page for a browser."""
    file = arguments.html or arguments.checkpoint / "quantization_report.html"
    if arguments.svg is not None and arguments.svg.resolve() == file.resolve():
        refuse(arguments, f"{file} cannot be both page and picture; give --svg another file")
    page = gptqkit.report_html(arguments.checkpoint)
    if arguments.html is None:
        file.unlink(missing_ok=True)  # a link that came with a downloaded checkpoint is not followed
    files = {file: page}
    if arguments.svg is not None:
        files[arguments.svg] = gptqkit.report_svg(arguments.checkpoint)
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
        print(f"written to {file}")


def diff(arguments: argparse.Namespace) -> None:
    """Show which layers of two checkpoints of one model differ, and how far."""
    rows = [difference.to_dict() for difference in gptqkit.diff(arguments.first, arguments.second)]
    print(json.dumps(rows, indent=2) if arguments.json else difference_table(rows))


def inspect(arguments: argparse.Namespace) -> None:
    """Show a checkpoint's format, bits and sizes, and which programs load it."""
    how = {"revision": arguments.revision, "tensor_parallel": arguments.tensor_parallel}
    found = gptqkit.inspect(arguments.checkpoint, **how)
    one = None if arguments.reader is None else found.reader(arguments.reader)
    values = found.to_dict() if one is None else dataclasses.asdict(one)
    shown = (checkpoint_summary if one is None else reader_advice)(values) if not arguments.json else ""
    print(shown or json.dumps(values, indent=2))
    sys.stdout.flush()
    if one is not None and not one.loads:
        raise CheckpointError(f"{one.name} does not load {arguments.checkpoint}")


def convert(arguments: argparse.Namespace) -> None:
    """Write a checkpoint in another format, exactly or not at all."""
    names = ("format", "overwrite", "revision", "shard_size")
    gptqkit.convert(arguments.source, arguments.target, **{name: getattr(arguments, name) for name in names})
    print(f"written to {arguments.target}")


def doctor(arguments: argparse.Namespace) -> None:
    """Find known damage of a checkpoint, and write a repaired one."""
    found = gptqkit.doctor(arguments.checkpoint, arguments.out, format=arguments.format, revision=arguments.revision)
    lines = [*map(str, found.damage or ["no damage found"]), *(f"note: {note}" for note in found.notes)]
    if found.written:
        lines.append(f"written to {arguments.out}")
    elif arguments.out is not None and not found.damage:
        lines.append(f"nothing written to {arguments.out}: there is nothing to repair")
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else "\n".join(lines))
    sys.stdout.flush()
    if found.damage and not found.written:
        remedy = (
            "give OUT for a repaired copy" if all(each.repair for each in found.damage) else "it cannot be repaired"
        )
        raise gptqkit.CheckpointError(f"{arguments.checkpoint} is damaged; {remedy}")


def launched_rank() -> int:
    """Return the rank that a launcher gave to this process; 0 without one."""
    return int(os.environ.get("RANK", "0")) if "WORLD_SIZE" in os.environ else 0


def _quieten_libraries(verbose: bool) -> None:
    """Keep the model and data libraries to errors: their bars and notes would bury ours."""
    if verbose:
        return
    for name in ("datasets", "huggingface_hub", "transformers"):
        importlib.import_module(name)  # which sets its level
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.modules["datasets"].disable_progress_bars()
