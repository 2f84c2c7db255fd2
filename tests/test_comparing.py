"""Several checkpoints side by side: the numbers of `evaluate` and `inspect`, with one float model for all."""

import json
import re
import shutil

import pytest

import gptqkit
from gptqkit import cli, comparing

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


def test_the_table_and_json_have_what_evaluate_and_inspect_say(checkpoints, example_model, text, monkeypatch, capsys):
    loaded, load_float = [], comparing.load_float
    monkeypatch.setattr(comparing, "load_float", lambda *a, **k: loaded.append(a) or load_float(*a, **k))
    folders = [str(checkpoints / "b4"), str(checkpoints / "b2")]
    command = ["compare", *folders, "--dataset", str(text), *LENGTH]
    assert cli.main([*command, "--reference", str(example_model), "--json"]) == 0
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert re.findall(r"^evaluate (\w+): 2 of 2", output.err, re.MULTILINE) == ["b4", "b2"]
    assert loaded == [(str(example_model),)]
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


@pytest.mark.parametrize("which", ["not quantized", "not there", "damaged", "another model", "reference quantized"])
def test_what_cannot_be_compared_is_one_line_before_any_work(checkpoints, example_model, text, which, tmp_path, capsys):
    other, more = tmp_path / "other", []
    if which == "not quantized":
        other = example_model
    elif which == "reference quantized":
        other, more = checkpoints / "b2", ["--reference", str(checkpoints / "b2")]
    elif which != "not there":
        shutil.copytree(checkpoints / "b2", other)
        if which == "damaged":
            file = other / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
        else:
            config = json.loads((other / "config.json").read_text())
            (other / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    command = ["compare", str(checkpoints / "b4"), str(other), "--dataset", str(text), *LENGTH, *more]
    assert cli.main(command) == 1
    out, error = capsys.readouterr()
    assert out == ""
    words = {"another model": "hidden_size is 256 and 64", "reference quantized": "is quantized"}
    assert re.fullmatch(rf"gptqkit: error: .*{words.get(which, '')}.*\n", error)
    assert str(other) in error


def test_several_models_in_python_need_one_at_least(text):
    with pytest.raises(gptqkit.ConfigError, match="no checkpoint to compare"):
        gptqkit.compare([], text)
