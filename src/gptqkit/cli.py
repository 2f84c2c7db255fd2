"""The `gptqkit` command: quantize, imatrix, plan, recommend, evaluate, compare, report, inspect, convert and so on.

The commands take everything heavy from `gptqkit`, which imports it then, so that help and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
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
from .errors import AbandonedError, CheckpointError, ConfigError, GptqkitError
from .evaluation.config import Evaluation
from .export.formats import FORMATS, READERS
from .options import Parser, add_fields, add_settings, config_from_options, from_options, size
from .run import Run
from .version import __version__

EXIT_CODES = """\
exit codes:
  0    done
  1    failed: one line on standard error says why, and --verbose shows where
  2    usage error
  130  interrupted (Ctrl-C, SIGTERM)

Results go to standard output, progress and messages to standard error.
"""

SOURCES = (
    "a file (.txt, .json, .jsonl, .csv or .parquet) or a folder of such files; wikitext2, c4 or pile; the id of "
    "another data set on the Hugging Face Hub; or a .safetensors file of token ids: one int64 tensor, input_ids, "
    "(samples, length)"
)

MODEL = "folder of a transformers model, or its id on the Hub"
NEW = "folder to write; new or empty, unless --overwrite is given"
QUANTIZED = "folder of a quantized model, or its id on the Hub"
REVISION = "branch, tag or commit of a model on the Hub"
TOKENIZER = "folder of a tokenizer, or its id on the Hub (default: that of the model)"
CALIBRATION = f"text to calibrate on, which every method but rtn needs: {SOURCES}. May be repeated for several files"
_READERS = [name.lower() for name in READERS]
REFERENCE = "float model to compare with, by KL divergence and top-1 agreement, or by the embeddings of an encoder"

UPLOAD = ("push_to_hub", "private")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; `command` in its result names the subcommand."""
    root = Parser(
        prog="gptqkit",
        description="Quantize language models with GPTQ and GPTAQ, measure them, and inspect and convert their files.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"gptqkit {__version__}")
    commands = root.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    quantize = _add_command(commands, _quantize, "quantize a model and write a checkpoint")
    quantize.add_argument("model", metavar="MODEL", help=MODEL)
    quantize.add_argument("out", metavar="OUT", type=Path, help=NEW)
    quantize.add_argument("--calibration", action="append", metavar="SOURCE", help=CALIBRATION)
    quantize.add_argument(
        "--evaluate-on", metavar="SOURCE", help="also measure the checkpoint's perplexity on this text"
    )
    quantize.add_argument("--tokenizer", metavar="TOKENIZER", help=TOKENIZER)
    add_settings(quantize)

    imatrix = _add_command(commands, _imatrix, "write an importance matrix for llama.cpp's own quantizer")
    imatrix.add_argument("model", metavar="MODEL", help=MODEL)
    imatrix.add_argument("out", metavar="OUT", type=Path, help="GGUF file to write")
    how = f"text that the model reads: {SOURCES}. May be repeated for several files"
    imatrix.add_argument("--calibration", action="append", metavar="SOURCE", required=True, help=how)
    imatrix.add_argument("--tokenizer", metavar="TOKENIZER", help=TOKENIZER)
    add_fields(imatrix.add_argument_group("calibration"), Calibration)
    add_fields(imatrix.add_argument_group("run"), Run, ("resume", "strict", "shard_size", *UPLOAD))

    plan = _add_command(commands, _plan, "estimate the memory and disk space that quantizing a model needs")
    plan.add_argument("model", metavar="MODEL", help=MODEL)
    plan.add_argument("--out", metavar="OUT", type=Path, help="folder that would be written (default: one here)")
    plan.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    add_settings(plan, ("overwrite", "resume", "strict", *UPLOAD))

    rotate = _add_command(commands, _rotate, "write a float model that is the same, but has no channels that stand out")
    rotate.add_argument("model", metavar="MODEL", help=MODEL)
    rotate.add_argument("out", metavar="OUT", type=Path, help="folder to write, new or empty")
    rotate.add_argument("--seed", metavar="N", type=int, default=0, help="of the rotation (default: 0)")
    rotate.add_argument("--revision", metavar="NAME", help=REVISION)

    evaluate = _add_command(commands, _evaluate, "measure a model's perplexity, and how far it is from a reference")
    evaluate.add_argument("model", metavar="MODEL", help="folder of a model, quantized or not, or its id on the Hub")
    evaluate.add_argument("--dataset", required=True, metavar="SOURCE", help=f"text to measure on: {SOURCES}")
    evaluate.add_argument("--reference", metavar="MODEL", help=REFERENCE)
    evaluate.add_argument("--tokenizer", metavar="TOKENIZER", help=TOKENIZER)
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    add_fields(evaluate, Evaluation)

    compare = _add_command(commands, _compare, "measure several checkpoints of one model, and show them side by side")
    compare.add_argument("checkpoints", metavar="CHECKPOINT", nargs="+", help=f"{QUANTIZED}; several")
    compare.add_argument("--dataset", required=True, metavar="SOURCE", help=f"text to measure on: {SOURCES}")
    compare.add_argument("--reference", metavar="MODEL", help="the float model to compare them with; it is loaded once")
    compare.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    compare.add_argument("--plot", metavar="FILE.svg", type=Path, help="draw size against divergence or perplexity")
    add_fields(compare, Evaluation)

    _add_readers(commands)
    return root


def _add_readers(commands: Any) -> None:
    """Add the commands that run no model."""
    advise = _add_command(commands, _recommend, "show which formats and widths of a model fit into a memory")
    advise.add_argument("model", metavar="MODEL", help=MODEL)
    advise.add_argument("--memory", metavar="SIZE", type=size, required=True, help="memory there is, such as 8GB")
    advise.add_argument("--for", dest="reader", choices=_READERS, required=True, help="the program that is to load it")
    tokens = "tokens whose keys and values must fit, too (default: what the model takes, up to 4096)"
    advise.add_argument("--context", metavar="N", type=int, help=tokens)
    advise.add_argument("--revision", metavar="NAME", help=REVISION)
    advise.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")

    report = _add_command(commands, _report, "draw a checkpoint's quantization report as a page for a browser")
    report.add_argument("checkpoint", metavar="OUT", type=Path, help="folder that holds quantization_report.json")
    report.add_argument(
        "--html",
        metavar="FILE",
        type=Path,
        help="page to write or replace (default: quantization_report.html in OUT); it needs no network and no script",
    )
    report.add_argument(
        "--png", metavar="FILE", type=Path, help="also write the heat map of errors as an image, for a model card"
    )

    look = _add_command(commands, _inspect, "show a checkpoint's format, bits and sizes, and which programs load it")
    look.add_argument("checkpoint", metavar="CHECKPOINT", help=QUANTIZED)
    look.add_argument("--revision", metavar="NAME", help=REVISION)
    one = "say of one program whether it loads the checkpoint, what is in the way, and what it costs; 1 if it does not"
    look.add_argument("--for", dest="reader", choices=_READERS, help=one)
    gpus = "GPUs between which vLLM or SGLang is to share every layer (default: 1)"
    look.add_argument("--tensor-parallel", metavar="N", type=int, default=1, help=gpus)
    look.add_argument("--json", action="store_true", help="print JSON")

    diff = _add_command(commands, _diff, "show which layers of two checkpoints of one model differ, and how far")
    diff.add_argument("first", metavar="A", help=QUANTIZED)
    diff.add_argument("second", metavar="B", help=QUANTIZED)
    diff.add_argument("--json", action="store_true", help="print JSON")

    convert = _add_command(commands, _convert, "write a checkpoint in another format, exactly or not at all")
    convert.add_argument("source", metavar="IN", help=QUANTIZED)
    convert.add_argument("target", metavar="OUT", type=Path, help=NEW)
    convert.add_argument("--format", choices=list(FORMATS), required=True, help="format of OUT")
    convert.add_argument("--overwrite", action="store_true", help="replace OUT if it is a quantized checkpoint")
    convert.add_argument("--revision", metavar="NAME", help=REVISION)
    limit = "largest size of the files of OUT (default: 4GiB)"
    convert.add_argument("--shard-size", metavar="SIZE", type=size, default=4 << 30, help=limit)

    doctor = _add_command(commands, _doctor, "find known damage of a checkpoint, and write a repaired one")
    doctor.add_argument("checkpoint", metavar="CHECKPOINT", help=QUANTIZED)
    doctor.add_argument("out", metavar="OUT", nargs="?", type=Path, help="folder to write; new or empty")
    versions = "version of OUT (default: that of the zero points of CHECKPOINT)"
    doctor.add_argument("--format", choices=("gptq", "gptq_v2"), help=versions)
    doctor.add_argument("--revision", metavar="NAME", help=REVISION)
    doctor.add_argument("--json", action="store_true", help="print JSON")


def _add_command(commands: Any, work: Callable[[argparse.Namespace], None], description: str) -> Parser:
    command: Parser = commands.add_parser(
        work.__name__.removeprefix("_"),
        help=description,
        description=description[0].upper() + description[1:] + ".",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(work=work)
    command.add_argument("--verbose", action="store_true", help="log more, and show where an error comes from")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Raises:
        SystemExit: 2 for usage errors, 0 after --help and --version.
    """
    arguments = parser().parse_args(argv)
    _log_to_stderr(arguments.verbose)
    try:
        with _terminable():
            arguments.work(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("gptqkit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GptqkitError, OSError, MemoryError, RuntimeError, ImportError) as error:
        if not isinstance(error, (GptqkitError, OSError, MemoryError)) and not _out_of_memory(error):
            raise
        if arguments.verbose:
            traceback.print_exc()
        if not isinstance(error, AbandonedError) or _launched_rank() == 0:
            said = " ".join(str(error).split()) or "there is too little memory"
            print(f"gptqkit: error: {said}", file=sys.stderr)
        return 1
    return 0


def _out_of_memory(error: Exception) -> bool:
    from .calibration.batches import out_of_memory

    return out_of_memory(error)


def _quantize(arguments: argparse.Namespace) -> None:
    config, run, calibration = config_from_options(arguments), from_options(arguments, Run), _calibration(arguments)
    _quieten_libraries(arguments.verbose)
    speaks = _launched_rank() == 0
    if not speaks:
        logging.getLogger("gptqkit").setLevel(logging.ERROR)
    with closing(ProgressDisplay()) as progress:
        how: dict[str, Any] = {"run": run, "evaluate_on": arguments.evaluate_on, "progress": progress}
        how["tokenizer"] = arguments.tokenizer
        result = gptqkit.quantize(arguments.model, calibration, arguments.out, config, **how)
    if speaks:
        print(quantization_summary(result.report))
        print(f"written to {arguments.out}" + (f" and uploaded to {result.url}" if result.url else ""))


def _calibration(arguments: argparse.Namespace) -> Calibration | None:
    if arguments.calibration is None:
        return None
    first, *more = arguments.calibration
    return from_options(arguments, Calibration, source=[Path(value) for value in (first, *more)] if more else first)


def _imatrix(arguments: argparse.Namespace) -> None:
    run, calibration = from_options(arguments, Run), _calibration(arguments)
    _quieten_libraries(arguments.verbose)
    with closing(ProgressDisplay()) as progress:
        how: dict[str, Any] = {"run": run, "tokenizer": arguments.tokenizer, "progress": progress}
        gptqkit.imatrix(arguments.model, calibration, arguments.out, **how)
    print(f"written to {arguments.out}")


def _plan(arguments: argparse.Namespace) -> None:
    config, run = config_from_options(arguments), from_options(arguments, Run)
    calibration = from_options(arguments, Calibration, source=None)
    _quieten_libraries(arguments.verbose)
    needed = gptqkit.plan(arguments.model, arguments.out, config, calibration=calibration, run=run)
    values = needed.to_dict()
    print(json.dumps(values, indent=2) if arguments.json else plan_summary(values))
    sys.stdout.flush()
    needed.check()


def _rotate(arguments: argparse.Namespace) -> None:
    _quieten_libraries(arguments.verbose)
    gptqkit.rotate(arguments.model, arguments.out, seed=arguments.seed, revision=arguments.revision)
    print(f"written to {arguments.out}")


def _recommend(arguments: argparse.Namespace) -> None:
    _quieten_libraries(arguments.verbose)
    how = {"context": arguments.context, "revision": arguments.revision}
    found = gptqkit.recommend(arguments.model, arguments.memory, arguments.reader, **how)
    rows = [choice.to_dict() for choice in found]
    print(json.dumps(rows, indent=2) if arguments.json else recommendation_table(rows))


def _evaluate(arguments: argparse.Namespace) -> None:
    config = from_options(arguments, Evaluation)
    _quieten_libraries(arguments.verbose)
    with closing(ProgressDisplay()) as progress:
        how: dict[str, Any] = {"reference": arguments.reference, "tokenizer": arguments.tokenizer}
        scores = gptqkit.evaluate(arguments.model, arguments.dataset, config, **how, progress=progress)
    question = {"model": arguments.model, "dataset": arguments.dataset, "reference": arguments.reference}
    answer = {**question, **scores.to_dict()}
    print(json.dumps(answer, indent=2) if arguments.json else key_values(answer))


def _compare(arguments: argparse.Namespace) -> None:
    config, reference, plot = from_options(arguments, Evaluation), arguments.reference, arguments.plot
    if plot and (plot.suffix != ".svg" or plot.is_dir() or not plot.parent.is_dir()):
        raise ConfigError(f"--plot is {plot}; give a file that ends in .svg, in a folder that exists")
    _quieten_libraries(arguments.verbose)
    with closing(ProgressDisplay()) as progress:
        found = gptqkit.compare(
            arguments.checkpoints, arguments.dataset, config, reference=reference, progress=progress
        )
    rows = [each.to_dict() for each in found]
    if reference is not None and not arguments.json:
        size = sum(file.stat().st_size for file in Path(reference).glob("*.safetensors")) or None
        rows.insert(0, {"checkpoint": reference, "size": size, "perplexity": rows[0].get("reference_perplexity")})
    answer = {"dataset": arguments.dataset, "reference": reference, "checkpoints": rows}
    print(json.dumps(answer, indent=2) if arguments.json else comparison_table(rows))
    if plot:
        incomplete = plot.with_name(f".{plot.name}.gptqkit-incomplete")
        incomplete.write_text(gptqkit.comparison_svg(found), encoding="utf-8")
        incomplete.replace(plot)


def _report(arguments: argparse.Namespace) -> None:
    file = arguments.html or arguments.checkpoint / "quantization_report.html"
    if arguments.png is not None and arguments.png.resolve() == file.resolve():
        raise ConfigError(f"{file} cannot be both page and picture; give --png another file")
    page = gptqkit.report_html(arguments.checkpoint)
    if arguments.html is None:
        file.unlink(missing_ok=True)  # a link that came with a downloaded checkpoint is not followed
    files = {file: page.encode()}
    if arguments.png is not None:
        files[arguments.png] = gptqkit.report_png(arguments.checkpoint)
    for file, data in files.items():
        file.write_bytes(data)
        print(f"written to {file}")


def _diff(arguments: argparse.Namespace) -> None:
    rows = [difference.to_dict() for difference in gptqkit.diff(arguments.first, arguments.second)]
    print(json.dumps(rows, indent=2) if arguments.json else difference_table(rows))


def _inspect(arguments: argparse.Namespace) -> None:
    how = {"revision": arguments.revision, "tensor_parallel": arguments.tensor_parallel}
    found = gptqkit.inspect(arguments.checkpoint, **how)
    one = None if arguments.reader is None else found.reader(arguments.reader)
    values = found.to_dict() if one is None else dataclasses.asdict(one)
    shown = (checkpoint_summary if one is None else reader_advice)(values) if not arguments.json else ""
    print(shown or json.dumps(values, indent=2))
    sys.stdout.flush()
    if one is not None and not one.loads:
        raise CheckpointError(f"{one.name} does not load {arguments.checkpoint}")


def _convert(arguments: argparse.Namespace) -> None:
    names = ("format", "overwrite", "revision", "shard_size")
    gptqkit.convert(arguments.source, arguments.target, **{name: getattr(arguments, name) for name in names})
    print(f"written to {arguments.target}")


def _doctor(arguments: argparse.Namespace) -> None:
    found = gptqkit.doctor(arguments.checkpoint, arguments.out, format=arguments.format, revision=arguments.revision)
    lines = [*map(str, found.damage or ["no damage found"]), *(f"note: {note}" for note in found.notes)]
    lines += [f"written to {arguments.out}"] * found.written
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else "\n".join(lines))
    sys.stdout.flush()
    if found.damage and not found.written:
        remedy = (
            "give OUT for a repaired copy" if all(each.repair for each in found.damage) else "it cannot be repaired"
        )
        raise gptqkit.CheckpointError(f"{arguments.checkpoint} is damaged; {remedy}")


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a process like Ctrl-C; those of a launcher it ends at once, even while they wait for another.

    An interrupt stays one where compiled code, in which it came, makes another exception of it.
    """
    if "WORLD_SIZE" in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # else it is ignored, as in the background
        numbers.append(signal.SIGINT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    except Exception as error:
        if stopped:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _log_to_stderr(verbose: bool) -> None:
    logger = logging.getLogger("gptqkit")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("gptqkit: %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False


def _launched_rank() -> int:
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
