"""The GPU benchmarks from end to end, small and on the emulator: a GPU's time must not go on their slips."""

import argparse
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from gptqkit.kernels.ops import BITS, Tuning, tuning_for


def run_once(work, operands, **_):
    """In place of a time: 1 s, once the work was done."""
    work(operands[0])
    return 1.0


@pytest.fixture
def load(root, emulation, monkeypatch):
    """Imports a benchmark, with the CPU for a GPU that does everything in one second."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    for name in ("timing", "layers", "decoder", "gemm", "model", "tune", "sanitize", "host", "quantizing"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    timing = importlib.import_module("timing")
    monkeypatch.setattr(timing, "find_gpu", lambda _: torch.device("cpu"))
    monkeypatch.setattr(timing, "graph_time", run_once)
    monkeypatch.setattr(timing, "warm_up", lambda: None)
    monkeypatch.setattr(timing, "copies_past_cache", lambda *_: 2)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda _: 1e12)
    monkeypatch.setattr(timing, "describe", lambda _: {"device": "Emulated GPU", "torch": torch.__version__})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)

    def load(name, **settings):
        module = importlib.import_module(name)
        if name != "host":
            settings = {"launcher_for": lambda _: emulation.launcher, "CudaLinear": emulation.linear, **settings}
        for attribute, value in settings.items():
            monkeypatch.setattr(module, attribute, value, raising=False)
        return module

    return load


@pytest.fixture
def run(monkeypatch):
    def run(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        module.main()

    return run


def test_gemm(load, run, tmp_path):
    arguments = ["--rows", 1, 120, "--shapes", "64x128", "--bits", 3, 8, "--dtypes", "float16", "--out", tmp_path]
    run(load("gemm"), *arguments)
    (table,) = json.loads((tmp_path / "gemm.json").read_text())["tables"]
    assert set(table["columns"]) == {"cuBLAS", "3 bits", "8 bits"}
    results = table["columns"]["3 bits"].values()
    assert [result["path"] for result in results] == ["fused", "dense"]
    assert [(result["fused_seconds"], result["dense_seconds"]) for result in results] == [(1, 1), (1, 1)]


def test_gemm_tells_of_wrong_products_and_goes_on(load, run, tmp_path, emulation, monkeypatch):
    module, right = load("gemm"), emulation.launcher.linear
    monkeypatch.setattr(emulation.launcher, "linear", lambda *given: right(*given) * (1.01 if given[-1] == 3 else 1))
    with pytest.raises(SystemExit, match=r"^3 products are wrong"):
        run(module, "--rows", 1, "--shapes", "64x128", "--bits", 3, 4, "--dtypes", "float16", "--out", tmp_path)
    report = json.loads((tmp_path / "gemm.json").read_text())
    assert [line.partition(":")[0] for line in report["wrong"]] == [
        f"(64, 128), {bits} bits in groups of {size}, torch.float16, 1 rows, split 3"
        for bits, size in ((3, 128), (4, 128), (4, 32))
    ]
    assert report["tables"][0]["columns"].keys() == {"cuBLAS", "3 bits", "4 bits", "Q4_K"}


def test_model(load, run, tmp_path):
    fields = {"hidden": 64, "intermediate": 128, "heads": 4, "key_heads": 2, "vocabulary": 50, "layers": 1}
    sizes = dataclasses.make_dataclass(
        "Small", [(name, int, value) for name, value in fields.items()], bases=(load("model").Sizes,), frozen=True
    )
    module = load("model", Sizes=sizes, WINDOW=16, CONTEXT=16)
    run(module, "--bits", 16, 4, "--batches", 1, 3, "--group-size", 32, "--out", tmp_path)
    results = json.loads((tmp_path / "model.json").read_text())["results"]
    speeds = [(result["bits"], result["tokens_per_second"]) for result in results]
    assert speeds == [(bits, {"1": 1.0, "3": 3.0}) for bits in (16, 4)]


@pytest.mark.slow
def test_quantizing(load, run, tmp_path):
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    run(load("quantizing", SIZES=small), "--blocks", 1, "--samples", 1, "--length", 16, "--out", tmp_path)
    qualities = json.loads((tmp_path / "quantizing.json").read_text())["qualities"]
    stages = {quality: set(row["stages"]) for quality, row in qualities.items()}
    assert stages["balanced"] - stages["fast"] == {"measure"}
    assert all(sum(row["stages"].values()) <= row["seconds"] for row in qualities.values())


def test_tune(load, run, tmp_path):
    shapes = {"SHAPES": ((64, 1024), (128, 128)), "DENSE_SHAPES": ((128, 128),), "DENSE_ROWS": (120,)}
    module = load("tune", DEVICES=tmp_path / "devices", ROWS=(1, 32), SPLITS=(1,), MANY=(64, 120), **shapes)
    run(module, "--out", tmp_path)
    assert [path.name for path in (tmp_path / "devices").iterdir()] == ["emulated-gpu.json"]
    tuning = tuning_for("Emulated GPU", tmp_path / "devices")
    assert tuning.crossover == dict.fromkeys(BITS, 64)
    report = json.loads((tmp_path / "tune.json").read_text())
    assert report["constants"]["block_inputs"] == tuning.block_inputs == Tuning.block_inputs  # all took as long
    assert all("1" in each["seconds_by_split"] for each in report["times"][: 2 * 4 * 2])
    assert len(report["times"]) == 2 * 4 * 2 + 5 + 4 * 2 * 2


def test_host(load, run, tmp_path):
    """The bound leaves room for a busy machine; host.json has the ratio that was measured on an idle one."""
    run(load("host"), "--rounds", 60, "--out", tmp_path)
    assert json.loads((tmp_path / "host.json").read_text())["layer_over_linear"] < 2.5


def test_sanitize(load, run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: torch.zeros(0).device)
    run(load("sanitize", BITS=(3,), OUTPUTS=32, COLUMNS=(48,)))


def test_the_first_run_starts_nothing_for_which_no_time_is_left(root, tmp_path):
    """With tools that end at once but for gemm.py, for which the second call leaves what is over but for 30 seconds."""
    for name, script in {"nvidia-smi": "", "python": 'case "$*" in *gemm.py*) sleep 20;; esac'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python", "DEADLINE": "30"}
    command = ["bash", root / "benchmarks" / "gpu_first_run.sh", "second", tmp_path]
    done = subprocess.run(command, env=os.environ | settings, timeout=15, capture_output=True, check=False)
    assert done.returncode == 1
    found = [line.split("; ")[0] for line in (tmp_path / "second.txt").read_text().splitlines()]
    ended = [f"{name}: status 0 after" for name in ("gpu", "torch", "tune")]
    assert [line.rsplit(maxsplit=2)[0] for line in found[:3]] == ended
    assert found[3] == "gemm: skipped, no time is left"


def test_the_first_run_has_every_test_that_needs_a_gpu(root, tmp_path):
    for name, script in {"nvidia-smi": "", "python": f'echo "$*" >> {tmp_path}/ran'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python"}
    for call in ("first", "third"):
        command = ["bash", root / "benchmarks" / "gpu_first_run.sh", call, tmp_path]
        subprocess.run(command, env=os.environ | settings, timeout=15, capture_output=True, check=True)
    ran = (tmp_path / "ran").read_text()
    marked = re.compile(r"mark\.gpu\b|^def test_.*[(, ]gpu[,)]", re.MULTILINE)
    files = [file for file in (root / "tests").rglob("test_*.py") if marked.search(file.read_text(encoding="utf-8"))]
    assert len(files) > 3
    assert [str(file.relative_to(root)) for file in files if f" {file.relative_to(root)}\n" not in ran] == []


def test_without_a_gpu_they_say_so(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.delitem(sys.modules, "timing", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("timing").find_gpu(argparse.ArgumentParser())
