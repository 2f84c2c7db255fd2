"""What is written runs before it counts: a block is read back from its files and run on its packed layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError
from .export.checkpoint import Checkpoint
from .loading import install
from .model import FloatModel

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far outputs may differ, relative to their norm: layers that run in other kernels round and sum in other ways."""


def check_block(
    model: FloatModel,
    layer: int,
    part: Checkpoint,
    names: Sequence[str],
    run: Callable[[nn.Module], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Build block `layer` from its files, as `load` would, and compare what it computes with what the block computes.

    The block of `model` has the solutions in place, and `part` is what was written of it. `names` are its quantized
    Linears, by their names in the block; `run` gives what leaves a block of some tokens.

    Raises:
        CheckpointError: The block cannot run, or computes something else; the first Linear that differs is named.
    """
    block, path = model.blocks[layer], model.paths[layer]
    model.model.set_submodule(path, _without_weights(block))
    try:
        backend = "torch" if device.type == "cpu" else "auto"
        install(model.empty, part, device=device, dtype=dtype, backend=backend, cast=True)
        packed = model.model.get_submodule(path)
    finally:
        model.model.set_submodule(path, block)
    try:
        found, expected = run(packed), run(block)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        cause = error.__cause__ or error
        raise CheckpointError(
            f"block {layer} cannot run on its quantized layers ({type(cause).__name__}: {cause}); leave what is at "
            "fault in floating point with an override, and report this model"
        ) from error
    if differs(found, expected, dtype):
        ours, theirs = (_outputs(each, names, run) for each in (packed, block))
        first = next((name for name in theirs if name not in ours or differs(ours[name], theirs[name], dtype)), None)
        raise CheckpointError(
            f"block {layer} computes something else on its quantized layers than in the pipeline"
            + (f", first in {first}" if first is not None else "")
            + "; leave what is at fault in floating point with an override, and report this model"
        )


def differs(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs differ by more than `TOLERANCE` allows for activations of this dtype, or are not finite."""
    if found.shape != expected.shape:
        return True
    distance, size = (found - expected).double().norm(), expected.double().norm()
    return not float(distance) <= TOLERANCE[dtype] * float(size)


def _outputs(block: nn.Module, names: Sequence[str], run: Callable[[nn.Module], Tensor]) -> Mapping[str, Tensor]:
    """Return what the first call of each of some modules gives, in the order of the calls."""
    outputs: dict[str, Tensor] = {}

    def record(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        outputs.setdefault(name, output)

    with ExitStack() as hooks:
        for name in names:
            hooks.callback(block.get_submodule(name).register_forward_hook(partial(record, name)).remove)
        run(block)
    return outputs


def _without_weights(block: nn.Module) -> nn.Module:
    """Return a copy of `block` whose parameters are on the meta device."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for parameter in block.parameters()
    }
    return copy.deepcopy(block, memo)
