"""Progress on a terminal is a bar, and one line per layer elsewhere."""

import io

from gptqkit.progress import Progress
from gptqkit.terminal import ProgressDisplay


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def quantize_two_layers(display: ProgressDisplay) -> None:
    for done in range(1, 5):
        step = Progress(
            stage="quantize",
            done=done,
            total=4,
            layer=(done - 1) // 2,
            module=f"module.{done}",
            error=0.1 * done,
            rounding_error=0.2 * done,
        )
        display(step)


def test_one_line_per_layer_without_a_terminal() -> None:
    stream = io.StringIO()
    quantize_two_layers(ProgressDisplay(stream))
    lines = [line.rpartition(", ")[0] for line in stream.getvalue().splitlines()]
    assert lines == [
        "quantize: layer 0, 2 of 4, mean error 0.1500 (rounding 0.3000)",
        "quantize: layer 1, 4 of 4, mean error 0.3500 (rounding 0.7000)",
    ]


def test_a_module_outside_the_layers_has_a_line_of_its_own() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    display(Progress(stage="quantize", done=1, total=2, layer=0, module="layers.0.down"))
    display(Progress(stage="quantize", done=2, total=2, module="lm_head"))
    lines = [line.rpartition(", ")[0] for line in stream.getvalue().splitlines()]
    assert lines == ["quantize: layer 0, 1 of 2", "quantize: lm_head, 2 of 2"]


def test_long_stages_without_layers_write_ten_lines_at_most() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    for done in range(1, 1001):
        display(Progress(stage="evaluate", done=done, total=1000))
    assert [line.split(", ")[0] for line in stream.getvalue().splitlines()] == [
        f"evaluate: {n}00 of 1000" for n in range(1, 11)
    ]


def test_an_unfinished_layer_is_told_when_the_work_ends() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream)
    display(Progress(stage="quantize", done=1, total=2, layer=0, module="m"))
    assert stream.getvalue() == ""
    display.close()
    display.close()
    assert stream.getvalue().startswith("quantize: layer 0, 1 of 2")
    assert stream.getvalue().count("\n") == 1


def test_bars_on_a_terminal() -> None:
    stream = Terminal()
    display = ProgressDisplay(stream)
    quantize_two_layers(display)
    display(Progress(stage="write", done=1, total=1))
    display.close()
    text = stream.getvalue()
    assert "quantize: 100%" in text
    assert "module.4 error 0.4000" in text
    assert "write: 100%" in text
