"""Every backend computes x weightT + bias."""

import pytest
import torch

from gptqkit.kernels.cpu_backend import CpuLinear
from gptqkit.kernels.int4_backend import MOST_TOKENS, CpuInt4Linear
from gptqkit.kernels.torch_backend import TorchLinear

SHUFFLED = torch.randperm(96, generator=torch.Generator().manual_seed(3)) // 32


def error(y, exact):
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("g_idx", [None, SHUFFLED], ids=["trivial", "act_order"])
def test_torch_backend_equals_a_dense_layer(make_layer, dtype, g_idx):
    layer = make_layer(bits=3, g_idx=g_idx, bias=True)
    linear = TorchLinear(layer.packed, dtype)
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.nn.functional.linear(x, layer.weight.to(dtype), layer.packed.bias.to(dtype))
    assert torch.equal(linear(x), expected)
    exact = x.double() @ layer.weight.t() + layer.packed.bias.double()
    assert error(linear(x), exact) <= 2 * error(expected, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_backend_equals_torch_backend_bit_for_bit(make_layer, dtype):
    for g_idx in (None, SHUFFLED):
        layer = make_layer(bits=2, zero_offset=1, g_idx=g_idx, bias=True)
        cpu, reference = CpuLinear(layer.packed, dtype), TorchLinear(layer.packed, dtype)
        assert torch.equal(cpu.weight, reference.packed().dequantize(dtype))
        x = torch.randn(7, 96).to(dtype)
        assert torch.equal(cpu(x), reference(x))


def test_cpu_backend_frees_the_words(make_layer):
    linear = CpuLinear(make_layer().packed, torch.float32)
    assert {name for name, _ in linear.named_buffers()} == {"weight"}


def test_changing_the_dtype_does_not_round_the_scales(make_layer):
    layer = make_layer(bits=8)
    linear = TorchLinear(layer.packed, torch.float32).to(torch.bfloat16).to(torch.float32)
    assert linear.scales.dtype == torch.float16
    assert torch.equal(linear.packed().dequantize(torch.float32).double(), layer.weight)


def test_layers_hold_nothing_to_train(make_layer):
    for kind in (TorchLinear, CpuLinear):
        assert list(kind(make_layer(bias=True).packed, torch.float32).parameters()) == []


@pytest.mark.parametrize("g_idx", [None, SHUFFLED], ids=["trivial", "act_order"])
@pytest.mark.parametrize("tokens", [1, MOST_TOKENS, MOST_TOKENS + 1])
def test_int4_backend_is_near(make_layer, g_idx, tokens):
    layer = make_layer(g_idx=g_idx, bias=True)
    linear = CpuInt4Linear(layer.packed, torch.bfloat16)
    x = torch.randn(1, tokens, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ layer.weight.t() + layer.packed.bias.double()
    dense = torch.nn.functional.linear(x, layer.weight.bfloat16(), layer.packed.bias.bfloat16())
    assert linear(x).shape == (1, tokens, 64)
    assert error(linear(x), exact) <= 2 * error(dense, exact)
    assert torch.equal(linear(x), TorchLinear(layer.packed, torch.bfloat16)(x)) == (tokens > MOST_TOKENS)


def test_int4_backend_rounds_scales_and_zeros_to_bfloat16(make_layer):
    """Why it is never chosen automatically: what it multiplies with is not the checkpoint's weight."""
    layer = make_layer(rows=64, columns=32)
    linear = CpuInt4Linear(layer.packed, torch.bfloat16)
    columns = torch.eye(32, dtype=torch.bfloat16).split(MOST_TOKENS)
    weight = torch.cat([linear(part) for part in columns]).t()
    scales = layer.packed.scales.float()
    codes = layer.packed.codes().float()
    rounded = (codes - 8) * scales.bfloat16().float().t() + ((8 - layer.packed.zeros()) * scales).bfloat16().float().t()
    assert torch.equal(weight, rounded.bfloat16())
    assert not torch.equal(weight, layer.weight.bfloat16())
