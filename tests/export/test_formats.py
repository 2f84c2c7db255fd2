"""awq, marlin and compressed-tensors, to the bit: against their definitions, written out with plain loops."""

import dataclasses
import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

import gptqkit
from gptqkit.errors import ArchitectureError, CheckpointError, ConfigError, ConversionError, ShapeError
from gptqkit.export.checkpoint import open_checkpoint
from gptqkit.export.convert import convert
from gptqkit.export.formats import Declared, LayerSpec, find_format
from gptqkit.quantizer.config import ModuleOverride
from support.jobs import contents
from support.models import build
from support.pipeline import quantize
from support.weights import random_weight, same


def int32(words):
    return torch.tensor(words).to(torch.int64).where(torch.tensor(words) < 2**31, torch.tensor(words) - 2**32).int()


def zero_points(weight):
    return (-weight.offset / weight.scale).round().long().tolist()


def awq(weight):
    """word c of a column = sum over i of x[8c + order[i]] << 4i, for codes along the outputs, and zeros alike."""

    def packed(rows):
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return [[sum(row[8 * c + order[i]] << 4 * i for i in range(8)) for c in range(len(row) // 8)] for row in rows]

    codes, zeros = weight.codes.T.tolist(), list(zip(*zero_points(weight), strict=True))
    return {"qweight": int32(packed(codes)), "qzeros": int32(packed(zeros)), "scales": weight.scale.T.half()}


def marlin(weight):
    """The permutations of Marlin's `Layer.pack` (IST-DASLab), one element at a time."""
    columns, rows = weight.in_features, weight.out_features
    codes, interleave, words = weight.codes.tolist(), [0, 2, 4, 6, 1, 3, 5, 7], []
    order = []
    for i in range(32):
        one = []
        for block in (0, 1):
            for row in (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4 + 4), 2 * (i % 4 + 4) + 1):
                one.append(16 * row + i // 4 + 8 * block)
        for j in range(4):
            order.extend(place + 256 * j for place in one)
    for tile_row in range(columns // 16):
        line = []
        for start in range(0, 16 * rows, 1024):
            for first in range(0, 1024, 8):
                word = 0
                for nibble in range(8):
                    at = start + order[first + interleave[nibble]]  # of the tiles of this row, one after the other
                    tile, inside = divmod(at, 256)
                    word |= codes[16 * tile + inside % 16][16 * tile_row + inside // 16] << 4 * nibble
                line.append(word)
        words.append(line)
    places = [i + 8 * j for i in range(8) for j in range(8)]
    if weight.group_size == columns:
        places = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    scales = weight.scale.T.half()
    permuted = [[row[first + place] for first in range(0, rows, len(places)) for place in places] for row in scales]
    return {
        "B": int32(words),
        "s": torch.stack([torch.stack(row) for row in permuted]),
        "workspace": torch.zeros(rows // 128 * 16, dtype=torch.int32),
    }


def compressed(weight):
    """Dense bit streams along the inputs, of zeros along the outputs; the last word is filled with zeros."""

    def stream(values):
        whole = sum(value << weight.bits * place for place, value in enumerate(values))
        return [whole >> 32 * word & 0xFFFFFFFF for word in range(-(-len(values) * weight.bits // 32))]

    tensors = {
        "weight_packed": int32([stream(row) for row in weight.codes.tolist()]),
        "weight_scale": weight.scale.half(),
        "weight_shape": torch.tensor([weight.out_features, weight.in_features]),
    }
    if not weight.sym:
        columns = [stream(column) for column in zip(*zero_points(weight), strict=True)]
        tensors["weight_zero_point"] = int32(columns).T
    if (weight.group_index.diff() < 0).any():
        tensors["weight_g_idx"] = weight.group_index
    return tensors


LAYOUTS = {"awq": awq, "marlin": marlin, "compressed-tensors": compressed}
WEIGHTS = [
    *(("awq", random_weight(group_size=size, zeros=(0, 15), sym=sym)) for size in (32, None) for sym in (False, True)),
    *(("marlin", random_weight(4, 256, columns, size, sym=True)) for columns, size in ((256, 128), (128, None))),
    *(
        ("compressed-tensors", random_weight(bits, *shape, size, zeros=(0, 2**bits - 1), **kind))
        for (bits, shape), (size, kind) in itertools.product(
            [(2, (64, 96)), (3, (64, 96)), (4, (40, 96)), (8, (64, 96)), (2, (5, 37)), (3, (35, 41)), (4, (9, 11))],
            [(32, {}), (8, {"sym": True}), (None, {}), (8, {"act_order": True})],
        )
    ),
]


def read(layout, tensors, weight):
    size = None if weight.group_size == weight.in_features else weight.group_size
    declared = Declared(format=layout, bits=weight.bits, group_size=size, sym=weight.sym, desc_act=False)
    spec = find_format(layout).spec("layer", tensors, declared)
    assert spec == LayerSpec.of(weight)
    return find_format(layout).unpack("layer", tensors, spec)


@pytest.mark.parametrize(("layout", "weight"), WEIGHTS)
def test_tensors_are_those_of_the_definition(layout, weight):
    find_format(layout).check(LayerSpec.of(weight))
    tensors, expected = find_format(layout).pack(weight), LAYOUTS[layout](weight)
    assert tensors.keys() == expected.keys()
    for key, tensor in tensors.items():
        assert tensor.is_contiguous()
        assert tensor.dtype == expected[key].dtype, key
        assert torch.equal(tensor, expected[key]), key
    assert same(read(layout, expected, weight), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, None])
def test_sizes_of_layers_are_known_before_they_are_made(bits, size):
    for name, sym, act_order in itertools.product((*FORMATS, "gguf"), (True, False), (True, False)):
        weight = random_weight(bits, 256, 128, size, sym=sym, act_order=act_order)
        layout, spec = find_format(name), LayerSpec.of(weight)
        try:
            layout.check(spec)
            tensors = layout.pack(weight)
        except (ConfigError, ConversionError):
            continue
        kind = next(iter(tensors)) if name == "gguf" else None
        assert layout.nbytes(dataclasses.replace(spec, type=kind)) == sum(each.nbytes for each in tensors.values())


def test_scales_of_other_programs_are_read_exactly():
    """llm-compressor writes bfloat16, and what that holds float16 may not."""
    for layout, key, weight in (
        ("awq", "scales", random_weight()),
        ("marlin", "s", random_weight(4, 256, 128, None, sym=True)),
        ("compressed-tensors", "weight_scale", random_weight(3)),
    ):
        rounded = dataclasses.replace(weight, scale=weight.scale.bfloat16().float() / 2**20)
        rounded = dataclasses.replace(rounded, offset=-weight.zero_point() * rounded.scale)
        tensors = find_format(layout).pack(weight)
        tensors[key] = tensors[key].bfloat16() / 2**20
        assert same(read(layout, tensors, weight), rounded)
        with pytest.raises(ConversionError, match=f"no float16 values, which {layout} files hold"):
            find_format(layout).pack(rounded)


def test_marlin_needs_no_workspace_and_symmetry_is_seen_in_the_zeros():
    weight = random_weight(4, 256, 128, None, sym=True)
    tensors = marlin(weight)
    del tensors["workspace"]
    assert same(read("marlin", tensors, weight), weight)
    asymmetric = random_weight()
    declared = Declared(format="awq", bits=4, group_size=32, sym=True, desc_act=False)
    spec = find_format("awq").spec("layer", awq(asymmetric), declared)
    assert not find_format("awq").unpack("layer", awq(asymmetric), spec).sym


FORMATS = ("gptq", "gptq_v2", "awq", "marlin", "compressed-tensors")


@pytest.mark.parametrize("sym", [True, False])
def test_every_format_converts_to_every_other_as_if_it_had_been_written_in_it(material, tmp_path, sym):
    """Layers, biases, other tensors, modules in floating point, configs, report and card: byte for byte."""
    formats = [name for name in FORMATS if sym or name != "marlin"]
    for name in formats:
        made = material(format=name, sym=sym, group_size=128, overrides={r"1\.mlp": ModuleOverride(skip=True)})
        shape = (256, 128) if sym else (64, 256)
        made.weights = {layer: random_weight(4, *shape, 128, sym=sym, seed=3) for layer in made.weights}
        made.other_tensors |= {f"{layer}.bias": torch.arange(shape[0]).half() for layer in made.weights}
        made.write(tmp_path / name, passthrough=["x"])
    for before, after in itertools.permutations(formats, 2):
        out = tmp_path / f"{before} to {after}"
        convert(tmp_path / before, out, format=after)
        assert contents(out) == contents(tmp_path / after), out.name


@pytest.mark.parametrize(
    ("weight", "target", "message"),
    [
        (random_weight(8), "awq", "awq holds 4-bit codes only, not 8-bit"),
        (random_weight(act_order=True), "awq", "awq has no g_idx to say so; quantize with static_groups"),
        (random_weight(4, 64, 96, 40), "awq", r"whole groups of 40 columns"),
        (random_weight(8), "marlin", r"not asymmetric 8-bit ones; compressed-tensors and gptq_v2 hold them$"),
        (random_weight(4, 512, 128, 128), "marlin", "symmetric 4-bit codes only, not asymmetric 4-bit"),
        (random_weight(4, 256, 128, 64, sym=True), "marlin", "groups of 128 columns or whole rows, not of 64"),
        (random_weight(4, 128, 128, 128, sym=True), "marlin", "needs multiples of 256 rows and 128 columns"),
        (random_weight(4, 256, 256, 128, sym=True, act_order=True), "marlin", "marlin has no g_idx"),
    ],
)
def test_conversions_that_are_refused_say_why_before_anything_is_written(material, tmp_path, weight, target, message):
    made = material(format="gptq_v2", bits=weight.bits, group_size=weight.group_size, sym=weight.sym)
    made.weights = {"model.layers.0.mlp.down_proj": weight}
    with pytest.raises(ConversionError, match=rf"^model\.layers\.0\.mlp\.down_proj: .*{message}"):
        convert(made.write(tmp_path / "source"), tmp_path / "out", format=target)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_formats_that_know_one_setting_refuse_mixed_ones(material, tmp_path):
    source = material(overrides={"down_proj": ModuleOverride(group_size=96)}).write(tmp_path / "source")
    with pytest.raises(ConversionError, match=r"groups of 96, and awq knows one setting for all modules"):
        convert(source, tmp_path / "awq", format="awq")
    convert(source, tmp_path / "compressed", format="compressed-tensors")
    convert(tmp_path / "compressed", tmp_path / "back", format="gptq_v2")
    assert {name: file for name, file in contents(tmp_path / "back").items() if name.endswith("safetensors")} == {
        "model.safetensors": (source / "model.safetensors").read_bytes()
    }


def test_act_order_of_some_layers_alone(material, tmp_path):
    """As where columns have their order already: such layers of compressed-tensors have no index, the others must."""
    made = material(format="compressed-tensors")
    for name in made.weights:
        if name.endswith("q_proj"):
            made.weights[name] = random_weight(4, 64, 64, 32, act_order=True)
    out = made.write(tmp_path / "out")
    found = open_checkpoint(out)
    assert all(same(found.weight(name), weight) for name, weight in made.weights.items())
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight_g_idx"]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight_g_idx is missing"):
        open_checkpoint(out)


@pytest.mark.parametrize("before", ["gptq_v2", "compressed-tensors"])
def test_whole_rows_are_one_setting_whatever_was_asked(material, tmp_path, before):
    made = material(format=before, group_size=96, overrides={"q_proj": ModuleOverride(group_size=64)})
    convert(made.write(tmp_path / "source"), tmp_path / "awq", format="awq")  # 64 and 96 columns
    found = open_checkpoint(tmp_path / "awq")
    assert found.quantization_config["group_size"] == -1
    assert all(same(found.weight(name), weight) for name, weight in made.weights.items())


def test_zero_points_that_the_declared_symmetry_denies(material, tmp_path):
    """Then the file says symmetric and its zeros do not; what is written from it says what they are."""
    made = material(sym=True)
    for name, weight in made.weights.items():
        made.weights[name] = dataclasses.replace(weight, offset=-5 * weight.scale)
    convert(made.write(tmp_path / "source"), tmp_path / "out", format="compressed-tensors")
    found = open_checkpoint(tmp_path / "out")
    assert not found.declared.sym
    assert {weight.zero_point().unique().item() for weight in map(found.weight, found.layers)} == {5}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"format": "awq", "bits": 3}, ConfigError, r"layers\.0\..*: awq holds 4-bit codes only"),
        ({"format": "awq", "desc_act": True}, ConfigError, "awq has no g_idx .* static_groups"),
        ({"format": "awq", "overrides": {"down_proj": {"bits": 8}}}, ConfigError, "down_proj: awq knows one setting"),
        ({"format": "awq", "overrides": {"down_proj": {"group_size": 16}}}, ConfigError, "awq knows one setting"),
        ({"format": "awq", "group_size": 60}, ArchitectureError, "64 columns are no whole groups of 60"),
        ({"format": "marlin", "group_size": 128}, ConfigError, "symmetric 4-bit codes only, not asymmetric"),
        ({"format": "marlin", "sym": True, "group_size": -1}, ArchitectureError, "multiples of 256 rows"),
        ({"format": "awq", "lm_head": True, "group_size": 48, "overrides": {"lay": {"skip": True}}}, ConfigError, "48"),
    ],
)
def test_settings_are_refused_before_any_work(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        quantize(build("qwen2"), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", [{"format": "awq"}, {"type": "q8_0", "group_size": 128, "sym": True}])
def test_plain_rounding_needs_no_index_in_whatever_order(tmp_path, settings):
    config = gptqkit.QuantizeConfig(**{"group_size": 32, **settings, "method": "rtn", "desc_act": True})
    if config.format == "awq":
        for name, ordered in (("plain", False), ("ordered", True)):
            quantize(build("qwen2"), tmp_path / name, method="rtn", desc_act=ordered, **settings)
        files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "ordered")]
        assert files[0] == files[1]


def test_what_marlin_cannot_hold_stays_in_floating_point(tmp_path):
    model = build("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    model = type(model)(model.config).eval()
    report = quantize(model, tmp_path / "out", grid="minmax", format="marlin", sym=True, group_size=128).report
    assert set(report.left_in_float) == {f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "kv"}
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu")
    weights = {
        name: open_checkpoint(tmp_path / "out").weight(name) for name in open_checkpoint(tmp_path / "out").layers
    }
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.dequantize()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_layers_that_contradict_their_config_are_named():
    weight = random_weight(3)
    declared = Declared(format="compressed-tensors", bits=3, group_size=32, sym=True, desc_act=False)
    spec = find_format("compressed-tensors").spec
    with pytest.raises(CheckpointError, match=r"layer\.weight_zero_point is there, but .* says symmetric"):
        spec("layer", compressed(weight), declared)
    padded = {**compressed(dataclasses.replace(weight, sym=True)), "weight_packed": torch.zeros(64, 10).int()}
    with pytest.raises(CheckpointError, match=r"layer\.weight_packed holds ten 3-bit codes a word, .* before 0\.18"):
        spec("layer", padded, declared)
    ordered = dataclasses.replace(declared, sym=False, desc_act=True)
    with pytest.raises(CheckpointError, match=r"layer\.weight_g_idx is missing; with act-order"):
        spec("layer", compressed(weight), ordered)


def test_checks_name_shapes_with_the_class_that_leaves_them_in_floating_point():
    with pytest.raises(ShapeError, match=r"\(60, 96\) is its shape, and awq needs a multiple of 8 rows"):
        find_format("awq").check(LayerSpec.of(random_weight(4, 60, 96, 32)))


def test_what_stands_outside_the_blocks_is_to_be_ignored(tmp_path):
    """Readers would quantize every Linear, those of a vision tower as well."""
    quantize(build("llava"), tmp_path / "out", method="rtn", format="compressed-tensors")
    found = open_checkpoint(tmp_path / "out")
    floats = {name.removesuffix(".weight") for name in found.other_names if found.tensor(name).ndim == 2}
    towers = {name for name in floats if "vision" in name and name.endswith("_proj")}
    assert len(towers) == 6 * 4
    assert towers < floats <= {*found.quantization_config["ignore"]}
