"""Two checkpoints of one model, layer by layer, without the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..settings import Plain
from .checkpoint import Checkpoint, open_checkpoint
from .shards import same_bits


@dataclass(frozen=True, kw_only=True)
class LayerDifference(Plain):
    """One layer or tensor that is not the same in two checkpoints.

    Attributes:
        name: Its name in both.
        first: What it is in the first: bits, columns per group (-1 for rows), symmetric or not; or dtype and shape of a
            tensor that is not quantized; None where it is missing.
        second: The same in the second.
        codes: Share of the codes that differ, where both have as many bits.
        scales: Share of the groups whose scales differ, where both have as many.
        distance: ||A - B|| / ||A|| of the weights; None where one is missing or has another shape.
    """

    name: str
    first: str | None
    second: str | None
    codes: float | None = None
    scales: float | None = None
    distance: float | None = None


def diff(first: Path | str, second: Path | str) -> list[LayerDifference]:
    """Return what differs between two checkpoints, directories or ids on the Hub, in the order of the first.

    Layers are compared by the weights they stand for, so the formats may be different ones; all other tensors by their
    values, whatever the dtype. Nothing is returned for what is equal. Layers of other bits, groups or symmetry differ
    even where their weights are the same, which a `distance` of 0 tells.

    Raises:
        DatasetUnavailableError: One of them is not there.
        CheckpointError: One of them is damaged, or they have no layer in common.
    """
    one, other = (open_checkpoint(path) for path in (first, second))
    if not set(one.float_names) & set(other.float_names):
        raise CheckpointError(f"{first} and {second} have no layer in common; give checkpoints of one model")
    found = (_compared(name, one, other) for name in dict.fromkeys([*one.float_names, *other.float_names]))
    return [difference for difference in found if difference is not None]


def _compared(name: str, one: Checkpoint, other: Checkpoint) -> LayerDifference | None:
    layer = name.removesuffix(".weight")
    kinds = [_kind(name, checkpoint) for checkpoint in (one, other)]
    if None in kinds:
        return LayerDifference(name=layer, first=kinds[0], second=kinds[1])
    if layer not in one.layers and layer not in other.layers and _same(one.tensor(name), other.tensor(name)):
        return None
    codes = scales = None
    if layer in one.layers and layer in other.layers:
        mine, theirs = one.weight(layer), other.weight(layer)
        if mine.codes.shape == theirs.codes.shape and mine.bits == theirs.bits:
            codes = _share(mine.codes, theirs.codes)
        if mine.scale.shape == theirs.scale.shape:
            scales = _share(mine.scale, theirs.scale)
        if kinds[0] == kinds[1] and torch.equal(mine.dequantize(), theirs.dequantize()):
            return None
    values = [_value(name, checkpoint) for checkpoint in (one, other)]
    distance = None
    if values[0].shape == values[1].shape:
        distance = float((values[0] - values[1]).norm() / values[0].norm().clamp(min=1e-30))
    return LayerDifference(name=layer, first=kinds[0], second=kinds[1], codes=codes, scales=scales, distance=distance)


def _kind(name: str, checkpoint: Checkpoint) -> str | None:
    spec = checkpoint.layers.get(name.removesuffix(".weight"))
    if spec is not None:
        size = "rows" if spec.group_size == spec.in_features else f"groups of {spec.group_size}"
        return f"{spec.bits} bits, {size}, {'symmetric' if spec.sym else 'asymmetric'}"
    if name not in checkpoint.tensors.where:
        return None
    tensor = checkpoint.tensors.meta(name)
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _value(name: str, checkpoint: Checkpoint) -> torch.Tensor:
    layer = name.removesuffix(".weight")
    return checkpoint.weight(layer).dequantize() if layer in checkpoint.layers else checkpoint.tensor(name).float()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors have the same bits, or the same values in two dtypes, such as norms in GGUF, in float32."""
    if one.dtype == other.dtype:
        return same_bits(one, other)
    return one.shape == other.shape and torch.equal(one.double(), other.double())


def _share(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one != other).float().mean())
