"""What every source is turned into before it becomes tokens: rows, or windows that are ready made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import CalibrationError

Message: TypeAlias = Mapping[str, Any]
Row: TypeAlias = str | Sequence[Message] | Tensor
"""One document: text, the messages of one chat, or token ids (n,) int64. A row without content is the empty string."""

COLUMNS = ("text", "content", "messages", "input_ids")
"""The columns that are looked for, in this order, where none is named."""


@dataclass(frozen=True)
class Rows:
    """The documents of one source, in its own order.

    Attributes:
        name: What error messages call the source.
        rows: The documents; may be read once only.
        streamed: Whether the rows may have no end, so that no more of them should be read than needed.
    """

    name: str
    rows: Iterable[Row]
    streamed: bool = False


@dataclass(frozen=True, eq=False)
class FixedWindows:
    """Windows that somebody cut already and that are used as they are.

    Attributes:
        name: What error messages call the source.
        input_ids: (samples, length) int64.
    """

    name: str
    input_ids: Tensor


def to_row(value: Any, name: str, number: int) -> Row:
    """The value of row `number` (from 0) as a row.

    Raises:
        CalibrationError: It is neither text, nor a list of messages, nor token ids.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Tensor) and value.ndim == 1:
        return to_ids(value, name)
    if isinstance(value, Sequence):
        if not value:
            return ""
        if all(isinstance(item, Mapping) for item in value):
            return value
        if all(isinstance(item, int) for item in value):
            return torch.tensor(value, dtype=torch.int64)
    if isinstance(value, Mapping) and "role" in value:
        raise CalibrationError(
            f"row {number} of {name} is a single message; a chat is a list of messages, so put it into a list"
        )
    raise CalibrationError(
        f"row {number} of {name} is {_describe(value)}; a row must be text, a list of chat messages "
        "or a list of token ids"
    )


def to_ids(tensor: Tensor, name: str) -> Tensor:
    """The same token ids as int64 on the CPU.

    Raises:
        CalibrationError: The dtype is not one of whole numbers.
    """
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise CalibrationError(f"{name} holds {tensor.dtype}; token ids must be whole numbers (int64)")
    return tensor.detach().to("cpu", torch.int64)


def find_column(row: Mapping[str, Any], column: str | None, name: str) -> str:
    """The name of the column that holds the documents, found on one row of the source.

    Without a `column`: the first of text, content, messages and input_ids, else the only column of text.

    Raises:
        CalibrationError: There is no such column, or no single column of text.
    """
    present = ", ".join(repr(key) for key in row) or "none"
    if column is not None:
        if column not in row:
            raise CalibrationError(f"{name} has no column {column!r}; its columns are {present}")
        return column
    for candidate in COLUMNS:
        if candidate in row:
            return candidate
    texts = [key for key, value in row.items() if isinstance(value, str)]
    if len(texts) == 1:
        return texts[0]
    raise CalibrationError(
        f"{name} has {len(texts)} columns of text and none is called {', '.join(COLUMNS)}; its columns are {present}: "
        "name one with column"
    )


def column_values(rows: Iterable[Mapping[str, Any]], column: str | None, name: str) -> Iterator[Any]:
    """The values of one column, row by row; the column is found on the first row.

    Raises:
        CalibrationError: A row lacks the column.
    """
    found: str | None = None
    for number, row in enumerate(rows):
        if found is None:
            found = find_column(row, column, name)
        if found not in row:
            raise CalibrationError(
                f"row {number} of {name} has no column {found!r}; its columns are "
                f"{', '.join(repr(key) for key in row) or 'none'}"
            )
        yield row[found]


def _describe(value: Any) -> str:
    if isinstance(value, Sequence):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {' and '.join(kinds)}"
    return f"of type {type(value).__name__}"
