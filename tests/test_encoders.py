"""Encoders from end to end: quantized from files, reloaded, and measured by their embeddings."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

import gptqkit
from gptqkit import cli
from gptqkit.errors import CheckpointError, ConfigError
from gptqkit.evaluating import default_length, is_encoder
from support.models import SIZE, build, windows

TEXTS = windows(samples=9, length=12).input_ids
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def settings(**changes):
    return gptqkit.QuantizeConfig(**{"bits": 3, "group_size": 32, "sym": False, **changes})


def quantize(model, out, **options):
    return gptqkit.quantize(model, windows().input_ids, out, settings(), sequence_length=24, device="cpu", **options)


def sentence_model(folder, pooling):
    build("bert").save_pretrained(folder)
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False}
    return sentence_model(tmp_path_factory.mktemp("encoder") / "float", {"word_embedding_dimension": 64, **flags})


@pytest.fixture(scope="module")
def result(source):
    return quantize(source, source.parent / "out")


def expected_cosines(result, pool):
    """From dequantized weights in the float class, where nothing of our kernels or pooling takes part."""
    quantized = build("bert")
    for name, weight in result.weights.items():
        quantized.get_submodule(name).weight.data = weight.dequantize()
    with torch.no_grad():
        ours, theirs = (pool(model(TEXTS).last_hidden_state.double()) for model in (quantized, build("bert")))
    return (ours * theirs).sum(1) / (ours.norm(dim=1) * theirs.norm(dim=1))


def test_a_sentence_embedding_model_keeps_its_files_and_its_card_says_what_it_is(source, result):
    for file in ("modules.json", "1_Pooling/config.json"):
        assert (result.path / file).read_bytes() == (source / file).read_bytes()
    card = (result.path / "README.md").read_text(encoding="utf-8")
    assert "pipeline_tag: sentence-similarity" in card
    assert "AutoModelForCausalLM" not in card
    gptqkit.convert(result.path, source.parent / "v1", format="gptq")
    assert "pipeline_tag: sentence-similarity" in (source.parent / "v1" / "README.md").read_text(encoding="utf-8")


def test_the_command_compares_embeddings_pooled_as_the_folder_says(source, result, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_log_to_stderr", lambda _: None)
    monkeypatch.setattr(cli, "_quieten_libraries", lambda _: None)
    save_file({"input_ids": TEXTS}, tmp_path / "ids.safetensors")
    command = f"evaluate {result.path} --dataset {tmp_path}/ids.safetensors --reference {source} --device cpu"
    assert cli.main([*command.split(), "--json", str(tmp_path / "scores.json")]) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    cosines = expected_cosines(result, lambda hidden: hidden[:, 0])
    assert scores["cosine"] == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert scores["lowest_cosine"] == pytest.approx(float(cosines.min()), abs=1e-5)
    assert 0.5 < scores["cosine"] < 0.999
    assert 0.5 < scores["rank_agreement"] < 1
    assert (scores["pooling"], scores["texts"], scores["tokens"], scores["backend"]) == ("cls", 9, 108, "cpu")
    printed = capsys.readouterr().out
    assert f"{scores['cosine']:.5g}" in printed
    assert "rank agreement" in printed


def test_loaded_models_are_pooled_by_the_mean(result):
    model, _ = gptqkit.load(result.path, device="cpu")
    scores = gptqkit.evaluate(model, TEXTS, reference=build("bert"), batch_size=2, max_windows=8)
    cosines = expected_cosines(result, lambda hidden: hidden.mean(1))[:8]
    assert isinstance(scores, gptqkit.EmbeddingScores)
    assert (scores.pooling, scores.texts, scores.sequence_length) == ("mean", 8, 64)
    assert scores.cosine == pytest.approx(float(cosines.mean()), abs=1e-5)


def test_what_an_encoder_has_not_is_refused(source, result, tmp_path):
    with pytest.raises(ConfigError, match="BertModel is an encoder, which has no perplexity"):
        gptqkit.evaluate(result.path, TEXTS, device="cpu")
    with pytest.raises(ConfigError, match="stride is 4"):
        gptqkit.evaluate(result.path, TEXTS, reference=source, stride=4, device="cpu")
    worked = []
    for model in (source, build("bert")):
        with pytest.raises(ConfigError, match="evaluate_on measures perplexity"):
            quantize(model, tmp_path / "out", evaluate_on="text.txt", progress=worked.append)
    assert not worked
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "lasttoken"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": ["cls", "mean"]}, None),
    ],
)
def test_pooling_of_sentence_transformers_is_respected_or_refused(pooling, found, tmp_path):
    folder = sentence_model(tmp_path / "model", pooling)
    if found is None:
        with pytest.raises(CheckpointError, match="only one of mean, cls and lasttoken"):
            gptqkit.evaluate(folder, TEXTS, reference=folder, device="cpu")
    else:
        scores = gptqkit.evaluate(build("bert"), TEXTS, reference=folder, device="cpu")
        assert (scores.pooling, scores.rank_agreement) == (found, 1)


def test_only_models_that_generate_have_a_perplexity(tmp_path):
    bert = build("bert")
    assert is_encoder(bert)
    assert is_encoder(transformers.BertForMaskedLM(bert.config))
    assert is_encoder(build("llama").model)
    for name in ("llama", "gpt2", "llava", "gpt_oss"):
        assert not is_encoder(build(name), tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert is_encoder(build("llama"), tmp_path)


def test_a_masked_language_model_is_measured_by_its_embeddings(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, intermediate_size=96, initializer_range=0.2)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    out = quantize(tmp_path / "model", tmp_path / "out").path
    assert "pipeline_tag: feature-extraction" in (out / "README.md").read_text(encoding="utf-8")
    scores = gptqkit.evaluate(out, TEXTS, reference=tmp_path / "model", device="cpu")
    assert 0.5 < scores.lowest_cosine < scores.cosine < 1


def test_positions_that_begin_behind_the_padding_are_counted():
    """RoBERTa's positions begin at padding_idx + 1, so that 64 rows serve 62 tokens."""
    model = transformers.RobertaModel(transformers.RobertaConfig(**SIZE, intermediate_size=96, pad_token_id=1)).eval()
    assert default_length(model) == 62
    ids = windows(samples=3, length=62).input_ids.clamp(min=2)
    assert gptqkit.evaluate(model, ids, reference=model).cosine == pytest.approx(1)
    with pytest.raises(ConfigError, match="sequence_length is 63, but the model has 62 positions"):
        gptqkit.evaluate(model, ids, reference=model, sequence_length=63)
    gptqkit.quantize(model, ids, None, settings())
