"""What a walk hands over when a block is finished, and what it needs to go on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ..calibration.activations import HiddenStates
from .quantized import QuantizedWeight
from .report import ModuleReport


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A finished part of a walk, and all that the next part needs.

    Attributes:
        layer: The block that is finished; None for the output layer.
        weights: Its quantized weights by full module name, on the CPU.
        places: By the same names, the parameter of the model that each is or lies in, and which expert of it.
        reports: One per target of the part.
        hidden: What enters the next block; None without calibration, and after the last part.
        hidden_float: The same in the float model, for GPTAQ.
        counts: (samples,) bool, False for samples left out.
        batch_size: Samples per forward pass by now.
    """

    layer: int | None
    weights: Mapping[str, QuantizedWeight]
    places: Mapping[str, tuple[str, int | None]]
    reports: list[ModuleReport]
    hidden: HiddenStates | None
    hidden_float: HiddenStates | None
    counts: Tensor
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where an earlier walk stopped.

    Attributes:
        layers: Finished blocks.
        head: Whether the output layer is finished too.
        reports: Of every finished target.
        counts: As in the last `Step`.
        batch_size: As in the last `Step`.
        shape: Of one sample's hidden states.
        hidden: File with what enters the next block; None where nothing comes after.
        hidden_float: The same in the float model.
    """

    layers: int
    head: bool
    reports: list[ModuleReport]
    counts: Tensor
    batch_size: int
    shape: tuple[int, ...]
    hidden: Path | None
    hidden_float: Path | None


class Journal(Protocol):
    """Takes every finished part for good, and knows what an earlier walk finished."""

    def resumed(self) -> Resumed | None:
        """Where to go on; None for a new walk."""

    def file(self, stream: str, layer: int) -> Path:
        """Where the hidden states "hidden" or "float" that enter block `layer` belong on disk."""

    def keep(self, step: Step) -> None:
        """Take a finished part. When this returns, it is not lost any more."""
