"""Which formats and widths of a model fit into a given memory and load where they are wanted, from its config alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .empty import EmptyModel, open_empty
from .errors import ArchitectureError, ConfigError, DoesNotFitError, ShapeError
from .export.formats import READERS, find_format
from .export.modules import counts_as_matrix, skipped_modules
from .export.names import stored_parts
from .export.readers import Facts, Reader, readers_of
from .hub import fetch
from .modes import in_plain_modes
from .quantizer.config import QuantizeConfig
from .settings import Plain, bytes_of, did_you_mean
from .targets import Target, checkpoint_bytes, find_linears, find_targets
from .units import size_text

_GRIDS = ((8, 128), (4, 32), (4, 64), (4, 128), (3, 32), (3, 64), (3, 128), (2, 32), (2, 64), (2, 128))
"""Bits and columns per group."""

_LAYOUTS = (("gptq_v2", False), ("awq", False), ("compressed-tensors", False), ("gptq", False), ("gptq", True))
"""Formats, and whether symmetric; of those that load, the first that leaves least in floating point and warns least."""

_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "Q4_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K")

_MEASURED = {
    (4, 128, False): (0.0042, 1.0025),
    (4, 128, True): (0.0044, 1.0018),
    (3, 128, False): (0.0185, 1.0150),
    (3, 128, True): (0.0177, 1.0146),
    (2, 128, False): (0.0952, 1.0775),
    (2, 128, True): (0.1022, 1.0889),
    "Q4_K_M": (0.0028, 1.0004),
    "Q4_0": (0.0034, 1.0001),
    "Q3_K_M": (0.0074, 1.0065),
    "Q2_K": (0.0343, 1.0225),
}
"""KL divergence from the float model, and perplexity over its own, by bits, group size and symmetry, or by type.

Of the example model on WikiText-2, by --quality balanced: benchmarks/results/quality.json, damped by
0.01, and llamacpp.json.
"""


@dataclass(frozen=True, kw_only=True)
class Choice(Plain):
    """One way of quantizing a model.

    Attributes:
        format: One of `FORMATS`.
        type: Recipe, in GGUF.
        bits: Bits per code, of a recipe those of most tensors.
        group_size: Columns per group, likewise.
        sym: Symmetric, likewise.
        bits_per_weight: Of the quantized layers, the cost of groups included.
        checkpoint_bytes: All tensors: the quantized layers, embeddings, output layer and what else stays in float.
        cache_bytes: Keys and values of the context, in float16.
        total_bytes: Both. Activations and the program itself come on top.
        kl_divergence: From the float model, in nats, of the example model; None where that was not measured.
        perplexity_ratio: Perplexity of the example model over that of the float model, likewise.
        warnings: What to know where it is loaded.
        command: What makes it.
    """

    format: str
    type: str | None
    bits: int
    group_size: int
    sym: bool
    bits_per_weight: float
    checkpoint_bytes: int
    cache_bytes: int
    total_bytes: int
    kl_divergence: float | None
    perplexity_ratio: float | None
    warnings: tuple[str, ...]
    command: str


@in_plain_modes
def recommend(
    model: str | Path,
    memory: int | str,
    reader: str,
    *,
    context: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[Choice]:
    """Return the formats and widths of a model that a program loads and that fit into its memory, the best first.

    That is the one with the most bits per weight; what was measured, of a small model, bears that out. A mixture with
    thousands of experts takes a minute.

    Args:
        model: Hub id or folder of a float model, of which only the config is read.
        memory: For the checkpoint and the keys and values of one context: bytes, or a text such as "8GiB".
        reader: The program, one of `READERS` in any case.
        context: Tokens; None for what the model can take, up to 4096.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Run the Python code that comes with the model.

    Raises:
        DoesNotFitError: Nothing fits; the message says what the smallest needs.
        ConfigError: The program loads this model in no format, or is not known; a memory that is no size, or more
            context than the model takes.
        GptqkitError: A model that cannot be quantized; see `errors`.
    """
    names, memory = {name.lower(): name for name in READERS}, bytes_of("memory", memory)
    if reader.lower() not in names:
        raise ConfigError(f"{reader!r} is none of {', '.join(READERS)}{did_you_mean(reader, READERS)}")
    empty = open_empty(fetch(model, revision, weights=False), trust_remote_code=trust_remote_code)
    most = getattr(empty.model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    context = min(most, 4096) if context is None else context
    if not isinstance(context, int) or not 0 < context <= most:
        raise ConfigError(f"context is {context!r}; this model takes 1 to {most} tokens")
    cache = cache_bytes(empty.model.config, context)
    how = [*(["--revision", revision] if revision else []), *["--trust-remote-code"] * trust_remote_code]
    source = shlex.join([str(model), *how])
    found, refused = [], dict[str, None]()
    for plans in _plans(empty, names[reader.lower()]):
        refused |= dict.fromkeys(why for _, _, answer in plans for why in answer.reasons)
        loading = [plan for plan in plans if plan[2].loads]
        if loading:
            config, targets, answer = min(loading, key=_cost)
            found.append(_choice(empty, config, targets, answer, cache, f"gptqkit quantize {source}"))
    if not found:
        raise ConfigError(f"{names[reader.lower()]} loads this model in no format: {'; '.join(refused)}")
    found.sort(key=lambda choice: choice.bits_per_weight, reverse=True)
    fitting = [choice for choice in found if choice.total_bytes <= memory]
    if not fitting:
        least = min(found, key=lambda choice: choice.total_bytes)
        what = least.type or f"{least.bits} bits in groups of {least.group_size}"
        raise DoesNotFitError(
            f"{size_text(least.total_bytes)} is what the smallest choice needs ({what}; {size_text(cache)} of it for "
            f"keys and values), and there is {size_text(memory)}; take a smaller model, less context or more memory"
        )
    return fitting


def cache_bytes(config: Any, context: int) -> int:
    """Return the bytes of keys and values in float16 of `context` tokens, by the model's configuration.

    Layers with a sliding window keep no more than that; those without attention nothing that grows. What attention
    compresses (MLA) is counted as servers keep it.
    """
    inner = config.get_text_config()
    text, heads = inner.to_dict(), getattr(inner, "num_attention_heads", 0)
    width = text.get("head_dim") or inner.hidden_size // max(heads, 1)
    per_token = 2 * width * (text.get("num_key_value_heads") or text.get("num_kv_heads") or heads)
    if text.get("kv_lora_rank"):
        per_token = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    kinds = text.get("layer_types") or ["attention"] * inner.num_hidden_layers
    tokens = dict.fromkeys(("attention", "full_attention", "chunked_attention"), context)
    tokens["sliding_attention"] = min(context, text.get("sliding_window") or context)
    return sum(2 * per_token * tokens.get(kind, 0) for kind in kinds)


def _plans(empty: EmptyModel, reader: str) -> Iterator[list[tuple[QuantizeConfig, list[Target], Reader]]]:
    """Yield for every width, or every type of GGUF, the layouts that can hold it, and what the reader says of them."""
    if reader == "llama.cpp":
        rows = [[QuantizeConfig(type=name)] for name in _TYPES]
    else:
        rows = [
            [QuantizeConfig(bits=bits, group_size=size, sym=sym, format=name) for name, sym in _LAYOUTS]
            for bits, size in _GRIDS
        ]
    refusal, fits, linears = None, False, find_linears(empty.model)
    for row in rows:
        plans = []
        for config in row:
            try:
                targets = [target for part in find_targets(empty.model, config, linears)[0] for target in part]
            except (ArchitectureError, ConfigError, ShapeError) as error:  # the format cannot hold that
                refusal = error
                continue
            plans.append((config, targets, _answer(empty, config, targets, reader)))
        fits |= bool(plans)
        yield plans
    if refusal is not None and not fits:
        raise refusal


def _cost(plan: tuple[QuantizeConfig, list[Target], Reader]) -> tuple[int, int]:
    """Return what a layout leaves in floating point, counted from the rest, and of how much its reader warns."""
    return -sum(target.weights for target in plan[1]), len(plan[2].warnings)


def _answer(empty: EmptyModel, config: QuantizeConfig, targets: Sequence[Target], reader: str) -> Reader:
    """Return what a reader would make of a checkpoint that is not written yet."""
    specs, layout = {target.name: target.spec for target in targets}, find_format(config.format)
    weights = {f"{name}.weight" for name in specs}
    parameters = empty.model.named_parameters()
    matrices = [name for name, each in parameters if counts_as_matrix(name, each.ndim) and name not in weights]
    for part, stored in stored_parts(empty.stacked).items():
        specs = {name.replace(part, stored): spec for name, spec in specs.items()}
        matrices = [name.replace(part, stored) for name in matrices]
    values = layout.write_config(config, specs, matrices)
    facts = Facts(
        declared=layout.read_config(values, "the plan"),
        layers=specs,
        skipped=skipped_modules(specs, matrices),
        model_config=empty.model.config.to_dict(),
        quantization_config=values,
    )
    return next(found for found in readers_of(facts) if found.name == reader)


def _choice(
    empty: EmptyModel, config: QuantizeConfig, targets: Sequence[Target], answer: Reader, cache: int, command: str
) -> Choice:
    packed, others = checkpoint_bytes(empty.model, targets, config)
    weights = sum(target.weights for target in targets)
    size = config.group_size or -1
    measured = _MEASURED.get(config.type or (config.bits, size, config.sym), (None, None))
    how = (
        f"--type {config.type}" if config.type else f"--bits {config.bits} --group-size {size} --format {config.format}"
    )
    if not (config.type or config.sym):
        how += " --asym"
    return Choice(
        format=config.format,
        type=config.type,
        bits=config.bits,
        group_size=size,
        sym=config.sym,
        bits_per_weight=packed * 8 / weights,
        checkpoint_bytes=packed + others,
        cache_bytes=cache,
        total_bytes=packed + others + cache,
        kl_divergence=measured[0],
        perplexity_ratio=measured[1],
        warnings=answer.warnings,
        command=f"{command} {config.type or f'w{config.bits}-g{size}'} --calibration wikitext2 {how}",
    )
