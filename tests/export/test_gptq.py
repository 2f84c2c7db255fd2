"""GPTQ versions 1 and 2, to the bit: against tensors that numpy makes, and words written down by hand."""

import dataclasses

import pytest
import torch

from gptqkit.errors import CheckpointError, ConversionError, ShapeError
from gptqkit.export.formats import Declared, LayerSpec, find_format
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.methods import Moments, find_method
from support.weights import gptq_tensors, random_weight, same

VERSIONS = {1: find_format("gptq"), 2: find_format("gptq_v2")}


def read(tensors, *, version=2, bits=4, group_size=32, sym=False):
    declared = Declared(format="gptq", bits=bits, group_size=group_size, sym=sym, desc_act=False)
    spec = VERSIONS[version].spec("layer", tensors, declared)
    weight = VERSIONS[version].unpack("layer", tensors, spec)
    assert dataclasses.replace(spec, sym=weight.sym) == LayerSpec.of(weight)
    return weight


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", [{"sym": True}, {}, {"act_order": True}])
@pytest.mark.parametrize("group_size", [32, 40, None])  # whole groups, a rest, one group per row
def test_tensors_are_those_of_an_independent_writer(version, bits, kind, group_size):
    weight = random_weight(bits, group_size=group_size, zeros=(2 - version, 2**bits + 1 - version), **kind)
    tensors, expected = VERSIONS[version].pack(weight), gptq_tensors(weight, version=version)
    assert tuple(tensors) == VERSIONS[version].suffixes
    for key, tensor in tensors.items():
        assert tensor.is_contiguous()
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(tensor, expected[key]), key
    found = read(expected, version=version, bits=bits, group_size=group_size, sym=weight.sym)
    assert same(found, weight)
    group = expected["g_idx"].long()
    value = (weight.codes - weight.zero_point()[:, group]) * expected["scales"].float().T[:, group]
    assert torch.equal(found.dequantize(), value)


@pytest.mark.parametrize(
    ("version", "bits", "zeros", "expected"),
    [
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
    tensors = VERSIONS[version].pack(dataclasses.replace(weight, offset=-zero * weight.scale))
    assert [int(word) & 0xFFFFFFFF for word in tensors["qzeros"][0]] == expected * (32 // len(zeros))
    assert torch.equal(read(tensors, version=version, bits=bits).zero_point(), zero.short())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_grid_that_the_solver_may_use_can_be_held(version, bits):
    """Scales from below to above what float16 holds, and ranges on either side of zero."""
    generator = torch.Generator().manual_seed(bits)
    scale = torch.exp(torch.empty(64, 3).uniform_(-20, 13, generator=generator))
    offset = -scale * torch.empty(64, 3).uniform_(-2, 2**bits + 1, generator=generator)
    for wanted in (offset, None):
        scales, offsets = VERSIONS[version].snap(scale, wanted, bits)
        weight = dataclasses.replace(random_weight(bits), scale=scales, offset=offsets, sym=wanted is None)
        assert same(read(VERSIONS[version].pack(weight), version=version, bits=bits, sym=wanted is None), weight)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_groups_without_negative_weights_read_back_to_the_bit(version, method):
    """Their grids begin at zero: all but version 1 have a zero point for that, and floating point two zeros."""
    weight = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 32:] -= 0.5
    config = QuantizeConfig(method=method, format=version, bits=4, group_size=32, sym=False)
    moments, layout = Moments(hessian=torch.eye(64)), find_format(version)
    solved = find_method(method).solve(weight, moments, config, layout.snap).weight
    spec = LayerSpec.of(solved)
    found = layout.unpack("layer", layout.pack(solved), spec)
    assert (solved.zero_point() == 0).any() == (version != "gptq")
    for part in ("codes", "scale", "offset"):
        assert getattr(found, part).numpy().tobytes() == getattr(solved, part).numpy().tobytes(), part


def test_grids_that_a_version_cannot_hold_are_counted():
    for version, zero, message in ((1, 0, r"1 \.\.\. 16, .* gptq holds"), (2, 16, r"0 \.\.\. 15, .* gptq_v2 holds")):
        weight = random_weight()
        weight.offset[:3, 1] = -zero * weight.scale[:3, 1]
        VERSIONS[3 - version].pack(weight)
        with pytest.raises(ConversionError, match=f"3 of 192 zero points lie outside {message}"):
            VERSIONS[version].pack(weight)
    fine = random_weight(sym=True)
    fine = dataclasses.replace(fine, scale=fine.scale * (1 + 2**-20), offset=fine.offset * (1 + 2**-20))
    with pytest.raises(ConversionError, match="no float16 values"):
        VERSIONS[2].pack(fine)


def test_shapes_are_checked_before_any_work():
    for bits, unit in ((2, 16), (3, 32), (4, 8), (8, 4)):  # of codes that fill whole int32 words
        VERSIONS[1].check(LayerSpec.of(random_weight(bits, unit, 3 * unit)))
        for shape in ((unit, 3 * unit + unit // 2), (unit + 1, unit)):
            with pytest.raises(ShapeError, match=f"packed {bits}-bit weights need multiples of {unit} both ways"):
                VERSIONS[1].check(LayerSpec.of(random_weight(bits, *shape)))


def test_what_other_programs_leave_out_or_write_differently():
    weight = random_weight()
    tensors = gptq_tensors(weight, version=2)
    assert same(read({key: tensor for key, tensor in tensors.items() if key != "g_idx"}), weight)
    rounded = tensors["scales"].bfloat16()
    assert torch.equal(read({**tensors, "scales": rounded}).scale, rounded.float().T)
    assert not read(tensors, sym=True).sym  # declared so, but the zeros say otherwise
    nothing = read({**tensors, "scales": tensors["scales"] * 0})
    assert not nothing.dequantize().any()
    assert torch.equal(VERSIONS[1].pack(nothing)["qweight"], tensors["qweight"])


def test_swapped_three_bit_zeros_of_old_gptqmodel_are_recognised():
    """GPTQModel before 7.0 took 0x24924924, 0x92492492, 0x49249249 off the words of symmetric zeros."""
    tensors = gptq_tensors(random_weight(3, sym=True), version=2)
    swapped = torch.tensor([0x24924924, 0x92492492 - (1 << 32), 0x49249249], dtype=torch.int32).repeat(2)
    tensors["qzeros"] = tensors["qzeros"] - swapped
    with pytest.raises(CheckpointError, match=r"layer\.qzeros .*GPTQModel before 7\.0"):
        read(tensors, version=1, bits=3, sym=True)
    read(tensors, version=2, bits=3, sym=True)
    read(tensors, version=1, bits=3)
