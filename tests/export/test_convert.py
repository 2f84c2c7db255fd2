"""Conversion changes the words of the zeros and the name of the format, and nothing else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit.errors import CheckpointError, ConfigError, ConversionError, OutputExistsError
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.convert import convert
from support.weights import same


def files(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("before", "after"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_conversion_equals_quantizing_for_the_other_format(material, tmp_path, bits, before, after):
    source = material(bits=bits, format=before, sym=False).write(tmp_path / "source", passthrough=["x"])
    wanted = material(bits=bits, format=after, sym=False).write(tmp_path / "wanted", passthrough=["x"])
    convert(source, tmp_path / "out", format=after)
    assert files(tmp_path / "out") == files(wanted)
    convert(tmp_path / "out", tmp_path / "back", format=before)
    assert files(tmp_path / "back") == files(source)


def test_shards_are_put_together_anew(material, tmp_path):
    made = material(format="gptq", sym=False)
    source = made.write(tmp_path / "source", max_shard_bytes=6000)
    convert(source, tmp_path / "out", format="gptq_v2")
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    checkpoint = open_checkpoint(tmp_path / "out")
    assert all(same(checkpoint.weight(name), weight) for name, weight in made.weights.items())
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in made.other_tensors.items())


def test_every_other_file_is_carried_over_but_pickles(material, tmp_path):
    source = material(format="gptq").write(tmp_path / "source")
    (source / "tokenizer.json").write_bytes(b'{"a":  1}\r\n')
    (source / "templates").mkdir()
    (source / "templates" / "tool.jinja").write_text("{{ x }}")
    (source / "templates" / "old.pt").write_bytes(b"pickle")
    (source / "linked.txt").symlink_to(source / "tokenizer.json")
    (source / "away").symlink_to(tmp_path)
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / ".cache").mkdir()
    convert(source, tmp_path / "out", format="gptq_v2")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"a":  1}\r\n'
    assert [path.name for path in (tmp_path / "out" / "templates").iterdir()] == ["tool.jinja"]
    assert (tmp_path / "out" / "linked.txt").read_bytes() == b'{"a":  1}\r\n'
    assert not (tmp_path / "out" / "linked.txt").is_symlink()
    assert not {"away", "pytorch_model.bin", ".cache"} & files_and_folders(tmp_path / "out")


def files_and_folders(path):
    return {entry.name for entry in path.iterdir()}


@pytest.mark.parametrize("beside", [True, False])
def test_files_of_other_programs_keep_their_configs_and_card(material, tmp_path, beside):
    """AutoGPTQ's config beside the weights, and optimum's in config.json; g_idx may be missing."""
    source = material(format="gptq").write(tmp_path / "source")
    foreign = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.1, "meta": {"x": [1]}}
    config = {**json.loads((source / "config.json").read_text()), "quantization_config": foreign}
    if beside:
        (source / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    else:
        (source / "quantize_config.json").unlink()
    (source / "config.json").write_text(json.dumps(config))
    (source / "README.md").write_text("hand-written")
    (source / "quantization_report.json").unlink()
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("g_idx")}
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    convert(source, tmp_path / "out", format="gptq_v2")
    written = json.loads((tmp_path / "out" / ("quantize_config.json" if beside else "config.json")).read_text())
    written = written if beside else written["quantization_config"]
    assert written == {**foreign, "checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    assert files_and_folders(tmp_path / "out") == files_and_folders(source)
    assert (tmp_path / "out" / "README.md").read_text() == "hand-written"
    assert same(*(open_checkpoint(path).weight("model.layers.0.mlp.down_proj") for path in (source, tmp_path / "out")))


@pytest.mark.parametrize("damage", [{"perplexity": [{}]}, {"perplexity": 3}, {"modules": [3]}, {"config": 3}])
def test_a_damaged_report_is_named(material, tmp_path, damage):
    source = material(format="gptq").write(tmp_path / "source")
    report = json.loads((source / "quantization_report.json").read_text())
    (source / "quantization_report.json").write_text(json.dumps({**report, **damage}))
    with pytest.raises(CheckpointError, match=r"quantization_report\.json is damaged .*delete it"):
        convert(source, tmp_path / "out", format="gptq_v2")
    assert not (tmp_path / "out").exists()
    (source / "quantization_report.json").unlink()
    convert(source, tmp_path / "out", format="gptq_v2")


@pytest.mark.parametrize(("before", "after", "zero"), [("gptq_v2", "gptq", 0), ("gptq", "gptq_v2", 16)])
def test_zeros_that_the_target_cannot_hold_name_the_layer(material, tmp_path, before, after, zero):
    made = material(format=before, sym=False)
    weight = made.weights["model.layers.0.mlp.down_proj"]
    weight.offset[:3, 1] = -zero * weight.scale[:3, 1]
    source = made.write(tmp_path / "source")
    with pytest.raises(ConversionError, match=rf"0\.mlp\.down_proj: 3 of 192 zero points .* what {after} holds"):
        convert(source, tmp_path / "out", format=after)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_wrong_requests(material, tmp_path):
    source = material(format="gptq").write(tmp_path / "source")
    with pytest.raises(ConversionError, match="is gptq already"):
        convert(source, tmp_path / "out", format="gptq")
    with pytest.raises(ConfigError, match="choose one of gptq, gptq_v2"):
        convert(source, tmp_path / "out", format="awq")
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(ConfigError, match="lie in one another"):
            convert(source, target, format="gptq_v2", overwrite=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExistsError):
        convert(source, tmp_path / "out", format="gptq_v2")


def test_damage_is_noticed_on_the_way_in_and_out(material, tmp_path, faulty_disk):
    source = material(format="gptq").write(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    broken = {**tensors, "model.layers.0.mlp.down_proj.scales": torch.full((3, 64), torch.nan).half()}
    save_file(broken, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj\.scales holds NaN"):
        convert(source, tmp_path / "out", format="gptq_v2")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    faulty_disk("incomplete")
    with pytest.raises(CheckpointError, match="reads back differently"):
        convert(source, tmp_path / "out", format="gptq_v2")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
