"""Perplexity: windows of tokens, and which of them are predicted.

Without a stride, windows do not overlap, a rest that fills no window is left out, and the first token of each window is
not predicted, as in the papers. With a stride, windows start every `stride` tokens and a token is predicted
once, in the first window that holds it with something before it: after the first window from at least
`sequence_length - stride` tokens. No special tokens are added.
An encoder-decoder reads the first half of a window in its encoder, and only the second half is predicted.
Perplexity is exp(sum of losses / number of predicted tokens), with a float32 log-softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from torch import Tensor

from ..errors import CalibrationError, ConfigError

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Tokens that go through the model together.

    Attributes:
        input_ids: (length,) int64.
        predicted: How many of the last tokens count; their predictions stand one position earlier.
    """

    input_ids: Tensor
    predicted: int


def cut_windows(
    tokens: Tensor, sequence_length: int, *, stride: int | None = None, max_windows: int | None = None
) -> list[Window]:
    """Return the first `max_windows` windows of a text, (tokens,) int64; all settings are those of `Evaluation`.

    Raises:
        ConfigError: Lengths that cannot be.
        CalibrationError: The text is shorter than a window.

    >>> import torch
    >>> [window.input_ids.tolist() for window in cut_windows(torch.arange(7), 3)]
    [[0, 1, 2], [3, 4, 5]]
    >>> [(window.input_ids.tolist(), window.predicted) for window in cut_windows(torch.arange(5), 3, stride=1)]
    [([0, 1, 2], 2), ([1, 2, 3], 1), ([2, 3, 4], 1)]
    """
    if sequence_length < 2:
        raise ConfigError(f"sequence_length is {sequence_length}; predicting needs windows of at least 2 tokens")
    if stride is not None and stride > sequence_length:
        raise ConfigError(f"stride is {stride}; it must lie between 1 and sequence_length, which is {sequence_length}")
    count = len(tokens)
    if count < sequence_length:
        raise CalibrationError(
            f"the text has {count} tokens, less than one window of {sequence_length}; give a longer text or a smaller "
            "sequence_length"
        )
    if stride is None:
        whole = tokens[: count // sequence_length * sequence_length].view(-1, sequence_length)
        return [Window(input_ids=ids, predicted=sequence_length - 1) for ids in whole[:max_windows]]
    windows: list[Window] = []
    end = 0
    for start in range(0, count, stride):
        previous, end = end, min(start + sequence_length, count)
        predicted = min(end - previous, end - start - 1)  # the first token of a window has nothing before it
        if predicted:
            windows.append(Window(input_ids=tokens[start:end], predicted=predicted))
        if end == count or len(windows) == max_windows:
            break
    return windows


def in_batches(items: Iterable[_Item], kind: Callable[[_Item], Any], size: int) -> Iterator[list[_Item]]:
    """Yield neighbours of one kind, at most `size` together.

    >>> list(in_batches("aaabb", str, 2))
    [['a', 'a'], ['a'], ['b', 'b']]
    """
    for _, group in groupby(items, kind):
        alike = list(group)
        yield from (alike[first : first + size] for first in range(0, len(alike), size))
