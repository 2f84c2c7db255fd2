"""A kernel that is wrong on a GPU is not used there."""

import re

import pytest
import torch

from gptqkit.kernels.library import KernelLibrary
from gptqkit.kernels.linear import TorchLinear, make_linear
from gptqkit.kernels.trial import fault, tried_library
from support.kernel_cases import make_weight


def test_kernels_that_are_right_pass(place):
    fault.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        assert fault(place.launcher.library, place.device) == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gemm", "product of 1 rows is wrong by .* at 2 bits in torch.float16"),
        ("dequantize", "dequantized weight is wrong at 2 bits in torch.float16"),
        ("sweep", "sweep decides on other codes"),
    ],
)
def test_a_kernel_that_does_nothing_is_found(emulator_path, monkeypatch, name, words):
    library = KernelLibrary(emulator_path)
    library.functions[name] = lambda *_: 0
    # What is left in memory is no product by chance.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda like, *size, **how: like.new_full(*size, 3, **how))
    assert re.search(words, fault(library, torch.device("cpu")))


def test_a_fault_is_named_and_torch_computes_instead(gpu, monkeypatch):
    monkeypatch.setattr("gptqkit.kernels.trial.fault", lambda *_: "the kernels' product of 1 rows is wrong")
    device = torch.device("cuda", 0)
    library, reason = tried_library(device)
    assert library is None
    assert reason.startswith("the kernels' product of 1 rows is wrong on ")
    layer = make_linear(make_weight().to(gpu), None, torch.float16, name="layer")
    assert isinstance(layer, TorchLinear)
    assert "product of 1 rows is wrong" in layer.choice.reason
