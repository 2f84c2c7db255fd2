"""A checkpoint holds exactly what was given, whoever wrote it, and tells nothing private."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit.errors import CheckpointError, ConversionError
from gptqkit.export.checkpoint import check_written, open_checkpoint, public_name
from gptqkit.quantizer.config import ModuleOverride
from support.weights import gptq_tensors, random_weight, same


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("settings", [{"sym": True}, {"sym": False}, {"format": "gptq", "sym": False}])
@pytest.mark.parametrize("most", [1 << 30, 9000])
def test_everything_reads_back_exactly(material, tmp_path, bits, settings, most):
    made = material(bits=bits, **settings)
    made.weights["model.layers.1.mlp.down_proj"] = random_weight(bits, act_order=True, sym=settings["sym"])
    given = copy.deepcopy(made)
    checkpoint = open_checkpoint(made.write(tmp_path / "out", max_shard_bytes=most))
    declared = checkpoint.declared
    assert (declared.format, declared.bits, declared.group_size) == (made.config.format, bits, 32)
    assert (declared.sym, declared.desc_act) == (settings["sym"], True)
    assert len(checkpoint.tensors.files) > 1 or most > 9000
    assert checkpoint.layers.keys() == given.weights.keys()
    for name, weight in given.weights.items():
        assert same(checkpoint.weight(name), weight)
        assert same(made.weights[name], weight)
        bias = given.other_tensors.get(f"{name}.bias")
        assert (checkpoint.bias(name) is None) == (bias is None)
        assert bias is None or torch.equal(checkpoint.bias(name), bias)
    biases = {f"{name}.bias" for name in given.weights if "q_proj" in name}
    assert set(checkpoint.other_names) == set(given.other_tensors) - biases
    for name, tensor in given.other_tensors.items():
        assert checkpoint.tensor(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)
    spec = checkpoint.layers["model.layers.1.mlp.down_proj"]
    assert (spec.out_features, spec.in_features, spec.group_size, spec.act_order) == (64, 96, 32, True)
    assert (made.model_config, made.report) == (given.model_config, given.report)


def test_files_are_the_same_as_an_independent_writers(material, tmp_path):
    made = material(format="gptq")
    expected = {
        f"{name}.{key}": tensor
        for name, weight in made.weights.items()
        for key, tensor in gptq_tensors(weight, version=1).items()
    }
    found = load_file(made.write(tmp_path / "out") / "model.safetensors")
    assert found.keys() == {*expected, *made.other_tensors}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_settings_of_single_modules_are_read_back(material, tmp_path):
    overrides = {r"layers\.0\.mlp": ModuleOverride(skip=True), "q_proj": ModuleOverride(bits=8, group_size=-1)}
    checkpoint = open_checkpoint(material(overrides=overrides).write(tmp_path / "out"))
    assert {name: (spec.bits, spec.group_size) for name, spec in checkpoint.layers.items()} == {
        "model.layers.0.self_attn.q_proj": (8, 64),
        "model.layers.1.self_attn.q_proj": (8, 64),
        "model.layers.1.mlp.down_proj": (4, 32),
    }
    assert "model.layers.0.mlp.down_proj.weight" in checkpoint.other_names


def test_config_json_serves_old_and_new_readers(material, tmp_path):
    """transformers 5 renamed the keys of rope and of the dtype."""
    made = material()
    out = made.write(tmp_path / "a", passthrough=["mtp.weight"])
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == made.model_config["rope_parameters"]
    assert (config["rope_theta"], config["dtype"], config["torch_dtype"]) == (50000.0, "float16", "float16")
    assert "rope_scaling" not in config
    assert config["quantization_config"] == json.loads((out / "quantize_config.json").read_text())
    assert config["quantization_config"]["meta"]["passthrough_tensors"] == ["mtp.weight"]
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    made.model_config |= {"rope_parameters": yarn, "dtype": "torch.bfloat16"}
    config = json.loads((made.write(tmp_path / "b") / "config.json").read_text())
    assert (config["rope_scaling"], config["torch_dtype"]) == (yarn, "bfloat16")


class Tokenizer:
    def save_pretrained(self, save_directory):
        values = {"name_or_path": "/home/somebody", "is_local": True, "model_max_length": 5}
        Path(save_directory, "tokenizer_config.json").write_text(json.dumps(values))


def test_nothing_private_and_no_time_is_written(material, tmp_path):
    secret = tmp_path / "secret"
    made = material()
    made.report |= {
        "model": str(secret / "small-model"),
        "seconds": 12.25,
        "modules": [{"name": "a", "layer": 0, "error": 0.5, "seconds": 12.25}],
        "perplexity": [
            {
                "dataset": str(secret / "text.txt"),
                "sequence_length": 8,
                "perplexity": 2.0,
                "tokens": 9,
                "seconds": 12.25,
            }
        ],
    }
    generation = {"_name_or_path": str(secret), "eos_token_id": 2}
    out = made.write(tmp_path / "out", generation_config=generation, tokenizer=Tokenizer())
    texts = {path.name: path.read_text() for path in out.iterdir() if path.suffix in (".json", ".md")}
    assert len(texts) == 6
    for text in texts.values():
        assert not any(word in text for word in (str(tmp_path), "/home/somebody", "name_or_path", "12.25", "seconds"))
        assert text.endswith("\n")
    report = json.loads(texts["quantization_report.json"])
    assert (report["model"], report["perplexity"][0]["dataset"]) == ("small-model", "text.txt")
    assert json.loads(texts["tokenizer_config.json"]) == {"model_max_length": 5}
    assert json.loads(texts["generation_config.json"]) == {"eos_token_id": 2}


def test_names_of_the_hub_stay_and_local_ones_lose_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models/tiny").mkdir(parents=True)
    assert public_name("org/name") == "org/name"
    assert public_name("models/tiny") == "tiny"
    assert public_name("./gone") == "gone"
    assert public_name(tmp_path / "models" / "tiny" / "..") == "models"


def test_the_report_is_strict_json(material, tmp_path):
    made = material()
    row = {"dataset": "books", "sequence_length": 8, "perplexity": float("inf"), "tokens": 9}
    made.report |= {"perplexity": [row], "modules": [{"name": "x", "layer": 0, "error": float("nan")}]}
    out = made.write(tmp_path / "out")

    def refuse(constant):
        raise AssertionError(constant)

    report = json.loads((out / "quantization_report.json").read_text(), parse_constant=refuse)
    assert report["perplexity"][0]["perplexity"] is None
    assert "| books | 8 | 9 | not finite |" in (out / "README.md").read_text()


def test_modules_may_share_a_weight(material, tmp_path):
    made = material()
    weight = made.weights["model.layers.0.self_attn.q_proj"]
    made.weights["model.layers.0.self_attn.k_proj"] = weight
    assert same(open_checkpoint(made.write(tmp_path / "out")).weight("model.layers.0.self_attn.k_proj"), weight)


@pytest.mark.parametrize("part", ["codes", "scale", "offset", "group_index"])
def test_what_was_read_back_is_compared_bit_for_bit(part):
    check_written("layer", random_weight(), random_weight())
    changed = random_weight()
    getattr(changed, part)[0] += 1
    with pytest.raises(CheckpointError, match=f"the {part} of layer reads back differently"):
        check_written("layer", changed, random_weight())


def test_what_the_format_cannot_hold_leaves_nothing_behind(material, tmp_path):
    made = material(sym=False, format="gptq")
    made.weights["model.layers.1.mlp.down_proj"].offset[0, 0] = 0
    with pytest.raises(ConversionError, match="1 of 192 zero points"):
        made.write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


NAME = "model.layers.3.self_attn.o_proj"
AUTOGPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "sym": True, "true_sequential": True}
OPTIMUM = {**AUTOGPTQ, "quant_method": "gptq", "dataset": "c4", "tokenizer": None, "batch_size": 1}


def foreign(path, *, config=None, beside=None, file="model.safetensors", drop="?", **tensors):
    """Write a checkpoint with one layer: code 5 everywhere, stored zeros 7, scales 0.5, 32 outputs, 64 inputs."""
    held = {
        "qweight": torch.full((8, 32), 0x55555555, dtype=torch.int32),
        "qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
        "scales": torch.full((2, 32), 0.5).half(),
        "g_idx": (torch.arange(64) // 32).int(),
        **tensors,
    }
    save_file({f"{NAME}.{key}": tensor for key, tensor in held.items() if key != drop}, path / file)
    model = {"model_type": "llama", **({"quantization_config": config} if config else {})}
    (path / "config.json").write_text(json.dumps(model))
    if beside:
        (path / "quantize_config.json").write_text(json.dumps(beside))
    return open_checkpoint(path)


def test_autogptq_names_its_file_in_a_config_of_its_own(tmp_path):
    save_file({"unrelated": torch.zeros(1)}, tmp_path / "other.safetensors")
    beside = {**AUTOGPTQ, "model_name_or_path": None, "model_file_base_name": "gptq_model-4bit-32g"}
    checkpoint = foreign(tmp_path, beside=beside, file="gptq_model-4bit-32g.safetensors")
    assert checkpoint.declared.format == "gptq"
    assert bool((checkpoint.weight(NAME).dequantize() == (5 - 8) * 0.5).all())


def test_optimum_and_gptqmodel(tmp_path):
    checkpoint = foreign(tmp_path, config=OPTIMUM, file="whatever.safetensors", drop="g_idx")
    assert (checkpoint.declared.bits, checkpoint.declared.group_size, checkpoint.declared.sym) == (4, 32, True)
    assert (checkpoint.declared.writer, checkpoint.model_config["model_type"]) == (None, "llama")
    assert not checkpoint.layers[NAME].act_order
    assert checkpoint.weight(NAME).trivial_group_index
    meta = {"quantizer": ["gptqmodel:7.5.0"]}
    config = {**OPTIMUM, "format": "gptq", "checkpoint_format": "gptq_v2", "meta": meta}
    checkpoint = foreign(tmp_path, config=config, file="whatever.safetensors")
    assert (checkpoint.declared.format, checkpoint.declared.writer) == ("gptq_v2", "gptqmodel:7.5.0")
    assert bool((checkpoint.weight(NAME).dequantize() == (5 - 7) * 0.5).all())


def test_act_order_is_what_the_tensor_says(tmp_path):
    index = (torch.arange(64) % 2).int()
    checkpoint = foreign(tmp_path, config=OPTIMUM, g_idx=index)
    assert not checkpoint.declared.desc_act
    assert checkpoint.layers[NAME].act_order
    assert torch.equal(checkpoint.weight(NAME).group_index, index)


def test_swapped_three_bit_zeros_are_found_in_the_file(tmp_path):
    zeros = torch.tensor([0x24924924 - 0x24924924, 0xB6DB6DB7 - (1 << 32), 0x92492492 - 0x49249249], dtype=torch.int32)
    tensors = {"qweight": torch.zeros(6, 32, dtype=torch.int32), "qzeros": zeros.repeat(2, 1)}
    with pytest.raises(CheckpointError, match=r"o_proj\.qzeros .*GPTQModel before 7\.0"):
        foreign(tmp_path, config={**OPTIMUM, "bits": 3}, **tensors).weight(NAME)
