"""Checkpoints run on their quantized kernels and give what their codes, scales and zeros say."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gptqkit.errors import BackendError, CheckpointError, ConfigError, DatasetUnavailableError
from gptqkit.evaluating import evaluate
from gptqkit.kernels.linear import QuantLinear
from gptqkit.loading import is_quantized, load, load_float
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.quantized import QuantizedWeight
from support.checkpoints import write_checkpoint

EXAMPLE = Path(__file__).parent.parent / "examples" / "models" / "gutenberg-llama-6m"


def round_to_nearest(weight, bits, group_size, index=None):
    """Asymmetric, from minimum to maximum of every group; `index` scatters the groups over the columns."""
    rows, columns = weight.shape
    index = torch.arange(columns) // group_size if index is None else index
    grouped = weight.float()[:, torch.argsort(index, stable=True)].view(rows, -1, group_size)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-5).half()
    zero = (-low / scale.float()).round().clamp(1, 2**bits - 1)
    codes = (weight.float() / scale.float()[:, index] + zero[:, index]).round().clamp(0, 2**bits - 1)
    return QuantizedWeight(
        codes=codes.to(torch.uint8),
        scale=scale,
        zero=zero.to(torch.int16),
        group_index=index.to(torch.int32),
        bits=bits,
        group_size=group_size,
        sym=False,
    )


def round_parameters(model):
    """To float16 and back; `model.half()` would round buffers such as inv_freq too, which are in no file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()


def write(model, out, names, *, bits=4, group_size=32, layout="gptq_v2", index=None, tokenizer=None):
    """A checkpoint of `model` with the modules in `names` rounded; `model` itself gets the dequantized weights."""
    conv = {name for name in names if type(model.get_submodule(name)).__name__ == "Conv1D"}
    weights = {}
    for name in names:
        weight = model.get_submodule(name).weight.data
        weights[name] = round_to_nearest(weight.t() if name in conv else weight, bits, group_size, index)
    packed = {f"{name}.weight" for name in names}
    tied = set(model.all_tied_weights_keys)
    other = {name: tensor.half() for name, tensor in model.state_dict().items() if name not in packed | tied}
    write_checkpoint(
        out,
        config=QuantizeConfig(bits=bits, group_size=group_size, sym=False, method="rtn", format=layout),
        weights=weights,
        other_tensors=other,
        model_config={**model.config.to_dict(), "dtype": "float16"},
        report={"model": "example"},
        tokenizer=tokenizer,
        generation_config=model.generation_config.to_dict(),
    )
    round_parameters(model)  # to what the file holds of everything else
    for name, weight in weights.items():
        dense = weight.dequantize()
        model.get_submodule(name).weight.data = dense.t().contiguous() if name in conv else dense
    return out


def linears(model, kinds=("Linear", "Conv1D")):
    return [name for name, module in model.named_modules() if type(module).__name__ in kinds and name != "lm_head"]


def tiny_llama(**settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(**sizes, **heads, **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def tiny_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=50, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def rewrite(path, change):
    """Apply `change` to the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example model at 4 bits, groups of 128, and its float original with the dequantized weights in place."""
    model, tokenizer = load_float(EXAMPLE, device="cpu")
    out = tmp_path_factory.mktemp("example") / "rtn"
    write(model, out, linears(model), group_size=128, tokenizer=tokenizer)
    return out, model


@pytest.fixture
def checkpoint(tmp_path):
    model = tiny_llama()
    return write(model, tmp_path / "q", linears(model))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_logits_of_the_example_equal_those_of_the_dequantized_model(example, backend):
    path, dequantized = example
    model, tokenizer = load(path, device="cpu", backend=backend)
    ids = tokenizer("It is a truth universally acknowledged", return_tensors="pt").input_ids
    assert torch.equal(model(ids).logits, dequantized(ids).logits)


def test_model_is_ready_to_run(example):
    path, dequantized = example
    model, tokenizer = load(path, device="cpu")
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert sum(isinstance(module, QuantLinear) for module in model.modules()) == 42
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, dequantized.model.rotary_emb.inv_freq)
    assert model.generation_config.pad_token_id == 3
    assert not hasattr(model.config, "quantization_config")
    assert model.gptqkit_quantization_config["bits"] == 4
    prompt = tokenizer("The captain said", return_tensors="pt")
    both = [each.generate(**prompt, max_new_tokens=8, do_sample=False) for each in (model, dequantized)]
    assert torch.equal(*both)


def test_choice_of_backend_is_logged_and_kept(checkpoint, caplog):
    with caplog.at_level(logging.INFO, "gptqkit"):
        model, tokenizer = load(checkpoint, device="cpu")
    assert tokenizer is None
    assert model.gptqkit_backend.name == "cpu"
    assert str(model.gptqkit_backend) in caplog.text
    assert "chosen automatically (14 layers)" in caplog.text


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, lambda: tiny_llama(attention_bias=True, mlp_bias=True)])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [3, 8])
def test_architectures_and_formats(tmp_path, make, layout, bits):
    model = make()
    write(model, tmp_path / "q", linears(model), bits=bits, layout=layout)
    for backend in ("torch", "cpu"):
        loaded, _ = load(tmp_path / "q", device="cpu", backend=backend)
        assert sum(isinstance(module, QuantLinear) for module in loaded.modules()) == len(linears(model))
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_act_order_and_tied_embeddings(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    names = [name for name in linears(model) if not name.endswith("down_proj")]  # those with 64 columns
    index = torch.randperm(64, generator=torch.Generator().manual_seed(1)) // 32
    write(model, tmp_path / "q", names, index=index)
    for backend in ("torch", "cpu"):
        loaded, _ = load(tmp_path / "q", device="cpu", backend=backend)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert loaded.model.layers[0].mlp.up_proj.act_order
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_missing_g_idx_zero_biases_and_old_buffers_are_accepted(checkpoint):
    before = load(checkpoint, device="cpu")[0](IDS).logits

    def change(tensors):
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]
        tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96, dtype=torch.float16)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(checkpoint, change)
    model = load(checkpoint, device="cpu")[0]
    assert torch.equal(model(IDS).logits, before)
    assert model.model.layers[0].mlp.up_proj.bias is None


def test_tied_weight_stored_under_its_other_name(tmp_path):
    model = tiny_llama(tie_word_embeddings=True)
    path = write(model, tmp_path / "q", linears(model))
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    loaded, _ = load(path, device="cpu")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_bfloat16_scales_and_dtype(tmp_path):
    model = tiny_llama()
    names = linears(model)
    path = write(model, tmp_path / "q", names)

    def change(tensors):
        for name in [name for name in tensors if name.endswith(".scales")]:
            tensors[name] = tensors[name].bfloat16()

    rewrite(path, change)
    exact, _ = load(path, device="cpu", backend="torch")
    for name in names:
        module, before = exact.get_submodule(name), model.get_submodule(name).weight.detach()
        assert module.scales.dtype == torch.bfloat16
        assert 0 < float((module.packed().dequantize(torch.float32) - before).norm() / before.norm()) < 2**-8
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}))
    loaded, _ = load(path, device="cpu")
    reference, _ = load(path, device="cpu", backend="torch")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(IDS).logits, reference(IDS).logits)
    assert load(path, device="cpu", dtype="float32")[0].dtype == torch.float32


def test_int4_backend_on_request_only(tmp_path):
    model = tiny_llama()
    path = write(model, tmp_path / "q", linears(model))
    with pytest.raises(BackendError, match=r"'cpu-int4' cannot serve model\.layers\.0.*only bfloat16"):
        load(path, device="cpu", backend="cpu-int4")
    loaded, _ = load(path, device="cpu", backend="cpu-int4", dtype="bfloat16")
    dense, _ = load(path, device="cpu", dtype="bfloat16")
    assert dense.gptqkit_backend.name == "cpu"
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
    ("change", "message"),
    [
        ({"intermediate_size": 128}, r"down_proj\.qweight stands for 64 x 96 .* has 64 x 128"),
        ({"num_hidden_layers": 1}, r"layers\.1\..*\.qweight belongs to no module"),
        ({"attention_bias": True}, r"[qkv]_proj\.bias is missing"),
    ],
)
def test_config_that_describes_another_model(checkpoint, change, message):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint, device="cpu")


def test_bad_requests(checkpoint, tmp_path):
    with pytest.raises(BackendError, match="choose one of auto"):
        load(tmp_path / "nowhere", backend="tpu")
    with pytest.raises(BackendError, match=r"'cuda' cannot serve model\.layers\.0.*NVIDIA GPUs only"):
        load(checkpoint, device="cpu", backend="cuda")
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        load(checkpoint, device="cpu", dtype="int8")
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        load(checkpoint, device="gpu")
    with pytest.raises(CheckpointError, match=r"give its directory to gptqkit\.load"):
        load_float(checkpoint)
    with pytest.raises(DatasetUnavailableError, match="nowhere"):
        load_float(tmp_path / "nowhere")


def test_float_model(tmp_path):
    model = tiny_llama()
    round_parameters(model)
    tiny_llama().half().save_pretrained(tmp_path)
    assert not is_quantized(tmp_path)
    loaded, tokenizer = load_float(tmp_path, device="cpu")
    assert tokenizer is None
    assert loaded.dtype == torch.float32
    assert not loaded.training
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model\.norm\.weight"):
        load_float(tmp_path, device="cpu")


def test_evaluation_of_a_checkpoint_runs_its_kernels(example):
    path, dequantized = example
    text = [" ".join(["The boat lay at anchor and the wind had fallen."] * 40)]
    settings = {"sequence_length": 64, "max_windows": 3, "device": "cpu"}
    scores = evaluate(path, text, reference=EXAMPLE, backend="torch", **settings)
    assert scores.backend == "torch"
    _, tokenizer = load_float(EXAMPLE, device="cpu")
    same = evaluate(dequantized, text, reference=EXAMPLE, tokenizer=tokenizer, **settings)
    assert same.backend is None
    assert scores.perplexity == same.perplexity
    assert scores.kl_divergence == same.kl_divergence > 0
