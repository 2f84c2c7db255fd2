"""Quantizing and running on a GPU, simulated on every machine and real where there is one."""

import pytest
import torch

import gptqkit
from support.models import build, samples, save
from support.pipeline import assert_close, dequantized, outputs, quantize, weights

SMALL = samples(4, 16)  # which the simulation needs


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there @ here,
        lambda here, there: there.index_put((torch.tensor([0], device=here.device),), there[:1]),
        lambda here, there: here.index_put((torch.tensor([0]),), there[:1]),
        lambda here, there: torch.cat([here, there]),
        lambda here, there: torch.mm(here.half().T, there.half(), out_dtype=torch.float32),
        lambda here, there: torch.nn.functional.scaled_dot_product_attention(here[None], there[None], here[None]),
    ],
)
def test_operands_on_two_devices_are_refused(gpu, mix):
    there = torch.ones(8, 8)
    with pytest.raises((RuntimeError, IndexError)):
        mix(there.to(gpu), there)
    mix(there.to(gpu), there.to(gpu))


@pytest.mark.parametrize(
    ("name", "method", "settings", "activations"),
    [
        ("llama", "rtn", {}, "auto"),
        ("llama", "gptq", {"lm_head": True, "desc_act": True}, "memory"),
        ("qwen2", "gptaq", {"true_sequential": False}, "disk"),
        ("mixtral", "gptq", {}, "device"),
        ("gpt_oss", "gptaq", {}, "device"),
        ("llava", "gptaq", {}, "auto"),
        ("bert", "gptq", {}, "auto"),
    ],
)
def test_what_a_gpu_quantizes_is_as_good_as_on_a_cpu_and_is_what_is_loaded(
    gpu, name, method, settings, activations, tmp_path
):
    changes = {"tie_word_embeddings": False} if settings.get("lm_head") else {}
    save(build(name, **changes).bfloat16(), tmp_path / "model")
    run = {"activations": activations}
    errors = []
    for device in ("cpu", gpu):
        where = {**run, "device": device}
        report = quantize(tmp_path / "model", tmp_path / device, SMALL, method=method, run=where, **settings).report
        errors.append({module.name: module.error for module in report.modules})
        assert report.device == device
    assert errors[0].keys() == errors[1].keys()
    assert sum(errors[1].values()) == pytest.approx(sum(errors[0].values()), rel=0.05)
    assert weights(tmp_path / gpu).keys() == weights(tmp_path / "cpu").keys()
    theirs = outputs(dequantized(tmp_path / gpu, tmp_path / "model", tmp_path / "dense"), SMALL)
    loaded, _ = gptqkit.load(tmp_path / gpu, device=gpu, backend="torch", dtype="float32")
    assert loaded.device.type == "cuda"
    assert_close(outputs(loaded, SMALL).cpu(), theirs, rtol=1e-3)
