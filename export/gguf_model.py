"""What GGUF calls the architectures that are written and read here, their tensors and their settings.

llama.cpp has a program of its own for every architecture, so here, and only here, is a table of them; any other one is
refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ArchitectureError

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ATTENTION = {
    f"self_attn.{key}_proj": f"attn_{name}" for key, name in zip("qkvo", ("q", "k", "v", "output"), strict=True)
}
_QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_MLP = {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.experts.{{}}.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}
_MIXTRAL = {
    **_EXPERTS,
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{}.w2": "ffn_down_exps",
    "block_sparse_moe.experts.{}.w3": "ffn_up_exps",
}
_GEMMA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_THETA = {"mixtral": 1e6, "gemma3_text": 1e6}  # rope_theta of files that do not say it, where it is not 10000
_WITH_FACTORS = {"llama3": ("llama",), "longrope": ("llama", "phi3")}  # llama.cpp's graphs that divide frequencies
FULL_EVERY = {"gemma2": 2, "gemma3": 6}
"""Of so many layers, one attends to all, where llama.cpp is not told which."""

_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_STEM = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture.

    Attributes:
        name: llama.cpp's.
        modules: In a block: llama.cpp's name by that of transformers; "{}" is the number of an expert. Of several names
            for one, the first is read.
        rotated: Rows of query and key stand in pairs (i, i + 1), in transformers in halves (i, i + D / 2).
        shift: Norms are stored larger by this.
        expected: Settings that llama.cpp takes for granted: any other value is refused.
        more: Further metadata, from the config.
    """

    name: str
    modules: Mapping[str, str]
    rotated: bool = False
    shift: float = 0.0
    expected: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}


def _mixture(config: Mapping[str, Any]) -> dict[str, Any]:
    values = {"expert_count": _experts(config), "expert_used_count": config["num_experts_per_tok"]}
    own = config["moe_intermediate_size"] if config["model_type"] == "qwen3_moe" else None
    return values if own is None else {**values, "expert_feed_forward_length": own}


def _experts(config: Mapping[str, Any]) -> int:
    return config.get("num_local_experts") or config.get("num_experts") or 0


def _gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    cap = config.get("final_logit_softcapping")
    values = {"final_logit_softcapping": float(cap)} if cap else {}
    sliding = _sliding(config, config.get("sliding_window_pattern") or FULL_EVERY["gemma3"])
    if not any(sliding):  # which llama.cpp takes from a file that names no window
        return values
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    kind, theta = local.get("rope_type", "default"), local.get("rope_theta") or config.get("rope_local_base_freq")
    if kind != "default":
        raise ArchitectureError(f"rope_type of sliding attention is {kind!r}; llama.cpp takes 'default' only")
    if "rope.scaling.attn_factor" in _rope(config):
        raise ArchitectureError("attention_factor is of full attention only; llama.cpp takes one for all layers")
    return {**values, **_window(config, sliding, "gemma3"), "rope.freq_base_swa": float(theta or 10000)}


def _gemma2(config: Mapping[str, Any]) -> dict[str, Any]:
    sliding = _sliding(config, FULL_EVERY["gemma2"])
    if not any(sliding):
        raise ArchitectureError("layer_types are all full_attention; llama.cpp runs gemma2 with windows only")
    return {
        "attn_logit_softcapping": float(config["attn_logit_softcapping"] or 0),
        "final_logit_softcapping": float(config["final_logit_softcapping"] or 0),
        **_window(config, sliding, "gemma2"),
    }


def _sliding(config: Mapping[str, Any], every: int) -> list[bool]:
    """Return which layers see a window only; in files that do not list it, all but every so many."""
    kinds = config.get("layer_types")
    layers = range(config["num_hidden_layers"])
    return [kind == "sliding_attention" for kind in kinds] if kinds else [bool((each + 1) % every) for each in layers]


def _window(config: Mapping[str, Any], sliding: list[bool], name: str) -> dict[str, Any]:
    """Return the metadata of a window, and of the layers that have it where they are not the usual ones."""
    values = {"attention.sliding_window": config["sliding_window"]}
    usual = [bool((layer + 1) % FULL_EVERY[name]) for layer in range(len(sliding))]
    return values if sliding == usual else {**values, "attention.sliding_window_pattern": sliding}


_LLAMA = {**_NORMS, **_ATTENTION, **_MLP}
_SILU = {"hidden_act": "silu"}
_QWEN = {**_SILU, "use_sliding_window": False}
_TANH = {"hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES = {
    "llama": Architecture(name="llama", modules=_LLAMA, rotated=True, expected=_SILU),
    "mistral": Architecture(name="llama", modules=_LLAMA, rotated=True, expected=_SILU),
    "mixtral": Architecture(
        name="llama", modules={**_NORMS, **_ATTENTION, **_MIXTRAL}, rotated=True, expected=_SILU, more=_mixture
    ),
    "qwen2": Architecture(name="qwen2", modules=_LLAMA, expected=_QWEN),
    "qwen3": Architecture(name="qwen3", modules={**_LLAMA, **_QK_NORMS}, expected=_QWEN),
    "qwen3_moe": Architecture(
        name="qwen3moe",
        modules={**_NORMS, **_ATTENTION, **_QK_NORMS, **_EXPERTS},
        expected={**_QWEN, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
        more=_mixture,
    ),
    "gemma2": Architecture(
        name="gemma2", modules={**_GEMMA, **_ATTENTION, **_MLP}, shift=1.0, expected=_TANH, more=_gemma2
    ),
    "gemma3_text": Architecture(
        name="gemma3",
        modules={**_GEMMA, **_ATTENTION, **_QK_NORMS, **_MLP},
        shift=1.0,
        expected={**_TANH, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
        more=_gemma3,
    ),
    "phi3": Architecture(
        name="phi3",
        modules={
            **_NORMS,
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        expected=_SILU,
    ),
}
"""By transformers' `model_type`."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config.json describes.

    Raises:
        ArchitectureError: None that is written here, or settings that llama.cpp does not have.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ArchitectureError(
            f"models of the type {kind!r} are not written as GGUF here; {', '.join(ARCHITECTURES)} are. Choose another "
            "format"
        )
    found = ARCHITECTURES[kind]
    for key, value in found.expected.items():
        if config.get(key, value) not in (value, None):
            raise ArchitectureError(f"{key} is {config[key]!r}; llama.cpp runs {kind} with {value!r} only")
    with _complete():
        if found.name not in _WITH_FACTORS.get(_rope_settings(config)[1], (found.name,)):
            raise ArchitectureError(
                f"llama.cpp has no rotary positions of the type {_rope_settings(config)[1]!r} in {kind}"
            )
        _rope(config)
        rope_factors(config)
        if kind in ("gemma2", "gemma3_text"):
            sizes = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim"))
            given, taken = config["query_pre_attn_scalar"], query_scalar(found.name, *sizes)
            if given != taken:
                raise ArchitectureError(f"query_pre_attn_scalar is {given!r}; llama.cpp takes {taken!r}")
    turned = _rope_settings(config)[0]["partial_rotary_factor"]
    if found.rotated and turned != 1:
        raise ArchitectureError(f"partial_rotary_factor is {turned}; llama.cpp runs {kind} with 1 only")
    return found


def query_scalar(name: str, layers: int, width: int, heads: int, size: int) -> int:
    """Return whose root divides queries in llama.cpp's Gemmas: of the largest, it is not the size of a head."""
    return width // heads if layers == {"gemma2": 46, "gemma3": 62}[name] else size


@contextmanager
def _complete() -> Iterator[None]:
    """Say of a setting that is not there, or of another kind, that it is missing."""
    try:
        yield
    except ArchitectureError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ArchitectureError(f"config.json lacks settings that GGUF needs ({error}); fetch it again") from error


def counts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return what recipes must know of a model: blocks, experts, and queries that share a key."""
    heads = config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "experts": _experts(config),
        "shared_by": heads // (config.get("num_key_value_heads") or heads),
    }


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model as llama.cpp reads them, by key, but for those of the tokenizer.

    Raises:
        ArchitectureError: As `architecture_of`, or settings are missing.
    """
    found = architecture_of(config)
    with _complete():
        values = _values(config, found)
    return {f"{found.name}.{key}": value for key, value in values.items()}


def _values(config: Mapping[str, Any], found: Architecture) -> dict[str, Any]:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim") or width // heads
    window = config.get("sliding_window") if config["model_type"] in ("mistral", "mixtral", "phi3") else None
    return {
        "vocab_size": config["vocab_size"],
        # llama.cpp knows no sliding window here; within it nothing is different
        "context_length": min(config["max_position_embeddings"], window or config["max_position_embeddings"]),
        "embedding_length": width,
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * _rope_settings(config)[0]["partial_rotary_factor"]),
        **_rope(config),
        **found.more(config),
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of rotary positions."""
    rope, kind = _rope_settings(config)
    values: dict[str, Any] = {"rope.freq_base": rope["rope_theta"]}
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind in ("yarn", "longrope"):
        values["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
    if kind == "yarn":
        _check_yarn(rope)
        scale = _attention_factor(rope, kind) / yarn_attention_factor(rope["factor"])
        values |= {} if math.isclose(scale, 1, rel_tol=1e-3) else {"rope.scaling.attn_factor": scale}
    if kind == "longrope":
        values |= {"rope.scaling.type": kind, "rope.scaling.attn_factor": _attention_factor(rope, kind)}
    if kind not in ("default", "linear", "yarn", "llama3", "longrope"):
        raise ArchitectureError(
            f"rotary positions of the type {kind!r} are not written as GGUF here; choose another format"
        )
    return values


def _check_yarn(rope: Mapping[str, Any]) -> None:
    """Refuse settings of YaRN that llama.cpp does not read for these architectures and has otherwise."""
    for key, value in {"beta_fast": 32, "beta_slow": 1, "truncate": True}.items():
        given = value if rope.get(key) is None else rope[key]
        if not math.isclose(given, value, rel_tol=1e-3):
            raise ArchitectureError(f"{key} of yarn is {given!r}; llama.cpp takes {value!r}. Choose another format")


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return by what YaRN multiplies sines and cosines, and llama.cpp by itself with a scale of 1."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _attention_factor(rope: Mapping[str, Any], kind: str) -> float:
    """Return by what transformers multiplies sines and cosines."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor: float = rope.get("factor") or rope["positions"] / rope["original_max_position_embeddings"]
    if kind == "longrope":
        return math.sqrt(1 + math.log(max(factor, 1)) / math.log(rope["original_max_position_embeddings"]))
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    above, below = (above, below) if above and below else (1.0, 0.0)
    return yarn_attention_factor(factor, above) / yarn_attention_factor(factor, below)


def _rope_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the settings of rotary positions, as versions of transformers call them, and their type."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope = rope.get("full_attention") or rope  # gemma3
    rope = {"partial_rotary_factor": config.get("partial_rotary_factor") or 1.0, **rope}
    positions = config["max_position_embeddings"]
    trained = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    rope |= {"positions": positions, "original_max_position_embeddings": trained or positions}
    base = float(rope.get("rope_theta") or config.get("rope_theta") or _THETA.get(config["model_type"], 10000.0))
    return {**rope, "rope_theta": base}, str(rope.get("rope_type") or rope.get("type") or "default")


def rope_factors(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what llama.cpp divides the rotary frequencies by, (head_dim / 2,) float32, by the tensor's name.

    Llama 3.1's are always the same; of longrope's, llama.cpp takes the long ones if the context that it is started with
    is longer than the original one, where transformers asks that of the text.
    """
    rope, kind = _rope_settings(config)
    if kind == "longrope":
        return {
            f"rope_factors_{each}.weight": torch.tensor(rope[f"{each}_factor"], dtype=torch.float32)
            for each in ("long", "short")
        }
    if kind != "llama3":
        return {}
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    length = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    smooth = (rope["original_max_position_embeddings"] / length - low) / (high - low)
    smooth = smooth.clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / factor + smooth)
    return {"rope_freqs.weight": factors.float()}


def split_name(name: str, modules: Mapping[str, str]) -> tuple[str, int | None] | None:
    """Return llama.cpp's name of a module, and the number of the expert that it is; None where it has none.

    >>> split_name("model.layers.3.mlp.experts.7.up_proj", _EXPERTS)
    ('blk.3.ffn_up_exps', 7)
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name], None
    found = _BLOCK.fullmatch(name)
    expert = re.search(r"(?<=\.experts\.)\d+", found[2]) if found else None
    stem = modules.get(re.sub(r"(?<=\.experts\.)\d+", "{}", found[2])) if found else None
    return (f"blk.{found[1]}.{stem}", int(expert[0]) if expert else None) if found and stem else None


def module_name(name: str, modules: Mapping[str, str]) -> str | None:
    """Return the module that llama.cpp calls `name`, with "{}" for the number of an expert; None where there is none.

    >>> module_name("blk.3.ffn_up_exps", _EXPERTS), module_name("token_embd", {})
    ('model.layers.3.mlp.experts.{}.up_proj', 'model.embed_tokens')
    """
    found = _STEM.fullmatch(name)
    table = modules if found else _OUTSIDE
    inner = next((module for module, stem in table.items() if stem == (found[2] if found else name)), None)
    return f"model.layers.{found[1]}.{inner}" if found and inner else inner


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of a query or key projection, (out, ...), as llama.cpp rotates them: halves become pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def in_halves(rows: Tensor, heads: int) -> Tensor:
    """Return what `in_pairs` was given."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
