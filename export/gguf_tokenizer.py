"""A tokenizer of transformers as the metadata of a GGUF file: byte-level BPE, as GPT-2's and those after it.

llama.cpp knows the rules by which text is cut into words by name; they are told here from the tokenizer's own. Others
are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ConversionError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# llama.cpp's names of rules, by the regular expressions of tokenizer.json; its own byte-level rule is GPT-2's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_RULES = {_GPT2: "gpt-2", _WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}


def tokenizer_metadata(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer, by key.

    Args:
        tokenizer: A fast tokenizer of transformers.
        vocab_size: Rows of the embedding; ids without a token are filled up.

    Raises:
        ConversionError: A tokenizer that is not written here.
    """
    if tokenizer is None:
        raise ConversionError(
            "there is no tokenizer, which a GGUF file holds; put it beside the model, or give --tokenizer"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConversionError(
            f"{type(tokenizer).__name__} has no tokenizer.json, from which GGUF files are written here"
        )
    values = json.loads(backend.to_str())
    model = values["model"]
    rule = _rule(values)
    if model.get("type") != "BPE" or rule is None:
        kinds = f"{model.get('type')} with the pre-tokenizer {_kind(values.get('pre_tokenizer'))}"
        raise ConversionError(
            f"the tokenizer ({kinds}) is not written as GGUF here: byte-level BPE is, with the rules of "
            f"{', '.join((*_RULES.values(), 'smollm'))}; choose another format"
        )
    tokens, types = _tokens(values, vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    for key in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{key}_token_id", None)
        if number is not None:
            found[f"tokenizer.ggml.{'unknown' if key == 'unk' else key.replace('pad', 'padding')}_token_id"] = number
    alone = tokenizer("")["input_ids"]
    found["tokenizer.ggml.add_bos_token"] = bool(alone) and alone[0] == tokenizer.bos_token_id
    found["tokenizer.ggml.add_eos_token"] = bool(alone) and alone[-1] == tokenizer.eos_token_id
    if isinstance(tokenizer.chat_template, str):
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _tokens(values: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the text and the kind of every token."""
    tokens, types = [f"[PAD{number}]" for number in range(vocab_size)], [_UNUSED] * vocab_size
    added = [
        (entry["content"], entry["id"], _CONTROL if entry["special"] else _USER_DEFINED)
        for entry in values["added_tokens"]
    ]
    for text, number, kind in [*((text, number, _NORMAL) for text, number in values["model"]["vocab"].items()), *added]:
        if not 0 <= number < vocab_size:
            raise ConversionError(f"the tokenizer has a token {number}, but the model only {vocab_size} embeddings")
        tokens[number], types[number] = text, kind
    return tokens, types


def _rule(values: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of how text is cut into words; None where it is none that is known here."""
    entry = values.get("pre_tokenizer") or {}
    steps = entry["pretokenizers"] if entry.get("type") == "Sequence" else [entry]
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if values.get("normalizer") not in (None, {"type": "NFC"}):
        return None
    if len(steps) == 1:
        return "gpt-2" if steps[0].get("use_regex", True) else None
    if len(steps) == 2 and steps[0] == {"type": "Digits", "individual_digits": True}:
        return "smollm" if steps[1].get("use_regex", True) else None
    if len(steps) > 2 or steps[0].get("type") != "Split" or steps[-1].get("use_regex", True):
        return None
    return _RULES.get(steps[0].get("pattern", {}).get("Regex"))


def _kind(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "none"
    steps = entry.get("pretokenizers")
    return "+".join(str(step.get("type")) for step in steps) if steps else str(entry.get("type"))
