"""Which modules of a model are quantized: the repeated blocks and the Linears inside them, found without a table."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .calibration.halves import has_two_stacks
from .errors import ArchitectureError, ConfigError, ShapeError
from .experts import Expert, is_split
from .export.formats import LayerSpec, find_format
from .export.recipes import RECIPES, SUPER_BLOCK
from .export.shards import some
from .quantizer.config import QuantizeConfig
from .units import counted

_LOG = logging.getLogger("gptqkit")


@dataclass(frozen=True, eq=False)
class Linear:
    """A Linear of a block, or the output layer.

    Attributes:
        name: Its full name in the model.
        inner: Its name in its block; empty for the output layer.
        shape: (out, in).
        plain: Whether it computes what a Linear does.
        experts: Of a split expert: the name, in the block, of the module that holds all; `expert` is its number.
    """

    name: str
    inner: str
    shape: tuple[int, int]
    plain: bool = True
    experts: str | None = None
    expert: int | None = None


@dataclass(frozen=True, eq=False)
class Target(Linear):
    """A Linear to be quantized.

    Attributes:
        config: The settings that hold for it; groups are smaller than asked for where those do not divide its columns.
    """

    config: QuantizeConfig = field(kw_only=True)

    @property
    def weights(self) -> int:
        """How many it has, its bias not among them."""
        return self.shape[0] * self.shape[1]

    @property
    def spec(self) -> LayerSpec:
        """What it becomes."""
        size, ordered = self.config.group_size or self.shape[1], self.config.desc_act and self.config.method != "rtn"
        return LayerSpec(
            in_features=self.shape[1],
            out_features=self.shape[0],
            bits=self.config.bits,
            group_size=size,
            sym=self.config.sym,
            act_order=ordered and not self.config.static_groups and size < self.shape[1],
            type=self.config.type,
        )

    @property
    def packed_bytes(self) -> int:
        """What it takes in the checkpoint; where its bits are yet to be chosen, what the average makes."""
        average = self.config.target_bits
        if average is not None and self.config.override_of(self.name) is None:
            return round(self.weights * average / 8)
        return find_format(self.config.format).nbytes(self.spec)


def matrix(module: nn.Module) -> Tensor:
    """Return a view of the weight of a Linear or Conv1D as (out, in)."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise ArchitectureError(f"{type(module).__name__} has no weight tensor")
    return weight.T if isinstance(module, Conv1D) else weight


def is_matrix(module: nn.Module) -> bool:
    """Whether `module` multiplies by one matrix and does nothing else, so that a quantized layer can stand for it."""
    return isinstance(module, (nn.Linear, Conv1D)) and _computes_a_product(type(module))  # type: ignore[arg-type]


@cache
def _computes_a_product(kind: type[nn.Module]) -> bool:
    """Whether the forward pass of `kind`, where it is its own, computes what Linear's does: tried on a small Linear."""
    if kind.forward in (nn.Linear.forward, Conv1D.forward):
        return True
    layer, x = nn.Linear(5, 3), torch.linspace(-1, 1, 40).view(2, 4, 5)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-2, 1, 15).view(3, 5))
        layer.bias.copy_(torch.arange(3))
        try:
            found = kind.forward(layer, x)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # it needs more than a Linear has
            return False
        expected = nn.Linear.forward(layer, x)
    return isinstance(found, Tensor) and found.shape == expected.shape and bool(torch.allclose(found, expected))


def find_blocks(model: PreTrainedModel) -> list[dict[str, nn.Module]]:
    """Return the repeated blocks by name: those of the one stack of a model, or of its encoder and of its decoder.

    A stack is the list that holds the most weights in matrices. Blocks may be of several kinds. In a composite model
    only the language part is searched. ArchitectureError where there is no such list, or where it is not a model that
    text alone goes through, from one end to the other.
    """
    _check_kind(model)
    if has_two_stacks(model):
        encoder = model.get_encoder()
        text = encoder.get_decoder() if isinstance(encoder, PreTrainedModel) else encoder  # that of a composite one
        found = [_largest_list(model, part) for part in (text, model.get_decoder())]
    else:
        found = [_largest_list(model, model.get_decoder()) or _largest_list(model, model)]
    if None in found or len({name for name, _ in filter(None, found)}) < len(found):
        raise ArchitectureError(
            f"{type(model).__name__} has no list of repeated blocks with Linear modules inside"
            f"{' in each of its two stacks' * (len(found) - 1)}; only models of that shape can be quantized block by "
            "block"
        )
    stacks = [(name, blocks, set(map(id, blocks.parameters()))) for name, blocks in filter(None, found)]
    if len(stacks) > 1 and not stacks[0][2].isdisjoint(stacks[1][2]):
        raise ArchitectureError(
            f"the encoder and the decoder of {type(model).__name__} share weights; only stacks with weights of their "
            "own can be quantized one after the other"
        )
    return [{f"{name}.{number}": block for number, block in enumerate(blocks)} for name, blocks, _ in stacks]


def _check_kind(model: PreTrainedModel) -> None:
    """Raise ArchitectureError for a model that does not begin with token ids."""
    name = type(model).__name__
    if has_two_stacks(model) and model.main_input_name != "input_ids":
        raise ArchitectureError(
            f"{name} is an encoder-decoder whose encoder takes {model.main_input_name}, no token ids, so it cannot be "
            "calibrated with text; those that turn text into text can be quantized"
        )
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if not isinstance(getattr(embedding, "weight", None), Tensor):
        raise ArchitectureError(
            f"{name} has no embedding of token ids, so it cannot be calibrated with text; language models and text "
            "encoders can be quantized"
        )


def _largest_list(model: nn.Module, part: nn.Module) -> tuple[str, nn.ModuleList] | None:
    inside = set(part.modules()) if isinstance(part, nn.Module) else set()
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, modules in model.named_modules():
        if not isinstance(modules, nn.ModuleList) or modules not in inside:
            continue
        size = sum(matrix(inner).numel() for inner in modules.modules() if is_matrix(inner))
        if size and (best is None or size > best[0]):
            best = (size, name, modules)
    return None if best is None else (best[1], best[2])


def find_linears(model: PreTrainedModel) -> dict[str, list[Linear]]:
    """Return the Linears of every block, by its path, but for routers; ArchitectureError as of `find_blocks`."""
    found: dict[str, list[Linear]] = {}
    for path, block in (each for stack in find_blocks(model) for each in stack.items()):
        routers, own = find_routers(block), found.setdefault(path, [])
        for inner, module in block.named_modules():
            if module in routers or not isinstance(module, (nn.Linear, Conv1D)):
                continue
            rows, columns = matrix(module).shape
            linear = Linear(f"{path}.{inner}", inner, (rows, columns), is_matrix(module))
            owner = inner.rpartition(".")[0]
            if owner and isinstance(block.get_submodule(owner), Expert):
                experts, number, _ = inner.rsplit(".", 2)
                linear = dataclasses.replace(linear, experts=experts, expert=int(number))
            own.append(linear)
    return found


def find_targets(
    model: PreTrainedModel, config: QuantizeConfig, linears: Mapping[str, list[Linear]] | None = None
) -> tuple[list[list[Target]], dict[str, str]]:
    """Return the Linears to be quantized, block by block, and why others, by name, cannot be.

    Those stay in floating point: Linears with a forward pass of their own, and shapes that the format cannot hold. So
    do routers and what the overrides skip, which are not named. `linears` are those of `find_linears`, where known.

    Raises:
        ConfigError: Settings that the format cannot hold, or an override that changes nothing.
        ArchitectureError: As of `find_blocks`; or the overrides leave nothing to quantize.
    """
    if config.chooses_bits and find_format(config.format).uniform:
        raise ConfigError(
            f"{config.format} knows one setting of bits for all; leave target_bits and target_size out, or use gptq_v2"
        )
    linears = find_linears(model) if linears is None else linears
    _check_overrides(model, [linear.name for own in linears.values() for linear in own if linear.plain], config)
    targets: list[list[Target]] = []
    left: dict[str, str] = {}
    described = model.config.to_dict()
    for path, own in linears.items():
        chosen: list[Target] = []
        for linear in own:
            settings = config.for_module(linear.name)
            if settings is None:
                continue
            if not linear.plain:
                left[linear.name] = "it computes something other than a Linear does"
                continue
            try:
                chosen.append(_target(linear, settings, config, described))
            except ShapeError as error:
                left[linear.name] = str(error)
        if config.type is not None:
            _check_stacked(path, own, chosen)
        targets.append(chosen)
    if not any(targets) and find_head(model, config) is None:
        reasons = some(f"{name}: {why}" for name, why in left.items())
        raise ArchitectureError(f"no module is left to quantize: {reasons or 'the overrides skip them all'}")
    return targets, left


def _check_stacked(path: str, linears: Iterable[Linear], chosen: Iterable[Target]) -> None:
    """Raise ConfigError where experts whose matrices are one tensor of a GGUF file would be of several types in it."""
    types = {target.inner: target.config.type for target in chosen}
    found: dict[tuple[str, str], set[str]] = {}
    for linear in linears:
        if linear.experts is not None:
            part = linear.inner.rpartition(".")[2]
            found.setdefault((linear.experts, part), set()).add(types.get(linear.inner) or "floating point")
    for (experts, part), kinds in found.items():
        if len(kinds) > 1:
            raise ConfigError(
                f"{path}.{experts}: the {part} of all experts are one tensor in GGUF, and overrides make them "
                f"{' and '.join(sorted(kinds))}; let them match all of these experts, or none"
            )


def _check_overrides(model: PreTrainedModel, names: list[str], config: QuantizeConfig) -> None:
    """Raise ConfigError for an override that matches nothing, or only what others before it match.

    `names` are of the Linears that can be quantized, but for the output layer.
    """
    if not config.overrides:
        return
    every = {name: module for name, module in model.named_modules() if is_matrix(module)}
    head = output_layer(model) if config.lm_head else None
    names = names + [name for name, each in every.items() if each is head]
    for pattern, override in config.overrides.items():
        matched = [name for name in (every if override.skip else names) if re.search(pattern, name)]
        if not matched:
            raise ConfigError(
                f"the override {pattern!r} matches no Linear of {type(model).__name__} that is quantized (routers are "
                f"not, the output layer is with lm_head only), for example {', '.join(names[:3])}; correct the pattern "
                "or leave it out"
            )
        if all(config.override_of(name) != override for name in matched):
            raise ConfigError(
                f"the override {pattern!r} changes nothing: of those that match a name the first counts, and others "
                "come before it wherever it matches; put it before them or leave it out"
            )


def _target(linear: Linear, config: QuantizeConfig, common: QuantizeConfig, described: Mapping[str, Any]) -> Target:
    """Return a Linear as a target; ShapeError where the format cannot hold its shape, ConfigError for the settings.

    `config` holds for it, `common` for all; the model is `described` by its config.json.
    """
    name, columns = linear.name, linear.shape[1]
    if config.format != common.format:
        raise ConfigError(f"{name}: its override has a type, which only GGUF knows; choose a type for all, too")
    layout = find_format(config.format)
    if layout.choose is not None:
        config = layout.choose(config, name, columns, described)
    asked = config.group_size
    size = None if asked is None or config.type is not None else fitting_group(columns, asked)  # GGUF's have their own
    if size not in (None, asked):
        config = dataclasses.replace(config, group_size=size)
    target = Target(**vars(linear), config=config)
    try:
        if layout.uniform and (config.bits, asked) != (common.bits, common.group_size):
            raise ConfigError(f"{config.format} knows one setting for all modules; skip it or take another format")
        layout.check(target.spec)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if layout.uniform and config.group_size != asked:
        raise ShapeError(f"{columns} columns are no whole groups of {asked}, the one size that {config.format} knows")
    return target


def checkpoint_bytes(model: PreTrainedModel, targets: Iterable[Target], config: QuantizeConfig) -> tuple[int, int]:
    """Return the bytes of a checkpoint's quantized layers, all `targets`, and those of all its other tensors.

    The model's experts are split, and it is in the dtype of its files.
    """
    layout, tied = find_format(config.format), is_tied(model)
    packed = {f"{target.name}.weight": target.packed_bytes for target in targets}
    size = layout.float_nbytes or (lambda _name, tensor, _type, _tied: tensor.nbytes)
    others = ((name, tensor) for name, tensor in model.named_parameters() if name not in packed)
    return sum(packed.values()), sum(size(name, tensor, config.type, tied) for name, tensor in others)


def tell_misfits(
    targets: list[list[Target]], left: Mapping[str, str], config: QuantizeConfig, *, strict: bool, log: bool = True
) -> None:
    """Log what is not quantized as asked, in a line for each kind; ConfigError where that is `strict`ly wanted."""
    lines = []
    if left:
        named = some(f"{name} ({why})" for name, why in left.items())
        lines.append(f"{len(left)} Linear{'s stay' if len(left) > 1 else ' stays'} in floating point: {named}")
    smaller, narrow = [], []
    for target in [target for of_block in targets for target in of_block]:
        asked = config.for_module(target.name)
        if asked is not None and asked.type is not None:
            wide = RECIPES.get(asked.type, asked.type).endswith("_k")
            narrow += [f"{target.name} ({target.config.type})"] if wide and target.shape[1] % SUPER_BLOCK else []
            continue
        if asked is not None and asked.group_size != target.config.group_size:
            smaller.append(f"{target.name} ({target.config.group_size} of {target.shape[1]})")
    if smaller:
        lines.append(
            f"{counted(len(smaller), 'Linear')} with smaller groups, which divide the columns: {some(smaller)}"
        )
    if narrow:
        many = counted(len(narrow), "Linear")
        lines.append(f"{many} of larger types, the columns being no multiple of 256: {some(narrow)}")
    if strict and lines:
        raise ConfigError(f"{'; '.join(lines)}; change the settings for these, or leave strict out")
    for line in lines if log else ():
        _LOG.warning("%s", line)


def fitting_group(columns: int, wanted: int) -> int:
    """Return the size of groups that divides `columns` and comes closest to `wanted` from below.

    Halves of it are tried first, down to 32: kernels are made for these.

    >>> fitting_group(4096, 128), fitting_group(2880, 128), fitting_group(100, 128)
    (128, 64, 100)
    """
    size = wanted
    while columns % size and size >= 64:
        size //= 2
    return size if columns % size == 0 else max(size for size in range(1, wanted + 1) if columns % size == 0)


def find_routers(block: nn.Module) -> set[nn.Module]:
    """Return the Linears of `block` that choose or weigh experts, which stay in floating point: they are tiny.

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
    """Return the number of experts in `module`: split, stacked in any way, or modules in a list or a dictionary."""
    if is_split(module):
        return sum(isinstance(child, Expert) for child in module.children())
    for parameter in module.parameters(recurse=False):
        if parameter.ndim == 3 and min(parameter.shape) > 1:  # not the weight of a convolution by channel
            return parameter.shape[0]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        experts = sum(any(map(is_matrix, child.modules())) for child in module.children())
        return experts if isinstance(module, nn.ModuleDict) or experts == len(module) else 0  # a dropout beside them
    return 0


def find_head(model: PreTrainedModel, config: QuantizeConfig) -> Target | None:
    """Return the output layer as a target where `config` asks for it; ConfigError where it cannot be one."""
    if not config.lm_head:
        return None
    head = output_layer(model)
    name = next((name for name, module in model.named_modules() if module is head), None)
    if head is None or name is None or not is_matrix(head):
        raise ConfigError(f"lm_head=True, but {type(model).__name__} has no linear output layer; leave it out")
    if is_tied(model) or f"{name}.weight" in model.get_expanded_tied_weights_keys(all_submodels=True):
        raise ConfigError(
            f"lm_head=True, but {name} shares its weight with an input embedding, or does so by its configuration, and "
            "must stay in floating point; leave lm_head out"
        )
    settings = config.for_module(name)
    try:
        if settings is None:
            return None
        rows, columns = matrix(head).shape
        return _target(Linear(name, "", (rows, columns)), settings, config, model.config.to_dict())
    except (ConfigError, ShapeError) as error:
        raise ConfigError(f"lm_head=True, but {name} cannot be packed: {error}; leave lm_head out") from error


def output_layer(model: PreTrainedModel) -> nn.Module | None:
    """Return the module that maps hidden states to the vocabulary, where there is one."""
    output = model.get_output_embeddings()
    return output if isinstance(output, nn.Module) else None


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the output layer shares its weight with an embedding of tokens."""
    output = output_layer(model)
    embeddings = [model.get_input_embeddings(), *(each for each in model.modules() if isinstance(each, nn.Embedding))]
    return output is not None and any(output.weight is each.weight for each in embeddings)
