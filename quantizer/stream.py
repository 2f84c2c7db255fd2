"""One block of a model at a time on stored hidden states, and what its modules receive."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArchitectureError


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

    def tap(
        self,
        layer: int,
        batch: Mapping[str, Tensor],
        hidden: Tensor,
        modules: Sequence[nn.Module],
        block: nn.Module | None = None,
    ) -> list[Tensor]:
        """What each of `modules` inside block `layer` receives; the pass ends as soon as all have been reached.

        Args:
            layer: Number of the block.
            batch: As for `run`.
            hidden: As for `run`.
            modules: Modules of the block (of `block` where given).
            block: As for `run`.

        Raises:
            ArchitectureError: A module was never called.
        """
        seen: dict[nn.Module, Tensor] = {}

        def record(module: nn.Module, arguments: tuple[Any, ...], _: dict[str, Any]) -> None:
            seen.setdefault(module, arguments[0])
            if len(seen) == len(modules):
                raise _Done

        with ExitStack() as hooks:
            for module in modules:
                hooks.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
            self._enter(layer, batch, lambda _, call: call(hidden), block, ends=True)
        if len(seen) < len(modules):
            raise ArchitectureError(
                f"{len(modules) - len(seen)} modules of block {layer} were not called by its forward pass"
            )
        return [seen[module] for module in modules]

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

    def stages(
        self, layer: int, batch: Mapping[str, Tensor], hidden: Tensor, modules: Mapping[str, nn.Module]
    ) -> list[list[str]]:
        """Names of `modules` in the order in which block `layer` calls them, those that share an input together.

        Raises:
            ArchitectureError: A module was never called.
        """
        order: list[tuple[Tensor, int, list[str]]] = []

        def record(name: str, arguments: tuple[Any, ...]) -> None:
            if any(name in names for _, _, names in order):
                return
            received = arguments[0]
            # `order` keeps the tensors alive, so an equal address and version mean the same numbers.
            for earlier, version, names in order:
                same_place = earlier.data_ptr() == received.data_ptr() and earlier.shape == received.shape
                if same_place and version == received._version:
                    names.append(name)
                    return
            order.append((received, received._version, [name]))

        with ExitStack() as hooks:
            for name, module in modules.items():
                hook = module.register_forward_pre_hook(lambda _, arguments, name=name: record(name, arguments))
                hooks.callback(hook.remove)
            self.run(layer, batch, hidden)
        called = {name for _, _, names in order for name in names}
        silent = [name for name in modules if name not in called]
        if silent:
            raise ArchitectureError(
                f"{', '.join(silent)}: not called in a forward pass, so there is nothing to calibrate with; "
                "leave them in floating point with an override"
            )
        return [names for _, _, names in order]

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
            patches.enter_context(suppress(_Done))
            self._model(**batch, use_cache=False)


def float_copy(block: nn.Module) -> nn.Module:
    """A copy of `block` that keeps its weights while the original's are quantized."""
    return copy.deepcopy(block)


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
    left = {id(tensor) for other in leave for tensor in (*other.parameters(), *other.buffers())}
    moved: list[tuple[Tensor, Tensor]] = []
    try:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) in left:
                continue
            moved.append((tensor, tensor.data))
            is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            tensor.data = tensor.data.to(device=device, dtype=dtype if is_weight else tensor.dtype)
        yield
    finally:
        for tensor, before in moved:
            tensor.data = before
