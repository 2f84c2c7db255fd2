"""The command line passes on what was typed, and answers where it should."""

import dataclasses
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest

import gptqkit
from gptqkit import cli, commands
from gptqkit.errors import AbandonedError, CheckpointError, GptqkitError
from gptqkit.run import Run
from support.jobs import processes
from support.models import build

COMMANDS = {
    gptqkit.QuantizeConfig: ("quantize model out --calibration a.txt", "plan model"),
    gptqkit.Calibration: ("quantize model out --calibration a.txt", "plan model"),
    Run: ("quantize model out --calibration a.txt --push-to-hub me/model",),
    gptqkit.Evaluation: ("evaluate model --dataset a.txt", "compare model --dataset a.txt"),
}
QUANTIZE = ["quantize", "model", "out", "--calibration", "a.txt"]
SKIP = gptqkit.ModuleOverride(skip=True)


@pytest.fixture(autouse=True)
def _process_settings_stay(monkeypatch):
    """The command may set up its process's loggers and libraries; the process of the tests keeps its own."""
    monkeypatch.setattr(commands, "_quieten_libraries", lambda _: None)
    logger = logging.getLogger("gptqkit")
    before = (logger.level, logger.handlers, logger.propagate)
    yield
    logger.level, logger.handlers, logger.propagate = before


@pytest.fixture
def behave(monkeypatch):
    """Makes a function of the API raise an error or return a value."""

    def change(name, result):
        def function(*_, **__):
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr(gptqkit, name, function)

    return change


@pytest.fixture
def settings(monkeypatch):
    """Tells what a command line asks the API for: its settings by their class."""

    def ask(words):
        found = {}

        def function(*args, **options):
            found.update({type(value): value for value in (*args, *options.values())})
            raise GptqkitError("that is enough")

        for name in ("quantize", "plan", "evaluate", "compare"):
            monkeypatch.setattr(gptqkit, name, function)
        assert cli.main(words) == 1
        return found

    return ask


def values(kind, field):
    """Yield values of a setting other than its default, each with how it is typed."""
    option = "--" + field.name.replace("_", "-")
    hint = typing.get_type_hints(kind)[field.name]
    kinds = set(typing.get_args(hint) or [hint]) - {type(None)}
    if kinds == {bool}:
        if field.default is not True:
            yield True, [option]
        if field.default is not False:
            yield False, ["--" + field.metadata.get("off", "no-" + option[2:])]
    elif "choices" in field.metadata:
        others = [value for value in field.metadata["choices"] if value not in (field.default, "gguf")]  # needs a type
        yield from ((value, [option, str(value)]) for value in others)
    else:
        kind = int if "size" in field.metadata else kinds.pop()
        value = {int: 7, float: 3.5 if field.name == "target_bits" else 0.5, str: "name"}[kind]
        yield value, [option, str(value)]


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_setting_is_an_option_and_has_the_default_of_its_class(kind, settings):
    fields = [field for field in dataclasses.fields(kind) if field.name not in ("overrides", "source")]
    assert fields
    for command in COMMANDS[kind]:
        source = {"push_to_hub": "me/model"} if kind is Run else {}
        if kind is gptqkit.Calibration:
            source["source"] = "a.txt" if "--calibration" in command else None
        assert settings(command.split())[kind] == kind(**source)
        for field in fields:
            for value, words in values(kind, field):
                assert settings([*command.split(), *words])[kind] == kind(**{**source, field.name: value})


def test_two_overrides_of_one_pattern_are_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([*QUANTIZE, "--override", "down_proj:bits=8", "--skip", "down_proj"])
    assert stopped.value.code == 2
    assert "'down_proj' has two overrides" in capsys.readouterr().err


def test_settings_that_are_typed_in_a_form_of_their_own(settings):
    command = "quantize model out --group-size -1 --shard-size 3MiB --calibration a.txt --calibration b.json"
    words = ["--override", "(?:up|down)_proj:bits=8,group_size=-1", "--skip", r"\.0\."]
    words += ["--override", "v_proj:type=q6_k"]
    found = settings([*command.split(), *words])
    config = found[gptqkit.QuantizeConfig]
    assert config.group_size is None
    assert list(config.overrides.items()) == [
        ("(?:up|down)_proj", gptqkit.ModuleOverride(bits=8, group_size=-1)),
        (r"\.0\.", gptqkit.ModuleOverride(skip=True)),
        ("v_proj", gptqkit.ModuleOverride(type="q6_k")),
    ]
    assert found[gptqkit.Calibration].source == [Path("a.txt"), Path("b.json")]
    assert found[Run].shard_size == 3 << 20
    for typed, meant in {"6.5MB": 6500000, "1kB": 1000, "8gb": 8 * 10**9, "1.5 gib": 3 << 29, "7": 7}.items():
        assert settings([*QUANTIZE, "--shard-size", typed])[Run].shard_size == meant
    for command in (QUANTIZE, ["evaluate", "model", "--dataset", "a.txt"]):
        assert settings([*command, "--tokenizer", "org/tokenizer"])[str] == "org/tokenizer"
    assert gptqkit.Calibration not in settings(["quantize", "model", "out", "--method", "rtn"])


@pytest.mark.parametrize(
    "typed",
    [
        "",
        "plan model --calibration a.txt",
        "plan model --evaluate-on a.txt",
        "plan model --push-to-hub me/model",
        "plan model --strict",
        "quantize model out --private",
        "imatrix model out --calibration a.txt --resume",
        "quantise model out",
        "quantize model",
        "quantize model out --bits 5",
        "inspect folder --js",
        "quantize model out --desc-act --act-group-aware",
        "plan model --no-two-sided --two-sided",
        "imatrix model out --calibration a.txt --concatenate --no-concatenate",
        "quantize model out --sym --asym",
        "quantize model out --calibration a.txt --samples 0",
        "quantize model out --shard-size 8XB",
        "quantize model out --override bits=4",
        "quantize model out --override down_proj:",
        "quantize model out --override down_proj:skip=1",
        "quantize model out --override down_proj:bits=5",
        "quantize model out --skip (",
        "plan model --activations nowhere",
        "evaluate model",
        "compare model",
        "compare --dataset a.txt",
        "report",
        "convert in out --format no-format",
        "inspect out --tensor-parallel two",
        "recommend model --memory 8GB",
        "recommend model --for vllm --memory lots",
        "quantize model out --calibration a.txt --format gguf",
        "plan model --type Q8_0 --bits 4",
        "plan model --type Q4_K_M --group-size 128",
        "quantize model out",
        "quantize model out --method rtn --target-bits 3",
        "quantize model out --method rtn --seed -1",
        "quantize model '' --calibration a.txt",
        "quantize '' out --calibration a.txt",
        "quantize model out --calibration ''",
        "quantize model out --calibration a.txt --evaluate-on b.txt --evaluate-on c.txt",
        "evaluate model --dataset a.txt --dataset b.txt",
        "evaluate model --dataset a.txt --reference ''",
        "compare a '' --dataset a.txt",
        "convert in '' --format gptq",
        "rotate model out --seed -1",
        "inspect out --tensor-parallel 0",
        "recommend model --memory 8GB --for vllm --context 0",
        "compare a b --dataset a.txt --plot plot.png",
        "compare a b --dataset a.txt --plot nowhere/plot.svg",
        "report out --svg map.png",
        "report out --html .",
    ],
)
def test_usage_errors_are_two_lines_and_2(typed, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(shlex.split(typed))
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"(gptqkit( \w+)?): usage error: .+\nTry '\1 --help'\.\n", captured.err)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("quantise model out", "quantize"),
        ("quantize model out --bit 3", "--bits"),
        ("quantize model out --max-shard-size=3MiB", "--shard-size"),
        ("quantize model out --method gtpq", "gptq"),
        ("evaluate model --datset a.txt", "--dataset"),
        ("inspect folder --jsn", "--json"),
        ("inspect folder --for vlm", "vllm"),
    ],
)
def test_what_was_misspelt_is_asked_for(typed, meant, capsys):
    with pytest.raises(SystemExit):
        cli.main(typed.split())
    assert f"; did you mean {meant}?\nTry " in capsys.readouterr().err


def test_sigterm_ends_a_command_like_ctrl_c():
    script = (
        "import gptqkit, os, signal, sys, time\n"
        "from gptqkit import cli\n"
        "def inspect(*_, **__):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
        "gptqkit.inspect = inspect\n"
        "sys.exit(cli.main(['inspect', 'folder']))\n"
    )
    done = run([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (130, "gptqkit: interrupted\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupt_stays_one_where_compiled_code_makes_another_exception_of_it(name):
    script = (
        "import gptqkit, os, signal, sys\n"
        "from gptqkit import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def inspect(*_, **__):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), signal.{name})\n"
        "    except KeyboardInterrupt:\n"
        "        raise ValueError('of a library') from None\n"
        "gptqkit.inspect = inspect\n"
        "sys.exit(cli.main(['inspect', 'folder']))\n"
    )
    done = run([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (130, "gptqkit: interrupted\n")


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        (CheckpointError("qweight is\n  torn"), 1, "gptqkit: error: qweight is torn\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), 1, "gptqkit: error: [Errno 2] No such file: 'a.txt'\n"),
        (KeyboardInterrupt(), 130, "gptqkit: interrupted\n"),
    ],
)
def test_what_ends_a_command_is_one_line_and_verbose_adds_where(behave, capsys, failure, code, line):
    behave("inspect", failure)
    assert cli.main(["inspect", "folder"]) == code
    assert capsys.readouterr() == ("", line)
    assert cli.main(["inspect", "folder", "--verbose"]) == code
    text = capsys.readouterr().err
    assert text.startswith("Traceback") == (code == 1)
    assert text.endswith(line)
    behave("inspect", ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):  # bugs are not hidden
        cli.main(["inspect", "folder"])


def test_a_reader_that_has_seen_enough_is_no_error(behave, monkeypatch, capsys):
    behave("inspect", SimpleNamespace(to_dict=lambda: {"bits": {4: 1}}))
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert cli.main(["inspect", "folder", "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_the_first_speaks(behave, monkeypatch, capsys, rank):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(commands, "quantization_summary", lambda report, _: report)
    behave("inspect", None)
    behave("quantize", SimpleNamespace(report="a report", path=Path("out"), url=None, was_finished=False))
    assert cli.main(QUANTIZE) == 0
    behave("quantize", AbandonedError("another process failed"))
    assert cli.main(QUANTIZE) == 1
    captured = capsys.readouterr()
    assert ("written to out" in captured.out, "another process failed" in captured.err) == (rank == 0, rank == 0)
    behave("quantize", SimpleNamespace(report="a report", path=Path("out"), url=None, was_finished=True))
    assert cli.main(QUANTIZE) == 0
    assert (capsys.readouterr().out == "a report\nleft as it was finished before: out\n") == (rank == 0)


def test_messages_of_the_library_reach_standard_error(monkeypatch, capsys):
    def convert(*_, **__):
        logging.getLogger("gptqkit").info("worth knowing")
        logging.getLogger("gptqkit.loading").debug("only when asked")

    monkeypatch.setattr(gptqkit, "convert", convert)
    command = ["convert", "in", "out", "--format", "gptq"]
    assert cli.main(command) == 0
    assert capsys.readouterr() == ("written to out\n", "gptqkit: worth knowing\n")
    assert cli.main([*command, "--verbose"]) == 0
    assert capsys.readouterr().err == "gptqkit: worth knowing\ngptqkit: only when asked\n"


def test_plan_prints_sizes_and_refuses_what_cannot_run(example_model, tmp_path, monkeypatch, capsys):
    command = ["plan", str(example_model), "--out", str(tmp_path / "out"), "--device", "cpu", "--samples", "2"]
    assert cli.main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    weights = sum(file.stat().st_size for file in example_model.glob("*.safetensors"))
    assert plan["source_bytes"] == pytest.approx(weights, rel=0.01)
    assert set(plan["needs"]) == {"RAM", "disk"}
    assert all(sum(need["parts"].values()) == need["total"] for need in plan["needs"].values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    assert cli.main(command) == 1
    captured = capsys.readouterr()
    assert re.search(rf"^model +{weights / 2**20:.1f} MiB\n", captured.out, re.MULTILINE)
    assert re.search(r"^RAM\n  one block +[\d.]+ MiB\n", captured.out, re.MULTILINE)
    assert re.search(r"^disk\n  checkpoint +[\d.]+ MiB\n", captured.out, re.MULTILINE)
    assert re.fullmatch(r"gptqkit: error: .* MiB of disk .*, and there is 4.88 KiB; .*\n", captured.err)
    assert list(tmp_path.iterdir()) == []


def test_one_reader_answers_by_its_exit_code(example_model, tmp_path, capsys):
    gptqkit.quantize(example_model, None, tmp_path / "out", {"bits": 3, "method": "rtn", "overrides": {"mlp": SKIP}})
    command = ["inspect", str(tmp_path / "out"), "--for"]
    assert cli.main([*command, "vllm"]) == 1
    shown, said = capsys.readouterr()
    assert shown.startswith("vLLM: does not load it\n  because it serves 4 and 8 bits, not 3")
    assert said == f"gptqkit: error: vLLM does not load {tmp_path / 'out'}\n"
    assert cli.main([*command, "SGLang"]) == 0
    assert capsys.readouterr().out.startswith("SGLang: loads it\n  mind that it has fast kernels for symmetric")
    assert cli.main([*command, "sglang", "--tensor-parallel", "4", "--json"]) == 1  # of 4 heads and 2 of keys
    answer = json.loads(capsys.readouterr().out)
    assert (answer["name"], answer["loads"]) == ("SGLang", False)
    assert "o_proj has 64 inputs on each GPU and groups of 128" in answer["reasons"][0]


def test_recommendations_as_text_and_as_json(example_model, capsys):
    command = ["recommend", str(example_model), "--for", "transformers", "--memory"]
    assert cli.main([*command, "6MB"]) == 0
    assert re.search(r"^gptq_v2 +3 +32 +no ", capsys.readouterr().out, re.MULTILINE)
    assert cli.main([*command, "6MB", "--json", "--context", "64"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["total_bytes"] <= 6000000 for row in rows)
    assert rows[0]["bits"] == 4
    assert cli.main([*command, "1MB"]) == 1
    assert re.fullmatch(r"gptqkit: error: .* is what the smallest choice needs .*\n", capsys.readouterr().err)


def test_scores_as_text_and_as_json(behave, capsys):
    command = ["evaluate", "out", "--dataset", "a.txt"]
    behave("evaluate", SimpleNamespace(to_dict=lambda: {"perplexity": 41.2261, "kl_divergence": None}))
    assert cli.main(command) == 0
    assert re.search(r"^perplexity +41.226$", capsys.readouterr().out, re.MULTILINE)
    assert cli.main([*command, "--json"]) == 0
    scores = {"model": "out", "dataset": "a.txt", "reference": None, "perplexity": 41.2261, "kl_divergence": None}
    assert json.loads(capsys.readouterr().out) == scores


def test_help_loads_nothing_heavy_and_reads_as_it_is_typed():
    script = (
        "import sys, gptqkit.cli as cli\n"
        "for command in ('', 'quantize', 'plan', 'imatrix', 'evaluate', 'compare', 'report', 'inspect', 'convert'):\n"
        "    try: cli.main([*command.split(), '--help'])\n"
        "    except SystemExit as stopped: assert stopped.code == 0\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = run([sys.executable, "-c", script])
    assert done.stderr == "[]\n"
    assert done.stdout.count("exit codes:") == 9
    assert "`" not in done.stdout
    text = " ".join(done.stdout.split())
    assert re.search(r"--shard-size SIZE .* \(default: 4GiB\)", text)
    assert "--grid {minmax,mse,sim}" in text
    assert not re.search("[a-z]_act", text)
    assert "symmetric grids: the zero point is fixed at 2^(bits-1)" in text
    assert "the exit code is 1 if it does not" in text
    assert "in RAM (memory, and auto) or on disk" in text  # of imatrix, whose auto is RAM


def command(words, output):
    """Do what a command line says; what it prints goes to a file."""
    with output.open("w") as sys.stdout:
        code = cli.main(words)
    sys.exit(code)


def test_the_installed_command_from_a_model_to_another_format(example_model, small_text, tmp_path, capsys):
    """Results go to standard output, and to standard error nothing but lines of our own."""
    model, text, out = tmp_path / "float", tmp_path / "small.txt", tmp_path / "out"
    build("llama", vocab_size=4096, num_hidden_layers=1).save_pretrained(model)
    for file in example_model.glob("*token*.json"):
        shutil.copy(file, model)
    text.write_text(small_text, encoding="utf-8", newline="")

    def own(code, said):
        assert code == 0, said
        stages = ("gptqkit: ", "measure: ", "quantize: layer ", "learn: layer ", "evaluate: ")
        assert not [line for line in said.splitlines() if not line.startswith(stages)]

    def call(*words):
        [ended] = processes(command, [*map(str, words)], tmp_path / "printed", log=tmp_path / "said")
        own(ended.code, ended.text)
        return SimpleNamespace(stdout=(tmp_path / "printed").read_text(), stderr=ended.text)

    length = ("--sequence-length", 64, "--device", "cpu")
    how = ("--override", "down_proj$:bits=8", "--learn-iterations", 2, "--group-size", 32)
    texts = ("--calibration", text, "--samples", 2, "--evaluate-on", text)
    words = ["quantize", model, out, *texts, *length, *how]
    done = run([str(Path(sys.executable).with_name("gptqkit")), *map(str, words)])
    own(done.returncode, done.stderr)
    assert sum(line.startswith("quantize: layer ") for line in done.stderr.splitlines()) == 1
    assert done.stdout.endswith(f"written to {out}\n")
    assert "quantize:" not in done.stdout

    assert (out / "heatmap.svg").read_text(encoding="utf-8") == gptqkit.report_svg(out)
    assert "](heatmap.svg)\n" in (out / "README.md").read_text(encoding="utf-8")

    done = call("evaluate", out, "--dataset", text, *length, "--json")
    scores = json.loads(done.stdout)
    [row] = json.loads((out / "quantization_report.json").read_text(encoding="utf-8"))["perplexity"]
    assert scores["perplexity"] == pytest.approx(row["perplexity"], rel=1e-5)
    assert "gptqkit: backend cpu: " in done.stderr

    call("convert", out, tmp_path / "v1", "--format", "gptq")
    assert cli.main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits"] == {"4": 6, "8": 1}
    before, after = gptqkit.open_checkpoint(out), gptqkit.open_checkpoint(tmp_path / "v1")
    assert list(before.layers) == list(after.layers)
    for name in before.layers:
        assert before.weight(name).dequantize().equal(after.weight(name).dequantize())


@pytest.mark.slow
def test_the_readme_runs_as_it_is_written(root, tmp_path):
    """Its Python and then its shell half, beside the examples: every command ends well and leaves its file."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"\n## Python\n\n```python\n(.*?)```", readme, re.DOTALL)
    [shell] = re.findall(r"\n## Shell\n\n((?:    .*\n)+)", readme)
    (tmp_path / "examples").symlink_to(root / "examples")
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in ([sys.executable, "-c", code], ["bash", "-ec", shell]):
        done = run(command, cwd=tmp_path, **path)
        assert done.returncode == 0, done.stderr
    assert {"out-w4", "out-w3", "out-v1", "heatmap.svg"} <= {file.name for file in tmp_path.iterdir()}
    assert (tmp_path / "out-w3" / "quantization_report.html").exists()
    assert gptqkit.inspect(tmp_path / "for-vllm").reader("vLLM").loads


def run(command, cwd=None, **settings):
    environment = {**os.environ, "PYTHONPATH": str(Path(gptqkit.__file__).parent.parent), **settings}
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
