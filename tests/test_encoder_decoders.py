"""Encoder-decoders: both stacks quantized, against whole forward passes of transformers."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import gptqkit
from gptqkit import job
from gptqkit.errors import ArchitectureError, ConfigError
from gptqkit.heatmap import HeatMap, Module
from gptqkit.job import work_path
from gptqkit.targets import find_blocks
from support.jobs import contents, die, processes
from support.models import build, samples, save
from support.pipeline import assert_close, dequantized, quantize, weights

START = {"t5": 0, "bart": 0, "t5gemma": 2, "t5gemma2": 2}  # what the decoder begins with
CASES = {  # settings, padded
    "t5": ({"method": "gptaq", "desc_act": True, "bits": 3}, True),
    "bart": ({"method": "gptq", "format": "gptq", "sym": True, "lm_head": False}, False),
    "t5gemma": ({"method": "gptaq", "true_sequential": False}, False),
}

SHAPES = {"t5": ([0, 1, 2, 3], 6 + 10), "bart": ([0, 1, 2, 3, 4], 6 + 10), "t5gemma": ([0, 1, 2, 3], 7 + 11)}
"""Blocks of both stacks, and kinds of Linears in them."""


def halves(name, tokens):
    """Sample by sample what the model gets: the first half of the text without padding, and the rest behind a start."""
    masks = tokens.input_ids > -1 if tokens.attention_mask is None else tokens.attention_mask
    for ids, mask in zip(tokens.input_ids, masks, strict=True):
        text = ids[mask].tolist()
        cut = max(1, len(text) // 2)
        decoder = torch.tensor([[START[name], *text[cut:]]])
        yield {"input_ids": torch.tensor([text[:cut]]), "decoder_input_ids": decoder}


@torch.no_grad()
def logits(model, name, tokens):
    return torch.cat([model(**sample, use_cache=False).logits[0] for sample in halves(name, tokens)])


@pytest.mark.parametrize("name", ["t5", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bart", "t5gemma"))])
def test_from_disk_to_an_evaluated_checkpoint(name, tmp_path):
    settings, padded = CASES[name]
    settings = {"grid": "minmax", **settings}
    tokens = samples(padded=padded)
    source = save(build(name), tmp_path / "model")
    report = quantize(tmp_path / "model", tmp_path / "out", tokens, **settings).report
    matrices = {
        key.removesuffix(".weight")
        for key, tensor in source.items()
        if tensor.ndim == 2 and re.search(r"coder\.(block|layers)\.", key) and "relative_attention_bias" not in key
    }
    assert {module.name for module in report.modules} == set(weights(tmp_path / "out")) == matrices
    rows = [Module(each.name, each.layer, each.error, each.rounding_error, None, 0) for each in report.modules]
    heat = HeatMap.of(rows)
    assert (list(heat.blocks), len(heat.kinds)) == SHAPES[name]
    errors, rounded = (sum(getattr(module, key) for module in report.modules) for key in ("error", "rounding_error"))
    assert errors < rounded

    theirs = dequantized(tmp_path / "out", tmp_path / "model", tmp_path / "dense")
    prompt = samples(2, 9).input_ids
    for backend in ("torch", "cpu"):
        loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend=backend)
        assert type(loaded) is type(theirs)
        assert_close(logits(loaded, name, tokens), logits(theirs, name, tokens))
    entered = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    expected = theirs.generate(prompt, max_new_tokens=6, do_sample=False)
    for model in (loaded, entered):
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)

    ids, how = samples(4, 31).input_ids, gptqkit.Evaluation(sequence_length=31, device="cpu", dtype="float32")
    scores = gptqkit.evaluate(tmp_path / "out", ids, how, reference=tmp_path / "model")
    assert (scores.windows, scores.tokens) == (4, 4 * 16)
    for model, found in ((theirs, scores.perplexity), (build(name), scores.reference_perplexity)):
        with torch.no_grad():  # the loss that the model is trained with
            loss = model(input_ids=ids[:, :15], labels=ids[:, 15:].contiguous()).loss
        assert found == pytest.approx(float(loss.exp()), rel=1e-4)
    assert scores.kl_divergence > 0


def test_an_output_layer_that_only_the_files_tell_apart_from_the_embedding(tmp_path):
    """T5 1.1: its configuration ties them all the same, and the files decide."""
    tensors = save(build("t5", scale_decoder_outputs=False), tmp_path / "model")
    tensors["lm_head.weight"] = torch.randn(96, 64)
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    float_model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    assert torch.equal(float_model.lm_head.weight, tensors["lm_head.weight"])
    quantize(tmp_path / "model", tmp_path / "out", method="rtn")
    expected = logits(dequantized(tmp_path / "out", tmp_path / "model", tmp_path / "dense"), "t5", samples(2))
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu")
    entered = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    for model in (loaded, entered):
        assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
        assert_close(logits(model, "t5", samples(2)), expected)
    loaded.save_pretrained(tmp_path / "saved")
    assert torch.equal(load_file(tmp_path / "saved/model.safetensors")["lm_head.weight"], tensors["lm_head.weight"])
    with pytest.raises(ConfigError, match="shares its weight with an input embedding, or does so by its configuration"):
        quantize(tmp_path / "model", tmp_path / "other", lm_head=True)


def killed(model, out, place, seconds, step):
    """Do a job in a process that dies when so many modules are done."""
    job.SAVE_SECONDS = seconds
    run = {"activations": place, "resume": True}
    quantize(model, out, method="gptaq", run=run, progress=lambda now: now.done == step and die())


@pytest.mark.slow  # test_job.py stops such a job in both stacks, too
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("place", "seconds"), [("disk", 0), ("memory", 0), ("memory", 3600)])
def test_a_job_killed_in_either_stack_ends_in_the_same_files(place, seconds, tmp_path):
    """T5 has 6 Linears in each of two encoder blocks, and 10 in each of the decoder's: killed in all but the first."""
    model, out, steps = tmp_path / "model", tmp_path / "out", []
    save(build("t5"), model)
    for step, finished in ((8, 1), (14, 2), (25, 3)):
        [ended] = processes(killed, model, out, place, seconds, step, log=tmp_path / "log")
        assert ended.code == -9, ended.text
        assert len(list(work_path(out).glob("block-*.json"))) == finished
    run = {"activations": place, "resume": True}
    quantize(model, out, method="gptaq", run=run, progress=lambda now: steps.append(now.done))
    assert steps == list(range(23, 33))
    assert not work_path(out).exists()
    assert contents(out) == contents(quantize(model, tmp_path / "whole", method="gptaq").path)


def test_what_does_not_turn_text_into_text_is_refused(tmp_path):
    sizes = {"d_model": 64, "vocab_size": 96, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": 0}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **tokens))
    ids, worked = samples(2, 16).input_ids, []
    with pytest.raises(ArchitectureError, match="whose encoder takes input_features, no token ids"):
        gptqkit.quantize(whisper, ids, tmp_path / "out", progress=worked.append)
    without_start = build("t5")
    without_start.generation_config.decoder_start_token_id = without_start.config.decoder_start_token_id = None
    with pytest.raises(ArchitectureError, match="does not say with which token its decoder begins"):
        gptqkit.quantize(without_start, ids, tmp_path / "out", progress=worked.append)
    with pytest.raises(ConfigError, match="sequence_length is 127, but the model has 126 positions in its two stacks"):
        gptqkit.quantize(build("bart"), ids.new_ones(1, 127), tmp_path / "out", progress=worked.append)
    base = transformers.T5Model(build("t5").config)
    for model in (whisper, base):
        with pytest.raises(ConfigError, match="does not turn text into text, so it has no perplexity"):
            gptqkit.evaluate(model, ids.flatten(), gptqkit.Evaluation(sequence_length=16), reference=build("t5"))
    with pytest.raises(ConfigError, match="does not turn text into text"):
        gptqkit.quantize(base, ids, tmp_path / "out", evaluate_on=ids.flatten(), progress=worked.append)
    assert not worked
    assert not list(tmp_path.iterdir())
    tied = build("t5")
    tied.decoder.block[1].layer[2] = tied.encoder.block[1].layer[1]
    with pytest.raises(
        ArchitectureError, match="the encoder and the decoder of T5ForConditionalGeneration share weights"
    ):
        find_blocks(tied)


def test_padding_that_cannot_be_told_apart_is_refused_before_any_work(tmp_path):
    """ProphetNet's decoder has a state for every token and n-gram; that shows when its encoder is done, or before."""
    torch.manual_seed(0)
    sizes = {f"num_{stack}_{name}": 2 for stack in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    config = transformers.ProphetNetConfig(
        vocab_size=96, hidden_size=64, max_position_embeddings=64, decoder_start_token_id=0, pad_token_id=0, **sizes
    )
    model, worked = transformers.ProphetNetForConditionalGeneration(config), []
    message = "makes 39 hidden states of 13 tokens, so padding cannot be told apart in its blocks"
    with pytest.raises(ArchitectureError, match=message):
        quantize(model, tmp_path / "out", samples(padded=True), progress=worked.append)
    assert not worked
