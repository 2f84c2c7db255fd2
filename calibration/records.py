"""What a source holds, item by item -> documents: records, batches, texts, chats, and token ids with their masks."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import CalibrationError
from .chats import Chat

Document: TypeAlias = str | Chat | Tensor
"""Text, a chat, or token ids, int64: (n,) of a document, (1, n) of a ready sample. One without content is empty."""

COLUMNS = ("text", "content", "messages", "conversations", "input_ids")
"""The columns that are looked for, in this order, where none is named."""

SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Roles by what chats in ShareGPT's form call them."""

MESSAGE = "'role' and 'content', or 'from' and 'value'"
"""What a message of a chat has."""

WORDLESS = ("tool_calls", "function_call", "reasoning_content", "thinking")
"""What a message may have in place of content."""

MOST = 4 << 30  # characters of one file: more is a mistake, or a file that is small but unpacks to anything
NESTING = 2  # lists in a list: a batch of records, each of which holds several documents

KINDS = (
    f"text, a chat (a list of messages with {MESSAGE}), token ids (whole numbers of 64 bits), a record of one of "
    "these, or a batch of them"
)


class Reader:
    """What turns any items into documents; the first record says which column holds them, unless `column` does.

    `turned` records are as torch collated them: a list of a column's first entries, one of its second, and so on.
    """

    def __init__(self, name: str, column: str | None, *, turned: bool = False) -> None:
        self._name, self._column, self._named, self._turned = name, column, column is not None, turned
        self._number, self._item, self._characters = 0, None, 0

    def documents(self, items: Iterable[Any]) -> Iterator[Document]:
        """Yield the documents in every item."""
        for self._number, self._item in enumerate(items):
            yield from self._inside(self._turn(self._item), NESTING)

    def _inside(self, value: Any, depth: int, mask: Any = None) -> Iterator[Document]:
        """Yield the documents in a text, a chat, token ids (with the mask that tells their padding), or what has such.

        Records are looked into at their column, batches at each entry, at most `depth` times.
        """
        if hasattr(value, "tolist") and not isinstance(value, Tensor):  # of numpy
            value = self._numbers(value.tolist()) if value.dtype.kind in "iu" and value.size else value.tolist()
        ids = _ids(value)
        if value is None or isinstance(value, str):
            yield self._text(value or "")
        elif isinstance(value, Mapping):
            column = self._find(value)
            mask = value.get("attention_mask") if column == "input_ids" or self._named else None
            found, mask = self._turn(value[column]), self._turn(mask)
            yield from self._inside(found, depth, mask.tolist() if hasattr(mask, "tolist") else mask)
        elif ids is not None:
            yield from self._rows(ids, mask)
        elif _is_chat(value):
            yield Chat([*map(self._message, value)], f"document {self._number} of {self._name}")
        elif depth and isinstance(value, Sequence) and not isinstance(value, bytes):
            if isinstance(value, tuple) and len(value) > 1 and _tensors(value):
                raise self._nameless()
            masks = [None] * len(value) if mask is None else mask
            if not isinstance(masks, Sequence) or len(masks) != len(value):
                raise self._refusal()
            for entry, its in zip(value, masks, strict=True):
                yield from self._inside(entry, depth - 1, its)
        else:
            raise self._refusal()

    def _turn(self, column: Any) -> Any:
        """Return a column by records, where torch collated it by places."""
        if not self._turned or not isinstance(column, (list, tuple)) or not _tensors(column):
            return column
        if all(each.ndim == 1 for each in column):
            return torch.stack(list(column), -1)
        if len(column) > 1:
            raise self._nameless()
        return column

    def _text(self, text: str) -> str:
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            raise CalibrationError(
                f"document {self._number} of {self._name} holds half of a surrogate pair, character {error.start}, "
                "which no file in UTF-8 can; read it again with the right encoding"
            ) from error
        self._characters += len(text)
        if self._characters > MOST:
            raise CalibrationError(
                f"document {self._number} of {self._name} brings its text to more than {MOST >> 20} Mi characters; "
                "give a part of it"
            )
        return text

    def _rows(self, ids: Tensor, mask: Any) -> Iterator[Tensor]:
        """Yield one document, or ready samples: ids with a mask, or in two dimensions."""
        kept = torch.ones_like(ids) if mask is None else self._numbers(mask)
        if kept.shape != ids.shape:
            raise self._refusal()
        if mask is None and ids.ndim == 1:
            yield ids
            return
        length = ids.shape[-1]
        for row, its in zip(ids.reshape(-1, length), kept.reshape(-1, length).bool(), strict=True):
            yield row[its][None]

    def _numbers(self, values: Any) -> Tensor:
        try:
            return torch.tensor(values)
        except (RuntimeError, TypeError, ValueError) as error:  # ragged, too large, or no numbers
            raise self._refusal() from error

    def _find(self, record: Mapping[Any, Any]) -> str:
        """Return the column of a record that holds documents."""
        if self._column is None:
            texts = [key for key, value in record.items() if isinstance(value, str)]
            found = needed_columns(list(record), None) or texts
            if found is texts and len(texts) != 1:
                raise CalibrationError(
                    f"{self._name} has none of the columns {', '.join(COLUMNS)}, and {len(texts)} others with text; "
                    f"name the column to read with column (--column): {names_of(record)}. Messages of a chat have "
                    f"{MESSAGE}"
                )
            self._column = found[0]
        if self._column not in record:
            chat = all(isinstance(value, str) for value in record.values())
            raise CalibrationError(
                f"record {self._number} of {self._name} has no column {self._column!r}; its columns are "
                f"{names_of(record)}{f', and messages of a chat have {MESSAGE}' if chat else ''}"
            )
        return self._column

    def _message(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with role and content, also where ShareGPT's form says from and value."""
        if "role" not in given:
            return {"role": SPEAKERS.get(given["from"], given["from"]), "content": given["value"]}
        if "content" not in given and given.keys().isdisjoint(WORDLESS):
            raise CalibrationError(
                f"document {self._number} of {self._name} is a chat with a message of {names_of(given)}; it must have "
                f"{MESSAGE}"
            )
        return given

    def _nameless(self) -> CalibrationError:
        return CalibrationError(
            f"document {self._number} of {self._name} is several tensors, and nothing says which of them is a mask; "
            "give dictionaries of input_ids and attention_mask"
        )

    def _refusal(self) -> CalibrationError:
        return CalibrationError(f"document {self._number} of {self._name} is {shown(self._item)}; it must be {KINDS}")


def is_single(value: Any) -> bool:
    """Whether a value is one item and not several: an array, a record, a chat, or the token ids of one document."""
    return hasattr(value, "dtype") or isinstance(value, Mapping) or _is_chat(value) or _ids(value) is not None


def is_ready(document: Document | None) -> bool:
    """Whether a document is a ready sample, to be used as it is."""
    return isinstance(document, Tensor) and document.ndim == 2


def alike(documents: Iterable[Document], name: str) -> Iterator[Document]:
    """Yield documents, of which either all or none may be ready samples."""
    kinds = set()
    for document in documents:
        if len(document):
            kinds.add(is_ready(document))
        if len(kinds) > 1:
            raise CalibrationError(
                f"{name} holds both text and ready samples (token ids in two dimensions, or with an attention_mask, or "
                "in .safetensors files); give one kind"
            )
        yield document


def needed_columns(names: Sequence[str], column: str | None) -> list[str] | None:
    """Return the column to read, and what tells padding, where the names of all columns tell."""
    found = next((name for name in ([column] if column else COLUMNS) if name in names), None)
    if found is None:
        return None
    masked = found in ("input_ids", column)
    return [found, *(name for name in names if name == "attention_mask" and name != found and masked)]


def _ids(value: Any) -> Tensor | None:
    """Return token ids, int64, that are a tensor or a list of whole numbers; None for anything else."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return value.detach().to("cpu", torch.int64) if whole and value.ndim else None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return None
    if all(isinstance(item, (int, Integral)) and not isinstance(item, bool) for item in value):
        return torch.tensor(value, dtype=torch.int64) if -(1 << 63) <= min(value) <= max(value) < 1 << 63 else None
    return None


def _tensors(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(isinstance(each, Tensor) for each in values)


def _is_chat(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return False
    return all(isinstance(item, Mapping) and ("role" in item or {"from", "value"} <= item.keys()) for item in value)


def shown(value: Any) -> str:
    """Return a value for a message, whatever its size."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__} with a huge number"


def names_of(keys: Iterable[Any]) -> str:
    """Return the first names of columns or splits, for a message."""
    listed = [reprlib.repr(key) for key in keys]
    return (", ".join(listed[:8]) or "none") + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
