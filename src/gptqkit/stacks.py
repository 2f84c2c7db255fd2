"""How the blocks of a stack are called, and what they return: found by running the first of them on one sample."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .calibration.batches import Batches
from .calibration.capture import BlockCall, Forward, block_call, hand_on
from .errors import ArchitectureError
from .model import FloatModel
from .targets import is_matrix, matrix

Called: TypeAlias = Callable[[Sequence[Forward]], BlockCall]  # what earlier blocks do -> how the next one is called


@dataclass(frozen=True, eq=False)
class Stack:
    """How the blocks of a stack are called, and what they return.

    Attributes:
        blocks: Their numbers.
        returned: How many values they return as a tuple, the hidden states first; 0 where they return only these.
        shape: Of one sample's hidden states.
        axis: Of the samples in hidden states.
        dtype: Of what leaves the first block, which may be wider than embeddings: Mamba adds up in float32.
        beside: Where later blocks are given what the first one returns beside hidden states, such as T5's position
            bias: that block without the weights of its Linears, which makes the same.
        handed: Which of these values the next block is given where there is no such block; None where blocks hand on
            nothing but hidden states, and write nothing into mappings that they are given.
    """

    blocks: range
    returned: int
    shape: tuple[int, ...]
    axis: int
    dtype: torch.dtype
    beside: nn.Module | None
    handed: tuple[int, ...] | None

    @property
    def across(self) -> bool:
        """Whether hidden states are (length, samples, width)."""
        return self.axis == 1 and len(self.shape) == 2


def probe_stack(
    model: FloatModel, blocks: range, batches: Batches, before: Sequence[Forward], dtype: torch.dtype
) -> Stack:
    """Run the first of the blocks of a stack on one sample; ArchitectureError where it cannot be run by itself.

    What stands outside the blocks is there. `before` is what the blocks of earlier stacks are to do.
    """
    block, tensors = model.blocks[blocks.start], batches.tensors(range(1))
    called = partial(block_call, model.model, model.blocks, tensors)
    with model.block(blocks.start, batches.device, dtype):
        call = called(before)
        twice = {key: torch.cat([tensor, tensor]) for key, tensor in tensors.items()}
        two = block_call(model.model, model.blocks, twice, before)
        sizes = enumerate(zip(call.hidden.shape, two.hidden.shape, strict=True))
        axis = next((axis for axis, (one, both) in sizes if (one, both) == (1, 2)), None)
        if axis is None:
            name, shape = type(model.model).__name__, tuple(call.hidden.shape)
            raise ArchitectureError(f"{name} has no axis of samples in its hidden states, {shape} of one")
        shape, output = tuple(call.hidden.movedim(axis, 0).shape[1:]), call(block, call.hidden)
        hidden, returned = hidden_states(output, block), len(output) if type(output) in (tuple, list) else 0
        handed, beside = _given(called, before, output) if returned and len(blocks) > 1 else (), None
        if any(isinstance(output[place], Tensor) for place in handed):
            with model.block(blocks.start + 1, batches.device, dtype):
                beside, handed = _beside(block, model.blocks[blocks.start + 1], called, before, output, handed)
    return Stack(blocks, returned, shape, axis, hidden.dtype, beside, handed if handed or call.mappings else None)


def added_behind(model: FloatModel, stack: Stack, batches: Batches, number: int, before: Sequence[Forward]) -> int:
    """Return how many hidden states the model adds behind the tokens of a sample, to make them a multiple of something.

    A sample of as many more tokens has no more hidden states then. `number` is that of the stack; other arguments are
    those of `probe_stack`.
    """
    tokens, states, added = batches.tensors(range(1)), stack.shape[-2], 0
    own = ("decoder_input_ids",) if number else ("input_ids", "attention_mask")
    length = tokens[own[0]].shape[1]
    if states > length:
        longer = {
            key: torch.cat([each, each[:, -1:].expand(-1, states - length)], 1) if key in own else each
            for key, each in tokens.items()
        }
        with suppress(ArchitectureError):  # it may be too long
            one, other = (
                block_call(model.model, model.blocks, each, before).hidden.movedim(stack.axis, 0)
                for each in (tokens, longer)
            )
            if other.shape == one.shape and torch.equal(one[..., :length, :], other[..., :length, :]):
                added = states - length
    return added


def _given(called: Called, before: Sequence[Forward], output: Sequence[Any]) -> tuple[int, ...]:
    """Return which of the values that the first block returns beside hidden states the second one is given."""
    hidden, *others = output
    marks = [torch.empty(0) for _ in others]  # the value itself may be None here
    call = called([*before, lambda *_, **__: (hidden, *marks)])
    given = {id(each) for each in (*call.arguments, *call.named.values())}
    return tuple(place for place, mark in enumerate(marks, 1) if id(mark) in given)


def _beside(
    first: nn.Module,
    second: nn.Module,
    called: Called,
    before: Sequence[Forward],
    output: Sequence[Any],
    handed: tuple[int, ...],
) -> tuple[nn.Module | None, tuple[int, ...]]:
    """Return what makes what the second block of a stack needs of what it is handed, or else which values these are.

    Tried on one sample that the first block made `output` of. A GPU may sum in another order. What the second block
    can do without may be for later ones.
    """
    hidden = output[0]
    call = called([*before, lambda *_, **__: output])
    expected, again = (hidden_states(call(second, hidden), second) for _ in range(2))
    for candidate in (None, _without_products(first)):
        passed = hand_on(len(output), beside=candidate)
        with suppress(ArchitectureError):  # it cannot run without
            found = hidden_states(called([*before, passed])(second, hidden), second)
            if _distance(found, expected) <= 10 * _distance(again, expected):
                return candidate, handed if candidate is None else ()
    return None, handed


def hidden_states(output: Any, block: nn.Module) -> Tensor:
    """Return the hidden states among what a block returns."""
    states = output[0] if type(output) in (tuple, list) else output
    if not isinstance(states, Tensor):
        raise ArchitectureError(
            f"a {type(block).__name__} returns a {type(output).__name__}, not hidden states, so this model cannot be "
            "quantized block by block"
        )
    return states


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).nan_to_num().norm())


def _without_products(block: nn.Module) -> nn.Module:
    """Return a copy of `block` without the weights of its Linears, whose outputs are 0 instead."""
    linears = [module for module in block.modules() if is_matrix(module)]
    memo: dict[int, Any] = {id(each.weight): nn.Parameter(matrix(each).to("meta"), False) for each in linears}
    twin = copy.deepcopy(block, memo)
    for module in filter(is_matrix, twin.modules()):
        rows = matrix(module).shape[0]
        module.forward = lambda x, rows=rows: x.new_zeros(*x.shape[:-1], rows)
    return twin
