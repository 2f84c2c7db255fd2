"""The page of a report: true to the numbers, whole without a network, and no text of a report is ever markup."""

import copy
import json
import random
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from gptqkit import cli
from support.jobs import contents

VOID = ("meta",)
HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src='http://x.invalid/a.png' onerror=alert(1)>",
    "</title></style></code></svg><h1 onclick='a()'>",
    "&lt;b&gt; &#60;i&#62; <!-- <![CDATA[",
    "' onload='alert(1)",
    "a \0 character",
    "javascript:alert(1) \u202e " + "x" * 500,
]


class Page(HTMLParser):
    """The elements of a page with the names of their attributes, and its text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts, self.shapes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.shapes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)

    def handle_comment(self, text):
        raise AssertionError(text)


def module(layer, name, error=0.1, rounding_error=0.2, tokens=640, prior_tokens=0):
    values = {"error": error, "rounding_error": rounding_error, "tokens": tokens, "prior_tokens": prior_tokens}
    return {"name": name, "layer": layer, **values}


def small_report(word="plain"):
    """Return a report with experts, in which every string that a file can choose has `word` in it."""
    modules = [module(layer, f"model.layers.{layer}.{word}.q_proj", 0.1, 0.1 * (layer + 1)) for layer in (0, 1, 2)]
    for expert, tokens in enumerate([640, 3, 90, 200]):
        for name in ("up_proj", "down_proj"):
            few = {"tokens": tokens, "prior_tokens": 64 - tokens if tokens < 64 else 0}
            modules.append(module(1, f"model.layers.1.mlp.experts.{expert}.{word}{name}", 0.3, 0.2, **few))
    modules.append(module(None, f"{word}_head", 0.05, None))
    return {
        "model": f"model {word}",
        "config": {
            "bits": 3,
            "group_size": None,
            "method": word,
            "overrides": {word: {"bits": 8, word: word}},
            word: word,
        },
        "versions": {"torch": word, word: "1"},
        "left_in_float": {word: word},
        "modules": modules,
        "perplexity": [{"dataset": word, "perplexity": 40.25, "kl_divergence": 0.0125, word: word}],
    }


@pytest.fixture
def draw(tmp_path, capsys):
    """Make a page and a picture of a report on the command line; return the exit code, both and the error."""

    def run(report):
        (tmp_path / "quantization_report.json").write_text(json.dumps(report))
        code = cli.main(["report", str(tmp_path), "--svg", str(tmp_path / "map.svg")])
        error = capsys.readouterr().err
        if code:
            return code, None, None, error
        page = (tmp_path / "quantization_report.html").read_bytes().decode()
        return code, Page(page), (tmp_path / "map.svg").read_text(encoding="utf-8"), error

    return run


def cells(page):
    """Return the colours of a heat map, and how deep they are."""
    return [(shape["class"], float(shape["fill-opacity"])) for tag, shape in page.shapes if tag == "rect"]


@pytest.mark.parametrize("option", ["--html", "--svg"])
@pytest.mark.parametrize("name", ["missing/file.svg", "folder.svg"])
def test_what_cannot_be_written_is_refused_before_anything_is(option, name, draw, tmp_path, capsys):
    assert draw(small_report())[0] == 0
    (tmp_path / "quantization_report.html").unlink()
    (tmp_path / "folder.svg").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path), option, str(tmp_path / name)])
    assert stopped.value.code == 2
    said = f"{option}: {tmp_path / name} cannot be written; give a file, in a folder that exists\n"
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_the_page_of_a_quantized_model_shows_its_numbers(example_model, small_text, tmp_path, capsys):
    text, out, page = tmp_path / "small.txt", tmp_path / "out", tmp_path / "page.html"
    text.write_text(small_text[:800], encoding="utf-8", newline="")
    command = ["quantize", str(example_model), str(out), "--calibration", str(text), "--samples", "2", "--skip"]
    how = ["--sequence-length", "64", "--device", "cpu", "--evaluate-on", str(text), "--bits", "2", "--quality", "fast"]
    assert cli.main([*command, "layers.[1-5].", *how]) == 0
    assert cli.main(["report", str(out), "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"written to {page}\n")
    report = json.loads((out / "quantization_report.json").read_text(encoding="utf-8"))
    found = Page(page.read_text(encoding="utf-8"))
    assert f"{report['perplexity'][0]['perplexity']:.4g}" in found.texts
    assert len(report["modules"]) == 7
    for each in report["modules"]:
        kind = each["name"].partition(f".{each['layer']}.")[2]
        ratio = each["error"] / each["rounding_error"]
        note = f"block {each['layer']}, {kind}: {each['error']:.4g}, plain rounding {each['rounding_error']:.4g}"
        assert f"{note} ({ratio:.2f} x)" in found.texts
    assert not [element for element in found.elements if element[0] in ("script", "link", "img", "iframe", "object")]
    assert not {"src", "href", "srcset", "data"} & {name for _, names in found.elements for name in names}
    assert not re.search(r"url\(|@import|https?:", page.read_text(encoding="utf-8"))


def test_colours_say_how_much_better_or_worse_than_plain_rounding(draw):
    rows = [module(n, f"h.{n}.fc", e, 0.2) for n, e in enumerate([0.1, 0.2, 0.4, 0, 0.3])]
    _, page, picture, _ = draw({"modules": rows})
    found = Page(picture)
    assert cells(page) == cells(found) == [("gain", 0.5), ("loss", 0), ("loss", 0.5), ("gain", 1), ("loss", 0.33)]
    assert {"error: blue below plain rounding, orange above", *"01234"} <= set(found.texts)


def test_lines_are_the_means_of_the_blocks(draw):
    report = {
        "modules": [module(n, f"h.{n}.{name}", e, 0.4) for n in (0, 7) for name, e in (("a", 0.1), ("b", 0.1 + n / 35))]
    }
    _, page, _, _ = draw(report)
    lines = [shape["d"] for tag, shape in page.shapes if tag == "path" and re.fullmatch(r"line line\d", shape["class"])]
    ours, rounding = [
        [tuple(map(float, xy.split())) for xy in d[1:].split("L")[1:]] for d in lines if d.count("L") == 2
    ]
    ticks = [float(shape["y"]) for tag, shape in page.shapes if tag == "text" and shape.get("text-anchor") == "end"]
    zero, step = ticks[0], (ticks[0] - ticks[1]) / 0.1
    assert [(zero - y) / step for _, y in ours] == pytest.approx([0.1, 0.2], abs=2e-3)
    assert [(zero - y) / step for _, y in rounding] == pytest.approx([0.4, 0.4], abs=2e-3)


def test_experts_are_one_kind_and_those_with_few_tokens_are_named(draw):
    _, page, _, _ = draw(small_report())
    text = " ".join(page.texts)
    assert "block 1, mlp.experts.*.plainup_proj, mean of 4: 0.3, plain rounding 0.2 (1.50 x)" in text
    assert "1 of 4 experts got fewer tokens" in text
    order = re.findall(r"model\.layers\.1\.mlp\.experts\.(\d) (\d+)", text)
    assert order == [("1", "3"), ("2", "90"), ("3", "200"), ("0", "640")]
    assert "one group per row" in text
    assert {"kl divergence", "40.25", "0.0125"} <= set(page.texts)


def test_what_was_not_measured_is_left_out(draw, tmp_path):
    report = {"config": {"bits": 4}, "modules": [module(0, "h.0.a", None, None, None)]}
    code, _, _, error = draw(report)
    assert code == 1
    assert "has no errors to draw" in error
    assert cli.main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "quantization_report.html").read_text(encoding="utf-8")
    assert "No errors were measured" in text
    assert not [word for word in ("None", "nan", "Perplexity", "experts") if word in text]


@pytest.mark.parametrize("word", HOSTILE)
def test_no_text_of_a_report_becomes_markup(draw, word):
    _, harmless, plain, _ = draw(small_report("z" * len(word)))
    code, page, picture, _ = draw(small_report(word))
    assert code == 0
    assert page.elements == harmless.elements
    assert sum(text.count(word) for text in page.texts) >= 12
    shapes = [[element.tag for element in ElementTree.fromstring(each).iter()] for each in (plain, picture)]
    assert shapes[0] == shapes[1]


def test_blocks_and_kinds_without_end_are_not_drawn(draw):
    blocks = [module(10**14 + n, f"h.{10**14 + n}.fc") for n in range(3000)]
    kinds = [module(10**14, f"h.{10**14}.{'x' * 3000}{n}") for n in range(3000)]
    _, page, picture, _ = draw({"modules": blocks + kinds})
    assert sum(tag == "rect" for tag, _ in page.elements) < 1000
    assert "5,425 more kinds of modules and blocks are not drawn." in page.texts
    assert len(picture) < 1 << 20


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("modules", {"a": 1}),
        ("modules", [3]),
        ("modules", [{"name": 5}]),
        ("modules", [{"error": "0.1"}]),
        ("modules", [{"error": True}]),
        ("modules", [{"error": float("nan")}]),
        ("modules", [{"rounding_error": -1}]),
        ("modules", [{"layer": 10**400}]),
        ("modules", [{"tokens": 1.5}]),
        ("config", []),
        ("perplexity", ["40"]),
        ("perplexity", [{"perplexity": [40]}]),
        ("versions", "2.0"),
        ("model", ["a"]),
        ("left_in_float", 3),
    ],
)
def test_a_damaged_report_is_one_line_that_names_the_file(draw, key, value):
    code, _, _, error = draw({**small_report(), key: value})
    assert code == 1
    assert re.fullmatch(r"gptqkit: error: \S+quantization_report\.json has .+; fetch it again\n", error)


def test_reports_with_anything_in_them_are_drawn_or_refused(draw):
    chosen = random.Random(0)
    odd = [None, True, -1, 0, 1e300, 10**30, float("inf"), "", "<b>", [], {}, [[[]]], {"a": {"b": []}}]
    codes = []
    for _ in range(150):
        report = copy.deepcopy(small_report())
        for _ in range(chosen.randint(1, 3)):
            place = report
            while True:
                key = chosen.choice(list(place) if isinstance(place, dict) else range(len(place)))
                if not place[key] or not isinstance(place[key], (dict, list)) or chosen.random() < 0.2:
                    place[key] = chosen.choice(odd)
                    break
                place = place[key]
        code, _, _, error = draw(report)
        assert error.count("\n") == code
        codes.append(code)
    assert set(codes) == {0, 1}


def test_a_link_that_came_with_a_checkpoint_is_replaced_and_not_followed(draw, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "quantization_report.html").symlink_to(tmp_path / "mine.txt")
    assert draw(small_report())[0] == 0
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_picture_is_called_what_it_is(draw, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(small_report())
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path), "--svg", "map.png"])
    assert stopped.value.code == 2
    assert "--svg: 'map.png' is no name of an SVG, which is what is drawn; end it in .svg" in capsys.readouterr().err
    assert not (tmp_path / "map.png").exists()


def test_page_and_picture_are_two_files(draw, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(small_report())
    before = contents(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["report", str(tmp_path), "--html", "q.svg", "--svg", "./q.svg"])
    assert stopped.value.code == 2
    assert "cannot be both page and picture; give --svg another file" in capsys.readouterr().err
    assert contents(tmp_path) == before


def test_no_report_is_one_line(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 1
    assert re.fullmatch(r"gptqkit: error: .*quantization_report\.json is missing; .*\n", capsys.readouterr().err)
