"""The checkpoint in the making: the part of every block as it is finished, and in the end the whole of all parts.

What is written runs before it counts: a block is read back from its files and run on its packed layers.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError
from .export.checkpoint import Checkpoint, check_written, matrices, open_checkpoint, write_configs
from .export.formats import Declared, LayerSpec, find_format
from .export.shards import Shards, check_same, digest, join_files, write_files
from .loading import install
from .model import FloatModel
from .quantizer.config import QuantizeConfig
from .quantizer.quantized import QuantizedWeight
from .solving import naming

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far outputs may differ, relative to their norm: layers that run in other kernels round and sum in other ways."""


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


def check_block(
    model: FloatModel,
    layer: int,
    part: Checkpoint,
    names: Sequence[str],
    run: Callable[[nn.Module], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Build block `layer` from its files, as `load` would, and compare what it computes with what the block computes.

    The block of `model` has the solutions in place, and `part` is what was written of it. `names` are its quantized
    Linears, by their names in the block; `run` gives what leaves a block of some tokens.

    Kernels round in their own ways, and where a router then chooses another expert, a token comes out quite different.
    So a difference counts if some Linear computes something else of what the block gave it, or if most tokens differ.

    Raises:
        CheckpointError: The block cannot run, or computes something else; the first Linear that differs is named.
    """
    block, path = model.blocks[layer], model.paths[layer]
    model.model.set_submodule(path, _without_weights(block))
    try:
        backend = "torch" if device.type == "cpu" else "auto"
        install(model.empty, part, device=device, dtype=dtype, backend=backend, cast=True)
        packed = model.model.get_submodule(path)
    finally:
        model.model.set_submodule(path, block)
    try:
        found, expected = run(packed), run(block)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        cause = error.__cause__ or error
        raise CheckpointError(
            f"block {layer} cannot run on its quantized layers ({type(cause).__name__}: {cause}); leave what is at "
            "fault in floating point with an override, and report this model"
        ) from error
    if not differs(found, expected, dtype):
        return
    ours, theirs = (_calls(each, names, run) for each in (packed, block))
    if not most_differ(found, expected, dtype) and not any(
        differs(packed.get_submodule(name)(x), output, dtype) for name, (x, output) in theirs.items()
    ):
        return
    first = next((name for name in theirs if name not in ours or differs(ours[name][1], theirs[name][1], dtype)), None)
    raise CheckpointError(
        f"block {layer} computes something else on its quantized layers than in the pipeline"
        + (f", first in {first}" if first is not None else "")
        + "; leave what is at fault in floating point with an override, and report this model"
    )


def differs(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs differ by more than `TOLERANCE` allows for activations of this dtype, or are not finite."""
    if found.shape != expected.shape:
        return True
    distance, size = (found - expected).double().norm(), expected.double().norm()
    return not float(distance) <= TOLERANCE[dtype] * float(size)


def most_differ(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs of most tokens, (..., width), differ by more than `TOLERANCE` allows, or any are not finite."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return True
    distance, size = (each.double().norm(dim=-1) for each in (found - expected, expected))
    seen = size > 0  # others are padding
    return bool(seen.any()) and not float((distance[seen] / size[seen]).median()) <= TOLERANCE[dtype]


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
    tensors, declared = Shards.of_files(files), Declared(**common)
    return Checkpoint(path=files[0].parent, declared=declared, layers=dict(specs), tensors=tensors)


def _packed(
    layers: Mapping[str, QuantizedWeight], others: Mapping[str, Tensor], config: QuantizeConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a block, packed when its turn comes."""
    for name, weight in layers.items():
        with naming(name):
            tensors = find_format(config.format).pack(weight)
        yield from ((f"{name}.{key}", tensor) for key, tensor in tensors.items())
    yield from others.items()


def _calls(
    block: nn.Module, names: Sequence[str], run: Callable[[nn.Module], Tensor]
) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return what the first call of each of some modules takes and gives, in the order of the calls."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, _: nn.Module, given: Any, named: Mapping[str, Any], output: Tensor) -> None:
        if name not in calls:
            calls[name] = (*given, *named.values())[0].clone(), output.clone()

    with ExitStack() as hooks:
        for name in names:
            module = block.get_submodule(name)
            hooks.callback(module.register_forward_hook(partial(record, name), with_kwargs=True).remove)
        run(block)
    return calls


def _without_weights(block: nn.Module) -> nn.Module:
    """Return a copy of `block` whose parameters are on the meta device."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for parameter in block.parameters()
    }
    return copy.deepcopy(block, memo)
