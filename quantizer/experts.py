"""Experts that transformers keeps stacked in one parameter: which they are, and what each of them receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from .modules import Target

_EAGER = "eager"

# Functions that multiply by a matrix, and where their input and the matrix stand among the arguments.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    functional.linear: (0, 1),
    torch.matmul: (0, 1),
    torch.mm: (0, 1),
    torch.addmm: (1, 2),
    Tensor.matmul: (0, 1),
    Tensor.__matmul__: (0, 1),
    Tensor.mm: (0, 1),
    Tensor.addmm: (1, 2),
}


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` holds experts stacked in parameters of three dimensions, and takes them one by one.

    transformers marks such modules (`use_experts_implementation`); other parameters with three dimensions are used in
    ways that nobody says, and stay in floating point.
    """
    return isinstance(getattr(module, "is_transposed", None), bool) and bool(stacked_parameters(module))


def stacked_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `module` that hold one matrix per expert, by their names in it."""
    if not isinstance(getattr(module, "is_transposed", None), bool):
        return {}
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.is_floating_point()
    }


@contextmanager
def eager_experts(*models: nn.Module) -> Iterator[None]:
    """Let stacked experts take their matrices one by one inside: transformers can also multiply all of them at once."""
    configs: dict[int, Any] = {
        id(module.config): module.config for model in models for module in model.modules() if is_stacked(module)
    }
    before = [(config, config._experts_implementation_internal) for config in configs.values()]
    for config, _ in before:
        config._experts_implementation_internal = _EAGER
    try:
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation_internal = implementation


@dataclass(frozen=True, eq=False)
class Routing:
    """What a module of stacked experts was given in a forward pass.

    Attributes:
        hidden: The tokens, (tokens, in).
        arguments: The positional arguments after the tokens: which experts every token goes to, and their weights.
        named: The same among named arguments.
    """

    hidden: Tensor
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def tokens(self, expert: int) -> Tensor | None:
        """Numbers of the tokens that go to `expert`, in the order in which transformers' loops take them.

        None where there is no table of experts, (tokens, experts per token).
        """
        for table in (*self.arguments, *self.named.values()):
            if isinstance(table, Tensor) and not table.is_floating_point() and len(table) == len(self.hidden):
                return (table == expert).T.nonzero()[:, 1]
        return None


@dataclass(frozen=True, eq=False)
class Received:
    """What one matrix received in a forward pass.

    Attributes:
        rows: Its inputs, (..., in); none where it was not called.
        tokens: Of an expert: which of the batch's tokens each row belongs to, (rows,); None where that is not known.
            Of any other matrix None: its rows are all tokens in their order.
    """

    rows: Tensor
    tokens: Tensor | None = None


class Watch(TorchFunctionMode):
    """Sees what the matrices of stacked experts are multiplied with while it is entered.

    A product with a slice of a stacked parameter is known by the place of the slice in memory.

    Args:
        targets: The matrices to look at; those that are no experts are left out.
        record: Called with a target and its input, before the product is computed.
        impose: What to give the modules of experts instead of what they are given, by the name of the module; their
            tokens stay their own.

    Attributes:
        routings: What each module of experts was given, by its name.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        record: Callable[[Target, Tensor], None],
        impose: Mapping[str, Routing] | None = None,
    ) -> None:
        super().__init__()
        experts = [target for target in targets if target.expert is not None]
        self.routings: dict[str, Routing] = {}
        self._record = record
        self._impose = impose or {}
        self._slices = {place_of(target.weight): target for target in experts}
        self._modules = {owner_name(target): target.module for target in experts}
        # Also of experts that are not looked at: the first product of each tells the order of its tokens.
        self._places = {
            place_of(parameter[expert]): (name, expert)
            for name, module in self._modules.items()
            for parameter in stacked_parameters(module).values()
            for expert in range(len(parameter))
        }
        self._firsts: dict[tuple[str, int], Tensor] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> Watch:
        for name, module in self._modules.items():
            hook = partial(self._route, name)
            self._hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call `func`; a product with an expert's matrix is recorded first."""
        places = _PRODUCTS.get(func)
        if places is not None and len(args) > max(places):
            received, weight = args[places[0]], args[places[1]]
            place = place_of(weight) if isinstance(weight, Tensor) and weight.ndim == 2 else None
            if place in self._places:
                self._firsts.setdefault(self._places[place], received)
            if place in self._slices:
                self._record(self._slices[place], received)
        return func(*args, **(kwargs or {}))

    def tokens(self, target: Target, rows: int) -> Tensor | None:
        """Which of the batch's tokens the `rows` rows that an expert received belong to; None where it cannot be told.

        What the router chose is believed only where the expert's first product received just these tokens.
        """
        routing = self.routings.get(owner_name(target))
        if routing is None or target.expert is None:
            return None
        tokens = routing.tokens(target.expert)
        first = self._firsts.get((owner_name(target), target.expert))
        if tokens is None or len(tokens) != rows:
            return None
        if first is not None:
            expected = routing.hidden[tokens]
            if first.shape != expected.shape or not bool(((first == expected) | first.isnan()).all()):
                return None
        return tokens

    def _route(self, name: str, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        hidden = arguments[0] if arguments else named["hidden_states"]
        wanted = self._impose.get(name)
        if wanted is None:
            rest = {key: value for key, value in named.items() if key != "hidden_states"}
            self.routings[name] = Routing(hidden, arguments[1:], rest)
            return None
        self.routings[name] = Routing(hidden, wanted.arguments, wanted.named)
        if arguments:
            return (hidden, *wanted.arguments), wanted.named
        return (), {"hidden_states": hidden, **wanted.named}


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Where in memory `tensor` begins: its storage and the offset there; an address would be 0 on the meta device."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def owner_name(target: Target) -> str:
    """Full name of the module that holds a target's parameter."""
    return target.parameter.rpartition(".")[0]
