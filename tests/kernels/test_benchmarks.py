"""The GPU benchmarks from end to end, small and on the emulator: a GPU's time must not go on their slips."""

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gptqkit.kernels.ops import BITS, tuning_for
from support.emulation import Emulation

Load = Callable[[str], ModuleType]


def run_once(work: Callable[[Any], object], operands: list[Any], **_: object) -> float:
    """In place of a time: 1 s, once the work was done."""
    work(operands[0])
    return 1.0


@pytest.fixture
def load(root: Path, emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a benchmark, with the CPU for a GPU that does everything in one second."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    for name in ("timing", "layers", "decoder", "gemm", "model", "tune", "sanitize"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    timing = importlib.import_module("timing")
    monkeypatch.setattr(timing, "find_gpu", lambda _: torch.device("cpu"))
    monkeypatch.setattr(timing, "graph_time", run_once)
    monkeypatch.setattr(timing, "copies_past_cache", lambda *_: 2)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda _: 1e12)
    monkeypatch.setattr(timing, "describe", lambda _: {"device": "Emulated GPU", "torch": torch.__version__})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)

    def load(name: str) -> ModuleType:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "launcher_for", lambda _: emulation.launcher, raising=False)
        monkeypatch.setattr(module, "CudaLinear", emulation.linear, raising=False)
        return module

    return load


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def test_gemm(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ["--rows", 1, 120, "--shapes", "64x128", "--bits", 3, 8, "--dtypes", "float16", "--out", tmp_path]
    run(load("gemm"), monkeypatch, *arguments)
    report = json.loads((tmp_path / "gemm.json").read_text())
    (table,) = report["tables"]
    assert set(table["columns"]) == {"cuBLAS", "3 bits", "8 bits"}
    assert [result["path"] for result in table["columns"]["3 bits"].values()] == ["fused", "dense"]


def test_model(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load("model")
    fields = {"hidden": 64, "intermediate": 128, "heads": 4, "key_heads": 2, "vocabulary": 50, "layers": 1}
    sizes = dataclasses.make_dataclass(
        "Small", [(name, int, value) for name, value in fields.items()], bases=(module.Sizes,), frozen=True
    )
    monkeypatch.setattr(module, "Sizes", sizes)
    monkeypatch.setattr(module, "WINDOW", 16)
    monkeypatch.setattr(module, "CONTEXT", 16)
    run(module, monkeypatch, "--bits", 16, 4, "--batches", 1, 3, "--group-size", 32, "--out", tmp_path)
    report = json.loads((tmp_path / "model.json").read_text())
    assert [(result["bits"], result["tokens_per_second"]) for result in report["results"]] == [
        (bits, {"1": 1.0, "3": 3.0}) for bits in (16, 4)
    ]


def test_tune(load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = load("tune")
    monkeypatch.setattr(module, "SHAPES", ((64, 1024), (128, 128)))
    monkeypatch.setattr(module, "DENSE_SHAPES", ((128, 128),))
    monkeypatch.setattr(module, "DENSE_ROWS", (120,))
    monkeypatch.setattr(module, "DEVICES", tmp_path)
    run(module, monkeypatch)
    (path,) = tmp_path.iterdir()
    assert path.name == "emulated-gpu.json"
    assert tuning_for("Emulated GPU", tmp_path).crossover == dict.fromkeys(BITS, module.MANY[0])


def test_sanitize(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("sanitize")
    monkeypatch.setattr(module, "BITS", (3,))
    monkeypatch.setattr(module, "OUTPUTS", 32)
    monkeypatch.setattr(module, "COLUMNS", (48,))
    device = torch.device("cpu")
    module.run_products(device)
    module.run_sweeps(device, module.launcher_for(device).library)


def test_without_a_gpu_they_say_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    monkeypatch.delitem(sys.modules, "timing", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("timing").find_gpu(argparse.ArgumentParser())
