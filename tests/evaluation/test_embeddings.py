"""Scores of embeddings against sums computed one text at a time, with another definition of ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from gptqkit.errors import ArchitectureError, ConfigError, NonFiniteError, ShapeError
from gptqkit.evaluation import embeddings
from gptqkit.evaluation.embeddings import compare_embeddings

SIZE = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}


def tiny(seed=0, width=32, kind=transformers.BertModel):
    torch.manual_seed(seed)
    return kind(transformers.BertConfig(**SIZE, hidden_size=width, intermediate_size=48, initializer_range=0.3)).eval()


def nudged(model):
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def sentences(count=14):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [torch.randint(0, 96, (length,), generator=generator) for length in lengths]


def embed(model, texts, pooling):
    """One text at a time, without a batch."""
    take = {"mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "lasttoken": lambda rows: rows[-1]}[pooling]
    with torch.no_grad():
        return [take(model(text[None]).last_hidden_state[0].double().numpy()) for text in texts]


def cosine(x, y):
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def rank_correlation(x, y):
    """Spearman's: a rank is one more than the number of smaller values, plus half the number of other equal ones."""
    ranks = [[sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values] for values in (x, y)]
    return float(np.corrcoef(ranks)[0, 1])


def pairs(embeddings):
    return [cosine(a, b) for i, a in enumerate(embeddings) for b in embeddings[i + 1 :]]


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_scores_are_those_of_one_text_at_a_time(pooling, batch_size):
    model, reference, texts, steps = nudged(tiny()), tiny(), sentences(), []
    scores = compare_embeddings(
        model, reference, texts, sequence_length=8, pooling=pooling, batch_size=batch_size, progress=steps.append
    )
    ours, theirs = embed(model, texts, pooling), embed(reference, texts, pooling)
    cosines = [cosine(x, y) for x, y in zip(ours, theirs, strict=True)]
    assert scores.cosine == pytest.approx(sum(cosines) / len(texts), abs=1e-6)
    assert scores.lowest_cosine == pytest.approx(min(cosines), abs=1e-6)
    assert scores.rank_agreement == pytest.approx(rank_correlation(pairs(ours), pairs(theirs)), abs=1e-3)
    assert 0.5 < scores.lowest_cosine < scores.cosine < 1
    assert 0.5 < scores.rank_agreement < 1
    assert (scores.texts, scores.tokens, scores.pooling) == (14, sum(map(len, texts)), pooling)
    assert steps[-1].done == steps[-1].total == 14
    assert json.loads(json.dumps(scores.to_dict()))["rank_agreement"] == scores.rank_agreement


class Table:
    """A model whose embedding of a text is a row of a table, the row that its first token names."""

    device = torch.device("cpu")

    def __init__(self, rows):
        self.rows = torch.tensor(rows, dtype=torch.float32)
        self.base_model = lambda input_ids: SimpleNamespace(last_hidden_state=self.rows[input_ids[:, :1]])


def test_ties_share_their_rank():
    """Similarities are 0, 0.6, 0.8 and 1 only, so that most pairs are tied."""
    rows = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [3, 4, 0], [0, 3, 4]])
    orders = np.random.default_rng(0).permutation(np.arange(15) % 5), np.arange(15) % 5
    texts = [torch.tensor([number]) for number in range(15)]
    scores = compare_embeddings(Table(rows[orders[0]]), Table(rows[orders[1]]), texts, sequence_length=1)
    ours, theirs = (rows[order] for order in orders)
    expected = rank_correlation(*([round(value, 9) for value in pairs(each)] for each in (ours, theirs)))
    assert scores.rank_agreement == pytest.approx(expected, abs=1e-9)
    alike = compare_embeddings(Table(rows[orders[0]]), Table(rows[[1] * 15]), texts, sequence_length=1)
    assert alike.rank_agreement is None


def test_of_many_texts_the_first_are_ranked(monkeypatch):
    monkeypatch.setattr(embeddings, "RANKED", 5)
    model, reference, texts = nudged(tiny()), tiny(), sentences()
    scores = compare_embeddings(model, reference, texts, sequence_length=8)
    first = compare_embeddings(model, reference, texts[:5], sequence_length=8)
    assert scores.rank_agreement == pytest.approx(first.rank_agreement, abs=1e-9)
    assert scores.rank_agreement != pytest.approx(
        compare_embeddings(model, reference, texts[-5:], sequence_length=8).rank_agreement, abs=1e-3
    )


def test_a_model_agrees_with_itself_and_one_pair_has_no_order():
    scores = compare_embeddings(tiny(), tiny(), sentences(), sequence_length=8)
    assert (scores.cosine, scores.lowest_cosine) == (pytest.approx(1), pytest.approx(1))
    assert scores.rank_agreement == 1
    scores = compare_embeddings(nudged(tiny()), tiny(), sentences(2), sequence_length=8)
    assert scores.rank_agreement is None
    assert scores.cosine < 1


def test_the_head_of_a_masked_language_model_has_no_part():
    masked = tiny(kind=transformers.BertForMaskedLM)
    reference = tiny(1)
    expected = compare_embeddings(masked.bert, reference, sentences(), sequence_length=8)
    scores = compare_embeddings(masked, reference, sentences(), sequence_length=8)
    assert scores.cosine == expected.cosine < 0.9


def test_what_cannot_be_compared_is_refused():
    broken = tiny()
    broken.embeddings.word_embeddings.weight.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="the reference's embeddings"):
        compare_embeddings(tiny(), broken, sentences(), sequence_length=8)
    with pytest.raises(ShapeError, match="have 64 dimensions, the model's 32"):
        compare_embeddings(tiny(), tiny(width=64), sentences(), sequence_length=8)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        compare_embeddings(tiny(), tiny(), sentences(), sequence_length=8, batch_size=0)
    model = tiny()
    model.forward = lambda **_: object()
    with pytest.raises(ArchitectureError, match="the model, a BertModel, returns no last_hidden_state"):
        compare_embeddings(model, tiny(), sentences(), sequence_length=8)
