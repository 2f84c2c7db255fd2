"""GPTQ version 1 <-> version 2: the same checkpoint with its zeros stored the other way."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, ConfigError, ConversionError
from ..quantizer.config import FORMATS, Format
from .card import model_card, pipeline_tag
from .gptq import ZERO_OFFSET, count_outside, encode_zeros
from .reader import Checkpoint, open_checkpoint
from .shards import PICKLES, read_json, same_bits
from .staging import staged
from .writer import REPORT, write_json


def convert(source: Path | str, target: Path | str, *, format: Format, overwrite: bool = False) -> None:  # noqa: A002
    """Write the checkpoint in `source` to `target` in the other format, without loss.

    Only the words of the zeros change: they have the same size in both formats, so the files are copied and patched,
    whatever their size, and every other tensor keeps its bytes. Configs are updated; our report and model card too. All
    other files are carried over, but for pickles, hidden files and
    linked folders.

    Args:
        source: A checkpoint directory.
        target: The directory to make.
        format: "gptq" or "gptq_v2".
        overwrite: Replace a quantized model that is there already, after the new one is complete.

    Raises:
        CheckpointError: `source` is damaged or no GPTQ checkpoint.
        ConversionError: `source` has that format already, or zeros that it cannot hold: version 1 cannot hold 0, and
            version 2 cannot hold 2^bits.
        ConfigError: An unknown format, or a target inside the source or around it.
        OutputExistsError: `target` exists, and `overwrite` is not set or it holds no quantized model.
        OSError: The disk refused; nothing is left behind.
    """
    source, target = Path(source), Path(target)
    if format not in FORMATS:
        raise ConfigError(f"format is {format!r}; choose one of {', '.join(FORMATS)}")
    inner, outer = source.resolve(), target.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise ConfigError(f"{target} and {source} lie in one another; choose a target elsewhere")
    checkpoint = open_checkpoint(source)
    if checkpoint.format == format:
        raise ConversionError(f"{source} is {format} already; there is nothing to convert")
    _check_zeros(checkpoint, format)
    with staged(target, overwrite=overwrite) as directory:
        _copy(source, directory)
        for file in checkpoint.files:
            _patch_zeros(directory / file.name, checkpoint, format)
        _update_json(directory, format)
        _verify(checkpoint, open_checkpoint(directory), format)


def _copy(source: Path, target: Path) -> None:
    """Copy files, also behind links, and folders, but for pickles and what is hidden."""
    for entry in sorted(source.iterdir()):
        if entry.name.startswith(".") or entry.suffix in PICKLES:
            continue
        if entry.is_file():
            shutil.copyfile(entry, target / entry.name)
        elif entry.is_dir() and not entry.is_symlink():
            (target / entry.name).mkdir()
            _copy(entry, target / entry.name)


def _check_zeros(checkpoint: Checkpoint, format: Format) -> None:  # noqa: A002
    """Refuse, with their number over all layers, zeros that `format` cannot hold."""
    outside = total = 0
    first = None
    for name, spec in checkpoint.layers.items():
        checkpoint.layer(name)  # refuses values that no reader could use
        zeros = checkpoint.zeros(name)
        count = count_outside(zeros, spec.bits, format)
        outside += count
        total += zeros.numel()
        first = first or (name if count else None)
    if outside:
        what = "zero 0" if ZERO_OFFSET[format] else "zero 2^bits"
        raise ConversionError(
            f"{outside} of {total} zeros are {what}, which {format} cannot hold (the first in {first}); keep "
            f"{checkpoint.format}, or quantize again for {format}"
        )


def _patch_zeros(file: Path, checkpoint: Checkpoint, format: Format) -> None:  # noqa: A002
    """Overwrite the qzeros in a copied safetensors file: 8 bytes of header length, JSON header, then the data."""
    with file.open("r+b") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
        for name, spec in checkpoint.layers.items():
            entry = header.get(f"{name}.qzeros")
            if entry is None:
                continue
            words = encode_zeros(checkpoint.zeros(name), spec.bits, format)
            stream.seek(8 + length + entry["data_offsets"][0])
            stream.write(words.numpy().tobytes())


def _update_json(directory: Path, format: Format) -> None:  # noqa: A002
    """Name the new format wherever a config names the old one."""
    quantization: dict[str, Any] = {}
    config = read_json(directory / "config.json")
    if isinstance(config.get("quantization_config"), dict):
        quantization = _with_format(config["quantization_config"], format)
        write_json(directory / "config.json", {**config, "quantization_config": quantization})
    if (directory / "quantize_config.json").exists():
        quantization = _with_format(read_json(directory / "quantize_config.json"), format)
        write_json(directory / "quantize_config.json", quantization)
    meta = quantization.get("meta")
    if (directory / REPORT).exists() and isinstance(meta, dict) and "gptqkit" in meta:
        report = read_json(directory / REPORT)
        if isinstance(report.get("config"), dict):
            report["config"]["format"] = format
        write_json(directory / REPORT, report)
        try:
            card = model_card(report, quantization, pipeline_tag(directory))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{REPORT} is damaged ({error!r}); delete it, it is not needed") from error
        (directory / "README.md").write_text(card, encoding="utf-8", newline="\n")


def _with_format(quantization: dict[str, Any], format: Format) -> dict[str, Any]:  # noqa: A002
    values = {**quantization, "checkpoint_format": format, "format": format}
    meta = values.get("meta")
    if isinstance(meta, dict) and isinstance(meta.get("gptqkit"), dict):
        values["meta"] = {**meta, "gptqkit": {**meta["gptqkit"], "format": format}}
    return values


def _verify(before: Checkpoint, after: Checkpoint, format: Format) -> None:  # noqa: A002
    """Read everything back: the same zeros in the new format, and the same bits everywhere else."""
    if after.format != format or list(after.layers) != list(before.layers):
        raise CheckpointError(f"{after.path} reads back as another checkpoint than was written")
    zeros = {f"{name}.qzeros": name for name in before.layers}
    for name in before.tensor_names:
        if name in zeros:
            same = same_bits(after.zeros(zeros[name]), before.zeros(zeros[name]))
        else:
            same = same_bits(after.tensor(name), before.tensor(name))
        if not same:
            raise CheckpointError(f"{name} reads back differently; disk or memory is faulty")
