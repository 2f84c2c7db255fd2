"""The JSON that readers look at: what they need stands there, and they understand the patterns as they are meant."""

import re

import pytest

from gptqkit.errors import CheckpointError
from gptqkit.export.formats import LayerSpec, declared_format
from gptqkit.export.gptq_config import read_config, write_config
from gptqkit.quantizer.config import ModuleOverride, QuantizeConfig
from support.weights import random_weight

PLAIN = {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "sym": True, "true_sequential": True}


def specs(config, names, shape=(64, 96)):
    """The layers of a checkpoint, and the matrices that `config` leaves in floating point."""
    own = {name: config.for_module(name) for name in names}
    layers = {
        name: LayerSpec.of(random_weight(each.bits, *shape, each.group_size, sym=each.sym))
        for name, each in own.items()
        if each is not None
    }
    floats = [f"{name}.weight" for name in names if name not in layers]
    return layers, [*floats, "model.embed_tokens.weight"]


def test_json_of_a_plain_checkpoint():
    config = QuantizeConfig(group_size=32, sym=False, desc_act=True, static_groups=True, damp_percent=0.05)
    values = write_config(config, *specs(config, ["model.layers.0.mlp.up_proj"]))
    meta = values.pop("meta")
    assert values == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,  # the groups are static, so every g_idx is trivial; meta tells the settings
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
    assert QuantizeConfig.from_dict(meta["gptqkit"]) == config


def test_what_is_declared_comes_from_the_layers():
    config = QuantizeConfig(group_size=None, desc_act=True, format="gptq")
    names = ["model.layers.0.mlp.up_proj", "lm_head"]
    layers, floats = specs(config, names)
    values = write_config(config, layers, floats)
    assert (values["group_size"], values["format"], values["checkpoint_format"]) == (-1, "gptq", "gptq")
    assert (values["desc_act"], values["sym"], values["lm_head"]) == (False, True, True)
    config = QuantizeConfig(group_size=32, desc_act=True)
    layers["lm_head"] = LayerSpec.of(random_weight(act_order=True))
    values = write_config(config, layers, floats)
    assert (values["desc_act"], values["sym"]) == (True, False)


BLOCK = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
EXPERTS = [f"mlp.experts.{number}.{part}" for number in (0, 1, 11) for part in ("gate_proj", "up_proj", "down_proj")]
NAMES = ["lm_head", *(f"model.layers.{block}.{inner}" for block in (0, 1, 2, 10, 11) for inner in BLOCK + EXPERTS)]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def as_gptqmodel_reads(dynamic, name):
    """None where the module stays in floating point, else what differs from the common settings."""
    for pattern, rule in dynamic.items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
            return None if pattern.startswith("-:") else rule
    return {}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {r"layers\.1\.mlp\.up": ModuleOverride(skip=True)},
        {r"\.1\.self_attn\.[qkv]": ModuleOverride(bits=8)},
        {r"\.self_attn\.[qkv]": ModuleOverride(bits=8, group_size=-1)},
        {r"\.self_attn\.[qk]": ModuleOverride(skip=True)},
        {
            r"layers\.(0|11)\.": ModuleOverride(skip=True),
            "o_proj": ModuleOverride(bits=2),
            "head": ModuleOverride(bits=8),
        },
        {r"experts\.1\.": ModuleOverride(bits=3), r"experts\.11\.(gate|up)": ModuleOverride(skip=True)},
        {"experts": ModuleOverride(group_size=96), "_proj$": ModuleOverride(bits=8)},
    ],
)
def test_overrides_are_told_to_every_reader(overrides):
    config = QuantizeConfig(group_size=32, overrides=overrides, lm_head=True)
    layers, floats = specs(config, NAMES)
    values = write_config(config, layers, floats)
    dynamic = values.get("dynamic", {})
    assert bool(dynamic) == bool(overrides)
    declared = read_config(values, "here")
    found = {}
    for name in NAMES:
        rule = as_gptqmodel_reads(dynamic, name)
        found[name] = rule and tuple(rule.values())
        assert (rule is None) == (name not in layers), name
        if rule is not None:
            spec = layers[name]
            bits, size = rule.get("bits", 4), rule.get("group_size", 32)
            assert (bits, 96 if size == -1 else size) == (spec.bits, spec.group_size), name
            assert declared.for_module(name)[0] == spec.bits  # as we read it ourselves
    for fused, parts in FUSED.items():  # vLLM and SGLang look modules up by the name of the fused ones
        for name in NAMES:
            stem, _, last = name.rpartition(".")
            kinds = [found[f"{stem}.{part}"] for part in parts] if last == parts[0] else []
            if kinds and kinds.count(kinds[0]) == len(kinds):
                rule = as_gptqmodel_reads(dynamic, f"{stem}.{fused}")
                assert (rule and tuple(rule.values())) == kinds[0]
    inner = {name.split(".", 3)[3] for name in layers if name != "lm_head"}
    skipped = {name for name in NAMES if name not in layers}
    listed = values.get("modules_in_block_to_quantize")  # what transformers looks at
    assert (listed is None) == (not skipped)
    assert listed is None or {name for group in listed for name in group} == inner


def test_files_without_overrides_are_not_told_any():
    config = QuantizeConfig(group_size=32)
    layers, _ = specs(config, ["model.layers.0.mlp.up_proj"])
    vision = ["vision.layers.0.up_proj.weight", "model.embed_tokens.weight"]  # not of the quantized blocks
    assert not {"dynamic", "modules_in_block_to_quantize"} & write_config(config, layers, vision).keys()


def test_dynamic_settings_hold_for_the_first_pattern_from_the_start_of_the_name():
    dynamic = {
        r"-:model\.layers\.0\.": {},
        r"o_proj": {"bits": 2},  # GPTQModel matches from the start: this hits nothing
        r".*\.3\..*o_proj": {"bits": 8, "group_size": -1, "sym": False},
        r"+:.*o_proj": {"bits": 3},
    }
    declared = read_config({**PLAIN, "dynamic": dynamic}, "here")
    assert declared.for_module("model.layers.3.self_attn.o_proj") == (8, None, False)
    assert declared.for_module("model.layers.4.self_attn.o_proj") == (3, 32, True)
    assert declared.for_module("model.layers.4.self_attn.q_proj") == (4, 32, True)
    for absent in (None, {}, False, []):
        assert read_config({**PLAIN, "dynamic": absent}, "here").for_module("x") == (4, 32, True)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "gptq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"method": "gptq", "format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq"}, "gptq"),
        ({"quant_method": "gptq", "checkpoint_format": None, "format": ""}, "gptq"),
        ({"quant_method": "awq", "format": "gptq"}, None),
        ({"quant_method": "gptq", "format": "gptq_v3"}, None),
        ({"format": "gptq", "is_marlin_format": True}, None),
    ],
)
def test_the_format_is_found_as_transformers_finds_it(values, name):
    if name is None:
        with pytest.raises(CheckpointError, match="gptq, gptq_v2 are read here"):
            declared_format(values, "here")
    else:
        assert declared_format(values, "here") == name
