"""Products on repacked layers: the same on the emulator and, where there is one, on a GPU."""

import re

import pytest
import torch

from gptqkit.errors import BackendError, ShapeError
from gptqkit.kernels.gemm import dequantize, matmul, refusal, repack
from gptqkit.kernels.tuning import Tuning
from support.emulation import move

BITS = (2, 3, 4, 8)
DTYPES = (torch.float16, torch.bfloat16)


def inputs(*shape, dtype=torch.float16, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device, dtype)


def shuffled(columns, group_size):
    return torch.randperm(columns, generator=torch.Generator().manual_seed(3)) // group_size


def make(make_layer, launcher, **settings):
    """A repacked layer and its exact weight, (out, in) float64 on the CPU."""
    layer = make_layer(**settings)
    return repack(move(layer.packed, launcher.device)), layer


def relative_error(y, exact):
    return float((y.cpu().double() - exact).norm() / exact.norm())


def assert_as_good_as_torch(y, x, layer):
    """The error is at most twice that of a dense product in the same dtype."""
    bias = None if layer.packed.bias is None else layer.packed.bias.to(x.dtype)
    x = x.cpu()
    exact = x.double() @ layer.weight.t() + (0 if bias is None else bias.double())
    dense = torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)
    assert y.shape == dense.shape
    assert y.dtype == dense.dtype
    assert relative_error(y, exact) <= 2 * relative_error(dense, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("act_order", [False, True], ids=["", "act_order"])
def test_product(make_layer, launcher, bits, dtype, act_order):
    g_idx = shuffled(128, 32) if act_order else None
    weight, layer = make(make_layer, launcher, bits=bits, columns=128, g_idx=g_idx, bias=True)
    for tokens in (1, 17):
        x = inputs(tokens, 128, dtype=dtype, device=launcher.device)
        bias = layer.packed.bias.to(launcher.device, dtype)
        assert_as_good_as_torch(matmul(x, weight, bias), x, layer)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantizes_to_the_reference_bit_for_bit(make_layer, launcher, bits, zero_offset, dtype):
    for settings in ({}, {"g_idx": shuffled(96, 32)}, {"stored_zero": 0}, {"stored_zero": 2**bits - 1}):
        weight, layer = make(make_layer, launcher, bits=bits, zero_offset=zero_offset, **settings)
        dense = layer.packed.dequantize(dtype)
        if weight.order is not None:
            dense = dense[:, weight.order.cpu().long()]
        assert torch.equal(dequantize(weight, dtype).cpu(), dense)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unit_inputs_read_off_the_weight_exactly(make_layer, launcher, bits, dtype):
    """Also the proof that the hardware multiplies subnormal float16 operands, on which the kernel counts."""
    weight, layer = make(make_layer, launcher, bits=bits)
    for tokens in (8, 32):
        x = torch.eye(96, dtype=dtype, device=launcher.device)[:tokens]
        assert torch.equal(matmul(x, weight).cpu(), layer.packed.dequantize(dtype).t()[:tokens])


@pytest.mark.parametrize("tokens", [1, 99, 100, 130])
def test_both_paths_serve_any_number_of_tokens(make_layer, launcher, tokens):
    weight, layer = make(make_layer, launcher, rows=160, bias=True)
    x = inputs(tokens, 96, device=launcher.device)
    arguments = (weight.weight, weight.scale, weight.zero, layer.packed.bias.to(x.device), 4, 32, 160)
    assert_as_good_as_torch(torch.ops.gptqkit.linear(x, *arguments), x, layer)
    assert_as_good_as_torch(launcher.gemm(x, *arguments, 1), x, layer)
    assert_as_good_as_torch(launcher.dense_product(x, *arguments), x, layer)


def test_dense_path_works_through_a_small_buffer(make_layer, launcher, monkeypatch):
    weight, layer = make(make_layer, launcher, rows=160, bias=True)
    x = inputs(120, 96, device=launcher.device)
    arguments = (weight.weight, weight.scale, weight.zero, layer.packed.bias.to(x.device), 4, 32, 160)
    whole = launcher.dense_product(x, *arguments)
    monkeypatch.setattr(Tuning, "dense_rows", lambda *_: 64)
    assert_as_good_as_torch(launcher.dense_product(x, *arguments), x, layer)
    without_bias = launcher.dense_product(x, *arguments[:3], None, *arguments[4:])
    assert relative_error(without_bias + arguments[3], whole.cpu().double()) < 1e-3


@pytest.mark.parametrize("split", [1, 2, 3])
def test_split_products_are_deterministic_and_leave_the_tickets_clear(make_layer, launcher, split):
    weight, layer = make(make_layer, launcher, columns=384, group_size=128)
    x = inputs(3, 384, device=launcher.device)
    arguments = (weight.weight, weight.scale, weight.zero, None, 4, 128, 64, split)
    y = torch.ops.gptqkit.gemm(x, *arguments)
    assert_as_good_as_torch(y, x, layer)
    assert all(torch.equal(y, torch.ops.gptqkit.gemm(x, *arguments)) for _ in range(3))
    assert not any(bool(tickets.any()) for tickets in launcher.tickets._by_stream.values())


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.t().contiguous().t(),
        lambda x: x[:, 1:97],
        lambda x: x[:, 8:104],
        lambda x: x[::3],
        lambda x: x[:1].expand(5, -1),
        lambda x: x.view(3, 5, 2, 104)[:, :, 1],
        lambda x: x.view(5, 3, 208).transpose(0, 1),
        lambda x: x[0],
    ],
)
def test_inputs_need_not_be_contiguous(make_layer, launcher, view):
    weight, layer = make(make_layer, launcher)
    x = view(inputs(15, 208, device=launcher.device))[..., :96]
    assert_as_good_as_torch(matmul(x, weight), x, layer)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_empty_batches(make_layer, launcher, shape):
    for settings in ({}, {"g_idx": shuffled(96, 32)}):
        weight, _ = make(make_layer, launcher, **settings)
        assert matmul(inputs(*shape, 96, device=launcher.device), weight).shape == (*shape, 64)


@pytest.mark.parametrize(
    "settings",
    [
        {"rows": 8, "columns": 32, "group_size": 16},
        {"rows": 72, "columns": 160, "group_size": 160},
        {"rows": 136, "columns": 224, "group_size": 64},
        {"rows": 64, "columns": 96, "group_size": 128},
        {"rows": 64, "columns": 128, "group_size": 48},
    ],
)
def test_ragged_shapes_and_groups(make_layer, launcher, settings):
    weight, layer = make(make_layer, launcher, **settings)
    for tokens in (1, 20, 101):
        x = inputs(tokens, settings["columns"], device=launcher.device)
        assert_as_good_as_torch(matmul(x, weight), x, layer)


@pytest.mark.parametrize("scale_dtype", DTYPES, ids=str)
def test_one_layer_serves_both_dtypes_exactly(make_layer, launcher, scale_dtype):
    weight, layer = make(make_layer, launcher, bits=3, scale_dtype=scale_dtype)
    for dtype in DTYPES:
        assert torch.equal(dequantize(weight, dtype).cpu(), layer.packed.dequantize(dtype))


def test_gradients_reach_the_input(make_layer, launcher):
    weight, layer = make(make_layer, launcher, g_idx=shuffled(96, 32))
    x = inputs(3, 96, device=launcher.device).requires_grad_()
    matmul(x, weight).float().sum().backward()
    assert relative_error(x.grad, layer.weight.sum(0).expand(3, -1)) < 1e-3


def test_activations_of_another_dtype_are_refused(make_layer, launcher):
    weight, layer = make(make_layer, launcher, bias=True)
    with pytest.raises(ShapeError, match=r"x is torch\.float32, and the kernels compute in float16 or bfloat16"):
        matmul(inputs(2, 96, dtype=torch.float32, device=launcher.device), weight)
    with pytest.raises(ShapeError, match=r"bias is torch\.float16 .*torch\.bfloat16 \(64,\) .*is needed"):
        matmul(inputs(2, 96, dtype=torch.bfloat16, device=launcher.device), weight, layer.packed.bias)


@pytest.mark.parametrize("columns", [32, 64, 160])
def test_activations_of_another_layer_are_refused(make_layer, launcher, columns):
    weight, _ = make(make_layer, launcher)
    with pytest.raises(ShapeError, match=f"x has {columns} columns, and the layer takes 96"):
        matmul(inputs(2, columns, device=launcher.device), weight)


def test_errors_of_the_library_carry_its_words(make_layer, launcher):
    weight, _ = make(make_layer, launcher)
    x = inputs(2, 96, device=launcher.device)
    with pytest.raises(BackendError, match="split is outside"):
        torch.ops.gptqkit.gemm(x, weight.weight, weight.scale, weight.zero, None, 4, 32, 64, 1000)


@pytest.mark.parametrize(
    ("settings", "dtype", "reason"),
    [
        ({}, torch.float32, "compute in float16 or bfloat16"),
        ({"group_size": 24}, torch.float16, "groups of 24 columns.*multiple of 16"),
        ({"g_idx": torch.tensor([0] * 40 + [1] * 24 + [2] * 32)}, torch.float16, "cannot be sorted"),
    ],
)
def test_refusals_say_why(make_layer, settings, dtype, reason):
    packed = make_layer(**settings).packed
    assert re.search(reason, refusal(packed, dtype))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scales_that_float16_would_round_are_refused(make_layer, scale):
    packed = make_layer(scale_dtype=torch.bfloat16).packed
    assert refusal(packed, torch.bfloat16) is None
    packed.scales[0, 0] = scale
    assert "no float16 values" in refusal(packed, torch.bfloat16)


def test_layers_that_are_served(make_layer):
    for settings in ({}, {"group_size": 96}, {"group_size": 64}, {"g_idx": shuffled(96, 32)}):
        assert refusal(make_layer(**settings).packed, torch.float16) is None
