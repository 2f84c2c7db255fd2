"""The JSON that tells readers how a checkpoint is quantized: written for every common reader, read from every writer.

It stands in config.json under "quantization_config" and once more as quantize_config.json. Modules that differ from
the common setting are told twice, because readers differ: "dynamic" (GPTQModel, vLLM, SGLang: regular expressions on
full names, "-:" for modules in floating point) and "modules_in_block_to_quantize" (transformers, vLLM).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import regex

from ..errors import CheckpointError, ConfigError
from ..quantizer.config import ModuleOverride, QuantizeConfig
from ..version import __version__
from .formats import Declared, LayerSpec, declared_format

FLOAT = "-:"  # in "dynamic": the modules stay in floating point
CHANGED = "+:"  # in "dynamic": the modules have settings of their own

# Readers that fuse projections look modules up by the fused name.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_BLOCK = re.compile(r"(?P<prefix>(?:.*?\.)?)(?P<number>\d+)\.(?P<inner>.+)")


def read_config(values: Mapping[str, Any], where: str) -> Declared:
    """Return what a quantization config declares, whoever wrote it; `where` is its file, for messages.

    Raises:
        CheckpointError: Missing keys, or values that cannot be.
    """
    if values.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(f"{where}: pack_dtype is {values['pack_dtype']!r}; only int32 words are read here")
    for key in ("bits", "group_size"):
        if values.get(key) is None:
            raise CheckpointError(f"{where}: {key} is missing; add it, it cannot be guessed safely")
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(rule, dict) for rule in dynamic.values()):
        raise CheckpointError(f"{where}: dynamic must map regular expressions to objects")
    for pattern, rule in dynamic.items():
        try:
            regex.compile(pattern.removeprefix(FLOAT).removeprefix(CHANGED))
        except (regex.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where}: dynamic's {pattern!r} is not a regular expression: {error}") from error
        _check(rule, f"dynamic[{pattern!r}] of the quantization config")
    _check(values, where)
    meta, size = values.get("meta"), values["group_size"]
    writer = meta.get("quantizer") if isinstance(meta, dict) else None
    return Declared(
        format=declared_format(values, where),
        bits=values["bits"],
        group_size=None if size == -1 else size,
        sym=bool(values.get("sym", True)),
        desc_act=bool(values.get("desc_act", False)),
        static_groups=bool(values.get("static_groups", False)),
        writer=", ".join(map(str, writer)) if isinstance(writer, list) else writer and str(writer),
        dynamic=dynamic,
    )


def write_config(config: QuantizeConfig, layers: Mapping[str, LayerSpec], matrices: Sequence[str]) -> dict[str, Any]:
    """Return the quantization config of a checkpoint that holds `layers`.

    What readers must know comes from the layers themselves: act-order is declared only where a g_idx is not trivial,
    and modules in floating point or with settings of their own are listed. The settings asked for stand in "meta".

    Args:
        config: The settings asked for.
        layers: Every quantized module by its full name.
        matrices: Names of the other 2-D tensors, to tell which modules of the blocks stayed in floating point.
    """
    values: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": config.bits,
        "group_size": -1 if config.group_size is None else config.group_size,
        "desc_act": any(layer.act_order for layer in layers.values()),
        "sym": config.sym and all(layer.sym for layer in layers.values()),
        "lm_head": any(_BLOCK.fullmatch(name) is None for name in layers),
        "checkpoint_format": config.format,
        "format": config.format,
        "pack_dtype": "int32",
        "true_sequential": config.true_sequential,
        "static_groups": config.static_groups,
        "damp_percent": config.damp_percent,
        "meta": {"quantizer": [f"gptqkit:{__version__}"], "gptqkit": config.to_dict()},
    }
    skipped = skipped_modules(layers, matrices)
    dynamic: dict[str, dict[str, int]] = {pattern: {} for pattern in _patterns(FLOAT, skipped, [*layers, *skipped])}
    changed: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        if (layer.bits, layer.group_size) != (config.bits, config.group_size or layer.in_features):
            size = -1 if layer.group_size == layer.in_features else layer.group_size
            changed[layer.bits, size].append(name)
    for (bits, size), names in changed.items():
        for pattern in _patterns(CHANGED, names, [*layers, *skipped]):
            dynamic[pattern] = {"bits": bits, "group_size": size}
    if dynamic:
        values["dynamic"] = dynamic
    if skipped:
        inner = [match["inner"] for name in layers if (match := _BLOCK.fullmatch(name))]
        values["modules_in_block_to_quantize"] = [list(dict.fromkeys(inner))]
    return values


def skipped_modules(layers: Iterable[str], matrices: Iterable[str]) -> list[str]:
    """Return the modules of the quantized blocks that have a 2-D weight in floating point."""
    prefixes = {match["prefix"] for name in layers if (match := _BLOCK.fullmatch(name))}
    names = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
    return [name for name in names if (match := _BLOCK.fullmatch(name)) and match["prefix"] in prefixes]


def _patterns(sign: str, names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """Return regular expressions that match exactly `names`, and their fused forms, among the modules of `universe`."""
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
        patterns.append(f"{sign}^{re.escape(prefix)}{number}{re.escape(stem + dot)}{end}$")
    return patterns


def _by_inner(names: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """Return the block numbers of every (prefix, inner name); {""} for a module outside the blocks."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in names:
        match = _BLOCK.fullmatch(name)
        key = (match["prefix"], match["inner"]) if match else ("", name)
        found[key].add(match["number"] if match else "")
    return found


def _check(values: Mapping[str, Any], where: str) -> None:
    try:
        ModuleOverride(bits=values.get("bits"), group_size=values.get("group_size"))
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error
