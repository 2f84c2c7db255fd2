"""The dense weight is (code - zero) * scale, exactly."""

import pytest
import torch

SHUFFLED = torch.arange(96).flip(0) * 7 % 96 // 32


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_dequantizes_exactly(make_layer, bits, zero_offset, scale_dtype):
    layer = make_layer(bits=bits, zero_offset=zero_offset, scale_dtype=scale_dtype)
    assert torch.equal(layer.packed.dequantize(torch.float32).double(), layer.weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_extreme_zeros_do_not_wrap(make_layer, bits):
    lowest = make_layer(bits=bits, zero_offset=0, stored_zero=0)
    highest = make_layer(bits=bits, zero_offset=1, stored_zero=2**bits - 1)
    assert int(lowest.packed.zeros().max()) == 0
    assert int(highest.packed.zeros().min()) == 2**bits
    assert bool((lowest.weight >= 0).all() and (highest.weight < 0).all())
    for layer in (lowest, highest):
        assert torch.equal(layer.packed.dequantize(torch.float32).double(), layer.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_once(make_layer, dtype):
    layer = make_layer(bits=8)
    assert torch.equal(layer.packed.dequantize(dtype), layer.weight.to(dtype))


def test_columns_find_their_group_through_g_idx(make_layer):
    layer = make_layer(g_idx=SHUFFLED)
    assert layer.packed.act_order
    assert torch.equal(layer.packed.dequantize(torch.float32).double(), layer.weight)
    straight = make_layer()
    assert not torch.equal(straight.weight, layer.weight)


def test_last_group_may_be_short_and_a_group_may_be_the_row(make_layer):
    for group_size in (64, 96):
        layer = make_layer(group_size=group_size)
        assert torch.equal(layer.packed.dequantize(torch.float32).double(), layer.weight)
