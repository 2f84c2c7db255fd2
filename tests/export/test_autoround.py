"""auto-round's own checkpoints: GPTQ's and AWQ's tensors under another config."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gptqkit import load
from gptqkit.errors import CheckpointError, ConversionError
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.convert import convert
from gptqkit.export.inspect import inspect
from support.models import build, save
from support.pipeline import outputs, quantize
from support.weights import same

# As auto-round 0.16.1 writes them.
PLAIN = {
    "autoround_version": "0.16.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "enable_quanted_input": False,
    "group_size": 32,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
MIXED = {
    ".*down_proj.*": {"bits": 8},
    ".*k_proj.*": {"bits": 16},
    "model.layers.0.mlp.down_proj": {"bits": 8},
    "model.layers.0.self_attn.k_proj": {"bits": 16},
    "model.layers.1.mlp.down_proj": {"bits": 2, "sym": False},
    "model.layers.1.mlp.up_proj": {"group_size": 64},
    "^lm_head": {"bits": 3, "data_type": "int"},
    r"[24]\.mlp\.gate_proj$": {"bits": 8, "sym": None, "group_size": None},
}
NAME = "model.layers.0.self_attn.o_proj"


AWQ = {
    "qweight": torch.full((64, 4), 0x55555555, dtype=torch.int32),
    "qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
    "scales": torch.tensor([[0.5], [1]]).half().repeat(1, 32),
}


def write(folder, tensors=None, **config):
    """One layer with 32 outputs and 64 inputs in two groups; every code is 5 and every stored zero point is 7."""
    gptq = {
        "qweight": torch.full((8, 32), 0x55555555, dtype=torch.int32),
        "qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
        "scales": torch.tensor([[0.5], [1]]).half().repeat(1, 32),
    }
    folder.mkdir(exist_ok=True)
    save_file({f"{NAME}.{key}": each for key, each in (tensors or gptq).items()}, folder / "model.safetensors")
    values = {**PLAIN, **config}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": values}))
    (folder / "quantization_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("packing", "format", "zero"),
    [
        ("auto_round:auto_gptq", "gptq", 8),
        ("auto_round:gptq", "gptq", 8),
        ("auto_round", "gptq_v2", 7),
        ("auto_round:gptqmodel", "gptq_v2", 7),
        ("auto_round:auto_awq", "awq", 7),
    ],
)
def test_every_layout_is_read(tmp_path, packing, format, zero):
    path = write(tmp_path / "ar", AWQ if format == "awq" else None, packing_format=packing)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.declared.format, checkpoint.declared.writer) == (format, "auto_round:0.16.1")
    expected = ((5 - zero) * (0.5 + 0.5 * (torch.arange(64) // 32))).expand(32, 64)
    assert torch.equal(checkpoint.weight(NAME).dequantize(), expected)


@pytest.mark.parametrize(
    ("backend", "format"),
    [
        ("gptq:exllamav2", "gptq"),  # 0.2
        ("auto_gptq:cuda", "gptq"),  # 0.3
        ("auto_round:exllamav2", "gptq_v2"),
        ("auto_round:triton", "gptq_v2"),
        ("auto_round:gptq:exllamav2", "gptq"),  # 0.4
        ("auto_round:auto_gptq", "gptq"),
        ("auto_round:awq:gemm", "awq"),
    ],
)
def test_layouts_as_they_were_called_before_0_5(tmp_path, backend, format):
    old = {"quant_method": "intel/auto-round", "packing_format": None, "backend": backend, "autoround_version": "0.4.2"}
    path = write(tmp_path / "ar", AWQ if format == "awq" else None, **old)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.declared.format, checkpoint.declared.writer) == (format, "auto_round:0.4.2")
    convert(path, tmp_path / "out", format=format)
    assert same(*(open_checkpoint(each).weight(NAME) for each in (path, tmp_path / "out")))


@pytest.mark.parametrize("backend", ["auto_gptq:marlin", "auto", None])
def test_layouts_that_were_never_read(tmp_path, backend):
    with pytest.raises(CheckpointError, match=f"packed 'int' as {backend!r}"):
        open_checkpoint(write(tmp_path / "ar", packing_format=None, quant_method="intel/auto-round", backend=backend))


def test_groups_of_single_modules_of_awq(tmp_path):
    path = write(tmp_path / "ar", AWQ, packing_format="auto_round:auto_awq", group_size=64, extra_config={NAME: {}})
    with pytest.raises(CheckpointError, match=r"groups of 64, as the quantization config says, needs \(1, 4\)"):
        open_checkpoint(path)
    write(path, AWQ, packing_format="auto_round:auto_awq", group_size=64, extra_config={NAME: {"group_size": 32}})
    assert open_checkpoint(path).layers[NAME].group_size == 32


def test_settings_of_single_modules(tmp_path):
    declared = open_checkpoint(write(tmp_path / "ar", extra_config=MIXED)).declared
    assert declared.for_module("model.layers.0.mlp.down_proj") == (8, 32, True)
    assert declared.for_module("model.layers.1.mlp.down_proj") == (2, 32, False)  # its own name before patterns
    assert declared.for_module("model.layers.2.mlp.down_proj") == (8, 32, True)
    assert declared.for_module("model.layers.1.mlp.up_proj") == (4, 64, True)
    assert declared.for_module("model.layers.1.mlp.up_projection") == (4, 32, True)
    assert declared.for_module("model.layers.11.mlp.up_proj") == (4, 32, True)
    assert declared.for_module("lm_head") == (3, 32, True)
    assert declared.for_module("model.layers.2.mlp.gate_proj") == (8, 32, True)  # searched for, not only at the start
    assert declared.for_module("model.layers.3.mlp.gate_proj") == (4, 32, True)
    assert declared.for_module("model.lm_head") == (4, 32, True)


def test_settings_of_thousands_of_modules_by_name(tmp_path):
    """As auto-round lists the experts of a mixture: each with each would take hours."""
    names = [f"model.layers.{block}.mlp.experts.{expert}.up_proj" for block in range(48) for expert in range(128)]
    extra = {name: {"bits": 8} for name in names[::2]} | {r".*layers\.7\..*": {"bits": 2}}
    declared = open_checkpoint(write(tmp_path / "ar", extra_config=extra)).declared
    begin = time.monotonic()
    found = [declared.for_module(name)[0] for name in names]
    assert time.monotonic() - begin < 3
    assert found[::2] == [8] * (len(names) // 2)
    assert [names[2 * at + 1].split(".")[2] == "7" for at in range(len(names) // 2)] == [
        bits == 2 for bits in found[1::2]
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"packing_format": "auto_round:fp8_static"}, r"packed 'int' as 'auto_round:fp8_static'; of its layouts"),
        ({"packing_format": None}, "packed 'int' as None"),
        ({"data_type": "mx_fp"}, "packed 'mx_fp'"),
        ({"act_bits": 8}, "act_bits 8 asks for work on activations"),
        ({"rotation_config": {"type": "hadamard"}}, "rotation_config asks for work on activations"),
        ({"extra_config": ["lm_head"]}, "extra_config must map names of modules to objects"),
        ({"extra_config": {"lm_head": 3}}, "extra_config must map names of modules to objects"),
        ({"extra_config": {".*(": {"bits": 8}}}, "is not a regular expression"),
        ({"bits": 5}, "bits is 5"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path, config, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path / "ar", **config))


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq"])
def test_converted_it_is_a_file_that_others_load(tmp_path, format):
    mixed = {} if format == "awq" else {"extra_config": {".*k_proj.*": {"bits": 16}}}
    source = write(tmp_path / "ar", **mixed)
    found = inspect(source)
    assert not any(reader.loads for reader in found.readers if reader.name != "gptqkit")
    assert "convert to gptq" in found.reader("GPTQModel").reasons[0]
    convert(source, tmp_path / "out", format=format)
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == ("awq" if format == "awq" else "gptq")
    assert not {"packing_format", "extra_config", "damp_percent", "gptqkit"} & {*written, *written["meta"]}
    assert not (tmp_path / "out" / "quantization_config.json").exists()
    assert same(*(open_checkpoint(path).weight(NAME) for path in (source, tmp_path / "out")))
    assert (f"{NAME}.g_idx" in load_file(tmp_path / "out" / "model.safetensors")) == (format != "awq")
    with pytest.raises(ConversionError, match=f"is {format} already"):
        convert(tmp_path / "out", tmp_path / "again", format=format)


def test_a_model_is_loaded_and_saved_by_us_and_by_transformers(tmp_path):
    """Equal to the same tensors under GPTQ's config."""
    save(build("llama").half(), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "gptq", method="rtn", format="gptq", sym=True)
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    expected = outputs(load(tmp_path / "gptq", device="cpu")[0])
    (tmp_path / "gptq" / "quantize_config.json").unlink()
    config["quantization_config"] = PLAIN | {"group_size": config["quantization_config"]["group_size"]}
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    model = load(tmp_path / "gptq", device="cpu")[0]
    assert torch.equal(outputs(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert open_checkpoint(tmp_path / "saved").quantization_config["quant_method"] == "gptq"
    assert torch.equal(outputs(load(tmp_path / "saved", device="cpu")[0]), expected)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", device_map="cpu", dtype=torch.float32)
    assert torch.equal(outputs(theirs), expected)
    model.save_pretrained(tmp_path / "gptq")  # its own folder
    assert open_checkpoint(tmp_path / "gptq").quantization_config["packing_format"] == PLAIN["packing_format"]
    assert torch.equal(outputs(load(tmp_path / "gptq", device="cpu")[0]), expected)
