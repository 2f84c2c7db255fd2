"""What a checkpoint is, how large it is, and which programs can load it, from its headers alone."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from .checkpoint import Checkpoint, matrices, open_checkpoint
from .formats import LayerSpec
from .modules import FUSED, skipped_modules
from .shards import some

TRANSFORMERS = "transformers"
OTHERS = ("GPTQModel", TRANSFORMERS, "vLLM", "SGLang", "AutoGPTQ")
"""The readers that are known beside gptqkit; transformers with the packages that it asks for."""

Rules: TypeAlias = "list[tuple[Sequence[str], object, str]]"
"""Readers, what stops them if it is true of the checkpoint, and how they put it."""

_MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "phimoe", "qwen3_moe")
"""Types of mixtures of experts that GPTQModel and vLLM were tried with."""

_UNCONFIRMED = ("deepseek_v3", "phimoe")
"""Those of which vLLM's answers on a CPU were further off than kernels explain, or which it cannot run there."""

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
        float_modules: Modules of the quantized blocks whose matrix is in floating point.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def inspect(path: Path | str, *, revision: str | None = None) -> CheckpointSummary:
    """Return what the checkpoint in `path`, a directory or an id on the Hub, is, without loading its weights.

    Of a model on the Hub only configs and headers are fetched. Whether it is act-order is what it declares then.

    What other programs can load was found by running them or, for SGLang and the kernels of vLLM, by reading them:
    GPTQModel 7.5, transformers 5.23 with optimum 2.3 and GPTQModel or with compressed-tensors 0.19, vLLM 0.32, SGLang,
    AutoGPTQ 0.7.1. vLLM and SGLang are meant on a GPU; on a CPU, vLLM serves 4 bits only. Kinds of models that were not
    tried count as not loaded.

    Raises:
        CheckpointError: The checkpoint is damaged, contradictory or of an unknown format.
        OSError: A file that cannot be read.
    """
    checkpoint = open_checkpoint(path, revision=revision, weights=False)
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
        float_modules=tuple(_skipped(checkpoint)),
        bits_per_weight=packed_bytes * 8 / max(weights, 1),
        readers=tuple(Reader(name=name, loads=not why, reasons=tuple(why)) for name, why in reasons.items()),
    )


def _reasons(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Return why each reader cannot load a checkpoint: a list that is empty where it can."""
    reasons: dict[str, list[str]] = {name: [] for name in ("gptqkit", *OTHERS)}
    own = _RULES.get(checkpoint.declared.format)
    rules = own(checkpoint) if own else [(OTHERS, True, "was not tried with this format")]
    for readers, holds, reason in (*_common_rules(checkpoint), *rules):
        for name in readers if holds else ():
            reasons[name].append(reason)
    return {**reasons, "llama.cpp": []} if checkpoint.declared.format == "gguf" else reasons


def _common_rules(checkpoint: Checkpoint) -> Rules:
    """Return what holds for every format."""
    layers, model = checkpoint.layers, checkpoint.model_config
    untried = [str(name) for name in model.get("architectures") or () if not str(name).endswith("ForCausalLM")]
    experts = any(".experts." in name for name in layers) and checkpoint.declared.format not in ("gptq", "gptq_v2")
    unlike = _unlike(layers, _skipped(checkpoint))
    return [
        (OTHERS, untried, f"was tried with causal language models only, not with {_listed(untried)}"),
        (OTHERS, experts, "was not tried with mixtures of experts in this format"),
        (("vLLM", "SGLang"), unlike, f"needs the parts of {unlike} quantized alike"),
    ]


def _gptq_rules(checkpoint: Checkpoint) -> Rules:
    declared, layers, model = checkpoint.declared, checkpoint.layers, checkpoint.model_config
    specs = layers.values()
    v1 = declared.format == "gptq"
    by_gptqmodel = re.search(r"gptqmodel:(\d{1,9})\.(\d{1,9})", declared.writer or "", re.IGNORECASE)
    trusted = by_gptqmodel is not None and tuple(map(int, by_gptqmodel.groups())) >= (0, 9)
    dtype = str(model.get("torch_dtype") or model.get("dtype")).removeprefix("torch.")
    size = declared.group_size
    mixed = any((spec.bits, spec.group_size) != (declared.bits, size or spec.in_features) for spec in specs)
    bits, sizes, odd_sizes = _other_bits(layers), {_declared_group(spec) for spec in specs}, _other_sizes(layers)
    asymmetric, outside, skipped = _asymmetric(layers), _outside(layers), _skipped(checkpoint)
    kind, experts = model.get("model_type"), any(".experts." in name for name in layers)
    renamed = any(".block_sparse_moe.experts." in name for name in layers)
    groups = checkpoint.quantization_config.get("modules_in_block_to_quantize")
    groups = [group for group in groups if isinstance(group, list)] if isinstance(groups, list) else []
    listed = {str(inner) for group in groups for inner in group}
    unevenly = any(name.endswith(f".{inner}") for name in skipped for inner in listed)
    lacking = [name for name in layers if f"{name}.g_idx" not in checkpoint.tensors.where]
    odd, odd_for_vllm = _odd_size(layers, 32, 32), _odd_size(layers, 128, 64)
    return [
        (("SGLang", "AutoGPTQ"), experts, "was not tried with mixtures of experts"),
        (("GPTQModel", "vLLM"), experts and kind not in _MIXTURES, f"was not tried with the experts of {kind}"),
        ((TRANSFORMERS,), experts, "leaves experts at random values; after `import gptqkit`, transformers loads them"),
        (("GPTQModel",), renamed, "looks for experts under other names, mlp.experts.N.gate_proj and so on"),
        (("vLLM",), experts and kind in _UNCONFIRMED, f"loads experts of {kind}, but was not seen to agree on a CPU"),
        (("vLLM",), experts and kind == "gpt_oss", "loads experts of gpt_oss in MXFP4 and floating point only"),
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
        (("vLLM",), asymmetric, "serves symmetric checkpoints only; convert to awq or compressed-tensors"),
        (("vLLM",), declared.desc_act and sizes != {-1}, _GROUPS_IN_ORDER),
        (("vLLM",), _act_order(layers), "ignores g_idx, so act-order comes out wrong"),
        (("vLLM",), odd_sizes, f"has kernels for groups of 32, 64, 128 or whole rows, not {_listed(odd_sizes)}"),
        (("SGLang",), (asymmetric or bits) and dtype != "float16", f"computes in float16 only, not in {dtype}"),
        (("GPTQModel", TRANSFORMERS, "AutoGPTQ"), odd, odd),
        (("vLLM",), odd_for_vllm, odd_for_vllm),
    ]


def _awq_rules(checkpoint: Checkpoint) -> Rules:
    layers = checkpoint.layers
    sizes, most = _other_sizes(layers), {_declared_group(spec) for spec in layers.values()} - {-1, 16, 32, 64, 128}
    outside, odd = _outside(layers), _odd_size(layers, 32, 32)
    return [
        (("SGLang",), True, "was not tried with awq"),
        (("AutoGPTQ",), True, "reads no awq; convert to gptq"),
        (("GPTQModel", TRANSFORMERS), most, f"has kernels for groups of 16, 32, 64, 128 or rows, not {_listed(most)}"),
        (("GPTQModel", TRANSFORMERS), outside, f"was not tried with {_listed(outside)} quantized"),
        (("vLLM",), sizes, f"has kernels for groups of 32, 64, 128 or whole rows, not {_listed(sizes)}"),
        (("GPTQModel", TRANSFORMERS, "vLLM"), odd, odd),
    ]


def _compressed_rules(checkpoint: Checkpoint) -> Rules:
    layers = checkpoint.layers
    bits, sizes, odd = _other_bits(layers), _other_sizes(layers), _odd_size(layers, 32, 32)
    wide = _asymmetric({name: spec for name, spec in layers.items() if spec.bits == 8})
    return [
        (("GPTQModel", "AutoGPTQ"), True, "reads no compressed-tensors; convert to gptq_v2"),
        (("SGLang",), True, "was not tried with compressed-tensors"),
        ((TRANSFORMERS, "vLLM"), _act_order(layers), "has given up g_idx; quantize with static_groups"),
        (("vLLM",), bits, f"serves 4 and 8 bits, not {_listed(bits)}"),
        (("vLLM",), wide, "serves 8 bits symmetric only"),
        (("vLLM",), sizes, f"has kernels for groups of 32, 64, 128 or whole rows, not {_listed(sizes)}"),
        (("vLLM",), odd, odd),
    ]


def _marlin_rules(checkpoint: Checkpoint) -> Rules:  # noqa: ARG001
    return [
        (OTHERS, True, "loads no checkpoints in marlin's layout, which it makes of gptq itself; convert to gptq_v2")
    ]


_RULES: dict[str, Callable[[Checkpoint], Rules]] = {
    "gptq": _gptq_rules,
    "gptq_v2": _gptq_rules,
    "awq": _awq_rules,
    "marlin": _marlin_rules,
    "compressed-tensors": _compressed_rules,
}


def _other_bits(layers: Mapping[str, LayerSpec]) -> list[int]:
    """Return the widths that servers have no kernels for."""
    return sorted({spec.bits for spec in layers.values()} - {4, 8})


def _other_sizes(layers: Mapping[str, LayerSpec]) -> list[int]:
    """Return the group sizes that servers have no kernels for."""
    return sorted({_declared_group(spec) for spec in layers.values()} - {-1, 32, 64, 128})


def _asymmetric(layers: Mapping[str, LayerSpec]) -> bool:
    return not all(spec.sym for spec in layers.values())


def _act_order(layers: Mapping[str, LayerSpec]) -> bool:
    return any(spec.act_order for spec in layers.values())


def _outside(layers: Iterable[str]) -> list[str]:
    """Return the quantized modules outside the blocks."""
    return [name for name in layers if not any(part.isdigit() for part in name.split("."))]


def _skipped(checkpoint: Checkpoint) -> list[str]:
    """Return the modules of the blocks in floating point."""
    return skipped_modules(checkpoint.layers, matrices(checkpoint.other_names, checkpoint.tensors))


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
