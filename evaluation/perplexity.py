"""Perplexity: windows of tokens, and the loss of every predicted token.

Without a stride, windows do not overlap, a rest that fills no window is left out, and the first token of each window is
not predicted, as in the papers. With a stride, windows start every `stride` tokens and a token is predicted
once, in the first window that holds it with something before it: after the first window from at least
`sequence_length - stride` tokens. No special tokens are added.
Perplexity is exp(sum of losses / number of predicted tokens), with a float32 log-softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CalibrationError, ConfigError

CHUNK = 1024
"""Positions whose logits are held in float32 at a time."""


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
    """The windows of a text, in order.

    Args:
        tokens: (tokens,) int64.
        sequence_length: Tokens per window.
        stride: Tokens between the starts of neighbouring windows; None for windows without overlap.
        max_windows: Leave out all later ones.

    Raises:
        ConfigError: Lengths that cannot be.
        CalibrationError: The text is shorter than a window.

    >>> [window.input_ids.tolist() for window in cut_windows(torch.arange(7), 3)]
    [[0, 1, 2], [3, 4, 5]]
    >>> [(window.input_ids.tolist(), window.predicted) for window in cut_windows(torch.arange(5), 3, stride=1)]
    [([0, 1, 2], 2), ([1, 2, 3], 1), ([2, 3, 4], 1)]
    """
    if sequence_length < 2:
        raise ConfigError(f"sequence_length is {sequence_length}; predicting needs windows of at least 2 tokens")
    if stride is not None and not 1 <= stride <= sequence_length:
        raise ConfigError(f"stride is {stride}; it must lie between 1 and sequence_length, which is {sequence_length}")
    if max_windows is not None and max_windows < 1:
        raise ConfigError(f"max_windows is {max_windows}; give a positive number, or None for all")
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


def batch_windows(windows: list[Window], batch_size: int) -> list[list[Window]]:
    """Neighbouring windows of one length that predict equally many tokens, at most `batch_size` together.

    Raises:
        ConfigError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; it must be positive")
    batches: list[list[Window]] = []
    for window in windows:
        last = batches[-1] if batches else []
        alike = last and (len(last[0].input_ids), last[0].predicted) == (len(window.input_ids), window.predicted)
        if alike and len(last) < batch_size:
            last.append(window)
        else:
            batches.append([window])
    return batches


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) at every position, (positions,) float32.

    Args:
        logits: (positions, vocabulary) in any float dtype.
        targets: (positions,) int64.
    """
    parts = zip(torch.split(logits, CHUNK), torch.split(targets, CHUNK), strict=True)
    return torch.cat([functional.cross_entropy(part.float(), labels, reduction="none") for part, labels in parts])
