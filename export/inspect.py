"""What a checkpoint is, how large it is, and which programs can load it, from its headers alone."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint, matrices, open_checkpoint
from .formats import LayerSpec
from .gptq_config import FUSED, skipped_modules
from .shards import some

TRANSFORMERS = "transformers+gptqmodel"
OTHERS = ("GPTQModel", TRANSFORMERS, "vLLM", "SGLang", "AutoGPTQ")
"""The readers that are known beside gptqkit."""

_AMBIGUOUS = "refuses asymmetric version 1 files of other programs; convert to gptq_v2"
_GROUPS_IN_ORDER = "rejects desc_act with groups; quantize with static_groups or act_group_aware"


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


def inspect(path: Path | str, *, revision: str | None = None) -> CheckpointSummary:
    """Return what the checkpoint in `path`, a directory or an id on the Hub, is, without loading its weights.

    What other programs can load was found by running them or, for SGLang and the kernels of vLLM, by reading them:
    GPTQModel 7.5, transformers 5.23 with optimum 2.3, vLLM 0.32, SGLang, AutoGPTQ 0.7.1. vLLM and SGLang are meant on
    a GPU; on a CPU, vLLM serves 4 bits only. Kinds of models that were not tried count as not loaded.

    Raises:
        CheckpointError: The checkpoint is damaged, contradictory or of an unknown format.
        OSError: A file that cannot be read.
    """
    checkpoint = open_checkpoint(path, revision=revision)
    declared, specs = checkpoint.declared, checkpoint.layers.values()
    keys = {f"{name}.{key}" for name in checkpoint.layers for key in checkpoint.format.suffixes}
    others = [name for name in checkpoint.tensors.where if name not in keys]
    weights = sum(spec.in_features * spec.out_features for spec in specs)
    packed_bytes = sum(checkpoint.tensors.nbytes(name) for name in checkpoint.tensors.where if name in keys)
    reasons = _reasons(checkpoint)
    return CheckpointSummary(
        format=declared.format,
        writer=declared.writer,
        bits=dict(sorted(Counter(spec.bits for spec in specs).items())),
        group_sizes=dict(sorted(Counter(map(_declared_group, specs)).items())),
        sym=declared.sym,
        desc_act=declared.desc_act,
        act_order_layers=sum(spec.act_order for spec in specs),
        quantized_layers=len(specs),
        quantized_weights=weights,
        other_parameters=sum(checkpoint.tensor(name).numel() for name in others),
        packed_bytes=packed_bytes,
        other_bytes=sum(checkpoint.tensors.nbytes(name) for name in others),
        bits_per_weight=packed_bytes * 8 / max(weights, 1),
        readers=tuple(Reader(name=name, loads=not why, reasons=tuple(why)) for name, why in reasons.items()),
    )


def _reasons(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return why each reader cannot load a checkpoint: a list that is empty where it can."""
    reasons: dict[str, list[str]] = {name: [] for name in ("gptqkit", *OTHERS)}
    gptq = checkpoint.declared.format in ("gptq", "gptq_v2")
    rules = _rules(checkpoint) if gptq else [(OTHERS, True, "was tried with the formats gptq and gptq_v2 only")]
    for readers, holds, reason in rules:
        for name in readers if holds else ():
            reasons[name].append(reason)
    return {**reasons, "llama.cpp": []} if checkpoint.declared.format == "gguf" else reasons


def _rules(checkpoint: Checkpoint) -> list[tuple[Sequence[str], object, str]]:
    """Return readers, what stops them if it is true of the checkpoint, and how they put it."""
    declared, layers, model = checkpoint.declared, checkpoint.layers, checkpoint.model_config
    specs = layers.values()
    v1 = declared.format == "gptq"
    by_gptqmodel = re.search(r"gptqmodel:(\d{1,9})\.(\d{1,9})", declared.writer or "", re.IGNORECASE)
    trusted = by_gptqmodel is not None and tuple(map(int, by_gptqmodel.groups())) >= (0, 9)
    untried = [str(name) for name in model.get("architectures") or () if not str(name).endswith("ForCausalLM")]
    experts = any(".experts." in name for name in layers)
    mixtral = any(".block_sparse_moe.experts." in name for name in layers)
    dtype = str(model.get("torch_dtype") or model.get("dtype")).removeprefix("torch.")
    size = declared.group_size
    mixed = any((spec.bits, spec.group_size) != (declared.bits, size or spec.in_features) for spec in specs)
    bits = sorted({spec.bits for spec in specs} - {4, 8})
    sizes = {_declared_group(spec) for spec in specs}
    sizes_odd = sorted(sizes - {-1, 32, 64, 128})
    asymmetric = not all(spec.sym for spec in specs)
    outside = [name for name in layers if not any(part.isdigit() for part in name.split("."))]
    skipped = skipped_modules(layers, matrices(checkpoint.other_names, checkpoint.tensors))
    groups = checkpoint.quantization_config.get("modules_in_block_to_quantize")
    groups = [group for group in groups if isinstance(group, list)] if isinstance(groups, list) else []
    listed = {str(inner) for group in groups for inner in group}
    unevenly = any(name.endswith(f".{inner}") for name in skipped for inner in listed)
    lacking = [name for name in layers if f"{name}.g_idx" not in checkpoint.tensors.where]
    odd, odd_for_vllm, unlike = _odd_size(layers, 32, 32), _odd_size(layers, 128, 64), _unlike(layers, skipped)
    return [
        (OTHERS, untried, f"was tried with causal language models only, not with {_listed(untried)}"),
        (OTHERS[1:], experts, "was not tried with mixtures of experts"),
        (("GPTQModel",), mixtral, "looks for experts under other names, mlp.experts.N.gate_proj and so on"),
        (("GPTQModel",), model.get("model_type") == "gpt_oss", "computes other logits for this architecture"),
        (("GPTQModel",), v1 and not declared.sym and not trusted, _AMBIGUOUS),
        (("AutoGPTQ",), not v1, "reads version 2 as version 1 without notice, every zero off by one; convert to gptq"),
        ((TRANSFORMERS, "AutoGPTQ"), mixed, "knows one setting of bits and group size for all modules"),
        ((TRANSFORMERS,), lacking, f"needs g_idx, which {len(lacking)} layers lack"),
        ((TRANSFORMERS,), outside, f"leaves the quantized {_listed(outside)} at random values"),
        ((TRANSFORMERS,), skipped and not listed, "needs modules_in_block_to_quantize where modules are not quantized"),
        ((TRANSFORMERS,), unevenly, "cannot leave a module in floating point in some blocks and quantize it in others"),
        (("AutoGPTQ",), outside, f"quantizes nothing outside the blocks, but {_listed(outside)} is"),
        (("AutoGPTQ",), skipped, f"cannot leave modules of the blocks in floating point ({len(skipped)} are)"),
        (("vLLM",), bits, f"serves 4 and 8 bits, not {_listed(bits)}"),
        (("vLLM",), asymmetric, "serves symmetric checkpoints only"),
        (("vLLM",), declared.desc_act and sizes != {-1}, _GROUPS_IN_ORDER),
        (("vLLM",), any(spec.act_order for spec in specs), "ignores g_idx, so act-order comes out wrong"),
        (("vLLM",), sizes_odd, f"has kernels for groups of 32, 64, 128 or whole rows, not {_listed(sizes_odd)}"),
        (("SGLang",), (asymmetric or bits) and dtype != "float16", f"computes in float16 only, not in {dtype}"),
        (("vLLM", "SGLang"), unlike, f"needs the parts of {unlike} quantized alike"),
        (("GPTQModel", TRANSFORMERS, "AutoGPTQ"), odd, odd),
        (("vLLM",), odd_for_vllm, odd_for_vllm),
    ]


def _declared_group(spec: LayerSpec) -> int:
    return -1 if spec.group_size == spec.in_features else spec.group_size


def _odd_size(layers: Mapping[str, LayerSpec], inputs: int, outputs: int) -> str:
    """Name a layer whose sizes are no multiples; projections that readers fuse count together."""
    fused: Counter[str] = Counter()
    for name, spec in layers.items():
        fused[_fused_name(name)] += spec.out_features
    for name, spec in layers.items():
        if spec.in_features % inputs or fused[_fused_name(name)] % outputs:
            sizes = f"{spec.in_features} and {spec.out_features}"
            return f"needs inputs that are multiples of {inputs} and outputs of {outputs}; {name} has {sizes}"
    return ""


def _unlike(layers: Mapping[str, LayerSpec], skipped: Iterable[str]) -> str:
    """Name a fused projection whose parts differ: servers need them quantized alike, all or none."""
    kinds: dict[str, set[tuple[int, int] | None]] = {}
    for name, spec in layers.items():
        kinds.setdefault(_fused_name(name), set()).add((spec.bits, spec.group_size))
    for name in skipped:
        kinds.setdefault(_fused_name(name), set()).add(None)
    return next((name for name, found in kinds.items() if len(found) > 1), "")


def _fused_name(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + dot + next((fused for fused, parts in FUSED.items() if last in parts), last)


def _listed(values: Iterable[object]) -> str:
    return some(map(str, values))
