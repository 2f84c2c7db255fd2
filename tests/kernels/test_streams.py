"""What only a GPU can show: streams, graphs, sizes beyond 32 bits."""

import dataclasses

import pytest
import torch

from gptqkit.kernels.cuda_backend import CudaLinear
from gptqkit.kernels.gemm import dequantize, matmul, repack
from support.emulation import move

pytestmark = pytest.mark.gpu

ROUNDS = 50


@pytest.fixture
def linear(make_layer):
    """A layer whose products with few rows are split between blocks."""
    packed = make_layer(rows=256, columns=8192, group_size=128).packed
    return CudaLinear(move(packed, "cuda"), torch.float16)


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to("cuda", torch.float16)


def capture(linear, x):
    """A graph of three products in a row, and the tensor that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            y = linear(x)
    return graph, y


def test_graphs_replay_with_new_inputs(linear):
    x = inputs(4, 8192)
    linear(x)
    graph, y = capture(linear, x)
    for seed in range(3):
        x.copy_(torch.randn(4, 8192, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, linear(x))


def test_dense_path_can_be_captured(linear):
    x = inputs(700, 8192)
    expected = linear(x)
    graph, y = capture(linear, x)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_graphs_and_eager_calls_run_side_by_side(linear):
    x = inputs(4, 8192)
    expected = linear(x)
    graphs = [capture(linear, x) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    eager = []
    for _ in range(ROUNDS):
        for (graph, _), stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams[2:]:
            with torch.cuda.stream(stream):
                eager.append(linear(x))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in [*(y for _, y in graphs), *eager])


def test_calls_follow_the_current_stream(linear):
    stream = torch.cuda.Stream()
    x = torch.zeros(4, 8192, dtype=torch.float16, device="cuda")
    values = inputs(4, 8192)
    expected = linear(values)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(values)
        y = linear(x)
    stream.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # advice that has nothing to do with us
def test_compiles_with_graphs(linear):
    pytest.importorskip("triton")
    compiled = torch.compile(linear, fullgraph=True, mode="reduce-overhead")
    x = inputs(4, 8192)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(compiled(x).clone(), linear(x))


def test_more_activations_than_32_bits_count(make_layer):
    layer = make_layer(rows=64, columns=4096, group_size=128)
    weight = repack(move(layer.packed, "cuda"))
    rows = 2**31 // 4096 + 1000
    if torch.cuda.mem_get_info()[0] < 3 * rows * 4096 * 2:
        pytest.skip("needs more memory")
    x = torch.zeros(rows, 4096, dtype=torch.float16, device="cuda")
    x[-8:] = inputs(8, 4096)
    expected = matmul(x[-8:], weight)
    assert torch.allclose(matmul(x, weight)[-8:], expected, rtol=1e-2, atol=1e-2)
    arguments = (weight.weight, weight.scale, weight.zero, None, 4, 128, 64, 1)
    assert torch.allclose(torch.ops.gptqkit.gemm(x, *arguments)[-8:], expected, rtol=1e-2, atol=1e-2)


def test_more_weights_than_32_bits_count(make_layer):
    small = make_layer(bits=2, rows=64, columns=1024, group_size=1024)
    copies = 2**31 // (64 * 1024) + 1
    if torch.cuda.mem_get_info()[0] < 64 * copies * 1024 * 4:
        pytest.skip("needs more memory")
    packed = move(small.packed, "cuda")
    wide = dataclasses.replace(
        packed,
        qweight=packed.qweight.repeat(1, copies),
        qzeros=packed.qzeros.repeat(1, copies),
        scales=packed.scales.repeat(1, copies),
    )
    weight = repack(wide)
    assert torch.equal(dequantize(weight, torch.float16)[-64:].cpu(), small.packed.dequantize(torch.float16))
    x = inputs(3, 1024)
    assert torch.equal(matmul(x, weight)[:, -64:], matmul(x, weight)[:, :64])
