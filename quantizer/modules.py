"""Which modules of a model are quantized: the repeated blocks and the matrices inside them, found without a table."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..errors import ArchitectureError, ConfigError
from .config import QuantizeConfig

PACKING = 32  # rows and columns of a packed weight are multiples of this


@dataclass(frozen=True, eq=False)
class Target:
    """One module to be quantized.

    Attributes:
        name: Its full name in the model.
        module: The nn.Linear, or transformers' Conv1D.
        config: The settings that hold for it.
    """

    name: str
    module: nn.Module
    config: QuantizeConfig

    @property
    def weight(self) -> Tensor:
        """A view of the weight as (out, in), whatever the module's own layout."""
        return matrix(self.module)

    def replace_weight(self, weight: Tensor) -> None:
        """Put `weight`, (out, in), in place of the module's, in its dtype."""
        parameter = parameter_of(self.module)
        parameter.data = (weight.T if isinstance(self.module, Conv1D) else weight).to(parameter.dtype).contiguous()


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

    Blocks may be of several kinds.

    Raises:
        ArchitectureError: The model has no list of modules with matrices inside.
    """
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, modules in model.named_modules():
        if not isinstance(modules, nn.ModuleList):
            continue
        size = sum(parameter_of(inner).numel() for inner in modules.modules() if is_matrix(inner))
        if size and (best is None or size > best[0]):
            best = (size, name, modules)
    if best is None:
        raise ArchitectureError(
            f"{type(model).__name__} has no list of repeated blocks with Linear modules inside; "
            "only transformers of that shape can be walked block by block"
        )
    return best[1], best[2]


def check_overrides(model: nn.Module, config: QuantizeConfig) -> None:
    """Raise ConfigError for an override whose pattern finds no matrix of `model`: a slip would go unnoticed."""
    names = [name for name, module in model.named_modules() if is_matrix(module)]
    for pattern in config.overrides:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"the override {pattern!r} matches no Linear of {type(model).__name__}, which has for example "
                f"{', '.join(names[:3])}; correct the pattern or leave it out"
            )


def find_targets(block: nn.Module, prefix: str, config: QuantizeConfig) -> list[Target]:
    """The modules of `block` to be quantized, checked, in the order in which they are registered.

    Raises:
        ConfigError: A module whose shape the settings do not fit.
    """
    targets = []
    for inner, module in block.named_modules():
        if not is_matrix(module):
            continue
        name = f"{prefix}.{inner}" if inner else prefix
        settings = config.for_module(name)
        if settings is not None:
            check_shape(name, matrix(module), settings)
            targets.append(Target(name, module, settings))
    return targets


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """The module that maps hidden states to the vocabulary, where there is one."""
    output = model.get_output_embeddings()
    return output if isinstance(output, nn.Module) else None


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output layer shares its weight with the input embedding."""
    output, embedding = output_layer(model), model.get_input_embeddings()
    return output is not None and parameter_of(output) is parameter_of(embedding)


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
    return Target(name, head, settings)


def check_shape(name: str, weight: Tensor, config: QuantizeConfig) -> None:
    """Raise ConfigError, naming the module, unless `config` can quantize and pack a weight of this shape, (out, in)."""
    rows, columns = weight.shape
    if rows % PACKING or columns % PACKING:
        raise ConfigError(
            f"{name} is ({rows}, {columns}); packed weights need multiples of {PACKING} both ways. "
            f"Skip it with an override for that name"
        )
    if config.group_size is not None and columns % config.group_size:
        raise ConfigError(
            f"{name} has {columns} input features, not a multiple of group_size {config.group_size}. Choose a divisor, "
            "-1 for one group per row, or an override for that name"
        )
    if not torch.is_floating_point(weight):
        raise ConfigError(f"{name} is {weight.dtype}: it seems to be quantized already; start from the float model")
