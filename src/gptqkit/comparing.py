"""Several checkpoints of one model side by side: what they cost and what is left of the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architecture import read_config
from .errors import ConfigError
from .evaluating import check_model, measure, open_named
from .evaluation.config import Evaluation
from .evaluation.embeddings import EmbeddingScores
from .evaluation.perplexity import Scores
from .export.inspect import inspect
from .export.readers import text_settings
from .export.shards import read_json
from .figures import scatter
from .hub import fetch
from .loading import load_float
from .modes import in_plain_modes
from .progress import ProgressCallback, silent
from .settings import settings_of

_SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "n_embd", "n_layer")
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One of several checkpoints.

    Attributes:
        checkpoint: Its directory, or its id on the Hub.
        size: Bytes of all its tensors.
        bits_per_weight: Of the quantized layers, their groups included.
        scores: What was measured, as of `evaluate`.
    """

    checkpoint: Path | str
    size: int
    bits_per_weight: float
    scores: Scores | EmbeddingScores

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, all on one level."""
        own = {"checkpoint": str(self.checkpoint), "size": self.size, "bits_per_weight": self.bits_per_weight}
        return {**own, **self.scores.to_dict()}


@in_plain_modes
def compare(
    checkpoints: Sequence[str | Path],
    dataset: Any,
    config: Evaluation | Mapping[str, Any] | None = None,
    *,
    reference: Any | None = None,
    progress: ProgressCallback = silent,
) -> list[Comparison]:
    """Measure several checkpoints of one model on `dataset`, one after another, the float model being loaded once.

    Args:
        checkpoints: Directories of quantized checkpoints, their ids on the Hub, or GGUF files.
        dataset: As for `evaluate`.
        config: All settings of the evaluation; None for the defaults.
        reference: The float model to compare with, as a directory, Hub id or loaded model. Encoders need one.
        progress: Called after every batch; every checkpoint is a stage.

    Raises:
        ConfigError: The checkpoints are of several models, or settings that cannot be.
        GptqkitError: As `evaluate` and `inspect`.
    """
    config = settings_of(Evaluation, config or {})
    if isinstance(checkpoints, (str, Path)):
        raise ConfigError(f"checkpoints is {str(checkpoints)!r}; give a list, such as [{str(checkpoints)!r}]")
    checkpoints = list(checkpoints)
    if not checkpoints:
        raise ConfigError("there is no checkpoint to compare; give at least one")
    _, text = open_named(dataset, config)
    paths = [fetch(path, config.revision, gguf=True) for path in checkpoints]
    config = dataclasses.replace(config, revision=None)  # of what is fetched now
    summaries = [inspect(path) for path in paths]
    for path in paths:
        check_model(path, config, tokenized=text)
    shapes = [(str(name), _config(path)) for name, path in zip(checkpoints, paths, strict=True)]
    _check_same_model(shapes)
    pooled = None
    if isinstance(reference, (str, Path)):
        name, code, pooled = str(reference), config.trust_remote_code, fetch(reference)
        reference, _ = load_float(pooled, device=config.device, dtype=config.dtype, trust_remote_code=code)
        _check_same_model([*shapes, (name, reference.config.to_dict())])
    return [
        Comparison(
            checkpoint=name,
            size=summary.packed_bytes + summary.other_bytes,
            bits_per_weight=summary.bits_per_weight,
            scores=measure(path, dataset, config, reference=reference, pooled=pooled, progress=_named(name, progress)),
        )
        for name, path, summary in zip(checkpoints, paths, summaries, strict=True)
    ]


def comparison_svg(comparisons: Sequence[Comparison]) -> str:
    """Return a picture, SVG, of what `compare` found: size against KL divergence, or perplexity without a reference.

    Of encoders it is the mean cosine similarity. An axis is logarithmic where values differ tenfold.

    Raises:
        ConfigError: There is nothing to draw.
    """
    rows = [each.to_dict() for each in comparisons]
    measures = ("kl_divergence", "perplexity", "cosine")
    measure = next((key for key in measures if all(row.get(key) is not None for row in rows)), "")
    rows = [row for row in rows if math.isfinite(row.get(measure, math.nan))]
    if not rows:
        raise ConfigError("there is nothing to draw; give what compare returns of at least one checkpoint")
    unit, unit_name = next(unit for unit in _UNITS if unit[0] <= max(1, *(row["size"] for row in rows)))
    ends = [Path(row["checkpoint"]).name for row in rows]
    names = [end if end and ends.count(end) == 1 else row["checkpoint"] for end, row in zip(ends, rows, strict=True)]
    points = [(name, row["size"] / unit, row[measure]) for name, row in zip(names, rows, strict=True)]
    up = {"kl_divergence": "KL divergence, nats per token", "cosine": "cosine similarity"}.get(measure, measure)
    return scatter(points, f"bytes of all tensors, {unit_name}", up)


def _named(checkpoint: Path | str, progress: ProgressCallback) -> ProgressCallback:
    """Let every checkpoint be a stage of its own, which begins anew."""
    return lambda step: progress(dataclasses.replace(step, stage=f"evaluate {Path(checkpoint).name}"))


def _config(path: Path) -> dict[str, Any]:
    """Return config.json, or what a GGUF file says of the same, but for the type, which is llama for Mistral, too."""
    if path.is_dir():
        return read_json(path / "config.json")
    return {key: value for key, value in read_config(path).to_dict().items() if key != "model_type"}


def _check_same_model(shapes: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse configs of models that are not one: what is measured of them would not compare."""
    (first, one), *others = [(name, text_settings(config)) for name, config in shapes]
    for name, other in others:
        for key in _SHAPE:
            if key in one and key in other and one[key] != other[key]:
                raise ConfigError(
                    f"{first} and {name} are not of one model: their {key} is {one[key]!r} and {other[key]!r}; compare "
                    "checkpoints of one model"
                )
