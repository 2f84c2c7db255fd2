"""A new format is one file and one entry of FORMATS, a new method one function and one entry of METHODS."""

import dataclasses
import json
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

import gptqkit
from gptqkit import cli
from gptqkit.errors import ArchitectureError, CheckpointError, ConfigError, ConversionError, ShapeError
from gptqkit.export.formats import FORMATS, Declared, Format, LayerSpec
from gptqkit.quantizer.gptq import solve_gptq
from gptqkit.quantizer.methods import METHODS, Method
from gptqkit.quantizer.quantized import QuantizedWeight
from support.models import build, samples, save

PARTS = {"dummy_codes": "codes", "dummy_scale": "scale", "dummy_offset": "offset", "dummy_group": "group_index"}


def any_float(scale, offset, bits):
    """Whatever float32 holds: scales need not be float16, offsets need not be multiples of them."""
    scale = scale.clamp(min=1e-6)
    return scale, scale * -(2 ** (bits - 1)) if offset is None else offset


def check(spec):
    if spec.bits == 3:
        raise ShapeError(f"dummy holds no 3-bit codes, for {spec.in_features} columns")
    if spec.bits == 8:
        raise ConfigError("dummy holds no 8-bit codes at all")


def write_config(config, layers, matrices):
    assert not {f"{name}.weight" for name in layers} & set(matrices)
    settings = {"wide": config.bits, "columns": config.group_size, "symmetric": config.sym}
    return {"quant_method": "dummy", "settings": settings}


def read_config(values, where):
    if "settings" not in values:
        raise CheckpointError(f"{where}: settings is missing")
    settings = values["settings"]
    return Declared(
        format="dummy",
        bits=settings["wide"],
        group_size=settings["columns"],
        sym=settings["symmetric"],
        desc_act=False,
    )


def spec_of(name, tensors, declared):
    bits, group_size, sym = declared.for_module(name)
    rows, columns = tensors["dummy_codes"].shape
    size = group_size or columns
    trivial = torch.equal(tensors["dummy_group"], (torch.arange(columns) // size).int())
    return LayerSpec(in_features=columns, out_features=rows, bits=bits, group_size=size, sym=sym, act_order=not trivial)


def unpack(name, tensors, spec):
    assert spec.in_features == tensors["dummy_codes"].shape[1], name
    parts = {part: tensors[suffix] for suffix, part in PARTS.items()}
    return QuantizedWeight(**parts, bits=spec.bits, group_size=spec.group_size, sym=spec.sym)


@pytest.fixture
def dummy(monkeypatch):
    """The format "dummy": plain uint8 codes, float32 scales and offsets, and a config unlike GPTQ's."""
    file = ModuleType("gptqkit.export.dummy")
    file.FORMAT = Format(
        suffixes=tuple(PARTS),
        snap=any_float,
        check=check,
        nbytes=lambda spec: spec.out_features * (spec.in_features + 8 * spec.groups) + 4 * spec.in_features,
        pack=lambda weight: {suffix: getattr(weight, part) for suffix, part in PARTS.items()},
        spec=spec_of,
        unpack=unpack,
        write_config=write_config,
        read_config=read_config,
    )
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(FORMATS, "dummy", "export.dummy:FORMAT")


def dequantized(path):
    """Every weight of a dummy checkpoint, from its tensors alone."""
    checkpoint = gptqkit.open_checkpoint(path)
    for name in checkpoint.layers:
        codes, scale, offset, group = (checkpoint.tensor(f"{name}.{suffix}") for suffix in PARTS)
        yield name, codes * scale[:, group.long()] + offset[:, group.long()]


@pytest.mark.parametrize(("method", "order"), [("rtn", {}), ("gptq", {}), ("gptq", {"desc_act": True})])
@pytest.mark.usefixtures("dummy")
def test_a_format_is_one_file_and_one_entry(tmp_path, method, order):
    model = build("qwen2")
    config = gptqkit.QuantizeConfig(method=method, format="dummy", group_size=32, sym=False, **order)
    text = None if method == "rtn" else gptqkit.Calibration(samples().input_ids, sequence_length=24)
    result = gptqkit.quantize(model, text, tmp_path / "out", config)
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu")
    weights = dict(dequantized(tmp_path / "out"))
    assert {module.name for module in result.report.modules} == weights.keys()
    for name, weight in weights.items():
        before = model.get_submodule(name).weight.detach()
        assert 0 < (weight - before).norm() / before.norm() < 0.2
        model.get_submodule(name).weight.data = weight
    ids = samples().input_ids
    with torch.no_grad():
        theirs = model(ids).logits
    assert torch.allclose(loaded(ids).logits, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert gptqkit.open_checkpoint(tmp_path / "out").layers.popitem()[1].act_order == bool(order)

    summary = gptqkit.inspect(tmp_path / "out")
    assert (summary.format, summary.bits, summary.group_sizes) == ("dummy", {4: 14}, {32: 14})
    assert [reader.name for reader in summary.readers if reader.loads] == ["gptqkit"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| format | dummy |" in card
    assert "gptqmodel" not in card


@pytest.mark.usefixtures("dummy")
def test_a_new_format_converts_from_and_to_the_others(tmp_path):
    config = gptqkit.QuantizeConfig(method="rtn", format="gptq", group_size=32, sym=False)
    passthrough = {"model.mtp.weight": torch.ones(3)}
    tensors = {**save(build("qwen2"), tmp_path / "float"), **passthrough}
    save_file(tensors, tmp_path / "float" / "model.safetensors", metadata={"format": "pt"})
    gptqkit.quantize(tmp_path / "float", None, tmp_path / "gptq", config)
    gptqkit.convert(tmp_path / "gptq", tmp_path / "dummy", format="dummy")
    declared = json.loads((tmp_path / "dummy" / "config.json").read_text())["quantization_config"]
    assert declared == {
        "quant_method": "dummy",
        "settings": {"wide": 4, "columns": 32, "symmetric": False},
        "meta": {"passthrough_tensors": list(passthrough)},
    }
    before, after = (gptqkit.open_checkpoint(tmp_path / name) for name in ("gptq", "dummy"))
    for name in before.layers:
        assert torch.equal(before.weight(name).dequantize(), after.weight(name).dequantize())
    gptqkit.convert(tmp_path / "dummy", tmp_path / "back", format="gptq")
    for file in (tmp_path / "gptq").glob("*.safetensors"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    for name in ("dummy", "back"):
        gptqkit.load(tmp_path / name, device="cpu")
    gptqkit.quantize(tmp_path / "float", None, tmp_path / "floats", dataclasses.replace(config, format="dummy"))
    with pytest.raises(ConversionError, match="no integer zero point"):
        gptqkit.convert(tmp_path / "floats", tmp_path / "lossy", format="gptq")


@pytest.mark.usefixtures("dummy")
def test_the_command_line_offers_a_new_format_and_its_checks_are_asked_first(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["convert", "--help"])
    assert "{gptq,gptq_v2,awq,marlin,compressed-tensors,gguf,dummy}" in capsys.readouterr().out
    config = gptqkit.QuantizeConfig(method="rtn", format="dummy", bits=3, group_size=32)
    with pytest.raises(ArchitectureError, match=r"model\.layers\.0\..*: dummy holds no 3-bit codes, for 64 columns"):
        gptqkit.quantize(build("qwen2"), None, tmp_path / "out", config)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\..*: dummy holds no 8-bit codes at all"):
        gptqkit.quantize(build("qwen2"), None, tmp_path / "out", dataclasses.replace(config, bits=8))


def test_a_method_is_one_function_and_one_entry(monkeypatch, tmp_path, capsys):
    def half_the_damping(weight, moments, config, snap):
        return solve_gptq(weight, moments, dataclasses.replace(config, damp_percent=config.damp_percent / 2), snap)

    file = ModuleType("gptqkit.quantizer.dummy")
    file.METHOD = Method(solve=half_the_damping, needs=frozenset({"hessian"}))
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(METHODS, "dummy", "quantizer.dummy:METHOD")
    results = {}
    for method, damping in (("dummy", 0.1), ("gptq", 0.05)):
        config = gptqkit.QuantizeConfig(method=method, damp_percent=damping, group_size=32)
        text = gptqkit.Calibration(samples().input_ids, sequence_length=24)
        results[method] = gptqkit.quantize(build("qwen2"), text, tmp_path / method, config).report
    found, expected = (gptqkit.open_checkpoint(tmp_path / method) for method in results)
    for name in expected.layers:
        assert torch.equal(found.weight(name).codes, expected.weight(name).codes)
    assert {module.damp_percent for module in results["dummy"].modules} == {0.05}
    assert {module.method for module in results["dummy"].modules} == {"dummy"}
    with pytest.raises(gptqkit.CalibrationError, match="'dummy' needs calibration"):
        gptqkit.quantize(build("qwen2"), None, tmp_path / "out", gptqkit.QuantizeConfig(method="dummy"))
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["quantize", "--help"])
    assert "--method {rtn,gptq,gptaq,qep,loaq,dummy}" in capsys.readouterr().out


@pytest.mark.parametrize("learn_iterations", [0, 2])
@pytest.mark.parametrize("needs", [{"hessian"}, {"hessian", "cross"}])
def test_a_method_is_given_what_it_needs_and_nothing_else(needs, learn_iterations, monkeypatch, tmp_path):
    """Of both models' inputs, too: learning, which compares them, asks for no more."""
    given = []

    def solve(weight, moments, config, snap):
        given.append(moments.cross)
        return solve_gptq(weight, moments, config, snap)

    file = ModuleType("gptqkit.quantizer.dummy")
    file.METHOD = Method(solve=solve, needs=frozenset(needs))
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(METHODS, "dummy", "quantizer.dummy:METHOD")
    settings = {"method": "dummy", "group_size": 32, "learn_iterations": learn_iterations, "lm_head": True}
    text = gptqkit.Calibration(samples().input_ids, sequence_length=24)
    report = gptqkit.quantize(build("qwen2"), text, tmp_path / "out", gptqkit.QuantizeConfig(**settings)).report
    assert len(given) == len(report.modules) == 15
    assert all((cross is not None) == ("cross" in needs) for cross in given)
    assert len(report.blocks) == (2 if learn_iterations else 0)
