"""Checkpoint directories: opened without loading them, and given the files that readers look at.

Reads what gptqkit, GPTQModel, AutoGPTQ, AutoAWQ, optimum, llm-compressor and auto-round write. Configs, headers and
g_idx are checked; tensors stay on disk.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..hub import Remote, at_home, fetch
from ..modes import in_plain_modes
from ..quantizer.quantized import QuantizedWeight
from .autoround import PACKING, plain_config
from .files import check_folder
from .formats import Declared, Format, LayerSpec, declared_format, find_format, find_quantization, without_quantization
from .modules import counts_as_matrix
from .shards import Shards, check_same, read_json, some, write_json

REPORT = "quantization_report.json"
_TIMES = ("seconds", "tokens_per_second")  # equal jobs write equal files


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An opened checkpoint, or some of its files.

    Attributes:
        path: Its directory.
        model_config: config.json.
        quantization_config: The quantization config as it stands in the file; auto-round's own after
            `plain_config`.
        declared: What it declares.
        layers: Every quantized layer by name, in the order of the files.
        tensors: All tensors by name.
    """

    path: Path
    model_config: dict[str, Any] = field(default_factory=dict, repr=False)
    quantization_config: dict[str, Any] = field(default_factory=dict, repr=False)
    declared: Declared
    layers: dict[str, LayerSpec] = field(repr=False)
    tensors: Shards = field(repr=False)

    @cached_property
    def plain_names(self) -> list[str]:
        """Names of all tensors that hold no quantized weight: `other_names`, and the biases of quantized layers."""
        packed = {f"{name}.{key}" for name in self.layers for key in self.format.suffixes}
        return [name for name in self.tensors.where if name not in packed]

    @cached_property
    def other_names(self) -> list[str]:
        """Names of all tensors that belong to no quantized layer."""
        biases = {f"{name}.bias" for name in self.layers}
        return [name for name in self.plain_names if name not in biases]

    @property
    def float_names(self) -> list[str]:
        """What its tensors would be called if none were quantized."""
        return [*(f"{name}.weight" for name in self.layers), *self.plain_names]

    @property
    def format(self) -> Format:
        """The format that it is in."""
        return find_format(self.declared.format)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor called `name`, mapped from its file: nothing is read before its values are used."""
        return self.tensors.get(name)

    @in_plain_modes
    def weight(self, name: str) -> QuantizedWeight:
        """Return the codes, scales and offsets of a quantized layer; CheckpointError for values of no use."""
        self._check(name)
        return self.format.unpack(name, self.tensors.below(name, self.format.suffixes), self.layers[name])

    def bias(self, name: str) -> Tensor | None:
        """Return the bias of a quantized layer, where it has one; CheckpointError for values of no use."""
        self._check(name)
        bias = self.tensors.below(name, ("bias",)).get("bias")
        if bias is not None and not bias.isfinite().all():
            raise CheckpointError(f"{name}.bias holds NaN or infinity; fetch the files again")
        return bias

    def _check(self, name: str) -> None:
        if name not in self.layers:
            raise CheckpointError(f"{self.path} has no quantized layer {name!r}; it has {some(self.layers)}")


@in_plain_modes
def open_checkpoint(path: Path | str, *, revision: str | None = None, weights: bool = True) -> Checkpoint:
    """Open the checkpoint in a directory, or a GGUF file, checking configs, headers, shapes, dtypes and g_idx.

    A `path` that is the id of a model on the Hub is fetched into the Hub's cache, of the branch, tag or commit
    `revision`. Without `weights`, tensors that are not in the cache yet are on the meta device, and g_idx is taken for
    what the config declares.

    Raises:
        DatasetUnavailableError: There is no such directory, nor such a model on the Hub.
        CheckpointError: A file is missing, damaged, contradictory or of an unknown format; the message names the file
            or the tensor.
        OSError: A file that cannot be read.
    """
    name, path = str(at_home(path)), fetch(path, revision, weights=weights, gguf=True)
    if path.is_file():
        return _open_file(path)
    remote = None if weights or Path(name).is_dir() else Remote(name, path.name)
    check_folder(path)
    model_config = read_json(path / "config.json")
    values = read_quantization_config(path, model_config)
    if not values:
        raise CheckpointError(
            f"{path} is not quantized: config.json has no quantization_config and there is no quantize_config.json"
        )
    declared = find_format(declared_format(values, str(path))).read_config(values, str(path))
    tensors = Shards.of_folder(path, values.get("model_file_base_name"), remote)
    return whole_checkpoint(tensors, declared, path, model_config, values)


def whole_checkpoint(
    tensors: Shards, declared: Declared, path: Path, model_config: dict[str, Any], values: dict[str, Any]
) -> Checkpoint:
    """Return all tensors of the folder `path` as a checkpoint; `declared` is what the quantization config says."""
    layers = _layers(tensors, declared)
    if not layers:
        suffix = find_format(declared.format).suffixes[0]
        raise CheckpointError(f"no tensor of {path} is quantized: none ends in .{suffix}")
    return Checkpoint(
        path=path,
        model_config=model_config,
        quantization_config=values,
        declared=declared,
        layers=layers,
        tensors=tensors,
    )


def _open_file(path: Path) -> Checkpoint:
    """Open a GGUF file by itself, which may hold layers in floating point only."""
    tensors = Shards.of_files([path])
    declared = Declared(format="gguf", bits=4, group_size=32, sym=True, desc_act=False)
    layers = _layers(tensors, declared)
    if layers:
        first = next(iter(layers.values()))
        sym = all(spec.sym for spec in layers.values())
        declared = dataclasses.replace(declared, bits=first.bits, group_size=first.group_size, sym=sym)
    values = {"quant_method": "gguf"}
    return Checkpoint(path=path, quantization_config=values, declared=declared, layers=layers, tensors=tensors)


def _layers(tensors: Shards, declared: Declared) -> dict[str, LayerSpec]:
    """Return every quantized layer."""
    layers: dict[str, LayerSpec] = {}
    layout = find_format(declared.format)
    for full_name in tensors.where:
        name, _, suffix = full_name.rpartition(".")
        if suffix in layout.suffixes and name not in layers:
            layers[name] = layout.spec(name, tensors.below(name, (*layout.suffixes, "bias")), declared)
            if f"{name}.weight" in tensors.where:
                raise CheckpointError(f"{name} has a weight beside {full_name}; remove the one that is not meant")
    return layers


def check_written(name: str, written: QuantizedWeight, solved: QuantizedWeight) -> None:
    """Raise CheckpointError where a weight that was read back is not, bit for bit, what was to be written."""
    for part in ("codes", "scale", "offset", "group_index"):
        check_same(f"the {part} of {name}", getattr(written, part), getattr(solved, part))


def write_configs(
    directory: Path,
    quantization: Mapping[str, Any],
    model_config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    tokenizer: Any,
) -> None:
    """Write what readers look at beside the tensors, from the quantization config and the model's; no local paths."""
    plain = without_quantization(model_config)
    write_json(directory / "config.json", {**_public_config(plain), "quantization_config": dict(quantization)})
    write_json(directory / "quantize_config.json", quantization)
    if generation_config is not None:
        write_json(directory / "generation_config.json", _without_paths(generation_config))
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(str(directory))
        except Exception as error:
            if type(error) is not Exception:  # as Rust raises whatever happens to a file
                raise
            raise OSError(f"the tokenizer could not be written to {directory}: {error}") from error
        _clean_tokenizer_config(directory / "tokenizer_config.json")


def write_report(directory: Path, report: Mapping[str, Any]) -> None:
    """Write quantization_report.json: no local paths or times, None for what JSON cannot hold."""
    published = _published(report)
    if published.get("model"):
        published["model"] = public_name(published["model"])
    for row in published.get("perplexity") or ():
        row["dataset"] = public_name(row["dataset"])
    write_json(directory / REPORT, published)


def _is_file(name: object) -> bool:
    return isinstance(name, Path) or (isinstance(name, str) and os.path.isfile(name))


def public_name(name: object) -> str:
    """Return the name of a file or folder without the folders around it, or an id of the Hub as it is.

    A folder of the Hub's cache is what its repository is called, several files are their names, and data what its type
    is.
    """
    if isinstance(name, (list, tuple)) and name and all(map(_is_file, name)):
        return ", ".join(map(public_name, name))
    if not isinstance(name, (str, Path)):
        return type(name).__name__
    text = str(name)
    if not (Path(text).is_absolute() or text.startswith((".", "~")) or os.path.exists(text)):  # or too long a text
        return text
    path = Path(text).resolve()
    repository = path.parents[1].name if path.parent.name == "snapshots" else ""
    return repository.removeprefix("models--").replace("--", "/") if repository.startswith("models--") else path.name


def read_quantization_config(path: Path, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return quantization_config of config.json, or quantize_config.json; where both are there, they must agree.

    AutoAWQ's first files have a quant_config.json instead. Empty where there is none. auto-round's own is put in other
    programs' terms.
    """
    inside, old = find_quantization(model_config), path / "quant_config.json"
    if inside is None and old.exists():
        inside = {"quant_method": "awq", **read_json(old)}
    beside = read_json(path / "quantize_config.json") if (path / "quantize_config.json").exists() else None
    if inside is not None and not isinstance(inside, dict):
        raise CheckpointError(f"{path / 'config.json'}: quantization_config is no JSON object; fetch the file again")
    if inside is not None and beside is not None:
        for key in ("bits", "group_size", "checkpoint_format"):
            if key in inside and key in beside and inside[key] != beside[key]:
                raise CheckpointError(
                    f"{path}: config.json says {key} {inside[key]!r} but quantize_config.json says {beside[key]!r}; "
                    "correct the wrong one"
                )
    return plain_config({**(beside or {}), **(inside or {})}, str(path))


def lasting_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization config without what is true of the files only that it was read from."""
    return {key: value for key, value in values.items() if key not in ("model_file_base_name", PACKING)}


def _published(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _published(item) for key, item in value.items() if key not in _TIMES}
    if isinstance(value, list | tuple):
        return [_published(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _public_config(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers 4 and 5 read it: version 5 renamed the keys of rope and of the dtype."""
    values = _without_paths(model_config)
    values |= {
        key: _public_config(inner) for key, inner in values.items() if isinstance(inner, dict) and "model_type" in inner
    }
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and str(values.get("model_type")).startswith("gemma3"):
        local = rope.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            values.setdefault("rope_local_base_freq", local["rope_theta"])
        rope = rope.get("full_attention", rope)
    if isinstance(rope, dict) and "rope_theta" in rope:
        names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}  # of GPT-NeoX
        for old in ("rope_theta", "partial_rotary_factor", *(names if values.get("model_type") == "gpt_neox" else ())):
            if names.get(old, old) in rope:
                values.setdefault(old, rope[names.get(old, old)])
        if rope.get("rope_type", "default") != "default":
            values.setdefault("rope_scaling", rope)
    if values.get("dtype") is not None:
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
        values["torch_dtype"] = values["dtype"]
    return values


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "name_or_path")}


def _clean_tokenizer_config(path: Path) -> None:
    """Leave out where the tokenizer came from on this machine, and write the rest so that every version reads it."""
    private = ("name_or_path", "tokenizer_file", "is_local", "local_files_only")
    if path.exists():
        values = json.loads(path.read_bytes())
        kept = {key: value for key, value in values.items() if key not in private}
        if kept.get("tokenizer_class") == "TokenizersBackend":  # version 5's name, which version 4 refuses
            kept["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(kept.get("extra_special_tokens"), list):
            kept["additional_special_tokens"] = kept.pop("extra_special_tokens")
        code = kept.get("auto_map")
        if isinstance(code, dict) and isinstance(code.get("AutoTokenizer"), str):  # which version 5 writes, not reads
            kept["auto_map"] = {**code, "AutoTokenizer": [code["AutoTokenizer"], None]}
        if kept != values:
            write_json(path, kept)


def matrices(names: Iterable[str], tensors: Shards) -> list[str]:
    """Return those of `names` whose tensors have two dimensions, and stacks of experts' matrices."""
    return [name for name in names if counts_as_matrix(name, tensors.meta(name).ndim)]
