"""Sources in FP8 and MXFP4 come to the same checkpoints as float models with the values that they stand for."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gptqkit.errors import CheckpointError
from gptqkit.export.scaled import FloatShards, says_quantized
from gptqkit.export.shards import Shards
from gptqkit.loading import load_float
from support.models import build, save
from support.pipeline import outputs, quantize

FP8 = torch.float8_e4m3fn


def scaled(path, tensors, tile=None, dtype=torch.float32):
    save_file(tensors, path / "x.safetensors")
    return FloatShards(Shards.of_files([path / "x.safetensors"]), dtype, tile)


def as_fp8(weight, rows, columns):
    """FP8 codes of a matrix, scales of its tiles, and the values that these stand for."""
    values, scales = torch.zeros_like(weight), []
    codes = torch.zeros(weight.shape, dtype=FP8)
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            tile = (slice(top, top + rows), slice(left, left + columns))
            scales.append(weight[tile].abs().max() / 448)
            codes[tile] = (weight[tile] / scales[-1]).to(FP8)
            values[tile] = codes[tile].float() * scales[-1]
    return codes, torch.stack(scales).view(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)), values


@pytest.mark.parametrize(
    ("rows", "columns", "suffix", "tile"),
    [
        (16, 16, "weight_scale_inv", [16, 16]),  # the last row of tiles has 8 rows, the last column 4 columns
        (20, 26, "weight_scale_inv", None),
        (40, 52, "weight_scale", None),
        (1, 52, "weight_scale", [128, 128]),
        (16, 16, "scale", [16, 16]),
    ],
)
def test_fp8_tensors_are_multiplied_by_their_scales(rows, columns, suffix, tile, tmp_path):
    weight = torch.randn(40, 52, generator=torch.Generator().manual_seed(3))
    codes, scales, values = as_fp8(weight, rows, columns)
    others = {"a.input_scale": torch.ones(1), "a.bias": torch.ones(40)}
    shards = scaled(tmp_path, {"a.weight": codes, f"a.{suffix}": scales, **others}, tile)
    assert sorted(shards.where) == ["a.bias", "a.weight"]
    assert torch.equal(shards.get("a.weight"), values)
    assert torch.equal(shards.mapped_anew(["a.weight"]).slice("a.weight")[...], values)


def test_one_scale_per_row_may_be_a_vector(tmp_path):
    codes, scales, values = as_fp8(torch.randn(40, 52, generator=torch.Generator().manual_seed(3)), 1, 52)
    shards = scaled(tmp_path, {"a.weight": codes, "a.weight_scale": scales.flatten()})
    assert torch.equal(shards.get("a.weight"), values)


def test_scales_that_are_powers_of_two(tmp_path):
    codes = torch.full((4, 64), 1.5).to(FP8)
    shards = scaled(tmp_path, {"a.weight": codes, "a.weight_scale_inv": torch.tensor([[124, 130]] * 4).byte()})
    assert torch.equal(shards.get("a.weight"), torch.tensor([1.5 / 8, 1.5 * 8]).repeat_interleave(32).expand(4, 64))


def test_what_has_no_scales_or_wrong_ones_is_named(tmp_path):
    codes = torch.zeros(4, 6).to(FP8)
    with pytest.raises(CheckpointError, match=r"a\.weight: stored as FP8 or FP4 without scales"):
        scaled(tmp_path, {"a.weight": codes})
    for shape in ((3, 2), (0, 2), (5,), (4, 7), (1, 1, 2)):
        shards = scaled(tmp_path, {"a.weight": codes, "a.weight_scale": torch.ones(shape)}, [0, 1])
        with pytest.raises(CheckpointError, match=r"a\.weight_scale is .* does not fit a\.weight"):
            shards.get("a.weight")
    with pytest.raises(CheckpointError, match="without scales"):
        scaled(tmp_path, {"e.down_proj_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)})


def test_an_fp8_model_becomes_what_its_values_become(tmp_path):
    tensors = save(build("deepseek_v3"), tmp_path / "float")
    fp8 = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            codes, scales, tensors[name] = as_fp8(tensor, 24, 24)
            fp8 |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    source = tmp_path / "fp8"
    source.mkdir()
    save_file({**tensors, **fp8}, source / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    method = {"quant_method": "fp8", "weight_block_size": [24, 24]}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    assert not says_quantized(source)
    for each in ("float", "fp8"):
        quantize(tmp_path / each, tmp_path / f"{each}-4bit", grid="minmax")
    expected, found = (load_file(tmp_path / f"{each}-4bit" / "model.safetensors") for each in ("float", "fp8"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    reference = outputs(load_float(tmp_path / "float", device="cpu")[0])
    torch.testing.assert_close(outputs(load_float(source, device="cpu")[0]), reference)
    groups = {"group_0": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [24, 24]}}}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    torch.testing.assert_close(outputs(load_float(source, device="cpu")[0]), reference)
    groups["group_1"] = {"weights": {"block_structure": [24, 48]}}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    with pytest.raises(CheckpointError, match=r"tiles of different sizes, \[\[24, 24\], \[24, 48\]\]"):
        load_float(source, device="cpu")
    (source / "config.json").write_text(json.dumps(config))  # then the size of tiles that do not divide is not known
    with pytest.raises(CheckpointError, match=r"weight_scale_inv is .* does not fit"):
        load_float(source, device="cpu")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"].to(FP8)}, source / "model.safetensors")
    for use in (load_float, lambda path: quantize(path, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight: stored as FP8 or FP4 without scales"):
            use(source)


def without(name):
    return lambda tensors: tensors.pop(name)


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()})


EXPERT = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without(f"{EXPERT}_scales"), rf"^{EXPERT}_blocks: stored as FP8 or FP4 without scales, .* fetch all files"),
        (without(f"{EXPERT}_blocks"), rf"lacks {EXPERT}; fetch its files again"),
        (cut(f"{EXPERT}_scales"), rf"{EXPERT}_scales is torch\.uint8 \(4, 63, 3\), .* does not fit {EXPERT}_blocks"),
    ],
)
def test_experts_of_which_half_is_missing_are_named(damage, message, tmp_path):
    tensors = save(build("gpt_oss"), tmp_path)
    for name in [each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inner, outer = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.zeros(count, outer, inner // 32, 16, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full((count, outer, inner // 32), 120, dtype=torch.uint8)
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    for use in (partial(load_float, device="cpu"), lambda path: quantize(path, tmp_path / "out", method="rtn")):
        with pytest.raises(CheckpointError, match=message):
            use(tmp_path)


def test_mxfp4_experts_become_what_transformers_makes_of_them(tmp_path):
    tensors = save(build("gpt_oss", num_hidden_layers=1), tmp_path / "float")
    mxfp4, generator = {}, torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, inner, outer = tensor.shape
            blocks = torch.randint(0, 256, (count, outer, inner // 32, 16), generator=generator).byte()
            scales = torch.randint(120, 125, (count, outer, inner // 32), generator=generator).byte()
            mxfp4 |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            mxfp4[name] = tensor
    save_file(tensors, tmp_path / "float" / "model.safetensors", {"format": "pt"})
    source = tmp_path / "mxfp4"
    source.mkdir()
    save_file(mxfp4, source / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "float" / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    for each in ("float", "mxfp4"):
        quantize(tmp_path / each, tmp_path / f"{each}-4bit", grid="minmax", sym=True)
    expected, found = (load_file(tmp_path / f"{each}-4bit" / "model.safetensors") for each in ("float", "mxfp4"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
