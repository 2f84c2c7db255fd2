"""Parameters of a model and the tensors in its files: transformers itself writes and loads the files compared with."""

import re

import pytest
import torch
import transformers
from safetensors.torch import save_file

from gptqkit.empty import open_empty
from gptqkit.export.names import StoredNames
from gptqkit.export.shards import Shards
from support.models import EXPERTS, GROUPED, MIXTURES, MODELS, OTHERS, build, save, without

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
    "nomic_bert": lambda: transformers.NomicBertModel(
        transformers.NomicBertConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=96, intermediate_size=96
        )
    ),
}
STACKED_ON_DISK = ("gpt_oss", "llama4", "granitemoe", "qwen3_vl_moe")


def make(name):
    return MORE[name]() if name in MORE else build(name)


def names_of(path, stored):
    empty = open_empty(path)
    return empty, StoredNames(empty.stacked, empty.names, stored)


@pytest.fixture(params=[*MODELS, *MIXTURES, *OTHERS, *MORE])
def stored(request, tmp_path):
    """The name of a model, the folder of its files, and the tensors in them."""
    return request.param, tmp_path, save(make(request.param), tmp_path)


def test_every_stored_tensor_goes_where_transformers_loads_it(stored):
    """Every tensor in the file is filled with a number of its own, which then stands in the model that was loaded."""
    name, path, tensors = stored
    numbers = {key: number for number, key in enumerate(tensors, start=1)}
    numbered = {key: torch.full_like(tensor, numbers[key]) for key, tensor in tensors.items()}
    save_file(numbered, path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(make(name)).from_pretrained(path)
    state = {key: value for key, value in loaded.state_dict().items() if key not in loaded.all_tied_weights_keys}
    empty, names = names_of(path, tensors)
    held = {key: set(value.unique().tolist()) for key, value in state.items()}
    for key, number in numbers.items():
        assert set(names.parameters(key)) == {parameter for parameter, found in held.items() if number in found}, key
        working = names.working(key)
        if working not in empty.split:  # what goes into one parameter, as it is, or nowhere so
            whole = [one for one, found in held.items() if found == {number} and state[one].shape == tensors[key].shape]
            assert whole == [working] or (working is None and not empty.names.intersection(whole)), key
            continue
        module, row, part = re.fullmatch(r"(.*)\.(\d+)\.(gate|up|down)_proj\.weight", working).groups()
        matrix = state[f"{module}.{'down' if part == 'down' else 'gate_up'}_proj"][int(row)]
        half = matrix if part == "down" else matrix.chunk(2)[part == "up"]
        assert half.shape == tensors[key].shape
        assert bool((half == number).all()), key
    own = [working for key in tensors if (working := names.working(key)) is not None]
    assert len(own) == len(set(own))
    assert bool(empty.split) == (name in (*MIXTURES, *MORE) and name != "nomic_bert")
    assert bool(empty.split.intersection(own)) == (bool(empty.split) and name not in STACKED_ON_DISK)


def test_what_is_written_is_found_again(stored):
    """A checkpoint in which every matrix stands alone, those of experts too."""
    name, path, tensors = stored
    empty, names = names_of(path, tensors)
    written = {names.stored(working): working for working in empty.names}
    assert len(written) == len(empty.names)
    if name not in (*STACKED_ON_DISK, "nomic_bert"):
        tied = set(getattr(empty.stacked, "all_tied_weights_keys", {}))
        buffers = {key for key, _ in empty.model.named_buffers()}
        assert written.keys() - tied - buffers == tensors.keys() - buffers
    _, again = names_of(path, written)
    assert {key: again.working(key) for key in written} == written


def test_experts_stacked_on_disk_are_taken_apart_as_the_model_uses_them(tmp_path):
    model = build("gpt_oss")
    save(model, tmp_path)
    tensors = Shards.of_folder(tmp_path)
    empty, names = names_of(tmp_path, tensors.where)
    empty.fill(tensors, names, list(tensors.where), torch.device("cpu"))
    experts, x = model.model.layers[1].mlp.experts, torch.randn(5, 64)
    for number in range(4):
        own = empty.model.get_submodule(f"model.layers.1.mlp.experts.{number}")
        whole = x @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
        with torch.no_grad():  # halves, in each of which its _apply_gate takes rows in turn
            assert torch.allclose(torch.cat([own.gate_proj(x), own.up_proj(x)], -1), whole, atol=1e-5)
        assert torch.equal(own.down_proj.weight, experts.down_proj[number].T)


def test_files_of_the_bare_model_and_names_that_were_dropped(tmp_path):
    """Some files leave the prefix of the base model out; others hold what transformers has no place for."""
    stored = [name.removeprefix("model.") for name in save(build("mixtral"), tmp_path)]
    _, names = names_of(tmp_path, [*stored, "model.mtp.weight"])
    assert names.parameters("model.mtp.weight") == []
    assert names.working("model.mtp.weight") is None
    inside = "layers.1.block_sparse_moe.experts.3.w3.weight"
    assert names.working(inside) == "model.layers.1.mlp.experts.3.up_proj.weight"
    assert names.parameters(inside) == ["model.layers.1.mlp.experts.gate_up_proj"]
    assert names.stored("model.layers.1.mlp.experts.3.up_proj.weight") == inside
    assert all(names.parameters(name) for name in stored)
    assert names.stored("nothing.weight") == "nothing.weight"
