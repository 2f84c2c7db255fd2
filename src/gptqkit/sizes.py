"""What a checkpoint takes before it is written, to the byte."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedModel

from .export.formats import find_format
from .quantizer.config import QuantizeConfig
from .targets import Target, is_tied


def checkpoint_bytes(model: PreTrainedModel, targets: Iterable[Target], config: QuantizeConfig) -> tuple[int, int]:
    """Return the bytes of a checkpoint's quantized layers, all `targets`, and those of all its other tensors.

    The model's experts are split, and it is in the dtype of its files.
    """
    layout, tied = find_format(config.format), is_tied(model)
    packed = {f"{target.name}.weight": packed_bytes(target) for target in targets}
    size = layout.float_nbytes or (lambda _name, tensor, _type, _tied: tensor.nbytes)
    others = ((name, tensor) for name, tensor in model.named_parameters() if name not in packed)
    return sum(packed.values()), sum(size(name, tensor, config.type, tied) for name, tensor in others)


def packed_bytes(target: Target) -> int:
    """Return what one Linear takes in the checkpoint; where its bits are yet to be chosen, what the average makes."""
    average = target.config.target_bits
    if average is not None and target.config.override_of(target.name) is None:
        return round(target.weights * average / 8)
    return find_format(target.config.format).nbytes(target.spec)
