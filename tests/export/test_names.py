"""Parameters of a model and the tensors in its files: transformers itself writes the files that are compared with."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gptqkit.architecture import empty_model
from gptqkit.export.names import StoredNames
from support.models import EXPERTS, GROUPED, MIXTURES, OTHERS, build, save, without

STACKED_ON_DISK = ("gpt_oss", "granitemoe", "qwen3_vl_moe")
MORE = {
    "granitemoe": lambda: transformers.GraniteMoeForCausalLM(
        transformers.GraniteMoeConfig(**without(GROUPED, "head_dim"), num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3_vl_moe": lambda: transformers.Qwen3VLMoeForConditionalGeneration(
        transformers.Qwen3VLMoeConfig(
            text_config={
                **GROUPED,
                **EXPERTS,
                "num_experts": 4,
                "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
            },
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "patch_size": 8,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        )
    ),
}


@pytest.fixture(params=[*MIXTURES, *OTHERS, *MORE])
def stored(request, tmp_path):
    """A model, its file's tensors, and whether its experts are stacked there."""
    model = MORE[request.param]() if request.param in MORE else build(request.param)
    return model, save(model, tmp_path), request.param in STACKED_ON_DISK


def names_of(model, tensors):
    """In memory, in memory without weights, from the files; with the file's names, and loaded from them."""
    empty = empty_model(model.config, torch.float32)
    return [StoredNames(model), StoredNames(empty), StoredNames(empty, tensors)]


def test_parts_are_what_the_file_holds(stored):
    model, tensors, stacked = stored
    for names in names_of(model, tensors):
        found = {}
        for parameter, value in model.state_dict().items():
            pieces = names.cut(parameter, value)
            assert not found.keys() & pieces
            found |= pieces
            for name in pieces:
                assert names.find(name).parameter == parameter
                assert names.shares(name) == [parameter]
        if stacked:  # experts have names of their own; all else is as in the file
            own = {name for name in found if ".experts." in name}
            assert own
            assert all(name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj") for name in own)
            merged = {name for name in tensors if "experts" in name or "put_linear" in name}
            assert found.keys() - own == tensors.keys() - merged
        else:
            assert found.keys() == tensors.keys()
        for name in found.keys() & tensors.keys():
            assert torch.equal(found[name], tensors[name])


def test_reverted_parameters_are_the_file(stored):
    model, tensors, _ = stored
    for names in names_of(model, tensors):
        reverted = names.revert(model.state_dict())
        assert reverted.keys() == tensors.keys()
        for name, tensor in reverted.items():
            assert torch.equal(tensor, tensors[name])


def test_experts_stacked_on_disk_are_taken_apart_as_the_model_uses_them():
    model = build("gpt_oss")
    names = StoredNames(model)
    experts = model.model.layers[1].mlp.experts
    x = torch.randn(5, 64)
    path = "model.layers.1.mlp.experts"
    for expert in range(4):
        whole = x @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
        cut = {**names.cut(f"{path}.gate_up_proj", experts.gate_up_proj)}
        cut |= names.cut(f"{path}.gate_up_proj_bias", experts.gate_up_proj_bias)
        for part, expected in (("gate_proj", whole[:, ::2]), ("up_proj", whole[:, 1::2])):  # as in its _apply_gate
            output = x @ cut[f"{path}.{expert}.{part}.weight"].T + cut[f"{path}.{expert}.{part}.bias"]
            assert torch.allclose(output, expected, atol=1e-5)
        down = names.cut(f"{path}.down_proj", experts.down_proj)[f"{path}.{expert}.down_proj.weight"]
        assert torch.equal(down, experts.down_proj[expert].T)


def test_files_of_the_bare_model_and_of_names_that_were_dropped(tmp_path):
    model = build("mixtral")
    tensors = {name.removeprefix("model."): tensor for name, tensor in save(model, tmp_path).items()}
    tensors["model.mtp.weight"] = torch.zeros(1)
    names = StoredNames(model, tensors)
    assert names.parameter("model.mtp.weight") is None
    assert names.shares("model.mtp.weight") == []
    assert names.find("nothing.weight") is None
    part = names.find("layers.1.block_sparse_moe.experts.3.w3.weight")
    assert (part.parameter, part.expert, part.rows) == ("model.layers.1.mlp.experts.gate_up_proj", 3, slice(96, 192, 1))
    assert part.module == "layers.1.block_sparse_moe.experts.3.w3"
    for parameter, value in model.state_dict().items():
        for name, piece in names.cut(parameter, value).items():
            assert torch.equal(piece, tensors[name])


def test_parameters_that_share_a_stored_tensor_keep_the_models_names(tmp_path):
    config = transformers.NomicBertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96, intermediate_size=96
    )
    model = transformers.NomicBertModel(config)
    fused = "encoder.layers.0.attn.Wqkv.weight"
    own = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    assert fused in save(model, tmp_path)
    names = StoredNames(model, load_file(tmp_path / "model.safetensors"))
    assert names.shares(fused) == own
    assert [names.parts(name)[0].name for name in own] == own
    assert names.parameter(own[1]) == own[1]  # a reader finds them under these names, too


def test_asking_leaves_the_model_as_it_was(tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    for each in (model, build("mixtral")):
        before = dict(each.__dict__)
        StoredNames(each).parts("model.layers.0.mlp.experts.down_proj")
        assert each.__dict__ == before
