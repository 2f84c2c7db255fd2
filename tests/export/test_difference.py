"""What differs between two checkpoints, in whatever formats, and nothing else."""

import dataclasses

import pytest
import torch

from gptqkit import convert, diff
from gptqkit.errors import CheckpointError

DOWN, QUERY = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"


def test_formats_make_no_difference(material, tmp_path):
    first = material(format="gptq_v2").write(tmp_path / "v2")
    for name in ("gptq", "awq", "compressed-tensors"):
        convert(first, tmp_path / name, format=name)
        assert diff(first, tmp_path / name) == []


def test_codes_scales_and_float_tensors_that_differ(material, tmp_path):
    made = material(sym=False)
    first = made.write(tmp_path / "first")
    before = made.weights[DOWN]
    codes = before.codes.clone()
    codes[3, 5] ^= 1
    made.weights[DOWN] = dataclasses.replace(before, codes=codes)
    query = made.weights[QUERY]
    doubled = query.scale.clone()
    doubled[0, 0] *= 2
    offset = -query.zero_point() * doubled
    made.weights[QUERY] = dataclasses.replace(query, scale=doubled, offset=offset)
    made.other_tensors["model.layers.0.norm.weight"] = torch.full((64,), 2.0)
    other_norm = made.other_tensors["model.layers.1.norm.weight"]
    made.other_tensors["model.layers.1.norm.weight"] = other_norm.half()  # the same values
    found = {each.name: each for each in diff(first, made.write(tmp_path / "second"))}
    assert other_norm.dtype == torch.float32
    assert found.keys() == {DOWN, QUERY, "model.layers.0.norm"}
    down = found[DOWN]
    assert (down.codes, down.scales) == (pytest.approx(1 / codes.numel()), 0)
    lost = (before.dequantize() - made.weights[DOWN].dequantize()).norm() / before.dequantize().norm()
    assert down.distance == pytest.approx(float(lost))
    assert down.first == down.second == "4 bits, groups of 32, asymmetric"
    assert (found[QUERY].codes, found[QUERY].scales) == (0, pytest.approx(1 / doubled.numel()))
    assert found["model.layers.0.norm"].distance == pytest.approx(1)


def test_layers_that_are_quantized_otherwise_or_missing(material, tmp_path):
    first = material().write(tmp_path / "first")
    made = material(overrides={"down_proj": {"bits": 8}, "layers.0.*q_proj": {"skip": True}})
    del made.other_tensors["model.layers.1.norm.weight"]
    found = {each.name: each for each in diff(first, made.write(tmp_path / "second"))}
    assert (found[DOWN].first, found[DOWN].second) == (
        "4 bits, groups of 32, symmetric",
        "8 bits, groups of 32, symmetric",
    )
    assert found[DOWN].codes is None
    assert found[QUERY].second == "float16 (64, 64)"
    assert found["model.layers.1.norm"].second is None

    other = material()
    other.weights = {f"other.{name}": weight for name, weight in other.weights.items()}
    other.other_tensors = {f"other.{name}": tensor for name, tensor in other.other_tensors.items()}
    with pytest.raises(CheckpointError, match="no layer in common"):
        diff(first, other.write(tmp_path / "other"))
