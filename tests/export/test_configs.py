"""The configs of awq, marlin and compressed-tensors: as their readers take them, and as other programs write them."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from gptqkit.errors import CheckpointError, ConversionError
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.convert import convert
from gptqkit.export.doctor import doctor
from gptqkit.export.formats import LayerSpec, declared_format, find_format
from gptqkit.export.inspect import inspect
from gptqkit.export.scaled import says_quantized
from gptqkit.quantizer.config import ModuleOverride, QuantizeConfig
from support.weights import random_weight, same

SKIP = ModuleOverride(skip=True)
PARTS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
EXPERTS = [f"mlp.experts.{number}.{part}" for number in (0, 1, 11) for part in ("gate_proj", "up_proj", "down_proj")]
NAMES = ["lm_head", *(f"model.layers.{block}.{inner}" for block in (0, 1, 10, 11) for inner in PARTS + EXPERTS)]
OUTSIDE = ["vision.layers.0.up_proj", "model.embed_tokens", *(f"model.layers.{n}.mlp.router" for n in (0, 1, 10, 11))]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def written(config, **kind):
    """The config of a checkpoint of these modules, and its layers."""
    own = {name: config.for_module(name) for name in NAMES if config.lm_head or name != "lm_head"}
    layers = {
        name: LayerSpec.of(random_weight(each.bits, group_size=each.group_size, sym=each.sym, **kind))
        for name, each in own.items()
        if each is not None
    }
    floats = [f"{name}.weight" for name in [*NAMES, *OUTSIDE] if name not in layers]
    return find_format(config.format).write_config(config, layers, floats), layers


def scheme(values, name):
    """The grid of a Linear as compressed-tensors finds it: exact targets, then patterns, then the class of modules."""

    def matches(targets):
        return any(re.match(each[3:], name) if each.startswith("re:") else each == name for each in targets)

    if matches(values["ignore"]):
        return None
    groups = list(values["config_groups"].values())
    found = [group for group in groups if matches(group["targets"])]
    return (found or [group for group in groups if "Linear" in group["targets"]])[0]["weights"]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {r"o_proj": SKIP},
        {r"self_attn\.(q|k|v)_proj": SKIP, r"experts\.1\.": SKIP},
        {r"layers\.1\.": ModuleOverride(bits=8), r"(gate|up)_proj": ModuleOverride(bits=3, group_size=-1)},
        {r"\.1\.self_attn": SKIP, r"lm_head": ModuleOverride(bits=8), r"down_proj": ModuleOverride(group_size=16)},
    ],
)
@pytest.mark.parametrize("head", [True, False])
def test_compressed_tensors_finds_the_grid_of_every_module(overrides, head):
    config = QuantizeConfig(group_size=32, overrides=overrides, lm_head=head, format="compressed-tensors")
    values, layers = written(config)
    declared = find_format("compressed-tensors").read_config(values, "here")
    for name in [*NAMES, *OUTSIDE]:
        found, spec = scheme(values, name), layers.get(name)
        assert (found is None) == (spec is None), name
        if spec is not None:
            size = None if spec.group_size == spec.in_features else spec.group_size
            assert (found["num_bits"], found["group_size"], found["symmetric"]) == (spec.bits, size, spec.sym)
            assert found["strategy"] == ("group" if size else "channel")
            assert declared.for_module(name) == (spec.bits, size, spec.sym)
    for block, (fused, parts) in ((block, item) for block in (0, 1, 10, 11) for item in FUSED.items()):
        stem = f"model.layers.{block}.{'self_attn' if fused == 'qkv_proj' else 'mlp'}"
        of_parts = [scheme(values, f"{stem}.{part}") for part in parts]
        if of_parts.count(of_parts[0]) == len(of_parts):  # vLLM and SGLang look them up by the name of the fused one
            assert scheme(values, f"{stem}.{fused}") == of_parts[0]


def test_the_config_of_a_plain_compressed_checkpoint():
    values, _ = written(QuantizeConfig(group_size=32, sym=False, format="compressed-tensors"))
    assert values.pop("meta")["quantizer"][0].startswith("gptqkit:")
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    rest = {"actorder": None, "dynamic": False, "block_structure": None, "observer": "minmax", "observer_kwargs": {}}
    assert values == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "vision.layers.0.up_proj", "model.embed_tokens", r"re:^model\.layers\.\d+\.mlp\.router$"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {**weights, **rest},
            }
        },
    }
    ordered, _ = written(QuantizeConfig(group_size=32, format="compressed-tensors"), act_order=True)
    assert ordered["config_groups"]["group_0"]["weights"]["actorder"] == "group"
    assert find_format("compressed-tensors").read_config(ordered, "here").desc_act


@pytest.mark.parametrize("overrides", [{}, {r"o_proj": SKIP}, {r"layers\.1\.": SKIP, r"experts\.11\.": SKIP}])
@pytest.mark.parametrize("head", [True, False])
def test_awq_leaves_alone_what_is_in_floating_point(overrides, head):
    config = QuantizeConfig(group_size=32, overrides=overrides, lm_head=head, format="awq")
    values, layers = written(config)
    assert values["lm_head"] == head
    listed = values["modules_to_not_convert"]
    for name in [*NAMES, *OUTSIDE]:
        assert should_convert_module(name, listed) == (name in layers), name
        assert any(part in name for part in listed) == (name not in layers), name  # vLLM looks for parts of names
        skipped = any(re.match(each[2:], name) for each in values.get("dynamic", {}))
        assert not (skipped and name in layers)  # GPTQModel; it looks at the blocks alone
        assert skipped or name in layers or name in ("lm_head", *OUTSIDE[:2])


def test_the_config_of_a_plain_awq_and_a_plain_marlin_checkpoint():
    config = QuantizeConfig(group_size=None, sym=False, format="awq")
    weight = LayerSpec.of(random_weight(group_size=None))
    values = find_format("awq").write_config(config, {"model.layers.0.x": weight}, ["model.embed_tokens.weight"])
    del values["meta"]
    assert values == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1,
        "zero_point": True,
        "version": "gemm",
        "format": "gemm",
        "sym": False,
        "desc_act": False,
        "lm_head": False,
        "modules_to_not_convert": ["model.embed_tokens", "lm_head"],
    }
    values = find_format("marlin").write_config(QuantizeConfig(format="marlin"), {"model.layers.0.x": weight}, [])
    assert declared_format(values, "here") == "marlin"
    assert (values["group_size"], values["sym"], values["checkpoint_format"]) == (128, True, "marlin")


# As found in files: AutoAWQ's, GPTQModel's (shortened), vLLM's two spellings, Marlin's own, AutoGPTQ's.
AUTOAWQ = {"quant_method": "awq", "zero_point": True, "group_size": 128, "bits": 4, "version": "gemm"}
GPTQMODEL = {
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": True,
    "quant_method": "awq",
    "format": "gemm",
    "zero_point": False,
    "version": "gemm",
    "checkpoint_format": "gemm",
    "pack_dtype": "int32",
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:7.5.0"]},
}
OLD_AWQ = {"zero_point": True, "q_group_size": -1, "w_bit": 4, "version": "GEMM", "quant_method": "awq"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (AUTOAWQ, ("awq", 4, 128, False, None)),
        ({**AUTOAWQ, "modules_to_not_convert": None}, ("awq", 4, 128, False, None)),
        ({**AUTOAWQ, "zero_point": False}, ("awq", 4, 128, True, None)),
        ({**AUTOAWQ, "modules_to_not_convert": ["visual", "lm_head"]}, ("awq", 4, 128, False, None)),
        (GPTQMODEL, ("awq", 4, 64, True, "gptqmodel:7.5.0")),
        (OLD_AWQ, ("awq", 4, None, False, None)),
        ({"quant_method": "marlin", "group_size": 128}, ("marlin", 4, 128, True, None)),
        (
            {"bits": 4, "group_size": -1, "desc_act": False, "sym": True, "is_marlin_format": True},
            ("marlin", 4, None, True, None),
        ),
    ],
)
def test_configs_of_other_programs(values, expected):
    declared = find_format(declared_format(values, "here")).read_config(values, "here")
    assert (declared.format, declared.bits, declared.group_size, declared.sym, declared.writer) == expected


def test_groups_that_gptqmodel_says_an_awq_module_has():
    """It packs codes for them beside scales of the common groups: such files fit no reading, and are to be refused."""
    declared = find_format("awq").read_config({**GPTQMODEL, "dynamic": {".*up_proj": {"group_size": 32}}}, "here")
    assert declared.for_module("model.layers.0.mlp.up_proj") == (4, 32, True)
    assert declared.for_module("model.layers.0.mlp.down_proj") == (4, 64, True)
    with pytest.raises(CheckpointError, match="dynamic must map"):
        find_format("awq").read_config({**GPTQMODEL, "dynamic": ["up_proj"]}, "here")


def llm_compressor(groups, **more):
    return {
        "config_groups": {
            f"group_{number}": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": targets,
                "weights": {
                    "actorder": "static",
                    "block_structure": None,
                    "dynamic": False,
                    "observer": "memoryless_minmax",
                    "observer_kwargs": {},
                    "scale_dtype": None,
                    "type": "int",
                    "zp_dtype": "torch.int8",
                    **weights,
                },
            }
            for number, (targets, weights) in enumerate(groups)
        },
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
        **more,
    }


W4 = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 128}
W8 = {"num_bits": 8, "symmetric": True, "strategy": "channel", "group_size": None}
W3 = {"num_bits": 3, "symmetric": True, "strategy": None, "group_size": 64}


def test_configs_of_llm_compressor_with_several_groups():
    groups = [
        (["re:.*down_proj$"], W8),
        (["Linear"], W4),
        (["re:.*layers.3.mlp"], W3),
        (["model.layers.3.mlp.up_proj"], W8),
    ]
    read = find_format("compressed-tensors").read_config
    declared = read(llm_compressor(groups), "here")
    assert (declared.bits, declared.group_size, declared.sym, declared.desc_act) == (4, 128, False, False)
    assert declared.for_module("model.layers.0.mlp.up_proj") == (4, 128, False)
    assert declared.for_module("model.layers.0.mlp.down_proj") == (8, None, True)
    assert declared.for_module("model.layers.3.mlp.up_proj") == (8, None, True)  # its own name counts first
    assert declared.for_module("model.layers.3.mlp.gate_proj") == (3, 64, True)
    assert declared.for_module("model.layers.3.mlp.up_proj_2") == (3, 64, True)
    ordered = read(
        llm_compressor([(["Linear"], {**W4, "actorder": "group"})], sparsity_config={"format": "dense"}), "x"
    )
    assert ordered.desc_act
    patterns = read(llm_compressor([(["re:.*q_proj$"], W8), (["re:.*"], W3)]), "here")
    assert (patterns.for_module("a.q_proj"), patterns.for_module("a.v_proj")) == ((8, None, True), (3, 64, True))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, "mlx"),
        ({"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}}, "mlx"),
        ({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}}, "bitsandbytes"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
        (
            {"quantization_config": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}},
            "modelopt",
        ),
        ({"compression_config": {"quantization_config": {"quant_method": "sparseml"}}}, "sparseml"),
        ({"quantization_config": {"quant_method": "exl2", "bits": 4.0, "head_bits": 6}}, "exl2"),
        ({"quantization_config": {"quant_method": "hqq", "quant_config": {}}}, "hqq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "version": "GEMV"}}, "awq, gemv"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}}, "bitblas"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
            "compressed-tensors, int-quantized",
        ),
    ],
)
def test_formats_that_are_not_read_are_named(tmp_path, config, name):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    assert says_quantized(tmp_path)
    for examine in (open_checkpoint, doctor):
        with pytest.raises(CheckpointError, match=f"the checkpoint format is '{name}'; gptq, .* are read here"):
            examine(tmp_path)


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_other_places_in_config_json(material, tmp_path, place):
    """llm-compressor's before 0.3, and that of composite models."""
    source = material(format="compressed-tensors").write(tmp_path / "source")
    (source / "quantize_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    values = config.pop("quantization_config")
    inside = values if place == "compression_config" else {"model_type": "llama", "quantization_config": values}
    (source / "config.json").write_text(json.dumps({**config, place: inside}))
    assert says_quantized(source)
    reasons = inspect(source).reader("transformers").reasons
    assert ("reads no compression_config" in " ".join(reasons)) == (place == "compression_config")
    assert inspect(source).reader("vLLM").loads
    convert(source, tmp_path / "out", format="gptq_v2")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization_config"]["quant_method"] == "gptq"
    assert written.get(place) == ({"model_type": "llama"} if place == "text_config" else None)


def test_the_config_beside_the_first_files_of_autoawq(material, tmp_path):
    source = material(format="awq", sym=False).write(tmp_path / "source")
    expected = open_checkpoint(source).weight("model.layers.0.mlp.down_proj")
    (source / "quantize_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config")
    (source / "config.json").write_text(json.dumps(config))
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (source / "quant_config.json").write_text(json.dumps(old))
    assert says_quantized(source)
    assert same(open_checkpoint(source).weight("model.layers.0.mlp.down_proj"), expected)
    convert(source, tmp_path / "out", format="gptq_v2")
    assert not (tmp_path / "out" / "quant_config.json").exists()  # GPTQModel would believe it first
    assert open_checkpoint(tmp_path / "out").declared.group_size == 32


def test_sparsity_that_is_dense():
    dense = {"format": "dense", "global_sparsity": 0.14, "ignore": ["lm_head"], "sparsity_structure": "unstructured"}
    read = find_format("compressed-tensors").read_config
    assert read(llm_compressor([(["Linear"], W4)], sparsity_config=dense), "here").group_size == 128
    with pytest.raises(CheckpointError, match="sparsity_config is set"):
        read(llm_compressor([(["Linear"], W4)], sparsity_config={**dense, "format": "sparse-24-bitmask"}), "here")


def test_shapes_and_scales_of_compressed_tensors_in_other_dtypes(material, tmp_path):
    """int32 shapes, as models have them that were loaded packed and saved again; scales of a model in float32."""
    source = material(format="compressed-tensors").write(tmp_path / "source")
    expected = open_checkpoint(source).weight("model.layers.0.mlp.down_proj")
    tensors = load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith(("weight_shape", "weight_scale")):
            tensors[name] = tensors[name].to(torch.int32 if "shape" in name else torch.float32)
    save_file(tensors, source / "model.safetensors")
    assert same(open_checkpoint(source).weight("model.layers.0.mlp.down_proj"), expected)
    convert(source, tmp_path / "out", format="gptq_v2")
    tensors["model.layers.0.mlp.down_proj.weight_scale"] += 1e-6
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ConversionError, match="scales are no float16 values"):
        convert(source, tmp_path / "other", format="gptq_v2")


def test_zero_points_as_compressed_tensors_stored_them_before_0_10(material, tmp_path):
    source = material(format="compressed-tensors", sym=False).write(tmp_path / "source")
    name = "model.layers.0.mlp.down_proj"
    expected, tensors = open_checkpoint(source).weight(name), load_file(source / "model.safetensors")
    tensors[f"{name}.weight_zero_point"] = (expected.zero_point() - 8).to(torch.int8)
    save_file(tensors, source / "model.safetensors")
    assert same(open_checkpoint(source).weight(name), expected)
    tensors[f"{name}.weight_zero_point"] = tensors[f"{name}.weight_zero_point"][:8]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weight_zero_point has shape \(8, 3\)"):
        open_checkpoint(source)


def test_what_is_not_read_of_a_config_is_no_damage(material, tmp_path):
    source = material().write(tmp_path / "source")
    for file in ("config.json", "quantize_config.json"):
        config = json.loads((source / file).read_text())
        (config.get("quantization_config") or config)["pack_dtype"] = "int16"
        (source / file).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"pack_dtype is 'int16'; only int32 words are read here$"):
        doctor(source)


def test_scales_of_activations_that_autoawq_leaves_in_some_models(material, tmp_path):
    source = material(format="awq").write(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.act.scales": torch.ones(96).half()}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mlp\.act\.scales divides activations"):
        open_checkpoint(source)
