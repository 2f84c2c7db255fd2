"""The JSON that tells readers how a checkpoint is quantized: written for every common reader, read from every writer.

It stands in config.json under "quantization_config" and once more as quantize_config.json. Modules that differ from
the common setting are told twice, because readers differ: "dynamic" (GPTQModel, vLLM, SGLang: regular expressions on
full names, "-:" for modules in floating point) and "modules_in_block_to_quantize" (transformers, vLLM).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import CheckpointError
from ..quantizer.config import BITS, FORMATS, Format, QuantizeConfig
from ..quantizer.quantized import QuantizedWeight

FLOAT = "-:"  # in "dynamic": the modules stay in floating point
CHANGED = "+:"  # in "dynamic": the modules have settings of their own

# Readers that fuse projections look modules up by the fused name.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

_BLOCK = re.compile(r"(?P<prefix>(?:.*?\.)?)(?P<number>\d+)\.(?P<inner>.+)")


@dataclass(frozen=True, kw_only=True)
class QuantizationSettings:
    """What a checkpoint declares about its quantization.

    Attributes:
        bits: Bits per code, unless `dynamic` says otherwise for a module.
        group_size: Columns per group; None for one group per row.
        sym: Declared symmetric.
        desc_act: Declared act-order; the tensors' g_idx decides.
        format: "gptq" or "gptq_v2".
        writer: The program that wrote it, where it says so.
        dynamic: Settings of single modules by regular expression on the full name, as GPTQModel writes them.
    """

    bits: int
    group_size: int | None
    sym: bool
    desc_act: bool
    format: Format
    writer: str | None = None
    dynamic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def for_module(self, name: str) -> tuple[int, int | None, bool]:
        """Bits, group_size and sym that are declared for the module `name`: the first pattern that matches counts.

        Raises:
            CheckpointError: Values that cannot be.
        """
        for pattern, values in self.dynamic.items():
            if not pattern.startswith(FLOAT) and re.match(pattern.removeprefix(CHANGED), name):
                where = f"dynamic[{pattern!r}] of the quantization config"
                bits = _read_bits(values.get("bits", self.bits), where)
                group_size = (
                    _read_group_size(values["group_size"], where) if "group_size" in values else self.group_size
                )
                return bits, group_size, bool(values.get("sym", self.sym))
        return self.bits, self.group_size, self.sym


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """What the quantization config says of one quantized module; see `QuantizedWeight`."""

    bits: int
    group_size: int
    in_features: int
    sym: bool
    trivial_group_index: bool


def read_settings(values: Mapping[str, Any], where: str) -> QuantizationSettings:
    """The settings in a quantization config, whoever wrote it.

    Args:
        values: The parsed JSON object.
        where: The file, for messages.

    Raises:
        CheckpointError: Another quantization method or layout, missing keys, or values that cannot be.
    """
    method = values.get("quant_method", values.get("method", "gptq"))
    if method != "gptq":
        raise CheckpointError(f"{where}: quant_method is {method!r}; only 'gptq' checkpoints are read here")
    # checkpoint_format overrides format, as in transformers; both are young, and files without them are version 1.
    layout = values.get("checkpoint_format") or values.get("format") or "gptq"
    if values.get("is_marlin_format"):
        layout = "marlin"
    if layout not in FORMATS:
        raise CheckpointError(
            f"{where}: the checkpoint format is {layout!r}; {' and '.join(FORMATS)} are read here. Save it again in "
            "one of these with the program that wrote it"
        )
    if values.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(f"{where}: pack_dtype is {values['pack_dtype']!r}; only int32 words are read here")
    for key in ("bits", "group_size"):
        if key not in values:
            raise CheckpointError(f"{where}: {key} is missing; add it, it cannot be guessed safely")
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(rule, dict) for rule in dynamic.values()):
        raise CheckpointError(f"{where}: dynamic must map regular expressions to objects")
    for pattern in dynamic:
        try:
            re.compile(pattern.removeprefix(FLOAT).removeprefix(CHANGED))
        except re.error as error:
            raise CheckpointError(f"{where}: dynamic has {pattern!r}, no regular expression: {error}") from error
    meta = values.get("meta")
    writer = meta.get("quantizer") if isinstance(meta, dict) else None
    return QuantizationSettings(
        bits=_read_bits(values["bits"], where),
        group_size=_read_group_size(values["group_size"], where),
        sym=bool(values.get("sym", True)),
        desc_act=bool(values.get("desc_act", False)),
        format=cast(Format, layout),
        writer=", ".join(map(str, writer)) if isinstance(writer, list) else writer and str(writer),
        dynamic=dynamic,
    )


def quantization_json(
    config: QuantizeConfig,
    weights: Mapping[str, QuantizedWeight | LayerFacts],
    other_names: Iterable[str],
    version: str,
    carried: Iterable[str] = (),
) -> dict[str, Any]:
    """The quantization config of a checkpoint that holds `weights`.

    What readers must know comes from the weights themselves: act-order is declared only where a g_idx is not trivial,
    and modules in floating point or with settings of their own are listed. The settings asked for stand in "meta".

    Args:
        config: The settings asked for.
        weights: Every quantized module by its full name.
        other_names: Names of the other 2-D tensors, to tell which modules of the blocks stayed in floating point.
        version: gptqkit's version.
        carried: Names of tensors of the source that the model has no place for.
    """
    values: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": config.bits,
        "group_size": -1 if config.group_size is None else config.group_size,
        "desc_act": not all(weight.trivial_group_index for weight in weights.values()),
        "sym": config.sym and all(weight.sym for weight in weights.values()),
        "lm_head": any(_BLOCK.fullmatch(name) is None for name in weights),
        "checkpoint_format": config.format,
        "format": config.format,
        "pack_dtype": "int32",
        "true_sequential": config.true_sequential,
        "static_groups": config.static_groups,
        "damp_percent": config.damp,
        "meta": {"quantizer": [f"gptqkit:{version}"], "gptqkit": config.to_dict()},
    }
    if carried := list(carried):
        values["meta"]["carried_tensors"] = carried
    skipped = skipped_modules(weights, other_names)
    dynamic: dict[str, dict[str, int]] = {pattern: {} for pattern in _patterns(FLOAT, skipped, [*weights, *skipped])}
    changed: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, weight in weights.items():
        if (weight.bits, weight.group_size) != (config.bits, config.group_size or weight.in_features):
            size = -1 if weight.group_size == weight.in_features else weight.group_size
            changed[weight.bits, size].append(name)
    for (bits, size), names in changed.items():
        for pattern in _patterns(CHANGED, names, [*weights, *skipped]):
            dynamic[pattern] = {"bits": bits, "group_size": size}
    if dynamic:
        values["dynamic"] = dynamic
    if skipped:
        inner = [match["inner"] for name in weights if (match := _BLOCK.fullmatch(name))]
        values["modules_in_block_to_quantize"] = [list(dict.fromkeys(inner))]
    return values


def skipped_modules(weights: Iterable[str], other_names: Iterable[str]) -> list[str]:
    """The modules of the quantized blocks that have a 2-D weight in floating point."""
    prefixes = {match["prefix"] for name in weights if (match := _BLOCK.fullmatch(name))}
    names = [name.removesuffix(".weight") for name in other_names if name.endswith(".weight")]
    return [name for name in names if (match := _BLOCK.fullmatch(name)) and match["prefix"] in prefixes]


def _patterns(sign: str, names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """Regular expressions that match exactly `names`, and their fused forms, among the modules of `universe`."""
    blocks: dict[str, set[str]] = defaultdict(set)
    for (prefix, _), numbers in _by_inner(universe).items():
        blocks[prefix] |= numbers
    chosen = _by_inner(names)
    patterns = []
    for (prefix, inner), numbers in chosen.items():
        if numbers == {""}:
            number = ""
        elif numbers == blocks[prefix]:
            number = r"\d+\."
        else:
            number = rf"(?:{'|'.join(sorted(numbers, key=int))})\."
        stem, dot, last = inner.rpartition(".")
        lasts = [last]
        for fused, parts in FUSED.items():
            if last in parts and all(chosen.get((prefix, stem + dot + part)) == numbers for part in parts):
                lasts.append(fused)
        end = re.escape(last) if len(lasts) == 1 else f"(?:{'|'.join(lasts)})"
        patterns.append(f"{sign}^{re.escape(prefix)}{number}{re.escape(stem + dot)}{end}$")
    return patterns


def _by_inner(names: Iterable[str]) -> dict[tuple[str, str], set[str]]:
    """The block numbers of every (prefix, inner name); {""} for a module outside the blocks."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in names:
        match = _BLOCK.fullmatch(name)
        key = (match["prefix"], match["inner"]) if match else ("", name)
        found[key].add(match["number"] if match else "")
    return found


def _read_bits(value: object, where: str) -> int:
    if type(value) is int and value in BITS:
        return value
    raise CheckpointError(f"{where}: bits is {value!r}; 2, 3, 4 and 8 are read here")


def _read_group_size(value: object, where: str) -> int | None:
    if type(value) is int and (value == -1 or value > 0):
        return None if value == -1 else value
    raise CheckpointError(
        f"{where}: group_size is {value!r}; a positive number, or -1 for one group per row, is needed"
    )
