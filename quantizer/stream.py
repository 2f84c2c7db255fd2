"""One block of a model at a time on stored hidden states, and what its modules receive."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArchitectureError
from .experts import Received, Routing, Watch, eager_experts, place_of, stacked_parameters
from .groups import Group, group_stages
from .modules import Target


class _Done(Exception):  # noqa: N818 - leaves the model's forward pass early; no error
    pass


class BlockStream:
    """Runs single blocks of a model exactly as the whole model would.

    The model's own forward pass is entered every time, with the blocks before the wanted one passing their input on and
    the pass left right after it: masks, rotary angles and whatever else the model hands to its blocks are the model's
    own, per block, with no table of architectures.

    Args:
        model: A transformers model with everything outside the blocks on the device of the batches.
        blocks: Its list of repeated blocks.
    """

    def __init__(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        self._model = model
        self._blocks = list(blocks)
        self._returns_tuple = False
        accepted = inspect.signature(model.forward).parameters.values()
        takes = any(parameter.name == "use_cache" or parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
        self._settings = {"use_cache": False} if takes else {}

    def embed(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The hidden states that enter the first block, (samples, length, width)."""
        seen: list[Tensor] = []

        def stop(hidden: Tensor, _: Callable[[Tensor], Any]) -> Any:
            seen.append(hidden)
            raise _Done

        self._enter(0, batch, stop)
        return seen[0]

    def run(self, layer: int, batch: Mapping[str, Tensor], hidden: Tensor, block: nn.Module | None = None) -> Tensor:
        """The hidden states that leave block `layer`.

        Args:
            layer: Number of the block.
            batch: input_ids and perhaps attention_mask, (samples, length).
            hidden: What enters the block, (samples, length, width).
            block: Another module to run in its place, such as its float copy.
        """
        seen: list[Tensor] = []

        def work(_: Tensor, call: Callable[[Tensor], Any]) -> Any:
            out = call(hidden)
            self._returns_tuple = isinstance(out, (tuple, list))
            seen.append(out[0] if self._returns_tuple else out)
            raise _Done

        self._enter(layer, batch, work, block)
        return seen[0]

    def tap_head(self, batch: Mapping[str, Tensor], hidden: Tensor, head: nn.Module) -> Tensor:
        """What the output layer receives when `hidden` leaves the last block, (samples, length, width)."""
        seen: list[Tensor] = []

        def record(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            seen.append(arguments[0])
            raise _Done

        hook = head.register_forward_pre_hook(record)
        try:
            self._enter(len(self._blocks) - 1, batch, lambda _, __: self._as_output(hidden))
        finally:
            hook.remove()
        return seen[0]

    def receive(
        self,
        layer: int,
        batch: Mapping[str, Tensor],
        hidden: Tensor,
        targets: Sequence[Target],
        block: nn.Module | None = None,
        routing: Mapping[str, Routing] | None = None,
    ) -> tuple[list[Received], dict[str, Routing]]:
        """What each of `targets` inside block `layer` receives, and how tokens were routed to stacked experts.

        The pass ends as soon as all have been reached; an expert that no token of the batch goes to receives no rows.

        Args:
            layer: Number of the block.
            batch: As for `run`.
            hidden: As for `run`.
            targets: Matrices of the block (of `block` where given).
            block: As for `run`.
            routing: Send the tokens to these experts, instead of those that the block's own router chooses.
        """
        seen: dict[str, Tensor] = {}

        def record(target: Target, received: Tensor) -> None:
            seen.setdefault(target.name, received)
            if len(seen) == len(targets):
                raise _Done

        watch = Watch(targets, record, routing)
        with _watching(watch, targets, record):
            self._enter(layer, batch, lambda _, call: call(hidden), block, ends=True)
        received = []
        for target in targets:
            none = torch.empty(0, target.weight.shape[1], dtype=hidden.dtype, device=hidden.device)
            rows = seen.get(target.name, none)
            tokens = None if target.expert is None else watch.tokens(target, len(rows))
            received.append(Received(rows, tokens))
        return received, watch.routings

    def trace(self, layer: int, batch: Mapping[str, Tensor], hidden: Tensor, targets: Sequence[Target]) -> list[Group]:
        """The `targets` of block `layer` in the order in which they are called, as groups of stages; see `Group`.

        Raises:
            ArchitectureError: A matrix was never called, and is no expert beside others that were.
        """
        order: list[tuple[Tensor, int, list[str]]] = []
        routed = {target.name for target in targets if target.expert is not None}

        def record(target: Target, received: Tensor) -> None:
            if any(target.name in names for _, _, names in order):
                return
            if received.shape[:-1].numel() != hidden.shape[:-1].numel():
                routed.add(target.name)
            # `order` keeps the tensors alive, so an equal place and version mean the same numbers.
            for earlier, version, names in order:
                same_place = place_of(earlier) == place_of(received) and earlier.shape == received.shape
                if same_place and version == received._version:
                    names.append(target.name)
                    return
            order.append((received, received._version, [target.name]))

        with _watching(Watch(targets, record), targets, record):
            self.run(layer, batch, hidden)
        groups, silent = group_stages([names for _, _, names in order], [target.name for target in targets], routed)
        if silent:
            raise ArchitectureError(
                f"{', '.join(silent)}: not called in a forward pass, so there is nothing to calibrate with; "
                "leave them in floating point with an override"
            )
        return groups

    def _as_output(self, hidden: Tensor) -> Any:
        return (hidden,) if self._returns_tuple else hidden

    def _enter(
        self,
        layer: int,
        batch: Mapping[str, Tensor],
        work: Callable[[Tensor, Callable[[Tensor], Any]], Any],
        block: nn.Module | None = None,
        *,
        ends: bool = False,
    ) -> None:
        """Run the model's forward pass; at block `layer`, `work(hidden, call)` stands in for the block.

        `call(hidden)` runs the block (or `block`) on other hidden states with the model's own further arguments.
        """
        original = self._blocks[layer]
        wanted = original.forward if block is None else block.forward

        def instead(*arguments: Any, **named: Any) -> Any:
            if arguments:
                out = work(arguments[0], lambda hidden: wanted(hidden, *arguments[1:], **named))
            else:
                rest = {key: value for key, value in named.items() if key != "hidden_states"}
                out = work(named["hidden_states"], lambda hidden: wanted(hidden_states=hidden, **rest))
            if ends:
                raise _Done
            return out

        def pass_through(*arguments: Any, **named: Any) -> Any:
            return self._as_output(arguments[0] if arguments else named["hidden_states"])

        with ExitStack() as patches:
            for earlier in self._blocks[:layer]:
                patches.enter_context(_forward_replaced(earlier, pass_through))
            patches.enter_context(_forward_replaced(original, instead))
            patches.enter_context(eager_experts(self._model, *([] if block is None else [block])))
            patches.enter_context(suppress(_Done))
            self._model(**batch, **self._settings)


def float_copy(block: nn.Module) -> nn.Module:
    """A copy of `block` that keeps its weights while the original's are quantized."""
    return copy.deepcopy(block)


@contextmanager
def _watching(watch: Watch, targets: Sequence[Target], record: Callable[[Target, Tensor], None]) -> Iterator[None]:
    """Call `record` with every target and what it receives, before it is computed."""
    with ExitStack() as hooks:
        for target in targets:
            if target.expert is None:
                hook = partial(_call, record, target)
                hooks.callback(target.module.register_forward_pre_hook(hook).remove)
        with watch:
            yield


def _call(record: Callable[[Target, Tensor], None], target: Target, _: nn.Module, arguments: tuple[Any, ...]) -> None:
    record(target, arguments[0])


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = module.__dict__.get("forward")  # accelerate, among others, puts one there
    module.forward = forward  # an instance attribute shadows the class's method
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def working_copy(
    module: nn.Module, device: torch.device, dtype: torch.dtype, *, leave: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """`module` on `device` with its floating-point parameters in `dtype`; what was there before comes back untouched.

    Buffers keep their dtype (rotary frequencies are float32 on purpose). `leave` names submodules to leave alone.
    """
    stacked = {id(tensor) for inner in module.modules() for tensor in stacked_parameters(inner).values()}
    left = {id(tensor) for other in leave for tensor in (*other.parameters(), *other.buffers())}
    moved: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) in left:
                continue
            moved.append((tensor, tensor.data))
            is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            # Stacked experts are overwritten one by one, in place.
            wanted = dtype if is_weight else tensor.dtype
            tensor.data = tensor.data.to(device=device, dtype=wanted, copy=id(tensor) in stacked)
        yield
    finally:
        for tensor, before in moved:
            tensor.data = before
