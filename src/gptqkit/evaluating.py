"""One call that measures a checkpoint or a model on a text."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .architecture import read_config
from .bounds import confined
from .calibration.halves import has_two_stacks
from .calibration.samples import load_documents, load_text
from .calibration.sources import open_source
from .errors import CalibrationError, CheckpointError, ConfigError
from .evaluation.config import Evaluation
from .evaluation.embeddings import EmbeddingScores, Pooling, compare_embeddings
from .evaluation.perplexity import Scores, score
from .export.scaled import says_quantized
from .export.shards import read_json
from .hub import fetch
from .loading import has_tokenizer, load, load_float, open_tokenizer
from .modes import in_plain_modes
from .progress import ProgressCallback, silent
from .settings import settings_of

LONGEST_DEFAULT = 2048

_POOLING = Path("1_Pooling", "config.json")
_POOLINGS: dict[object, Pooling] = {  # "pooling_mode" says which or, formerly, "pooling_mode_..." is true
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "lasttoken",
}


@in_plain_modes
def evaluate(
    model: Any,
    dataset: Any,
    config: Evaluation | Mapping[str, Any] | None = None,
    *,
    reference: Any | None = None,
    tokenizer: Any | None = None,
    progress: ProgressCallback = silent,
) -> Scores | Any:
    """Measure perplexity on `dataset` and, with a `reference`, KL divergence and top-1 agreement.

    A checkpoint runs on its quantized kernels, never as the dequantized original.

    The encoder of an encoder-decoder gets the first half of each window; the perplexity is that of the second half.

    An encoder (see `is_encoder`) predicts no next token. Its embeddings are compared with the reference's instead: the
    last hidden states of every document, pooled as `1_Pooling` in the folder of the model or of the reference says,
    else by their mean. Modules that may come after the pooling are not run.

    Args:
        model: Directory of a quantized checkpoint; directory or Hub id of a float model; or a loaded model, which runs
            where it is, but outside the caller's autocast.
        dataset: A text file, a data set, or any other source of `Calibration`.
        config: All settings of the evaluation, as `Evaluation` or a dictionary of its fields; None for the defaults.
        reference: The float model to compare with, as a directory, Hub id or loaded model. Encoders need one.
        tokenizer: A tokenizer, or the folder or Hub id of one. Needed where the model is a loaded one or has none, and
            `dataset` is text.
        progress: Called after every batch, counted in windows.

    Returns:
        Scores, or EmbeddingScores of an encoder.

    Raises:
        ConfigError: Settings that cannot be, such as windows longer than the model's positions, or an encoder without a
            reference.
        CalibrationError: Text that cannot be used.
        CheckpointError: Files that are damaged or contradict each other, or a pooling that is not known here.
        DatasetUnavailableError: A model or data set that cannot be found or fetched.
        BackendError: The backend that was asked for cannot serve a layer.
        ShapeError: A reference with another vocabulary or, of encoders, of another width.
        NonFiniteError: Losses or embeddings that are not finite.
        ArchitectureError: A model that transformers does not know, or one without the hidden states that are asked for.
    """
    config = settings_of(Evaluation, config or {})
    dataset, text = open_named(dataset, config)
    tokenizer = open_tokenizer(tokenizer, trust_remote_code=config.trust_remote_code)
    if isinstance(model, (str, Path)):
        model = fetch(model, config.revision, gguf=True)
        check_model(model, config, tokenized=text and tokenizer is None)
    if isinstance(reference, (str, Path)):
        reference = fetch(reference)
    return measure(model, dataset, config, reference=reference, tokenizer=tokenizer, progress=progress)


def measure(
    model: Any,
    dataset: Any,
    config: Evaluation,
    *,
    reference: Any | None,
    tokenizer: Any | None = None,
    pooled: Path | None = None,
    progress: ProgressCallback,
) -> Scores | EmbeddingScores:
    """Do the work of `evaluate` on what is fetched and checked; `pooled` is the folder of a loaded reference."""
    folders = [each for each in (model, reference, pooled) if isinstance(each, Path)]
    folder = model if isinstance(model, Path) else None
    model, own = _open(model, config, config.backend)
    tokenizer = own if tokenizer is None else tokenizer
    check_text_to_text(model)
    encoder = is_encoder(model, folder)
    if encoder:
        _check_encoder(model, reference, config)
    models = [model]
    if reference is not None:
        reference, _ = _open(reference, config, "auto")
        check_text_to_text(reference)
        if (not encoder and is_encoder(reference)) or has_two_stacks(model) != has_two_stacks(reference):
            raise ConfigError(
                f"the reference is a {type(reference).__name__}, the model a {type(model).__name__}; give the float "
                "model that the quantized one was made of"
            )
        models.append(reference)
    length = config.sequence_length or default_length(model)
    for each in models:
        check_length(each, length)
    where: dict[str, Any] = {"column": config.column, "split": config.split}
    where["vocab_size"] = min(each.config.get_text_config().vocab_size for each in models)
    how: dict[str, Any] = {"sequence_length": length, "batch_size": config.batch_size, "progress": progress}
    scores: Scores | EmbeddingScores
    with ExitStack() as stack:
        for each in models:
            stack.callback(each.train, each.training)
            each.eval()
        if encoder:
            documents = load_documents(dataset, tokenizer, sequence_length=length, limit=config.max_windows, **where)
            scores = compare_embeddings(model, reference, documents, pooling=_pooling(folders), **how)
        else:
            step, windows = config.stride or length, config.max_windows
            limit = None if windows is None else length + (windows - 1) * step
            tokens = load_text(dataset, tokenizer, limit=limit, **where)
            how |= {"stride": config.stride, "max_windows": config.max_windows}
            scores = score(model, tokens, reference=reference, **how)
    choice = getattr(model, "gptqkit_backend", None)
    return scores if choice is None else dataclasses.replace(scores, backend=choice.name)


def _check_encoder(model: Any, reference: Any, config: Evaluation) -> None:
    if reference is None:
        raise ConfigError(
            f"{type(model).__name__} is an encoder, which has no perplexity: what is measured is how well it keeps the "
            "embeddings of the float model; give that as the reference"
        )
    if config.stride is not None:
        raise ConfigError(f"stride is {config.stride}, but an encoder's texts are measured one by one; leave it out")


def open_named(dataset: Any, config: Evaluation) -> tuple[Any, bool]:
    """Open a text by its name, before any model is opened; also return whether it is one to tokenize.

    It can be read once. What has no name, which may be a generator, is left as it is, and nothing is known of it.
    """
    if not isinstance(dataset, (str, Path)):
        return dataset, False
    where: dict[str, Any] = {"column": config.column, "split": config.split}
    opened = open_source(dataset, **where, evaluation=True, partial=config.max_windows is not None)
    first = list(itertools.islice(opened.items, 1))
    whole = dataclasses.replace(opened, items=itertools.chain(first, opened.items))
    return whole, bool(first) and not isinstance(first[0], Tensor)


def check_model(folder: Path, config: Evaluation, *, tokenized: bool) -> None:
    """Refuse a model that lacks a tokenizer for text to be `tokenized`, or positions, before its weights are read."""
    if folder.is_file():  # GGUF, which holds its own tokenizer
        return
    with confined(folder, trusted=config.trust_remote_code):
        described = read_config(folder, trust_remote_code=config.trust_remote_code)
    if tokenized and not has_tokenizer(folder):
        raise CalibrationError(
            f"{folder} has no tokenizer, which text needs; copy one there, or give one to evaluate (tokenizer, "
            "--tokenizer)"
        )
    if config.sequence_length is not None and not described.is_encoder_decoder:
        _check_positions(config.sequence_length, _described_positions(described))


def is_encoder(model: Any, folder: Path | None = None) -> bool:
    """Whether a model is there for its embeddings.

    That is so where it does not generate text (BertModel, BertForMaskedLM), or where its folder is one of
    sentence-transformers, even if it has the class of a language model.
    """
    return not model.can_generate() or (folder is not None and (folder / "modules.json").exists())


def check_text_to_text(model: Any) -> None:
    """Raise ConfigError for an encoder-decoder that does not read text (Whisper) or does not write any (T5Model)."""
    if has_two_stacks(model) and not (model.main_input_name == "input_ids" and model.can_generate()):
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder that does not turn text into text, so it has no perplexity; "
            "evaluate one that does"
        )


def _pooling(folders: Iterable[Path]) -> Pooling:
    """Return how the first folder that says it pools; the mean where none says it."""
    file = next((folder / _POOLING for folder in folders if (folder / _POOLING).exists()), None)
    if file is None:
        return "mean"
    settings = read_json(file)
    known = (key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True)
    flags = [key.removeprefix("pooling_mode_") for key in known]
    found = [settings["pooling_mode"]] if "pooling_mode" in settings else flags
    if len(found) != 1 or str(found[0]) not in _POOLINGS:
        raise CheckpointError(f"{file} asks for the pooling {found}; only one of mean, cls and lasttoken is known here")
    return _POOLINGS[found[0]]


def _open(model: Any, config: Evaluation, backend: str) -> tuple[Any, Any | None]:
    """Return the model in a folder, or itself, and its tokenizer if it brings one."""
    if isinstance(model, nn.Module):
        if not hasattr(model, "can_generate"):
            inside = "; give its .module" if hasattr(model, "module") else ""
            raise ConfigError(f"the model is a {type(model).__name__}, none of transformers{inside}")
        return model, None
    if not isinstance(model, Path):
        which = ", the first of the two that load returns" if isinstance(model, tuple) else ""
        raise ConfigError(
            f"a {type(model).__name__} is no model; give a folder, an id of the Hub, or a loaded model{which}"
        )
    how: dict[str, Any] = {name: getattr(config, name) for name in ("device", "dtype", "trust_remote_code")}
    if model.is_file() or says_quantized(model):  # a file is GGUF
        return load(model, backend=backend, **how)
    if backend != "auto":
        raise ConfigError(f"backend is {backend!r}, but {model} is not quantized; leave the backend at 'auto'")
    return load_float(model, **how)


def default_length(model: Any) -> int:
    """Return the tokens per window where none are asked for: 2048, or the model's maximum where that is less."""
    return min(LONGEST_DEFAULT, _positions(model) or LONGEST_DEFAULT)


def _positions(model: Any) -> int | None:
    """Return how many tokens fit; where position embeddings have a row for padding, they begin behind it (RoBERTa)."""
    positions = _described_positions(model.config)
    if positions is not None and has_two_stacks(model):
        return 2 * (positions - 1)  # the decoder's half has one more token
    for name, module in model.named_modules():
        if not name.endswith("position_embeddings") or not isinstance(module, nn.Embedding):
            continue
        if module.num_embeddings == positions and module.padding_idx is not None:
            return positions - module.padding_idx - 1
    return positions


def _described_positions(config: Any) -> int | None:
    """Return how many tokens fit by what a config says."""
    config = config.get_text_config()
    names = ("max_position_embeddings", "max_decoder_position_embeddings")  # LED has the second
    positions: int | None = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    return None if positions == -1 else positions  # XLNet's, which takes any number


def check_length(model: Any, sequence_length: int) -> None:
    """Raise ConfigError where windows of `sequence_length` tokens have more positions than `model` has."""
    _check_positions(sequence_length, _positions(model), " in its two stacks" if has_two_stacks(model) else "")


def _check_positions(sequence_length: int, positions: int | None, both: str = "") -> None:
    if positions is not None and sequence_length > positions:
        raise ConfigError(
            f"sequence_length is {sequence_length}, but the model has {positions} positions{both}; give at most that "
            "many"
        )
