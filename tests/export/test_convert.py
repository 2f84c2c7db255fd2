"""Conversion changes the words of the zeros and the name of the format, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit.errors import CheckpointError, ConfigError, ConversionError, OutputExistsError
from gptqkit.export.convert import convert
from gptqkit.export.reader import open_checkpoint

Make = Callable[..., Any]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("before", "after"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_conversion_equals_quantizing_for_the_other_format(
    material: Make, tmp_path: Path, bits: int, before: str, after: str
) -> None:
    made = material(bits=bits, format=before, sym=False)
    source = made.write(tmp_path / "source", max_shard_bytes=9000)
    wanted_material = material(bits=bits, format=after, sym=False)
    wanted_material.other_tensors = made.other_tensors
    wanted = wanted_material.write(tmp_path / "wanted", max_shard_bytes=9000)
    convert(source, tmp_path / "out", format=after)  # type: ignore[arg-type]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(p.name for p in wanted.iterdir())
    for path in wanted.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_there_and_back_gives_the_same_bytes(material: Make, tmp_path: Path) -> None:
    source = material(format="gptq", sym=False).write(tmp_path / "source")
    convert(source, tmp_path / "there", format="gptq_v2")
    convert(tmp_path / "there", tmp_path / "back", format="gptq")
    for path in source.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name


def test_every_other_file_is_carried_over_but_pickles(material: Make, tmp_path: Path) -> None:
    source = material(format="gptq").write(tmp_path / "source")
    (source / "tokenizer.json").write_bytes(b'{"a":  1}\r\n')
    (source / "templates").mkdir()
    (source / "templates" / "tool.jinja").write_text("{{ x }}")
    (source / "linked.txt").symlink_to(source / "tokenizer.json")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / ".cache").mkdir()
    convert(source, tmp_path / "out", format="gptq_v2")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b'{"a":  1}\r\n'
    assert (tmp_path / "out" / "templates" / "tool.jinja").read_text() == "{{ x }}"
    assert (tmp_path / "out" / "linked.txt").read_bytes() == b'{"a":  1}\r\n'
    assert not (tmp_path / "out" / "linked.txt").is_symlink()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert not (tmp_path / "out" / ".cache").exists()


def test_files_of_other_programs_keep_their_configs_and_card(material: Make, tmp_path: Path) -> None:
    source = material(format="gptq").write(tmp_path / "source")
    foreign = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.1, "meta": {"x": [1]}}
    (source / "quantize_config.json").write_text(json.dumps(foreign))
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    (source / "README.md").write_text("hand-written")
    convert(source, tmp_path / "out", format="gptq_v2")
    written = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    assert written == {**foreign, "checkpoint_format": "gptq_v2", "format": "gptq_v2"}
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (tmp_path / "out" / "README.md").read_text() == "hand-written"


def test_card_and_report_name_the_new_format(material: Make, tmp_path: Path) -> None:
    made = material(format="gptq")
    made.report["config"] = made.config.to_dict()
    convert(made.write(tmp_path / "source"), tmp_path / "out", format="gptq_v2")
    assert "| format | gptq_v2 |" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "quantization_report.json").read_text())["config"]["format"] == "gptq_v2"


@pytest.mark.parametrize("damage", [{"perplexity": [{}]}, {"perplexity": 3}, {"modules": [3]}])
def test_a_damaged_report_is_named(material: Make, tmp_path: Path, damage: dict[str, Any]) -> None:
    source = material(format="gptq").write(tmp_path / "source")
    (source / "quantization_report.json").write_text(json.dumps(damage))
    with pytest.raises(CheckpointError, match=r"quantization_report\.json is damaged"):
        convert(source, tmp_path / "out", format="gptq_v2")
    assert not (tmp_path / "out").exists()


def test_zeros_that_version_1_cannot_hold_are_counted_over_all_layers(material: Make, tmp_path: Path) -> None:
    made = material(format="gptq_v2", sym=False)
    made.weights["model.layers.0.mlp.down_proj"].zero[:3, 1] = 0
    made.weights["model.layers.1.self_attn.q_proj"].zero[:2, 0] = 0
    source = made.write(tmp_path / "source")
    message = r"5 of 640 zeros are zero 0, which gptq cannot hold \(the first in model\.layers\.0\.mlp\.down_proj\)"
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "out", format="gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_zeros_that_version_2_cannot_hold_are_counted(material: Make, tmp_path: Path) -> None:
    made = material(format="gptq", sym=False)
    made.weights["model.layers.1.mlp.down_proj"].zero[7, 2] = 16
    source = made.write(tmp_path / "source")
    with pytest.raises(ConversionError, match=r"1 of 640 zeros are zero 2\^bits, which gptq_v2 cannot hold"):
        convert(source, tmp_path / "out", format="gptq_v2")


def test_wrong_requests(material: Make, tmp_path: Path) -> None:
    source = material(format="gptq").write(tmp_path / "source")
    with pytest.raises(ConversionError, match="is gptq already"):
        convert(source, tmp_path / "out", format="gptq")
    with pytest.raises(ConfigError, match="choose one of gptq, gptq_v2"):
        convert(source, tmp_path / "out", format="awq")  # type: ignore[arg-type]
    for target in (source, source / "inside", tmp_path):
        with pytest.raises(ConfigError, match="lie in one another"):
            convert(source, target, format="gptq_v2", overwrite=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputExistsError):
        convert(source, tmp_path / "out", format="gptq_v2")


def test_damaged_values_are_noticed_before_anything_is_written(material: Make, tmp_path: Path) -> None:
    source = material(format="gptq").write(tmp_path / "source")
    tensors = tensors_of(source)
    tensors["model.layers.0.mlp.down_proj.scales"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    open_checkpoint(source)
    with pytest.raises(CheckpointError, match=r"down_proj\.scales holds NaN"):
        convert(source, tmp_path / "out", format="gptq_v2")
    assert not (tmp_path / "out").exists()
