"""Which tokens are predicted from which."""

import pytest
import torch

from gptqkit.errors import CalibrationError, ConfigError
from gptqkit.evaluation.config import Evaluation
from gptqkit.evaluation.perplexity import cut_windows


def predictions(windows):
    """(predicted token, tokens before it in its window), token ids being positions."""
    found = []
    for window in windows:
        ids = window.input_ids.tolist()
        found += [(ids[place], place) for place in range(len(ids) - window.predicted, len(ids))]
    return found


@pytest.mark.parametrize("tokens", [7, 8, 20, 21])
def test_windows_predict_every_token_once_with_enough_before_it(tokens):
    whole = predictions(cut_windows(torch.arange(tokens), 7))
    assert whole == [(7 * window + place, place) for window in range(tokens // 7) for place in range(1, 7)]
    for stride in range(1, 8):
        found = predictions(cut_windows(torch.arange(tokens), 7, stride=stride))
        starts = set(range(0, tokens, 7)) if stride == 7 else {0}  # without overlap nothing is before a first token
        assert [token for token, _ in found] == [token for token in range(tokens) if token not in starts]
        for token, before in found:
            assert 1 <= before <= token
            assert before >= min(token, 7 - stride)


def test_max_windows():
    for stride in (None, 5):
        windows = cut_windows(torch.arange(100), 10, stride=stride, max_windows=3)
        assert predictions(windows) == predictions(cut_windows(torch.arange(100), 10, stride=stride)[:3])


def test_lengths_and_settings_that_cannot_be():
    with pytest.raises(ConfigError, match="sequence_length is 1"):
        cut_windows(torch.arange(10), 1)
    with pytest.raises(ConfigError, match="stride is 5"):
        cut_windows(torch.arange(10), 4, stride=5)
    with pytest.raises(CalibrationError, match="10 tokens, less than one window of 11"):
        cut_windows(torch.arange(10), 11)
    for setting in ("sequence_length", "stride", "max_windows", "batch_size"):
        with pytest.raises(ConfigError, match=f"{setting} is 0; it must be positive"):
            Evaluation(**{setting: 0})
    with pytest.raises(ConfigError, match="dtype is 'float8'; choose one of auto"):
        Evaluation(dtype="float8")
    assert Evaluation(dtype=torch.bfloat16) == Evaluation(dtype="bfloat16")
