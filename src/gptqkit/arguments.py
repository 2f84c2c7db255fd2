"""The grammar of the command line: every option, its default and its help.

The choices and defaults repeat those of the library (a test compares them), because importing it would import
torch, and help must answer at once.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from .version import __version__

BITS = (2, 3, 4, 8)
METHODS = ("rtn", "gptq", "gptaq")
FORMATS = ("gptq", "gptq_v2")
PLACES = ("auto", "device", "memory", "disk")
BACKENDS = ("auto", "torch", "cpu", "cpu-int4", "cuda")

EXIT_CODES = """\
exit codes:
  0    done
  1    it could not be done: one line on standard error says why (--verbose adds where)
  2    the command line makes no sense
  130  interrupted (Ctrl-C); nothing half-written is left

Results go to standard output, progress and messages to standard error.
"""

SOURCES = (
    "a text file (.txt .json .jsonl .csv .parquet), a folder of them, a .safetensors file with one int64 tensor "
    "'input_ids' (samples, length), 'wikitext2', 'c4', 'pile', or the id of a data set on the Hugging Face Hub"
)


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` in its result names the subcommand."""
    root = argparse.ArgumentParser(
        prog="gptqkit",
        description="Quantize language models with GPTQ and GPTAQ, measure them, and look into their files.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"gptqkit {__version__}")
    commands = root.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for add in (_add_quantize, _add_plan, _add_evaluate, _add_inspect, _add_convert):
        add(commands)
    return root


def _add_command(commands: Any, name: str, description: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description,
        description=description[0].upper() + description[1:] + ".",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--verbose", action="store_true", help="say more, and show where an error came from")
    return command


def _add_quantize(commands: Any) -> None:
    command = _add_command(commands, "quantize", "quantize a model and write it as a checkpoint")
    command.add_argument("model", metavar="MODEL", help="folder of a transformers model, or its id on the Hub")
    command.add_argument("out", metavar="OUT", type=Path, help="folder to write; it must not exist yet")
    _add_settings(command)


def _add_plan(commands: Any) -> None:
    description = "say what quantizing would need, and whether it fits, before any of it is done"
    command = _add_command(commands, "plan", description)
    command.add_argument("model", metavar="MODEL", help="folder of a transformers model, or its id on the Hub")
    command.add_argument(
        "--out", metavar="OUT", type=Path, help="folder that would be written (default: one in the current folder)"
    )
    _add_settings(command)
    plan = command.add_argument_group("the plan, beside all options of quantize")
    plan.add_argument("--untimed", action="store_true", help="do not run and solve a block to estimate the time")
    plan.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--overwrite", action="store_true", help="replace OUT where it holds a quantized checkpoint")
    command.add_argument("--resume", action="store_true", help="go on with an unfinished job for OUT, if there is one")

    grid = command.add_argument_group("the grid of the weights")
    grid.add_argument("--bits", type=int, choices=BITS, default=4, help=_with_default("bits per weight"))
    grid.add_argument(
        "--group-size",
        type=int,
        default=128,
        metavar="COLUMNS",
        help=_with_default("input columns that share a scale and a zero; -1 for one group per row"),
    )
    sym = grid.add_mutually_exclusive_group()
    sym.add_argument("--sym", action="store_true", default=True, help="zero in the middle (the default)")
    sym.add_argument("--asym", action="store_false", dest="sym", help="choose every group's zero as well as its scale")
    mse = grid.add_mutually_exclusive_group()
    mse.add_argument(
        "--mse",
        action="store_true",
        default=None,
        help="search grids for the least weighted squared error (the default, except for rtn)",
    )
    mse.add_argument("--no-mse", action="store_false", dest="mse", help="let grids span minimum to maximum")
    grid.add_argument(
        "--override",
        dest="overrides",
        action="append",
        type=_override,
        default=[],
        metavar="REGEX:bits=8,group_size=32",
        help="other settings for the modules whose full name the regular expression finds; repeatable, the first "
        "match of all --override and --skip counts",
    )
    grid.add_argument(
        "--skip",
        dest="overrides",
        action="append",
        type=_skip,
        default=[],
        metavar="REGEX",
        help="leave the modules whose full name the regular expression finds in floating point; repeatable",
    )
    grid.add_argument("--lm-head", action="store_true", help="quantize the output layer too (not where it is tied)")

    method = command.add_argument_group("the method")
    method.add_argument(
        "--method",
        choices=METHODS,
        default="gptq",
        help=_with_default("rtn rounds to nearest, gptq compensates, gptaq also for the layers before"),
    )
    method.add_argument("--desc-act", action="store_true", help="take columns in the order of falling activations")
    method.add_argument(
        "--static-groups", action="store_true", help="fix grids beforehand, so that --desc-act costs no g_idx"
    )
    aware = method.add_mutually_exclusive_group()
    aware.add_argument(
        "--act-group-aware",
        action="store_true",
        default=None,
        help="sort columns inside groups, and whole groups, by activations (the default, unless --desc-act)",
    )
    aware.add_argument(
        "--no-act-group-aware", action="store_false", dest="act_group_aware", help="keep the order of the columns"
    )
    method.add_argument(
        "--damp",
        type=float,
        default=0.01,
        metavar="SHARE",
        help=_with_default("share of the Hessian's mean diagonal added to its diagonal, between 0 and 1"),
    )
    method.add_argument(
        "--alpha",
        type=float,
        default=0.25,
        metavar="STRENGTH",
        help=_with_default("strength of gptaq's correction, 0 to 1"),
    )
    method.add_argument(
        "--no-true-sequential",
        action="store_false",
        dest="true_sequential",
        help="inside a block, let no module see the outputs of the quantized ones before it",
    )
    method.add_argument(
        "--block-size",
        type=_positive,
        default=128,
        metavar="COLUMNS",
        help=_with_default("columns per lazy update; changes the speed only"),
    )
    method.add_argument("--float64", action="store_true", help="factorise and sweep in double precision")
    method.add_argument(
        "--skip-nonfinite",
        action="store_true",
        help="leave samples with NaN or infinite activations out, and say how many, instead of stopping",
    )

    data = command.add_argument_group("calibration")
    data.add_argument(
        "--calibration",
        action="append",
        metavar="SOURCE",
        help=f"where the text comes from: {SOURCES}; repeatable for several files (rtn can do without)",
    )
    data.add_argument(
        "--samples", type=_positive, default=128, metavar="N", help=_with_default("windows of text to take")
    )
    data.add_argument(
        "--sequence-length",
        type=_positive,
        metavar="TOKENS",
        help="tokens in a window (default: 2048, or the most that the model takes where that is less)",
    )
    data.add_argument("--seed", type=int, default=0, help=_with_default("which windows are drawn"))
    data.add_argument(
        "--no-concatenate",
        action="store_false",
        dest="concatenate",
        help="one row of text per sample, padded, instead of cutting windows from all text joined",
    )
    _add_columns(data)

    run = command.add_argument_group("the run")
    run.add_argument("--format", choices=FORMATS, default="gptq_v2", help=_with_default("checkpoint format"))
    run.add_argument(
        "--evaluate-on",
        metavar="SOURCE",
        help="measure the written checkpoint's perplexity on this text; not for encoders",
    )
    run.add_argument(
        "--batch-size",
        type=_positive,
        metavar="WINDOWS",
        help="windows per forward pass (default: as many as fit, 8 at most)",
    )
    run.add_argument(
        "--activations",
        choices=PLACES,
        default="auto",
        help=_with_default("where hidden states are kept between blocks; auto: the fastest place where they fit"),
    )
    run.add_argument(
        "--activation-memory",
        type=_bytes,
        metavar="SIZE",
        help="RAM that auto may give to hidden states, such as 8GiB (default: half of what is free)",
    )
    run.add_argument(
        "--no-fit-check",
        action="store_false",
        dest="fit_check",
        help="where a run does not fit by its plan, only warn, and go on with the most modest of the open choices",
    )
    _add_device(run)


def _add_evaluate(commands: Any) -> None:
    command = _add_command(commands, "evaluate", "measure perplexity, and distance from a reference model")
    command.add_argument("model", metavar="MODEL_OR_CHECKPOINT", help="folder or Hub id, quantized or not")
    command.add_argument("--dataset", required=True, metavar="SOURCE", help=f"the text: {SOURCES}")
    command.add_argument(
        "--reference",
        metavar="MODEL",
        help="the float model: adds mean KL divergence (nats per token) and how often both prefer the same token; "
        "encoders need one, whose embeddings theirs are compared with",
    )
    command.add_argument(
        "--sequence-length",
        type=_positive,
        metavar="TOKENS",
        help="tokens in a window (default: 2048, or the most that the model takes where that is less)",
    )
    command.add_argument(
        "--stride",
        type=_positive,
        metavar="TOKENS",
        help="how far a window moves on (default: its length, so that windows do not overlap); not for encoders",
    )
    command.add_argument("--max-windows", type=_positive, metavar="N", help="stop after so many windows (default: all)")
    command.add_argument(
        "--batch-size", type=_positive, default=8, metavar="WINDOWS", help=_with_default("windows per forward pass")
    )
    command.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help=_with_default("what runs the quantized layers; anything but auto fails where it cannot serve one of them"),
    )
    command.add_argument(
        "--dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help=_with_default("the arithmetic; auto: the checkpoint's, but float32 for float16 on a CPU"),
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write the scores here too, in one step")
    _add_columns(command)
    _add_device(command)


def _add_inspect(commands: Any) -> None:
    description = "show format, bits, groups and sizes of a checkpoint, and which readers can load it"
    command = _add_command(commands, "inspect", description)
    command.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="folder of a quantized model")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_convert(commands: Any) -> None:
    description = "write a checkpoint in another format, bit for bit or not at all"
    command = _add_command(commands, "convert", description)
    command.add_argument("source", metavar="IN", type=Path, help="folder of a quantized model")
    command.add_argument("target", metavar="OUT", type=Path, help="folder to write; it must not exist yet")
    command.add_argument("--format", choices=FORMATS, required=True, help="the format of OUT")
    command.add_argument("--overwrite", action="store_true", help="replace OUT where it holds a quantized checkpoint")


def _add_columns(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--column", metavar="NAME", help="the text column of structured files and data sets (default: found by name)"
    )
    group.add_argument("--split", metavar="NAME", help="the split of a Hub data set")


def _add_device(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--device", default="auto", help=_with_default("cpu, cuda, cuda:1, ..., or auto: a GPU where there is one")
    )
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python code that a float model brings along"
    )


def _with_default(text: str) -> str:
    return f"{text} (default: %(default)s)"


def _override(text: str) -> tuple[str, dict[str, Any]]:
    """The pattern and the changes of `REGEX:bits=8,group_size=32`.

    >>> _override("down_proj$:bits=8,group_size=32")
    ('down_proj$', {'bits': 8, 'group_size': 32})
    """
    pattern, colon, changes = text.rpartition(":")
    change: dict[str, int] = {}
    for item in changes.split(","):
        key, _, value = item.strip().partition("=")
        if not colon or key not in ("bits", "group_size") or not re.fullmatch(r"-?\d+", value):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 'REGEX:bits=8,group_size=32'")
        change[key] = int(value)
    return _pattern(pattern), change


def _skip(text: str) -> tuple[str, dict[str, Any]]:
    return _pattern(text), {"skip": True}


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def _bytes(text: str) -> int:
    """The bytes in `8GiB`, `500MiB` or a plain number.

    >>> _bytes("8GiB"), _bytes("500 MiB"), _bytes("4096")
    (8589934592, 524288000, 4096)
    """
    match = re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB|TiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give one such as 8GiB or 500MiB")
    return int(match[1]) << (10 * ("", "KiB", "MiB", "GiB", "TiB").index(match[2]))


def _positive(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)
