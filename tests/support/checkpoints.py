"""Checkpoints whose tensors are all there at once."""

from gptqkit.export.card import write_card
from gptqkit.export.checkpoint import matrices, write_configs, write_report
from gptqkit.export.formats import LayerSpec, find_format
from gptqkit.export.shards import MAX_SHARD_BYTES, Shards, join_files, write_files
from gptqkit.export.staging import staged


def write_checkpoint(
    out,
    *,
    config,
    weights,
    other_tensors,
    model_config,
    report=None,
    tokenizer=None,
    generation_config=None,
    passthrough=(),
    overwrite=False,
    max_shard_bytes=MAX_SHARD_BYTES,
):
    """Write a checkpoint in one go; it appears under its name when it is complete.

    weights: every quantized module by its full name; other_tensors: all others by theirs.
    """
    layout = find_format(config.format)
    packed = {f"{name}.{key}": tensor for name, each in weights.items() for key, tensor in layout.pack(each).items()}
    with staged(out, overwrite=overwrite) as directory:
        parts = write_files(directory / ".part", {**packed, **other_tensors}.items(), max_shard_bytes)
        join_files(parts, directory, max_shard_bytes)
        floats = matrices(other_tensors, Shards.of_files(parts))
        for part in parts:
            part.unlink()
        quantization = layout.write_config(config, {name: LayerSpec.of(each) for name, each in weights.items()}, floats)
        if passthrough:
            quantization.setdefault("meta", {})["passthrough_tensors"] = list(passthrough)
        write_configs(directory, quantization, model_config, generation_config, tokenizer)
        write_report(directory, {"model": "example", "config": config.to_dict(), **(report or {})})
        write_card(directory, directory)
