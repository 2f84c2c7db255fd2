"""compressed-tensors' pack-quantized layout, which llm-compressor writes: 2, 3, 4 and 8 bits.

Of a layer with K inputs, N outputs and G groups:

    weight_packed       int32 (N, ceil(K * bits / 32))   codes, a bit stream along K
    weight_zero_point   int32 (ceil(N * bits / 32), G)   zero points 0 ... 2^bits - 1, a bit stream along N; only where
                                                         the layer is asymmetric (before 0.10: int8 (N, G), less
                                                         2^(bits - 1), which is read, never written)
    weight_scale        float16 (N, G)                   (bfloat16 and float32 are read, never written)
    weight_shape        int64 (2,)                       N and K (int32 is read, never written)
    weight_g_idx        int32 (K,)                       group of every input column; only with act-order

Streams are dense, as compressed-tensors packs them since 0.18; before, 3-bit codes stood ten to a word. Upstream has
given up weight_g_idx: servers refuse it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..quantizer.config import QuantizeConfig
from ..quantizer.grid import IntegerZeroPoint
from ..quantizer.quantized import QuantizedWeight
from .bits import pack_stream, unpack_stream
from .formats import Declared, Format, LayerSpec, declared_format
from .layers import BIAS, INDEX, SCALES, WORDS, check_kinds, check_shapes, is_act_order, make_weight, stored_grid
from .modules import (
    check_pattern,
    check_settings,
    list_of_names,
    meta_of,
    names_in_float,
    outside_blocks,
    patterns_of,
    skipped_modules,
    writer_of,
)

_KINDS = {
    "weight_packed": WORDS,
    "weight_zero_point": (2, (torch.int32, torch.int8)),
    "weight_scale": (2, (*SCALES[1], torch.float32)),
    "weight_shape": (1, (torch.int64, torch.int32)),
    "weight_g_idx": INDEX,
    "bias": BIAS,
}
_LINEAR, _PATTERN = "Linear", "re:"  # of targets: the class of modules, and the beginning of regular expressions
_PLAIN = {"type": "int", "dynamic": False, "block_structure": None, "scale_dtype": None}


def _nbytes(spec: LayerSpec) -> int:
    zeros = 0 if spec.sym else 4 * _words(spec.out_features, spec.bits) * spec.groups
    scales, index = 2 * spec.out_features * spec.groups, 4 * spec.in_features * spec.act_order
    return 4 * spec.out_features * _words(spec.in_features, spec.bits) + scales + zeros + index + 16


def pack_layer(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one layer, exact and contiguous.

    Raises:
        ShapeError: Offsets that are no whole multiples of their scales.
        ConversionError: Zero points outside 0 ... 2^bits - 1, or scales that float16 cannot hold.
    """
    zero, scales = stored_grid(weight, "compressed-tensors")
    tensors = {
        "weight_packed": pack_stream(weight.codes, weight.bits),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if not weight.sym:
        tensors["weight_zero_point"] = pack_stream(zero.t(), weight.bits).t().contiguous()
    if not weight.trivial_group_index:
        tensors["weight_g_idx"] = weight.group_index.contiguous()
    return tensors


def layer_spec(name: str, tensors: Mapping[str, Tensor], declared: Declared) -> LayerSpec:
    """Return what a layer's tensors are; of their values only weight_shape and weight_g_idx are read.

    Raises:
        CheckpointError: A tensor is missing, or its dtype, shape or values contradict the config or the others.
    """
    bits, group_size, sym = declared.for_module(name)
    needed = ("weight_packed", "weight_scale", "weight_shape", *(() if sym else ("weight_zero_point",)))
    check_kinds(name, tensors, _KINDS, needed)
    if sym and "weight_zero_point" in tensors:
        raise CheckpointError(
            f"{name}.weight_zero_point is there, but the quantization config says symmetric; correct the config"
        )
    shape = tensors["weight_shape"]
    if shape.is_meta:  # only headers were fetched
        rows, words = tensors["weight_packed"].shape
        columns = tensors["weight_scale"].shape[1] * group_size if group_size else words * 32 // bits
    elif tuple(shape.shape) != (2,) or int(shape.min()) < 1:
        raise CheckpointError(f"{name}.weight_shape is no shape (out, in); fetch the files again")
    else:
        rows, columns = map(int, shape)
    size, zero = group_size or columns, tensors.get("weight_zero_point")
    lines = rows if zero is not None and zero.dtype == torch.int8 else _words(rows, bits)
    shapes = {
        "weight_packed": (rows, _words(columns, bits)),
        "weight_scale": (rows, -(-columns // size)),
        "weight_zero_point": (lines, -(-columns // size)),
        "weight_g_idx": (columns,),
        "bias": (rows,),
    }
    if bits == 3 and tuple(tensors["weight_packed"].shape) == (rows, -(-columns // 10)) != shapes["weight_packed"]:
        raise CheckpointError(
            f"{name}.weight_packed holds ten 3-bit codes a word, as compressed-tensors before 0.18 packed them; save "
            "the checkpoint again with a later version"
        )
    check_shapes(name, tensors, shapes, f"weight_shape {(rows, columns)} with {bits} bits", group_size)
    index = tensors.get("weight_g_idx")
    return LayerSpec(
        in_features=columns,
        out_features=rows,
        bits=bits,
        group_size=size,
        sym=sym,
        act_order=is_act_order(f"{name}.weight_g_idx", index, columns, size, declared=declared.needs_index(name)),
    )


def unpack_layer(name: str, tensors: Mapping[str, Tensor], spec: LayerSpec) -> QuantizedWeight:
    """Return the weight that a layer's tensors hold, exactly; CheckpointError for scales that are not finite."""
    codes = unpack_stream(tensors["weight_packed"], spec.bits, spec.in_features)
    zero = tensors.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int8:
        zero = zero.to(torch.int16) + (1 << (spec.bits - 1))
    elif zero is not None:
        zero = unpack_stream(zero.t(), spec.bits, spec.out_features).t()
    index = tensors.get("weight_g_idx")
    return make_weight(spec, codes, tensors["weight_scale"], zero, index, where=f"{name}.weight_scale")


def write_config(config: QuantizeConfig, layers: Mapping[str, LayerSpec], matrices: Sequence[str]) -> dict[str, Any]:
    """Return the quantization config of a checkpoint: a group of modules for each kind of grid.

    The commonest, which stands last, is that of all Linears; the others name their modules, and names count first with
    every reader. What is in floating point is to be ignored: in the blocks by regular expressions, which know the names
    of fused projections.
    """
    kinds: dict[tuple[int, int | None, bool, bool], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        size = config.group_size
        if layer.group_size != (size or layer.in_features):
            size = None if layer.group_size == layer.in_features else layer.group_size
        kinds[layer.bits, size, layer.sym, layer.act_order].append(name)
    skipped = skipped_modules(layers, matrices)
    universe = [*layers, *skipped]
    groups = {}
    for number, (kind, names) in enumerate(sorted(kinds.items(), key=lambda item: len(item[1])), start=1):
        outside = [name for name in names if outside_blocks(name)]
        inside = patterns_of(_PATTERN, (name for name in names if not outside_blocks(name)), universe)
        groups[f"group_{number - 1}"] = _group([*([_LINEAR] if number == len(kinds) else inside), *outside], *kind)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": [
            *(name for name in names_in_float(layers, matrices) if name not in set(skipped)),
            *patterns_of(_PATTERN, skipped, universe),
        ],
        "kv_cache_scheme": None,
        "config_groups": groups,
        "meta": meta_of(config),
    }


def _group(targets: list[str], bits: int, size: int | None, sym: bool, act_order: bool) -> dict[str, Any]:
    return {
        "targets": targets,
        "input_activations": None,
        "output_activations": None,
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": sym,
            "strategy": "group" if size else "channel",
            "group_size": size,
            "actorder": "group" if act_order else None,
            "dynamic": False,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
        },
    }


def read_config(values: Mapping[str, Any], where: str) -> Declared:
    """Return what a quantization config declares: ours or llm-compressor's; `where` is its file, for messages.

    Raises:
        CheckpointError: Missing keys, values that cannot be, or more than integer weights.
    """
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"{where}: config_groups must map names to groups of modules; fetch the file again")
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        if values.get(key) and not (isinstance(values[key], dict) and values[key].get("format") == "dense"):
            raise CheckpointError(f"{where}: {key} is set; checkpoints with plain quantized weights are read here")
    for name in list_of_names(values.get("ignore"), f"{where}: ignore"):
        _check_target(name, f"{where}: ignore's {name!r}")
    rules: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        rule, at = _rule(group, f"{where}: config_groups[{name!r}]"), f"{where}: config_groups[{name!r}].targets"
        for target in list_of_names(group.get("targets"), at):
            rules.setdefault(_check_target(target, f"{at}' {target!r}"), rule)
    if not rules:
        raise CheckpointError(f"{where}: no group of config_groups has targets")
    common = rules.get(_LINEAR) or next(iter(rules.values()))
    # Names count before patterns, patterns before the class of all.
    ordered = sorted((target for target in rules if target != _LINEAR), key=lambda target: target.startswith(_PATTERN))
    dynamic = {_as_pattern(target): rules[target] for target in ordered}
    dynamic.setdefault(".*", common)  # its desc_act, which is not that of all
    return Declared(
        format=declared_format(values, where),
        bits=common["bits"],
        group_size=None if common["group_size"] == -1 else common["group_size"],
        sym=common["sym"],
        desc_act=any(rule["desc_act"] for rule in rules.values()),
        writer=writer_of(values),
        dynamic=dynamic,
    )


def _rule(group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return bits, group_size, sym and desc_act of a group; CheckpointError where it is not plain weights."""
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise CheckpointError(f"{where} quantizes {key.replace('_', ' ')}; only weights may be, to be read here")
    if group.get("format") not in (None, "pack-quantized"):
        raise CheckpointError(f"{where} has format {group['format']!r}; only pack-quantized is read here")
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where} has no weights; fetch the file again")
    for key, plain in _PLAIN.items():
        if weights.get(key, plain) != plain:
            raise CheckpointError(f"{where}: {key} of its weights is {weights[key]!r}; only {plain!r} is read here")
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None and size is not None:
        strategy = "channel" if size == -1 else "group"
    if strategy not in ("group", "channel") or (strategy == "group") != (size not in (None, -1)):
        raise CheckpointError(
            f"{where}: strategy {weights.get('strategy')!r} with group_size {size!r}; group with a size, or channel "
            "without, is read here"
        )
    rule = {"bits": weights.get("num_bits", 8), "group_size": -1 if strategy == "channel" else size}
    if rule["bits"] is None:
        raise CheckpointError(f"{where}: num_bits of its weights is null; fetch the file again")
    check_settings(rule, where)
    symmetric, order = weights.get("symmetric", True), weights.get("actorder")
    if not isinstance(symmetric, bool) or order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise CheckpointError(f"{where}: symmetric is {symmetric!r}, actorder {order!r}; fetch the file again")
    return {**rule, "sym": symmetric, "desc_act": order in (True, "group", "dynamic")}


def _check_target(target: str, where: str) -> str:
    if target.startswith(_PATTERN):
        check_pattern(target.removeprefix(_PATTERN), where)
    return target


def _as_pattern(target: str) -> str:
    """Return the regular expression, to be matched from the beginning, of a target."""
    return target.removeprefix(_PATTERN) if target.startswith(_PATTERN) else f"{re.escape(target)}$"


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


FORMAT = Format(
    suffixes=("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
    snap=IntegerZeroPoint(),
    nbytes=_nbytes,
    pack=pack_layer,
    spec=layer_spec,
    unpack=unpack_layer,
    write_config=write_config,
    read_config=read_config,
)
