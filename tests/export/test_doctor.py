"""Damaged files, made of formulas without our writer, are recognised, and what is written is what the original was."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit import cli, convert, doctor
from gptqkit.errors import CheckpointError, ConfigError, ConversionError, OutputExistsError
from gptqkit.export.checkpoint import open_checkpoint
from support.weights import gptq_tensors, random_weight, same, words

NAMES = tuple(f"model.layers.{block}.{inner}_proj" for block in range(2) for inner in ("mlp.down", "mlp.up"))
INDEX = "model.safetensors.index.json"
SHARD = "model-0000{}-of-00002.safetensors"
SWAPPED = [0x24924924, 0x92492492, 0x49249249]  # instead of 0x49249249, 0x92492492, 0x24924924
OFFSETS = torch.tensor([4] * 10 + [0] + [1] * 10 + [3] + [2] * 10)


@pytest.fixture
def write(tmp_path):
    """Write weights as AutoGPTQ or GPTQModel would; `change` makes other tensors of those of a layer, by suffix."""

    def make(weights, *, version=1, config=None, change=None, shards=1, beside=False):
        held = [{"model.norm.weight": torch.randn(64).half(), "model.embed_tokens.weight": torch.randn(8, 64)}, {}]
        for number, (name, weight) in enumerate(weights.items()):
            layer = {**gptq_tensors(weight, version=version), "bias": torch.randn(64).half()}
            layer = change(name, layer) if change else layer
            held[number * shards // len(weights)] |= {f"{name}.{key}": each for key, each in layer.items()}
        path = tmp_path / "damaged"
        path.mkdir()
        first = next(iter(weights.values()))
        size = -1 if first.group_size == first.in_features else first.group_size
        plain = {"bits": first.bits, "group_size": size, "sym": first.sym}
        plain |= {"desc_act": not first.trivial_group_index, "quant_method": "gptq", "damp_percent": 0.1}
        plain |= {} if version == 1 else {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}
        settings = {key: value for key, value in {**plain, **(config or {})}.items() if value is not None}
        inside = {} if beside else {"quantization_config": settings}
        (path / "config.json").write_text(json.dumps({"model_type": "llama", **inside}))
        if beside:
            (path / "quantize_config.json").write_text(json.dumps(settings))
        for number, tensors in enumerate(held[:shards], start=1):
            save_file(tensors, path / (SHARD.format(number) if shards > 1 else "model.safetensors"))
        where = {name: SHARD.format(number + 1) for number, tensors in enumerate(held) for name in tensors}
        if shards > 1:
            (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
        (path / "tokenizer.json").write_text("{}")
        return path

    return make


@pytest.fixture
def repair(tmp_path):
    """Repair a checkpoint; return the damage found, the new checkpoint and its tensors."""

    def run(path, **options):
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        found, out = doctor(path, tmp_path / "out", **options), tmp_path / "out"
        assert found.written
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        assert (out / "tokenizer.json").read_text() == "{}"
        assert doctor(out).damage == ()
        tensors = {name: each for file in out.glob("*.safetensors") for name, each in load_file(file).items()}
        return [str(each) for each in found.damage], open_checkpoint(out), tensors

    return run


def held(path):
    return {name: each for file in path.glob("*.safetensors") for name, each in load_file(file).items()}


def layers(bits=4, group_size=32, names=NAMES, **kind):
    return {name: random_weight(bits, 64, 96, group_size, seed=seed, **kind) for seed, name in enumerate(names)}


def assert_repaired(path, weights, repaired, tensors, *, version):
    """The weights of the originals, the other tensors of the damaged files, and what another writer makes of them."""
    assert repaired.declared.format == ("gptq", "gptq_v2")[version - 1]
    assert repaired.layers.keys() == weights.keys()
    before, expected = held(path), {}
    for name, weight in weights.items():
        assert same(repaired.weight(name), weight), name
        expected |= {f"{name}.{key}": each for key, each in gptq_tensors(weight, version=version).items()}
    assert tensors.keys() == expected.keys() | before.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected.get(name, before.get(name))), name
    for file in ("config.json", "quantize_config.json"):
        values = json.loads((repaired.path / file).read_text()) if (repaired.path / file).exists() else {}
        assert values.get("quantization_config", repaired.quantization_config) == repaired.quantization_config


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(
    ("layout", "bits"),
    [
        *((layout, bits) for layout in ("gptq", "gptq_v2", "compressed-tensors") for bits in (2, 3, 4, 8)),
        ("awq", 4),
    ],
)
def test_healthy_checkpoints_have_no_damage(material, tmp_path, capsys, layout, bits, sym):
    overrides = {} if layout == "awq" else {"q_proj": {"group_size": -1}}
    path = material(bits=bits, format=layout, sym=sym, overrides=overrides).write(tmp_path / "in")
    found = doctor(path, tmp_path / "out")
    assert (found.damage, found.written) == ((), False)
    assert bool(found.notes) == (layout.startswith("gptq") and not sym)
    assert not (tmp_path / "out").exists()
    assert cli.main(["doctor", str(path), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "no damage found"
    assert said[1:-1] == [f"note: {note}" for note in found.notes]
    assert said[-1].startswith(f"nothing written to {tmp_path / 'out'}")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_healthy_checkpoints_of_other_programs_have_no_damage(write, tmp_path, bits, version):
    """Act-order of some layers only, one group per row with desc_act, and zero points that tell nothing."""
    weights = layers(bits, sym=True, act_order=True)
    weights[NAMES[1]] = random_weight(bits, 64, 96, 32, sym=True)
    assert doctor(write(weights, version=version)).to_dict() == {"damage": (), "notes": (), "written": False}
    (tmp_path / "damaged").rename(tmp_path / "first")
    assert doctor(write(layers(bits, None, sym=True), version=version, config={"desc_act": True})).damage == ()
    (tmp_path / "damaged").rename(tmp_path / "second")
    found = doctor(write(layers(bits), version=version, config={"sym": True}))
    assert found.damage == ()
    assert "cannot be told from" in found.notes[0]


@pytest.mark.parametrize("borrowing", [True, False])
@pytest.mark.parametrize("target", [None, "gptq", "gptq_v2"])
def test_swapped_zeros_of_old_gptqmodel(write, repair, borrowing, target):
    """Its words less its constants (which lose a borrow), or the amounts that these are meant to take off."""
    weights = layers(3, sym=True)
    constants = torch.tensor(SWAPPED * 2).to(torch.int32)

    def swap(_, tensors):
        if borrowing:
            return {**tensors, "qzeros": words(torch.full((3, 64), 4), 3) - constants}
        return {**tensors, "qzeros": words((4 - OFFSETS).repeat(3, 2), 3)}

    path = write(weights, change=swap)
    with pytest.raises(CheckpointError, match="`gptqkit doctor` repair"):
        open_checkpoint(path).weight(NAMES[0])
    damage, repaired, tensors = repair(path, format=target)
    assert damage == [
        "3-bit zero points are those that GPTQModel before 7.0 shifted wrongly "
        f"(layers: 4, such as {NAMES[0]}); repair: they become 4"
    ]
    assert_repaired(path, weights, repaired, tensors, version=2 if target == "gptq_v2" else 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("target", [None, "gptq", "gptq_v2"])
def test_the_label_of_the_other_version(write, repair, bits, version, target):
    """The last layer is asymmetric: only the others tell which version it is of."""
    weights = layers(bits, sym=True)
    weights[NAMES[-1]] = random_weight(bits, 64, 96, 32, zeros=(1, 2**bits - 1))
    config = {"checkpoint_format": ("gptq_v2", "gptq")[version - 1], "format": None}
    config["dynamic"] = {f"+:{re.escape(NAMES[-1])}": {"sym": False}}
    path = write(weights, version=version, config=config, beside=bits in (2, 8))
    damage, repaired, tensors = repair(path, format=target)
    [line] = damage
    right, wrong = ("gptq", "gptq_v2")[version - 1], ("gptq_v2", "gptq")[version - 1]
    how = f"zero points are written for {wrong}" if target == wrong else f"the config becomes {right}"
    found = f"zero points are those of {right}, but the config says {wrong}"
    assert line == f"{found} (layers: 3, such as {NAMES[0]}); repair: {how}"
    assert_repaired(path, weights, repaired, tensors, version=version if target in (None, right) else 3 - version)


def test_single_layers_of_the_other_version(write, repair):
    weights = layers(sym=True)

    def mix(name, tensors):
        version = 2 if name == NAMES[2] else 1
        return {**tensors, "qzeros": gptq_tensors(weights[name], version=version)["qzeros"]}

    path = write(weights, change=mix)
    damage, repaired, tensors = repair(path)
    assert len(damage) == 1
    assert damage[0].endswith(f"(layers: 1, such as {NAMES[2]}); repair: zero points are written for gptq")
    assert_repaired(path, weights, repaired, tensors, version=1)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("static", [True, False, None])
def test_desc_act_that_contradicts_g_idx(write, repair, act_order, static):
    weights = layers(act_order=act_order)
    path = write(weights, version=2, config={"desc_act": not act_order, "static_groups": static})
    if static and not act_order:  # then groups are in order, whatever the order of columns was
        found = doctor(path)
        assert found.damage == ()
        assert "static_groups" in found.notes[-1]
        return
    damage, repaired, tensors = repair(path)
    found = "false, but groups are not" if act_order else "true, but all groups are"
    becomes = "true" if act_order else "false"
    assert damage == [f"desc_act is {found} in order (layers: 4, such as {NAMES[0]}); repair: it becomes {becomes}"]
    assert repaired.quantization_config["desc_act"] is act_order
    assert_repaired(path, weights, repaired, tensors, version=2)


SETTINGS = ("bits", "group_size", "desc_act", "sym")


@pytest.mark.parametrize("missing", [("bits", "desc_act"), ("group_size", "sym"), SETTINGS, None])
@pytest.mark.parametrize(
    ("bits", "group_size", "kind"),
    [(3, 40, {}), (4, 32, {"sym": True}), (2, None, {"sym": True}), (8, 32, {"act_order": True}), (4, 16, {})],
)
def test_settings_that_the_tensors_tell(write, repair, missing, bits, group_size, kind):
    """40 columns leave a shorter last group; without any config, the file is of version 1."""
    weights = layers(bits, group_size, **kind)
    lacking = dict.fromkeys(missing or ())
    path = write(weights, config=lacking)
    if missing is None:
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]
        (path / "config.json").write_text(json.dumps(config))
    damage, repaired, tensors = repair(path)
    size = -1 if group_size is None else group_size
    right = {"bits": bits, "group_size": size, "desc_act": "act_order" in kind, "sym": "sym" in kind}
    told = ", ".join(f"{key} is {str(right[key]).lower()}" for key in missing or SETTINGS)
    assert damage == [f"the quantization config lacks {', '.join(missing or SETTINGS)}; repair: {told}"]
    assert right.items() <= json.loads((repaired.path / "config.json").read_text())["quantization_config"].items()
    assert_repaired(path, weights, repaired, tensors, version=1)


def without_index(_, tensors):
    return {key: each for key, each in tensors.items() if key != "g_idx"}


def test_g_idx_is_written_where_groups_are_in_order(write, repair):
    weights = layers(4, 32, sym=True)
    path = write(weights, config={"group_size": None}, change=without_index)
    damage, repaired, tensors = repair(path)
    assert damage[0] == f"g_idx is missing (layers: 4, such as {NAMES[0]}); repair: it is written as k // group_size"
    assert damage[1:] == ["the quantization config lacks group_size; repair: group_size is 32"]
    assert_repaired(path, weights, repaired, tensors, version=1)


@pytest.mark.parametrize(
    ("desc_act", "found"),
    [(True, r"g_idx is missing; with act-order"), (None, "neither desc_act nor g_idx says in which order groups are")],
)
def test_an_order_of_groups_that_is_lost(write, tmp_path, desc_act, found):
    path = write(layers(), version=2, config={"desc_act": desc_act}, change=without_index)
    result = doctor(path, tmp_path / "out")
    assert (result.damage[0].repair, result.written, (tmp_path / "out").exists()) == (None, False, False)
    assert re.search(found, result.damage[0].what)


@pytest.mark.parametrize("index", ["missing", "swapped", "{", '{"weight_map": {"a": "../b"}}', "renamed"])
def test_an_index_that_does_not_fit_is_made_anew(write, repair, index):
    weights = layers(sym=True)
    path = write(weights, shards=2)
    assert doctor(path).damage == ()
    if index == "missing":
        (path / INDEX).unlink()
    elif index == "renamed":
        for number in (1, 2):
            (path / SHARD.format(number)).rename(path / f"part{number}.safetensors")
    elif index == "swapped":
        where = json.loads((path / INDEX).read_text())["weight_map"]
        swapped = {name: SHARD.format(1 if file == SHARD.format(2) else 2) for name, file in where.items()}
        (path / INDEX).write_text(json.dumps({"weight_map": swapped}))
    else:
        (path / INDEX).write_text(index)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
    damage, repaired, tensors = repair(path)
    assert damage == ["the index is missing or contradicts the files; repair: it is made anew"]
    assert_repaired(path, weights, repaired, tensors, version=1)


@pytest.mark.parametrize("index", [True, False])
def test_files_that_are_missing_cut_off_or_there_twice(write, tmp_path, index):
    path = write(layers(), shards=2)
    first, second = (path / SHARD.format(number) for number in (1, 2))
    if not index:
        (path / INDEX).unlink()
    content = second.read_bytes()

    def only_damage():
        result = doctor(path, tmp_path / "out")
        assert (result.written, (tmp_path / "out").exists(), result.damage[0].repair) == (False, False, None)
        [damage] = result.damage
        return damage.what

    second.write_bytes(content[:-1])
    assert re.search(rf"{second.name} is damaged or cut off", only_damage())
    second.unlink()
    assert "are in no file" in only_damage()
    second.write_bytes(content)
    (path / "copy.safetensors").write_bytes(content)
    if index:
        (path / INDEX).write_text((path / INDEX).read_text().replace(second.name, first.name))
    assert "in several files" in only_damage()
    for file in (first, second):
        file.write_bytes(b"")
    assert only_damage().count("is damaged or cut off") == 2


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_scales_that_are_no_numbers_or_zero(material, tmp_path, layout):
    """A scale of 0 is harmless where all codes are the zero point: then the weights were 0."""
    made = material(format=layout, sym=layout == "gptq")
    name = "model.layers.1.mlp.down_proj"
    weight = made.weights[name]
    weight.codes[5, 32:64] = weight.zero_point()[5, 1].to(torch.uint8)
    path = made.write(tmp_path / "in")
    key = f"{name}.{'weight_scale' if layout == 'compressed-tensors' else 'scales'}"
    tensors = load_file(path / "model.safetensors")
    scale = tensors[key] if layout == "compressed-tensors" else tensors[key].t()

    def found(row, value):
        before = scale[row, 1].clone()
        scale[row, 1] = value
        save_file(tensors, path / "model.safetensors")
        scale[row, 1] = before
        result = doctor(path, tmp_path / "out")
        assert not result.written
        return [(each.what, each.layers, each.example, each.repair) for each in result.damage]

    for value in (float("nan"), float("inf"), -float("inf")):
        assert found(5, value) == [("scales are NaN or infinite", 1, name, None)]
    assert found(6, 0) == [("scales are zero in groups whose codes are not", 1, name, None)]
    assert found(5, 0) == []


def test_several_kinds_of_damage_at_once(write, repair, capsys):
    weights = layers(3, sym=True)

    def spoil(name, tensors):
        tensors["qzeros"] = words((4 - OFFSETS).repeat(3, 2), 3)
        return without_index(name, tensors) if name == NAMES[1] else tensors

    config = {"desc_act": True, "static_groups": True, "sym": None, "bits": None, "model_file_base_name": "gptq_model"}
    path = write(weights, config=config, change=spoil, shards=2)
    (path / INDEX).unlink()
    assert cli.main(["doctor", str(path), "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"gptqkit: error: {path} is damaged; give OUT for a repaired copy\n"
    told = json.loads(captured.out)
    assert (len(told["damage"]), len(told["notes"]), told["written"]) == (4, 1, False)
    assert cli.main(["doctor", str(path), str(path.with_name("shell")), "--format", "gptq_v2"]) == 0
    *lines, note, last = capsys.readouterr().out.splitlines()
    assert note.startswith("note: desc_act is true")
    assert last == f"written to {path.with_name('shell')}"
    damage, repaired, tensors = repair(path, format="gptq_v2")
    assert damage == lines
    assert "model_file_base_name" not in repaired.quantization_config  # AutoGPTQ would look for no other file
    assert_repaired(path, weights, repaired, tensors, version=2)
    again = open_checkpoint(path.with_name("shell"))
    assert all(same(again.weight(name), weight) for name, weight in weights.items())


def test_our_own_report_and_card_follow(material, tmp_path):
    path = material(format="gptq_v2").write(tmp_path / "in")
    for file in ("config.json", "quantize_config.json"):
        (path / file).write_text((path / file).read_text().replace('format": "gptq_v2"', 'format": "gptq"'))
    convert(material(format="gptq_v2").write(tmp_path / "healthy"), tmp_path / "wanted", format="gptq")
    assert doctor(path, tmp_path / "out", format="gptq").written
    for file in (tmp_path / "wanted").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    (path / "quantization_report.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"^{path}/quantization_report\.json is not JSON"):
        doctor(path, tmp_path / "again")


def test_gguf_is_said_not_to_be_examined(tmp_path):
    (tmp_path / "model.gguf").touch()
    for checkpoint in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ConversionError, match=f"^{checkpoint} is GGUF, which is not examined"):
            doctor(checkpoint)


def test_what_is_refused(write, material, tmp_path, capsys, faulty_disk):
    path = write(layers(sym=True), config={"desc_act": True})
    with pytest.raises(ConfigError, match="choose one of gptq, gptq_v2"):
        doctor(path, format="awq")
    with pytest.raises(ConfigError, match="format is 'gptq', but nothing is to be written"):
        doctor(path, format="gptq")
    other = material(format="compressed-tensors").write(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{other} is compressed-tensors, which has one version"):
        doctor(other, tmp_path / "out", format="gptq")
    with pytest.raises(ConfigError, match=r"lies in the other|is the source itself"):
        doctor(path, path / "inside")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").touch()
    with pytest.raises(OutputExistsError):
        doctor(path, tmp_path / "there")
    faulty_disk("incomplete")
    assert cli.main(["doctor", str(path), str(tmp_path / "out")]) == 1
    assert re.search("reads back differently", capsys.readouterr().err)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["damaged", "other", "there"]
