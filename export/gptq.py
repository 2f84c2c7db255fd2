"""GPTQ versions 1 and 2.

Of a layer with K inputs, N outputs and G groups:

    qweight   int32 (K * bits / 32, N)     codes, a bit stream along K
    qzeros    int32 (G, N * bits / 32)     zero points, a bit stream along N; version 1 stores (zero - 1) mod 2^bits
    scales    float16 (G, N)               (bfloat16 is read, never written)
    g_idx     int32 (K,)                   group of every input column; may be missing where desc_act is off

Version 1 therefore holds zero points 1 ... 2^bits and version 2 holds 0 ... 2^bits - 1; nothing else differs. The
solver's grids for version 1 stay below 2^bits, which only files of other programs hold.

Modules that differ from the common setting are told twice in the config, because readers differ: "dynamic" (GPTQModel,
vLLM, SGLang: regular expressions on full names, "-:" for modules in floating point) and "modules_in_block_to_quantize"
(transformers, vLLM). vLLM makes one layer of all experts, which "modules_in_block_to_quantize" does not reach: it asks
"dynamic" once, for "model.layers.0.mlp.experts". Where they are alike, one pattern is for that name and all below it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, ShapeError
from ..quantizer.config import QuantizeConfig
from ..quantizer.grid import IntegerZeroPoint
from ..quantizer.quantized import QuantizedWeight
from .bits import codes_per_unit, pack, unpack
from .formats import Declared, Format, LayerSpec, declared_format
from .layers import BIAS, INDEX, SCALES, WORDS, check_kinds, check_shapes, is_act_order, make_weight, stored_grid
from .modules import (
    CHANGED,
    FLOAT,
    Setting,
    check_settings,
    experts_of,
    inside_blocks,
    meta_of,
    outside_blocks,
    parts_of_experts,
    patterns_of,
    read_dynamic,
    shared_settings,
    skipped_modules,
    writer_of,
)
from .shards import Shards

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")

_KINDS = {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES, "g_idx": INDEX, "bias": BIAS}

# GPTQModel before 7.0 turned 3-bit zeros into version 1 with the constants of words 0 and 2 swapped: of every 32 zeros
# it took these amounts off instead of 1. Symmetric files (zero 4) show it. Code 21 also loses a borrow between words.
_SWAPPED_OFFSETS = torch.tensor([4] * 10 + [0] + [1] * 10 + [3] + [2] * 10, dtype=torch.int16, device="cpu")
_BORROWING_CODE = 21


def check_spec(spec: LayerSpec) -> None:
    """Raise ShapeError where codes or zero points of a weight do not fill int32 words."""
    unit, shape = codes_per_unit(spec.bits), (spec.out_features, spec.in_features)
    if shape[0] % unit or shape[1] % unit:
        raise ShapeError(f"{shape} is its shape, and packed {spec.bits}-bit weights need multiples of {unit} both ways")


def _nbytes(spec: LayerSpec) -> int:
    codes, groups = spec.out_features * spec.in_features, spec.out_features * spec.groups
    return (codes + groups) * spec.bits // 8 + 2 * groups + 4 * spec.in_features


def pack_layer(weight: QuantizedWeight, *, offset: int) -> dict[str, Tensor]:
    """Return the tensors of one layer, exact and contiguous; stored zero points are `offset` less than true ones.

    Raises:
        ShapeError: Rows or columns do not fill whole int32 words.
        ConversionError: Zero points that the version cannot hold, or scales that float16 cannot.
    """
    zero, scales = stored_grid(weight, "gptq" if offset else "gptq_v2", least=offset)
    return {
        "qweight": pack(weight.codes, weight.bits).t().contiguous(),
        "qzeros": pack(zero.t() - offset, weight.bits),
        "scales": scales.t().contiguous(),
        "g_idx": weight.group_index.contiguous(),
    }


def layer_spec(name: str, tensors: Mapping[str, Tensor], declared: Declared) -> LayerSpec:
    """Return what a layer's tensors are; of their values only g_idx is read, or on the meta device nothing.

    Raises:
        CheckpointError: A tensor is missing, or its dtype, shape or g_idx contradicts the config or the others.
    """
    bits, group_size, sym = declared.for_module(name)
    check_kinds(name, tensors, _KINDS, ("qweight", "qzeros", "scales"))
    words, outputs = tensors["qweight"].shape
    columns = words * 32 // bits
    if not words or columns % codes_per_unit(bits):
        raise CheckpointError(
            f"{name}.qweight has {words} rows of words, which do not hold whole {bits}-bit codes: the bits in the "
            "quantization config contradict the tensor"
        )
    if not outputs or outputs % codes_per_unit(bits):
        raise CheckpointError(
            f"{name}.qweight has {outputs} outputs; {bits}-bit zeros need a multiple of {codes_per_unit(bits)}"
        )
    size = columns if group_size is None else group_size
    groups = -(-columns // size)
    shapes = {"g_idx": (columns,), "qzeros": (groups, outputs * bits // 32), "scales": (groups, outputs)}
    given = f"qweight {(words, outputs)} with {bits} bits"
    ordered = declared.needs_index(name)
    check_shapes(name, tensors, {**shapes, "bias": (outputs,)}, given, group_size)
    return LayerSpec(
        in_features=columns,
        out_features=outputs,
        bits=bits,
        group_size=size,
        sym=sym,
        act_order=is_act_order(f"{name}.g_idx", tensors.get("g_idx"), columns, size, declared=ordered),
    )


def kind_of_zeros(words: Tensor, bits: int) -> str | None:
    """Return the version that the qzeros of a symmetric layer are of, or "swapped"; None for such as it cannot have."""
    stored = unpack(words, bits)
    least = int(stored.min()) - (1 << (bits - 1)) + 1
    if least in (0, 1) and bool((stored == stored.min()).all()):
        return ("gptq", "gptq_v2")[least]
    if bits != 3:
        return None
    swapped = stored.view(-1, 32) == (4 - _SWAPPED_OFFSETS).to(stored.device)
    swapped[:, _BORROWING_CODE] = True
    return "swapped" if bool(swapped.all()) else None


def settings_of_shapes(tensors: Shards) -> dict[str, int]:
    """Return bits and group_size of most layers; whether they fit all, `layer_spec` says.

    Where g_idx does not tell, group_size is the one power of two that fits shapes. CheckpointError as `layer_spec`, or
    where there is no layer.
    """
    widths, sizes = Counter[int](), Counter[int]()
    for name in (name.removesuffix(".qweight") for name in tensors.where if name.endswith(".qweight")):
        layer = tensors.below(name, SUFFIXES)
        check_kinds(name, layer, _KINDS, ("qweight", "qzeros", "scales"))
        words, outputs = layer["qweight"].shape
        bits, groups = layer["qzeros"].shape[1] * 32 // max(outputs, 1), len(layer["scales"])
        widths[bits] += 1
        if groups > 1 and bits and "g_idx" in layer:
            sizes[max(Counter(layer["g_idx"].tolist()).values(), default=1)] += 1
        elif groups > 1 and bits:
            least = -(-(words * 32 // bits) // groups)
            sizes[1 << (least - 1).bit_length()] += 1
    if not widths:
        raise CheckpointError(f"{tensors.files[0].parent} is not quantized: no tensor ends in .qweight")
    return {"bits": widths.most_common(1)[0][0], "group_size": sizes.most_common(1)[0][0] if sizes else -1}


def unpack_layer(name: str, tensors: Mapping[str, Tensor], spec: LayerSpec, *, offset: int) -> QuantizedWeight:
    """Return the weight that a layer's tensors hold, exactly; `offset` as for `pack_layer`.

    Raises:
        CheckpointError: Scales that are not finite, or the 3-bit zeros that GPTQModel before 7.0 shifted wrongly.
    """
    stored = unpack(tensors["qzeros"], spec.bits)
    if spec.bits == 3 and spec.sym and offset and kind_of_zeros(tensors["qzeros"], 3) == "swapped":
        raise CheckpointError(
            f"{name}.qzeros carries the 3-bit zeros that GPTQModel before 7.0 shifted by wrong constants; let "
            "`gptqkit doctor` repair the checkpoint"
        )
    zero = (stored.to(torch.int16) + offset).t()
    codes, scale = unpack(tensors["qweight"].t(), spec.bits), tensors["scales"].t()
    return make_weight(spec, codes, scale, zero, tensors.get("g_idx"), where=f"{name}.scales")


def read_config(values: Mapping[str, Any], where: str) -> Declared:
    """Return what a quantization config declares, whoever wrote it; `where` is its file, for messages.

    Raises:
        CheckpointError: Missing keys, or values that cannot be.
    """
    if values.get("pack_dtype", "int32") != "int32":
        raise CheckpointError(f"{where}: pack_dtype is {values['pack_dtype']!r}; only int32 words are read here")
    for key in ("bits", "group_size"):
        if values.get(key) is None:
            raise CheckpointError(f"{where}: {key} is missing; add it, or let `gptqkit doctor` find it in the tensors")
    check_settings(values, where)
    size = values["group_size"]
    return Declared(
        format=declared_format(values, where),
        bits=values["bits"],
        group_size=None if size == -1 else size,
        sym=bool(values.get("sym", True)),
        desc_act=bool(values.get("desc_act", False)),
        static_groups=bool(values.get("static_groups", False)),
        writer=writer_of(values),
        dynamic=read_dynamic(values, where),
    )


def write_config(config: QuantizeConfig, layers: Mapping[str, LayerSpec], matrices: Sequence[str]) -> dict[str, Any]:
    """Return the quantization config of a checkpoint that holds `layers`, and other 2-D tensors.

    What readers must know comes from the layers themselves: act-order is declared only where a g_idx is not trivial,
    and modules in floating point or with settings of their own are listed. The settings asked for stand in "meta".
    """
    values: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": config.bits,
        "group_size": config.group_size or -1,
        "desc_act": any(layer.act_order for layer in layers.values()),
        "sym": config.sym and all(layer.sym for layer in layers.values()),
        "lm_head": any(map(outside_blocks, layers)),
        "checkpoint_format": config.format,
        "format": config.format,
        "pack_dtype": "int32",
        "true_sequential": config.true_sequential,
        "static_groups": config.static_groups,
        "meta": meta_of(config),
    }
    if config.damp_percent is not None:
        values["damp_percent"] = config.damp_percent
    skipped = skipped_modules(layers, matrices)
    dynamic = _dynamic(config, layers, skipped)
    if dynamic:
        values["dynamic"] = dynamic
    if skipped:
        values["modules_in_block_to_quantize"] = [inside_blocks(layers)]
    return values


def _dynamic(
    config: QuantizeConfig, layers: Mapping[str, LayerSpec], skipped: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Return by pattern what differs from the common setting: modules, and all experts of a layer if they are alike."""
    common = (config.bits, config.group_size)
    experts = parts_of_experts(layers, skipped)
    alike = {name: found[0] for name, parts in experts.items() if (found := shared_settings(parts, common))}
    kinds: dict[Setting, list[str]] = defaultdict(list)
    for name, setting in alike.items():
        if setting != common:
            kinds[setting].append(name)
    kinds[None] += [name for name in skipped if experts_of(name) not in alike and experts_of(name) != name]
    for name, layer in layers.items():
        if not layer.has(*common) and experts_of(name) not in alike:
            size = layer.declared_group
            kinds[layer.bits, None if size == -1 else size].append(name)
    universe = [*layers, *skipped, *experts]
    dynamic: dict[str, dict[str, int]] = {}
    for kind, names in kinds.items():
        values = {} if kind is None else {"bits": kind[0], "group_size": kind[1] or -1}
        dynamic |= dict.fromkeys(patterns_of(FLOAT if kind is None else CHANGED, names, universe), values)
    return dynamic


def _version(offset: int) -> Format:
    return Format(
        suffixes=SUFFIXES,
        snap=IntegerZeroPoint(least=offset),
        check=check_spec,
        nbytes=_nbytes,
        pack=partial(pack_layer, offset=offset),
        spec=layer_spec,
        unpack=partial(unpack_layer, offset=offset),
        write_config=write_config,
        read_config=read_config,
    )


V1 = _version(1)
V2 = _version(0)
