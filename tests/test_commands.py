"""The commands from end to end, on the example model: nothing stands in for anything."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptqkit import cli
from gptqkit.progress import Progress


@pytest.fixture(autouse=True, scope="module")
def _process_settings_stay() -> Iterator[None]:
    """The command may set up its process's loggers and libraries; the process of the tests keeps its own."""
    replaced = pytest.MonkeyPatch()
    replaced.setattr(cli, "_quieten_libraries", lambda _: None)
    logger = logging.getLogger("gptqkit")
    before = (logger.level, logger.handlers, logger.propagate)
    yield
    logger.level, logger.handlers, logger.propagate = before
    replaced.undo()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, small_text: str) -> Path:
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text(small_text, encoding="utf-8", newline="")
    return path


@pytest.fixture(scope="module")
def options(example_model: Path, text: Path) -> list[str]:
    typed = f"--bits 4 --group-size 128 --sym --samples 2 --sequence-length 64 --device cpu --calibration {text}"
    return ["quantize", str(example_model), *typed.split()]


@pytest.fixture(scope="module")
def checkpoint(options: list[str], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / "out"
    assert cli.main([*options, str(out), "--evaluate-on", str(text), "--override", "down_proj$:bits=8"]) == 0
    return out


def test_quantize_writes_what_was_asked_for(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(checkpoint), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["format"], summary["sym"]) == ("gptq_v2", True)
    assert summary["bits"] == {"4": 36, "8": 6}
    assert cli.main(["inspect", str(checkpoint)]) == 0
    assert "4 (36 layers), 8 (6 layers)" in capsys.readouterr().out


def test_evaluate_measures_what_the_report_says(
    checkpoint: Path, example_model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scores.json"
    command = f"evaluate {checkpoint} --dataset {text} --sequence-length 64 --device cpu --json {file}"
    assert cli.main([*command.split(), "--reference", str(example_model)]) == 0
    captured = capsys.readouterr()
    scores = json.loads(file.read_text(encoding="utf-8"))
    report = json.loads((checkpoint / "quantization_report.json").read_text(encoding="utf-8"))
    assert scores["perplexity"] == pytest.approx(report["perplexity"][0]["perplexity"], rel=1e-5)
    assert 0 < scores["kl_divergence"] < 0.1
    assert f"{scores['perplexity']:.5g}" in captured.out
    assert "cpu: dequantizes each layer once" in captured.err


def test_plan_says_what_is_needed_and_how_long_it_takes(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *options[1:], "--out", str(tmp_path / "out"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is True
    assert (plan["blocks"], plan["samples"], plan["sequence_length"]) == (6, 2, 64)
    assert set(plan["needs"]) == {"RAM", "disk"}
    assert all(sum(need["parts"].values()) == need["total"] for need in plan["needs"].values())
    assert 0 < plan["seconds"] < 3600
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_cannot_fit_names_what_makes_it_fit(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More hidden states than any disk holds."""
    command = ["plan", *options[1:], "--out", str(tmp_path / "out"), "--untimed", "--samples"]
    assert cli.main([*command, str(10**12)]) == 1
    captured = capsys.readouterr()
    assert "hidden states" in captured.out
    assert "the run does not fit" in captured.err
    remedy = re.search(r"makes it fit: .*?samples=(\d+)", captured.err)
    assert remedy is not None
    assert cli.main([*command, remedy[1]]) == 0


def test_convert_there_and_back_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "v1", tmp_path / "v2"
    assert cli.main(["convert", str(checkpoint), str(first), "--format", "gptq"]) == 0
    assert cli.main(["convert", str(first), str(second), "--format", "gptq_v2"]) == 0
    [weights] = checkpoint.glob("*.safetensors")
    assert (second / weights.name).read_bytes() == weights.read_bytes()
    assert (first / weights.name).read_bytes() != weights.read_bytes()


def test_an_existing_folder_is_refused_and_left_alone(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    assert cli.main([*options, str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"gptqkit: error: {tmp_path / 'out'} exists")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


@pytest.mark.parametrize("stage", ["quantize", "evaluate"])
def test_an_interrupted_job_leaves_nothing_or_can_be_resumed(
    options: list[str],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    class Interrupted(cli.ProgressDisplay):
        def __call__(self, step: Progress) -> None:
            if step.stage == stage:
                raise KeyboardInterrupt

    command = [*options, str(tmp_path / "out"), "--method", "rtn", "--evaluate-on", str(text)]
    with monkeypatch.context() as patch:
        patch.setattr(cli, "ProgressDisplay", Interrupted)
        assert cli.main(command) == 130
    assert capsys.readouterr().err.endswith("gptqkit: interrupted\n")
    if stage == "quantize":
        assert list(tmp_path.iterdir()) == []
        return
    assert cli.main(command) == 1
    assert "resume it" in capsys.readouterr().err
    assert cli.main([*command, "--resume"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_missing_folder_for_the_scores_is_found_out_before_the_work(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"evaluate {checkpoint} --dataset {text} --json {tmp_path}/missing/scores.json"
    assert cli.main(command.split()) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "gptqkit", "inspect", str(checkpoint), "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
