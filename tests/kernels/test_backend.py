"""The choice of a backend, and the reasons it gives."""

import dataclasses

import pytest
import torch

from gptqkit.errors import BackendError
from gptqkit.kernels.backend import choose_backend, make_linear, summarize

UNEVEN = torch.tensor([0] * 40 + [1] * 24 + [2] * 32)


def test_automatic_choice_is_exact_and_explains_itself(make_layer):
    packed = make_layer().packed
    choice = choose_backend("auto", packed, torch.bfloat16)
    assert choice.name == "cpu"
    assert "chosen automatically" in choice.reason
    assert make_linear(choice, packed, torch.bfloat16).backend == "cpu"


def test_automatic_choice_passes_over_what_cannot_serve_and_says_so(make_layer):
    packed = make_layer().packed
    elsewhere = dataclasses.replace(packed, qweight=packed.qweight.to("meta"))
    choice = choose_backend("auto", elsewhere, torch.float16)
    assert choice.name == "torch"
    assert "not cpu, because it serves the CPU only" in choice.reason


@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        ({}, torch.float32, "only bfloat16"),
        ({"bits": 3}, torch.bfloat16, "3 bits"),
        ({"group_size": 96}, torch.bfloat16, "groups of 96"),
        ({"group_size": 64}, torch.bfloat16, "groups of 64 in 96 columns"),
        ({"rows": 72}, torch.bfloat16, "72 outputs"),
        ({"g_idx": UNEVEN}, torch.bfloat16, "cannot be sorted"),
    ],
)
def test_an_explicit_choice_that_cannot_serve_is_an_error_that_says_why(make_layer, layer, dtype, reason):
    packed = make_layer(**layer).packed
    with pytest.raises(BackendError, match=rf"'cpu-int4' cannot serve layer: .*{reason}"):
        choose_backend("cpu-int4", packed, dtype)
    assert choose_backend("torch", packed, dtype).name == "torch"


def test_unknown_and_unavailable_backends_are_refused(make_layer):
    packed = make_layer().packed
    with pytest.raises(BackendError, match="choose one of auto, torch, cpu"):
        choose_backend("tpu", packed, torch.float32)
    with pytest.raises(BackendError, match="no CUDA kernels"):
        choose_backend("cuda", packed, torch.float32)


def test_summary_counts_layers(make_layer):
    packed = make_layer().packed
    cpu, reference = (choose_backend(name, packed, torch.float32) for name in ("cpu", "torch"))
    both = summarize([cpu, reference, cpu])
    assert both.name == "cpu+torch"
    assert "(2 layers)" in both.reason
    assert "(1 layer)" in both.reason
