"""Several checkpoints side by side: the numbers of `evaluate` and `inspect`, with one float model for all."""

import itertools
import json
import math
import re
import shutil
from xml.etree import ElementTree

import pytest

import gptqkit
from gptqkit import cli, comparing
from support import gguf_files

LENGTH = ["--sequence-length", "64", "--max-windows", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def checkpoints(example_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for bits in (4, 2):
        config = gptqkit.QuantizeConfig(bits=bits, method="rtn", overrides={"[2-5]": gptqkit.ModuleOverride(skip=True)})
        gptqkit.quantize(example_model, None, folder / f"b{bits}", config, run=gptqkit.Run(device="cpu"))
    return folder


@pytest.fixture
def text(small_text, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(small_text, encoding="utf-8", newline="")
    return path


SVG = "{http://www.w3.org/2000/svg}"


def drawn(picture):
    """The axes' names, where each named point stands by the ticks of both axes, and the boxes of the points' names."""
    root = ElementTree.fromstring(picture)
    texts = [
        (each.text, each.get("text-anchor"), float(each.get("x")), float(each.get("y")))
        for each in root.iter(f"{SVG}text")
    ]
    numbers = [each for each in texts if re.fullmatch(r"-?\d[\d.e+-]*", each[0])]
    across = sorted((x, float(text)) for text, anchor, x, _ in numbers if anchor == "middle")
    up = sorted((y, float(text)) for text, anchor, _, y in numbers if anchor == "end")

    def value(place, ticks):
        (first, low), *_, (last, high) = ticks
        part = (place - first) / (last - first)
        steps = {round(b[1] - a[1], 9) for a, b in itertools.pairwise(ticks)}
        if len(steps) == 1:
            return low + part * (high - low)
        return math.exp(math.log(low) + part * math.log(high / low))

    points = {}
    for each in root.iter(f"{SVG}circle"):
        points[each[0].text] = value(float(each.get("cx")), across), value(float(each.get("cy")), up)
    assert len(across) > 2
    assert len(up) > 2
    names = [each for each in texts if each not in numbers]
    boxes = []
    for text, anchor, x, y in names[2:]:
        left = x - 6.5 * len(text) * ["start", "middle", "end"].index(anchor) / 2
        boxes.append((left, y - 9, left + 6.5 * len(text), y + 2))
    return [each[0] for each in names[:2]], points, boxes, [each[0] for each in names[2:]]


def comparison(name, size, kl_divergence=None, perplexity=10.0):
    more = {"tokens": 8, "windows": 1, "sequence_length": 8, "stride": None, "seconds": 0.1}
    scores = gptqkit.Scores(perplexity=perplexity, kl_divergence=kl_divergence, **more)
    return gptqkit.Comparison(checkpoint=name, size=size, bits_per_weight=4.0, scores=scores)


@pytest.mark.parametrize("unit", [1, 10**6, 10**9])
def test_points_of_the_picture_stand_where_their_numbers_are(unit):
    """Also close neighbours, whose names do not meet, nor leave the picture or run into points."""
    values = {
        "w8": (8.5, 1e-3),
        "w4-g32": (5.1, 0.021),
        "w4-g128": (4.7, 0.026),
        "w4-gptq-of-a-long-name": (4.7, 0.031),
    }
    values |= {"w3": (3.8, 0.11), "w3-best": (3.8, 0.083), "w2": (2.9, 1.3), "w2-tuned": (2.95, 0.62)}
    found = [comparison(f"out/{name}", round(1000 * size) * unit, kl) for name, (size, kl) in values.items()]
    axes, points, boxes, names = drawn(gptqkit.comparison_svg(found))
    assert axes == [
        f"bytes of all tensors, {({1: 'k', 10**6: 'G', 10**9: 'T'})[unit]}B",
        "KL divergence, nats per token",
    ]
    for name, expected in values.items():
        assert points[name] == pytest.approx(expected, rel=0.01)
    assert names == list(values)
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert all(left >= 80 and right <= 720 for left, _, right, _ in boxes)

    found = [comparison(f"out/{name}", 1000 * unit * size, None, 10 + kl) for name, (size, kl) in values.items()]
    axes, points, *_ = drawn(gptqkit.comparison_svg(found))
    assert axes[1] == "perplexity"
    assert points == {name: pytest.approx((size, 10 + kl), rel=0.01) for name, (size, kl) in values.items()}


def test_any_values_and_names_are_drawn_as_text():
    hostile = [
        "</text><script>alert(1)</script>",
        "\"' onload='a()",
        "&lt; <![CDATA[ <!--",
        "\0 \x1b[31m \udc80 \u202e",
        "x" * 500,
    ]
    found = [comparison(name.replace("/", "|"), 1000 + number) for number, name in enumerate(hostile)]
    root = ElementTree.fromstring(gptqkit.comparison_svg(found))
    assert {each.tag.removeprefix(SVG) for each in root.iter()} == {"svg", "style", "path", "text", "circle", "title"}
    titles = [each.text for each in root.iter(f"{SVG}title")]
    assert titles[:3] == [name.replace("/", "|") for name in hostile[:3]]
    assert not re.search(r"url\(|@import|href|src=", gptqkit.comparison_svg(found))
    for size, value in ((0, 0.0), (1, -1e-9), (10**15, 1e300)):
        assert len(drawn(gptqkit.comparison_svg([comparison("same", size, value)] * 3))[2]) == 3
    same = drawn(gptqkit.comparison_svg([comparison("a/model", 1, 0.5), comparison("b/model", 2, 0.25)]))
    assert same[3] == ["a/model", "b/model"]
    for nothing in ([], [comparison("a", 1, float("nan"))]):
        with pytest.raises(gptqkit.ConfigError, match="nothing to draw"):
            gptqkit.comparison_svg(nothing)


@pytest.mark.parametrize("name", ["plot.png", "svg", "missing/plot.svg", "folder.svg"])
def test_a_picture_that_cannot_be_written_is_one_line_before_any_work(tmp_path, name, capsys):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare", "nowhere", "--dataset", "nothing.txt", "--plot", str(tmp_path / name)])
    assert stopped.value.code == 2
    helps = r"end it in \.svg|give a file, in a folder that exists"
    said = rf"gptqkit compare: usage error: argument --plot: .*; ({helps})\n.*\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_the_table_and_json_have_what_evaluate_and_inspect_say(
    checkpoints, example_model, text, monkeypatch, tmp_path, capsys
):
    loaded, load_float = [], comparing.load_float
    monkeypatch.setattr(comparing, "load_float", lambda *a, **k: loaded.append(a) or load_float(*a, **k))
    folders = [str(checkpoints / "b4"), str(checkpoints / "b2")]
    command = ["compare", *folders, "--dataset", str(text), *LENGTH]
    picture = tmp_path / "plot.svg"
    assert cli.main([*command, "--reference", str(example_model), "--json", "--plot", str(picture)]) == 0
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert re.findall(r"^evaluate (\w+): 2 of 2", output.err, re.MULTILINE) == ["b4", "b2"]
    assert output.err.endswith(f"written to {picture}\n")
    assert loaded == [(example_model,)]
    how = gptqkit.Evaluation(sequence_length=64, max_windows=2, device="cpu")
    for folder, row in zip(folders, answer["checkpoints"], strict=True):
        scores = gptqkit.evaluate(folder, text, how, reference=example_model).to_dict()
        assert row["checkpoint"] == folder
        for key in set(scores) - {"seconds"}:
            assert row[key] == pytest.approx(scores[key]), key
        stored = sum(file.stat().st_size for file in (checkpoints / folder).glob("*.safetensors"))
        assert row["size"] == pytest.approx(stored, rel=0.01)
        assert row["bits_per_weight"] == gptqkit.inspect(folder).bits_per_weight
    assert answer["checkpoints"][0]["kl_divergence"] < answer["checkpoints"][1]["kl_divergence"]

    axes, points, *_ = drawn(picture.read_bytes())
    assert axes == ["bytes of all tensors, MB", "KL divergence, nats per token"]
    for row in answer["checkpoints"]:
        assert points[row["checkpoint"][-2:]] == pytest.approx((row["size"] / 1e6, row["kl_divergence"]), rel=0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.svg", "text.txt"]

    assert cli.main([*command, "--reference", str(example_model)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", head) == [
        "checkpoint", "size", "bits per weight", "perplexity", "kl divergence", "top1 agreement"
    ]  # fmt: skip
    assert [line.split()[0] for line in lines] == [str(example_model), *folders]
    assert {len(line) for line in lines} == {len(head)}
    first = answer["checkpoints"][0]
    assert lines[0].split()[-3:] == [f"{first['reference_perplexity']:.5g}", "-", "-"]
    assert lines[1].split()[-2:] == [f"{first['kl_divergence']:.5g}", f"{first['top1_agreement']:.5g}"]

    assert cli.main(command) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[-1] == "perplexity"


WORDS = {
    "not quantized": "is not quantized",
    "neither quantized nor with a tokenizer": "is not quantized",
    "without a tokenizer": "has no tokenizer, which text needs; copy one there",
    "another model": "hidden_size is 256 and 64",
    "reference quantized": "is quantized",
}


@pytest.mark.parametrize("which", [*WORDS, "not there", "damaged"])
def test_what_cannot_be_compared_is_one_line_before_any_work(checkpoints, example_model, text, which, tmp_path, capsys):
    other, more = tmp_path / "other", []
    if which == "not quantized":
        other = example_model
    elif which == "reference quantized":
        other, more = checkpoints / "b2", ["--reference", str(checkpoints / "b2")]
    elif "tokenizer" in which:
        source = example_model if "quantized" in which else checkpoints / "b2"
        shutil.copytree(source, other, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    elif which != "not there":
        shutil.copytree(checkpoints / "b2", other)
        if which == "damaged":
            file = other / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
        else:
            config = json.loads((other / "config.json").read_text())
            (other / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    command = [
        "compare",
        *(str(checkpoints / name) for name in ("b4", "b2")),
        str(other),
        "--dataset",
        str(text),
        *LENGTH,
        *more,
    ]
    assert cli.main(command) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"gptqkit: error: .*{WORDS.get(which, '')}.*\n", error)
    assert str(other) in error


def test_several_models_in_python_need_one_at_least(text):
    with pytest.raises(gptqkit.ConfigError, match="no checkpoint to compare"):
        gptqkit.compare([], text)
    with pytest.raises(gptqkit.ConfigError, match=r"checkpoints is 'w4'; give a list, such as \['w4'\]"):
        gptqkit.compare("w4", text)
    with pytest.raises(
        gptqkit.ConfigError, match="a int is no model; give a folder, an id of the Hub, or a loaded model"
    ):
        gptqkit.evaluate(5, text)


def test_gguf_files_are_compared_with_folders_and_the_float_model(tmp_path):
    gguf_files.save(gguf_files.build("Mistral", **gguf_files.NARROW, sliding_window=None), tmp_path / "float")
    for out, config in (("gguf", {"type": "Q4_0"}), ("gptq", {"group_size": 32})):
        gptqkit.quantize(tmp_path / "float", None, tmp_path / out, {"method": "rtn", **config})
    gguf_files.save(gguf_files.build(**{**gguf_files.NARROW, "num_hidden_layers": 1}), tmp_path / "other")
    ids, how = gguf_files.tokens().input_ids, {"sequence_length": 24, "device": "cpu"}
    paths = [tmp_path / "gptq", tmp_path / "gguf" / "model.gguf", tmp_path / "gguf"]
    _, alone, folder = gptqkit.compare(paths, ids, how, reference=tmp_path / "float")
    assert alone.size == folder.size
    assert alone.scores.kl_divergence == folder.scores.kl_divergence
    with pytest.raises(gptqkit.ConfigError, match="num_hidden_layers is 2 and 1"):
        gptqkit.compare(paths[1:2], ids, how, reference=tmp_path / "other")
