"""Conversion changes the words of the zeros and the name of the format, and nothing else."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from gptqkit.errors import ArchitectureError, CheckpointError, ConfigError, ConversionError, OutputExistsError
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.convert import convert
from gptqkit.export.doctor import doctor
from gptqkit.export.inspect import inspect
from gptqkit.quantizer.config import ModuleOverride
from support.jobs import contents
from support.weights import random_weight, same


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    save_file(change(tensors), path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("bits", [2, 3, 8])  # 4 in test_formats.py
@pytest.mark.parametrize(("before", "after"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_conversion_equals_quantizing_for_the_other_format(material, tmp_path, bits, before, after):
    def write(name, layout, **options):
        return material(bits=bits, format=layout, sym=False).write(tmp_path / name, passthrough=["x"], **options)

    source, wanted = write("source", before), write("wanted", after)
    convert(write("sharded", before, max_shard_bytes=6000), tmp_path / "out", format=after)
    assert contents(tmp_path / "out") == contents(wanted)
    convert(tmp_path / "out", tmp_path / "back", format=before)
    assert contents(tmp_path / "back") == contents(source)


@pytest.mark.parametrize("override", [ModuleOverride(bits=8), ModuleOverride(skip=True)])
def test_the_pattern_of_all_experts_of_a_layer_stays(material, tmp_path, override):
    def write(folder, layout):
        made = material(format=layout, overrides={"experts": override})
        for name in (f"model.layers.0.mlp.experts.{number}.up_proj" for number in range(2)):
            if override.skip:
                made.other_tensors[f"{name}.weight"] = torch.ones(64, 96)
            else:
                made.weights[name] = random_weight(8, 64, 96, 32, sym=True)
        return made.write(tmp_path / folder)

    def dynamic(folder):
        return json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]["dynamic"]

    write("wanted", "gptq_v2")
    convert(write("source", "gptq"), tmp_path / "out", format="gptq_v2")
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    convert(tmp_path / "out", tmp_path / "compressed", format="compressed-tensors")
    convert(tmp_path / "compressed", tmp_path / "back", format="gptq")
    assert r"^model\.layers\.(?:0)\.mlp\.experts(?:\..+)?$" in {pattern[2:] for pattern in dynamic("source")}
    assert dynamic("back") == dynamic("out") == dynamic("source")
    assert open_checkpoint(tmp_path / "back").layers == open_checkpoint(tmp_path / "source").layers
    assert doctor(tmp_path / "source").damage == ()
    for file in (tmp_path / "wanted" / "config.json", tmp_path / "wanted" / "quantize_config.json"):
        file.write_text(file.read_text().replace('format": "gptq_v2"', 'format": "gptq"'))
    assert doctor(tmp_path / "wanted", tmp_path / "repaired").written
    assert dynamic("repaired") == dynamic("source")


def test_every_other_file_is_carried_over_but_pickles(material, tmp_path):
    source = material(format="gptq").write(tmp_path / "source")
    convert(source, tmp_path / "plain", format="gptq_v2")
    for folder in ("templates", ".cache"):
        (source / folder).mkdir()
        (source / folder / "tool.jinja").write_text("{{ x }}")
    (source / "tokenizer.json").write_bytes(b'{"a":  1}\r\n')
    (source / "linked.txt").symlink_to(source / "tokenizer.json")
    (source / "away").symlink_to(tmp_path)
    (source / "quantization_report.html").write_text("a page that shows the old format")
    for pickle in ("templates/old.pt", "pytorch_model.bin"):
        (source / pickle).write_bytes(b"pickle")
    convert(source, tmp_path / "out", format="gptq_v2")
    text = b'{"a":  1}\r\n'
    more = {"templates/tool.jinja": b"{{ x }}", "tokenizer.json": text, "linked.txt": text}
    assert contents(tmp_path / "out") == {**contents(tmp_path / "plain"), **more}
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("beside", [True, False])
def test_files_of_other_programs_keep_their_configs_and_card(material, tmp_path, beside):
    """AutoGPTQ's config beside the weights, and optimum's in config.json; g_idx may be missing."""
    source = material(format="gptq").write(tmp_path / "source")
    foreign = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.1, "meta": {"x": [1]}}
    (source / "quantization_report.json").unlink()
    (source / "quantize_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    own = "quantize_config.json" if beside else "config.json"
    (source / "config.json").write_text(json.dumps(config))
    (source / own).write_text(json.dumps(foreign if beside else {**config, "quantization_config": foreign}))
    (source / "README.md").write_text("hand-written")
    rewrite(source, lambda tensors: {name: each for name, each in tensors.items() if not name.endswith("g_idx")})
    convert(source, tmp_path / "out", format="gptq_v2")
    written = json.loads((tmp_path / "out" / own).read_text())
    expected = {**foreign, "checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    assert (written if beside else written["quantization_config"]) == expected
    assert contents(tmp_path / "out").keys() == contents(source).keys()
    assert (tmp_path / "out" / "README.md").read_text() == "hand-written"
    assert same(*(open_checkpoint(path).weight("model.layers.0.mlp.down_proj") for path in (source, tmp_path / "out")))


def foreign(source):
    """Make a checkpoint one of AutoGPTQ's, which has its config beside config.json only."""
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    values = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    (source / "quantize_config.json").write_text(json.dumps(values))
    (source / "quantization_report.json").unlink()
    return source


@pytest.mark.parametrize("format", ["awq", "compressed-tensors"])
def test_formats_that_others_look_for_in_config_json_are_named_there(material, tmp_path, format):
    source = foreign(material(format="gptq").write(tmp_path / "source"))
    loads = {reader.name: reader.loads for reader in inspect(source).readers}
    assert not loads["transformers"]
    assert not loads["vLLM"]
    convert(source, tmp_path / "out", format=format)
    found = AutoConfig.from_pretrained(tmp_path / "out").quantization_config
    assert found["quant_method"] == format
    assert inspect(tmp_path / "out").reader("transformers").loads


@pytest.mark.parametrize("format", ["awq", "compressed-tensors"])
def test_how_files_of_others_were_made_is_not_invented(material, tmp_path, format):
    convert(foreign(material(format="gptq").write(tmp_path / "source")), tmp_path / "out", format=format)
    convert(tmp_path / "out", tmp_path / "back", format="gptq_v2")
    for folder in ("out", "back"):
        values = open_checkpoint(tmp_path / folder).quantization_config
        assert "gptqkit" not in values["meta"]
        assert not {"damp_percent", "true_sequential", "static_groups"} & values.keys()


def test_what_gguf_cannot_be_is_refused_before_anything_is_written(material, tmp_path, monkeypatch):
    made = material()
    made.model_config["model_type"] = "olmo2"
    monkeypatch.setattr("gptqkit.export.convert.staged", None)
    with pytest.raises(ArchitectureError, match="models of the type 'olmo2' are not written as GGUF here"):
        convert(made.write(tmp_path / "source"), tmp_path / "out", format="gguf")


def test_settings_of_another_version_of_gptqkit_are_kept(material, tmp_path):
    source = material(format="gptq").write(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    settings = config["quantization_config"]["meta"]["gptqkit"]
    settings |= {"colour": "red", "overrides": ["unlike ours"]}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", format="gptq_v2")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["meta"]["gptqkit"] == {**settings, "format": "gptq_v2"}
    assert open_checkpoint(tmp_path / "out").declared.format == "gptq_v2"


@pytest.mark.parametrize("damage", [{"perplexity": 3}, {"modules": [3]}, {"config": 3}])
def test_a_damaged_report_is_named(material, tmp_path, damage):
    source = material(format="gptq").write(tmp_path / "source")
    report = json.loads((source / "quantization_report.json").read_text())
    (source / "quantization_report.json").write_text(json.dumps({**report, **damage}))
    with pytest.raises(CheckpointError, match=rf"{source}/quantization_report\.json is damaged .*delete it"):
        convert(source, tmp_path / "out", format="gptq_v2")
    (source / "quantization_report.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"^{source}/quantization_report\.json is not JSON"):
        convert(source, tmp_path / "out", format="gptq_v2")
    (source / "quantization_report.json").unlink()
    convert(source, tmp_path / "out", format="gptq_v2")


def test_what_is_refused_leaves_nothing_behind(material, tmp_path, faulty_disk):
    made = material(format="gptq", sym=False)
    source = made.write(tmp_path / "source")
    with pytest.raises(ConversionError, match="is gptq already"):
        convert(source, tmp_path / "out", format="gptq")
    with pytest.raises(ConfigError, match="choose one of gptq, gptq_v2"):
        convert(source, tmp_path / "out", format="exl2")
    for size in (0, 2.5, True):
        with pytest.raises(ConfigError, match=f"shard_size is {size}; give bytes, or a text such as 8GiB"):
            convert(source, tmp_path / "out", format="gptq_v2", shard_size=size)
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(ConfigError, match=r"lies in the other|is the source itself"):
            convert(source, target, format="gptq_v2", overwrite=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").touch()
    with pytest.raises(OutputExistsError):
        convert(source, tmp_path / "there", format="gptq_v2")
    weight = made.weights["model.layers.0.mlp.down_proj"]
    weight.offset[:3, 1] = -16 * weight.scale[:3, 1]
    with pytest.raises(ConversionError, match=r"0\.mlp\.down_proj: 3 of 192 zero points .* what gptq_v2 holds"):
        convert(made.write(source, overwrite=True), tmp_path / "out", format="gptq_v2")
    broken = {"model.layers.0.mlp.down_proj.scales": torch.full((3, 64), torch.nan).half()}
    rewrite(source, lambda tensors: {**tensors, **broken})
    with pytest.raises(CheckpointError, match=r"down_proj\.scales holds NaN"):
        convert(source, tmp_path / "out", format="gptq_v2")
    material(format="gptq").write(source, overwrite=True)
    faulty_disk("incomplete")
    with pytest.raises(CheckpointError, match="reads back differently"):
        convert(source, tmp_path / "out", format="gptq_v2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there"]
