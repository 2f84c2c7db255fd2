"""Rows -> token ids, through the model's tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jinja2 import TemplateError
from torch import Tensor

from ..errors import CalibrationError
from .rows import Message, Row

Tokenizer: TypeAlias = Any
"""A tokenizer of transformers (`PreTrainedTokenizerBase`), whose types are not checked."""


def encode(rows: Sequence[Row], tokenizer: Tokenizer | None, name: str) -> list[Tensor]:
    """The token ids of every row, (n,) int64 each; no special tokens are added (a chat template writes its own).

    Raises:
        CalibrationError: Text without a tokenizer, or chats without a chat template or that do not fit it.
    """
    written = [row for row in rows if not isinstance(row, Tensor)]
    if not written:
        return [row for row in rows if isinstance(row, Tensor)]
    if tokenizer is None:
        raise CalibrationError(f"{name} holds text, and there is no tokenizer; give one, or give token ids")
    texts = [row if isinstance(row, str) else _render(row, tokenizer, name) for row in written]
    # verbose=False: text longer than the model's context is cut into windows later, so the tokenizer need not warn.
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    tokens = iter(encoded)
    return [row if isinstance(row, Tensor) else torch.tensor(next(tokens), dtype=torch.int64) for row in rows]


def check_ids(ids: Tensor, vocab_size: int | None, name: str) -> None:
    """Raise a CalibrationError for the first id that is negative or not below `vocab_size` (None: any size).

    Args:
        ids: Token ids of any shape, int64.
        vocab_size: Rows of the model's embedding.
        name: What the message calls the source.
    """
    flat = ids.flatten()
    outside = flat < 0 if vocab_size is None else (flat < 0) | (flat >= vocab_size)
    if bool(outside.any()):
        position = int(outside.to(torch.uint8).argmax())
        allowed = "not be negative" if vocab_size is None else f"lie in 0 ... {vocab_size - 1}, the model's vocabulary"
        raise CalibrationError(
            f"token id {int(flat[position])} (token {position} of those taken from {name}) is out of range: ids must "
            f"{allowed}; use the tokenizer that belongs to the model"
        )


def special_tokens(tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """The ids that the tokenizer puts before and after a text, such as those of [CLS] and [SEP]."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    start = next(place for place in range(len(whole) + 1) if whole[place : place + len(bare)] == bare)
    return torch.tensor(whole[:start], dtype=torch.int64), torch.tensor(whole[start + len(bare) :], dtype=torch.int64)


def _render(chat: Sequence[Message], tokenizer: Tokenizer, name: str) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(
            f"{name} holds chat messages, and the tokenizer has no chat template; "
            "set tokenizer.chat_template, or give plain text"
        )
    for message in chat:
        if "role" not in message:
            raise CalibrationError(
                f"a chat message in {name} has the keys {', '.join(map(repr, message))}; it needs 'role' and 'content'"
            )
    try:
        return str(tokenizer.apply_chat_template(list(chat), tokenize=False))
    except TemplateError as error:
        raise CalibrationError(f"a chat in {name} does not fit the tokenizer's chat template: {error}") from error
