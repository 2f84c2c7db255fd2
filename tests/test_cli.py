"""The command line passes on what was typed, and answers where it should."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gptqkit
from gptqkit import arguments, cli
from gptqkit.calibration import activations
from gptqkit.errors import BackendError, CheckpointError, DoesNotFitError
from gptqkit.kernels import backend
from gptqkit.quantizer import config
from gptqkit.version import __version__

REPORT = {"seconds": 2.0, "modules": [{"name": "layers.0.q", "error": 0.25, "rounding_error": 0.5}], "perplexity": []}


class Recorder:
    """Stands for a function of the API: keeps what it was called with, and answers with `values`."""

    def __init__(self, values: dict[str, Any] | None = None, failure: BaseException | None = None) -> None:
        self.values = values or {}
        self.failure = failure
        self.args: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.args, self.options = args, options
        if self.failure is not None:
            raise self.failure
        return self

    @property
    def report(self) -> Any:
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.values


@pytest.fixture(autouse=True)
def _process_settings_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command may set up its process's loggers; the process of the tests keeps its own."""
    monkeypatch.setattr(cli, "_quieten_libraries", lambda _: None)
    logger = logging.getLogger("gptqkit")
    before = (logger.level, logger.handlers, logger.propagate)
    yield
    logger.level, logger.handlers, logger.propagate = before


def replace(monkeypatch: pytest.MonkeyPatch, name: str, recorder: Recorder) -> Recorder:
    monkeypatch.setattr(gptqkit, name, recorder)
    return recorder


def test_choices_and_defaults_are_those_of_the_library() -> None:
    assert (arguments.BITS, arguments.METHODS, arguments.FORMATS) == (config.BITS, config.METHODS, config.FORMATS)
    assert ("auto", *activations.PLACES) == arguments.PLACES
    assert set(arguments.BACKENDS) == {"auto", *backend.BACKENDS}
    typed = vars(arguments.parser().parse_args(["quantize", "model", "out"]))
    names = set(config.QuantizeConfig().to_dict()) - {"overrides"}
    assert config.QuantizeConfig(**{name: typed[name] for name in names}) == config.QuantizeConfig()


def test_quantize_passes_every_option_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quantize = replace(monkeypatch, "quantize", Recorder(REPORT))
    command = (
        "quantize org/model out --bits 2 --group-size 64 --asym --method gptaq --format gptq --calibration a.txt "
        "--samples 3 --sequence-length 16 --seed 7 --no-act-group-aware --static-groups --device cpu --damp 0.05 "
        "--no-mse --alpha 0.5 --no-true-sequential --block-size 32 --float64 --skip-nonfinite --lm-head --batch-size 2 "
        "--column c --split s --no-concatenate --evaluate-on b.txt --overwrite --resume --activations disk "
        "--activation-memory 3KiB --no-fit-check "
        "--trust-remote-code"
    )
    assert cli.main(command.split()) == 0
    assert quantize.args == ("org/model",)
    progress = quantize.options.pop("progress")
    assert callable(progress)
    assert quantize.options == {
        "calibration": "a.txt",
        "out": Path("out"),
        "config": config.QuantizeConfig(
            bits=2,
            group_size=64,
            sym=False,
            method="gptaq",
            format="gptq",
            act_group_aware=False,
            static_groups=True,
            damp=0.05,
            mse=False,
            alpha=0.5,
            true_sequential=False,
            block_size=32,
            float64=True,
            skip_nonfinite=True,
            lm_head=True,
        ),
        "samples": 3,
        "sequence_length": 16,
        "seed": 7,
        "batch_size": 2,
        "device": "cpu",
        "column": "c",
        "split": "s",
        "concatenate": False,
        "evaluate_on": "b.txt",
        "overwrite": True,
        "resume": True,
        "activations": "disk",
        "activation_memory": 3072,
        "fit_check": False,
        "trust_remote_code": True,
    }
    captured = capsys.readouterr()
    assert "written to out" in captured.out
    assert "0.25 in layers.0.q" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("typed", "order"),
    [
        ("", (False, False, True)),
        ("--desc-act", (True, False, False)),
        ("--desc-act --static-groups", (True, True, False)),
        ("--act-group-aware", (False, False, True)),
        ("--no-act-group-aware", (False, False, False)),
    ],
)
def test_column_orders(monkeypatch: pytest.MonkeyPatch, typed: str, order: tuple[bool, bool, bool]) -> None:
    quantize = replace(monkeypatch, "quantize", Recorder(REPORT))
    assert cli.main(["quantize", "model", "out", *typed.split()]) == 0
    chosen = quantize.options["config"]
    assert (chosen.desc_act, chosen.static_groups, chosen.act_group_aware) == order


def test_minus_one_means_a_group_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = replace(monkeypatch, "quantize", Recorder(REPORT))
    assert cli.main(["quantize", "model", "out", "--group-size", "-1"]) == 0
    assert quantize.options["config"].group_size is None


@pytest.mark.parametrize(
    ("typed", "passed"),
    [
        ([], None),
        (["--calibration", "wikitext2"], "wikitext2"),
        (["--calibration", "a.txt", "--calibration", "b.json"], [Path("a.txt"), Path("b.json")]),
    ],
)
def test_one_calibration_source_or_several_files(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], passed: Any
) -> None:
    quantize = replace(monkeypatch, "quantize", Recorder(REPORT))
    assert cli.main(["quantize", "model", "out", *typed]) == 0
    assert quantize.options["calibration"] == passed


def test_overrides_and_skips_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = replace(monkeypatch, "quantize", Recorder(REPORT))
    typed = ["--override", "(?:up|down)_proj:bits=8,group_size=-1", "--skip", r"\.0\.", "--override", r"\.0\.:bits=3"]
    assert cli.main(["quantize", "model", "out", *typed]) == 0
    overrides = quantize.options["config"].overrides
    assert list(overrides.items()) == [
        ("(?:up|down)_proj", config.ModuleOverride(bits=8, group_size=-1)),
        (r"\.0\.", config.ModuleOverride(skip=True)),
    ]


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "quantise model out",
        "quantize model",
        "quantize model out --bits 5",
        "quantize model out --sym --asym",
        "quantize model out --act-group-aware --no-act-group-aware",
        "quantize model out --samples 0",
        "quantize model out --samples -3",
        "quantize model out --activation-memory 8GB",
        "plan model --activations nowhere",
        "quantize model out --override down_proj",
        "quantize model out --override bits=4",
        "quantize model out --override down_proj:",
        "quantize model out --override down_proj:skip=1",
        "quantize model out --override down_proj:bits=four",
        "quantize model out --skip (",
        "quantize model out --calib a.txt",
        "evaluate model",
        "evaluate model --dataset a.txt --backend triton",
        "convert in out",
        "convert in out --format awq",
    ],
)
def test_senseless_command_lines_end_with_2(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(typed.split())
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: " in captured.err


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (CheckpointError("qweight is\n  torn"), "gptqkit: error: qweight is torn"),
        (BackendError("no cuda"), "gptqkit: error: no cuda"),
        (FileNotFoundError(2, "No such file", "a.txt"), "gptqkit: error: [Errno 2] No such file: 'a.txt'"),
    ],
)
def test_expected_failures_are_one_line_and_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception, line: str
) -> None:
    replace(monkeypatch, "inspect", Recorder(failure=failure))
    assert cli.main(["inspect", "folder"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line + "\n")
    assert cli.main(["inspect", "folder", "--verbose"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_settings_that_contradict_each_other_are_one_line_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantize", "model", "out", "--desc-act", "--act-group-aware"]) == 1
    assert capsys.readouterr().err.startswith("gptqkit: error: desc_act and act_group_aware")


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, "inspect", Recorder(failure=ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["inspect", "folder"])


def test_interruption_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace(monkeypatch, "convert", Recorder(failure=KeyboardInterrupt()))
    assert cli.main(["convert", "in", "out", "--format", "gptq"]) == 130
    assert capsys.readouterr().err == "gptqkit: interrupted\n"


class Planned(Recorder):
    """Stands for a plan as well: refuses where it has a refusal."""

    def __init__(self, values: dict[str, Any], refusal: Exception | None = None) -> None:
        super().__init__(values)
        self.refusal = refusal

    def check(self, *, fit_check: bool = True) -> None:
        if self.refusal is not None and fit_check:
            raise self.refusal


PLAN = {
    "blocks": 4,
    "source_bytes": 3 << 20,
    "output_bytes": 1 << 20,
    "seconds": 90.0,
    "needs": {"RAM": {"parts": {"one block": 1 << 20}, "total": 1 << 20, "available": None}},
}


def test_plan_takes_the_options_of_quantize(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(monkeypatch, "plan", Planned(PLAN))
    command = "plan org/model --out out --bits 3 --method gptaq --calibration a.txt --samples 3 --sequence-length 16 "
    command += "--batch-size 2 --activations disk --activation-memory 1GiB --device cpu --trust-remote-code --untimed "
    command += "--evaluate-on b.txt"
    assert cli.main(command.split()) == 0
    assert plan.args == ("org/model",)
    assert plan.options == {
        "out": Path("out"),
        "config": config.QuantizeConfig(bits=3, method="gptaq"),
        "samples": 3,
        "sequence_length": 16,
        "batch_size": 2,
        "activations": "disk",
        "activation_memory": 1 << 30,
        "device": "cpu",
        "evaluate_on": "b.txt",
        "timed": False,
        "trust_remote_code": True,
    }
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "model 3.00 MiB" in printed
    assert "estimated time 1 min 30 s, from one timed block" in printed
    assert "RAM 1.00 MiB" in printed
    assert "there is not known" in printed


def test_a_plan_that_does_not_fit_is_shown_and_then_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = replace(monkeypatch, "plan", Planned(PLAN, DoesNotFitError("too large")))
    assert cli.main(["plan", "org/model", "--json"]) == 1
    assert plan.options["out"] is None
    captured = capsys.readouterr()
    assert json.loads(captured.out) == PLAN
    assert captured.err == "gptqkit: error: too large\n"
    assert cli.main(["plan", "org/model", "--json", "--no-fit-check"]) == 0


def test_evaluate_prints_a_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    evaluate = replace(monkeypatch, "evaluate", Recorder({"perplexity": 41.2261, "kl_divergence": None}))
    file = tmp_path / "scores.json"
    command = "evaluate out --dataset a.txt --sequence-length 512 --reference org/model --backend cpu --dtype float32 "
    command += (
        "--stride 256 --max-windows 3 --batch-size 2 --device cpu --column c --split s --trust-remote-code --json"
    )
    assert cli.main([*command.split(), str(file)]) == 0
    assert evaluate.args == ("out",)
    del evaluate.options["progress"]
    assert evaluate.options == {
        "dataset": "a.txt",
        "reference": "org/model",
        "sequence_length": 512,
        "stride": 256,
        "batch_size": 2,
        "max_windows": 3,
        "device": "cpu",
        "backend": "cpu",
        "dtype": "float32",
        "column": "c",
        "split": "s",
        "trust_remote_code": True,
    }
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert printed["perplexity"] == "41.226"
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["perplexity"] == 41.2261
    assert written["reference"] == "org/model"
    assert list(tmp_path.iterdir()) == [file]


def test_json_that_cannot_be_written_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    file.write_text("old", encoding="utf-8")
    replace(monkeypatch, "evaluate", Recorder({"perplexity": object()}))
    with pytest.raises(TypeError):
        cli.main(["evaluate", "out", "--dataset", "a.txt", "--json", str(file)])
    assert file.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_inspect_prints_text_or_nothing_but_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readers = [
        {"name": "gptqkit", "loads": True, "reasons": []},
        {"name": "vLLM", "loads": False, "reasons": ["3 bits", "asymmetric"]},
    ]
    summary = {"format": "gptq_v2", "bits": {"3": 42}, "group_sizes": {"128": 42}, "readers": readers}
    inspect = replace(monkeypatch, "inspect", Recorder(summary))
    assert cli.main(["inspect", "folder", "--json"]) == 0
    assert inspect.args == (Path("folder"),)
    assert json.loads(capsys.readouterr().out) == summary
    assert cli.main(["inspect", "folder"]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line != "readers")
    assert (printed["format"], printed["bits"]) == ("gptq_v2", "3 (42 layers)")
    assert (printed["gptqkit"], printed["vLLM"]) == ("yes", "no: 3 bits; asymmetric")


def test_convert_passes_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = replace(monkeypatch, "convert", Recorder())
    assert cli.main(["convert", "in", "out", "--format", "gptq", "--overwrite"]) == 0
    assert convert.args == (Path("in"), Path("out"))
    assert convert.options == {"format": "gptq", "overwrite": True}


def test_messages_of_the_library_reach_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def evaluate(*_: Any, **__: Any) -> Recorder:
        logging.getLogger("gptqkit").info("backend torch: no other can serve 3 bits")
        logging.getLogger("gptqkit.loading").debug("only when asked")
        return Recorder({"perplexity": 2.0})

    monkeypatch.setattr(gptqkit, "evaluate", evaluate)
    assert cli.main(["evaluate", "out", "--dataset", "a.txt"]) == 0
    assert capsys.readouterr().err == "gptqkit: backend torch: no other can serve 3 bits\n"


def test_libraries_are_silenced_in_the_command_only() -> None:
    script = (
        "import gptqkit, gptqkit.cli as cli, logging, sys\n"
        "def evaluate(*args, **options):\n"
        "    import transformers\n"
        "    transformers.utils.logging.get_logger('transformers.models').warning('chatter')\n"
        "    logging.getLogger('huggingface_hub.utils._http').warning('chatter')\n"
        "    raise OSError('no such model')\n"
        "gptqkit.evaluate = evaluate\n"
        "sys.exit(cli.main(['evaluate', 'model', '--dataset', 'a.txt']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "gptqkit: error: no such model\n")


def test_help_answers_without_loading_torch() -> None:
    script = (
        "import sys, gptqkit.cli as cli\n"
        "try: cli.main(['quantize', '--help'])\n"
        "finally: print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == "[]\n"
    assert "exit codes:" in done.stdout


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "gptqkit", "--version"]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=True)
    assert done.stdout == f"gptqkit {__version__}\n"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(gptqkit.__file__).parent.parent)}
