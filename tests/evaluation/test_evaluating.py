"""The one call, on the example model."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from gptqkit.comparing import compare
from gptqkit.errors import CalibrationError, CheckpointError, ConfigError, DatasetUnavailableError
from gptqkit.evaluating import evaluate
from gptqkit.evaluation.config import Evaluation
from gptqkit.loading import load_float
from support.models import build, samples


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


@pytest.mark.parametrize("stride", [None, 40])
def test_of_a_text_without_end_only_the_windows_asked_for_are_read(example_model, small_text, stride):
    lines, read = small_text.splitlines() * 40, []
    source = (read.append(line) or line for line in lines)
    how = Evaluation(sequence_length=64, max_windows=3, stride=stride, device="cpu")
    part, whole = (evaluate(example_model, each, how) for each in (source, lines))
    assert (part.tokens, part.perplexity) == (whole.tokens, whole.perplexity)
    assert len(read) < len(lines) / 8


@pytest.mark.parametrize("windows", [None, 2])
def test_a_named_text_is_read_once(example_model, small_text, windows, tmp_path, monkeypatch):
    (tmp_path / "text.json").write_text(json.dumps([{"text": line} for line in small_text.splitlines()]))
    opened, plain = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *given, **how: opened.append(self) or plain(self, *given, **how))
    how = Evaluation(sequence_length=64, max_windows=windows, device="cpu")
    found = evaluate(example_model, tmp_path / "text.json", how)
    assert opened.count(tmp_path / "text.json") == 1
    assert found.perplexity == evaluate(example_model, small_text.splitlines(), how).perplexity


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


def test_a_module_that_is_no_model_of_transformers_is_refused():
    model = build("llama")
    for given, message in (
        (torch.nn.DataParallel(model), "DataParallel, .*; give its .module$"),
        (model.model.norm, "RMSNorm"),
    ):
        with pytest.raises(ConfigError, match=f"the model is a .*{message}"):
            evaluate(given, [[1, 2, 3]])
        with pytest.raises(ConfigError, match=f"the model is a .*{message}"):
            evaluate(model, [[1, 2, 3]], reference=given)


def test_what_load_returns_is_answered_with_the_first_of_it(tokenizer):
    with pytest.raises(ConfigError, match=r"^a tuple is no model; .* the first of the two that load returns$"):
        evaluate((build("llama"), tokenizer), [[1, 2, 3]])


def test_a_text_that_is_not_there_shows_before_a_model_is_opened(tmp_path):
    with pytest.raises(DatasetUnavailableError, match=r"there is no file or folder .*none\.txt"):
        evaluate(tmp_path / "no model", tmp_path / "none.txt")
    with pytest.raises(DatasetUnavailableError, match=r"there is no file or folder .*none\.txt"):
        compare([tmp_path / "no model"], tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"dataset": "wikitext-2"}, DatasetUnavailableError, "cannot be read: .*did you mean wikitext2"),
        ({"tokenizer": "nowhere/at/all"}, DatasetUnavailableError, "there is no folder nowhere/at/all"),
        ({"model": "without"}, CalibrationError, "without has no tokenizer, which text needs; copy one there, or give"),
        ({"model": "nothing"}, CheckpointError, r"config\.json is missing"),  # rather than a tokenizer
        ({"config": {"sequence_length": 513}}, ConfigError, "sequence_length is 513, but the model has 512"),
    ],
)
def test_what_can_be_known_before_weights_are_read_is(
    change, error, said, example_model, text_file, tmp_path, monkeypatch
):
    shutil.copytree(example_model, tmp_path / "without", ignore=shutil.ignore_patterns("tokenizer*"))
    (tmp_path / "nothing").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gptqkit.evaluating.load_float", None)
    monkeypatch.setattr("gptqkit.comparing.load_float", None)
    given = {"model": example_model, "dataset": text_file, "config": None, **change}
    with pytest.raises(error, match=said):
        evaluate(**given)
    if "tokenizer" not in change:
        monkeypatch.setattr("gptqkit.comparing.inspect", lambda _: None)  # which wants a checkpoint
        with pytest.raises(error, match=said):
            compare([given["model"]], given["dataset"], given["config"], reference=example_model)


def test_a_tokenizer_that_is_given_stands_for_the_model_s_own(example_model, tokenizer, small_text):
    """Here one that finds the same tokens in reverse."""

    def backwards(text, **how):
        return {"input_ids": tokenizer(text, **how)["input_ids"][::-1]}

    text, how = small_text[:2000], Evaluation(sequence_length=64, device="cpu")
    found = evaluate(example_model, [text], how, tokenizer=backwards)
    assert found.perplexity == evaluate(example_model, backwards(text)["input_ids"], how).perplexity


def test_tokens_must_be_known_to_the_model_and_the_reference():
    narrow, wide = build("llama", vocab_size=80), build("llama")
    for models in ((narrow, wide), (wide, narrow)):
        with pytest.raises(CalibrationError, match=r"ids must lie in 0 \.\.\. 79"):
            evaluate(models[0], [90] * 24, Evaluation(sequence_length=24), reference=models[1])


@pytest.mark.parametrize(("name", "reference"), [("llama", "bert"), ("llama", "t5"), ("t5", "llama")])
def test_a_reference_of_another_kind_is_refused(name, reference):
    model, other = build(name), build(reference)
    with pytest.raises(ConfigError, match=f"reference is a {type(other).__name__}, the model a {type(model).__name__}"):
        evaluate(model, samples().input_ids, Evaluation(sequence_length=24), reference=other)
