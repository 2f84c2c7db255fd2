"""What a checkpoint is, how large it is, and which programs can load it, from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError
from ..settings import Plain, did_you_mean
from .bits import unpack
from .checkpoint import Checkpoint, matrices, open_checkpoint
from .formats import find_quantization
from .modules import skipped_modules
from .readers import Facts, Reader, readers_of


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary(Plain):
    """What `inspect` finds.

    Attributes:
        format: One of `FORMATS`.
        writer: The program that wrote the checkpoint, where it says so.
        bits: Number of layers by their bits.
        group_sizes: Number of layers by columns per group; -1 for one group per row.
        sym: Declared symmetric.
        desc_act: Declared act-order.
        act_order_layers: Layers whose g_idx is more than k // group_size.
        quantized_layers: Number of quantized layers.
        quantized_weights: Number of weights in them.
        other_parameters: Number of all other parameters, biases included.
        packed_bytes: Size of the packed words, zeros, scales and g_idx.
        other_bytes: Size of all other tensors.
        float_modules: Modules of the quantized blocks whose matrix, or stacks of experts, are in floating point.
        bits_per_weight: packed_bytes * 8 / quantized_weights: the cost of groups included.
        readers: Which programs can load it, and why not.
    """

    format: str
    writer: str | None
    bits: dict[int, int]
    group_sizes: dict[int, int]
    sym: bool
    desc_act: bool
    act_order_layers: int
    quantized_layers: int
    quantized_weights: int
    other_parameters: int
    packed_bytes: int
    other_bytes: int
    float_modules: tuple[str, ...] = field(repr=False)
    bits_per_weight: float
    readers: tuple[Reader, ...]

    def reader(self, name: str) -> Reader:
        """Return what is known of the reader `name`, one of `READERS` in any case.

        Raises:
            ConfigError: It is none of them.
        """
        found = [reader for reader in self.readers if reader.name.lower() == name.lower()]
        if not found:
            names = [reader.name for reader in self.readers]
            raise ConfigError(f"{name!r} is none of {', '.join(names)}{did_you_mean(name, names)}")
        return found[0]


def inspect(path: Path | str, *, revision: str | None = None, tensor_parallel: int = 1) -> CheckpointSummary:
    """Return what the checkpoint in `path`, a directory or an id on the Hub, is, without loading its weights.

    Of a model on the Hub only configs and headers are fetched. Whether it is act-order is what it declares then. Of
    asymmetric files of version 1 on this machine the zero points are read. What is known of other programs, and how,
    `readers.py` says.

    Args:
        path: Where the checkpoint is.
        revision: Branch, tag or commit on the Hub.
        tensor_parallel: Number of GPUs between which a server is to share every layer.

    Raises:
        DatasetUnavailableError: There is no such directory, nor such a model on the Hub.
        CheckpointError: The checkpoint is damaged, contradictory or of an unknown format.
        ConfigError: `tensor_parallel` is no positive number.
        OSError: A file that cannot be read.
    """
    if not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel is {tensor_parallel!r}; give the number of GPUs, 1 or more")
    checkpoint = open_checkpoint(path, revision=revision, weights=False)
    declared, specs = checkpoint.declared, checkpoint.layers.values()
    tensors, plain = checkpoint.tensors, checkpoint.plain_names
    weights = sum(spec.in_features * spec.out_features for spec in specs)
    other_bytes = sum(map(tensors.nbytes, plain))
    packed_bytes = sum(map(tensors.nbytes, tensors.where)) - other_bytes
    skipped = skipped_modules(checkpoint.layers, matrices(checkpoint.other_names, tensors))
    return CheckpointSummary(
        format=declared.format,
        writer=declared.writer,
        bits=dict(sorted(Counter(spec.bits for spec in specs).items())),
        group_sizes=dict(sorted(Counter(spec.declared_group for spec in specs).items())),
        sym=declared.sym,
        desc_act=declared.desc_act,
        act_order_layers=sum(spec.act_order for spec in specs),
        quantized_layers=len(specs),
        quantized_weights=weights,
        other_parameters=sum(tensors.meta(name).numel() for name in plain),
        packed_bytes=packed_bytes,
        other_bytes=other_bytes,
        float_modules=tuple(skipped),
        bits_per_weight=packed_bytes * 8 / max(weights, 1),
        readers=readers_of(_facts(checkpoint, skipped, tensor_parallel)),
    )


def _facts(checkpoint: Checkpoint, skipped: Sequence[str], tensor_parallel: int) -> Facts:
    """Return what the rules of readers look at."""
    where, v1 = checkpoint.tensors.where, checkpoint.declared.format == "gptq"
    return Facts(
        declared=checkpoint.declared,
        layers=checkpoint.layers,
        skipped=skipped,
        model_config=checkpoint.model_config,
        quantization_config=checkpoint.quantization_config,
        lacking=sum(f"{name}.g_idx" not in where for name in checkpoint.layers),
        all_ones=sum(_all_ones(checkpoint, name) for name, spec in checkpoint.layers.items() if v1 and not spec.sym),
        tensor_parallel=tensor_parallel,
        beside=checkpoint.path.is_dir() and find_quantization(checkpoint.model_config) is None,
        where=str(checkpoint.path / "config.json"),
    )


def _all_ones(checkpoint: Checkpoint, name: str) -> int:
    """Return how many stored zero points of a layer have all bits set; 0 where they were not fetched."""
    zeros, bits = checkpoint.tensor(f"{name}.qzeros"), checkpoint.layers[name].bits
    return 0 if zeros.is_meta else int((unpack(zeros, bits) == 2**bits - 1).sum())
