"""What every Linear of the float model receives: the sums of squares of an importance matrix."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from .assembly import stored_module
from .calibration.samples import Samples
from .calibration.statistics import InputStatistics
from .distributed import Processes
from .model import FloatModel
from .progress import Progress, ProgressCallback
from .quantizer.config import QuantizeConfig
from .run import Run
from .subsets import Group, portions
from .targets import find_targets, misfits, refuse
from .walking import float_blocks

_LOG = logging.getLogger("gptqkit")
WIDEST = QuantizeConfig(type="q8_0")  # of blocks of 32 columns: the widest choice of Linears


@torch.no_grad()
def squared_inputs(
    model: FloatModel,
    samples: Samples,
    processes: Processes,
    run: Run,
    progress: ProgressCallback,
    out: Path,
) -> list[tuple[str, Tensor, int]]:
    """Return of every Linear in the blocks its stored name, the sums of x_j^2, (in,) float32, and how many tokens.

    `progress` is called once per Linear. Hidden states may be kept beside `out`.

    Raises:
        ConfigError: With `strict`, Linears that fit into no GGUF file.
        NonFiniteError: Non-finite activations.
    """
    targets, left = find_targets(model.model, dict(zip(model.paths, model.blocks, strict=True)), WIDEST)
    problems = misfits(targets, left, WIDEST)
    refuse(problems if run.strict else [])
    for line in problems:
        _LOG.warning("%s", line)
    found: list[tuple[str, Tensor, int]] = []
    total = sum(map(len, targets))
    for layer, streams in float_blocks(model, samples, processes, run, out):
        pools: dict[Group, InputStatistics] = {}
        for portion in portions(streams.trace(layer, targets[layer]), cross=False):
            for measured in streams.collect(layer, portion, pools, None):
                for target in measured.targets:
                    tokens, squares = 0, torch.zeros(target.shape[1], dtype=torch.float32)
                    if measured.statistics is not None and measured.statistics.tokens:  # none may reach an expert
                        tokens = measured.statistics.tokens
                        squares = measured.statistics.hessian().diagonal().cpu() * tokens
                    found.append((stored_module(model, target.name), squares, tokens))
                    done = len(found)
                    progress(Progress(stage="imatrix", done=done, total=total, layer=layer, module=target.name))
    return found
