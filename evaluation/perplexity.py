"""All measurements of a language model on a text, in one pass: perplexity, and how far it lies from a reference model.

Without a stride, windows do not overlap, a rest that fills no window is left out, and the first token of each window is
not predicted, as in the papers. With a stride, windows start every `stride` tokens and a token is predicted
once, in the first window that holds it with something before it: after the first window from at least
`sequence_length - stride` tokens. No special tokens are added.
An encoder-decoder reads the first half of a window in its encoder, and only the second half is predicted.
Perplexity is exp(sum of losses / number of predicted tokens), with a float32 log-softmax.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ..calibration.batches import in_pieces
from ..calibration.halves import model_inputs, parts_of
from ..calibration.samples import Samples
from ..errors import CalibrationError, ConfigError, NonFiniteError, ShapeError
from ..progress import Progress, ProgressCallback, silent
from ..settings import Plain
from ..units import counted

_Item = TypeVar("_Item")

CHUNK = 1024
"""Positions whose logits are held in float32 at a time."""


@dataclass(frozen=True, kw_only=True)
class Scores(Plain):
    """What was measured.

    Attributes:
        perplexity: exp(sum of losses / tokens).
        tokens: Predicted tokens.
        windows: Windows that went through the model.
        sequence_length: Tokens per window.
        stride: Tokens between the starts of windows; None for windows without overlap.
        seconds: Time of all forward passes and sums, the reference's included.
        reference_perplexity: The reference's, where there is one.
        kl_divergence: Mean over predicted tokens of KL(reference || model), nats.
        top1_agreement: Share of predicted tokens where both find the same token likeliest.
        backend: What the quantized layers ran on; None for a float model.
    """

    perplexity: float
    tokens: int
    windows: int
    sequence_length: int
    stride: int | None
    seconds: float
    reference_perplexity: float | None = None
    kl_divergence: float | None = None
    top1_agreement: float | None = None
    backend: str | None = None


@torch.inference_mode()
def score(
    model: Any,
    tokens: Tensor,
    *,
    reference: Any | None = None,
    sequence_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    max_windows: int | None = None,
    progress: ProgressCallback = silent,
) -> Scores:
    """Measure the perplexity of `model` on `tokens`, (tokens,) int64, and with a `reference` its divergence from it.

    Both are language models of transformers in evaluation mode, and run where they are, on the windows of
    `cut_windows`, `batch_size` at a time, or fewer where memory runs out. `progress` counts windows.

    Raises:
        CalibrationError, ConfigError: As `cut_windows`.
        NonFiniteError: The losses are not finite.
        ShapeError: `reference` has another vocabulary.
    """
    start = time.perf_counter()
    windows = cut_windows(tokens, sequence_length, stride=stride, max_windows=max_windows)
    sums = torch.zeros(4, dtype=torch.float64)
    predicted, done, size = 0, 0, batch_size
    for batch in in_batches(windows, lambda window: (len(window.input_ids), window.predicted), batch_size):
        ids = torch.stack([window.input_ids for window in batch])
        count = min(batch[0].predicted, parts_of(Samples(ids), model)[-1].input_ids.shape[1] - 1)
        rows, size = in_pieces(partial(_measure_rows, model, reference, ids, count), size)
        for row, found in enumerate(rows):
            for whose, loss in zip(("model", "reference"), found.tolist(), strict=False):
                if not math.isfinite(loss):
                    raise NonFiniteError(
                        f"the {whose}'s loss in window {done + row} is {loss}; its activations left the range of its "
                        "dtype: evaluate in float32 or bfloat16"
                    )
            sums += found
        predicted += count * len(batch)
        done += len(batch)
        progress(Progress(stage="evaluate", done=done, total=len(windows)))
    loss, reference_loss, divergence, agreed = (sums / predicted).tolist()
    compared = reference is not None
    return Scores(
        perplexity=math.exp(loss),
        tokens=predicted,
        windows=len(windows),
        sequence_length=sequence_length,
        stride=stride,
        seconds=time.perf_counter() - start,
        reference_perplexity=math.exp(reference_loss) if compared else None,
        kl_divergence=divergence if compared else None,
        top1_agreement=agreed if compared else None,
    )


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
            f"the text has {counted(count, 'token')}, less than one window of {sequence_length}; give a longer text or "
            "a smaller sequence_length"
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


def _measure_rows(model: Any, reference: Any | None, ids: Tensor, count: int, size: int) -> list[Tensor]:
    """Return what `_measure` finds in the last `count` tokens of every row of `ids`, `size` rows at a time."""
    found = []
    for part in torch.split(ids, size):
        logits = _predict(model, part, count)
        expected = None if reference is None else _predict(reference, part, count)
        for row, targets in enumerate(part[:, -count:]):
            other = None if expected is None else expected[row].to(logits.device)
            found.append(_measure(logits[row], other, targets.to(logits.device)))
    return found


def _predict(model: Any, ids: Tensor, count: int) -> Tensor:
    """Return the logits for the last `count` tokens of every row, (rows, count, vocabulary)."""
    inputs = model_inputs(parts_of(Samples(ids), model), slice(None), model.device)
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits[:, -count - 1 : -1]


def _measure(logits: Tensor, reference: Tensor | None, targets: Tensor) -> Tensor:
    """Return sums over positions, (4,) float64: the loss; the reference's, KL(reference || model) and agreement."""
    if reference is not None and reference.shape != logits.shape:
        raise ShapeError(
            f"the reference's logits are {tuple(reference.shape)}, the model's {tuple(logits.shape)}; compare models "
            "that share a vocabulary"
        )
    sums = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(targets), CHUNK):
        part = slice(start, start + CHUNK)
        q = logits[part].float().log_softmax(-1)
        losses = [functional.nll_loss(q, targets[part], reduction="none")]
        if reference is not None:
            p = reference[part].float().log_softmax(-1)
            losses.append(functional.nll_loss(p, targets[part], reduction="none"))
            losses.append(functional.kl_div(q, p, reduction="none", log_target=True).sum(-1))
            losses.append(reference[part].argmax(-1) == logits[part].argmax(-1))
        sums[: len(losses)] += torch.stack([each.double().sum() for each in losses]).cpu()
    return sums
