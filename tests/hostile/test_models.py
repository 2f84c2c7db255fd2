"""Float models and checkpoints whose files contradict config.json are refused before any work."""

import json
import shutil
import time
from contextlib import suppress

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import gptqkit
from gptqkit.errors import CheckpointError, GptqkitError, NonFiniteError
from gptqkit.loading import load_float
from support.models import build, save
from support.pipeline import quantize


@pytest.fixture
def model(tmp_path):
    save(build("llama", tie_word_embeddings=False), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint for each test to damage a copy of."""
    folder = tmp_path_factory.mktemp("whole")
    save(build("llama", tie_word_embeddings=False), folder / "model")
    return quantize(folder / "model", folder / "q", method="rtn").path


@pytest.fixture
def checkpoint(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "q")


def change(folder, tensors=None, **config):
    held = load_file(folder / "model.safetensors")
    save_file({**held, **(tensors or {})}, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config}))


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lm_head.weight": torch.zeros(50, 64)}, r"lm_head\.weight has shape \(50, 64\).*needs \(96, 64\)"),
        ({NORM: torch.zeros(32)}, r"layers\.1\.input_layernorm\.weight has shape \(32,\).*needs \(64,\)"),
        *(
            ({NORM: torch.ones(64, dtype=kind)}, rf"{NORM} is {kind}")
            for kind in (torch.int64, torch.bool, torch.cfloat)
        ),
        ({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)}, r"layers\.2\.mlp.*describes 2 blocks"),
    ],
)
def test_tensors_that_contradict_the_config_stop_before_any_work(model, tmp_path, tensors, message):
    change(model, tensors)
    steps = []
    with pytest.raises(CheckpointError, match=message):
        quantize(model, tmp_path / "out", progress=steps.append)
    assert not steps
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_experts_that_contradict_the_config(tmp_path):
    tensors = save(build("mixtral"), tmp_path / "model")
    name = next(each for each in tensors if ".layers.1." in each and ".experts.2." in each)
    change(tmp_path / "model", {name: tensors[name][:-1].clone()})
    with pytest.raises(CheckpointError, match="experts"):
        quantize(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", NORM, "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_values_that_are_no_numbers_are_refused_by_name(model, tmp_path, name, value):
    tensor = load_file(model / "model.safetensors")[name]
    tensor.view(-1)[7] = value
    change(model, {name: tensor})
    with pytest.raises(NonFiniteError, match=f"{name} holds NaN or infinity"):
        quantize(model, tmp_path / "out", method="rtn")
    assert not (tmp_path / "out").exists()


HUGE = [
    *({key: 10**5} for key in ("num_hidden_layers", "num_key_value_heads")),
    *({key: 4 * 10**8} for key in ("hidden_size", "head_dim", "intermediate_size", "vocab_size")),
    {"num_hidden_layers": 10**12},
    {"num_hidden_layers": 10**8, "model_type": "qwen2"},  # whose config lists the kinds of all layers
]


@pytest.mark.parametrize("config", HUGE, ids=str)
def test_the_tensors_decide_what_is_built(checkpoint, model, config):
    change(model, **config)
    change(checkpoint, **config)
    begin = time.monotonic()
    for attempt in (gptqkit.load, gptqkit.plan, gptqkit.evaluate):
        path = checkpoint if attempt is gptqkit.load else model
        with pytest.raises(CheckpointError, match=r"config\.json describes another model: .*; fetch it again"):
            attempt(path, [[1, 2]], {"sequence_length": 8}) if attempt is gptqkit.evaluate else attempt(path)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "config",
    [
        {"hidden_size": 0},
        {"architectures": [5]},
        {"architectures": 5},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 0},
        {"model_type": "\ud800"},
        {"quantization_config": 5},
    ],
)
def test_configs_that_cannot_be(checkpoint, config):
    change(checkpoint, **config)
    with pytest.raises(GptqkitError):
        gptqkit.load(checkpoint)


@pytest.mark.parametrize("names", [-1, [5]])
def test_architectures_that_are_no_names_are_named(checkpoint, names):
    change(checkpoint, architectures=names)
    with pytest.raises(CheckpointError, match=r"config\.json: architectures must be a list of names"):
        gptqkit.inspect(checkpoint)


def test_quantized_tensors_where_no_linear_is_and_notes_of_a_wrong_type(checkpoint):
    held = load_file(checkpoint / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    moved = {
        f"model.layers.0.mlp.act_fn.{key}": held[f"{layer}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")
    }
    settings = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    for notes in (5, [[5]], {"a": 1}, "text"):
        quantization = {**settings, "meta": {"passthrough_tensors": notes, "quantizer": [f"gptqmodel:{'9' * 5000}.1"]}}
        change(checkpoint, quantization_config=quantization)
        (checkpoint / "quantize_config.json").unlink(missing_ok=True)
        gptqkit.load(checkpoint)
        gptqkit.inspect(checkpoint)
    change(checkpoint, moved)
    with pytest.raises(CheckpointError, match=r"mlp\.act_fn belongs to no module of LlamaForCausalLM"):
        gptqkit.load(checkpoint)


def test_a_weight_beside_a_quantized_one_is_refused(checkpoint):
    change(checkpoint, {"model.layers.0.mlp.up_proj.weight": torch.zeros(96, 64)})
    for attempt in (gptqkit.load, gptqkit.inspect):
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj has a weight beside"):
            attempt(checkpoint)


def test_local_folders_are_opened_without_the_network(model, checkpoint, monkeypatch):
    """A config may name backbones and kernels on the Hub: nobody asks for them, whatever the environment says."""
    asked = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *address, **_: asked.append(address) or 1 / 0)
    (model / "tokenizer_config.json").write_text('{"auto_map": {"a": "x/y--z.Z"}}')
    change(model, auto_map={"AutoConfig": "someone/code--file.Class"})
    shutil.copy(model / "tokenizer_config.json", checkpoint)
    for attempt, path in ((gptqkit.load, checkpoint), (gptqkit.plan, model), (load_float, model)):
        with suppress(GptqkitError):
            attempt(path)
        change(path, attn_implementation="kernels-community/flash-attn")
        with pytest.raises(CheckpointError, match="'kernels-community/flash-attn', code that is not run"):
            attempt(path)
    assert not asked
    assert not constants.HF_HUB_OFFLINE
