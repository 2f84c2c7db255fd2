"""What a checkpoint is, how large it is, and which programs can load it, from its headers alone."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, matrices, open_checkpoint
from .formats import LayerSpec
from .gptq_config import FUSED, skipped_modules


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Whether a program can load a checkpoint.

    Attributes:
        name: The program.
        loads: Whether it loads the checkpoint and computes the right thing.
        reasons: Why not, and what to do where something can be done.
    """

    name: str
    loads: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
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
    bits_per_weight: float
    readers: tuple[Reader, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def inspect(path: Path | str) -> CheckpointSummary:
    """Return what the checkpoint in `path` is, without loading its weights.

    What other programs can load was found by running them or, for SGLang and the kernels of vLLM, by reading them:
    GPTQModel 7.5, transformers 5.23 with optimum 2.3, vLLM 0.32, SGLang, AutoGPTQ 0.7.1. vLLM and SGLang are meant on
    a GPU; on a CPU, vLLM serves 4 bits only. Kinds of models that were not tried count as not loaded.

    Raises:
        CheckpointError: The checkpoint is damaged, contradictory or of an unknown format.
        OSError: A file that cannot be read.
    """
    checkpoint = open_checkpoint(path)
    specs = checkpoint.layers.values()
    packed = {f"{name}.{key}" for name in checkpoint.layers for key in checkpoint.format.suffixes}
    weights = sum(spec.in_features * spec.out_features for spec in specs)
    sizes = {name: checkpoint.tensor(name).nbytes for name in checkpoint.tensors.where}
    packed_bytes = sum(size for name, size in sizes.items() if name in packed)
    others = [checkpoint.tensor(name) for name in sizes if name not in packed]
    return CheckpointSummary(
        format=checkpoint.declared.format,
        writer=checkpoint.declared.writer,
        bits=dict(sorted(Counter(spec.bits for spec in specs).items())),
        group_sizes=dict(sorted(Counter(map(_declared_group, specs)).items())),
        sym=checkpoint.declared.sym,
        desc_act=checkpoint.declared.desc_act,
        act_order_layers=sum(spec.act_order for spec in specs),
        quantized_layers=len(checkpoint.layers),
        quantized_weights=weights,
        other_parameters=sum(tensor.numel() for tensor in others),
        packed_bytes=packed_bytes,
        other_bytes=sum(tensor.nbytes for tensor in others),
        bits_per_weight=packed_bytes * 8 / weights,
        readers=(
            Reader(name="gptqkit", loads=True, reasons=()),
            _reader("GPTQModel", _against_gptqmodel, checkpoint),
            _reader("transformers+gptqmodel", _against_transformers, checkpoint),
            _reader("vLLM", _against_vllm, checkpoint),
            _reader("SGLang", _against_sglang, checkpoint),
            _reader("AutoGPTQ", _against_autogptq, checkpoint),
        ),
    )


def _reader(name: str, against: Callable[[Checkpoint], Iterator[str]], checkpoint: Checkpoint) -> Reader:
    gptq = checkpoint.declared.format in ("gptq", "gptq_v2")
    reasons = tuple(against(checkpoint)) if gptq else ("was tried with the formats gptq and gptq_v2 only",)
    return Reader(name=name, loads=not reasons, reasons=reasons)


def _declared_group(spec: LayerSpec) -> int:
    return -1 if spec.group_size == spec.in_features else spec.group_size


def _untried(checkpoint: Checkpoint, *, mixtures: bool = False) -> Iterator[str]:
    """Kinds of models with which a reader was never seen to work."""
    for architecture in checkpoint.model_config.get("architectures") or ():
        if not str(architecture).endswith("ForCausalLM"):
            yield f"was tried with causal language models only, not with {architecture}"
    if not mixtures and _has_experts(checkpoint):
        yield "was not tried with mixtures of experts"


def _has_experts(checkpoint: Checkpoint) -> bool:
    return any(".experts." in name for name in checkpoint.layers)


def _against_gptqmodel(checkpoint: Checkpoint) -> Iterator[str]:
    yield from _untried(checkpoint, mixtures=True)
    if any(".block_sparse_moe.experts." in name for name in checkpoint.layers):
        yield "looks for experts under other names, mlp.experts.N.gate_proj and so on"
    if checkpoint.model_config.get("model_type") == "gpt_oss":
        yield "computes other logits for this architecture"
    version = re.search(r"gptqmodel:(\d+)\.(\d+)", checkpoint.declared.writer or "", re.IGNORECASE)
    trusted = version is not None and (int(version[1]), int(version[2])) >= (0, 9)
    if checkpoint.declared.format == "gptq" and not checkpoint.declared.sym and not trusted:
        yield "refuses asymmetric version 1 files of other programs; convert to gptq_v2"
    yield from _odd_dimensions(checkpoint, 32, 32)


def _against_transformers(checkpoint: Checkpoint) -> Iterator[str]:
    yield from _untried(checkpoint)
    yield from _odd_dimensions(checkpoint, 32, 32)
    yield from _mixed(checkpoint)
    without = [name for name in checkpoint.layers if f"{name}.g_idx" not in checkpoint.tensors.where]
    if without:
        yield f"needs g_idx, which {len(without)} layers lack"
    if outside := _outside_blocks(checkpoint):
        yield f"leaves the quantized {', '.join(outside)} at random values"
    skipped = skipped_modules(checkpoint.layers, matrices(checkpoint.other_names, checkpoint.tensors))
    groups = checkpoint.quantization_config.get("modules_in_block_to_quantize")
    if not isinstance(groups, list):
        groups = []
    listed = {str(inner) for group in groups if isinstance(group, list) for inner in group}
    if skipped and not listed:
        yield "needs modules_in_block_to_quantize in the config, because some modules are not quantized"
    elif any(name.endswith(f".{inner}") for name in skipped for inner in listed):
        yield "cannot leave a module in floating point in some blocks and quantize it in others"


def _against_vllm(checkpoint: Checkpoint) -> Iterator[str]:
    yield from _untried(checkpoint)
    bits = sorted({spec.bits for spec in checkpoint.layers.values()} - {4, 8})
    if bits:
        yield f"serves 4 and 8 bits, not {_listed(bits)}"
    if not all(spec.sym for spec in checkpoint.layers.values()):
        yield "serves symmetric checkpoints only"
    sizes = {_declared_group(spec) for spec in checkpoint.layers.values()}
    if checkpoint.declared.desc_act and sizes != {-1}:
        yield "rejects desc_act with groups; quantize with static_groups or act_group_aware"
    if any(spec.act_order for spec in checkpoint.layers.values()):
        yield "ignores g_idx, so act-order comes out wrong"
    if odd := sorted(sizes - {-1, 32, 64, 128}):
        yield f"has kernels for groups of 32, 64, 128 or whole rows, not {_listed(odd)}"
    yield from _odd_dimensions(checkpoint, 128, 64)
    yield from _fused(checkpoint)


def _against_sglang(checkpoint: Checkpoint) -> Iterator[str]:
    yield from _untried(checkpoint)
    kinds = {(spec.bits, spec.sym) for spec in checkpoint.layers.values()}
    dtype = str(checkpoint.model_config.get("torch_dtype") or checkpoint.model_config.get("dtype"))
    if not kinds <= {(4, True), (8, True)} and dtype.removeprefix("torch.") != "float16":
        yield f"computes in float16 only, and the model's dtype is {dtype}"
    yield from _fused(checkpoint)


def _against_autogptq(checkpoint: Checkpoint) -> Iterator[str]:
    yield from _untried(checkpoint)
    if checkpoint.declared.format == "gptq_v2":
        yield "reads version 2 as version 1 without notice, every zero off by one; convert to gptq"
    yield from _mixed(checkpoint)
    if outside := _outside_blocks(checkpoint):
        yield f"quantizes nothing outside the blocks, but {', '.join(outside)} is"
    if skipped := skipped_modules(checkpoint.layers, matrices(checkpoint.other_names, checkpoint.tensors)):
        yield f"cannot leave modules of the blocks in floating point ({len(skipped)} are)"
    yield from _odd_dimensions(checkpoint, 32, 32)


def _mixed(checkpoint: Checkpoint) -> Iterator[str]:
    if any(
        (spec.bits, spec.group_size) != (checkpoint.declared.bits, checkpoint.declared.group_size or spec.in_features)
        for spec in checkpoint.layers.values()
    ):
        yield "knows one setting of bits and group size for all modules"


def _odd_dimensions(checkpoint: Checkpoint, inputs: int, outputs: int) -> Iterator[str]:
    """Layers that do not divide; projections that readers fuse count together."""
    fused: Counter[str] = Counter()
    for name, spec in checkpoint.layers.items():
        fused[_fused_name(name)] += spec.out_features
    odd = [
        name
        for name, spec in checkpoint.layers.items()
        if spec.in_features % inputs or fused[_fused_name(name)] % outputs
    ]
    if odd:
        spec = checkpoint.layers[odd[0]]
        yield (
            f"needs inputs that are multiples of {inputs} and outputs of {outputs}; {odd[0]} has {spec.in_features} "
            f"and {spec.out_features}"
        )


def _fused(checkpoint: Checkpoint) -> Iterator[str]:
    """Projections that servers fuse must be quantized alike, all or none."""
    kinds: dict[str, set[tuple[int, int] | None]] = {}
    for name, spec in checkpoint.layers.items():
        kinds.setdefault(_fused_name(name), set()).add((spec.bits, spec.group_size))
    for name in skipped_modules(checkpoint.layers, matrices(checkpoint.other_names, checkpoint.tensors)):
        kinds.setdefault(_fused_name(name), set()).add(None)
    if unlike := [name for name, found in kinds.items() if len(found) > 1]:
        yield f"needs the parts of {unlike[0]} quantized alike"


def _fused_name(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + dot + next((fused for fused, parts in FUSED.items() if last in parts), last)


def _outside_blocks(checkpoint: Checkpoint) -> list[str]:
    return [name for name in checkpoint.layers if not any(part.isdigit() for part in name.split("."))]


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values))
