"""Learned rounding in the pipeline: blocks come nearer to the float model on samples that learning does not see."""

import copy
import json
import os
import re
import weakref
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
import transformers
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

import gptqkit
from gptqkit import load, tuning
from gptqkit.calibration.samples import Samples, load_samples
from gptqkit.display import quantization_summary
from gptqkit.distributed import Processes
from gptqkit.errors import CheckpointError, DoesNotFitError
from gptqkit.fisher import measure_fisher
from gptqkit.model import FloatModel
from gptqkit.progress import silent
from gptqkit.quantizer.learned import LearnedWeight
from gptqkit.walking import own_batches
from support import gguf_files
from support.jobs import contents, processes
from support.jobs import quantize as quantize_case
from support.models import GROUPED, build, overflowing, samples
from support.pipeline import outputs, quantize, weights

SLOW_TUNED = [pytest.param(name, "gptq_v2", marks=pytest.mark.slow) for name in ("gpt2", "mixtral")]


def learned(model, out, **settings):
    return quantize(model, out, samples(64), **{"bits": 2, "learn_iterations": 30, "grid": "minmax", **settings})


def test_every_step_is_told(tmp_path):
    steps = []
    settings = {"bits": 2, "grid": "minmax", "two_sided": True, "learn_iterations": 3}
    quantize(build("qwen2"), tmp_path / "out", **settings, progress=steps.append)
    block = [("quantize", done) for done in range(1, 8)] + [("learn", done) for done in range(1, 4)]
    assert [(step.stage, step.done) for step in steps[:11]] == [("measure", 1), *block]
    assert [(step.layer, step.done, step.total) for step in steps if step.stage == "learn"] == [
        (layer, done, 3) for layer in range(2) for done in range(1, 4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {"desc_act": True, "two_sided": True, "refine_rounds": 1}),
        ("qwen2", {"method": "rtn"}),
        ("mixtral", {"refine_rounds": 2}),
    ],
)
def test_blocks_come_nearer_to_the_float_model(tmp_path, name, settings):
    """Measured by running the blocks of the checkpoint, as loaded, on the samples kept aside.

    With `two_sided`, errors weigh what they change of predictions (see test_fisher.py).
    """
    model, settings = build(name), {**settings, "grid": "minmax"}  # searched ones differ where it learns
    plain = quantize(model, tmp_path / "plain", samples(64), bits=2, **settings).report
    report = learned(model, tmp_path / "learned", **settings).report
    assert not plain.blocks
    assert [block.layer for block in report.blocks] == list(range(model.config.num_hidden_layers))
    assert all(block.error <= block.error_before and block.codes_changed < 0.5 for block in report.blocks)
    assert report.blocks[0].error < report.blocks[0].error_before

    aside = samples(64).input_ids[-8:]
    states = {}
    for path in ("learned", "plain"):
        with torch.no_grad():
            states[path] = load(tmp_path / path, device="cpu")[0](aside, output_hidden_states=True).hidden_states[1]
    with torch.no_grad():
        expected = copy.deepcopy(model).float()(aside, output_hidden_states=True).hidden_states[1]
    metric = torch.eye(expected.shape[-1])
    if settings.get("two_sided"):
        model.save_pretrained(tmp_path / "float")
        alone, how = Processes(0, 1, torch.device("cpu")), gptqkit.Run(batch_size=3)
        source = FloatModel(tmp_path / "float")
        batches = own_batches(source, samples(64), alone, how)
        metric = measure_fisher(source, batches, alone, how, tmp_path / "none", tmp_path, silent).metric

    def size(difference):
        return float(torch.einsum("...i,ij,...j->", difference, metric, difference)) ** 0.5

    block = report.blocks[0]
    for path, error in (("learned", block.error), ("plain", block.error_before)):
        found = size(states[path] - expected) / size(expected)
        assert abs(found - error) < 1e-3 * error
    before, after = (weights(tmp_path / path) for path in ("plain", "learned"))
    of_block = [name for name in before if re.search(r"\.(layers|h)\.0\.", name)]
    changed = [(before[name].codes != after[name].codes).flatten() for name in of_block]
    assert block.codes_changed == pytest.approx(float(torch.cat(changed).float().mean()))


def test_errors_of_an_encoder_weigh_alike(tmp_path):
    """What its decoder's weigh would not even fit."""
    model = build("t5gemma")
    encoder = model.config.encoder.num_hidden_layers
    assert model.config.encoder.hidden_size != model.config.decoder.hidden_size
    blocks = quantize(model, tmp_path / "out", samples(8), bits=2, method="rtn", learn_iterations=5).report.blocks
    assert [block.layer for block in blocks] == list(range(encoder + model.config.decoder.num_hidden_layers))
    aside = samples(8).input_ids[-1:, :12]
    quantized, _ = load(tmp_path / "out", device="cpu")
    with torch.no_grad():
        found, expected = (
            each.get_encoder()(aside, output_hidden_states=True).hidden_states[1] for each in (quantized, model)
        )
    assert blocks[0].error == pytest.approx(float((found - expected).norm() / expected.norm()), rel=1e-3)


def test_of_gguf_only_codes_are_learned(tmp_path):
    gguf_files.save(gguf_files.build(**{**gguf_files.NARROW, "num_hidden_layers": 1}), tmp_path / "float")
    settings = {"type": "Q4_0", "method": "rtn", "group_size": 128, "sym": True}
    for out, steps in (("plain", 0), ("learned", 30)):
        quantize(tmp_path / "float", tmp_path / out, gguf_files.tokens(64), learn_iterations=steps, **settings)
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "learned")
    for name, weight in before.items():
        assert torch.equal(weight.scale, after[name].scale)
        assert torch.equal(weight.offset, after[name].offset)
    assert any(not torch.equal(weight.codes, after[name].codes) for name, weight in before.items())


def test_samples_left_out_and_padding_teach_nothing(tmp_path, monkeypatch):
    """What stands in them cannot be seen in the result."""
    model = overflowing("qwen2")
    clean = samples(16).input_ids.clamp_(max=94)
    mask = torch.arange(24)[None] < torch.tensor([24, 10, 17, 24] * 4)[:, None]
    results = []
    for filler in (3, 7):

        def filled(*arguments, its=filler, **named):
            found = load_samples(*arguments, **named)
            return Samples(torch.where(found.attention_mask, found.input_ids, its), found.attention_mask)

        monkeypatch.setattr("gptqkit.api.load_samples", filled)
        clean[3] = filler
        clean[3, 2] = 95  # the token that makes NaN
        settings = {"bits": 2, "method": "rtn", "learn_iterations": 30, "skip_nonfinite": True}
        report = quantize(model, tmp_path / str(filler), Samples(clean, mask), **settings).report
        assert report.excluded_samples == 1
        assert all(block.codes_changed > 0 for block in report.blocks)
        results.append(contents(tmp_path / str(filler)))
    shards = [{name: data for name, data in files.items() if name.endswith("safetensors")} for files in results]
    assert shards[0] == shards[1]


def overflow_at_the_end_of(layer, monkeypatch):
    """Let a block of Qwen2 end with infinity where token 95 stands, and return a model whose token 95 says so."""
    model, forward = build("qwen2"), Qwen2DecoderLayer.forward
    embedding = model.get_input_embeddings().weight.data
    embedding[:, 0].clamp_(-1, 1)
    embedding[95, 0] = 100

    def run(self, hidden_states, *arguments, **named):
        leaving = forward(self, hidden_states, *arguments, **named)
        ends = self.self_attn.layer_idx == layer
        return leaving.masked_fill(hidden_states[..., :1].abs() > 50, torch.inf) if ends else leaving

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", run)
    return model


@pytest.mark.parametrize(
    ("layer", "bad"), [(1, 60), *(pytest.param(0, each, marks=pytest.mark.slow) for each in (40, 60))]
)
def test_a_sample_that_overflows_where_a_block_ends_is_left_out_of_what_is_learned(tmp_path, monkeypatch, layer, bad):
    """That of the last block, too, after which nothing else would notice it."""
    model, ids = overflow_at_the_end_of(layer, monkeypatch), samples(64).input_ids.clamp_(max=94)
    ids[bad, 3] = 95
    settings = {"bits": 2, "method": "rtn", "learn_iterations": 30, "tune_epochs": 0, "skip_nonfinite": True}
    report = quantize(model, tmp_path / "out", Samples(ids), **settings).report
    assert report.excluded_samples == 1
    assert report.blocks[layer].error < report.blocks[layer].error_before

    aside = ids[[number for number in range(56, 64) if number != bad]]
    found = []
    for each in (load(tmp_path / "out", device="cpu")[0], model):
        each.model.layers[layer].register_forward_hook(lambda _module, _arguments, output: found.append(output))
        outputs(each, Samples(aside))
    error = float((found[0] - found[1]).norm() / found[1].norm())
    assert report.blocks[layer].error == pytest.approx(error, rel=1e-3)


def test_learning_needs_little_memory_at_once(tmp_path, monkeypatch):
    """Where a batch does not fit, it is done in halves; sums of two halves are those of the whole but for rounding."""
    model = build("llama", num_hidden_layers=1)
    whole = learned(model, tmp_path / "whole", method="gptaq").report.blocks[0]
    forward = type(model.model.layers[0]).forward

    def too_large(self, hidden_states, *arguments, **named):
        if torch.is_grad_enabled() and len(hidden_states) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return forward(self, hidden_states, *arguments, **named)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", too_large)
    halves = learned(model, tmp_path / "halves", method="gptaq").report.blocks[0]
    assert halves.error_before == pytest.approx(whole.error_before, rel=1e-5)
    assert halves.error == pytest.approx(whole.error, rel=0.05)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "where", ["forward", "stored", *(pytest.param(each, marks=pytest.mark.slow) for each in ("__init__", "descend"))]
)
def test_a_block_that_cannot_learn_for_want_of_memory_keeps_what_was_solved(tmp_path, monkeypatch, caplog, where):
    model = build("llama")
    quantize(model, tmp_path / "plain", bits=2, method="gptaq", grid="minmax")
    owner = type(model.model.layers[0]) if where == "forward" else LearnedWeight
    run = getattr(owner, where)

    def too_large(*arguments, **named):
        if where != "forward" or torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return run(*arguments, **named)

    monkeypatch.setattr(owner, where, too_large)
    settings = {"bits": 2, "method": "gptaq", "grid": "minmax", "learn_iterations": 3}
    report = quantize(model, tmp_path / "out", **settings).report
    assert not report.blocks
    assert caplog.text.count("does not fit into memory with what learning needs") == 2
    assert "not learned, for want of memory" in quantization_summary(report, gptqkit.inspect(tmp_path / "out"))
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].dequantize(), after[name].dequantize()) for name in before)


def test_several_processes_learn_together(job_models, tmp_path):
    """Two that share the samples, and one that has none."""
    for ended in processes(quantize_case, job_models, "learned", tmp_path / "out", size=3, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    assert torch.isfinite(outputs(load(tmp_path / "out", device="cpu")[0])).all()


def learn_without_room(models, out):
    """Do the job of the case "learned" where the first process has no memory for backpropagation."""
    forward = MistralDecoderLayer.forward

    def too_large(self, hidden_states, *arguments, **named):
        if torch.is_grad_enabled() and os.environ["RANK"] == "0":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return forward(self, hidden_states, *arguments, **named)

    MistralDecoderLayer.forward = too_large
    quantize_case(models, "learned", out, settings={"grid": "minmax"})


def test_where_one_process_cannot_learn_none_does(job_models, tmp_path):
    """The result is that of a job that learns nothing."""
    for ended in processes(learn_without_room, job_models, tmp_path / "out", size=2, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    plain = partial(quantize_case, settings={"learn_iterations": 0, "two_sided": False, "grid": "minmax"})
    for ended in processes(plain, job_models, "learned", tmp_path / "plain", size=2, log=tmp_path / "log2"):
        assert ended.code == 0, ended.text
    found, expected = weights(tmp_path / "out"), weights(tmp_path / "plain")
    assert all(torch.equal(found[name].dequantize(), expected[name].dequantize()) for name in expected)


def tune(models, out, rows):
    settings, tokens = {"method": "rtn", "tune_epochs": 8}, samples(5).input_ids[rows]
    report = quantize_case(models, "gptq", out, settings=settings, calibration=tokens, batch_size=3).report
    out.with_suffix(".json").write_text(json.dumps(asdict(report.tuning)))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_processes_tune_like_one(job_models, tmp_path):
    """Each keeps its last sample aside, the same one; the others make one step, so there is one way to draw them."""
    for ended in processes(tune, job_models, tmp_path / "two", [0, 1, 4, 2, 3, 4], size=2, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    tune(job_models, tmp_path / "one", [0, 1, 2, 3, 4])
    tune(job_models, tmp_path / "half", [0, 1, 4])  # of what the first process has
    said = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two", "half")}
    scales = {name: [each.scale.flatten() for each in weights(tmp_path / name).values()] for name in said}
    one, two, half = (torch.cat(each) for each in scales.values())
    assert said["two"] == pytest.approx(said["one"], rel=1e-4)
    assert float(((two / one - 1).abs() > 1e-3).float().mean()) < 0.01
    assert float(((half / one - 1).abs() > 1e-3).float().mean()) > 0.9


def divergence(path, model, ids):
    """KL(model || checkpoint) per token, in transformers alone."""
    loaded, _ = load(path, device="cpu")
    with torch.no_grad():
        ours, theirs = (each(ids, use_cache=False).logits.float().log_softmax(-1) for each in (loaded, model))
    return float(torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum") / ids.numel())


@pytest.mark.parametrize(("name", "format_"), [("llama", "gptq"), *SLOW_TUNED])
def test_tuned_scales_predict_more_like_the_float_model(tmp_path, name, format_):
    """Codes and zero points stay; on the samples kept aside the divergence falls, and is what the report says."""
    model = build(name, num_hidden_layers=1)
    settings = {"bits": 2, "format": format_, "method": "gptq", "grid": "minmax"}
    quantize(model, tmp_path / "plain", samples(64), **settings)
    report = quantize(
        model, tmp_path / "tuned", samples(64), **settings, tune_epochs=2, run={"shard_size": 20000}
    ).report
    aside = samples(64).input_ids[-8:]
    for path, said in (("plain", report.tuning.divergence_before), ("tuned", report.tuning.divergence)):
        assert divergence(tmp_path / path, model, aside) == pytest.approx(said, rel=1e-5)
    assert report.tuning.divergence < report.tuning.divergence_before
    before, after = weights(tmp_path / "plain"), weights(tmp_path / "tuned")
    for layer, weight in before.items():
        assert torch.equal(weight.codes, after[layer].codes)
        assert torch.equal(weight.zero_point(), after[layer].zero_point())
    assert any(not torch.equal(weight.scale, after[layer].scale) for layer, weight in before.items())


@pytest.mark.parametrize("size", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_samples_left_out_are_not_tuned_on(tmp_path, size):
    """Here the first one, in a batch of its own, the last ones, and one of the two that are kept aside, 14 and 15."""
    model, ids = overflowing("qwen2"), samples(18).input_ids.clamp_(max=94)
    ids[[0, 14, 16, 17], 2] = 95
    settings = {"bits": 2, "method": "rtn", "skip_nonfinite": True, "tune_epochs": 1, "run": {"batch_size": size}}
    report = quantize(model, tmp_path / "out", Samples(ids), **settings).report
    assert report.excluded_samples == 4
    assert report.tuning.divergence < report.tuning.divergence_before
    assert divergence(tmp_path / "out", model, ids[15:16]) == pytest.approx(report.tuning.divergence, rel=1e-5)


def test_padding_is_not_tuned_on(tmp_path):
    """The last sample is kept aside, of which 14 of 24 tokens are text."""
    model, tokens = build("llama", num_hidden_layers=1), samples(padded=True)
    rows = [
        {"input_ids": ids, "attention_mask": mask}
        for ids, mask in zip(tokens.input_ids.tolist(), tokens.attention_mask.long().tolist(), strict=True)
    ]
    config = {"bits": 2, "group_size": 32, "method": "rtn", "tune_epochs": 1}
    report = gptqkit.quantize(model, rows, tmp_path / "out", config, run={"device": "cpu"}).report
    found = divergence(tmp_path / "out", model, tokens.input_ids[-1:, :14])
    assert found == pytest.approx(report.tuning.divergence, rel=1e-4)


@pytest.mark.parametrize(
    ("scores", "kept"),
    [((3.0, 1.0, 2.0, 1.5), "first"), ((3.0, 4.0, 3.5), "none"), ((3.0, 2.0, 2.5, 3.2), "none")],
)
def test_the_epoch_that_is_best_on_samples_kept_aside_is_written(tmp_path, monkeypatch, scores, kept):
    """Here it is told which one that is; the second has moved scales on from where the first left them.

    The last score is that of the best ones as a file holds them, and is what counts.
    """
    said, moved = iter(scores), []
    step = torch.optim.Adam.step

    def record(self, *arguments):
        step(self, *arguments)
        learned = [parameter.detach().exp().flatten() for group in self.param_groups for parameter in group["params"]]
        moved.append(torch.cat(learned))

    monkeypatch.setattr("gptqkit.tuning._Run.score", lambda _: next(said))
    monkeypatch.setattr(torch.optim.Adam, "step", record)
    model, settings = build("llama", num_hidden_layers=1), {"bits": 2, "method": "rtn"}
    quantize(model, tmp_path / "plain", samples(8), **settings)
    tuning = quantize(model, tmp_path / "out", samples(8), **settings, tune_epochs=2).report.tuning
    assert (tuning.divergence_before, tuning.divergence) == (3.0, 3.0 if kept == "none" else scores[-1])
    assert len(moved) == 4  # two steps in each epoch
    scales = [[each.scale.flatten() for each in weights(tmp_path / out).values()] for out in ("plain", "out")]
    before, after = map(torch.cat, scales)
    expected = {"none": torch.ones(()), "first": moved[1]}[kept]
    assert torch.allclose(after / before, expected, rtol=2e-3)


@pytest.mark.slow
def test_a_model_whose_cache_has_no_attention_is_tuned(tmp_path):
    mamba = {"mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": 16, "use_mamba_kernels": False}
    config = transformers.JambaConfig(**GROUPED, **mamba, num_experts=1, attn_layer_offset=7)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tuning = quantize(model, tmp_path / "out", samples(16), bits=2, method="rtn", tune_epochs=1).report.tuning
    assert divergence(tmp_path / "out", model, samples(16).input_ids[-2:]) == pytest.approx(tuning.divergence, rel=1e-3)


@pytest.mark.usefixtures("one_thread")
def test_a_job_stopped_while_scales_are_tuned_ends_in_the_same_files(tmp_path):
    class Stop(Exception):
        pass

    def stop(step):
        if step.stage == "tune" and step.done == 3:
            raise Stop

    model, settings = build("qwen2"), {"bits": 2, "method": "rtn", "tune_epochs": 1}
    quantize(model, tmp_path / "whole", samples(16), **settings)
    with pytest.raises(Stop):
        quantize(model, tmp_path / "out", samples(16), **settings, progress=stop)
    quantize(model, tmp_path / "out", samples(16), **settings, run={"resume": True})
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@contextmanager
def memory(limit):
    """Yield a list of the bytes kept for backpropagation beside weights; beyond `limit` memory has run out.

    What torch's checkpointing keeps for the while of one block is not seen.
    """
    kept, sizes = {}, [0]

    def keep(tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in kept and not isinstance(tensor, torch.nn.Parameter):
            kept[key] = storage.nbytes()
            weakref.finalize(storage, kept.pop, key, None)
            sizes.append(sum(kept.values()))
        if sum(kept.values()) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return tensor.detach()  # of the tensor itself, a result would hold the graph that holds it

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


OTHERS = ("gpt2", "gemma2", "mixtral", "deepseek_v3", "t5", "bart")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["qwen2", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_where_one_sample_does_not_fit_the_same_scales_come_of_less_memory(tmp_path, name, caplog):
    model, settings = build(name), {"bits": 2, "method": "rtn", "tune_epochs": 1}
    with memory(1 << 40) as whole:
        quantize(model, tmp_path / "whole", samples(8), **settings, run={"batch_size": 1})
    assert "out of memory" not in caplog.text
    with memory(max(whole) // 4):  # of which activations of all blocks at once are the rest
        quantize(model, tmp_path / "less", samples(8), **settings, run={"batch_size": 1})
    assert caplog.text.count("out of memory with one sample") == 1
    assert contents(tmp_path / "less") == contents(tmp_path / "whole")
    with pytest.raises(DoesNotFitError, match=r"out of memory.*Tried to allocate 2 GiB"), memory(0):
        quantize(model, tmp_path / "none", samples(8), **settings)


@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.slow)])
def test_both_stacks_of_an_encoder_decoder_learn(tmp_path, name):
    blocks = {"num_layers": 1, "num_decoder_layers": 1} if name == "t5" else {}
    settings = {"bits": 2, "method": "rtn", "tune_epochs": 1}
    plain = quantize(build(name, **blocks), tmp_path / "plain", samples(32), **settings).report
    settings["learn_iterations"] = 15
    report = quantize(build(name, **blocks), tmp_path / "out", samples(32), **settings).report
    assert len(report.blocks) == len({module.layer for module in report.modules})
    assert sum(block.error < block.error_before for block in report.blocks) > len(report.blocks) // 2
    assert report.tuning.divergence < report.tuning.divergence_before < plain.tuning.divergence_before


def test_what_is_in_no_file_is_there_while_scales_are_tuned(tmp_path):
    """Marian's sinusoids are made, not stored."""
    sizes = {"d_model": 64, "vocab_size": 96, "decoder_vocab_size": 96, "max_position_embeddings": 64}
    stacks = {f"{each}_{key}": n for each in ("encoder", "decoder") for key, n in {"layers": 1, "ffn_dim": 96}.items()}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = transformers.MarianMTModel(transformers.MarianConfig(**sizes, **stacks, **heads, **tokens))
    report = quantize(model, tmp_path / "out", samples(16), bits=4, method="rtn", tune_epochs=1).report
    assert report.tuning.divergence < report.tuning.divergence_before


def test_tuned_scales_that_were_written_wrongly_are_noticed(tmp_path, monkeypatch):
    write = tuning.replace_weights

    def other(checkpoint, weights):
        wrong = {name: replace(each, scale=2 * each.scale, offset=2 * each.offset) for name, each in weights.items()}
        write(checkpoint, wrong)

    monkeypatch.setattr(tuning, "replace_weights", other)
    with pytest.raises(CheckpointError, match="computes something other than the model whose scales were tuned"):
        quantize(build("llama"), tmp_path / "out", samples(16), bits=2, method="rtn", tune_epochs=1)
