"""Scores of real forward passes against sums computed another way."""

import copy
import json
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gptqkit.errors import NonFiniteError, ShapeError
from gptqkit.evaluation.perplexity import CHUNK, score

TOKENS = torch.randint(0, 30, (75,), generator=torch.Generator().manual_seed(2))
SIZE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}


def tiny(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZE, initializer_range=0.4)).eval().requires_grad_(False)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_perplexity_is_that_of_transformers_own_loss(batch_size):
    model, steps = tiny(0), []
    scores = score(model, TOKENS, sequence_length=16, batch_size=batch_size, progress=steps.append)
    # the model's own mean over the 15 predicted tokens of each whole window
    losses = [float(model(ids[None], labels=ids[None]).loss) for ids in TOKENS[:64].split(16)]
    assert scores.perplexity == pytest.approx(math.exp(sum(losses) / 4), rel=1e-5)
    assert (scores.tokens, scores.windows, scores.stride) == (60, 4, None)
    assert scores.kl_divergence is scores.top1_agreement is scores.reference_perplexity is None
    assert [step.done for step in steps] == [*range(batch_size, 4, batch_size), 4]
    assert {(step.stage, step.total) for step in steps} == {("evaluate", 4)}
    assert json.loads(json.dumps(scores.to_dict()))["sequence_length"] == 16


def test_where_memory_runs_out_fewer_windows_go_together():
    class Small(LlamaForCausalLM):
        def forward(self, input_ids, **named):
            rows.append(len(input_ids))
            if len(input_ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
            return super().forward(input_ids, **named)

    rows, model = [], tiny(0)
    small = Small(model.config).eval()
    small.load_state_dict(model.state_dict())
    how = {"reference": tiny(1), "sequence_length": 16}
    found, expected = score(small, TOKENS, batch_size=4, **how), score(model, TOKENS, batch_size=2, **how)
    assert rows == [4, 2, 2]
    assert (found.perplexity, found.kl_divergence) == (expected.perplexity, expected.kl_divergence)
    with pytest.raises(torch.OutOfMemoryError):
        score(model, TOKENS, sequence_length=16, reference=_never_fits(model))


def _never_fits(model):
    def forward(**_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    never = copy.deepcopy(model)
    never.forward = forward
    return never


def test_stride_of_one_gives_every_token_all_the_context_there_is():
    model, total = tiny(0), 0.0
    scores = score(model, TOKENS, sequence_length=16, stride=1)
    for place in range(1, 75):
        before = TOKENS[max(0, place - 15) : place]
        total -= float(model(before[None]).logits[0, -1].log_softmax(-1)[TOKENS[place]])
    assert scores.tokens == 74
    assert scores.perplexity == pytest.approx(math.exp(total / 74), rel=1e-5)


def test_divergence_from_a_reference():
    model, other = tiny(0), tiny(1)
    scores = score(model, TOKENS, reference=other, sequence_length=16)
    divergence, agreed = 0.0, 0
    for ids in TOKENS[:64].split(16):
        p, q = (each(ids[None]).logits[0, :-1].double().softmax(-1) for each in (other, model))
        divergence += float((p * (p / q).log()).sum())
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    assert scores.kl_divergence == pytest.approx(divergence / 60, rel=1e-5)
    assert scores.top1_agreement == agreed / 60
    assert scores.perplexity == score(model, TOKENS, sequence_length=16).perplexity
    assert scores.reference_perplexity == score(other, TOKENS, sequence_length=16).perplexity
    same = score(model, TOKENS, reference=model, sequence_length=16)
    assert (same.top1_agreement, same.kl_divergence) == (1, 0)


class Given:
    """A model whose logits are given, whatever it reads."""

    device = torch.device("cpu")

    def __init__(self, logits):
        self.logits = logits[None]

    def forward(self, input_ids, use_cache):
        assert not use_cache
        assert input_ids.shape == self.logits.shape[:2]
        return self

    __call__ = forward


def log_softmax(row):
    total = math.log(sum(math.exp(value) for value in row))
    return [value - total for value in row]


def test_every_position_of_a_long_window_is_compared_in_float32():
    count, generator = CHUNK + 3, torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 9, (count + 1,), generator=generator)
    tables = (4 * torch.randn(2, count + 1, 9, generator=generator)).bfloat16()
    scores = score(Given(tables[1]), tokens, reference=Given(tables[0]), sequence_length=count + 1)
    loss = other_loss = divergence = agreed = 0.0
    for place, token in enumerate(tokens[1:].tolist()):
        p, q = (log_softmax(table[place].tolist()) for table in tables)
        loss -= q[token]
        other_loss -= p[token]
        divergence += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        agreed += p.index(max(p)) == q.index(max(q))
    assert scores.perplexity == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert scores.reference_perplexity == pytest.approx(math.exp(other_loss / count), rel=1e-5)
    assert scores.kl_divergence == pytest.approx(divergence / count, rel=1e-5)
    assert scores.top1_agreement == agreed / count


def test_what_cannot_be_compared_is_refused():
    fine = Given(torch.zeros(16, 30))
    with pytest.raises(NonFiniteError, match="the model's loss in window 0 is nan"):
        score(Given(torch.full((16, 30), torch.nan)), TOKENS[:16], reference=fine, sequence_length=16)
    infinite = torch.zeros(16, 30).index_fill(1, TOKENS[1:2], -torch.inf)
    with pytest.raises(NonFiniteError, match="the reference's loss in window 0 is inf"):
        score(fine, TOKENS[:16], reference=Given(infinite), sequence_length=16)
    with pytest.raises(ShapeError, match="share a vocabulary"):
        score(fine, TOKENS[:16], reference=Given(torch.zeros(16, 31)), sequence_length=16)
