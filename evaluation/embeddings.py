"""How well a quantized encoder keeps the embeddings of the float model.

An embedding is the last hidden state of a text, pooled over its tokens. Two questions are asked: how far it turned
(cosine similarity with the reference's embedding of the same text), and whether texts are still ranked the same way, on
which search rests (Spearman's correlation between the cosine similarities of all pairs of texts in the one model and in
the other). Ranks and not the similarities themselves, because embeddings often point into one narrow cone: all pairs
are alike then, and any two models differ little.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ..calibration.batches import in_pieces
from ..errors import ArchitectureError, NonFiniteError, ShapeError
from ..progress import Progress, ProgressCallback, silent
from ..settings import Plain
from .perplexity import in_batches

Pooling: TypeAlias = Literal["mean", "cls", "lasttoken"]
"""Over the tokens of a text: the mean, the first or the last one; the names of sentence-transformers."""

RANKED = 2000
"""Texts whose pairs are ranked, at most: two million pairs."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingScores(Plain):
    """What was measured.

    Attributes:
        cosine: Mean over texts of the cosine similarity between the embeddings of model and reference.
        lowest_cosine: The least of them.
        rank_agreement: Spearman's correlation of the similarities of all pairs of the first 2000 texts; None where
            there is no order to compare, with fewer than three texts or with pairs that are all alike.
        texts: Texts that went through both models.
        tokens: Tokens in them.
        sequence_length: Tokens per text, at most.
        pooling: How hidden states became embeddings: "mean", "cls" or "lasttoken".
        seconds: Time of all forward passes and sums.
        backend: What the quantized layers ran on; None for a float model.
    """

    cosine: float
    lowest_cosine: float
    rank_agreement: float | None
    texts: int
    tokens: int
    sequence_length: int
    pooling: str
    seconds: float
    backend: str | None = None


@torch.inference_mode()
def compare_embeddings(
    model: Any,
    reference: Any,
    texts: Sequence[Tensor],
    *,
    sequence_length: int,
    pooling: Pooling = "mean",
    batch_size: int = 8,
    progress: ProgressCallback = silent,
) -> EmbeddingScores:
    """Measure how far the embeddings of `model` lie from those of `reference`.

    Both are models of transformers in evaluation mode, and run where they are, without the heads they may have. Texts,
    (tokens,) int64 each and cut to `sequence_length` already, go through them together where they have one length, so
    that there is no padding. `progress` counts texts.

    Raises:
        ArchitectureError: A model that returns no last hidden state.
        NonFiniteError: Embeddings that are not finite.
        ShapeError: Models of different width.
    """
    start = time.perf_counter()
    found: dict[int, tuple[Tensor, Tensor]] = {}
    models, size = ((model, "model"), (reference, "reference")), batch_size

    def embedded(ids: Tensor, size: int) -> list[Tensor]:
        return [
            torch.cat([_embed(one, part, pooling, whose) for part in torch.split(ids, size)]) for one, whose in models
        ]

    longest_first = sorted(range(len(texts)), key=lambda number: -len(texts[number]))  # they need most memory
    for numbers in in_batches(longest_first, lambda number: len(texts[number]), batch_size):
        ids = torch.stack([texts[number] for number in numbers])
        pair, size = in_pieces(partial(embedded, ids), size)
        if pair[0].shape != pair[1].shape:
            raise ShapeError(
                f"the reference's embeddings have {pair[1].shape[1]} dimensions, the model's {pair[0].shape[1]}; give "
                "the float model that the quantized one was made of"
            )
        found.update({number: (pair[0][row], pair[1][row]) for row, number in enumerate(numbers)})
        progress(Progress(stage="evaluate", done=len(found), total=len(texts)))
    ours, theirs = (torch.stack([found[number][which] for number in range(len(texts))]) for which in (0, 1))
    cosines = functional.cosine_similarity(ours, theirs, dim=1)
    return EmbeddingScores(
        cosine=float(cosines.mean()),
        lowest_cosine=float(cosines.min()),
        rank_agreement=_spearman(_similarities(ours[:RANKED]), _similarities(theirs[:RANKED])),
        texts=len(texts),
        tokens=sum(map(len, texts)),
        sequence_length=sequence_length,
        pooling=pooling,
        seconds=time.perf_counter() - start,
    )


def _embed(model: Any, ids: Tensor, pooling: Pooling, whose: str) -> Tensor:
    """Return the embeddings of texts of one length, (texts, width) float64 on the CPU."""
    hidden = getattr(model.base_model(input_ids=ids.to(model.device)), "last_hidden_state", None)
    if hidden is None:
        raise ArchitectureError(
            f"the {whose}, a {type(model).__name__}, returns no last_hidden_state for tokens, so it has no embeddings "
            "to measure; evaluate its text model"
        )
    hidden = hidden.double()
    pooled: Tensor = {"mean": hidden.mean(1), "cls": hidden[:, 0], "lasttoken": hidden[:, -1]}[pooling]
    if not bool(pooled.isfinite().all()):
        raise NonFiniteError(
            f"the {whose}'s embeddings are not finite; its activations left the range of its dtype: evaluate in "
            "float32 or bfloat16"
        )
    return pooled.cpu()


def _similarities(embeddings: Tensor) -> Tensor:
    """Return the cosine similarity of every pair of texts, (pairs,)."""
    unit = functional.normalize(embeddings, dim=1)
    first, second = torch.triu_indices(len(unit), len(unit), offset=1)
    return (unit @ unit.T)[first, second]


def _spearman(x: Tensor, y: Tensor) -> float | None:
    """Return the correlation of ranks; None where x or y has no order.

    >>> _spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 40.0, 30.0]))
    0.8
    """
    ranks = torch.stack([_ranks(x), _ranks(y)])
    if not len(x) or bool((ranks[:, :1] == ranks).all(1).any()):
        return None
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)  # 1 is never exceeded


def _ranks(values: Tensor) -> Tensor:
    """Return the rank of each value from 1 on; equal values share the mean of their ranks.

    >>> _ranks(torch.tensor([0.5, 0.1, 0.5])).tolist()
    [2.5, 1.0, 2.5]
    """
    _, place, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts.double() - 1) / 2
    return ranks[place]
