"""Whole models on the kernels: the emulator's on every machine, the real ones where there is a GPU."""

import dataclasses
import gc

import pytest
import torch

from gptqkit import Calibration, Evaluation, QuantizeConfig, Run, evaluate, load, quantize
from gptqkit.kernels.backends import BACKENDS
from gptqkit.kernels.linear import TorchLinear
from gptqkit.kernels.ops import Launcher
from support.emulation import TUNING


@pytest.fixture(scope="module")
def checkpoint(example_model, small_text, tmp_path_factory):
    """The example model at 3 bits, asymmetric, with act-order: everything at once."""
    out = tmp_path_factory.mktemp("example") / "q"
    config = QuantizeConfig(bits=3, group_size=64, sym=False, desc_act=True, format="gptq_v2")
    calibration = Calibration([small_text], samples=4, sequence_length=64)
    quantize(example_model, calibration, out, config, run=Run(device="cpu"))
    return out


@pytest.fixture
def emulated(emulation, monkeypatch):
    """Lets `load` take the backend "emulated"."""
    monkeypatch.setattr("gptqkit.kernels.cuda.EmulatedLinear", emulation.linear, raising=False)
    monkeypatch.setitem(BACKENDS, "emulated", "kernels.cuda.EmulatedLinear")
    return emulation


SETTINGS = {"sequence_length": 16, "max_windows": 2, "batch_size": 1, "dtype": "float16"}


@pytest.mark.parametrize("crossover", [10**6, 1], ids=["fused", "dense"])
def test_perplexity_equals_the_reference_backends(checkpoint, emulated, small_text, crossover, monkeypatch):
    tuning = dataclasses.replace(TUNING, crossover={3: crossover})
    monkeypatch.setattr(emulated, "launcher", Launcher(emulated.library, torch.device("cpu"), tuning, 8))
    scores, reference = (
        evaluate(checkpoint, [small_text], Evaluation(device="cpu", backend=backend, **SETTINGS))
        for backend in ("emulated", "torch")
    )
    assert scores.backend == "emulated"
    assert scores.perplexity == pytest.approx(reference.perplexity, rel=1e-3)


# Each length takes another kernel; the longer ones take long where the GPU is simulated.
@pytest.mark.parametrize("length", [16, *(pytest.param(length, marks=pytest.mark.gpu) for length in (48, 512))])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_perplexity_on_a_gpu(checkpoint, gpu, small_text, dtype, length):
    settings = {**SETTINGS, "dtype": dtype, "device": gpu, "sequence_length": length}
    scores = evaluate(checkpoint, [small_text], Evaluation(**settings))
    reference = evaluate(checkpoint, [small_text], Evaluation(backend="torch", **settings))
    assert (scores.backend, reference.backend) == ("cuda", "torch")
    assert scores.perplexity == pytest.approx(reference.perplexity, rel=1e-3 if dtype == "float16" else 1e-2)


def test_memory_of_a_loaded_model(checkpoint, gpu):
    held = {}
    for name in ("torch", "cuda"):
        gc.collect()  # what is garbage already must not count as freed in between
        before = torch.cuda.memory_allocated()
        model, _ = load(checkpoint, device=gpu, backend=name)
        held[name] = torch.cuda.memory_allocated() - before
        assert model.gptqkit_backend.name == name
        del model
    assert held["cuda"] <= 1.05 * held["torch"]


def test_generation_on_a_gpu(checkpoint, gpu):
    model, tokenizer = load(checkpoint, device=gpu)
    prompt = tokenizer("The captain said", return_tensors="pt").to(gpu)
    ids = [model.generate(**prompt, max_new_tokens=4, do_sample=False) for _ in range(2)]
    assert ids[0].shape[1] == prompt.input_ids.shape[1] + 4
    assert torch.equal(*ids)


class UnbuiltLinear(TorchLinear):
    """Stands for a backend that should serve this device and cannot."""

    device_type = "cpu"

    @classmethod
    def refusal(cls, weight, dtype):  # noqa: ARG003
        return "the kernels are not built"


def test_a_fallback_is_announced_once(checkpoint, monkeypatch, caplog):
    monkeypatch.setattr("gptqkit.kernels.linear.UnbuiltLinear", UnbuiltLinear, raising=False)
    monkeypatch.setitem(BACKENDS, "cuda", "kernels.linear.UnbuiltLinear")
    model, _ = load(checkpoint, device="cpu")
    assert model.gptqkit_backend.name == "cpu"
    [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "not cuda, because the kernels are not built" in warning.getMessage()
