"""An importance matrix for llama.cpp's own quantizer: what every Linear of the float model receives, squared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .api import drawn_samples, explained_memory, on_disk
from .assembly import stored_module
from .calibration.config import calibration_of
from .distributed import join
from .errors import ConfigError, OutputExistsError
from .export.checkpoint import public_name
from .export.imatrix import write_imatrix
from .export.staging import remove_leftovers
from .hub import at_home
from .loading import choose_device, open_tokenizer
from .model import FloatModel
from .modes import in_plain_modes
from .progress import Progress, ProgressCallback, silent
from .quantizer.config import QuantizeConfig
from .run import Run
from .settings import settings_of
from .targets import find_targets, tell_misfits
from .walking import FloatWalk

WIDEST = QuantizeConfig(type="q8_0")  # of blocks of 32 columns: the widest choice of Linears


@in_plain_modes
def imatrix(
    model: str | Path | PreTrainedModel,
    calibration: Any,
    out: str | Path,
    *,
    run: Run | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    progress: ProgressCallback = silent,
) -> None:
    """Write an importance matrix for llama.cpp's quantizer: of every Linear the mean squares of its inputs.

    Args:
        model: Hub id or folder of a float model, or a loaded one.
        calibration: A `Calibration`, a dictionary of its fields, or a source as in its `source`.
        out: The GGUF file to write, in a folder that exists.
        run: Where and how it is run; `activations` are in RAM unless told otherwise.
        tokenizer: As for `quantize`.
        progress: Called once per module.

    Raises:
        OutputExistsError: `out` exists, and `overwrite` is not set, or it is no GGUF file.
        GptqkitError: Settings, text, model or files that do not fit; see `errors`.
    """
    run, out = settings_of(Run, run or {}), Path(at_home(out))
    for name in ("resume", "push_to_hub"):
        if getattr(run, name):
            raise ConfigError(f"{name} is of checkpoints, not of an importance matrix; leave it out")
    calibration = calibration_of(calibration)
    if os.path.lexists(out) and not run.overwrite:
        raise OutputExistsError(
            f"{out} exists already; choose another file, or overwrite it (overwrite=True, --overwrite)"
        )
    if os.path.lexists(out) and not _is_gguf(out):
        raise OutputExistsError(f"{out} is no GGUF file, so it is not overwritten; choose another file")
    if not out.parent.is_dir():
        raise ConfigError(f"there is no folder {out.parent}; make it, or choose another file")
    device = choose_device(run.device)
    with join(device) as processes, on_disk(model) as (path, _):
        if processes.size > 1:
            raise ConfigError(f"an importance matrix is made by one process, not by {processes.size}")
        source = FloatModel(path, trust_remote_code=run.trust_remote_code, revision=run.revision)
        tokenizer = open_tokenizer(tokenizer, source.path, trust_remote_code=run.trust_remote_code)
        samples = drawn_samples(source, calibration, tokenizer)
        remove_leftovers(out)
        with explained_memory():
            sums = _squared_inputs(FloatWalk(source, samples, processes, run, out), progress)
    count, length = samples.input_ids.shape
    model_config = source.model.config.to_dict()
    write_imatrix(out, sums, model_config, dataset=public_name(calibration.source), samples=count, length=length)


def _is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF"


@torch.no_grad()
def _squared_inputs(walk: FloatWalk, progress: ProgressCallback) -> list[tuple[str, Tensor, int]]:
    """Return of every Linear in the blocks its stored name, the sums of x_j^2, (in,) float32, and how many tokens."""
    targets, left = find_targets(walk.model.model, WIDEST)
    tell_misfits(targets, left, WIDEST, strict=walk.run.strict)
    found: list[tuple[str, Tensor, int]] = []
    total = sum(map(len, targets))
    for layer, streams in walk.blocks():
        for portion in streams.collect(layer, streams.trace(layer, targets[layer])):
            for measured in portion:
                for target in measured.targets:
                    tokens, squares = 0, torch.zeros(target.shape[1], dtype=torch.float32)
                    if measured.statistics is not None and measured.statistics.tokens:  # none may reach an expert
                        tokens = measured.statistics.tokens
                        squares = measured.statistics.hessian().diagonal().cpu() * tokens
                    found.append((stored_module(walk.model, target.name), squares, tokens))
                    done = len(found)
                    progress(Progress(stage="imatrix", done=done, total=total, layer=layer, module=target.name))
    return found
