"""What mode of torch a caller is in changes nothing: not what is written, and not what is measured."""

import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
import torch

import gptqkit
from support.jobs import contents
from support.models import build, samples, save

SETTINGS = gptqkit.QuantizeConfig(
    method="qep",
    grid="minmax",
    refine_rounds=1,
    bits=3,
    group_size=32,
    sym=False,
    learn_iterations=2,
    two_sided=True,
    tune_epochs=1,
    target_bits=3.5,
)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "inference in bfloat16": (torch.inference_mode, lambda: default_dtype(torch.bfloat16)),
    "autocast, no gradients and another device": (
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.no_grad,
        lambda: torch.device("meta"),
    ),
}


IDS = samples(4).input_ids


def everything(source, folder):
    """What the functions of the package make of a model."""
    tokens = gptqkit.Calibration(IDS)
    report = gptqkit.quantize(source, tokens, folder / "out", SETTINGS, run=gptqkit.Run(device="cpu")).report
    text = IDS.flatten().tolist()
    how = {"sequence_length": 24, "device": "cpu"}
    scores = gptqkit.evaluate(folder / "out", text, how, reference=source)
    gptqkit.convert(folder / "out", folder / "converted", format="compressed-tensors")
    gptqkit.imatrix(source, tokens, folder / "imatrix.gguf", run=gptqkit.Run(device="cpu"))
    gptqkit.rotate(source, folder / "rotated")
    name = next(iter(gptqkit.open_checkpoint(folder / "out").layers))
    found = gptqkit.open_checkpoint(folder / "out").weight(name)
    return {
        "errors": [module.error for module in report.modules],
        "scores": (scores.perplexity, scores.kl_divergence),
        "files": {
            file: content
            for file, content in contents(folder / "out").items()
            if file.endswith(("safetensors", "config.json"))
        },
        "converted": contents(folder / "converted")["model.safetensors"],
        "imatrix": (folder / "imatrix.gguf").read_bytes(),
        "rotated": contents(folder / "rotated")["model.safetensors"],
        "compared": gptqkit.compare([folder / "out"], text, how, reference=source)[0].to_dict()["perplexity"],
        "bits": gptqkit.inspect(folder / "out").bits,
        "plan": gptqkit.plan(source, folder / "more", SETTINGS, run={"device": "cpu"}).needs,
        "recommended": gptqkit.recommend(source, 1 << 20, "llama.cpp"),
        "differences": gptqkit.diff(folder / "out", folder / "converted"),
        "damage": gptqkit.doctor(folder / "out").damage,
        "value": found.dequantize(),
        "loaded": gptqkit.load(folder / "out", device="cpu")[0].state_dict(),
    }


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    save(build("llama", num_hidden_layers=1), folder / "model")
    return folder / "model", everything(folder / "model", folder)


@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=[pytest.mark.slow] * (each == "inference in bfloat16")) for each in MODES]
)
def test_modes_of_the_caller_change_nothing(mode, expected, tmp_path):
    source, plain = expected
    with ExitStack() as modes:
        for enter in MODES[mode]:
            modes.enter_context(enter())
        found = everything(source, tmp_path)
    for what, value in plain.items():
        assert same(found[what], value), what


@pytest.mark.slow
def test_a_default_device_that_was_there_before_the_package(expected, tmp_path):
    source, _ = expected
    code = (
        "import torch; torch.set_default_device('meta'); import sys, gptqkit\n"
        "gptqkit.quantize(sys.argv[1], None, sys.argv[2], {'method': 'rtn', 'quality': 'fast', 'bits': 4,"
        " 'group_size': 32, 'format': 'gptq'}, run={'device': 'cpu'})\n"
        "gptqkit.convert(sys.argv[2], sys.argv[3], format='awq')\n"
        "print(gptqkit.doctor(sys.argv[2]).damage, gptqkit.diff(sys.argv[2], sys.argv[3]))"
    )
    run = [sys.executable, "-c", code, str(source), str(tmp_path / "out"), str(tmp_path / "awq")]
    found = subprocess.run(run, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.split() == ["()", "[]"]
