"""Scores of embeddings against sums computed one text at a time, with another definition of ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from gptqkit.errors import ArchitectureError, NonFiniteError, ShapeError
from gptqkit.evaluation import embeddings
from gptqkit.evaluation.embeddings import compare_embeddings

SIZE = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
POOLINGS = {"mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "lasttoken": lambda rows: rows[-1]}
RANDOM = torch.Generator().manual_seed(3)
TEXTS = [torch.randint(0, 96, (1 + number * 5 % 8,), generator=RANDOM) for number in range(14)]


def tiny(nudge=0.0):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**SIZE, initializer_range=0.3)).eval()
    for parameter in model.requires_grad_(False).parameters():
        parameter.add_(nudge * torch.randn_like(parameter))
    return model


class Table:
    """A model whose embedding of a text is the row of a table that its first token names."""

    device = torch.device("cpu")

    def __init__(self, rows):
        rows = torch.tensor(rows, dtype=torch.float32)
        self.base_model = lambda input_ids: SimpleNamespace(last_hidden_state=rows[input_ids[:, :1]])


def cosine(x, y):
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def pairs(embeddings):
    return [round(cosine(a, b), 9) for i, a in enumerate(embeddings) for b in embeddings[i + 1 :]]


def rank_correlation(x, y):
    """Spearman's: a rank is one more than the number of smaller values, plus half the number of other equal ones."""
    ranks = [[sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values] for values in (x, y)]
    return float(np.corrcoef(ranks)[0, 1])


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_scores_are_those_of_one_text_at_a_time_without_the_head(pooling, batch_size):
    models, steps = [tiny(0.02), tiny()], []
    how = {"sequence_length": 8, "pooling": pooling, "batch_size": batch_size, "progress": steps.append}
    scores = compare_embeddings(*models, TEXTS, **how)
    ours, theirs = (
        [POOLINGS[pooling](model.bert(text[None]).last_hidden_state[0].double().numpy()) for text in TEXTS]
        for model in models
    )
    cosines = [cosine(x, y) for x, y in zip(ours, theirs, strict=True)]
    assert scores.cosine == pytest.approx(sum(cosines) / len(TEXTS), abs=1e-6)
    assert scores.lowest_cosine == pytest.approx(min(cosines), abs=1e-6)
    assert scores.rank_agreement == pytest.approx(rank_correlation(pairs(ours), pairs(theirs)), abs=1e-3)
    assert 0.5 < scores.lowest_cosine < scores.cosine < 1
    assert 0.5 < scores.rank_agreement < 1
    assert (scores.texts, scores.tokens, scores.pooling) == (14, sum(map(len, TEXTS)), pooling)
    assert steps[-1].done == steps[-1].total == 14
    assert json.loads(json.dumps(scores.to_dict()))["rank_agreement"] == scores.rank_agreement


def test_where_memory_runs_out_fewer_texts_go_together():
    model, rows = tiny(0.02), []
    whole = model.bert.forward

    def forward(input_ids):
        rows.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return whole(input_ids)

    model.bert.forward = forward
    texts = torch.randint(0, 96, (6, 8), generator=RANDOM)
    found = compare_embeddings(model, tiny(), texts, sequence_length=8, batch_size=4)
    expected = compare_embeddings(model, tiny(), texts, sequence_length=8, batch_size=1)
    assert rows == [4, 2, 2, 2] + [1] * 6
    assert found.cosine == pytest.approx(expected.cosine, abs=1e-6)


def test_ties_share_their_rank_and_only_the_first_texts_are_ranked(monkeypatch):
    """Similarities are 0, 0.6, 0.8 and 1 only, so that most pairs are tied."""
    monkeypatch.setattr(embeddings, "RANKED", 15)
    rows = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [3, 4, 0], [0, 3, 4]])
    ours, theirs = rows[np.random.default_rng(0).integers(0, 5, 20)], rows[np.arange(20) % 5]
    texts = [torch.tensor([number]) for number in range(20)]
    scores = compare_embeddings(Table(ours), Table(theirs), texts, sequence_length=1)
    assert scores.rank_agreement == pytest.approx(rank_correlation(pairs(ours[:15]), pairs(theirs[:15])), abs=1e-9)
    for reference, count, expected in ((ours, 20, 1), (rows[[1] * 20], 20, None), (theirs, 2, None)):
        scores = compare_embeddings(Table(ours), Table(reference), texts[:count], sequence_length=1)
        assert scores.rank_agreement == expected


def test_what_cannot_be_compared_is_refused():
    fine, texts = Table([[1, 2]]), [torch.tensor([0])]
    with pytest.raises(NonFiniteError, match="the reference's embeddings"):
        compare_embeddings(fine, Table([[1, torch.nan]]), texts, sequence_length=8)
    with pytest.raises(ShapeError, match="have 3 dimensions, the model's 2"):
        compare_embeddings(fine, Table([[1, 2, 3]]), texts, sequence_length=8)
    blind = SimpleNamespace(device="cpu", base_model=lambda **_: object())
    with pytest.raises(ArchitectureError, match="the model, a SimpleNamespace, returns no last_hidden_state"):
        compare_embeddings(blind, fine, texts, sequence_length=8)
