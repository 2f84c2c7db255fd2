"""Which programs load a checkpoint, and what it costs them: one list of rules, for files and for plans of files.

What stands here was found by running the programs or, for SGLang, tensor parallelism and the kernels of GPUs, by
reading them: GPTQModel 7.5, transformers 5.23 with optimum 2.3 and GPTQModel or with compressed-tensors 0.19, vLLM
0.32, SGLang, AutoGPTQ 0.7.1, llama.cpp (llama-cpp-python 0.3.36). vLLM and SGLang are meant on a GPU. Kinds of models
that were not tried count as not loaded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from .autoround import PACKING
from .bits import codes_per_unit
from .formats import READERS, Declared, LayerSpec
from .modules import FUSED, are_of, experts_of, list_of_names, outside_blocks, parts_of_experts, shared_settings
from .shards import some

TRANSFORMERS = "transformers"
OTHERS = ("GPTQModel", TRANSFORMERS, "vLLM", "SGLang", "AutoGPTQ")
"""The readers of safetensors beside gptqkit; transformers with the packages that it asks for."""

SERVERS = ("vLLM", "SGLang")

_FUSED_AS = {part: fused for fused, parts in FUSED.items() for part in parts}

Rules: TypeAlias = "list[tuple[Sequence[str], object, str]]"
"""Readers, what stops or costs them if it is true of the checkpoint, and how they put it."""

_MIXTURES = ("deepseek_v3", "gpt_oss", "mixtral", "phimoe", "qwen3_moe")
"""Types of mixtures of experts that GPTQModel and vLLM were tried with, in GPTQ's formats."""

_LLAMA4 = ("llama4", "llama4_text")
"""Those that GPTQModel alone was tried with."""

_UNCONFIRMED = ("deepseek_v3", "phimoe")
"""Those of which vLLM's answers on a CPU were further off than kernels explain, or which it cannot run there."""

_BY_ROWS = ("o_proj", "out_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "fc2", "w2", "wo")
"""Modules whose inputs GPUs share; of all others they share the outputs."""

_AMBIGUOUS = "refuses asymmetric version 1 files of other programs; convert to gptq_v2"
_BESIDE = "looks for quantization_config in config.json only; write there what quantize_config.json says"
_GROUPS_IN_ORDER = "rejects desc_act with groups; quantize with static_groups or act_group_aware"
_INDEXED = (
    "looks up every column's group (g_idx) in each call, which takes time; static_groups and act_group_aware do not"
)
_ROUNDED = "rounds scales to bfloat16, which config.json asks for; ask it for float16"


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Whether a program can load a checkpoint.

    Attributes:
        name: The program.
        loads: Whether it loads the checkpoint and computes the right thing.
        reasons: Why not, and what to do where something can be done.
        warnings: What to know, or what it costs, where it loads.
    """

    name: str
    loads: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """What rules look at, of a checkpoint or of one that is planned.

    Attributes:
        declared: What its config declares.
        layers: Every quantized layer by name.
        skipped: Modules of the quantized blocks in floating point.
        model_config: config.json.
        quantization_config: The quantization config as it stands there.
        lacking: Number of layers without g_idx.
        all_ones: Number of zero points whose bits are all set, in an asymmetric file of version 1.
        tensor_parallel: Number of GPUs that share every layer.
        beside: Whether the quantization config stands beside config.json only.
        where: The file of `model_config`, for messages.
    """

    declared: Declared
    layers: Mapping[str, LayerSpec]
    skipped: Sequence[str]
    model_config: Mapping[str, Any]
    quantization_config: Mapping[str, Any]
    lacking: int = 0
    all_ones: int = 0
    tensor_parallel: int = 1
    beside: bool = False
    where: str = "config.json"

    @cached_property
    def on_gpu(self) -> Mapping[str, LayerSpec]:
        """What one GPU holds of the layers."""
        count, shared = self.tensor_parallel, _heads(self.model_config)[1]
        return {name: _part(name, spec, count, shared)[0] for name, spec in self.layers.items()}

    @property
    def dtype(self) -> str:
        """The dtype that config.json names."""
        return str(self.model_config.get("torch_dtype") or self.model_config.get("dtype")).removeprefix("torch.")


def readers_of(facts: Facts) -> tuple[Reader, ...]:
    """Return of every reader whether it loads a checkpoint, why not, and what to know."""
    own = _RULES.get(facts.declared.format)
    rules = own(facts) if own else [(OTHERS, True, "was not tried with this format")]
    rules = [*_common_rules(facts), *rules, *_parallel_rules(facts)]
    costs = _costs(facts)
    reasons = {name: tuple(text for readers, holds, text in rules if holds and name in readers) for name in READERS}
    warnings = {name: tuple(text for readers, holds, text in costs if holds and name in readers) for name in READERS}
    return tuple(
        Reader(name=name, loads=not reasons[name], reasons=reasons[name], warnings=warnings[name]) for name in READERS
    )


def _common_rules(facts: Facts) -> Rules:
    """Return what stops readers of any format."""
    layers, model, format_ = facts.layers, facts.model_config, facts.declared.format
    architectures = list_of_names(model.get("architectures"), f"{facts.where}: architectures")
    untried = [name for name in architectures if not name.endswith("ForCausalLM")]
    experts = format_ not in ("gptq", "gptq_v2") and any(map(experts_of, (*layers, *facts.skipped)))
    unlike = _unlike(layers, facts.skipped) if format_ != "gguf" else ""  # which servers do not read at all
    headless = _outside(layers) and model.get("tie_word_embeddings")
    packed = facts.quantization_config.get(PACKING)
    own_code = "auto_map" in model and model.get("model_type") not in CONFIG_MAPPING_NAMES
    elsewhere = "reads GGUF only; quantize with --type, or convert symmetric grids to gguf"
    return [
        (OTHERS, untried, f"was tried with causal language models only, not with {_listed(untried)}"),
        (OTHERS, packed, f"was not tried with auto-round's own files; convert to {format_}"),
        (OTHERS, own_code, "was not tried with models that bring their own code"),
        (OTHERS, experts, "was not tried with mixtures of experts in this format"),
        (SERVERS, unlike, f"needs the parts of {unlike} quantized alike; give them the same settings"),
        (
            ("vLLM",),
            headless,
            "takes the embedding for the output layer, where tie_word_embeddings is true, not lm_head",
        ),
        (("llama.cpp",), format_ != "gguf", elsewhere),
        ((TRANSFORMERS, "vLLM"), facts.beside and format_ != "gguf", _BESIDE),
        ((TRANSFORMERS,), "compression_config" in model, "reads no compression_config; call it quantization_config"),
    ]


def _parallel_rules(facts: Facts) -> Rules:
    """Return what stops servers that share every layer between GPUs; known from reading them only."""
    count, layers = facts.tensor_parallel, facts.layers
    if count == 1 or facts.declared.format == "gguf":
        return []
    heads, shared = _heads(facts.model_config)
    uneven = next((name for name, spec in layers.items() if _part(name, spec, count, shared)[1]), "")
    cut = "" if uneven else _cut_group(facts)
    unit = max((codes_per_unit(spec.bits) for spec in layers.values()), default=1)
    short = "" if uneven or cut else _odd_size(facts.on_gpu, (unit, unit))
    fewer = f"{count} GPUs are too many or no divisor; choose another number"
    return [
        (SERVERS, heads % count, f"gives every GPU whole heads: of {heads}, {fewer}"),
        (
            SERVERS,
            shared % count and shared and count % shared,
            f"gives every GPU whole key-value heads: of {shared}, {fewer}",
        ),
        (SERVERS, uneven, f"cannot share {uneven} evenly: {fewer}"),
        (SERVERS, cut, f"would cut groups: {cut}; quantize with smaller groups, or take fewer GPUs"),
        (SERVERS, short, f"cannot cut packed words: on a GPU it {short}; take fewer GPUs"),
    ]


def _costs(facts: Facts) -> Rules:
    """Return what loads, but has a price or a catch."""
    declared, layers, count = facts.declared, facts.layers, facts.tensor_parallel
    gptq, no_servers = declared.format in ("gptq", "gptq_v2"), sorted({*READERS} - {*SERVERS})
    act_order, bits, asymmetric = _act_order(layers), _other_bits(layers), _asymmetric(layers)
    rounded = facts.dtype == "bfloat16" and declared.format != "gguf"
    padded = _odd_size(facts.on_gpu, (128, 64), (64, 128))
    whole = any(spec.bits == 4 and spec.declared_group not in (32, 64, 128, 256) for spec in layers.values())
    ones = f"{facts.all_ones} zero points of version 1 are all ones, which their writer may have meant as 0: "
    return [
        (("GPTQModel", TRANSFORMERS, "SGLang", "AutoGPTQ"), act_order, _INDEXED),
        (("SGLang",), act_order and count > 1, "has a slower kernel for shared layers with g_idx"),
        (("SGLang",), gptq and (asymmetric or bits), "has fast kernels for symmetric 4 and 8 bits only"),
        (("vLLM",), any(spec.bits == 8 for spec in layers.values()), "has kernels for 4 bits only on a CPU"),
        (("vLLM",), padded, f"pads layers that do not fill its kernels' tiles, which takes time: it {padded}"),
        (("GPTQModel", TRANSFORMERS), gptq and whole, "needs BACKEND.GPTQ_TORCH on a CPU for groups of this size"),
        (("vLLM", TRANSFORMERS), rounded, _ROUNDED),
        (("gptqkit",), facts.all_ones, ones + "they are read as 2^bits; quantize again as gptq_v2"),
        (OTHERS, facts.all_ones, ones + "some kernels carry into the next output's; quantize again as gptq_v2"),
        (
            (TRANSFORMERS,),
            declared.format == "gguf",
            "takes gguf_file=, and decodes everything into floating point: no memory is saved",
        ),
        (no_servers, count > 1, "was not looked at for several GPUs"),
    ]


def _gptq_rules(facts: Facts) -> Rules:
    declared, layers = facts.declared, facts.layers
    specs = layers.values()
    v1 = declared.format == "gptq"
    by_gptqmodel = re.search(r"gptqmodel:(\d{1,9})\.(\d{1,9})", declared.writer or "", re.IGNORECASE)
    trusted = by_gptqmodel is not None and tuple(map(int, by_gptqmodel.groups())) >= (0, 9)
    mixed = not all(spec.has(declared.bits, declared.group_size) for spec in specs)
    bits, sizes, odd_sizes = _other_bits(layers), {spec.declared_group for spec in specs}, _other_sizes(layers)
    asymmetric, outside, skipped = _asymmetric(layers), _outside(layers), facts.skipped
    groups = facts.quantization_config.get("modules_in_block_to_quantize")
    groups = [group for group in groups if isinstance(group, list)] if isinstance(groups, list) else []
    listed = {str(inner) for group in groups for inner in group}
    unevenly = any(name.endswith(f".{inner}") for name in skipped for inner in listed)
    unknown = [name for name in outside if listed and not any(inner in name for inner in listed)]
    unknown = unknown if facts.quantization_config.get("lm_head") else outside
    odd, odd_for_vllm = _odd_size(layers, (32, 32)), _odd_size(facts.on_gpu, (32, 32))
    return [
        *_mixture_rules(facts),
        (("GPTQModel",), v1 and not declared.sym and not trusted, _AMBIGUOUS),
        (("AutoGPTQ",), not v1, "reads version 2 as version 1 without notice, every zero off by one; convert to gptq"),
        ((TRANSFORMERS, "AutoGPTQ"), mixed, "knows one setting of bits and group size for all modules"),
        ((TRANSFORMERS,), facts.lacking, f"needs g_idx, which {facts.lacking} layers lack; gptqkit convert writes it"),
        ((TRANSFORMERS,), outside, f"leaves the quantized {_listed(outside)} at random values"),
        ((TRANSFORMERS,), skipped and not listed, "needs modules_in_block_to_quantize where modules are not quantized"),
        ((TRANSFORMERS,), unevenly, "cannot leave a module in floating point in some blocks and quantize it in others"),
        (("AutoGPTQ",), outside, f"quantizes nothing outside the blocks, but {_listed(outside)} is"),
        (("AutoGPTQ",), skipped, f"cannot leave modules of the blocks in floating point ({len(skipped)} are)"),
        (("vLLM",), bits, f"serves 4 and 8 bits, not {_listed(bits)}; quantize with 4 or 8"),
        (("vLLM",), asymmetric, "serves symmetric checkpoints only; convert to awq or compressed-tensors"),
        (("vLLM",), declared.desc_act and sizes != {-1}, _GROUPS_IN_ORDER),
        (("vLLM",), _act_order(layers), "ignores g_idx, so act-order comes out wrong"),
        (("vLLM",), odd_sizes, _needs_groups((32, 64, 128), odd_sizes)),
        (
            ("vLLM",),
            unknown,
            f"takes {_listed(unknown)} for floating point, by lm_head or the modules that the config lists",
        ),
        (
            ("SGLang",),
            (asymmetric or bits) and facts.dtype != "float16",
            f"computes in float16 only, not {facts.dtype}",
        ),
        (("GPTQModel", TRANSFORMERS, "AutoGPTQ"), odd, odd),
        (("vLLM",), odd_for_vllm, odd_for_vllm),
    ]


def _mixture_rules(facts: Facts) -> Rules:
    """Return what stops readers of mixtures of experts in GPTQ's formats."""
    declared, skipped, kind = facts.declared, facts.skipped, facts.model_config.get("model_type")
    experts = parts_of_experts(facts.layers, skipped)
    renamed = any(name.endswith(".block_sparse_moe.experts") for name in experts)
    stacked = [name for name in skipped if name in experts]
    asked = {name: declared.for_fused(name) for name in experts}
    built = {name: found and found[:2] for name, found in asked.items()}
    misread = [name for name, parts in experts.items() if shared_settings(parts) and not are_of(parts, built[name])]
    whole, common = declared.group_size is None, (declared.bits, declared.group_size)
    unlike_common = whole or any(setting != common for setting in built.values())
    return [
        (("SGLang", "AutoGPTQ"), experts, "was not tried with mixtures of experts"),
        (("GPTQModel",), experts and kind not in (*_MIXTURES, *_LLAMA4), f"was not tried with the experts of {kind}"),
        (("vLLM",), experts and kind not in _MIXTURES, f"was not tried with the experts of {kind}"),
        (
            (TRANSFORMERS,),
            any(map(experts_of, facts.layers)),
            "leaves experts at random values; after `import gptqkit`, transformers loads them",
        ),
        (("GPTQModel",), renamed, "looks for experts under other names, mlp.experts.N.gate_proj and so on"),
        (("GPTQModel",), stacked, f"looks for one matrix per expert, not for the stacks of {_listed(stacked)}"),
        (("vLLM",), experts and kind in _UNCONFIRMED, f"loads experts of {kind}, but was not seen to agree on a CPU"),
        (("vLLM",), kind == "gpt_oss", "loads gpt_oss in MXFP4 and floating point only"),
        (
            ("vLLM",),
            misread,
            f"builds {_listed(misread)} as dynamic says of that name, not as its experts are; add a pattern for it",
        ),
        (
            ("vLLM",),
            experts and unlike_common and _beyond_marlin(facts),
            "has no Marlin kernel for experts of these sizes; others know the common setting only, and only groups",
        ),
    ]


def _awq_rules(facts: Facts) -> Rules:
    layers = facts.layers
    sizes, most = _other_sizes(layers), {spec.declared_group for spec in layers.values()} - {-1, 16, 32, 64, 128}
    outside, odd, odd_for_vllm = _outside(layers), _odd_size(layers, (32, 32)), _odd_size(facts.on_gpu, (32, 32))
    return [
        (("SGLang",), True, "was not tried with awq"),
        (("AutoGPTQ",), True, "reads no awq; convert to gptq"),
        (("GPTQModel", TRANSFORMERS), most, _needs_groups((16, 32, 64, 128), most)),
        (("GPTQModel", TRANSFORMERS), outside, f"was not tried with {_listed(outside)} quantized"),
        (("vLLM",), sizes, _needs_groups((32, 64, 128), sizes)),
        (("GPTQModel", TRANSFORMERS), odd, odd),
        (("vLLM",), odd_for_vllm, odd_for_vllm),
    ]


def _compressed_rules(facts: Facts) -> Rules:
    layers = facts.layers
    bits, sizes, odd = _other_bits(layers), _other_sizes(layers), _odd_size(facts.on_gpu, (32, 32))
    wide = _asymmetric({name: spec for name, spec in layers.items() if spec.bits == 8})
    return [
        (("GPTQModel", "AutoGPTQ"), True, "reads no compressed-tensors; convert to gptq_v2"),
        (("SGLang",), True, "was not tried with compressed-tensors"),
        ((TRANSFORMERS, "vLLM"), _act_order(layers), "has given up g_idx; quantize with static_groups"),
        (("vLLM",), bits, f"serves 4 and 8 bits, not {_listed(bits)}; quantize with 4 or 8"),
        (("vLLM",), wide, "serves 8 bits symmetric only; quantize with sym"),
        (("vLLM",), sizes, _needs_groups((32, 64, 128), sizes)),
        (("vLLM",), odd, odd),
    ]


def _gguf_rules(facts: Facts) -> Rules:
    model = facts.model_config
    rope = model.get("rope_parameters") or model.get("rope_scaling")
    parts = [part for part in ([rope, *rope.values()] if isinstance(rope, dict) else []) if isinstance(part, dict)]
    kinds = [part.get("rope_type", part.get("type")) for part in parts]
    turned = next((part for part in (model, *parts) if part.get("partial_rotary_factor") not in (None, 1)), None)
    scaled = next((kind for kind in kinds if kind not in (None, "default")), None)
    return [
        (("GPTQModel", "SGLang"), True, "was not tried with gguf"),
        (("AutoGPTQ", "vLLM"), True, "reads no GGUF; quantize the float model for another format"),
        ((TRANSFORMERS,), scaled, f"leaves out rotary positions of the type {scaled} where it reads GGUF"),
        ((TRANSFORMERS,), turned, "leaves out partial_rotary_factor where it reads GGUF"),
    ]


_RULES: dict[str, Callable[[Facts], Rules]] = {
    "gptq": _gptq_rules,
    "gptq_v2": _gptq_rules,
    "awq": _awq_rules,
    "marlin": lambda _: [
        (OTHERS, True, "loads no checkpoints in marlin's layout, which it makes of gptq itself; convert to gptq_v2")
    ],
    "compressed-tensors": _compressed_rules,
    "gguf": _gguf_rules,
}


def text_settings(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config.json says of the language model, which may be a part of a composite one."""
    inner = model.get("text_config")
    return inner if isinstance(inner, dict) else model


def _heads(model: Mapping[str, Any]) -> tuple[int, int]:
    """Return the heads of queries and of keys in a model's config.json; 0 where it does not say."""
    text = text_settings(model)
    heads = text.get("num_attention_heads")
    shared = text.get("num_key_value_heads") or heads
    return heads if type(heads) is int else 0, shared if type(shared) is int else 0


def _beyond_marlin(facts: Facts) -> bool:
    """Whether the experts' sizes and the common group are such that vLLM does not use its Marlin kernels for them."""
    text, size = text_settings(facts.model_config), facts.declared.group_size
    hidden, inner = text.get("hidden_size"), text.get("moe_intermediate_size", text.get("intermediate_size"))
    uneven = size is not None and type(inner) is int and inner // facts.tensor_parallel % size
    return size not in (None, 32, 64, 128) or bool(uneven) or (type(hidden) is int and hidden % 128 != 0)


def _part(name: str, spec: LayerSpec, count: int, shared: int) -> tuple[LayerSpec, bool]:
    """Return what one GPU of `count` holds of a layer, and whether it cannot be shared evenly."""
    last = name.rpartition(".")[2]
    side = "in_features" if last in _BY_ROWS else "out_features"
    parts = min(count, shared or count) if last in ("k_proj", "v_proj") else count
    size = getattr(spec, side)
    return replace(spec, **{side: max(size // parts, 1)}), size % parts != 0


def _cut_group(facts: Facts) -> str:
    """Name a layer whose groups would lie on two GPUs; rows of AWQ count as groups, others are on all of them."""
    for name, spec in facts.layers.items():
        inputs, size = facts.on_gpu[name].in_features, spec.group_size
        whole_rows = size == spec.in_features and facts.declared.format != "awq"
        if inputs % size and not whole_rows:
            return f"{name} has {inputs} inputs on each GPU and groups of {size}"
    return ""


def _other_bits(layers: Mapping[str, LayerSpec]) -> list[int]:
    """Return the widths that servers have no kernels for."""
    return sorted({spec.bits for spec in layers.values()} - {4, 8})


def _other_sizes(layers: Mapping[str, LayerSpec]) -> list[int]:
    """Return the group sizes that servers have no kernels for."""
    return sorted({spec.declared_group for spec in layers.values()} - {-1, 32, 64, 128})


def _asymmetric(layers: Mapping[str, LayerSpec]) -> bool:
    return not all(spec.sym for spec in layers.values())


def _act_order(layers: Mapping[str, LayerSpec]) -> bool:
    return any(spec.act_order for spec in layers.values())


def _outside(layers: Iterable[str]) -> list[str]:
    """Return the quantized modules outside the blocks."""
    return [name for name in layers if outside_blocks(name)]


def _needs_groups(known: Sequence[int], found: Iterable[int]) -> str:
    return (
        f"has kernels for groups of {', '.join(map(str, known))} or whole rows, not {_listed(found)}; take one of these"
    )


def _odd_size(layers: Mapping[str, LayerSpec], *units: tuple[int, int]) -> str:
    """Name a layer whose inputs and outputs are multiples of no pair; projections that readers fuse count together."""
    fused: Counter[str] = Counter()
    for name, spec in layers.items():
        fused[_fused_name(name)] += spec.out_features
    for name, spec in layers.items():
        outputs = fused[_fused_name(name)]
        if all(spec.in_features % first or outputs % second for first, second in units):
            pairs = ", or ".join(
                f"inputs that are multiples of {first} and outputs of {second}" for first, second in units
            )
            others = "" if outputs == spec.out_features else ", with what it is fused with,"
            return f"needs {pairs}; {name}{others} has {spec.in_features} and {outputs}"
    return ""


def _unlike(layers: Mapping[str, LayerSpec], skipped: Iterable[str]) -> str:
    """Name a fused projection, or the experts of a layer, whose parts differ: servers need them alike, all or none."""
    kinds: dict[str, set[tuple[object, ...] | None]] = {}
    for name, spec in layers.items():
        kinds.setdefault(_fused_name(name), set()).add((spec.bits, spec.group_size, spec.sym, spec.act_order))
    for name in skipped:
        kinds.setdefault(_fused_name(name), set()).add(None)
    experts = (name for name, parts in parts_of_experts(layers, skipped).items() if not shared_settings(parts))
    return next(experts, next((name for name, found in kinds.items() if len(found) > 1), ""))


def _fused_name(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + dot + _FUSED_AS.get(last, last)


def _listed(values: Iterable[object]) -> str:
    return some(map(str, values))
