"""Which tokens are predicted from which, and what their losses are."""

import math

import pytest
import torch

from gptqkit.errors import CalibrationError, ConfigError
from gptqkit.evaluation.perplexity import CHUNK, batch_windows, cut_windows, token_losses


def predictions(windows):
    """(predicted token, tokens before it in its window), token ids being positions."""
    found = []
    for window in windows:
        ids = window.input_ids.tolist()
        found += [(ids[place], place) for place in range(len(ids) - window.predicted, len(ids))]
    return found


def test_windows_without_overlap():
    found = predictions(cut_windows(torch.arange(23), 5))
    assert found == [(5 * window + place, place) for window in range(4) for place in range(1, 5)]


@pytest.mark.parametrize("stride", range(1, 8))
@pytest.mark.parametrize("tokens", [7, 8, 20, 21])
def test_strided_windows_predict_every_token_once_with_enough_before_it(stride, tokens):
    found = predictions(cut_windows(torch.arange(tokens), 7, stride=stride))
    starts = set(range(0, tokens, 7)) if stride == 7 else {0}  # without overlap nothing stands before a first token
    assert [token for token, _ in found] == [token for token in range(tokens) if token not in starts]
    for token, before in found:
        assert 1 <= before <= token
        assert before >= min(token, 7 - stride)


def test_max_windows():
    assert len(cut_windows(torch.arange(100), 10, max_windows=3)) == 3
    assert len(cut_windows(torch.arange(100), 10, stride=5, max_windows=3)) == 3


def test_bad_lengths_are_refused():
    tokens = torch.arange(10)
    for settings in ({"sequence_length": 1}, {"sequence_length": 4, "stride": 5}, {"sequence_length": 4, "stride": 0}):
        with pytest.raises(ConfigError):
            cut_windows(tokens, **settings)
    with pytest.raises(ConfigError, match="max_windows"):
        cut_windows(tokens, 4, max_windows=0)
    with pytest.raises(CalibrationError, match="10 tokens, less than one window of 11"):
        cut_windows(tokens, 11)


def test_batches_keep_the_order_and_hold_equal_windows():
    windows = cut_windows(torch.arange(40), 8, stride=3)
    batches = batch_windows(windows, 4)
    assert [window for batch in batches for window in batch] == windows
    assert max(map(len, batches)) == 4
    for batch in batches:
        assert len({(len(window.input_ids), window.predicted) for window in batch}) == 1
    with pytest.raises(ConfigError, match="batch_size"):
        batch_windows(windows, 0)


def test_losses_are_float32_whatever_the_logits():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(CHUNK + 3, 11, generator=generator) * 4).bfloat16()
    targets = torch.randint(0, 11, (CHUNK + 3,), generator=generator)
    losses = token_losses(logits, targets)
    assert losses.dtype == torch.float32
    for place in (0, CHUNK - 1, CHUNK, CHUNK + 2):
        row = [math.exp(value) for value in logits[place].tolist()]
        assert losses[place].item() == pytest.approx(-math.log(row[targets[place]] / sum(row)), rel=1e-5)
