"""One call that measures a checkpoint or a model on a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .calibration.windows import load_tokens
from .errors import ConfigError
from .evaluation.scores import Scores, score
from .loading import is_quantized, load, load_float
from .progress import ProgressCallback, silent

LONGEST_DEFAULT = 2048


def evaluate(
    model: Any,
    dataset: Any,
    *,
    reference: Any | None = None,
    sequence_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    max_windows: int | None = None,
    device: torch.device | str = "auto",
    backend: str = "auto",
    dtype: torch.dtype | str = "auto",
    tokenizer: Any | None = None,
    column: str | None = None,
    split: str | None = None,
    trust_remote_code: bool = False,
    progress: ProgressCallback = silent,
) -> Scores:
    """Perplexity on `dataset` and, with a `reference`, KL divergence and top-1 agreement.

    A checkpoint runs on its quantized kernels, never as the dequantized original.

    Args:
        model: Directory of a quantized checkpoint; directory or Hub id of a float model; or a loaded model, which runs
            where it is.
        dataset: A text file, a data set, or any other source of `calibration.sources`.
        reference: The float model to compare with, as a directory, Hub id or loaded model.
        sequence_length: Tokens per window; None for 2048 or the model's maximum, whichever is less.
        stride: Tokens between the starts of windows; None for windows without overlap, as in the papers.
        batch_size: Windows at a time.
        max_windows: Use only the first ones.
        device: Where models given by path or id run.
        backend: For a quantized checkpoint; see `load`.
        dtype: Of models given by path or id; see `load`.
        tokenizer: Needed where the model is a loaded one or has none, and `dataset` is text.
        column: The column of the data set that holds the text.
        split: The split of the data set.
        trust_remote_code: Run code that a float model brings along.
        progress: Called after every batch, counted in windows.

    Raises:
        ConfigError: Settings that cannot be, such as windows longer than the model's positions.
        CalibrationError: Text that cannot be used.
        CheckpointError: Files that are damaged or contradict each other.
        DatasetUnavailableError: A model or data set that cannot be found or fetched.
    """
    model, own_tokenizer = _open(model, device, backend, dtype, trust_remote_code)
    tokenizer = own_tokenizer if tokenizer is None else tokenizer
    models = [model]
    if reference is not None:
        reference, _ = _open(reference, device, "auto", dtype, trust_remote_code)
        models.append(reference)
    length = default_length(model) if sequence_length is None else sequence_length
    for each in models:
        check_length(each, length)
    vocab_size = model.config.get_text_config().vocab_size
    tokens = load_tokens(dataset, tokenizer, column=column, split=split, vocab_size=vocab_size)
    with _evaluating(models):
        scores = score(
            model,
            tokens,
            reference=reference,
            sequence_length=length,
            stride=stride,
            batch_size=batch_size,
            max_windows=max_windows,
            progress=progress,
        )
    choice = getattr(model, "gptqkit_backend", None)
    return scores if choice is None else dataclasses.replace(scores, backend=choice.name)


def _open(
    model: Any, device: torch.device | str, backend: str, dtype: torch.dtype | str, trust_remote_code: bool
) -> tuple[Any, Any | None]:
    """The model behind a path, an id or itself, and its tokenizer if it brings one."""
    if not isinstance(model, (str, Path)):
        return model, None
    if is_quantized(model):
        return load(model, device=device, backend=backend, dtype=dtype)
    if backend != "auto":
        raise ConfigError(f"backend is {backend!r}, but {model} is not quantized; leave the backend at 'auto'")
    return load_float(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)


def default_length(model: Any) -> int:
    """Tokens per window where none are asked for: 2048, or the model's maximum where that is less."""
    return min(LONGEST_DEFAULT, _positions(model) or LONGEST_DEFAULT)


def _positions(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def check_length(model: Any, sequence_length: int) -> None:
    """Raise ConfigError where windows of `sequence_length` tokens have more positions than `model` has."""
    positions = _positions(model)
    if positions is not None and sequence_length > positions:
        raise ConfigError(
            f"sequence_length is {sequence_length}, but the model has {positions} positions; give at most that many"
        )


@contextmanager
def _evaluating(models: list[nn.Module]) -> Iterator[None]:
    """Put models into evaluation mode for a while."""
    training = [model for model in models if model.training]
    for model in training:
        model.eval()
    try:
        yield
    finally:
        for model in training:
            model.train()
