"""A checkpoint holds exactly what was given, whoever wrote it, and tells nothing private."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer

from gptqkit.errors import CheckpointError
from gptqkit.export.checkpoint import check_written, open_checkpoint, public_name
from gptqkit.quantizer.config import ModuleOverride
from support.weights import random_weight, same


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("settings", [{"sym": True}, {"sym": False}, {"format": "gptq", "sym": False}])
def test_everything_reads_back_exactly(material, tmp_path, bits, settings):
    made = material(bits=bits, overrides={"0.mlp": ModuleOverride(bits=8, group_size=-1)}, **settings)
    made.weights["model.layers.1.mlp.down_proj"] = random_weight(bits, act_order=True, sym=settings["sym"])
    given = copy.deepcopy(made)
    checkpoint = open_checkpoint(made.write(tmp_path / "out", max_shard_bytes=9000))
    declared = checkpoint.declared
    assert (declared.format, declared.bits, declared.group_size) == (made.config.format, bits, 32)
    assert (declared.sym, declared.desc_act) == (settings["sym"], True)
    assert len(checkpoint.tensors.files) > 1
    assert checkpoint.layers.keys() == given.weights.keys()
    for name, weight in given.weights.items():
        assert same(checkpoint.weight(name), weight)
        assert same(made.weights[name], weight)
        bias = given.other_tensors.pop(f"{name}.bias", None)
        assert bias is checkpoint.bias(name) if bias is None else torch.equal(checkpoint.bias(name), bias)
    assert set(checkpoint.other_names) == set(given.other_tensors)
    for name, tensor in given.other_tensors.items():
        assert checkpoint.tensor(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)
    assert (made.model_config, made.report) == (given.model_config, given.report)


def test_config_json_serves_old_and_new_readers(material, tmp_path):
    """transformers 5 renamed the keys of rope and of the dtype."""
    made = material()
    out = made.write(tmp_path / "a")
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == made.model_config["rope_parameters"]
    assert (config["rope_theta"], config["dtype"], config["torch_dtype"]) == (50000.0, "float16", "float16")
    assert "rope_scaling" not in config
    assert config["quantization_config"] == json.loads((out / "quantize_config.json").read_text())
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    made.model_config |= {"rope_parameters": yarn, "dtype": "torch.bfloat16"}
    config = json.loads((made.write(tmp_path / "b") / "config.json").read_text())
    assert (config["rope_scaling"], config["torch_dtype"]) == (yarn, "bfloat16")


def holds(found, wanted):
    """Whether nested dicts hold all that others do."""
    return all(
        holds(found[key], value) if isinstance(value, dict) else found.get(key) == value
        for key, value in wanted.items()
    )


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"model_type": "phi", "rope_theta": 2e4, "partial_rotary_factor": 0.4},
        {"model_type": "gpt_neox", "rotary_emb_base": 50000, "rotary_pct": 0.5},
        {
            "model_type": "gemma3_text",
            "rope_theta": 1e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", "rope_theta": 1e9}},
    ],
    ids=lambda values: values["model_type"],
)
def test_settings_of_rope_stand_where_transformers_4_wrote_them(material, tmp_path, values):
    (tmp_path / "config.json").write_text(json.dumps(values))
    made = material()
    made.model_config = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string())
    assert holds(json.loads((made.write(tmp_path / "out") / "config.json").read_text()), values)


def test_a_part_without_a_dtype_gets_none(material, tmp_path):
    made = material()
    made.model_config = {"model_type": "t5gemma2", "dtype": "bfloat16", "encoder": {"model_type": "t", "dtype": None}}
    values = json.loads((made.write(tmp_path / "out") / "config.json").read_text())
    assert (values["torch_dtype"], values["encoder"]) == ("bfloat16", {"model_type": "t", "dtype": None})


def test_transformers_4_knows_the_class_of_a_tokenizer_and_its_special_tokens(material, tmp_path, example_model):
    own = AutoTokenizer.from_pretrained(example_model, extra_special_tokens=["<tool>"])
    out = material().write(tmp_path / "out", tokenizer=own)
    values = json.loads((out / "tokenizer_config.json").read_text())
    assert values["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert values["additional_special_tokens"] == ["<tool>"]
    assert "extra_special_tokens" not in values  # where version 4 takes names of tokens, by name
    again = AutoTokenizer.from_pretrained(out)
    assert again("once <tool>")["input_ids"] == own("once <tool>")["input_ids"]
    assert "<tool>" in again.all_special_tokens


class Tokenizer:
    def save_pretrained(self, save_directory):
        values = {"name_or_path": "/home/somebody", "is_local": True, "model_max_length": 5}
        Path(save_directory, "tokenizer_config.json").write_text(json.dumps(values))


def test_a_tokenizer_that_the_disk_refuses_is_said(material, tmp_path):
    class Refused:
        def save_pretrained(self, _):
            raise Exception("No space left on device (os error 28)")

    with pytest.raises(OSError, match=r"the tokenizer could not be written to .*: No space left on device"):
        material().write(tmp_path / "out", tokenizer=Refused())


def test_nothing_private_no_time_and_strict_json_are_written(material, tmp_path):
    secret, made = tmp_path / "secret", material()
    row = {"sequence_length": 8, "perplexity": float("inf"), "tokens": 9, "seconds": 12.25}
    made.report |= {
        "model": str(secret / "small-model"),
        "seconds": 12.25,
        "modules": [{"name": "a", "layer": 0, "error": float("nan"), "seconds": 12.25}],
        "perplexity": [{"dataset": str(secret / "text.txt"), **row}],
    }
    generation = {"_name_or_path": str(secret), "eos_token_id": 2}
    out = made.write(tmp_path / "out", generation_config=generation, tokenizer=Tokenizer())
    texts = {path.name: path.read_text() for path in out.iterdir() if path.suffix in (".json", ".md")}
    assert len(texts) == 6
    for text in texts.values():
        private = (str(tmp_path), "/home/somebody", "name_or_path", "12.25", "seconds", "NaN", "Infinity")
        assert not any(word in text for word in private)
        assert text.endswith("\n")
    report = json.loads(texts["quantization_report.json"])
    assert (report["model"], report["perplexity"][0]["dataset"]) == ("small-model", "text.txt")
    assert (report["perplexity"][0]["perplexity"], report["modules"][0]["error"]) == (None, None)
    assert "| text.txt | 8 | 9 | not finite |" in texts["README.md"]
    assert json.loads(texts["tokenizer_config.json"]) == {"model_max_length": 5}
    assert json.loads(texts["generation_config.json"]) == {"eos_token_id": 2}


def test_names_of_the_hub_stay_and_local_ones_lose_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models/tiny").mkdir(parents=True)
    cached = tmp_path / "models--org--small-2" / "snapshots" / "0123abc"
    cached.mkdir(parents=True)
    names = ["org/name", "models/tiny", "./gone", tmp_path / "models" / "tiny" / "..", cached]
    assert [public_name(name) for name in names] == ["org/name", "tiny", "gone", "models", "org/small-2"]
    assert public_name(["a text " * 100]) == "list"
    assert public_name("a text " * 100) == "a text " * 100  # longer than a file's name can be; refused later, as text


@pytest.mark.parametrize("part", ["codes", "scale", "offset", "group_index"])
def test_what_was_read_back_is_compared_bit_for_bit(part):
    check_written("layer", random_weight(), random_weight())
    changed = random_weight()
    getattr(changed, part)[0] += 1
    with pytest.raises(CheckpointError, match=f"the {part} of layer reads back differently"):
        check_written("layer", changed, random_weight())


AUTOGPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "sym": True, "true_sequential": True}
BASE_NAME = {**AUTOGPTQ, "model_name_or_path": None, "model_file_base_name": "gptq_model-4bit-32g"}
OPTIMUM = {**AUTOGPTQ, "quant_method": "gptq", "dataset": "c4", "tokenizer": None, "batch_size": 1}
GPTQMODEL = {**OPTIMUM, "format": "gptq", "checkpoint_format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.5.0"]}}
GROUPS = (torch.arange(64) // 32).int()


@pytest.mark.parametrize(
    ("config", "beside", "file", "index", "zero", "writer"),
    [
        (None, BASE_NAME, "gptq_model-4bit-32g", GROUPS, 8, None),
        (OPTIMUM, None, "whatever", None, 8, None),
        (OPTIMUM, OPTIMUM, "model", (torch.arange(64) % 2).int(), 8, None),  # act-order is what the tensor says
        (GPTQMODEL, None, "model", GROUPS, 7, "gptqmodel:7.5.0"),
    ],
)
def test_checkpoints_of_other_programs(tmp_path, config, beside, file, index, zero, writer):
    """One layer: code 5 everywhere, stored zeros 7, scales 0.5 in group 0 and 1 in group 1, 32 outputs, 64 inputs."""
    name = "model.layers.3.self_attn.o_proj"
    tensors = {
        f"{name}.qweight": torch.full((8, 32), 0x55555555, dtype=torch.int32),
        f"{name}.qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
        f"{name}.scales": torch.tensor([[0.5], [1]]).half().repeat(1, 32),
        **({} if index is None else {f"{name}.g_idx": index}),
    }
    save_file(tensors, tmp_path / f"{file}.safetensors")
    if file.startswith("gptq"):
        save_file({"unrelated": torch.zeros(1)}, tmp_path / "other.safetensors")
    model = {"model_type": "llama", **({"quantization_config": config} if config else {})}
    (tmp_path / "config.json").write_text(json.dumps(model))
    if beside:
        (tmp_path / "quantize_config.json").write_text(json.dumps(beside))
    checkpoint = open_checkpoint(tmp_path)
    group = GROUPS if index is None else index
    assert torch.equal(checkpoint.weight(name).dequantize(), ((5 - zero) * (0.5 + 0.5 * group)).expand(32, 64))
    assert (checkpoint.declared.writer, checkpoint.declared.desc_act) == (writer, False)
    assert checkpoint.layers[name].act_order == (not group.equal(GROUPS))
