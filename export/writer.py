"""Quantized weights and the rest of a model -> a GPTQ checkpoint directory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import CheckpointError, ConversionError, ShapeError
from ..quantizer.config import Format, QuantizeConfig
from ..quantizer.quantized import QuantizedWeight
from ..version import __version__
from .card import model_card, pipeline_tag
from .gptq import from_tensors, to_tensors
from .quantization_config import LayerFacts, quantization_json
from .reader import open_checkpoint
from .shards import same_bits
from .work import WorkDirectory

MAX_SHARD_BYTES = 4 << 30
REPORT = "quantization_report.json"
_TIMES = ("seconds", "tokens_per_second")  # equal jobs write equal files


class SavesItself(Protocol):
    """A tokenizer, as transformers has them."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the tokenizer's files into a directory."""


def write_part(
    work: WorkDirectory,
    name: str,
    weights: Mapping[str, QuantizedWeight],
    other_tensors: Mapping[str, Tensor],
    config: QuantizeConfig,
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write a part of a checkpoint into its work directory, read it back, and let it count.

    Args:
        work: The work directory.
        name: Name of the part.
        weights: Its quantized modules by their full names in the checkpoint.
        other_tensors: Its other tensors.
        config: The settings; `config.format` is the format written.
        record: What the caller wants to remember with the part.

    Raises:
        ConversionError: Zeros that the format cannot hold.
        ShapeError: A module whose dimensions cannot be packed, or tensors given twice.
        CheckpointError: A tensor reads back differently from what was written.
        OSError: The disk refused; the part does not count.
    """
    _check_names(weights, other_tensors)
    path = work.part(name)
    _save(path, dict(_all_tensors(weights, other_tensors, config)))
    _verify(path, weights, other_tensors, config.format)
    facts = {
        module: {
            "bits": weight.bits,
            "group_size": weight.group_size,
            "in_features": weight.in_features,
            "sym": weight.sym,
            "trivial_group_index": weight.trivial_group_index,
        }
        for module, weight in weights.items()
    }
    matrices = [module for module, tensor in other_tensors.items() if tensor.ndim == 2]
    work.commit(name, {"layers": facts, "matrices": matrices, "data": dict(record or {})})


def finish_checkpoint(
    work: WorkDirectory,
    *,
    config: QuantizeConfig,
    model_config: Mapping[str, Any],
    report: Mapping[str, Any],
    tokenizer: SavesItself | None = None,
    generation_config: Mapping[str, Any] | None = None,
    carried: Sequence[str] = (),
    copy_files: Callable[[Path], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    measure: Callable[[Path], Mapping[str, Any]] | None = None,
) -> None:
    """Make the checkpoint of all parts in `work`, read every tensor back, and only then let it appear under its name.

    Args:
        work: A work directory with all parts.
        config: The settings.
        model_config: config.json of the model; the quantization config is added and local paths are left out.
        report: quantization_report.json; times are left out, so that equal jobs write equal files.
        tokenizer: Saved beside the weights.
        generation_config: generation_config.json.
        carried: Names of tensors that the model has no place for; readers may ignore them.
        copy_files: Called with the directory, to put further files there; files of ours that exist already stay.
        max_shard_bytes: Start a new file before one grows beyond this; a larger tensor gets a file of its own.
        measure: Called with the complete, verified directory; what it returns is merged into the report, before report
            and model card are written.

    Raises:
        CheckpointError: A tensor reads back differently from what was written.
        OSError: The disk refused; the parts stay, so that the job can go on.
    """
    layers = {name: LayerFacts(**facts) for record in work.records for name, facts in record["layers"].items()}
    matrices = [name for record in work.records for name in record["matrices"]]
    quantization = quantization_json(config, layers, matrices, __version__, carried)
    directory = work.assemble(max_shard_bytes)
    write_json(directory / "config.json", {**_public_config(model_config), "quantization_config": quantization})
    write_json(directory / "quantize_config.json", quantization)
    if generation_config is not None:
        write_json(directory / "generation_config.json", _without_paths(generation_config))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))
        _clean_tokenizer_config(directory / "tokenizer_config.json")
    if copy_files is not None:
        copy_files(directory)
    if set(open_checkpoint(directory).layers) != set(layers):
        raise CheckpointError(f"{directory} reads back with other quantized layers than were written")
    measured = dict(measure(directory)) if measure is not None else {}
    full_report = public_report({**report, **measured})
    write_json(directory / REPORT, full_report)
    card = model_card(full_report, quantization, pipeline_tag(directory))
    (directory / "README.md").write_text(card, encoding="utf-8", newline="\n")
    work.finish()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as indented JSON that ends in a newline, the same on every system."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def public_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report for a published file: without local paths and times, and None for numbers that JSON cannot hold."""
    report = _published(report)
    measured = [{**row, "dataset": public_name(row["dataset"])} for row in report.get("perplexity") or []]
    return {
        **report,
        **({"model": public_name(report["model"])} if report.get("model") else {}),
        **({"perplexity": measured} if measured else {}),
    }


def _published(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _published(item) for key, item in value.items() if key not in _TIMES}
    if isinstance(value, list | tuple):
        return [_published(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def public_name(name: object) -> str:
    """The name of a file or folder without the folders around it, or an id of the Hub as it is."""
    text = str(name)
    local = Path(text).is_absolute() or text.startswith((".", "~")) or Path(text).exists()
    return Path(text).resolve().name if local else text


def _public_config(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 and 5 read it: version 5 renamed the keys of rope and of the dtype."""
    values = _without_paths(model_config)
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        values.setdefault("rope_theta", rope["rope_theta"])
        if rope.get("rope_type", "default") != "default":
            values.setdefault("rope_scaling", rope)
    if "dtype" in values:
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
        values["torch_dtype"] = values["dtype"]
    return values


def _without_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in ("_name_or_path", "name_or_path")}


def _clean_tokenizer_config(path: Path) -> None:
    """Leave out where the tokenizer came from on this machine."""
    private = ("name_or_path", "tokenizer_file", "is_local", "local_files_only")
    if path.exists():
        values = json.loads(path.read_bytes())
        kept = {key: value for key, value in values.items() if key not in private}
        if kept != values:
            write_json(path, kept)


def _check_names(weights: Mapping[str, QuantizedWeight], other_tensors: Mapping[str, Tensor]) -> None:
    for name in other_tensors:
        module, _, key = name.rpartition(".")
        if module in weights and key != "bias":
            raise ShapeError(f"{name} was given beside the quantized {module}; leave it out of the other tensors")
    seen: dict[int, str] = {}
    for name, tensor in other_tensors.items():
        first = seen.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if first != name and other_tensors[first].shape == tensor.shape:
            raise ShapeError(f"{name} and {first} are one tensor; give tied tensors once")


def _all_tensors(
    weights: Mapping[str, QuantizedWeight], other_tensors: Mapping[str, Tensor], config: QuantizeConfig
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file by name, made when its turn comes."""
    for name, weight in weights.items():
        try:
            tensors = to_tensors(weight, config.format)
        except ConversionError as error:
            raise ConversionError(f"{name}: {error}") from error
        except ShapeError as error:
            raise ShapeError(f"{name}: {error}") from error
        for key, tensor in tensors.items():
            yield f"{name}.{key}", tensor
    yield from other_tensors.items()


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file. Clones let go of memory that a tensor shares with others."""
    ready = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().nbytes() != own.nbytes or own.data_ptr() in seen:
            own = own.clone()
        seen.add(own.data_ptr())
        ready[name] = own
    try:
        save_file(ready, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def _verify(
    path: Path,
    weights: Mapping[str, QuantizedWeight],
    other_tensors: Mapping[str, Tensor],
    format: Format,  # noqa: A002
) -> None:
    """Read everything back and compare it, bit for bit, with what was to be written."""
    with safe_open(path, framework="pt") as file:
        for name, weight in weights.items():
            found = from_tensors(
                name,
                {key: file.get_tensor(f"{name}.{key}") for key in ("qweight", "qzeros", "scales", "g_idx")},
                bits=weight.bits,
                group_size=weight.group_size,
                sym=weight.sym,
                format=format,
            )
            for part in ("codes", "scale", "zero", "group_index"):
                if not same_bits(getattr(found, part), getattr(weight, part)):
                    raise CheckpointError(f"the {part} of {name} reads back differently; disk or memory is faulty")
        for name, tensor in other_tensors.items():
            if not same_bits(file.get_tensor(name), tensor):
                raise CheckpointError(f"{name} reads back differently; disk or memory is faulty")
