"""Checkpoints run on their quantized kernels and give what their codes, scales and zeros say, whoever wrote them."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import gptqkit
from gptqkit.errors import ArchitectureError, BackendError, CheckpointError, ConfigError, DatasetUnavailableError
from gptqkit.kernels.linear import CpuLinear, QuantLinear
from gptqkit.loading import is_quantized, load, load_float
from gptqkit.quantizer.quantized import QuantizedWeight
from support.checkpoints import write_checkpoint
from support.models import OTHERS, build, save
from support.pipeline import outputs, quantize

IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(5))


def round_to_nearest(weight, bits, group_size, index=None):
    """Asymmetric, from minimum to maximum of every group; `index` scatters the groups over the columns."""
    rows, columns = weight.shape
    index = torch.arange(columns) // group_size if index is None else index
    grouped = weight.float()[:, torch.argsort(index, stable=True)].view(rows, -1, group_size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-5).half().float()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    codes = (weight.float() / scale[:, index] + zero[:, index]).round().clamp(0, 2**bits - 1)
    return QuantizedWeight(
        codes=codes.to(torch.uint8),
        scale=scale,
        offset=-zero * scale,
        group_index=index.to(torch.int32),
        bits=bits,
        group_size=group_size,
        sym=False,
    )


def write(model, out, *, skip=("lm_head",), bits=4, group_size=32, layout="gptq_v2", index=None, **options):
    """A float16 checkpoint of `model`, Linears rounded; `model` itself gets the weights that are in the file."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and not name.endswith(skip)
    }
    conv = isinstance(model, GPT2LMHeadModel)
    weights = {}
    for name, module in modules.items():
        weights[name] = round_to_nearest(
            module.weight.data.t() if conv else module.weight.data, bits, group_size, index
        )
    without = {f"{name}.weight" for name in weights} | set(model.all_tied_weights_keys)
    write_checkpoint(
        out,
        config=gptqkit.QuantizeConfig(bits=bits, group_size=group_size, sym=False, method="rtn", format=layout),
        weights=weights,
        other_tensors={name: tensor.half() for name, tensor in model.state_dict().items() if name not in without},
        model_config={**model.config.to_dict(), "dtype": "float16"},
        generation_config=model.generation_config.to_dict(),
        **options,
    )
    for parameter in model.parameters():  # buffers such as inv_freq are in no file
        parameter.data = parameter.data.half().float()
    for name, weight in weights.items():
        dense = weight.dequantize()
        modules[name].weight.data = dense.t().contiguous() if conv else dense
    return out


def tiny_llama(**settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **settings)).eval()


def tiny_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, n_positions=64)).eval()


def with_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def rewrite(path, change):
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def checkpoint(tmp_path):
    return write(tiny_llama(), tmp_path / "q")


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_llama, {"layout": "gptq", "bits": 3}),
        (tiny_llama, {"layout": "gptq", "bits": 4, "max_shard_bytes": 20_000}),
        (tiny_gpt2, {"bits": 8}),
        (tiny_gpt2, {"layout": "gptq", "bits": 2, "group_size": 64}),
        (lambda: tiny_llama(attention_bias=True, mlp_bias=True), {"bits": 2, "skip": ()}),
        # act-order, of the modules with 64 columns
        (
            lambda: tiny_llama(tie_word_embeddings=True),
            {
                "skip": ("lm_head", "down_proj"),
                "index": torch.randperm(64, generator=torch.Generator().manual_seed(1)) // 32,
            },
        ),
    ],
)
def test_outputs_are_those_of_the_dequantized_model(make, options, tmp_path):
    model = with_biases(make())
    write(model, tmp_path / "q", **options)
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 1 or "max_shard_bytes" not in options
    for backend in ("torch", "cpu"):
        loaded, tokenizer = load(tmp_path / "q", device="cpu", backend=backend)
        assert tokenizer is None
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert sum(isinstance(module, QuantLinear) for module in loaded.modules()) in (8, 12, 14, 15)
        assert all(
            module.act_order == ("index" in options) for module in loaded.modules() if hasattr(module, "act_order")
        )
        if model.config.tie_word_embeddings:
            assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_the_model_is_ready_to_run(example_model, tmp_path, caplog):
    dequantized, tokenizer = load_float(example_model, device="cpu")
    write(dequantized, tmp_path / "q", group_size=128, tokenizer=tokenizer)
    with caplog.at_level(logging.INFO, "gptqkit"):
        model, own_tokenizer = load(tmp_path / "q", device="cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, dequantized.model.rotary_emb.inv_freq)
    assert model.generation_config.pad_token_id == 3
    assert not hasattr(model.config, "quantization_config")
    assert model.gptqkit_quantization_config["bits"] == 4
    assert model.gptqkit_backend.name == "cpu"
    assert not model.gptqkit_backend.fallback
    [record] = [record for record in caplog.records if record.name == "gptqkit"]
    assert str(model.gptqkit_backend) in record.getMessage()
    assert "chosen automatically (42 layers)" in record.getMessage()
    prompt = own_tokenizer("The captain said", return_tensors="pt")
    both = [each.generate(**prompt, max_new_tokens=8, do_sample=False) for each in (model, dequantized)]
    assert torch.equal(*both)


def test_a_backend_that_is_passed_over_is_announced_once(checkpoint, caplog, monkeypatch):
    monkeypatch.setattr(CpuLinear, "refusal", lambda *_: "it is tired")
    model, _ = load(checkpoint, device="cpu")
    assert model.gptqkit_backend.name == "torch"
    assert model.gptqkit_backend.fallback
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "not cpu, because it is tired" in warning.getMessage()


def test_what_other_programs_write_or_leave_out_is_accepted(tmp_path):
    """No g_idx, biases of zero, buffers of old, the tied weight under its other name, bfloat16 scales."""
    model = tiny_llama(tie_word_embeddings=True)
    path = write(model, tmp_path / "q")

    def change(tensors):
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96, dtype=torch.float16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    rewrite(path, change)
    loaded, _ = load(path, device="cpu")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.model.layers[0].mlp.up_proj.bias is None

    rewrite(path, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items() if n.endswith("scales")}))
    for name, weight in (
        (name, gptqkit.open_checkpoint(path).weight(name)) for name in gptqkit.open_checkpoint(path).layers
    ):
        module = model.get_submodule(name)
        exact = (module.weight.data - weight.dequantize()).norm() / module.weight.data.norm()
        assert 0 < float(exact) < 2**-8
        module.weight.data = weight.dequantize()
    assert torch.equal(load(path, device="cpu", backend="torch")[0](IDS).logits, model(IDS).logits)


def test_dtypes(checkpoint):
    assert load(checkpoint, device="cpu")[0].dtype == torch.float32  # stored in float16
    assert load(checkpoint, device="cpu", dtype="float16")[0].dtype == torch.float16
    edit(checkpoint / "config.json", dtype="bfloat16", torch_dtype="bfloat16")
    dense, reference = (load(checkpoint, device="cpu", backend=name)[0] for name in ("auto", "torch"))
    assert dense.dtype == dense(IDS).logits.dtype == torch.bfloat16
    assert torch.equal(dense(IDS).logits, reference(IDS).logits)
    with pytest.raises(BackendError, match=r"'cpu-int4' cannot serve model\.layers\.0.*it takes bfloat16"):
        load(checkpoint, device="cpu", backend="cpu-int4", dtype="float32")
    loaded, _ = load(checkpoint, device="cpu", backend="cpu-int4")
    assert torch.equal(loaded(IDS).logits, dense(IDS).logits)  # many tokens
    few = [each(IDS[:1, :2]).logits.float() for each in (loaded, dense)]
    assert 0 < float((few[0] - few[1]).norm() / few[1].norm()) < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(2)), "extra: no place"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}),
            r"model\.norm\.weight has shape \(63,\).*needs \(64,\)",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": torch.ones(96, dtype=torch.float16)}),
            r"up_proj\.bias is not expected",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(checkpoint, change, message):
    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 128}, r"up_proj stands for 96 x 64 .* has 128 x 64|down_proj stands for 64 x 96 "),
        ({"num_hidden_layers": 1}, r"layers\.1\.\S* belongs to no module"),
        ({"attention_bias": True}, r"[qkvo]_proj\.bias is missing"),
    ],
)
def test_a_config_that_describes_another_model(checkpoint, changes, message):
    edit(checkpoint / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint, device="cpu")


@pytest.mark.parametrize(
    ("name", "remove", "changes", "message"),
    [
        (
            "gpt_oss",
            "model.layers.1.mlp.experts.2.up_proj.",
            {},
            r"lacks model\.layers\.1\.mlp\.experts\.2\.up_proj\.w",
        ),
        ("gpt_oss", "model.layers.1.mlp.experts.2.up_proj.bias", {}, r"experts\.2\.up_proj\.bias is missing"),
        ("gpt_oss", "model.layers.0.mlp.router.bias", {}, r"lacks model\.layers\.0\.mlp\.router\.bias"),
        ("mixtral", "none", {"intermediate_size": 128}, r"experts\.\d\.w\d stands for (96 x 64|64 x 96) .* has "),
    ],
)
def test_mixtures_of_which_something_is_missing(name, remove, changes, message, tmp_path):
    quantize(build(name), tmp_path / "q", method="rtn")

    def change(tensors):
        for each in [each for each in tensors if each.startswith(remove)]:
            del tensors[each]

    rewrite(tmp_path / "q", change)
    edit(tmp_path / "q" / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "q", device="cpu")


def test_passthrough_tensors_are_left_alone_and_no_others(tmp_path):
    model = tiny_llama()
    write(model, tmp_path / "q", passthrough=["model.layers.2.eh_proj.weight"])
    for name, refused in (("model.layers.2.eh_proj.weight", False), ("model.layers.2.enorm.weight", True)):
        rewrite(tmp_path / "q", lambda tensors, name=name: tensors.update({name: torch.zeros(64, 128)}))
        if refused:
            with pytest.raises(CheckpointError, match=r"enorm\.weight: no place for them in LlamaForCausalLM"):
                load(tmp_path / "q", device="cpu")
        else:
            assert torch.equal(load(tmp_path / "q", device="cpu")[0](IDS).logits, model(IDS).logits)


def test_no_code_is_run(checkpoint, tmp_path):
    before = load(checkpoint, device="cpu")[0](IDS).logits
    (checkpoint / "modeling.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Model: pass\n")
    places = {"AutoConfig": "modeling.Model", "AutoModelForCausalLM": "modeling.Model"}
    edit(checkpoint / "config.json", auto_map=places)
    assert torch.equal(load(checkpoint, device="cpu")[0](IDS).logits, before)
    edit(checkpoint / "config.json", model_type="unheard_of", architectures=["UnheardOf"])
    with pytest.raises(ArchitectureError, match="is not a model that can be loaded"):
        load(checkpoint, device="cpu")
    assert not (tmp_path / "run").exists()


def test_bad_requests(checkpoint, tmp_path):
    with pytest.raises(BackendError, match="choose one of auto"):
        load(tmp_path / "nowhere", backend="tpu")
    with pytest.raises(BackendError, match=r"'cuda' cannot serve model\.layers\.0.*cuda devices only"):
        load(checkpoint, device="cpu", backend="cuda")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load(checkpoint, device="cpu", dtype="int8")
    for device in ("gpu", "meta", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device is '{device}'"):
            load(checkpoint, device=device)
    with pytest.raises(CheckpointError, match=r"give its directory to gptqkit\.load"):
        load_float(checkpoint)
    with pytest.raises(DatasetUnavailableError, match="nowhere"):
        load_float(tmp_path / "nowhere")
    save(build("llama"), tmp_path / "float")
    assert is_quantized(checkpoint)
    assert not is_quantized(tmp_path / "float")
    with pytest.raises(CheckpointError, match="is not quantized"):
        load(tmp_path / "float")


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
