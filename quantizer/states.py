"""The hidden states of all samples on their way through the blocks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ..calibration.activations import HiddenStates, Place
from ..calibration.batches import CalibrationBatches
from .groups import Group
from .journal import Journal, Resumed
from .modules import Target
from .ranks import Ranks
from .stream import BlockStream


class States:
    """The hidden states that enter the next block, in the quantized model and, for GPTAQ, in the float model.

    Args:
        stream: Runs the blocks.
        batches: The calibration tokens.
        ranks: The processes, each of which holds the states of its own samples.
        journal: Says where states on disk belong.
        dtype: Of the states.
        place: Where they are kept.
        resumed: Where an earlier walk stopped; otherwise the samples are embedded now.
        paired: Whether the float model's are wanted.

    Attributes:
        quantized: Those of the quantized model.
        float: Those of the float model.
    """

    def __init__(
        self,
        stream: BlockStream,
        batches: CalibrationBatches,
        ranks: Ranks,
        journal: Journal | None,
        dtype: torch.dtype,
        place: Place,
        resumed: Resumed | None,
        *,
        paired: bool,
    ) -> None:
        self.stream, self.batches, self._ranks, self._journal = stream, batches, ranks, journal
        first = 0 if resumed is None else resumed.layers

        def new(name: str, shape: tuple[int, ...]) -> HiddenStates:
            return HiddenStates(batches.samples, shape, dtype, batches.device, place, self._file(name, first))

        if resumed is not None and resumed.hidden is not None:
            self.quantized = new("hidden", resumed.shape)
            self.quantized.load(resumed.hidden)
            self.float = new("float", resumed.shape) if resumed.hidden_float is not None else None
            if self.float is not None and resumed.hidden_float is not None:
                self.float.load(resumed.hidden_float)
            return
        shape = tuple(stream.embed(batches[range(1)]).shape[1:])
        self.quantized = new("hidden", shape)
        self.float = new("float", shape) if paired else None

        def use(samples: range, states: Tensor) -> None:
            self.quantized.write(samples, states)
            if self.float is not None:
                self.float.write(samples, states)

        batches.each(lambda samples: stream.embed(batches[samples]), use)

    def trace(self, layer: int, targets: list[Target]) -> list[Group]:
        """The targets of a block in the order in which it calls them; see `BlockStream.trace`."""
        found: list[Group] = []
        if self.batches.samples:  # the others learn it from those that have samples
            sample = range(self.batches.samples.start, self.batches.samples.start + 1)
            found = self.stream.trace(layer, self.batches[sample], self.quantized.read(sample), targets)
        return next(filter(None, self._ranks.gather(found)))

    def advance(self, layer: int, original: nn.Module | None) -> None:
        """Let block `layer` take the states to the next: quantized, and as it was (`original`) for the float model."""
        self.quantized = self._through(layer, self.quantized, "hidden", None)
        if self.float is not None:
            self.float = self._through(layer, self.float, "float", original)

    def _through(self, layer: int, states: HiddenStates, name: str, block: nn.Module | None) -> HiddenStates:
        after = states.successor(self._file(name, layer + 1))
        self.batches.each(
            lambda samples: self.stream.run(layer, self.batches[samples], states.read(samples), block), after.write
        )
        return after

    def _file(self, name: str, layer: int) -> Path | None:
        return self._journal.file(name, layer) if self._journal is not None else None
