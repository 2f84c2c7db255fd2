"""How quantization configs name modules, and what may stand in them whoever wrote them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import regex

from ..errors import CheckpointError, ConfigError
from ..quantizer.config import ModuleOverride, QuantizeConfig
from ..version import __version__
from .formats import LayerSpec

FLOAT, CHANGED = "-:", "+:"
"""In GPTQModel's "dynamic": the modules stay in floating point, or have settings of their own."""

# What some readers, and transformers' stacked experts, hold as one: readers that fuse look modules up by that name.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

Setting: TypeAlias = "tuple[int, int | None] | None"
"""Bits and columns per group, where None is one group per row; None by itself for floating point."""

CHOSEN = re.compile(r"\^(\w|\\.|\+)+\$")
"""Overrides that choosing bits by sensitivity made: the name of a Linear, or that of all experts of a layer."""

_BLOCK = re.compile(r"((?:.*?\.)?)(\d+)\.(.+)")
_EXPERTS = re.compile(r"((?:.+\.)?experts)(?:\..+)?")


def split_name(name: str) -> tuple[str, str, str]:
    """Return what stands before a block's number in a name, the number, and the rest; outside the blocks the rest."""
    match = _BLOCK.fullmatch(name)
    return (match[1], match[2], match[3]) if match else ("", "", name)


def outside_blocks(name: str) -> bool:
    """Whether a module belongs to no block, as the output layer."""
    return not split_name(name)[1]


def inside_blocks(names: Iterable[str]) -> list[str]:
    """Return what modules are called within their blocks, each name once, sorted."""
    return sorted({inner for _, number, inner in map(split_name, names) if number})


def skipped_modules(layers: Iterable[str], matrices: Iterable[str]) -> list[str]:
    """Return the modules of the quantized blocks that have a 2-D weight, or stacked experts, in floating point."""
    prefixes = {prefix for prefix, number, _ in map(split_name, layers) if number}
    names = [name.removesuffix(".weight") if name.endswith(".weight") else experts_of(name) for name in matrices]
    return [name for name in dict.fromkeys(names) if split_name(name)[0] in prefixes and not outside_blocks(name)]


def experts_of(name: str) -> str:
    """Return the module with all experts of a layer, where `name` is that or stands below it; else an empty name.

    vLLM makes one layer of all experts, and looks up its settings by this name.
    """
    match = _EXPERTS.fullmatch(name)
    return match[1] if match else ""


def counts_as_matrix(name: str, dimensions: int) -> bool:
    """Whether a tensor of this name is a matrix, or a stack of those of experts."""
    return dimensions == 2 or (dimensions == 3 and bool(experts_of(name)))


def parts_of_experts(layers: Mapping[str, LayerSpec], skipped: Iterable[str]) -> dict[str, list[LayerSpec | None]]:
    """Return what stands below every module that `experts_of` finds; None for what is in floating point."""
    found: dict[str, list[LayerSpec | None]] = defaultdict(list)
    for name, spec in (*layers.items(), *((name, None) for name in skipped)):
        if experts := experts_of(name):
            found[experts].append(spec)
    return dict(found)


def are_of(parts: Iterable[LayerSpec | None], setting: Setting) -> bool:
    """Whether all parts of a module have one setting."""
    return all(spec is None if setting is None else spec is not None and spec.has(*setting) for spec in parts)


def shared_settings(parts: Sequence[LayerSpec | None], *preferred: Setting) -> list[Setting]:
    """Return settings that all parts of a module have, the preferred ones first; empty where they differ."""
    first = parts[0]
    own: list[Setting] = [None] if first is None else [(first.bits, None), (first.bits, first.group_size)]
    return [setting for setting in (*preferred, *own) if are_of(parts, setting)]


def patterns_of(sign: str, names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """Return regular expressions that match exactly `names`, and their fused forms, among the modules of `universe`.

    A module that holds all experts of a layer stands for all that is below it, too.
    """
    blocks: dict[str, set[str]] = defaultdict(set)
    for (prefix, _), numbers in _by_inner(universe).items():
        blocks[prefix] |= numbers
    chosen = _by_inner(names)
    patterns = []
    for (prefix, inner), numbers in chosen.items():
        number = ""
        if numbers != {""}:
            number = r"\d+\." if numbers == blocks[prefix] else rf"(?:{'|'.join(sorted(numbers, key=int))})\."
        stem, dot, last = inner.rpartition(".")
        lasts = [last]
        for fused, parts in FUSED.items():
            if last in parts and all(chosen.get((prefix, stem + dot + part)) == numbers for part in parts):
                lasts.append(fused)
        end = re.escape(last) if len(lasts) == 1 else f"(?:{'|'.join(lasts)})"
        end += r"(?:\..+)?" if experts_of(inner) == inner else ""
        patterns.append(f"{sign}^{re.escape(prefix)}{number}{re.escape(stem + dot)}{end}$")
    return patterns


def _by_inner(names: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """Return the block numbers of every (prefix, inner name); {""} for a module outside the blocks."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for prefix, number, inner in map(split_name, names):
        found[prefix, inner].add(number)
    return found


def check_settings(values: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError where bits or group_size, if they are there, cannot be."""
    try:
        ModuleOverride(bits=values.get("bits"), group_size=values.get("group_size"))
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_pattern(pattern: str, where: str) -> None:
    """Raise CheckpointError where what a config holds is no regular expression; `where` names it, for messages."""
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where} is not a regular expression: {error}") from error


def read_dynamic(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return GPTQModel's "dynamic", empty where a config has none; CheckpointError where it is none."""
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(rule, dict) for rule in dynamic.values()):
        raise CheckpointError(f"{where}: dynamic must map regular expressions to objects")
    for pattern, rule in dynamic.items():
        check_pattern(pattern.removeprefix(FLOAT).removeprefix(CHANGED), f"{where}: dynamic's {pattern!r}")
        check_settings(rule, f"dynamic[{pattern!r}] of the quantization config")
    return dynamic


def list_of_names(value: object, where: str) -> list[str]:
    """Return a list of names as a config holds it, empty for None; CheckpointError where it is no such list."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{where} must be a list of names")
    return value


def writer_of(values: Mapping[str, Any]) -> str | None:
    """Return the program that wrote a config, where its "meta" says so."""
    meta = values.get("meta")
    writer = meta.get("quantizer") if isinstance(meta, dict) else None
    return ", ".join(map(str, writer)) if isinstance(writer, list) else writer and str(writer)


def meta_of(config: QuantizeConfig) -> dict[str, Any]:
    """Return "meta" of the configs that we write: who wrote them, and the settings that were asked for."""
    return {"quantizer": [f"gptqkit:{__version__}"], "gptqkit": config.to_dict()}


def names_in_float(layers: Iterable[str], matrices: Iterable[str]) -> list[str]:
    """Return every module with a 2-D weight in floating point, and the output layer unless it is quantized."""
    names = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    return list(dict.fromkeys([*names, *({"lm_head"} - set(layers))]))
