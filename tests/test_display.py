"""Progress on a terminal is a bar, and one line per layer elsewhere; a report comes to a few lines."""

import dataclasses
import io
import itertools
import re
import sys
import time
import types
from contextlib import closing
from pathlib import Path

import pytest
import torch

import gptqkit
from gptqkit.display import ProgressDisplay, quantization_summary
from gptqkit.progress import Progress


def quantize_two_layers_and_a_head(display):
    for done in range(1, 6):
        where = {"layer": None if done == 5 else (done - 1) // 2, "module": f"module.{done}"}
        display(Progress(stage="quantize", done=done, total=5, error=0.1 * done, rounding_error=0.2 * done, **where))


def learn_two_layers(display):
    for layer in range(2):
        display(
            Progress(stage="quantize", done=layer + 1, total=2, layer=layer, module="m", error=0.1, rounding_error=0.2)
        )
        for done in range(1, 41):
            display(Progress(stage="learn", done=done, total=40, layer=layer))


def evaluate(display):
    for done in range(8, 1001, 8):
        display(Progress(stage="evaluate", done=done, total=1000))


def untimed(stream):
    return [re.sub(r", [\d.]+ s( \(about \d+ s left\))?$", "", line) for line in stream.getvalue().splitlines()]


TENTHS = [f"evaluate: {n} of 1000" for n in (104, 200, 304, 400, 504, 600, 704, 800, 904, 1000)]


@pytest.mark.parametrize(
    ("work", "lines"),
    [
        (
            quantize_two_layers_and_a_head,
            [
                "quantize: layer 0, 2 of 5, mean error 0.1500 (rounding 0.3000)",
                "quantize: layer 1, 4 of 5, mean error 0.3500 (rounding 0.7000)",
                "quantize: module.5, 5 of 5, mean error 0.5000 (rounding 1.0000)",
            ],
        ),
        (evaluate, TENTHS),
        (lambda display: [evaluate(display), evaluate(display)], TENTHS * 2),
    ],
)
def test_a_line_per_layer_and_ten_of_other_stages_without_a_terminal(work, lines):
    stream = io.StringIO()
    work(ProgressDisplay(stream))
    assert untimed(stream) == lines


def test_only_steps_whose_beginning_was_seen_are_timed(monkeypatch):
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = ProgressDisplay(stream)
    for done in (1, 2, 3):
        now[0] += 60
        display(Progress(stage="choose bits", done=done, total=3))
    first, second, _ = stream.getvalue().splitlines()
    taken, left = map(float, re.search(r"of 3, (.*) s \(about (.*) s left\)$", second).groups())
    assert (first, taken) == ("choose bits: 1 of 3", left)


def test_the_time_left_is_that_of_blocks_whose_first_step_takes_longest(monkeypatch):
    """A line is written when the next block's first step is done; resumed, the first block's is not seen."""
    stream, now = io.StringIO(), [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = ProgressDisplay(stream)
    for done in range(4, 16):
        now[0] += 60 if done % 3 == 1 else 2
        where = {"layer": (done - 1) // 3, "module": f"module.{done}", "error": 0.1, "rounding_error": 0.2}
        display(Progress(stage="quantize", done=done, total=15, **where))
    end = now[0]
    lines = re.findall(r"(\d+) of 15, .*, ([\d.]+) s(?: \(about (\d+) s left\))?", stream.getvalue())
    assert [done for done, *_ in lines] == ["6", "9", "12", "15"]
    for _, taken, left in lines:
        assert float(left or 0) == pytest.approx(end - 60 - float(taken), abs=1)


def test_a_line_of_what_a_block_learned_and_one_every_minute_meanwhile(monkeypatch):
    stream, now = io.StringIO(), itertools.count(0, 5)
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    learn_two_layers(ProgressDisplay(stream))
    lines = untimed(stream)
    assert [line for line in lines if not line.startswith("learn")] == [
        f"quantize: layer {layer}, {layer + 1} of 2, mean error 0.1000 (rounding 0.2000)" for layer in range(2)
    ]
    told = [line for line in lines if line.startswith("learn: layer 1")]
    assert told[-1] == "learn: layer 1, 40 of 40"
    assert 2 <= len(told) <= 5
    assert lines.index("learn: layer 0, 40 of 40") < lines.index(told[0])


def test_a_bar_stays_while_a_block_learns(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    with closing(ProgressDisplay(stream)) as display:
        learn_two_layers(display)
    assert "learning layer 1, 40 of 40" in stream.getvalue()
    assert "\n" not in stream.getvalue().rstrip("\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_work_goes_on_where_nothing_can_be_written(terminal):
    class Full(io.StringIO):
        def write(self, _):
            raise OSError("No space left on device")

        def isatty(self):
            return terminal

    with closing(ProgressDisplay(Full())) as display:
        quantize_two_layers_and_a_head(display)
        learn_two_layers(display)


def test_an_unfinished_layer_is_told_when_the_work_ends():
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    display(Progress(stage="quantize", done=1, total=2, layer=0, module="m"))
    assert stream.getvalue() == ""
    display.close()
    display.close()
    assert stream.getvalue() == "quantize: layer 0, 1 of 2\n"


def test_bars_on_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    display = ProgressDisplay(stream)
    quantize_two_layers_and_a_head(display)
    display(Progress(stage="write", done=1, total=1))
    display.close()
    text = stream.getvalue()
    assert "quantize: 100%" in text
    assert "module.5 error 0.5000, rounding 1.0000" in text
    assert "write: 100%" in text


def test_bars_in_a_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    stream = io.StringIO()
    display = gptqkit.ProgressDisplay(stream)
    evaluate(display)
    display.close()
    assert "evaluate: 100%" in stream.getvalue()


PLAIN = gptqkit.ModuleReport(
    name="plain",
    layer=0,
    shape=(64, 64),
    bits=4,
    group_size=32,
    error=None,
    rounding_error=None,
    worse_than_rounding=False,
    damp_percent=None,
    damp_escalations=0,
    dead_columns=0,
    seconds=1.0,
    method="rtn",
)
REPORT = gptqkit.QuantizationReport(
    model="model",
    config=gptqkit.QuantizeConfig(method="rtn"),
    samples=0,
    sequence_length=0,
    seed=0,
    tokens=0,
    excluded_samples=0,
    batch_size=1,
    block_weights=4096,
    quantized_weights=4096,
    device="cpu",
    seconds=12.5,
    versions={},
    modules=[PLAIN],
)

CHECKPOINT = types.SimpleNamespace(bits={4: 1}, bits_per_weight=4.5, packed_bytes=1024, other_bytes=512)


def test_a_summary_says_what_happened_and_nothing_else():
    assert [re.split("   +", line) for line in quantization_summary(REPORT, CHECKPOINT).splitlines()] == [
        ["modules", "1"],
        ["bits per weight", "4.5"],
        ["size", "1.50 KiB"],
        ["seconds", "12.5"],
    ]
    good = dataclasses.replace(PLAIN, name="good", error=0.02, rounding_error=0.03, damp_escalations=1)
    bad = dataclasses.replace(PLAIN, name="bad", error=0.05, rounding_error=0.04, worse_than_rounding=True)
    bad = dataclasses.replace(bad, tokens=3, prior_tokens=61, dead_columns=2)
    few = dataclasses.replace(bad, name="few", tokens=2, worse_than_rounding=False)
    happened = {
        "modules": [good, bad, few],
        "block_weights": 8192,
        "left_in_float": {"a": "it is odd", "b": "it is odd"},
        "excluded_samples": 1,
    }
    row = {"dataset": "book.txt", "perplexity": 12.3456789}
    several = types.SimpleNamespace(**{**vars(CHECKPOINT), "bits": {3: 2, 4: 1}})
    shown = quantization_summary(dataclasses.replace(REPORT, **happened, perplexity=[row]), several)
    assert [re.split("   +", line) for line in shown.splitlines()] == [
        ["modules", "3"],
        ["widths", "3 bits (2), 4 bits (1)"],
        ["bits per weight", "4.5"],
        ["size", "1.50 KiB"],
        ["seconds", "12.5"],
        ["mean error", "0.04"],
        ["mean error of rounding", "0.036667"],
        ["largest error", "0.05 in bad"],
        ["worse than plain rounding", "bad"],
        ["damping raised", "good"],
        ["dead input columns", "4"],
        ["experts with few tokens", "few, bad; filled up from their layers', the fewest 2 of their own"],
        ["left in floating point", "50.0% of the weights in the blocks"],
        ["Linears left in floating point", "2 (it is odd)"],
        ["left-out samples", "1"],
        ["perplexity on book.txt", "12.346"],
    ]


def test_of_many_names_a_few_are_shown():
    bad = [dataclasses.replace(PLAIN, name=f"m{number}", worse_than_rounding=True) for number in range(300)]
    shown = quantization_summary(
        dataclasses.replace(REPORT, modules=bad, left_in_float={row.name: "does not fit" for row in bad}), CHECKPOINT
    )
    assert shown.count("300 of them: m0, m1, m2, m3, ...") == 1
    assert max(map(len, shown.splitlines())) < 120


def test_records_are_shown_in_a_line_or_two():
    """As a notebook shows the last value of a cell."""
    report = dataclasses.replace(REPORT, modules=[PLAIN] * 300)
    result = gptqkit.QuantizeResult(report, Path("out"))
    weight = gptqkit.QuantizedWeight(
        codes=torch.zeros(64, 64, dtype=torch.uint8),
        scale=torch.ones(64, 2),
        offset=torch.zeros(64, 2),
        group_index=torch.zeros(64, dtype=torch.int32),
        bits=4,
        group_size=32,
        sym=True,
    )
    for record in (report, result, weight, gptqkit.Calibration(["text"] * 10000)):
        assert repr(record).startswith(type(record).__name__)
        assert len(repr(record)) < 400
    plan = gptqkit.MemoryEstimate(
        needs={"RAM": {"one block": 2048, "hidden states": 100}, "disk": {"checkpoint": 3 << 20}},
        available={"RAM": None, "disk": 5 << 30},
        least={},
        activations="memory",
        blocks=6,
        source_bytes=0,
        output_bytes=0,
    )
    assert repr(plan) == (
        "MemoryEstimate(RAM: 2.10 KiB of an unknown size, disk: 3.00 MiB of 5.00 GiB, blocks=6, activations='memory')"
    )
    assert repr(weight) == "QuantizedWeight(64 x 64, bits=4, group_size=32, sym=True)"
