"""The JSON that tells readers how a checkpoint is quantized: written for every common reader, read from every writer.

It stands in config.json under "quantization_config" and once more as quantize_config.json. Modules that differ from
the common setting are told twice, because readers differ: "dynamic" (GPTQModel, vLLM, SGLang: regular expressions on
full names, "-:" for modules in floating point) and "modules_in_block_to_quantize" (transformers, vLLM).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError
from ..quantizer.config import QuantizeConfig
from .formats import Declared, LayerSpec, declared_format
from .modules import (
    CHANGED,
    check_settings,
    inside_blocks,
    meta_of,
    outside_blocks,
    patterns_of,
    read_dynamic,
    skipped_in_dynamic,
    skipped_modules,
    writer_of,
)


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
    dynamic = skipped_in_dynamic(layers, skipped)
    changed: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, layer in layers.items():
        if (layer.bits, layer.group_size) != (config.bits, config.group_size or layer.in_features):
            changed[layer.bits, layer.declared_group].append(name)
    for (bits, size), names in changed.items():
        for pattern in patterns_of(CHANGED, names, [*layers, *skipped]):
            dynamic[pattern] = {"bits": bits, "group_size": size}
    if dynamic:
        values["dynamic"] = dynamic
    if skipped:
        values["modules_in_block_to_quantize"] = [inside_blocks(layers)]
    return values
