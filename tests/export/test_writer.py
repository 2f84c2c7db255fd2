"""A written checkpoint holds exactly what was given, appears complete or not at all, and tells nothing private."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gptqkit.errors import CheckpointError, ConversionError, OutputExistsError, ShapeError
from gptqkit.export import writer
from gptqkit.export.reader import open_checkpoint
from gptqkit.quantizer.config import Format, ModuleOverride, QuantizeConfig

Make = Callable[..., Any]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, False])
def test_everything_reads_back_exactly(
    material: Make,
    tmp_path: Path,
    bits: int,
    format: Format,  # noqa: A002
    sym: bool,
) -> None:
    made = material(bits=bits, format=format, sym=sym)
    checkpoint = open_checkpoint(made.write(tmp_path / "out"))
    assert (checkpoint.bits, checkpoint.group_size, checkpoint.sym, checkpoint.desc_act) == (bits, 32, sym, False)
    assert checkpoint.format == format
    assert set(checkpoint.layers) == set(made.weights)
    for name, weight in made.weights.items():
        found = checkpoint.quantized_weight(name)
        for part in ("codes", "scale", "zero", "group_index"):
            assert torch.equal(getattr(found, part), getattr(weight, part))
        assert torch.equal(found.dequantize(), weight.dequantize())
        assert torch.equal(checkpoint.zeros(name), weight.zero.t())
    biases = {f"{name}.bias" for name in made.weights if "q_proj" in name}
    assert set(checkpoint.other_names) == set(made.other_tensors) - biases
    for name, tensor in made.other_tensors.items():
        assert checkpoint.tensor(name).dtype == tensor.dtype
        assert torch.equal(checkpoint.tensor(name), tensor)
    spec = checkpoint.layers["model.layers.1.self_attn.q_proj"]
    assert (spec.out_features, spec.in_features, spec.bits, spec.group_size) == (64, 64, bits, 32)
    assert (spec.has_bias, spec.act_order, spec.zero_offset) == (True, False, 1 if format == "gptq" else 0)
    layer = checkpoint.layer(spec.name)
    assert layer["bias"] is not None
    assert torch.equal(layer["bias"], made.other_tensors[f"{spec.name}.bias"])
    assert checkpoint.layer("model.layers.0.mlp.down_proj")["bias"] is None


def test_per_row_groups_are_minus_one_in_the_json(material: Make, tmp_path: Path) -> None:
    out = material(group_size=None).write(tmp_path / "out")
    assert json.loads((out / "quantize_config.json").read_text())["group_size"] == -1
    checkpoint = open_checkpoint(out)
    assert checkpoint.group_size is None
    assert checkpoint.layers["model.layers.0.mlp.down_proj"].group_size == 96


def test_json_of_a_plain_checkpoint(material: Make, tmp_path: Path) -> None:
    made = material(sym=False, desc_act=True, static_groups=True, damp=0.05)
    out = made.write(tmp_path / "out")
    quantization = json.loads((out / "quantize_config.json").read_text())
    assert json.loads((out / "config.json").read_text())["quantization_config"] == quantization
    meta = quantization.pop("meta")
    assert quantization == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,  # the groups are static, so every g_idx is trivial; meta tells the truth
        "sym": False,
        "lm_head": False,
        "checkpoint_format": "gptq_v2",
        "format": "gptq_v2",
        "pack_dtype": "int32",
        "true_sequential": True,
        "static_groups": True,
        "damp_percent": 0.05,
    }
    assert meta["quantizer"][0].startswith("gptqkit:")
    assert meta["gptqkit"] == made.config.to_dict()
    assert QuantizeConfig.from_dict(meta["gptqkit"]) == made.config


def test_act_order_is_declared_where_an_index_is_not_trivial(material: Make, tmp_path: Path) -> None:
    made = material(desc_act=True)
    name = "model.layers.1.mlp.down_proj"
    made.weights[name].group_index.copy_(made.weights[name].group_index.flip(0))
    checkpoint = open_checkpoint(made.write(tmp_path / "out"))
    assert checkpoint.desc_act
    assert [layer for layer, spec in checkpoint.layers.items() if spec.act_order] == [name]
    assert torch.equal(checkpoint.layer(name)["g_idx"], made.weights[name].group_index)


def test_config_json_serves_old_and_new_readers(material: Make, tmp_path: Path) -> None:
    made = material()
    plain = json.loads((made.write(tmp_path / "a") / "config.json").read_text())
    assert (plain["rope_theta"], plain["dtype"], plain["torch_dtype"]) == (50000.0, "float16", "float16")
    assert "rope_scaling" not in plain
    made.model_config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    scaled = json.loads((made.write(tmp_path / "b") / "config.json").read_text())
    assert scaled["rope_scaling"] == scaled["rope_parameters"]
    assert scaled["rope_theta"] == 5e5


def test_overrides_are_told_to_every_reader(material: Make, tmp_path: Path) -> None:
    overrides = {
        r"layers\.0\.mlp": ModuleOverride(skip=True),
        "q_proj": ModuleOverride(bits=8, group_size=64),
    }
    out = material(overrides=overrides).write(tmp_path / "out")
    quantization = json.loads((out / "quantize_config.json").read_text())
    assert quantization["dynamic"] == {
        r"-:^model\.layers\.(?:0)\.mlp\.down_proj$": {},
        r"+:^model\.layers\.\d+\.self_attn\.q_proj$": {"bits": 8, "group_size": -1},
    }
    assert quantization["modules_in_block_to_quantize"] == [["self_attn.q_proj", "mlp.down_proj"]]
    checkpoint = open_checkpoint(out)
    assert {name: (spec.bits, spec.group_size) for name, spec in checkpoint.layers.items()} == {
        "model.layers.0.self_attn.q_proj": (8, 64),
        "model.layers.1.self_attn.q_proj": (8, 64),
        "model.layers.1.mlp.down_proj": (4, 32),
    }
    assert "model.layers.0.mlp.down_proj.weight" in checkpoint.other_names


def test_shards_have_an_index_like_those_of_transformers(material: Make, tmp_path: Path) -> None:
    made = material()
    out = made.write(tmp_path / "out", max_shard_bytes=6000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    held = {name: file for file in files for name in load_file(out / file)}
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(out / file).values())
    single = open_checkpoint(made.write(tmp_path / "single"))
    sharded = open_checkpoint(out)
    assert [path.name for path in single.files] == ["model.safetensors"]
    for name in made.weights:
        assert torch.equal(single.quantized_weight(name).codes, sharded.quantized_weight(name).codes)


def test_nothing_private_is_written(material: Make, tmp_path: Path) -> None:
    made = material()
    made.report["model"] = str(tmp_path / "secret" / "small-model")
    made.report["perplexity"] = [
        {"dataset": str(tmp_path / "secret" / "text.txt"), "sequence_length": 8, "perplexity": 2.0, "tokens": 9}
    ]
    out = made.write(tmp_path / "out", generation_config={"_name_or_path": str(tmp_path), "eos_token_id": 2})
    for path in out.iterdir():
        if path.suffix in (".json", ".md"):
            assert str(tmp_path) not in path.read_text()
            assert "/home/somebody" not in path.read_text()
    report = json.loads((out / "quantization_report.json").read_text())
    assert (report["model"], report["perplexity"][0]["dataset"]) == ("small-model", "text.txt")


def test_the_report_is_strict_json(material: Make, tmp_path: Path) -> None:
    made = material()
    row = {"dataset": "books", "sequence_length": 8, "perplexity": float("inf"), "tokens": 9}
    made.report |= {"perplexity": [row], "modules": [{"name": "x", "layer": 0, "error": float("nan")}]}
    out = made.write(tmp_path / "out")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = json.loads((out / "quantization_report.json").read_text(), parse_constant=refuse)
    assert report["perplexity"][0]["perplexity"] is None
    assert "| books | 8 | 9 | not finite |" in (out / "README.md").read_text()


def test_measure_sees_the_complete_directory_and_adds_to_the_report(material: Make, tmp_path: Path) -> None:
    def measure(directory: Path) -> dict[str, Any]:
        assert directory.parent.parent == tmp_path
        assert not (tmp_path / "out").exists()
        assert open_checkpoint(directory).layers
        assert (directory / "generation_config.json").exists()
        return {"perplexity": [{"dataset": "books", "sequence_length": 64, "perplexity": 12.3456, "tokens": 640}]}

    out = material().write(tmp_path / "out", measure=measure, generation_config={"eos_token_id": 2})
    assert json.loads((out / "quantization_report.json").read_text())["perplexity"][0]["tokens"] == 640
    assert "| books | 64 | 640 | 12.346 |" in (out / "README.md").read_text()
    assert (out.stat().st_mode & 0o777) == (0o777 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_tokenizer_is_saved_without_where_it_came_from(material: Make, tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, save_directory: str) -> None:
            Path(save_directory, "tokenizer_config.json").write_text(
                '{"name_or_path": "/x", "is_local": true, "model_max_length": 5}'
            )

    out = material().write(tmp_path / "out", tokenizer=Tokenizer())
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"model_max_length": 5}


def test_existing_target_is_refused_unless_asked(material: Make, tmp_path: Path) -> None:
    made = material()
    out = made.write(tmp_path / "out")
    (out / "mark").touch()
    with pytest.raises(OutputExistsError, match="exists already"):
        made.write(out)
    assert (out / "mark").exists()
    made.write(out, overwrite=True)
    assert not (out / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_no_checkpoint_is_never_overwritten(material: Make, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").touch()
    with pytest.raises(OutputExistsError, match="something else than a quantized model"):
        material().write(precious, overwrite=True)
    assert (precious / "thesis.txt").exists()
    with pytest.raises(OutputExistsError, match="something else than a quantized model"):
        material().write(precious / "thesis.txt", overwrite=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ValueError("bug")])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failure_leaves_nothing_and_keeps_the_old(
    material: Make, tmp_path: Path, error: BaseException, existing: bool
) -> None:
    made = material()
    if existing:
        made.write(tmp_path / "out")
        (tmp_path / "out" / "mark").touch()

    def fail(directory: Path) -> dict[str, Any]:
        assert directory.parent.name == ".out.gptqkit-work"
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)):
        made.write(tmp_path / "out", overwrite=True, measure=fail)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existing else [])
    assert (tmp_path / "out" / "mark").exists() == existing


def test_a_failing_rename_brings_the_old_back(material: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = material()
    out = made.write(tmp_path / "out")
    (out / "mark").touch()
    rename = Path.rename

    def refuse_new(self: Path, target: Path) -> Path:
        if self.name == "checkpoint":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_new)
    with pytest.raises(OSError, match="Input/output error"):
        made.write(out, overwrite=True)
    assert (out / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_an_os_error(material: Make, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written|File too large"):
            material().write(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["self_attn.q_proj.qweight", "norm.weight"])
def test_a_byte_that_reads_back_differently_is_noticed(
    material: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    save_file = writer.save_file

    def corrupt(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        name = next(name for name in tensors if name.endswith(suffix))
        tensors[name] = tensors[name].clone()
        tensors[name].flatten()[3] += 1
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(writer, "save_file", corrupt)
    with pytest.raises(CheckpointError, match="reads back differently"):
        material().write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_zeros_that_version_1_cannot_hold_name_the_module(material: Make, tmp_path: Path) -> None:
    made = material(sym=False, format="gptq")
    made.weights["model.layers.1.mlp.down_proj"].zero[0, 0] = 0
    with pytest.raises(ConversionError, match=r"model\.layers\.1\.mlp\.down_proj: 1 of 192 zeros"):
        made.write(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tensors_given_twice_are_refused(material: Make, tmp_path: Path) -> None:
    made = material()
    made.other_tensors["lm_head.weight"] = made.other_tensors["model.embed_tokens.weight"]
    with pytest.raises(ShapeError, match=r"lm_head\.weight and model\.embed_tokens\.weight are one tensor"):
        made.write(tmp_path / "out")
    made = material()
    made.other_tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 96)
    with pytest.raises(ShapeError, match=r"down_proj\.weight was given beside the quantized"):
        made.write(tmp_path / "out")


def test_views_are_written_without_what_surrounds_them(material: Make, tmp_path: Path) -> None:
    made = material()
    whole = torch.randn(4, 8)
    made.other_tensors |= {"a.weight": whole[:2], "b.weight": whole[2:], "c.weight": torch.randn(8, 3).t()}
    checkpoint = open_checkpoint(made.write(tmp_path / "out"))
    for name in ("a.weight", "b.weight", "c.weight"):
        assert torch.equal(checkpoint.tensor(name), made.other_tensors[name])


def test_modules_may_share_a_group_index(material: Make, tmp_path: Path) -> None:
    made = material()
    name = "model.layers.0.self_attn.q_proj"
    made.weights["model.layers.0.self_attn.k_proj"] = made.weights[name]
    checkpoint = open_checkpoint(made.write(tmp_path / "out"))
    assert torch.equal(checkpoint.layer("model.layers.0.self_attn.k_proj")["g_idx"], made.weights[name].group_index)


def test_inputs_are_not_modified(material: Make, tmp_path: Path) -> None:
    made = material()
    model_config, report = json.dumps(made.model_config), json.dumps(made.report)
    codes = {name: weight.codes.clone() for name, weight in made.weights.items()}
    made.write(tmp_path / "out")
    assert (json.dumps(made.model_config), json.dumps(made.report)) == (model_config, report)
    assert all(torch.equal(codes[name], weight.codes) for name, weight in made.weights.items())
