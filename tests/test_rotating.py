"""Rotated models compute what they were made of computes, and their channels do not stand out."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gptqkit import ArchitectureError, CheckpointError, ConfigError, OutputExistsError, cli, rotate
from gptqkit.loading import load_float
from gptqkit.quantizer.rotation import Rotation
from support.models import build, samples

SIZE = {
    "vocab_size": 64,
    "hidden_size": 48,  # 16 x 3
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 12}


@pytest.mark.parametrize("size", [1, 3, 32, 48])
def test_rotations_are_orthogonal_and_mix_all_channels(size):
    matrix = Rotation(size)(torch.eye(size))
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert bool((matrix != 0).all())
    assert torch.equal(matrix, Rotation(size)(torch.eye(size)))
    assert size == 1 or not torch.equal(matrix, Rotation(size, seed=1)(torch.eye(size)))


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SIZE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        transformers.MistralConfig(**SIZE),
        transformers.Qwen2Config(**SIZE, tie_word_embeddings=False),
        transformers.Qwen3Config(**SIZE, head_dim=12),
        transformers.MixtralConfig(**SIZE, **EXPERTS, num_local_experts=4),
        transformers.Qwen3MoeConfig(**SIZE, **EXPERTS, num_experts=4, moe_intermediate_size=32, mlp_only_layers=[0]),
    ],
    ids=lambda config: config.model_type,
)
def test_rotated_models_compute_the_same(config, tmp_path):
    """What stands out before, one channel of the residual stream, does not afterwards."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases begin with ones and zeros
                parameter.add_(0.3 * torch.randn_like(parameter))
            if name == "model.embed_tokens.weight":
                parameter[:, 5] *= 30
    model.save_pretrained(tmp_path / "float")
    assert cli.main(["rotate", str(tmp_path / "float"), str(tmp_path / "rotated")]) == 0
    rotated = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rotated").eval()
    tokens = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        expected, found = (each(tokens, output_hidden_states=True) for each in (model, rotated))
    assert float((found.logits - expected.logits).norm()) < 1e-5 * float(expected.logits.norm())

    def peak(states):
        sizes = states.square().mean((0, 1)).sqrt()
        return float(sizes.max() / sizes.square().mean().sqrt())

    assert peak(expected.hidden_states[0]) > 6 > 2 > peak(found.hidden_states[0])
    norms = {name: weight for name, weight in rotated.named_parameters() if name.endswith("layernorm.weight")}
    assert norms
    assert all(bool((weight == 1).all()) for weight in norms.values())


def test_models_of_which_it_is_not_known_are_refused_by_name(tmp_path):
    transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**SIZE, head_dim=12)).save_pretrained(
        tmp_path / "gemma"
    )
    with pytest.raises(ArchitectureError, match="Gemma2ForCausalLM cannot be rotated; that is known of Llama"):
        rotate(tmp_path / "gemma", tmp_path / "out")
    config = json.loads((tmp_path / "gemma" / "config.json").read_text())
    (tmp_path / "gemma" / "config.json").write_text(json.dumps({**config, "architectures": 5}))
    with pytest.raises(CheckpointError, match="architectures must be a list of names"):
        rotate(tmp_path / "gemma", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_keep_their_dtype_and_what_is_there_is_not_replaced(tmp_path):
    config = transformers.LlamaConfig(**SIZE, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "float")
    rotate(tmp_path / "float", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" in tensors
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    with pytest.raises(OutputExistsError, match="exists already"):
        rotate(tmp_path / "float", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"seed is -1; it must lie between 0 and 2\^63 - 1"):
        rotate(tmp_path / "float", tmp_path / "other", seed=-1)
    with pytest.raises(ConfigError, match=r"lies in the other|is the source itself"):
        rotate(tmp_path / "float", tmp_path / "float" / "out")


def test_an_output_layer_that_only_the_files_tell_apart_from_the_embedding(tmp_path):
    config = transformers.LlamaConfig(**SIZE, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "float")
    file = tmp_path / "float" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    rotate(tmp_path / "float", tmp_path / "out")
    tokens = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        expected, found = (
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / each).eval()(tokens).logits
            for each in ("float", "out")
        )
    assert float((found - expected).norm()) < 1e-5 * float(expected.norm())


def test_a_source_in_fp8_is_no_longer_that(tmp_path):
    build("llama").save_pretrained(tmp_path / "float")
    file, name = tmp_path / "float" / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    scale = tensors[name].abs().max() / 448
    tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.view(1, 1)}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "float" / "config.json").write_text(json.dumps(config))
    rotate(tmp_path / "float", tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    expected, found = (load_float(tmp_path / each, device="cpu")[0] for each in ("float", "out"))
    ids = samples().input_ids
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, expected(ids).logits, atol=1e-4)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
