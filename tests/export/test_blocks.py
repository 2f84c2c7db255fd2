"""GGUF's blocks hold codes, scales and offsets exactly as the `gguf` package decodes them."""

import gguf
import numpy as np
import pytest
import torch

from gptqkit.errors import ConversionError
from gptqkit.export.blocks import BLOCKS, decode, encode, transcribe
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.gptq import solve_rtn
from support.weights import random_weight


def random_blocks(kind, rows=6, blocks=3):
    """Blocks of random bits, but for the float16 numbers, which are finite."""
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn(rows * blocks, 1, generator=generator).half().view(torch.uint8)
        if name in ("d", "m")
        else torch.randint(0, 256, (rows * blocks, size), generator=generator, dtype=torch.uint8)
        for name, size in kind.fields.items()
    ]
    return torch.cat(parts, 1).view(rows, -1)


def by_gguf(kind, blocks):
    return torch.from_numpy(np.array(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind.name.upper()])))


@pytest.mark.parametrize("kind", BLOCKS.values(), ids=BLOCKS)
def test_any_bits_mean_what_the_gguf_package_says(kind):
    assert (kind.columns, kind.size) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name.upper()]]
    blocks = random_blocks(kind)
    weight = decode(kind, blocks)
    assert torch.equal(weight.dequantize(), by_gguf(kind, blocks))
    again = encode(kind, weight)
    assert torch.equal(by_gguf(kind, again), weight.dequantize())
    for part in ("codes", "scale", "offset"):
        assert torch.equal(getattr(decode(kind, again), part), getattr(weight, part))


@pytest.mark.parametrize("kind", BLOCKS.values(), ids=BLOCKS)
def test_what_the_solver_finds_is_stored_to_the_bit(kind):
    weight = torch.randn(8, 2 * kind.columns, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[0] = 0
    weight[1, :40] = 0
    weight[2] = weight[2].abs() + 1
    config = QuantizeConfig(type=kind.name, method="rtn", grid="mse")
    solved = solve_rtn(weight, None, config, kind.snap).weight
    found, blocks = transcribe(solved)
    assert found is kind
    assert torch.equal(by_gguf(kind, blocks), solved.dequantize())
    assert (solved.dequantize() - weight)[3:].norm() / weight[3:].norm() < 1.5 / 2**kind.bits
    same = decode(kind, blocks)
    assert torch.equal(same.codes, solved.codes)
    assert torch.equal(same.offset, solved.offset)


@pytest.mark.parametrize(
    ("bits", "size", "sym", "name"),
    [
        (2, 64, True, "q4_0"),
        (3, 64, True, "q4_0"),
        (4, 32, True, "q4_0"),
        (4, 128, True, "q4_0"),
        (8, 128, True, "q8_0"),
        (2, 64, False, "q4_0"),
        (3, 192, False, "q4_0"),
        (4, 64, False, "q5_0"),
    ],
)
def test_grids_of_other_formats_are_transcribed_exactly(bits, size, sym, name):
    weight = random_weight(bits, 8, 192 if size != 128 else 256, size, sym=sym, seed=0)
    kind, blocks = transcribe(weight)
    assert kind.name == name
    assert torch.equal(by_gguf(kind, blocks), weight.dequantize())


@pytest.mark.parametrize(("bits", "name"), [(4, "q4_0"), (8, "q8_0")])
def test_a_symmetric_group_of_zeros_is_no_obstacle(bits, name):
    weight = random_weight(bits, 8, 128, 64, sym=True)
    weight.scale[0, 0] = weight.offset[0, 0] = 0
    kind, blocks = transcribe(weight)
    assert kind.name == name
    assert torch.equal(by_gguf(kind, blocks), weight.dequantize())


def test_what_no_block_holds_is_refused():
    for settings, message in (
        ((4, 8, 64, 16), "groups of 16 in 64 columns are not whole blocks of 32"),
        ((4, 8, 48, 48), "in 48 columns"),
        ((8, 8, 64, 32), "no block type holds these scales and zero points"),
    ):
        with pytest.raises(ConversionError, match=message):
            transcribe(random_weight(*settings, sym=False, seed=0))
    weight = random_weight(4, 8, 64, 32, sym=True, seed=0)
    weight.group_index[[0, 40]] = weight.group_index[[40, 0]]
    with pytest.raises(ConversionError, match="do not follow the order of the columns"):
        transcribe(weight)
    weight = random_weight(4, 8, 64, 32, sym=True, seed=0)
    weight.scale.mul_(1 + 2**-15)
    weight.offset.mul_(1 + 2**-15)
    with pytest.raises(ConversionError, match="no block type"):
        transcribe(weight)
