"""The checkpoint in the making: the part of every block as it is finished, and in the end the whole of all parts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .errors import CheckpointError, ConversionError, ShapeError
from .export.checkpoint import (
    Checkpoint,
    check_written,
    matrices,
    open_checkpoint,
    part_of_checkpoint,
    write_configs,
)
from .export.formats import Declared, LayerSpec, find_format
from .export.shards import Shards, check_same, digest, join_files, write_files
from .model import FloatModel
from .quantizer.config import QuantizeConfig
from .quantizer.quantized import QuantizedWeight


def stored_module(model: FloatModel, name: str) -> str:
    """Return what the checkpoint calls a module of the model: what its weight is called in the source's files.

    Where that does not end in ".weight", the model's name, which transformers reads as well.
    """
    stored, suffix = model.names.stored(f"{name}.weight"), ".weight"
    return stored.removesuffix(suffix) if stored.endswith(suffix) else name


def write_part(
    stem: Path, model: FloatModel, layer: int | None, solved: Mapping[str, QuantizedWeight], config: QuantizeConfig
) -> Checkpoint:
    """Write a block, packed, with all its other tensors; return what is read back, the same to the bit.

    It is in memory; None is the output layer, whose other tensors are left to `assemble`. `stem` begins the names of
    the files, `solved` is by name in the model.

    Raises:
        ConversionError, ShapeError: A weight that the format cannot hold.
        CheckpointError: A tensor reads back differently from what was written.
    """
    layers = {stored_module(model, name): weight for name, weight in solved.items()}
    others = {} if layer is None else dict(model.others(layer, solved.keys()))
    specs = {name: LayerSpec.of(weight) for name, weight in layers.items()}
    part = _opened(write_files(stem, _packed(layers, others, config)), specs, config)
    for name, tensor in others.items():
        check_same(name, part.tensor(name), tensor)
    for name, weight in layers.items():
        check_written(name, part.weight(name), weight)
    return part


def record_of(part: Checkpoint) -> dict[str, Any]:
    """Return what `open_part` and `assemble` must know of a part, as plain values for JSON."""
    return {
        "digests": {file.name: digest(file) for file in part.tensors.files},
        "layers": {name: dataclasses.asdict(spec) for name, spec in part.layers.items()},
        "matrices": matrices(part.other_names, part.tensors),
    }


def open_part(folder: Path, record: Mapping[str, Any], config: QuantizeConfig) -> Checkpoint:
    """Open what an earlier process wrote of a block."""
    return _opened([folder / file for file in record["digests"]], _specs([record]), config)


def assemble(
    folder: Path,
    records: Sequence[Mapping[str, Any]],
    model: FloatModel,
    config: QuantizeConfig,
    tokenizer: Any | None,
    max_shard_bytes: int,
) -> Path:
    """Make a checkpoint, but for its report, of all parts and of what stands outside them; return its directory.

    It is made in `folder`, where the parts are of which `records` tell, in order. CheckpointError where it does not
    read back as what was solved.
    """
    specs, directory = _specs(records), folder / "checkpoint"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    rest = ((name, tensor) for name, tensor in model.others(None, ()) if name.removesuffix(".weight") not in specs)
    parts = [folder / file for record in records for file in record["digests"]]
    outside = Shards.of_files(write_files(folder / "outside", rest, max_shard_bytes))
    join_files([*parts, *outside.files], directory, max_shard_bytes)
    floats = [*(name for record in records for name in record["matrices"]), *matrices(outside.where, outside)]
    layout = find_format(config.format)
    quantization = layout.write_config(config, specs, floats)
    if model.passthrough:
        quantization.setdefault("meta", {})["passthrough_tensors"] = model.passthrough
    own = model.model
    model_config = json.loads(own.config.to_json_string())
    model_config["architectures"] = model_config.get("architectures") or [type(own).__name__]
    generation = json.loads(own.generation_config.to_json_string()) if own.can_generate() else None
    write_configs(directory, quantization, model_config, generation, tokenizer)
    model.copy_files(directory)
    if open_checkpoint(directory).layers != specs:
        raise CheckpointError(f"{directory} reads back with other quantized layers than were written")
    if layout.finish is not None:
        layout.finish(directory)
    return directory


def replace_weights(checkpoint: Checkpoint, weights: Mapping[str, QuantizedWeight]) -> None:
    """Put other weights of the same shapes in the places of a checkpoint's layers, file by file; read them back."""

    def tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
        layer, packed = "", dict[str, Tensor]()
        for full_name in (name for name, where in checkpoint.tensors.where.items() if where == file):
            name, _, key = full_name.rpartition(".")
            if name not in weights or key not in checkpoint.format.suffixes:
                yield full_name, checkpoint.tensor(full_name)
                continue
            if name != layer:
                layer, packed = name, checkpoint.format.pack(weights[name])
            yield full_name, packed[key]

    for file in checkpoint.tensors.files:
        (written,) = write_files(file.with_name(f".{file.stem}"), tensors(file), max_bytes=1 << 62)
        written.rename(file)
    again = open_checkpoint(checkpoint.path)
    for name, weight in weights.items():
        check_written(name, again.weight(name), weight)


def _specs(records: Sequence[Mapping[str, Any]]) -> dict[str, LayerSpec]:
    return {name: LayerSpec(**spec) for record in records for name, spec in record["layers"].items()}


def _opened(files: Sequence[Path], specs: Mapping[str, LayerSpec], config: QuantizeConfig) -> Checkpoint:
    common: dict[str, Any] = {key: getattr(config, key) for key in ("format", "bits", "group_size", "sym", "desc_act")}
    return part_of_checkpoint(Shards.of_files(files), Declared(**common), specs, path=files[0].parent)


def _packed(
    layers: Mapping[str, QuantizedWeight], others: Mapping[str, Tensor], config: QuantizeConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a block, packed when its turn comes."""
    for name, weight in layers.items():
        try:
            tensors = find_format(config.format).pack(weight)
        except (ConversionError, ShapeError) as error:
            raise type(error)(f"{name}: {error}") from error
        yield from ((f"{name}.{key}", tensor) for key, tensor in tensors.items())
    yield from others.items()
