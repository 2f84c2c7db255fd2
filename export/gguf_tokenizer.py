"""A tokenizer of transformers as the metadata of a GGUF file: byte-level BPE, as GPT-2's, or SentencePiece's BPE.

llama.cpp knows the rules by which byte-level tokenizers cut text into words by name; they are told here from the
tokenizer's own. SentencePiece's (Llama 2, Mistral, Gemma) merges by scores of tokens. Others are refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConversionError

_MARK = "\u2581"  # of SentencePiece, for a space
_PREPEND = {"type": "Prepend", "prepend": _MARK}
_BYTES = re.compile("<0x[0-9A-F]{2}>")
_UNMERGED = -1e4  # the score of what no merge makes
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

# llama.cpp's names of rules, by the regular expressions of tokenizer.json; its own byte-level rule is GPT-2's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_RULES = {_GPT2: "gpt-2", _WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}


def tokenizer_metadata(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer, by key; ids of the embedding without a token are filled up.

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
    found = _byte_level(values) or _sentence_pieces(values)
    if found is None:
        kinds = f"{values['model'].get('type')} with the pre-tokenizer {_kind(values.get('pre_tokenizer'))}"
        raise ConversionError(
            f"the tokenizer ({kinds}) is not written as GGUF here: byte-level BPE is, with the rules of "
            f"{', '.join((*_RULES.values(), 'smollm'))}, and SentencePiece's BPE; choose another format"
        )
    tokens, types = _tokens(values, vocab_size)
    scores = found.pop("scores", None)
    if scores is not None:
        found["tokenizer.ggml.scores"] = [scores.get(token, _UNMERGED) for token in tokens]
        types = [_BYTE if _BYTES.fullmatch(token) else kind for token, kind in zip(tokens, types, strict=True)]
        unknown = getattr(tokenizer, "unk_token_id", None)
        types = [_UNKNOWN if number == unknown else kind for number, kind in enumerate(types)]
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
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


def _byte_level(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metadata of a byte-level BPE."""
    rule, model = _rule(values), values["model"]
    if model.get("type") != "BPE" or rule is None:
        return None
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": rule, "tokenizer.ggml.merges": merges}


def _sentence_pieces(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the metadata of SentencePiece's BPE, and "scores" by token: what is merged earlier scores higher."""
    prefix, model = _space_prefix(values), values["model"]
    if model.get("type") != "BPE" or not model.get("byte_fallback") or prefix is None:
        return None
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        scores.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), -float(rank))
    prefixed = {"tokenizer.ggml.add_space_prefix": prefix}
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", **prefixed, "scores": scores}


def _space_prefix(values: Mapping[str, Any]) -> bool | None:
    """Whether a space is put before the text, where spaces become the mark of SentencePiece; None where they do not."""
    normalizer, words = values.get("normalizer") or {}, values.get("pre_tokenizer") or {}
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer] if normalizer else []
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    if words.get("type") == "Metaspace":
        whole = words.get("replacement") == _MARK and not words.get("split", True) and not steps
        return words.get("prepend_scheme") != "never" if whole else None
    if words and (words.get("type"), words.get("pattern")) != ("Split", {"String": " "}):  # of which none is left
        return None
    return {1: False, 2: True}.get(len(steps)) if steps in ([marks], [_PREPEND, marks]) else None


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
