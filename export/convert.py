"""A checkpoint in another format: the same codes and grids, bit for bit or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, ConfigError, ConversionError, ShapeError
from ..hub import at_home, fetch
from ..modes import in_plain_modes
from ..quantizer.config import BITS, QuantizeConfig
from ..settings import bytes_of, one_of
from .autoround import PACKING
from .card import write_card
from .checkpoint import REPORT, Checkpoint, check_written, lasting_config, matrices, open_checkpoint, write_report
from .files import copy_beside, read_tokenizer
from .formats import FORMATS, LayerSpec, find_format, find_quantization, without_quantization
from .recipes import grid_settings
from .shards import MAX_SHARD_BYTES, check_same, read_json, same_bits, write_json, write_shards
from .staging import staged

_COPIES = ("quantization_config.json", "quant_config.json")  # auto-round's and AutoAWQ's of what config.json says
_STALE = "quantization_report.html"  # it shows the old format; gptqkit report draws it anew
_HOW = ("damp_percent", "static_groups", "true_sequential")  # in configs of gptq: how codes were found


@in_plain_modes
def convert(
    source: Path | str,
    target: Path | str,
    *,
    format: str,
    overwrite: bool = False,
    revision: str | None = None,
    shard_size: int | str = MAX_SHARD_BYTES,
) -> None:
    """Write the checkpoint in `source` to the directory `target` in another of `FORMATS`, without loss.

    `source` is a directory, or the id of a model on the Hub, of which `revision` is taken. `shard_size` is the largest
    size of a file: bytes, or a text such as "500MB".

    Every layer is unpacked and packed again; all other tensors keep their bytes. Configs are updated, our report and
    model card too. All other files are copied, but for the report's page, pickles, hidden files and linked
    folders. With `overwrite` a
    quantized model that is there already is replaced, after the new one is complete.

    Raises:
        CheckpointError: `source` is damaged or no checkpoint that is read here.
        ConversionError: `source` has that format already, or holds what the format cannot.
        ArchitectureError: A model that is not written as GGUF.
        DatasetUnavailableError: There is no such directory, nor such a model on the Hub.
        ConfigError: An unknown format, a `shard_size` that is none, or a target inside the source or around it.
        OutputExistsError: `target` exists, and `overwrite` is not set or it holds no quantized model.
        OSError: The disk refused; nothing is left behind.
    """
    target = Path(at_home(target))
    if format not in FORMATS:
        raise ConfigError(f"format is {format!r}; {one_of(FORMATS, format)}")
    shard_size = bytes_of("shard_size", shard_size)
    source = fetch(source, revision, gguf=True)
    if source.is_file():
        raise ConversionError(f"{source} is a file by itself; folders that gptqkit wrote are converted")
    check_apart(source, target)
    checkpoint = open_checkpoint(source)
    if checkpoint.declared.format == format and PACKING not in checkpoint.quantization_config:
        raise ConversionError(f"{source} is {format} already; there is nothing to convert")
    _check(checkpoint, format)
    layout = find_format(format)
    if layout.finish is not None:  # else nobody looks at the tokenizer
        layout.accept(checkpoint.model_config, read_tokenizer(source), checkpoint.float_names)
    layers: dict[str, LayerSpec] = {}
    with staged(target, overwrite=overwrite) as directory:
        fill(directory, source, _tensors(checkpoint, format, layers), shard_size)
        write_quantization_config(directory, _quantization_config(checkpoint, directory, format, layers), format)
        _verify(checkpoint, open_checkpoint(directory))
        if layout.finish is not None:
            layout.finish(directory)
        if (directory / REPORT).exists():
            update_report(directory, source, format)


def check_apart(source: Path, target: Path) -> None:
    """Raise ConfigError where one of two folders lies in the other."""
    inner, outer = source.resolve(), target.resolve()
    if inner == outer:
        raise ConfigError(f"{target} is the source itself; choose another target")
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise ConfigError(f"one of {target} and {source} lies in the other; choose a target elsewhere")


def fill(
    directory: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], shard_size: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors into a new directory, and copy what stands beside the weights in `source`."""
    weights = (".safetensors", ".safetensors.index.json", ".gguf")
    copy_beside(source, directory, leave=(*weights, *_COPIES, _STALE))
    write_shards(directory, tensors, shard_size)


def _check(checkpoint: Checkpoint, format: str) -> None:
    """Raise ConversionError where shapes and settings alone show that the format cannot hold a layer."""
    layout, declared, group_size = find_format(format), checkpoint.declared, _group_size(checkpoint)
    for name in checkpoint.other_names:
        if name.rpartition(".")[2] in layout.suffixes:
            raise ConversionError(f"{name} belongs to no quantized layer, but {format} would take it for a part of one")
    for name, spec in checkpoint.layers.items():
        try:
            if spec.bits not in BITS and not layout.snaps:
                raise ConfigError(f"{format} holds no {spec.bits}-bit codes; quantize the float model again")
            layout.check(spec)
        except (ConfigError, ShapeError) as error:
            raise ConversionError(f"{name}: {error}") from error
        if layout.uniform and not spec.has(declared.bits, group_size):
            raise ConversionError(
                f"{name} has {spec.bits} bits and groups of {spec.group_size}, and {format} knows one setting for all "
                "modules; choose another format, or quantize again with one for all"
            )


def _group_size(checkpoint: Checkpoint) -> int | None:
    """Return the declared group size, or None where layers differ from it, but each has one group per row."""
    declared, layers = checkpoint.declared.group_size, checkpoint.layers.values()
    whole = all(spec.groups == 1 for spec in layers)
    return None if whole and any(spec.group_size != declared for spec in layers) else declared


def _tensors(checkpoint: Checkpoint, format: str, layers: dict[str, LayerSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors in the order of the files, those of layers as `format` packs them; enter what these are."""
    packed: set[str] = set()
    layout, plain = find_format(format), set(checkpoint.plain_names)
    for full_name in checkpoint.tensors.where:
        name = full_name.rpartition(".")[0]
        if full_name in plain:
            yield full_name, checkpoint.tensor(full_name)
        elif name not in packed:
            packed.add(name)
            weight = checkpoint.weight(name)
            layers[name] = LayerSpec.of(weight)
            try:
                layout.check(layers[name])
                tensors = layout.pack(weight)
            except (ConversionError, ConfigError, ShapeError) as error:
                raise ConversionError(f"{name}: {error}") from error
            yield from ((f"{name}.{suffix}", tensor) for suffix, tensor in tensors.items())


def write_quantization_config(directory: Path, values: Mapping[str, Any], format: str) -> None:
    """Write the quantization config where the directory has one, in config.json or beside it; else in config.json."""
    values = lasting_config(values)
    meta = values.get("meta")
    if isinstance(meta, dict) and isinstance(meta.get("gptqkit"), dict):
        values = {**values, "meta": {**meta, "gptqkit": {**meta["gptqkit"], "format": format}}}
    model_config, beside = read_json(directory / "config.json"), directory / "quantize_config.json"
    elsewhere = values.get("quant_method", "gptq") != "gptq"  # nobody looks for these beside config.json
    if find_quantization(model_config) is not None or not beside.exists() or elsewhere:
        plain = without_quantization(model_config)
        write_json(directory / "config.json", {**plain, "quantization_config": dict(values)})
    if beside.exists():
        write_json(beside, values)


def update_report(directory: Path, source: Path, format: str) -> None:
    """Let report and model card name the new format; types are those of GGUF's alone."""
    report = read_json(source / REPORT)
    try:
        report["config"]["format"] = format
        if format != "gguf":
            report["config"]["type"] = None  # its bits, groups and symmetry are there
            for own in (report["config"].get("overrides") or {}).values():
                if own.get("type"):
                    grid = grid_settings(own["type"])
                    own |= {"type": None, "bits": grid["bits"], "group_size": grid["group_size"]}
        write_report(directory, report)
        write_card(directory, source)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source / REPORT} is damaged ({error!r}); delete it, it is not needed") from error


def _quantization_config(
    checkpoint: Checkpoint, directory: Path, format: str, layers: Mapping[str, LayerSpec]
) -> dict[str, Any]:
    """Return what the config is to say of the new files in `directory`; what the source says beside that stays."""
    before, declared = checkpoint.quantization_config, checkpoint.declared
    meta = before["meta"] if isinstance(before.get("meta"), dict) else {}
    report = read_json(checkpoint.path / REPORT) if (directory / REPORT).exists() else {}
    asked = meta.get("gptqkit") or report.get("config")  # of us; files of other programs only say what they are
    config = QuantizeConfig(bits=declared.bits, group_size=declared.group_size, sym=declared.sym)
    if isinstance(asked, dict):
        with suppress(ValueError, TypeError, AttributeError):  # another version of gptqkit has other settings
            config = QuantizeConfig.from_dict(asked)
    if find_format(format).uniform:
        config = dataclasses.replace(config, group_size=_group_size(checkpoint))
    write, floats = find_format(format).write_config, matrices(checkpoint.other_names, checkpoint.tensors)
    values = write(dataclasses.replace(config, format=format, type=None), layers, floats)
    if write == checkpoint.format.write_config and PACKING not in before:  # then what only the source says stays
        old = write(dataclasses.replace(config, format=declared.format, type=None), layers, floats)
        return before | {key: value for key, value in values.items() if key != "meta" and value != old[key]}
    if not isinstance(asked, dict):
        values.get("meta", {}).pop("gptqkit", None)  # defaults, which nobody asked for
        values = {key: value for key, value in values.items() if key not in _HOW}
    if "passthrough_tensors" in meta:
        values["meta"] = {**values.get("meta", {}), "passthrough_tensors": meta["passthrough_tensors"]}
    return values


def _verify(before: Checkpoint, after: Checkpoint) -> None:
    """Read everything back: the same weights, and the same bits everywhere else."""
    if after.layers.keys() != before.layers.keys() or set(after.plain_names) != set(before.plain_names):
        raise CheckpointError(f"{after.path} reads back as another checkpoint than was written")
    for name in before.layers:
        found, wanted = after.weight(name), before.weight(name)
        if (found.bits, found.group_size, found.sym) == (wanted.bits, wanted.group_size, wanted.sym):
            check_written(name, found, wanted)
        elif not same_bits(found.dequantize(), wanted.dequantize()):
            raise CheckpointError(f"{name} reads back with other values; disk or memory is faulty")
    for name in before.plain_names:
        check_same(name, after.tensor(name), before.tensor(name))
