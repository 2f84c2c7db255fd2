"""The `gptqkit` command: quantize, plan, evaluate, inspect and convert from the shell.

Everything heavy is imported inside the subcommands, so that help and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import parser
from .errors import AbandonedError, ConfigError, GptqkitError
from .terminal import ProgressDisplay, checkpoint_summary, key_values, plan_summary, quantization_summary

if TYPE_CHECKING:
    from .quantizer.config import QuantizeConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: The arguments after the program's name; those of the process by default.

    Raises:
        SystemExit: 2 for arguments that make no sense, 0 after --help and --version.
    """
    arguments = parser().parse_args(argv)
    commands = {
        "quantize": _quantize,
        "plan": _plan,
        "evaluate": _evaluate,
        "inspect": _inspect,
        "convert": _convert,
    }
    _log_to_stderr(arguments.verbose)
    try:
        commands[arguments.command](arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("gptqkit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (GptqkitError, OSError) as error:
        if arguments.verbose:
            traceback.print_exc()
        if not isinstance(error, AbandonedError):  # another process says why
            print(f"gptqkit: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _quantize(arguments: argparse.Namespace) -> None:
    _quieten_libraries(arguments.verbose)
    import gptqkit

    from .quantizer.ranks import launched_rank

    speaks = launched_rank() == 0
    if not speaks:
        logging.getLogger("gptqkit").setLevel(logging.ERROR)
    with closing(ProgressDisplay()) as progress:
        result = gptqkit.quantize(
            arguments.model,
            calibration=_calibration(arguments.calibration),
            out=arguments.out,
            config=_config(arguments),
            samples=arguments.samples,
            sequence_length=arguments.sequence_length,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            device=arguments.device,
            column=arguments.column,
            split=arguments.split,
            concatenate=arguments.concatenate,
            evaluate_on=arguments.evaluate_on,
            overwrite=arguments.overwrite,
            resume=arguments.resume,
            activations=arguments.activations,
            activation_memory=arguments.activation_memory,
            fit_check=arguments.fit_check,
            trust_remote_code=arguments.trust_remote_code,
            progress=progress,
        )
    if speaks:
        print(quantization_summary(result.report.to_dict()))
        print(f"written to {arguments.out}")


def _plan(arguments: argparse.Namespace) -> None:
    _quieten_libraries(arguments.verbose)
    import gptqkit

    plan = gptqkit.plan(
        arguments.model,
        out=arguments.out,
        config=_config(arguments),
        samples=arguments.samples,
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        activations=arguments.activations,
        activation_memory=arguments.activation_memory,
        device=arguments.device,
        evaluate_on=arguments.evaluate_on,
        timed=not arguments.untimed,
        trust_remote_code=arguments.trust_remote_code,
    )
    values = plan.to_dict()
    print(json.dumps(values, indent=2) if arguments.json else plan_summary(values))
    sys.stdout.flush()
    plan.check(fit_check=arguments.fit_check)


def _evaluate(arguments: argparse.Namespace) -> None:
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: there is no folder {arguments.json.parent}; make it first")
    _quieten_libraries(arguments.verbose)
    import gptqkit

    with closing(ProgressDisplay()) as progress:
        scores = gptqkit.evaluate(
            arguments.model,
            dataset=arguments.dataset,
            reference=arguments.reference,
            sequence_length=arguments.sequence_length,
            stride=arguments.stride,
            batch_size=arguments.batch_size,
            max_windows=arguments.max_windows,
            device=arguments.device,
            backend=arguments.backend,
            dtype=arguments.dtype,
            column=arguments.column,
            split=arguments.split,
            trust_remote_code=arguments.trust_remote_code,
            progress=progress,
        )
    question = {"model": arguments.model, "dataset": arguments.dataset, "reference": arguments.reference}
    answer = {**question, **scores.to_dict()}
    print(key_values(answer))
    if arguments.json is not None:
        _write_json(arguments.json, answer)


def _inspect(arguments: argparse.Namespace) -> None:
    import gptqkit

    summary = gptqkit.inspect(arguments.checkpoint).to_dict()
    print(json.dumps(summary, indent=2) if arguments.json else checkpoint_summary(summary))


def _convert(arguments: argparse.Namespace) -> None:
    import gptqkit

    gptqkit.convert(arguments.source, arguments.target, format=arguments.format, overwrite=arguments.overwrite)
    print(f"written to {arguments.target}")


def _config(arguments: argparse.Namespace) -> QuantizeConfig:
    from .quantizer.config import ModuleOverride, QuantizeConfig

    overrides: dict[str, ModuleOverride] = {}
    for pattern, change in arguments.overrides:
        overrides.setdefault(pattern, ModuleOverride(**change))
    return QuantizeConfig(
        bits=arguments.bits,
        group_size=arguments.group_size,
        sym=arguments.sym,
        method=arguments.method,
        desc_act=arguments.desc_act,
        static_groups=arguments.static_groups,
        act_group_aware=arguments.act_group_aware,
        damp=arguments.damp,
        mse=arguments.mse,
        alpha=arguments.alpha,
        true_sequential=arguments.true_sequential,
        block_size=arguments.block_size,
        float64=arguments.float64,
        skip_nonfinite=arguments.skip_nonfinite,
        lm_head=arguments.lm_head,
        overrides=overrides,
        format=arguments.format,
    )


def _calibration(values: Sequence[str] | None) -> str | list[Path] | None:
    if values is None:
        return None
    return values[0] if len(values) == 1 else [Path(value) for value in values]


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` in one step: an interrupted run leaves no half file."""
    handle, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            json.dump(values, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _log_to_stderr(verbose: bool) -> None:
    logger = logging.getLogger("gptqkit")
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("gptqkit: %(message)s"))
    logger.handlers = [handler]
    logger.propagate = False


def _quieten_libraries(verbose: bool) -> None:
    """Keep the model and data libraries to errors: their bars and notes would bury ours."""
    if verbose:
        return
    import datasets
    import huggingface_hub
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    huggingface_hub.utils.logging.set_verbosity_error()
