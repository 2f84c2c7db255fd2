"""The one call, on the example model."""

import math

import pytest

from gptqkit.errors import ConfigError
from gptqkit.evaluating import evaluate
from gptqkit.evaluation.config import Evaluation
from gptqkit.loading import load_float


@pytest.fixture(scope="module")
def text_file(small_text, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(small_text, encoding="utf-8", newline="")
    return path


def test_perplexity_of_a_text_file(example_model, tokenizer, small_text, text_file):
    scores = evaluate(example_model, text_file, Evaluation(sequence_length=128, max_windows=6, device="cpu"))
    model, _ = load_float(example_model, device="cpu")
    windows = tokenizer(small_text, return_tensors="pt").input_ids[0, : 6 * 128].view(6, 1, 128)
    losses = [float(model(window, labels=window).loss) for window in windows]  # transformers' own
    assert scores.tokens == 6 * 127
    assert scores.perplexity == pytest.approx(math.exp(sum(losses) / 6), rel=1e-5)


def test_a_loaded_model_runs_in_evaluation_mode_and_is_left_as_it_was(example_model, text_file):
    model, tokenizer = load_float(example_model, device="cpu")
    model.train()
    modes = []
    model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    how = Evaluation(sequence_length=64, max_windows=2)
    scores = evaluate(model, text_file, how, reference=model, tokenizer=tokenizer)
    assert model.training
    assert set(modes) == {False}
    assert (scores.top1_agreement, scores.backend) == (1, None)


def test_windows_are_as_long_as_the_model_takes_and_never_longer(example_model, text_file):
    assert evaluate(example_model, text_file, Evaluation(device="cpu", max_windows=1)).sequence_length == 512
    with pytest.raises(ConfigError, match="sequence_length is 513, but the model has 512 positions"):
        evaluate(example_model, text_file, Evaluation(sequence_length=513, device="cpu"))
    with pytest.raises(ConfigError, match="is not quantized"):
        evaluate(example_model, text_file, Evaluation(backend="torch", device="cpu"))
