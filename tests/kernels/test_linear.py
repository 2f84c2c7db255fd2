"""Every backend computes x weightT + bias, keeps what it needs and says why it was chosen or not."""

import dataclasses
import itertools

import pytest
import torch

from gptqkit.errors import BackendError
from gptqkit.kernels import backends
from gptqkit.kernels.backends import BACKENDS, check_backend
from gptqkit.kernels.linear import (
    CpuLinear,
    QuantLinear,
    TorchLinear,
    find_backend,
    make_linear,
    summarize,
)
from support.kernel_cases import make_weight

SHUFFLED = torch.randperm(96, generator=torch.Generator().manual_seed(3)) // 32
UNEVEN = torch.tensor([0] * 40 + [1] * 24 + [2] * 32)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def exact(weight):
    """The weight in float64, column by column."""
    index = weight.group_index.long()
    return weight.codes.double() * weight.scale.double()[:, index] + weight.offset.double()[:, index]


def error(y, expected):
    return float((y.double() - expected).norm() / expected.norm())


def buffer_bytes(module):
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"index": SHUFFLED},
        {"index": UNEVEN},
        {"least_zero": 1},
        {"zeros": 0},
        {"group_size": 64},  # the last one is shorter
        {"group_size": 96},
        {"rows": 7, "columns": 33, "group_size": 11},
        {"scale": torch.full((64, 3), 1e-6).bfloat16().float()},  # float16 would round it
    ],
    ids=lambda settings: "-".join(settings),
)
def test_torch_and_cpu_use_the_exact_weight_rounded_once(bits, settings):
    weight = make_weight(bits, **settings)
    bias = torch.randn(weight.out_features)
    for dtype in DTYPES:
        x = torch.randn(2, 5, weight.in_features).to(dtype)
        dense = exact(weight).to(torch.float32).to(dtype)
        expected = torch.nn.functional.linear(x, dense, bias.to(dtype))
        for kind in (TorchLinear, CpuLinear):
            assert kind.refusal(weight, dtype) is None
            assert torch.equal(kind(weight, bias, dtype)(x), expected)


def test_any_offset_and_scale_gives_the_values_of_the_definition():
    for bits, scale in itertools.product((2, 8), (None, torch.rand(64, 3) + 0.1)):  # these need all of float32
        weight = make_weight(bits, scale=scale)
        zero = weight.zero_point()
        zero[0], zero[1] = 0, 2**bits
        for offset in (weight.offset, -(zero * weight.scale), torch.randn(64, 3), weight.scale * -40000):
            odd = dataclasses.replace(weight, offset=offset)
            assert torch.equal(TorchLinear(odd, None, torch.float32).dequantize(torch.float32), odd.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("least_zero", [0, 1])
@pytest.mark.parametrize("group_size", [16, 128])
def test_torch_backend_takes_the_memory_of_a_packed_file(bits, group_size, least_zero):
    weight = make_weight(bits, 256, 256, group_size, least_zero=least_zero)
    file = 256 * 256 * bits / 8 + weight.scale.numel() * (2 + bits / 8)
    assert buffer_bytes(TorchLinear(weight, None, torch.float16)) == file + 2  # the least zero
    shuffled = dataclasses.replace(weight, group_index=weight.group_index.flip(0))
    assert buffer_bytes(TorchLinear(shuffled, None, torch.float16)) == file + 2 + 4 * 256


def test_cpu_backend_keeps_the_dense_weight_alone():
    assert buffer_bytes(CpuLinear(make_weight(), None, torch.bfloat16)) == 64 * 96 * 2


@pytest.mark.parametrize("scale", [None, torch.full((64, 3), 1e-6).bfloat16().float()])
def test_changing_the_dtype_does_not_round_the_weight(scale):
    weight = make_weight(8, scale=scale)
    linear = TorchLinear(weight, torch.randn(64), torch.float32).to(torch.bfloat16).double().float()
    assert torch.equal(linear.dequantize(torch.float32), weight.dequantize())
    assert linear.bias.dtype == torch.float32
    bias, x = torch.randn(64), torch.randn(3, 96)
    found = TorchLinear(weight, bias, torch.float16)(x)  # computes in the dtype of what it receives
    assert torch.equal(found, torch.nn.functional.linear(x, weight.dequantize(), bias.half().float()))


def test_layers_hold_nothing_to_train_and_their_state_survives_saving():
    for name in ("torch", "cpu"):
        first, second = (
            make_linear(make_weight(seed=seed), torch.randn(64), torch.bfloat16, name="layer", backend=name)
            for seed in (1, 2)
        )
        assert list(first.parameters()) == []
        x = torch.randn(9, 96).bfloat16()
        assert not torch.equal(first(x), second(x))
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(x), second(x))
        assert "out_features=64, bits=4, group_size=32, act_order=False, bias=True" in repr(first)


def test_automatic_choice_is_exact_and_explains_itself():
    layer = make_linear(make_weight(), None, torch.bfloat16, name="layer")
    assert isinstance(layer, CpuLinear)
    assert (layer.choice.name, layer.choice.fallback) == ("cpu", False)
    assert "chosen automatically" in layer.choice.reason
    assert "cuda" not in layer.choice.reason


def test_every_backend_is_found_and_torch_serves_what_the_others_may_refuse():
    assert all(issubclass(find_backend(name), QuantLinear) for name in BACKENDS)
    assert list(BACKENDS)[-1] == "torch"
    assert find_backend("torch").device_type is None


def test_an_explicit_choice_that_cannot_serve_is_an_error_that_says_why():
    with pytest.raises(BackendError, match=r"'cuda' cannot serve model\.layer: .*serves cuda devices only.* on cpu"):
        make_linear(make_weight(), None, torch.float16, name="model.layer", backend="cuda")
    assert (
        "as asked for" in make_linear(make_weight(), None, torch.float16, name="layer", backend="torch").choice.reason
    )


def test_unknown_backends_are_refused():
    with pytest.raises(BackendError, match="choose one of auto, cuda, cpu, torch"):
        check_backend("tpu")
    with pytest.raises(BackendError, match="backend is 'tpu'"):
        make_linear(make_weight(), None, torch.float32, name="layer", backend="tpu")
    check_backend("auto")


class UnbuiltLinear(TorchLinear):
    """Stands for a backend that should serve this device and cannot."""

    device_type = "cpu"

    @classmethod
    def refusal(cls, weight, dtype):  # noqa: ARG003
        return "the kernels are not built"


def test_a_fallback_is_marked_and_explained_and_a_models_layers_are_counted(monkeypatch):
    def make():
        return make_linear(make_weight(), None, torch.float32, name="layer")

    monkeypatch.setattr("gptqkit.kernels.linear.UnbuiltLinear", UnbuiltLinear, raising=False)
    plain = [make(), make()]
    monkeypatch.setitem(backends.BACKENDS, "cuda", "kernels.linear:UnbuiltLinear")
    passed_over = make()
    assert passed_over.choice.fallback
    assert "not cuda, because the kernels are not built" in passed_over.choice.reason
    model = torch.nn.Sequential(*plain, torch.nn.Linear(96, 64), torch.nn.Sequential(passed_over))
    assert summarize(model).fallback
    assert not summarize(model[:2]).fallback
    assert str(summarize(model[:2])) == f"cpu: {plain[0].choice.reason} (2 layers)"
    other = make_linear(make_weight(), None, torch.float32, name="layer", backend="torch")
    both = summarize(torch.nn.Sequential(*plain, other))
    assert both.name == "cpu+torch"
    assert "(2 layers) | torch:" in both.reason
