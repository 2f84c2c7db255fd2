"""Where the weights of a model come from, one part at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from transformers import PreTrainedModel

from .modules import brought_in, find_blocks, output_layer
from .stream import working_copy


class Weights(Protocol):
    """Where the float weights of a model come from when their turn has come; each leaves the model as it was."""

    def outside(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Everything but the blocks, and but the output layer where that has weights of its own."""

    def block(self, layer: int, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """The weights of one block."""

    def head(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """The weights of the output layer."""


class InMemory:
    """The weights of a model that is loaded: parts of it are copied to the device for a while.

    Args:
        model: The model; it comes back as it was.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._blocks = find_blocks(model)[1]

    def outside(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Everything but the blocks, and but the output layer where that has weights of its own."""
        return working_copy(self._model, device, dtype, leave=brought_in(self._model, self._blocks))

    def block(self, layer: int, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """The weights of one block."""
        return working_copy(self._blocks[layer], device, dtype)

    def head(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """The weights of the output layer."""
        output = output_layer(self._model)
        return nullcontext() if output is None else working_copy(output, device, dtype)
