"""Encoders from end to end: quantized from files, reloaded, and measured by their embeddings."""

import json
import shutil

import pytest
import torch
import transformers

import gptqkit
from gptqkit.errors import CheckpointError, ConfigError
from gptqkit.evaluating import default_length, is_encoder
from support.models import SIZE, build, samples, save
from support.pipeline import dequantized, quantize, weights

TEXTS = samples(9, 12).input_ids
CPU = gptqkit.Evaluation(device="cpu")
FLAGS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": False}


def sentence_model(folder, pooling):
    """A folder as sentence-transformers writes it."""
    save(build("bert"), folder)
    (folder / "modules.json").write_text('[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return sentence_model(tmp_path_factory.mktemp("encoder") / "float", {"word_embedding_dimension": 64, **FLAGS})


@pytest.fixture(scope="module")
def out(source):
    return quantize(source, source.parent / "out", bits=3).path


def expected_cosines(out, source, folder, pool):
    """From dequantized weights in the float class, where nothing of our kernels or pooling takes part."""
    with torch.no_grad():
        models = dequantized(out, source, folder), build("bert")
        ours, theirs = (pool(model(TEXTS).last_hidden_state.double()) for model in models)
    return (ours * theirs).sum(1) / (ours.norm(dim=1) * theirs.norm(dim=1))


def test_a_sentence_embedding_model_keeps_its_files_and_its_card_says_what_it_is(source, out):
    for file in ("modules.json", "1_Pooling/config.json"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    gptqkit.convert(out, source.parent / "v1", format="gptq")
    for folder in (out, source.parent / "v1"):
        assert "pipeline_tag: sentence-similarity" in (folder / "README.md").read_text(encoding="utf-8")


def test_folders_are_pooled_as_they_say_and_loaded_models_by_the_mean(source, out, tmp_path):
    cosines = expected_cosines(out, source, tmp_path / "cls", lambda hidden: hidden[:, 0])
    scores = gptqkit.evaluate(out, TEXTS, CPU, reference=source)
    assert scores.cosine == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert scores.lowest_cosine == pytest.approx(float(cosines.min()), abs=1e-5)
    assert 0.5 < scores.cosine < 0.999
    assert 0.5 < scores.rank_agreement < 1
    assert (scores.pooling, scores.texts, scores.tokens, scores.backend) == ("cls", 9, 108, "cpu")
    model, _ = gptqkit.load(out, device="cpu")
    how = gptqkit.Evaluation(batch_size=2, max_windows=8)
    scores = gptqkit.evaluate(model, TEXTS, how, reference=build("bert"))
    cosines = expected_cosines(out, source, tmp_path / "mean", lambda hidden: hidden.mean(1))[:8]
    assert isinstance(scores, gptqkit.EmbeddingScores)
    assert (scores.pooling, scores.texts, scores.sequence_length) == ("mean", 8, 64)
    assert scores.cosine == pytest.approx(float(cosines.mean()), abs=1e-5)


def test_checkpoints_without_a_pooling_are_compared_as_the_reference_pools(source, out, tmp_path):
    shutil.copytree(out, tmp_path / "bare", ignore=shutil.ignore_patterns("1_Pooling", "modules.json"))
    assert not (tmp_path / "bare" / "1_Pooling").exists()
    cosines = expected_cosines(out, source, tmp_path / "cls", lambda hidden: hidden[:, 0])
    for found in gptqkit.compare([tmp_path / "bare", out], TEXTS, CPU, reference=source):
        assert found.scores.pooling == "cls"
        assert found.scores.cosine == pytest.approx(float(cosines.mean()), abs=1e-5)


def test_what_an_encoder_has_not_is_refused(source, out, tmp_path):
    with pytest.raises(ConfigError, match="BertModel is an encoder, which has no perplexity"):
        gptqkit.evaluate(out, TEXTS, CPU)
    with pytest.raises(ConfigError, match="stride is 4"):
        gptqkit.evaluate(out, TEXTS, gptqkit.Evaluation(stride=4, device="cpu"), reference=source)
    calibration, worked = gptqkit.Calibration(TEXTS, sequence_length=12), []
    for model in (source, build("bert")):
        with pytest.raises(ConfigError, match="evaluate_on measures perplexity"):
            gptqkit.quantize(model, calibration, tmp_path / "x", evaluate_on="text.txt", progress=worked.append)
        with pytest.raises(ConfigError, match="BertModel, an encoder, predicts no tokens to tune scales on"):
            gptqkit.quantize(model, calibration, tmp_path / "x", {"tune_epochs": 1}, progress=worked.append)
    assert not worked
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "lasttoken"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
        ({"pooling_mode": ["cls", "mean"]}, None),
    ],
)
def test_pooling_of_sentence_transformers_is_respected_or_refused(pooling, found, tmp_path):
    folder = sentence_model(tmp_path / "model", pooling)
    if found is None:
        with pytest.raises(CheckpointError, match="only one of mean, cls and lasttoken"):
            gptqkit.evaluate(folder, TEXTS, CPU, reference=folder)
    else:
        scores = gptqkit.evaluate(build("bert"), TEXTS, CPU, reference=folder)
        assert (scores.pooling, scores.rank_agreement) == (found, 1)
        other = sentence_model(tmp_path / "reference", {"pooling_mode": "cls"})
        assert gptqkit.evaluate(folder, TEXTS, CPU, reference=other).pooling == found  # the model's own comes first


def test_only_models_that_generate_have_a_perplexity(tmp_path):
    bert = build("bert")
    for encoder in (bert, transformers.BertForMaskedLM(bert.config), build("llama").model):
        assert is_encoder(encoder)
    for name in ("llama", "gpt2", "llava", "gpt_oss"):
        assert not is_encoder(build(name), tmp_path)
    (tmp_path / "modules.json").write_text("[]")
    assert is_encoder(build("llama"), tmp_path)


def test_a_masked_language_model_is_measured_by_its_embeddings(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, intermediate_size=96, initializer_range=0.2)
    save(transformers.BertForMaskedLM(config), tmp_path / "model")
    out = quantize(tmp_path / "model", tmp_path / "out").path
    assert "pipeline_tag: feature-extraction" in (out / "README.md").read_text(encoding="utf-8")
    scores = gptqkit.evaluate(out, TEXTS, CPU, reference=tmp_path / "model")
    assert 0.5 < scores.lowest_cosine < scores.cosine < 1


def test_positions_that_begin_behind_the_padding_are_counted(tmp_path):
    """RoBERTa's positions begin at padding_idx + 1, so that 64 rows serve 62 tokens."""
    model = transformers.RobertaModel(transformers.RobertaConfig(**SIZE, intermediate_size=96, pad_token_id=1)).eval()
    assert default_length(model) == 62
    ids = samples(3, 62).input_ids.clamp(min=2)
    assert gptqkit.evaluate(model, ids, reference=model).cosine == pytest.approx(1)
    with pytest.raises(ConfigError, match="sequence_length is 63, but the model has 62 positions"):
        gptqkit.evaluate(model, ids, gptqkit.Evaluation(sequence_length=63), reference=model)
    run = gptqkit.Run(device="cpu")
    config = gptqkit.QuantizeConfig(group_size=32)
    assert gptqkit.quantize(model, ids, tmp_path / "out", config, run=run).report.sequence_length == 62


PADDING_THEMSELVES = {  # to a multiple of 16, and where their first Linear is
    "longformer": (
        lambda: transformers.LongformerModel(
            transformers.LongformerConfig(**SIZE, intermediate_size=96, attention_window=16, pad_token_id=0)
        ),
        "encoder.layer.0.attention.self.query",
    ),
    "led": (
        lambda: transformers.LEDForConditionalGeneration(
            transformers.LEDConfig(
                **{f"{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")},
                vocab_size=96,
                d_model=64,
                encoder_ffn_dim=96,
                decoder_ffn_dim=96,
                max_encoder_position_embeddings=64,
                max_decoder_position_embeddings=64,
                attention_window=16,
                decoder_start_token_id=2,
                pad_token_id=0,
            )
        ),
        "led.encoder.layers.0.self_attn.longformer_self_attn.query",
    ),
}


@pytest.mark.parametrize(
    ("length", "padded"),
    [pytest.param(46, False, marks=pytest.mark.slow), (46, True), pytest.param(48, True, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", PADDING_THEMSELVES)
def test_what_a_model_adds_as_padding_of_its_own_does_not_count(name, length, padded, tmp_path):
    """By what its first Linear receives in whole forward passes, samples second, at the places of tokens."""
    make, first = PADDING_THEMSELVES[name]
    torch.manual_seed(0)
    model, tokens, received = make().eval(), samples(6, length, padded=padded), []
    query = model.get_submodule(first)
    query.register_forward_pre_hook(lambda _, given: received.append(given[0]))
    counts = torch.full((6,), length) if tokens.attention_mask is None else tokens.attention_mask.sum(1)
    if model.config.is_encoder_decoder:  # the first half
        counts = counts // 2
    ids = tokens.input_ids[:, : counts.max()]
    mask = torch.arange(ids.shape[1]) < counts[:, None]
    with torch.no_grad():
        model(ids, attention_mask=mask.long())
    assert received[0].shape[:2] == (-(-ids.shape[1] // 16) * 16, 6)
    rows = received[0].transpose(0, 1)[:, : ids.shape[1]][mask].double()
    report = quantize(model, tmp_path / "out", tokens, method="rtn", bits=2).report.modules[0]
    assert (report.name, report.tokens) == (first, len(rows))
    weight = query.weight.detach().double()
    lost = rows @ (weight - weights(tmp_path / "out")[first].dequantize().double()).T
    assert report.error == pytest.approx(float(lost.norm() / (rows @ weight.T).norm()), rel=1e-4)
