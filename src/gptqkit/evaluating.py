"""One call that measures a checkpoint or a model on a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .calibration.windows import load_texts, load_tokens
from .errors import CheckpointError, ConfigError
from .evaluation.embeddings import EmbeddingScores, Pooling, compare_embeddings
from .evaluation.scores import Scores, score
from .export.shards import read_json
from .loading import is_quantized, load, load_float
from .progress import ProgressCallback, silent

LONGEST_DEFAULT = 2048

_POOLING = Path("1_Pooling", "config.json")
_POOLINGS: dict[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}
"""As sentence-transformers name it, newly by the value of "pooling_mode" and formerly by the key that is true."""


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
) -> Scores | EmbeddingScores:
    """Perplexity on `dataset` and, with a `reference`, KL divergence and top-1 agreement; of encoders, embeddings.

    A checkpoint runs on its quantized kernels, never as the dequantized original.

    An encoder (see `is_encoder`) predicts no next token. Its embeddings are compared with the reference's instead: the
    last hidden states of every row of `dataset`, pooled as `1_Pooling` in the folder of the model or of the reference
    says, else by their mean. Modules that may come after the pooling are not run.

    Args:
        model: Directory of a quantized checkpoint; directory or Hub id of a float model; or a loaded model, which runs
            where it is.
        dataset: A text file, a data set, or any other source of `calibration.sources`.
        reference: The float model to compare with, as a directory, Hub id or loaded model. Encoders need one.
        sequence_length: Tokens per window; None for 2048 or the model's maximum, whichever is less. Longer rows of an
            encoder's `dataset` are cut, shorter ones stay as they are.
        stride: Tokens between the starts of windows; None for windows without overlap, as in the papers. Not for
            encoders.
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

    Returns:
        Scores, or EmbeddingScores of an encoder.

    Raises:
        ConfigError: Settings that cannot be, such as windows longer than the model's positions, or an encoder without a
            reference.
        CalibrationError: Text that cannot be used.
        CheckpointError: Files that are damaged or contradict each other, or a pooling that is not known here.
        DatasetUnavailableError: A model or data set that cannot be found or fetched.
    """
    folders = [Path(each) for each in (model, reference) if isinstance(each, (str, Path))]
    folder = folders[0] if isinstance(model, (str, Path)) else None
    model, own_tokenizer = _open(model, device, backend, dtype, trust_remote_code)
    tokenizer = own_tokenizer if tokenizer is None else tokenizer
    encoder = is_encoder(model, folder)
    if encoder and reference is None:
        raise ConfigError(
            f"{type(model).__name__} is an encoder, which has no perplexity: what is measured is how well it keeps the "
            "embeddings of the float model; give that as the reference"
        )
    if encoder and stride is not None:
        raise ConfigError(f"stride is {stride}, but texts of an encoder are measured one by one; leave the stride out")
    models = [model]
    if reference is not None:
        reference, _ = _open(reference, device, "auto", dtype, trust_remote_code)
        models.append(reference)
    length = default_length(model) if sequence_length is None else sequence_length
    for each in models:
        check_length(each, length)
    vocab_size = min(each.config.get_text_config().vocab_size for each in models)
    scores: Scores | EmbeddingScores
    with _evaluating(models):
        if encoder:
            scores = compare_embeddings(
                model,
                reference,
                load_texts(
                    dataset,
                    tokenizer,
                    sequence_length=length,
                    limit=max_windows,
                    column=column,
                    split=split,
                    vocab_size=vocab_size,
                ),
                sequence_length=length,
                pooling=_pooling(folders),
                batch_size=batch_size,
                progress=progress,
            )
        else:
            scores = score(
                model,
                load_tokens(dataset, tokenizer, column=column, split=split, vocab_size=vocab_size),
                reference=reference,
                sequence_length=length,
                stride=stride,
                batch_size=batch_size,
                max_windows=max_windows,
                progress=progress,
            )
    choice = getattr(model, "gptqkit_backend", None)
    return scores if choice is None else dataclasses.replace(scores, backend=choice.name)


def is_encoder(model: Any, folder: Path | None = None) -> bool:
    """Whether a model is there for its embeddings.

    That is so where it does not generate text (BertModel, BertForMaskedLM), or where its folder is one of
    sentence-transformers, even if it has the class of a language model.
    """
    return not model.can_generate() or (folder is not None and (folder / "modules.json").exists())


def _pooling(folders: Iterable[Path]) -> Pooling:
    """How the first folder that says it pools; the mean where none says it."""
    file = next((folder / _POOLING for folder in folders if (folder / _POOLING).exists()), None)
    if file is None:
        return "mean"
    settings = read_json(file)
    found = [settings.get("pooling_mode")] if "pooling_mode" in settings else []
    found += [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if len(found) != 1 or not isinstance(found[0], str) or found[0] not in _POOLINGS:
        raise CheckpointError(f"{file} asks for the pooling {found}; only one of mean, cls and lasttoken is known here")
    return _POOLINGS[found[0]]


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
    """The most tokens that fit; where position embeddings have a row for padding, tokens begin behind it (RoBERTa)."""
    positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if not name.endswith("position_embeddings") or not isinstance(module, nn.Embedding):
            continue
        if module.num_embeddings == positions and module.padding_idx is not None:
            return positions - module.padding_idx - 1
    return positions


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
