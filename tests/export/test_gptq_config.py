"""The JSON that readers look at: what they need stands there, and they understand the patterns as they are meant."""

import re
from itertools import product

import pytest

from gptqkit.errors import CheckpointError
from gptqkit.export.formats import LayerSpec, declared_format
from gptqkit.export.gptq import read_config, write_config
from gptqkit.quantizer.config import ModuleOverride, QuantizeConfig
from support.weights import random_weight

SKIP = ModuleOverride(skip=True)
BLOCK = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
EXPERTS = [f"mlp.experts.{number}.{part}" for number in (0, 1, 11) for part in ("gate_proj", "up_proj", "down_proj")]
NAMES = ["lm_head", *(f"model.layers.{block}.{inner}" for block in (0, 1, 10, 11) for inner in BLOCK + EXPERTS)]
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def written(config, names=("model.layers.0.mlp.up_proj",), **kind):
    """The config of a checkpoint of these modules, and its layers."""
    own = {name: config.for_module(name) for name in names}
    layers = {
        name: LayerSpec.of(random_weight(each.bits, group_size=each.group_size, **{"sym": each.sym, **kind}))
        for name, each in own.items()
        if each is not None
    }
    others = ["vision.layers.0.up_proj.weight", "model.embed_tokens.weight"]  # not of the quantized blocks
    return write_config(config, layers, [*(f"{name}.weight" for name in names if name not in layers), *others]), layers


def test_json_of_a_plain_checkpoint():
    config = QuantizeConfig(group_size=32, sym=False, desc_act=True, static_groups=True, damp_percent=0.05)
    values, _ = written(config)
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
    values, _ = written(QuantizeConfig(group_size=None, format="gptq"), ["model.layers.0.mlp.up_proj", "lm_head"])
    assert (values["group_size"], values["format"], values["checkpoint_format"]) == (-1, "gptq", "gptq")
    assert (values["desc_act"], values["sym"], values["lm_head"]) == (False, True, True)
    values, _ = written(QuantizeConfig(group_size=32), act_order=True, sym=False)
    assert (values["desc_act"], values["sym"]) == (True, False)


def as_gptqmodel_reads(dynamic, name):
    """(bits, group size), or None where the module stays in floating point."""
    for pattern, rule in dynamic.items():
        if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
            return None if pattern.startswith("-:") else (rule.get("bits", 4), rule.get("group_size", 32))
    return 4, 32


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {r"layers\.1\.mlp\.up": SKIP},
        {r"\.1\.self_attn\.[qkv]": ModuleOverride(bits=8)},
        {r"\.self_attn\.[qkv]": ModuleOverride(bits=8, group_size=-1)},
        {r"\.self_attn\.[qk]": SKIP},
        {r"layers\.(0|11)\.": SKIP, "o_proj": ModuleOverride(bits=2), "head": ModuleOverride(bits=8)},
        {r"experts\.1\.": ModuleOverride(bits=3), r"experts\.11\.(gate|up)": SKIP},
        {"experts": ModuleOverride(group_size=96), "_proj$": ModuleOverride(bits=8)},
    ],
)
def test_overrides_are_told_to_every_reader(overrides):
    values, layers = written(QuantizeConfig(group_size=32, overrides=overrides, lm_head=True), NAMES)
    dynamic, declared = values.get("dynamic", {}), read_config(values, "here")
    assert bool(dynamic) == bool(overrides)
    kinds = {name: as_gptqmodel_reads(dynamic, name) for name in NAMES}
    for name, kind in kinds.items():
        spec = layers.get(name)
        size = None if spec is None else -1 if spec.group_size == 96 else spec.group_size
        assert kind == (None if spec is None else (spec.bits, size)), name
        assert spec is None or declared.for_module(name)[0] == spec.bits  # as we read it ourselves
    for fused, parts in FUSED.items():  # vLLM and SGLang look modules up by the name of the fused ones
        for stem in {name.rpartition(".")[0] for name in NAMES if name.endswith(parts[0])}:
            together = {kinds[f"{stem}.{part}"] for part in parts}
            assert len(together) > 1 or {as_gptqmodel_reads(dynamic, f"{stem}.{fused}")} == together
    listed = values.get("modules_in_block_to_quantize")  # what transformers looks at
    inner = {name.split(".", 3)[3] for name in layers if name != "lm_head"}
    assert listed is None if len(layers) == len(NAMES) else {name for group in listed for name in group} == inner


def as_vllm_builds(values, experts):
    """(bits, group size) of all experts of a layer, None for floating point: vLLM 0.32's get_moe_quant_method."""
    for pattern, rule in values.get("dynamic", {}).items():
        if pattern.startswith("-:"):
            if re.match(pattern.removeprefix("-:"), experts):
                return None
        elif re.match(pattern.removeprefix("+:"), experts):
            return rule.get("bits", values["bits"]), rule.get("group_size", values["group_size"])
    return values["bits"], values["group_size"]


def mixture(config, stem):
    """The config of a mixture with experts in blocks 1 and 11 of three, and all Linears, None for floating point."""
    parts = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}
    shapes = {f"model.layers.{block}.self_attn.o_proj": (96, 96) for block in (0, 1, 11)}
    shapes |= {f"model.layers.0.mlp.shared_experts.{part}": shape for part, shape in parts.items()}
    for block, expert, part in product((1, 11), (0, 1, 11), parts):
        shapes[f"model.layers.{block}.{stem}.{expert}.{part}"] = parts[part]
    own = {name: config.for_module(name) for name in shapes}
    layers = {
        name: LayerSpec.of(random_weight(each.bits, *shapes[name], each.group_size, sym=True))
        for name, each in own.items()
        if each is not None
    }
    values = write_config(config, layers, [f"{name}.weight" for name in shapes if name not in layers])
    return values, {name: layers.get(name) for name in shapes}


ROWS = ModuleOverride(group_size=-1)
COMMON = object()  # as all modules, so that nothing is said of the experts


@pytest.mark.parametrize("stem", ["mlp.experts", "block_sparse_moe.experts", "feed_forward.experts"])
@pytest.mark.parametrize(
    ("size", "overrides", "expected"),
    [
        (32, {}, {1: COMMON, 11: COMMON}),
        (32, {r"experts\.\d": ModuleOverride(bits=8)}, {1: (8, 32), 11: (8, 32)}),
        (32, {r"\.experts": SKIP}, {1: None, 11: None}),
        (32, {r"1\.\w+\.experts": SKIP, "o_proj": SKIP}, {1: None, 11: None}),
        (32, {r"\.1\.\w+\.experts": SKIP}, {1: None, 11: COMMON}),
        (32, {r"\.1\.\w+\.experts": ModuleOverride(bits=8), r"\.experts": ROWS}, {1: (8, 32), 11: (4, -1)}),
        (32, {r"\.experts": ModuleOverride(group_size=64)}, {1: (4, 64), 11: (4, 64)}),  # whole rows of w2
        (64, {}, {1: COMMON, 11: COMMON}),
        (64, {"w2": ROWS}, {1: COMMON, 11: COMMON}),
        (None, {}, {1: COMMON, 11: COMMON}),
        (None, {r"\.experts": ModuleOverride(group_size=32)}, {1: (4, 32), 11: (4, 32)}),
        (32, {r"experts\.1\.": SKIP, r"\.11\.\w+\.experts": ROWS}, {1: COMMON, 11: COMMON}),  # in neither are all alike
        (32, {"w2": ModuleOverride(bits=8)}, {1: COMMON, 11: COMMON}),
    ],
)
def test_vllm_builds_all_experts_of_a_layer_as_they_are(stem, size, overrides, expected):
    config = QuantizeConfig(group_size=size, overrides=overrides)
    values, linears = mixture(config, stem)
    declared, own = read_config(values, "here"), [each[2:] for each in values.get("dynamic", {}) if "experts(" in each]
    for block, kind in expected.items():
        experts = f"model.layers.{block}.{stem}"
        assert any(re.match(pattern, experts) for pattern in own) == (kind is not COMMON)
        built, read = as_vllm_builds(values, experts), declared.for_fused(experts)
        assert built == ((4, size or -1) if kind is COMMON else kind)
        assert built == (read and (read[0], read[1] or -1))  # what our own list of readers goes by
    others = [
        f"model.layers.0.{stem}",
        "model.layers.0.mlp.shared_experts",
        *(each for each in linears if stem not in each),
    ]
    assert not any(re.match(pattern, name) for pattern in own for name in others)
    for name, spec in linears.items():  # as GPTQModel looks up every Linear
        found = as_vllm_builds(values, name)
        assert (spec is None) == (found is None), name
        assert spec is None or spec.has(found[0], None if found[1] == -1 else found[1]), name
    assert len(own) <= 2  # of layers, not of experts


@pytest.mark.parametrize("stacks", [["gate_up_proj", "down_proj"], ["gate_up_proj"]])
def test_stacked_experts_in_floating_point_are_said_to_be_if_all_are(stacks):
    layers = {"model.layers.0.self_attn.o_proj": LayerSpec.of(random_weight(sym=True))}
    if len(stacks) == 1:
        layers |= {f"model.layers.0.mlp.experts.{n}.down_proj": LayerSpec.of(random_weight(sym=True)) for n in range(2)}
    matrices = [f"model.layers.0.mlp.experts.{name}" for name in stacks]
    values = write_config(QuantizeConfig(group_size=32), layers, matrices)
    assert as_vllm_builds(values, "model.layers.0.mlp.experts") == (None if len(stacks) == 2 else (4, 32))


def test_what_stands_for_fused_modules_is_the_first_pattern_of_either_sign():
    dynamic = {
        "-:.*mlp": {},
        r"+:.*\.1\.x": {"bits": 8},
        r"-:^.*\.1\.x$": {},
        r"-:a\.2\.x$": {},
        r"+:a\.2\.x$": {"bits": 8},
    }
    declared = read_config({"bits": 4, "group_size": 32, "dynamic": dynamic}, "here")
    found = {name: declared.for_fused(name) for name in ("a.0.mlp.x", "a.1.x", "a.2.x", "a.3.x")}
    assert found == {"a.0.mlp.x": None, "a.1.x": (8, 32, True), "a.2.x": None, "a.3.x": (4, 32, True)}
    assert declared.for_module("a.2.x") == (8, 32, True)  # a quantized layer is no module in floating point


def test_dynamic_settings_hold_for_the_first_pattern_from_the_start_of_the_name():
    plain = {"bits": 4, "group_size": 32}
    dynamic = {
        r"-:model\.layers\.0\.": {},
        r"o_proj": {"bits": 2},  # GPTQModel matches from the start: this hits nothing
        r".*\.3\..*o_proj": {"bits": 8, "group_size": -1, "sym": False},
        r"+:.*o_proj": {"bits": 3, "group_size": None},
    }
    declared = read_config({**plain, "dynamic": dynamic}, "here")
    assert declared.for_module("model.layers.3.self_attn.o_proj") == (8, None, False)
    assert declared.for_module("model.layers.4.self_attn.o_proj") == (3, 32, True)
    assert declared.for_module("model.layers.4.self_attn.q_proj") == (4, 32, True)
    for absent in (None, {}, False, []):
        assert read_config({**plain, "dynamic": absent}, "here").for_module("x") == (4, 32, True)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "gptq"),
        ({"method": "gptq", "format": "gptq_v2"}, "gptq_v2"),
        ({"quant_method": "gptq", "format": "gptq_v2", "checkpoint_format": "gptq"}, "gptq"),
        ({"quant_method": "gptq", "checkpoint_format": None, "format": ""}, "gptq"),
        ({"format": "gptq", "is_marlin_format": True}, "marlin"),
        ({"quant_method": "marlin", "group_size": 128}, "marlin"),
        ({"quant_method": "awq", "version": "GEMM"}, "awq"),
        ({"quant_method": "awq", "w_bit": 4}, "awq"),
        ({"quant_method": "awq", "format": "gptq"}, None),
        ({"quant_method": "awq", "version": "gemv_fast", "format": "gemm"}, None),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, None),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, None),
        ({"quant_method": "compressed-tensors"}, None),
    ],
)
def test_the_format_is_found_as_transformers_finds_it(values, name):
    if name is not None:
        assert declared_format(values, "here") == name
        return
    with pytest.raises(CheckpointError, match="gptq, gptq_v2, awq, marlin, compressed-tensors, gguf are read here"):
        declared_format(values, "here")
