"""The operators keep torch's promises: schemas, shapes without values, compilation, export."""

import pytest
import torch
from torch.export import Dim

from gptqkit.kernels.cuda_backend import CudaLinear
from gptqkit.kernels.gemm import repack
from support.emulation import EmulatedLinear, move

SHUFFLED = torch.randperm(96, generator=torch.Generator().manual_seed(3)) // 32


@pytest.fixture
def linear(make_layer, launcher):
    """An act-order layer with a bias, on the launcher's device."""
    kind = EmulatedLinear if launcher.device.type == "cpu" else CudaLinear
    return kind(move(make_layer(bits=3, g_idx=SHUFFLED, bias=True).packed, launcher.device), torch.float16)


def inputs(launcher, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(launcher.device, torch.float16)


@pytest.mark.parametrize("bits", [3, 8])
def test_operators_pass_opcheck(make_layer, launcher, bits):
    packed = move(make_layer(bits=bits, bias=True).packed, launcher.device)
    weight = repack(packed)
    layer = (weight.weight, weight.scale, weight.zero)
    sizes = (bits, 32, 64)
    order = torch.arange(96, dtype=torch.int32, device=launcher.device).flip(0)
    operators = torch.ops.gptqkit
    for bias in (None, packed.bias):
        torch.library.opcheck(operators.linear.default, (inputs(launcher, 2, 3, 96), *layer, bias, *sizes))
        torch.library.opcheck(operators.gemm.default, (inputs(launcher, 3, 96), *layer, bias, *sizes, 1))
    torch.library.opcheck(operators.dequantize.default, (*layer, *sizes, 96, torch.bfloat16))
    for rows in (None, order):
        torch.library.opcheck(operators.repack_weight.default, (packed.qweight, rows, bits))
    torch.library.opcheck(operators.repack_grid.default, (packed.scales, packed.qzeros, bits, 1))


def test_compiles_into_one_graph_for_any_number_of_tokens(linear, launcher):
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in (1, 5, 120):
            x = inputs(launcher, 2, tokens, 96)
            assert torch.equal(compiled(x), linear(x))


def test_exports_with_a_dynamic_number_of_tokens(linear, launcher):
    with torch.no_grad():
        shapes = {"x": {0: Dim.DYNAMIC}}
        program = torch.export.export(linear, (inputs(launcher, 4, 96),), dynamic_shapes=shapes)
        assert torch.ops.gptqkit.linear.default in {node.target for node in program.graph.nodes}
        for tokens in (1, 130):
            x = inputs(launcher, tokens, 96)
            assert torch.equal(program.module()(x), linear(x))
