"""GPTQ versions 1 and 2, to the bit: against tensors that numpy makes, and words written down by hand."""

import dataclasses

import pytest
import torch

from gptqkit.errors import CheckpointError, ConfigError, ConversionError
from gptqkit.export.formats import Declared, LayerSpec, find_format
from support.weights import gptq_tensors, random_weight, same

VERSIONS = [1, 2]


def layout(version):
    return find_format("gptq" if version == 1 else "gptq_v2")


def read(tensors, *, version=2, bits=4, group_size=32, sym=False):
    declared = Declared(format="gptq", bits=bits, group_size=group_size, sym=sym, desc_act=False)
    one = layout(version)
    return one.unpack("layer", tensors, one.spec("layer", tensors, declared))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", [{"sym": True}, {}, {"act_order": True}])
@pytest.mark.parametrize("group_size", [32, 40, None])  # whole groups, a rest, one group per row
def test_tensors_are_those_of_an_independent_writer(version, bits, kind, group_size):
    weight = random_weight(bits, group_size=group_size, zeros=(2 - version, 2**bits + 1 - version), **kind)
    tensors = layout(version).pack(weight)
    expected = gptq_tensors(weight, version=version)
    assert list(tensors) == list(layout(version).suffixes) == list(expected)
    for key, tensor in tensors.items():
        assert tensor.dtype == expected[key].dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, expected[key]), key
    found = read(expected, version=version, bits=bits, group_size=group_size, sym=weight.sym)
    assert same(found, weight)
    columns = torch.arange(96)
    zero = (-weight.offset / weight.scale).round()[:, weight.group_index[columns].long()]
    value = (weight.codes - zero) * weight.scale[:, weight.group_index[columns].long()]
    assert torch.equal(found.dequantize(), value)


@pytest.mark.parametrize(
    ("version", "bits", "zeros", "expected"),
    [
        (2, 4, [8] * 8, [0x88888888]),
        (1, 4, [8] * 8, [0x77777777]),
        (2, 4, [0, 1, 2, 3, 4, 5, 6, 15], [0xF6543210]),
        (1, 4, [1, 2, 3, 4, 5, 6, 7, 16], [0xF6543210]),
        (1, 2, [2] * 15 + [1], [0x15555555]),
        (1, 8, [128, 128, 128, 256], [0xFF7F7F7F]),
        (2, 3, [4] * 32, [0x24924924, 0x49249249, 0x92492492]),
        (1, 3, [4] * 32, [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]),
    ],
)
def test_zeros_by_hand(version, bits, zeros, expected):
    zero = torch.tensor(zeros).repeat(32 // len(zeros))[:, None]
    weight = random_weight(bits, rows=32, columns=32)
    weight = dataclasses.replace(weight, offset=-zero * weight.scale)
    tensors = layout(version).pack(weight)
    assert [int(word) & 0xFFFFFFFF for word in tensors["qzeros"][0]] == expected * (32 // len(zeros))
    assert torch.equal(read(tensors, version=version, bits=bits).zero_point(), zero.short())


def test_qweight_by_hand():
    """Inputs 0 ... 7 of output n share word n of row 0."""
    weight = random_weight(rows=8, columns=8, group_size=8)
    weight.codes.zero_()
    weight.codes[3, 0], weight.codes[3, 7] = 0x5, 0xC
    packed = layout(2).pack(weight)["qweight"]
    assert [[int(word) & 0xFFFFFFFF for word in row] for row in packed] == [[0, 0, 0, 0xC0000005, 0, 0, 0, 0]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_grid_that_the_solver_may_use_can_be_held(version, bits):
    """Scales from below to above what float16 holds, and offsets on both sides of zero."""
    generator = torch.Generator().manual_seed(bits)
    scale = torch.exp(torch.empty(64, 3).uniform_(-20, 13, generator=generator))
    offset = -scale * torch.empty(64, 3).uniform_(-2, 2**bits + 1, generator=generator)
    snapped = layout(version).snap(scale, offset, bits)
    symmetric = layout(version).snap(scale, None, bits)
    for pair, sym in ((snapped, False), (symmetric, True)):
        weight = dataclasses.replace(random_weight(bits), scale=pair[0], offset=pair[1], sym=sym)
        tensors = layout(version).pack(weight)
        assert same(read(tensors, version=version, bits=bits, sym=sym), weight)


def test_grids_that_a_version_cannot_hold_are_counted():
    weight = random_weight(zeros=(1, 15))
    weight.offset[:2, 0] = weight.offset[5, 1] = 0
    layout(2).pack(weight)
    with pytest.raises(ConversionError, match=r"3 of 192 zero points lie outside 1 \.\.\. 16, which is what gptq hold"):
        layout(1).pack(weight)
    weight = random_weight(zeros=(1, 15))
    weight.offset[9, 2] = -16 * weight.scale[9, 2]
    layout(1).pack(weight)
    with pytest.raises(ConversionError, match=r"1 of 192 zero points lie outside 0 \.\.\. 15, which is what gptq_v2"):
        layout(2).pack(weight)
    fine = random_weight(sym=True)
    fine = dataclasses.replace(fine, scale=fine.scale * (1 + 2**-20), offset=fine.offset * (1 + 2**-20))
    with pytest.raises(ConversionError, match="no float16 values"):
        layout(2).pack(fine)


@pytest.mark.parametrize(
    ("shape", "group_size", "message"),
    [
        ((64, 96), 48, None),
        ((64, 96), None, None),
        ((64, 100), None, "multiples of 32 both ways"),
        ((33, 96), None, "multiples of 32 both ways"),
        ((64, 96), 64, "96 input features are not a multiple of group_size 64"),
    ],
)
def test_shapes_are_checked_before_any_work(shape, group_size, message):
    if message is None:
        layout(1).check(shape, group_size)
        return
    with pytest.raises(ConfigError, match=message):
        layout(1).check(shape, group_size)


def test_a_spec_tells_what_is_in_the_file():
    for order in (False, True):
        weight = random_weight(3, group_size=48, act_order=order)
        tensors = {**gptq_tensors(weight, version=2), "bias": torch.zeros(64)}
        declared = Declared(format="gptq_v2", bits=3, group_size=48, sym=False, desc_act=False)
        spec = layout(2).spec("layer", tensors, declared)
        assert spec == LayerSpec.of(weight)
        assert (spec.in_features, spec.out_features, spec.bits, spec.group_size) == (96, 64, 3, 48)
        assert spec.act_order == order


def test_what_other_programs_leave_out_or_write_differently():
    weight = random_weight()
    tensors = gptq_tensors(weight, version=2)
    assert same(read({key: tensor for key, tensor in tensors.items() if key != "g_idx"}), weight)
    rounded = tensors["scales"].bfloat16()
    assert torch.equal(read({**tensors, "scales": rounded}).scale, rounded.float().T)
    assert not read(tensors, sym=True).sym  # declared so, but the zeros say otherwise
    nothing = {**tensors, "scales": tensors["scales"] * 0}  # a group of zeros
    assert not read(nothing).dequantize().any()
    assert torch.equal(layout(1).pack(read(nothing))["qweight"], tensors["qweight"])


def test_swapped_three_bit_zeros_of_old_gptqmodel_are_recognised():
    """GPTQModel before 7.0 took 0x24924924, 0x92492492, 0x49249249 off the words of symmetric zeros."""
    tensors = gptq_tensors(random_weight(3, sym=True), version=2)
    swapped = torch.tensor([0x24924924, 0x92492492 - (1 << 32), 0x49249249], dtype=torch.int32).repeat(2)
    tensors["qzeros"] = tensors["qzeros"] - swapped
    with pytest.raises(CheckpointError, match=r"layer\.qzeros .*GPTQModel before 7\.0"):
        read(tensors, version=1, bits=3, sym=True)
    read(tensors, version=2, bits=3, sym=True)
    read(tensors, version=1, bits=3)
    read(gptq_tensors(random_weight(3, sym=True), version=1), version=1, bits=3, sym=True)
