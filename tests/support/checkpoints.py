"""Checkpoints whose tensors are all there at once."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptqkit.export.work import WorkDirectory
from gptqkit.export.writer import MAX_SHARD_BYTES, SavesItself, finish_checkpoint, write_part
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.quantized import QuantizedWeight


def write_checkpoint(
    out: Path,
    *,
    config: QuantizeConfig,
    weights: Mapping[str, QuantizedWeight],
    other_tensors: Mapping[str, Tensor],
    model_config: Mapping[str, Any],
    report: Mapping[str, Any],
    tokenizer: SavesItself | None = None,
    generation_config: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    measure: Callable[[Path], Mapping[str, Any]] | None = None,
) -> None:
    """Write a checkpoint whose tensors are all there, in one go: read back, and then it appears under its name.

    Args:
        out: The directory to make.
        config: The settings; `config.format` is the format written.
        weights: Every quantized module by its full name. Codes, scales and zeros go into the file untouched.
        other_tensors: All other tensors by their full names (biases, norms, embeddings), in the dtype to store. Tied
            tensors are given once.
        model_config: config.json of the model.
        report: quantization_report.json.
        tokenizer: Saved beside the weights.
        generation_config: generation_config.json.
        overwrite: Replace a quantized model that is there already, after the new one is complete.
        max_shard_bytes: As for `finish_checkpoint`.
        measure: As for `finish_checkpoint`.

    Raises:
        OutputExistsError: `out` exists, and `overwrite` is not set or it holds no quantized model.
        ConversionError: Zeros that the format cannot hold.
        ShapeError: A module whose dimensions cannot be packed, or tensors given twice.
        CheckpointError: A tensor reads back differently from what was written.
        OSError: The disk refused; nothing is left behind.
    """
    work = WorkDirectory(out, {}, overwrite=overwrite)
    try:
        write_part(work, "everything", weights, other_tensors, config)
        finish_checkpoint(
            work,
            config=config,
            model_config=model_config,
            report=report,
            tokenizer=tokenizer,
            generation_config=generation_config,
            max_shard_bytes=max_shard_bytes,
            measure=measure,
        )
    except BaseException:  # Ctrl-C too: nothing half-written stays
        work.discard()
        raise
