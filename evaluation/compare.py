"""All measurements of a model on a text, in one pass: perplexity, and how far it lies from a reference model."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import NonFiniteError, ShapeError
from ..progress import Progress, ProgressCallback, silent
from .perplexity import CHUNK, batch_windows, cut_windows, token_losses


@dataclass(frozen=True, kw_only=True)
class Scores:
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)


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
    """Measure the perplexity of `model` on `tokens` and, with a `reference`, its divergence from it.

    Args:
        model: A causal language model of transformers, in evaluation mode; it is run where it is.
        tokens: The text, (tokens,) int64.
        reference: The float model to compare with; it sees the same windows.
        sequence_length: Tokens per window.
        stride: Tokens between the starts of windows; None for windows without overlap (see `perplexity`).
        batch_size: Windows at a time.
        max_windows: Use only the first ones.
        progress: Called after every batch, counted in windows.

    Raises:
        CalibrationError: The text is shorter than a window.
        ConfigError: Lengths that cannot be.
        NonFiniteError: The losses are not finite.
        ShapeError: `reference` has another vocabulary.
    """
    start = time.perf_counter()
    windows = cut_windows(tokens, sequence_length, stride=stride, max_windows=max_windows)
    loss = reference_loss = divergence = 0.0
    agreed = predicted = done = 0
    for batch in batch_windows(windows, batch_size):
        ids = torch.stack([window.input_ids for window in batch])
        count = batch[0].predicted
        logits = _predict(model, ids, count)
        expected = None if reference is None else _predict(reference, ids, count)
        for row, window in enumerate(batch):
            targets = window.input_ids[-count:].to(logits.device)
            loss += _sum(token_losses(logits[row], targets), "model", done + row)
            if expected is not None:
                other = expected[row].to(logits.device)
                reference_loss += _sum(token_losses(other, targets), "reference", done + row)
                divergence += float(kl_divergence(other, logits[row]).double().sum())
                agreed += int(top1_agreement(other, logits[row]).sum())
        predicted += count * len(batch)
        done += len(batch)
        progress(Progress(stage="evaluate", done=done, total=len(windows)))
    compared = reference is not None
    return Scores(
        perplexity=math.exp(loss / predicted),
        tokens=predicted,
        windows=len(windows),
        sequence_length=sequence_length,
        stride=stride,
        seconds=time.perf_counter() - start,
        reference_perplexity=math.exp(reference_loss / predicted) if compared else None,
        kl_divergence=divergence / predicted if compared else None,
        top1_agreement=agreed / predicted if compared else None,
    )


def _predict(model: Any, ids: Tensor, count: int) -> Tensor:
    """Return the logits for the last `count` tokens of every row, (rows, count, vocabulary)."""
    logits: Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
    return logits[:, -count - 1 : -1]


def _sum(losses: Tensor, whose: str, window: int) -> float:
    total = float(losses.double().sum())
    if not math.isfinite(total):
        raise NonFiniteError(
            f"the {whose}'s loss in window {window} is {total}; its activations left the range of its dtype: evaluate "
            "in float32 or bfloat16"
        )
    return total


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Return KL(p || q) in nats at every position, (positions,) float32.

    p = softmax(reference) and q = softmax(logits), in float32: sum over the vocabulary of p (log p - log q).

    Args:
        reference: Logits of the float model, (positions, vocabulary) in any float dtype.
        logits: Logits of the other model for the same positions.

    Raises:
        ShapeError: The shapes differ.
    """
    _check(reference, logits)
    return torch.cat(
        [
            functional.kl_div(
                functional.log_softmax(q.float(), dim=-1),
                functional.log_softmax(p.float(), dim=-1),
                reduction="none",
                log_target=True,
            ).sum(-1)
            for p, q in zip(torch.split(reference, CHUNK), torch.split(logits, CHUNK), strict=True)
        ]
    )


def top1_agreement(reference: Tensor, logits: Tensor) -> Tensor:
    """Return whether both models find the same token likeliest, (positions,) bool.

    Args:
        reference: Logits, (positions, vocabulary).
        logits: Logits of the other model for the same positions.

    Raises:
        ShapeError: The shapes differ.
    """
    _check(reference, logits)
    return reference.argmax(-1) == logits.argmax(-1)


def _check(reference: Tensor, logits: Tensor) -> None:
    if reference.shape != logits.shape:
        raise ShapeError(
            f"the reference's logits are {tuple(reference.shape)}, the model's {tuple(logits.shape)}; compare models "
            "that share a vocabulary"
        )
