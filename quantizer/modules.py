"""Which modules of a model are quantized: the repeated blocks and the matrices inside them, found without a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ArchitectureError, ConfigError
from .config import QuantizeConfig
from .experts import is_stacked, stacked_parameters

PACKING = 32  # rows and columns of a packed weight are multiples of this


@dataclass(frozen=True, eq=False)
class Target:
    """One matrix to be quantized.

    Attributes:
        name: Its full name in the model; of one expert among stacked ones `EXPERTS.NUMBER.PARAMETER`.
        module: The nn.Linear, or transformers' Conv1D, or the module that holds the stacked experts.
        config: The settings that hold for it.
        parameter: Full name of the parameter in the model that it is, or lies in.
        expert: Which expert of a parameter that holds all of them; None for any other parameter.
    """

    name: str
    module: nn.Module
    config: QuantizeConfig
    parameter: str
    expert: int | None = None

    @property
    def weight(self) -> Tensor:
        """A view of the weight as (out, in), whatever the module's own layout."""
        if self.expert is None:
            return matrix(self.module)
        stack: Tensor = getattr(self.module, self.parameter.rpartition(".")[2])
        return stack[self.expert].T if self.module.is_transposed else stack[self.expert]

    def replace_weight(self, weight: Tensor) -> None:
        """Put `weight`, (out, in), in place of the module's, in its dtype; among stacked experts in the same memory."""
        if self.expert is not None:
            with torch.no_grad():
                self.weight.copy_(weight)
            return
        parameter = parameter_of(self.module)
        parameter.data = (weight.T if isinstance(self.module, Conv1D) else weight).to(parameter.dtype).contiguous()

    def within(self, module: nn.Module) -> Target:
        """The same target in another module that stands for its own, such as a float copy."""
        return dataclasses.replace(self, module=module)


def parameter_of(module: nn.Module) -> Tensor:
    """The weight parameter of a Linear or Conv1D."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise ArchitectureError(f"{type(module).__name__} has no weight tensor")
    return weight


def matrix(module: nn.Module) -> Tensor:
    """A view of the weight of a Linear or Conv1D as (out, in)."""
    weight = parameter_of(module)
    return weight.T if isinstance(module, Conv1D) else weight


def is_matrix(module: nn.Module) -> bool:
    """Whether `module` multiplies by one matrix that can be quantized."""
    return isinstance(module, (nn.Linear, Conv1D))


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name of the list of repeated blocks and the list: the one that holds the most weights in matrices.

    Blocks may be of several kinds. In a composite model only the language part is searched.

    Raises:
        ArchitectureError: The model has no list of modules with matrices inside.
    """
    part = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    found = _largest_list(model, part) or _largest_list(model, model)
    if found is None:
        raise ArchitectureError(
            f"{type(model).__name__} has no list of repeated blocks with Linear modules inside; "
            "only transformers of that shape can be walked block by block"
        )
    return found


def _largest_list(model: nn.Module, part: nn.Module) -> tuple[str, nn.ModuleList] | None:
    inside = set(part.modules()) if isinstance(part, nn.Module) else set()
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, modules in model.named_modules():
        if not isinstance(modules, nn.ModuleList) or modules not in inside:
            continue
        size = sum(_weights(inner) for inner in modules.modules())
        if size and (best is None or size > best[0]):
            best = (size, name, modules)
    return None if best is None else (best[1], best[2])


def _weights(module: nn.Module) -> int:
    """How many weights a module holds in matrices of its own."""
    if is_matrix(module):
        return parameter_of(module).numel()
    return sum(parameter.numel() for parameter in stacked_parameters(module).values())


def check_overrides(model: nn.Module, config: QuantizeConfig) -> None:
    """Raise ConfigError for an override whose pattern finds no matrix of `model`: a slip would go unnoticed."""
    names = [target.name for target in _matrices(model, "", config)]
    for pattern in config.overrides:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"the override {pattern!r} matches no Linear of {type(model).__name__}, which has for example "
                f"{', '.join(names[:3])}; correct the pattern or leave it out"
            )


def find_targets(block: nn.Module, prefix: str, config: QuantizeConfig) -> list[Target]:
    """The matrices of `block` to be quantized, checked, in the order in which they are registered.

    Routers stay in floating point: see `find_routers`.

    Raises:
        ConfigError: A module whose shape the settings do not fit.
    """
    targets = []
    routers = find_routers(block)
    for target in _matrices(block, prefix, config):
        settings = config.for_module(target.name)
        if settings is not None and target.module not in routers:
            targets.append(dataclasses.replace(target, config=settings))
            check_shape(target.name, target.weight, settings, pieces=pieces(target))
    return targets


def find_routers(block: nn.Module) -> set[nn.Module]:
    """The Linears of `block` that choose or weigh experts, which the field leaves in floating point: they are tiny.

    Such a Linear stands beside experts, as a child of the module that holds them or as the only matrix of a child, and
    has one output per expert, or a single one (the gate of an expert that all tokens share).
    """
    routers: set[nn.Module] = set()
    for module in block.modules():
        experts = max((_experts(child) for child in module.children()), default=0)
        for child in module.children():
            inside = [inner for inner in child.modules() if is_matrix(inner)]
            if experts and len(inside) == 1 and matrix(inside[0]).shape[0] in (1, experts):
                routers.add(inside[0])
    return routers


def _experts(module: nn.Module) -> int:
    """The number of experts in `module`: stacked in any way, or a list of modules with matrices inside; else 0."""
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 3 and min(parameter.shape) > 1:  # not the weight of a convolution by channel
            return parameter.shape[0]
    if isinstance(module, nn.ModuleList) and all(any(map(is_matrix, expert.modules())) for expert in module):
        return len(module)
    return 0


def _matrices(module: nn.Module, prefix: str, config: QuantizeConfig) -> Iterator[Target]:
    """Every matrix inside `module`, those of stacked experts one by one, with `config` as their settings."""
    for inner, owner in module.named_modules(prefix=prefix):
        if is_matrix(owner):
            yield Target(inner, owner, config, f"{inner}.weight")
        elif is_stacked(owner):
            stacks = stacked_parameters(owner)
            for expert in range(_experts(owner)):
                for name in stacks:
                    yield Target(f"{inner}.{expert}.{name}", owner, config, f"{inner}.{name}", expert)


def pieces(target: Target) -> int:
    """How many matrices a target is stored as: gate and up projections of an expert are stored apart."""
    return 2 if target.expert is not None and target.name.endswith(".gate_up_proj") else 1


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """The module that maps hidden states to the vocabulary, where there is one."""
    output = model.get_output_embeddings()
    return output if isinstance(output, nn.Module) else None


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output layer shares its weight with the input embedding."""
    output, embedding = output_layer(model), model.get_input_embeddings()
    return output is not None and parameter_of(output) is parameter_of(embedding)


def brought_in(model: PreTrainedModel, blocks: nn.ModuleList) -> list[nn.Module]:
    """What is brought in when its turn has come: the blocks, and the output layer where it has weights of its own."""
    output = output_layer(model)
    return [blocks] if output is None or is_tied(model) else [blocks, output]


def find_head(model: PreTrainedModel, config: QuantizeConfig) -> Target | None:
    """The output layer as a target where `config` asks for it.

    Raises:
        ConfigError: It is tied to the input embedding, or is no matrix, or its shape does not fit.
    """
    if not config.lm_head:
        return None
    head = output_layer(model)
    name = next((name for name, module in model.named_modules() if module is head), None)
    if head is None or name is None or not is_matrix(head):
        raise ConfigError(f"lm_head=True, but {type(model).__name__} has no linear output layer; leave it out")
    if is_tied(model):
        raise ConfigError(
            f"lm_head=True, but {name} shares its weight with the input embedding, which must stay in floating point; "
            "leave lm_head out"
        )
    settings = config.for_module(name)
    if settings is None:
        return None
    check_shape(name, matrix(head), settings)
    return Target(name, head, settings, f"{name}.weight")


def check_shape(name: str, weight: Tensor, config: QuantizeConfig, *, pieces: int = 1) -> None:
    """Raise ConfigError, naming the module, unless `config` can quantize and pack a weight of this shape, (out, in).

    Args:
        name: The module's name.
        weight: Its weight.
        config: Its settings.
        pieces: In how many matrices of as many rows it will be stored.
    """
    rows, columns = weight.shape
    if rows % (PACKING * pieces) or columns % PACKING:
        stored = f"{pieces} x {rows // pieces}" if pieces > 1 else str(rows)
        raise ConfigError(
            f"{name} is ({stored}, {columns}); packed weights need multiples of {PACKING} both ways. "
            f"Skip it with an override for that name"
        )
    if config.group_size is not None and columns % config.group_size:
        raise ConfigError(
            f"{name} has {columns} input features, not a multiple of group_size {config.group_size}. Choose a divisor, "
            "-1 for one group per row, or an override for that name"
        )
    if not torch.is_floating_point(weight):
        raise ConfigError(f"{name} is {weight.dtype}: it seems to be quantized already; start from the float model")
