"""Divergences against sums written out."""

import math

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.evaluation.divergence import kl_divergence, top1_agreement
from gptqkit.evaluation.perplexity import CHUNK


def softmax(row):
    values = [math.exp(value) for value in row]
    return [value / sum(values) for value in values]


def test_kl_divergence_is_the_sum_over_the_vocabulary():
    generator = torch.Generator().manual_seed(0)
    reference, logits = torch.randn(2, CHUNK + 2, 9, generator=generator)
    found = kl_divergence(reference, logits)
    assert found.shape == (CHUNK + 2,)
    for place in (0, CHUNK - 1, CHUNK, CHUNK + 1):
        p, q = softmax(reference[place].tolist()), softmax(logits[place].tolist())
        expected = sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        assert found[place].item() == pytest.approx(expected, rel=1e-4)


def test_kl_divergence_has_a_direction_and_ignores_shifts():
    reference, logits = torch.tensor([[4.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    assert kl_divergence(reference, logits).item() != pytest.approx(kl_divergence(logits, reference).item())
    assert kl_divergence(reference, reference + 3).item() == pytest.approx(0, abs=1e-6)


def test_top1_agreement():
    reference = torch.tensor([[1.0, 2.0, 0.0], [5.0, 2.0, 0.0]])
    logits = torch.tensor([[0.0, 9.0, 8.0], [0.0, 2.0, 1.0]])
    assert top1_agreement(reference, logits).tolist() == [True, False]


def test_vocabularies_must_agree():
    for compare in (kl_divergence, top1_agreement):
        with pytest.raises(ShapeError, match="share a vocabulary"):
            compare(torch.zeros(2, 5), torch.zeros(2, 6))
