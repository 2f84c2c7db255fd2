"""Progress on a terminal is a bar, and one line per layer elsewhere."""

import io

import pytest

from gptqkit.display import ProgressDisplay
from gptqkit.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def quantize_two_layers_and_a_head(display):
    for done in range(1, 6):
        where = {"layer": None if done == 5 else (done - 1) // 2, "module": f"module.{done}"}
        display(Progress(stage="quantize", done=done, total=5, error=0.1 * done, rounding_error=0.2 * done, **where))


def evaluate(display):
    for done in range(1, 1001):
        display(Progress(stage="evaluate", done=done, total=1000))


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
        (evaluate, [f"evaluate: {n}00 of 1000" for n in range(1, 11)]),
    ],
)
def test_a_line_per_layer_and_ten_of_other_stages_without_a_terminal(work, lines):
    stream = io.StringIO()
    work(ProgressDisplay(stream))
    assert [line.rpartition(", ")[0] for line in stream.getvalue().splitlines()] == lines


def test_an_unfinished_layer_is_told_when_the_work_ends():
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    display(Progress(stage="quantize", done=1, total=2, layer=0, module="m"))
    assert stream.getvalue() == ""
    display.close()
    display.close()
    assert stream.getvalue().startswith("quantize: layer 0, 1 of 2, ")
    assert stream.getvalue().count("\n") == 1


def test_bars_on_a_terminal():
    stream = Terminal()
    display = ProgressDisplay(stream)
    quantize_two_layers_and_a_head(display)
    display(Progress(stage="write", done=1, total=1))
    display.close()
    text = stream.getvalue()
    assert "quantize: 100%" in text
    assert "module.5 error 0.5000, rounding 1.0000" in text
    assert "write: 100%" in text
