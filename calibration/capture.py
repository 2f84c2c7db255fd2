"""One block of a model at a time: how the model calls it, and what its Linears receive."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArchitectureError
from .batches import out_of_memory

Forward = Callable[..., Any]
Routing = Mapping[str, tuple[Any, ...]]
"""What modules of experts were given beside their tokens, by name: a table of experts (tokens, slots), and weights."""


class _Reached(Exception):  # noqa: N818 - leaves a forward pass early; no error
    pass


@dataclass(frozen=True, eq=False)
class BlockCall:
    """How a model's forward pass calls one of its blocks: masks, rotary angles and whatever else it hands over.

    Hidden states are the first of the positional arguments, if there are any.
    """

    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden states that the block was called with."""
        states: Tensor = self.arguments[0] if self.arguments else self.named["hidden_states"]
        return states

    @property
    def mappings(self) -> dict[str, MutableMapping[Any, Any]]:
        """Arguments that a block may write into, for later blocks."""
        return {name: value for name, value in self.named.items() if isinstance(value, MutableMapping)}

    def __call__(self, block: nn.Module, hidden: Tensor) -> Any:
        """Return what `block` makes of other hidden states; ArchitectureError where it cannot be run by itself."""
        hidden = hidden.clone()  # which the block may write into
        try:
            if self.arguments:
                return block(hidden, *self.arguments[1:], **self.named)
            return block(**{**self.named, "hidden_states": hidden})
        except _Reached:
            raise
        except Exception as error:  # the model's own code
            if out_of_memory(error):
                raise
            raise ArchitectureError(
                f"a {type(block).__name__} cannot be run by itself ({type(error).__name__}: {error}), so this model "
                "cannot be quantized block by block"
            ) from error


@contextmanager
def running_backwards() -> Iterator[None]:
    """Name what is wrong where the model's own code does not run backwards; ArchitectureError."""
    try:
        yield
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        raise ArchitectureError(
            f"this model does not run backwards ({error}), as learned rounding, two_sided and tuning need it; choose "
            "the quality fast, which does without"
        ) from error


def block_call(
    model: nn.Module, blocks: nn.ModuleList, batch: Mapping[str, Tensor], before: Sequence[Forward]
) -> BlockCall:
    """Return how `model` calls one of its blocks, found by running its own forward pass up to there.

    Earlier blocks only hand on hidden states, so nothing but the embedding is computed, and no table of architectures
    is needed.

    `batch` is input_ids and perhaps attention_mask and decoder_input_ids, (samples, length), on the device of what
    stands outside the blocks. `before` is what the earlier blocks do, each as `hand_on` makes it; the block asked for
    is the next one.

    Raises:
        ArchitectureError: The model cannot be run on token ids, or does not call the block.
    """
    calls: list[BlockCall] = []
    layer = len(before)

    def reached(*arguments: Any, **named: Any) -> None:
        calls.append(BlockCall(arguments, named))
        raise _Reached

    with forwards_replaced(blocks, [*before, reached]):
        try:
            model(**batch, **without_cache(model))
        except _Reached:
            return calls[0]
        except Exception as error:  # the model's own code
            if out_of_memory(error):
                raise
            raise ArchitectureError(
                f"{type(model).__name__} cannot be run on token ids alone, up to block {layer} "
                f"({type(error).__name__}: {error})"
            ) from error
    raise ArchitectureError(f"{type(model).__name__} does not call block {layer} when it is run on token ids alone")


def capture_inputs(
    modules: Mapping[str, nn.Module], run: Callable[[], object], again: Collection[str] = ()
) -> dict[str, list[Tensor]]:
    """Return what each of `modules` receives while `run` runs: those in `again` in all calls, others in the first.

    The run ends as soon as all have been called, if none is in `again`. Modules that are not called are missing in the
    result.
    """
    seen: dict[str, list[Tensor]] = {}
    ends = modules.keys().isdisjoint(again)

    def record(name: str, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if name not in seen or name in again:
            seen.setdefault(name, []).append(BlockCall(arguments, named).hidden)
        if ends and len(seen) == len(modules):
            raise _Reached

    with _watched(modules, record), suppress(_Reached):
        run()
    return seen


def trace_inputs(modules: Mapping[str, nn.Module], run: Callable[[], object]) -> list[tuple[list[str], list[Tensor]]]:
    """Return the names of `modules` in the order of their first calls in `run`, those that receive the same together.

    Each group comes with the tensors: several where modules are called several times.
    """
    # Tensors are kept alive meanwhile, so an equal place in memory and version mean the same numbers.
    kept: dict[tuple[Any, ...], Tensor] = {}
    places: dict[str, list[tuple[Any, ...]]] = {}

    def record(name: str, _: nn.Module, arguments: tuple[Any, ...], __: Any) -> None:
        received: Tensor = arguments[0]
        place = received.data_ptr(), received.shape, received.stride(), received._version
        kept.setdefault(place, received)
        places.setdefault(name, []).append(place)

    with _watched(modules, record):
        run()
    found: dict[tuple[tuple[Any, ...], ...], list[str]] = {}
    for name, its in places.items():
        found.setdefault(tuple(its), []).append(name)
    return [(names, [kept[place] for place in its]) for its, names in found.items()]


def trace_sums(block: nn.Module, modules: Mapping[str, nn.Module], run: Callable[[], Tensor]) -> dict[str, str]:
    """Return what outputs are added to as soon as they are there: of some of `modules`, the name of another module.

    That one is called earlier in `run`, which runs `block` and returns what leaves it, and receives just what the
    outputs are added to; "" is the block itself. The sum is seen where it enters a later module, or leaves the block.
    """
    received: dict[str, Tensor] = {}
    outputs: dict[str, tuple[int, Tensor]] = {}

    def enter(name: str, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = arguments[0] if arguments else named.get("hidden_states")
        received.setdefault(name, given if isinstance(given, Tensor) else torch.empty(0))

    def leave(name: str, _module: nn.Module, _arguments: Any, output: Tensor) -> None:
        outputs.setdefault(name, (list(received).index(name), output))

    with _watched({**dict(block.named_modules()), **modules}, enter), ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_hook(partial(leave, name)).remove)
        leaving = run()
    names, states = list(received), [_rows(each) for each in (*received.values(), leaving)]
    found: dict[str, str] = {}
    for name, (place, output) in outputs.items():
        rows = _rows(output)
        for other, entered in zip(names[:place], states, strict=False):
            if entered.shape == rows.shape and bool(rows.any()):
                total = entered + rows
                if any(torch.equal(total, each) for each in states[place:]):
                    found[name] = other
                    break
    return found


def _rows(states: Tensor) -> Tensor:
    return states.flatten(0, -2) if states.dim() > 1 else states


@contextmanager
def routing(experts: Mapping[str, nn.Module], impose: Routing | None = None) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Record which experts tokens go to while the context lasts, or send them where another run did: `impose`.

    `experts` are modules that are called with tokens, a table of experts and their weights, by name.
    """
    seen: dict[str, tuple[Any, ...]] = {}

    def record(name: str, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        order = ("hidden_states", "top_k_index", "top_k_weights")
        given = (*arguments, *(named[key] for key in order if key in named))
        seen[name] = given[1:] if impose is None else impose[name]
        return (given[0], *seen[name]), {}

    with _watched(experts, record):
        yield seen


@contextmanager
def _watched(modules: Mapping[str, nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Call `hook` with its name, the module and its arguments before every call of one of `modules`."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.callback(module.register_forward_pre_hook(partial(hook, name), with_kwargs=True).remove)
        yield


def routed_tokens(table: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of the tokens that go to `expert`, in order, and the slot of each, from (tokens, slots)."""
    tokens, slots = (table == expert).nonzero(as_tuple=True)
    return tokens, slots


def hand_on(returned: int, *, leaving: Tensor | None = None, beside: Forward | None = None) -> Forward:
    """Return the forward pass of a block that only hands on hidden states: what enters it, or what is `leaving`.

    So many values are `returned` as a tuple, the hidden states first; for 0 only these. `beside` makes the others when
    it is called like the block; without it they are None.
    """

    def forward(*arguments: Any, **named: Any) -> Any:
        hidden = BlockCall(arguments, named).hidden if leaving is None else leaving
        others = [None] * (returned - 1) if beside is None else beside(*arguments, **named)[1:]  # and may write
        return (hidden, *others) if returned else hidden

    return forward


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that keeps a model from making a cache, if it takes it."""
    accepted = inspect.signature(model.forward).parameters.values()
    takes = any(parameter.name == "use_cache" or parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
    return {"use_cache": False} if takes else {}


@contextmanager
def forwards_replaced(blocks: Iterable[nn.Module], forwards: Iterable[Forward]) -> Iterator[None]:
    """Let the first of `blocks` do what `forwards` say."""
    with ExitStack() as patches:
        for block, forward in zip(blocks, forwards, strict=False):
            if "forward" in block.__dict__:  # accelerate, among others, puts one there
                patches.callback(setattr, block, "forward", block.forward)
            else:
                patches.callback(delattr, block, "forward")
            block.forward = forward  # an instance attribute shadows the class's method
        yield
