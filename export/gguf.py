"""GGUF: one file that llama.cpp runs, with the tokenizer and all settings inside.

While a checkpoint is made, a layer is one tensor of safetensors files, `NAME.q4_k` or of another block type, uint8
(out, bytes): whole blocks as the file will hold them. At the end `write_model` makes model.gguf of it, and `GgufFile`
(`gguf_file.py`) reads that, or what llama.cpp's tools wrote, under the same names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ArchitectureError, CheckpointError, ConfigError, ConversionError, ShapeError
from ..quantizer.config import QuantizeConfig
from ..quantizer.gptq import solve_rtn
from ..quantizer.quantized import QuantizedWeight
from ..quantizer.superblock import Float16Offset
from .blocks import BLOCKS, BlockType, decode, encode, transcribe
from .files import read_tokenizer
from .formats import Declared, Format, LayerSpec
from .gguf_file import FLOATS, GgufFile
from .gguf_model import Architecture, architecture_of, counts, in_pairs, metadata, module_name, rope_factors, split_name
from .gguf_tokenizer import tokenizer_metadata
from .modules import meta_of, writer_of
from .recipes import RECIPES, TYPES, choose_type, grid_settings
from .shards import Shards, check_same, read_json

FILE = "model.gguf"

_ROWS = 2048  # of an embedding, rounded at a time


def write_model(directory: Path) -> None:
    """Make model.gguf of the safetensors files, the config and the tokenizer in a directory, and remove the former.

    Embedding and output layer are rounded to the type that the recipe gives them; without a recipe, and all else that
    is no quantized layer, they stay as they are, vectors in float32. What was written is read back and compared.

    Raises:
        ConversionError: A tensor that the architecture has no name for, or a tokenizer that is not written here.
        CheckpointError: A tensor reads back differently.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType  # here, because it takes long

    config, tensors = read_json(directory / "config.json"), Shards.of_folder(directory)
    architecture, recipe = architecture_of(config), config["quantization_config"].get("type")
    values = {**metadata(config), **tokenizer_metadata(read_tokenizer(directory), config["vocab_size"])}
    sources = _sources(tensors.where, architecture)
    tied = not any(name.startswith("lm_head.") for name in tensors.where)  # quantized, it has no weight
    factors = rope_factors(config)
    logging.getLogger("gguf").setLevel(logging.ERROR)
    writer = GGUFWriter(directory / FILE, architecture.name)
    writer.add_quantization_version(2)
    if recipe in RECIPES:
        writer.add_file_type(LlamaFileType[f"MOSTLY_{recipe}"])
    add: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        add[type(value)](key, value)
    for name, each in factors.items():
        writer.add_tensor_info(name, each.shape, np.dtype(np.float32), each.nbytes)
    for name, names in sources.items():
        number, planned = _content([(each, tensors.meta(each)) for each in names], config, recipe, tied=tied)
        kind = GGMLQuantizationType(number)
        writer.add_tensor_info(name, planned.shape, np.dtype(np.uint8), planned.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in factors.values():
        writer.write_tensor_data(each.numpy())
    for names in sources.values():
        _, content = _content([(each, tensors.get(each)) for each in names], config, recipe, tied=tied)
        writer.write_tensor_data(content.numpy())
    writer.close()
    _check(directory / FILE, tensors, sources, recipe)
    for file in tensors.files:
        file.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)


def _content(
    parts: Sequence[tuple[str, Tensor]], config: Mapping[str, Any], recipe: str | None, *, tied: bool
) -> tuple[int, Tensor]:
    """Return ggml's number of the type of one tensor of the file, and its bytes, uint8, rows in llama.cpp's order.

    It is made of stored tensors with their names, several where experts are stacked. On the meta device they tell the
    shape in bytes.
    """
    (first_name, first), *others = parts
    module, _, suffix = first_name.rpartition(".")
    if any(
        (each.shape, each.dtype, other.rpartition(".")[2]) != (first.shape, first.dtype, suffix)  # types can be as long
        for other, each in others
    ):
        raise ConversionError(f"{module} and others that GGUF stacks differ in shape or type: quantize them alike")
    architecture, whole = architecture_of(config), torch.stack([each for _, each in parts]) if others else first
    kind = BLOCKS.get(suffix) or _outer_kind(module, first, recipe, tied=tied)
    if kind is None:
        dtype = _outer_dtype(module, first)
        number = next((number for number, each in FLOATS.items() if each == dtype), None)
        if number is None:
            raise ConversionError(f"{first_name} is {dtype}, which is not written as GGUF here")
        whole = whole.to(dtype)  # norms are in float32, and so is their sum
        whole = whole + architecture.shift if architecture.shift and "norm" in module else whole
    else:
        number, whole = kind.number, whole if suffix in BLOCKS else rounded(whole, kind)
    last = module.rpartition(".")[2]
    heads, shared = config["num_attention_heads"], config.get("num_key_value_heads")
    if architecture.rotated and last in ("q_proj", "k_proj"):
        whole = in_pairs(whole, heads if last == "q_proj" else shared or heads)
    return number, whole.contiguous().view(torch.uint8)


def _outer_kind(module: str, meta: Tensor, recipe: str | None, *, tied: bool) -> BlockType | None:
    """Return the type to which a recipe rounds the embedding and the output layer; None for what stays as it is."""
    place = {"model.embed_tokens": "token_embd", "lm_head": "output"}.get(module)
    if place is None or recipe is None or meta.dim() != 2 or meta.shape[1] % 32:
        return None
    return BLOCKS[choose_type(recipe, "output" if tied else place, meta.shape[1])]


def _outer_dtype(module: str, meta: Tensor) -> torch.dtype:
    """Return the dtype of what stays in floating point: vectors and routers are in float32."""
    return meta.dtype if meta.dim() == 2 and not module.endswith(".gate") else torch.float32


def _float_nbytes(name: str, meta: Tensor, recipe: str | None, tied: bool) -> int:
    module = name.removesuffix(".weight")
    kind = _outer_kind(module, meta, recipe, tied=tied)
    if kind is None:
        return meta.numel() * _outer_dtype(module, meta).itemsize
    return meta.numel() // kind.columns * kind.size


def rounded(weight: Tensor, kind: BlockType) -> Tensor:
    """Return a matrix, (out, in) in any float dtype, rounded to blocks, (out, bytes) uint8; on the meta device, too."""
    if weight.is_meta:
        return weight.new_empty(len(weight), weight.shape[1] // kind.columns * kind.size, dtype=torch.uint8)
    how = QuantizeConfig(method="rtn", grid="mse", format="gguf").with_type(kind.name)
    parts = []
    for start in range(0, weight.shape[0], _ROWS):
        solved = solve_rtn(weight[start : start + _ROWS].float(), None, how, kind.snap).weight
        blocks = encode(kind, solved)
        if blocks is None:
            raise ConversionError(f"rows {start} and after do not fit into blocks {kind.name}; report this model")
        parts.append(blocks)
    return torch.cat(parts)


def _sources(names: Iterable[str], architecture: Architecture) -> dict[str, list[str]]:
    """Return what a file is to hold of stored tensors, by llama.cpp's names: each of one, or of those of all experts.

    ConversionError for a tensor without a name there.
    """
    found: dict[str, dict[int, str]] = {}
    for name in names:
        module, _, suffix = name.rpartition(".")
        place = split_name(module, architecture.modules)
        if name.endswith(".rotary_emb.inv_freq"):  # which every model makes by itself
            continue
        if place is None:
            raise ConversionError(f"{name} has no name in llama.cpp's {architecture.name}; choose another format")
        written = f"{place[0]}.{'bias' if suffix == 'bias' else 'weight'}"
        found.setdefault(written, {})[place[1] or 0] = name
    return {written: [sources[number] for number in sorted(sources)] for written, sources in found.items()}


def _check(file: Path, tensors: Shards, sources: Mapping[str, list[str]], recipe: str | None) -> None:
    """Compare what was written with what was to be written, but for what was rounded on the way."""
    found = GgufFile(file)
    for name in (name for names in sources.values() for name in names):
        module, _, suffix = name.rpartition(".")
        stem, expert = split_name(module, found.architecture.modules) or ("", None)
        if recipe is not None and suffix == "weight" and module in ("model.embed_tokens", "lm_head"):
            continue
        read = found.get_tensor(f"{str(module_name(stem, found.architecture.modules)).format(expert)}.{suffix}")
        wanted = tensors.get(name).to(read.dtype)
        if found.architecture.shift and "norm" in module:
            wanted = wanted + found.architecture.shift - found.architecture.shift
        check_same(f"{name} in {file}", read, wanted)


def choose(config: QuantizeConfig, name: str, columns: int, model_config: Mapping[str, Any]) -> QuantizeConfig:
    """Return the settings of one Linear with the block type that the recipe gives it.

    Raises:
        ConfigError: No recipe is given.
        ArchitectureError: A model that is not written here.
    """
    if config.type is None:
        raise ConfigError(f"the format gguf needs a type, such as Q4_K_M: one of {', '.join(TYPES)}")
    place = split_name(name, architecture_of(model_config).modules)
    if place is None:
        raise ArchitectureError(
            f"{name} has no name in llama.cpp's {model_config['model_type']}; choose another format"
        )
    *block, stem = place[0].split(".")
    layer = int(block[1]) if block else 0
    return config.with_type(choose_type(config.type, stem, columns, layer=layer, **counts(model_config)))


def accept(model_config: Mapping[str, Any], tokenizer: Any, names: Iterable[str]) -> None:
    """Raise ArchitectureError or ConversionError for a model, or a tokenizer, that cannot be written."""
    _sources(names, architecture_of(model_config))
    metadata(model_config)
    tokenizer_metadata(tokenizer, model_config["vocab_size"])


def _check_shape(spec: LayerSpec) -> None:
    if spec.in_features % 32:
        raise ShapeError(f"it has {spec.in_features} columns, and GGUF's blocks need multiples of 32")


def _nbytes(spec: LayerSpec) -> int:
    kind = BLOCKS[str(spec.type)]
    return spec.out_features * (spec.in_features // kind.columns) * kind.size


def _pack(weight: QuantizedWeight) -> dict[str, Tensor]:
    kind, blocks = transcribe(weight)
    return {kind.name: blocks}


def _spec(name: str, tensors: Mapping[str, Tensor], declared: Declared) -> LayerSpec:  # noqa: ARG001
    """Return what a layer's blocks are, by their type and shape; CheckpointError where they cannot be."""
    (key, blocks), *more = ((key, tensor) for key, tensor in tensors.items() if key in BLOCKS)
    kind = BLOCKS[key]
    if more or blocks.dtype != torch.uint8 or blocks.ndim != 2 or not blocks.numel() or blocks.shape[1] % kind.size:
        raise CheckpointError(
            f"{name}.{key} is {blocks.dtype} {tuple(blocks.shape)}; one tensor of whole blocks of {kind.size} bytes is "
            "needed: fetch the file again"
        )
    columns = blocks.shape[1] // kind.size * kind.columns
    return LayerSpec(in_features=columns, out_features=blocks.shape[0], act_order=False, type=key, **grid_settings(key))


def _unpack(name: str, tensors: Mapping[str, Tensor], spec: LayerSpec) -> QuantizedWeight:  # noqa: ARG001
    key = next(key for key in tensors if key in BLOCKS)
    weight = decode(BLOCKS[key], tensors[key])
    if not (weight.scale.isfinite().all() and weight.offset.isfinite().all()):
        raise CheckpointError(f"{name}.{key} holds NaN or infinity; fetch the file again or quantize again")
    return weight


def _write_config(config: QuantizeConfig, layers: Mapping[str, LayerSpec], matrices: Sequence[str]) -> dict[str, Any]:  # noqa: ARG001
    """Return the quantization config of a folder with a GGUF file, which says everything itself."""
    common = {name: getattr(config, name) for name in ("type", "bits", "sym")}
    return {"quant_method": "gguf", **common, "group_size": config.group_size or -1, "meta": meta_of(config)}


def _read_config(values: Mapping[str, Any], where: str) -> Declared:
    bits, size = values.get("bits"), values.get("group_size")
    if type(bits) is not int or type(size) is not int:
        raise CheckpointError(f"{where}: bits or group_size is missing; fetch config.json again")
    common: dict[str, Any] = {"bits": bits, "group_size": None if size == -1 else size, "sym": bool(values.get("sym"))}
    return Declared(format="gguf", desc_act=False, writer=writer_of(values), **common)


GGUF = Format(
    suffixes=tuple(BLOCKS),
    snap=Float16Offset(),
    check=_check_shape,
    nbytes=_nbytes,
    pack=_pack,
    spec=_spec,
    unpack=_unpack,
    write_config=_write_config,
    read_config=_read_config,
    snaps={name: kind.snap for name, kind in BLOCKS.items()},
    choose=choose,
    accept=accept,
    finish=write_model,
    float_nbytes=_float_nbytes,
)
