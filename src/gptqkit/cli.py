"""The `gptqkit` command: quantize, imatrix, plan, recommend, evaluate, compare, report, inspect, convert and so on.

Help and usage errors answer at once: `commands` takes everything heavy from `gptqkit`, which imports it then.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from . import commands
from .calibration.config import Calibration
from .errors import AbandonedError, GptqkitError
from .evaluation.config import Evaluation
from .export.formats import FORMATS, READERS
from .options import Once, Parser, add_fields, add_settings, name, new_file, path, picture, positive, seed, size
from .run import PLACES, Run
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

NEW = "folder to write; new or empty, unless --overwrite is given"
QUANTIZED = "folder of a quantized model, or its id on the Hub"
CALIBRATION = f"text to calibrate on, which every method but rtn needs: {SOURCES}. May be repeated for several files"
_READERS = [name.lower() for name in READERS]
REFERENCE = "float model to compare with, by KL divergence and top-1 agreement, or by the embeddings of an encoder"

UPLOAD = ("push_to_hub", "private")

SHARED: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "type": name, "help": "folder of a transformers model, or its id on the Hub"},
    "checkpoint": {"metavar": "CHECKPOINT", "type": name, "help": QUANTIZED},
    "--dataset": {
        "metavar": "SOURCE",
        "type": name,
        "action": Once,
        "required": True,
        "help": f"text to measure on: {SOURCES}",
    },
    "--tokenizer": {
        "metavar": "TOKENIZER",
        "type": name,
        "help": "folder of a tokenizer, or its id on the Hub (default: that of the model)",
    },
    "--revision": {"metavar": "NAME", "help": "branch, tag or commit of a model on the Hub"},
    "--json": {"action": "store_true", "help": "print JSON; sizes are in bytes"},
}
"""Arguments of several commands."""


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
    parsers = root.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)

    quantize = _add_command(parsers, commands.quantize, "model", "--tokenizer")
    quantize.add_argument("out", metavar="OUT", type=path, help=NEW)
    text: dict[str, Any] = {"metavar": "SOURCE", "type": name}
    quantize.add_argument("--calibration", action="append", help=CALIBRATION, **text)
    measured = "also measure the checkpoint's perplexity on this text"
    quantize.add_argument("--evaluate-on", action=Once, help=measured, **text)
    add_settings(quantize)

    imatrix = _add_command(parsers, commands.imatrix, "model", "--tokenizer")
    imatrix.add_argument("out", metavar="OUT", type=path, help="GGUF file to write")
    how = f"text that the model reads: {SOURCES}. May be repeated for several files"
    imatrix.add_argument("--calibration", action="append", required=True, help=how, **text)
    add_fields(imatrix.add_argument_group("calibration"), Calibration)
    of_run = imatrix.add_argument_group("run")
    add_fields(of_run, Run, ("activations", "overwrite", "resume", "strict", "shard_size", *UPLOAD))
    hidden = "where to keep hidden states between blocks: on the GPU (device), in RAM (memory, and auto) or on disk"
    of_run.add_argument("--activations", choices=PLACES, default=argparse.SUPPRESS, help=hidden)
    of_run.add_argument(
        "--overwrite", action="store_true", default=argparse.SUPPRESS, help="replace OUT if it is a GGUF file"
    )

    plan = _add_command(parsers, commands.plan, "model", "--json")
    plan.add_argument("--out", metavar="OUT", type=path, help="folder that would be written (default: one here)")
    add_settings(plan, ("overwrite", "resume", "strict", *UPLOAD))

    rotate = _add_command(parsers, commands.rotate, "model", "--revision")
    rotate.add_argument("out", metavar="OUT", type=path, help="folder to write, new or empty")
    rotate.add_argument("--seed", metavar="N", type=seed, default=0, help="of the rotation (default: 0)")

    evaluate = _add_command(parsers, commands.evaluate, "--dataset", "--tokenizer", "--json")
    model: dict[str, Any] = {"metavar": "MODEL", "type": name}
    evaluate.add_argument("model", help="folder of a model, quantized or not, or its id on the Hub", **model)
    evaluate.add_argument("--reference", help=REFERENCE, **model)
    add_fields(evaluate, Evaluation)

    compare = _add_command(parsers, commands.compare, "--dataset", "--json")
    compare.add_argument("checkpoints", metavar="CHECKPOINT", type=name, nargs="+", help=f"{QUANTIZED}; several")
    compare.add_argument("--reference", help="the float model to compare them with; it is loaded once", **model)
    compare.add_argument("--plot", metavar="FILE.svg", type=picture, help="draw size against divergence or perplexity")
    add_fields(compare, Evaluation)

    _add_readers(parsers)
    return root


def _add_readers(parsers: Any) -> None:
    """Add the commands that run no model."""
    advise = _add_command(parsers, commands.recommend, "model", "--revision", "--json")
    advise.add_argument("--memory", metavar="SIZE", type=size, required=True, help="memory there is, such as 8GB")
    advise.add_argument(
        "--for", dest="reader", type=str.lower, choices=_READERS, required=True, help="the program that is to load it"
    )
    tokens = "tokens whose keys and values must fit, too (default: what the model takes, up to 4096)"
    advise.add_argument("--context", metavar="N", type=positive, help=tokens)
    advise.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that comes with the model"
    )

    report = _add_command(parsers, commands.report)
    report.add_argument("checkpoint", metavar="OUT", type=path, help="folder that holds quantization_report.json")
    report.add_argument(
        "--html",
        metavar="FILE",
        type=new_file,
        help="page to write or replace (default: quantization_report.html in OUT); it needs no network and no script",
    )
    report.add_argument("--svg", metavar="FILE.svg", type=picture, help="also write the heat map of errors as an image")

    look = _add_command(parsers, commands.inspect, "checkpoint", "--revision", "--json")
    one = (
        "tell of one program whether it loads the checkpoint, what is in the way, and what loading costs; the exit "
        "code is 1 if it does not. What is told of transformers is without gptqkit: after 'import gptqkit' it loads "
        "all formats but GGUF as gptqkit does"
    )
    look.add_argument("--for", dest="reader", type=str.lower, choices=_READERS, help=one)
    gpus = "GPUs between which vLLM or SGLang is to share every layer (default: 1)"
    look.add_argument("--tensor-parallel", metavar="N", type=positive, default=1, help=gpus)

    diff = _add_command(parsers, commands.diff, "--json")
    diff.add_argument("first", metavar="A", type=name, help=QUANTIZED)
    diff.add_argument("second", metavar="B", type=name, help=QUANTIZED)

    convert = _add_command(parsers, commands.convert, "--revision")
    convert.add_argument("source", metavar="IN", type=name, help=QUANTIZED)
    convert.add_argument("target", metavar="OUT", type=path, help=NEW)
    convert.add_argument("--format", choices=list(FORMATS), required=True, help="format of OUT")
    convert.add_argument("--overwrite", action="store_true", help="replace OUT if it is a quantized checkpoint")
    limit = "largest size of the files of OUT (default: 4GiB)"
    convert.add_argument("--shard-size", metavar="SIZE", type=size, default=4 << 30, help=limit)

    doctor = _add_command(parsers, commands.doctor, "checkpoint", "--revision", "--json")
    doctor.add_argument("out", metavar="OUT", nargs="?", type=path, help="folder to write; new or empty")
    versions = "version of OUT (default: that of the zero points of CHECKPOINT)"
    doctor.add_argument("--format", choices=("gptq", "gptq_v2"), help=versions)


def _add_command(parsers: Any, work: Callable[[argparse.Namespace], None], *shared: str) -> Parser:
    """Add a command that has the name of what does its work, and whose description is that one's docstring.

    Arguments that are `shared` with others (`SHARED`) come first.
    """
    description = work.__doc__ or work.__name__  # python -OO keeps no docstrings
    command: Parser = parsers.add_parser(
        work.__name__,
        help=description[0].lower() + description[1:].removesuffix("."),
        description=description,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.set_defaults(work=work)
    command.add_argument("--verbose", action="store_true", help="log more, and show where an error comes from")
    for argument in shared:
        command.add_argument(argument, **SHARED[argument])
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; SystemExit with 2 for usage errors, 0 after --help and --version."""
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
        if not isinstance(error, (GptqkitError, OSError, MemoryError)):
            from .calibration.batches import out_of_memory

            if not out_of_memory(error):
                raise
        if arguments.verbose:
            traceback.print_exc()
        if not isinstance(error, AbandonedError) or commands.launched_rank() == 0:
            said = " ".join(str(error).split()) or "there is too little memory"
            print(f"gptqkit: error: {said}", file=sys.stderr)
        return 1
    return 0


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
