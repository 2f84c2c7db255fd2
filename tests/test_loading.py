"""Checkpoints run on their quantized kernels and give what their codes, scales and zeros say, whoever wrote them."""

import json
import logging
import shutil
import threading
from functools import cache

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import gptqkit
from gptqkit.bounds import confined
from gptqkit.errors import (
    ArchitectureError,
    BackendError,
    CheckpointError,
    ConfigError,
    DatasetUnavailableError,
    GptqkitError,
)
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.scaled import says_quantized
from gptqkit.kernels.linear import CpuLinear, QuantLinear
from gptqkit.loading import choose_device, load, load_float
from support.models import OTHERS, build, save
from support.pipeline import dequantized, outputs, quantize


def rewrite(path, change):
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def checkpoint(tmp_path):
    """A Llama in float16 with tied embeddings, and biases in the attention alone."""
    save(build("llama").half(), tmp_path / "model")
    return quantize(tmp_path / "model", tmp_path / "q", method="rtn").path


@pytest.fixture
def expected(checkpoint, tmp_path):
    """What transformers makes of the dequantized weights."""
    return outputs(dequantized(checkpoint, tmp_path / "model", tmp_path / "dense"))


def test_the_model_is_ready_to_run(example_model, tmp_path, caplog):
    config, run = gptqkit.QuantizeConfig(method="rtn"), gptqkit.Run(device="cpu", shard_size=1_000_000)
    out = gptqkit.quantize(example_model, None, tmp_path / "q", config, run=run).path
    assert len(list(out.glob("*.safetensors"))) > 1
    twin = dequantized(out, example_model, tmp_path / "dense")
    with caplog.at_level(logging.INFO, "gptqkit"):
        model, tokenizer = load(out, device="cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 42
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.pad_token_id == 3
    assert not hasattr(model.config, "quantization_config")
    assert model.gptqkit_quantization_config["bits"] == 4
    assert model.gptqkit_backend.name == "cpu"
    assert not model.gptqkit_backend.fallback
    [record] = [record for record in caplog.records if record.name == "gptqkit"]
    assert str(model.gptqkit_backend) in record.getMessage()
    assert "chosen automatically (42 layers)" in record.getMessage()
    prompt = tokenizer("The captain said", return_tensors="pt")
    assert torch.equal(model(**prompt).logits, twin(**prompt).logits)
    both = [each.generate(**prompt, max_new_tokens=8, do_sample=False) for each in (model, twin)]
    assert torch.equal(*both)


def test_a_backend_that_is_passed_over_is_announced_once(checkpoint, caplog, monkeypatch):
    monkeypatch.setattr(CpuLinear, "refusal", lambda *_: "it is tired")
    model, _ = load(checkpoint, device="cpu")
    assert model.gptqkit_backend.name == "torch"
    assert model.gptqkit_backend.fallback
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "not cpu, because it is tired" in warning.getMessage()


def test_what_other_programs_write_or_leave_out_is_accepted(checkpoint, expected, tmp_path):
    """No g_idx, biases of zero, buffers of old, the tied weight under its other name, bfloat16 scales."""

    def change(tensors):
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96, dtype=torch.float16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(checkpoint, change)
    loaded, tokenizer = load(checkpoint, device="cpu")
    assert tokenizer is None
    assert torch.equal(outputs(loaded), expected)
    assert loaded.model.layers[0].mlp.up_proj.bias is None

    def narrow(tensors):
        del tensors["model.layers.0.mlp.up_proj.bias"], tensors["model.layers.0.self_attn.rotary_emb.inv_freq"]
        tensors.update({name: each.bfloat16() for name, each in tensors.items() if name.endswith("scales")})

    rewrite(checkpoint, narrow)
    theirs = outputs(dequantized(checkpoint, tmp_path / "model", tmp_path / "narrow"))
    assert not torch.equal(theirs, expected)
    for backend in ("torch", "cpu"):
        assert torch.equal(outputs(load(checkpoint, device="cpu", backend=backend)[0]), theirs)


def test_quantized_blocks_that_the_model_leaves_out(checkpoint, expected, tmp_path, monkeypatch):
    """Such as those that predict further tokens; other programs quantize them, too."""

    def repeat(tensors):
        block = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
        tensors |= {name.replace(".1.", ".2."): tensor.clone() for name, tensor in block.items()}

    rewrite(checkpoint, repeat)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.\S+ belongs to no module"):
        load(checkpoint, device="cpu")
    left_out = [r"model\.layers\.2.*"]
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", left_out)
    model, _ = load(checkpoint, device="cpu")
    assert torch.equal(outputs(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(load(tmp_path / "saved", device="cpu")[0]), expected)


def test_dtypes(checkpoint):
    assert load(checkpoint, device="cpu")[0].dtype == torch.float32  # stored in float16
    assert load(checkpoint, device="cpu", dtype="float16")[0].dtype == torch.float16
    edit(checkpoint / "config.json", dtype="bfloat16", torch_dtype="bfloat16")
    dense, reference = (load(checkpoint, device="cpu", backend=name)[0] for name in ("auto", "torch"))
    assert dense.dtype == outputs(dense).dtype == torch.bfloat16
    assert torch.equal(outputs(dense), outputs(reference))
    with pytest.raises(BackendError, match=r"'cuda' cannot serve model\.layers\.0.*serves cuda devices only"):
        load(checkpoint, device="cpu", backend="cuda")


MIXTURE = "model.layers.1.mlp.experts.2.up_proj."


@pytest.fixture(scope="module")
def float32(tmp_path_factory):
    """The checkpoint of a model in float32, made once."""

    @cache
    def make(name):
        return quantize(build(name), tmp_path_factory.mktemp(name) / "q", method="rtn").path

    return make


@pytest.mark.parametrize(
    ("name", "removed", "added", "config", "message"),
    [
        ("llama", "model.norm.weight", {}, {}, r"lacks model\.norm\.weight"),
        ("llama", None, {"extra": torch.zeros(2)}, {}, "extra: no place"),
        ("llama", None, {"model.norm.weight": torch.ones(63)}, {}, r"norm\.weight has shape \(63,\).*needs \(64,\)"),
        ("llama", None, {"model.layers.0.mlp.up_proj.bias": torch.ones(96).half()}, {}, "up_proj.bias is not expected"),
        ("llama", None, {}, {"intermediate_size": 128}, "(96 x 64|64 x 96) weights .* has (128 x 64|64 x 128)"),
        ("llama", None, {}, {"num_hidden_layers": 1}, r"layers\.1\.\S* belongs to no module"),
        ("llama", None, {}, {"mlp_bias": True}, r"(gate|up|down)_proj\.bias is missing"),
        ("gpt_oss", MIXTURE, {}, {}, r"lacks model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"),
        ("gpt_oss", f"{MIXTURE}bias", {}, {}, r"experts\.2\.up_proj\.bias is missing"),
        ("gpt_oss", "model.layers.0.mlp.router.bias", {}, {}, r"lacks model\.layers\.0\.mlp\.router\.bias"),
        ("mixtral", None, {}, {"intermediate_size": 128}, r"experts\.\d\.w\d stands for (96 x 64|64 x 96)"),
    ],
)
def test_what_does_not_fit_the_model_is_named(name, removed, added, config, message, float32, tmp_path):
    path = shutil.copytree(float32(name), tmp_path / "q")

    def change(tensors):
        for each in [each for each in tensors if removed is not None and each.startswith(removed)]:
            del tensors[each]
        tensors.update(added)

    rewrite(path, change)
    edit(path / "config.json", **config)
    with pytest.raises(CheckpointError, match=message):
        load(path, device="cpu")


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch):
    """By number: in a thread of its own, as transformers has to read files, "cuda" would be another."""
    for name, answer in {"is_available": True, "device_count": 3, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    for device in ("auto", "cuda", torch.device("cuda"), "cuda:1"):
        assert choose_device(device) == torch.device("cuda", 1)
    assert choose_device("cuda:2") == torch.device("cuda", 2)


def test_bad_requests(checkpoint, tmp_path):
    with pytest.raises(BackendError, match="choose one of auto"):
        load(tmp_path / "nowhere", backend="tpu")
    with pytest.raises(BackendError, match=r"'cuda' cannot serve model\.layers\.0.*cuda devices only"):
        load(checkpoint, device="cpu", backend="cuda")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load(checkpoint, device="cpu", dtype="int8")
    for device in ("gpu", "meta", "cuda:99", None):
        with pytest.raises(ConfigError, match=f"device is {device!r}"):
            load(checkpoint, device=device)
    with pytest.raises(CheckpointError, match=r"is quantized; give the float model"):
        load_float(checkpoint)
    with pytest.raises(DatasetUnavailableError, match="nowhere"):
        load_float(tmp_path / "nowhere")
    assert says_quantized(checkpoint)
    assert not says_quantized(tmp_path / "model")
    with pytest.raises(CheckpointError, match="is not quantized"):
        load(tmp_path / "model")
    edit(checkpoint / "config.json", model_type="unheard_of", architectures=["UnheardOf"])
    with pytest.raises(ArchitectureError, match=r"config\.json cannot be read \(ValueError"):
        load(checkpoint, device="cpu")


@pytest.mark.parametrize("name", ["llama", *OTHERS])
def test_float_models_of_any_class(name, tmp_path):
    save(build(name).half(), tmp_path)
    model = build(name)
    for parameter in model.parameters():  # buffers such as inv_freq are in no file
        parameter.data = parameter.data.half().float()
    loaded, tokenizer = load_float(tmp_path, device="cpu")
    assert tokenizer is None
    assert type(loaded) is type(model)
    assert loaded.dtype == torch.float32
    assert not loaded.training
    assert torch.equal(outputs(loaded), outputs(model))
    if name == "llama":
        rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
        with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
            load_float(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", {"hidden_size": "64"}, "config.json"),
        ("config.json", {"num_hidden_layers": [2]}, "config.json"),
        ("config.json", {"rope_parameters": 7}, "config.json"),
        ("config.json", {"architectures": [3]}, ""),
        ("config.json", {"model_type": {"a": 1}}, "config.json"),
        ("config.json", {"num_attention_heads": 0}, ""),
        ("config.json", {"hidden_act": "unheard of"}, ""),
        ("config.json", {"dtype": "float31"}, ""),
        ("generation_config.json", {"cache_implementation": "unheard of"}, "generation_config.json"),
        ("tokenizer.json", {"version": "1.0", "model": {"type": "BPE"}}, "tokenizer"),
        ("tokenizer_config.json", {"tokenizer_class": 5}, "tokenizer"),
    ],
)
def test_what_other_libraries_raise_about_files_becomes_one_line_that_names_them(file, content, named, tmp_path):
    model = tmp_path / "model"
    save(build("llama"), model)
    before = json.loads((model / file).read_text()) if (model / file).exists() else {}
    (model / file).write_text(json.dumps({**before, **content}))
    with pytest.raises(GptqkitError) as caught:
        gptqkit.quantize(model, None, tmp_path / "out", gptqkit.QuantizeConfig(method="rtn", group_size=32))
    assert str(model) in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_quantized_output_layer_is_not_tied(tmp_path):
    out = quantize(build("llama", tie_word_embeddings=False), tmp_path / "out", method="rtn", lm_head=True).path
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match="lm_head is quantized, but its weight is tied to another"):
        gptqkit.load(out, device="cpu")


def test_threads_neither_count_what_others_build_nor_stay_offline(checkpoint, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    tensors, entered, leave, built = open_checkpoint(checkpoint).tensors, threading.Event(), threading.Event(), []

    def enter():
        with confined(checkpoint, tensors):
            entered.set()
            leave.wait(10)

    other, builder = (
        threading.Thread(target=work) for work in (enter, lambda: built.append(torch.nn.Linear(2000, 999)))
    )
    with confined(checkpoint, tensors):
        builder.start()
        builder.join()
        other.start()
        assert not entered.wait(0.1)
    leave.set()
    other.join()
    assert built
    assert not constants.HF_HUB_OFFLINE
