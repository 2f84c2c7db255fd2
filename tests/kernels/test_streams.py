"""What only a GPU can show: streams, graphs, sizes beyond 32 bits."""

import pytest
import torch

from gptqkit.kernels.cuda import CudaLinear
from support.kernel_cases import make_weight, random

pytestmark = pytest.mark.gpu

ROUNDS = 50


@pytest.fixture
def linear():
    """A layer whose products with few rows are split between blocks."""
    return CudaLinear(make_weight(rows=256, columns=8192, group_size=128).to("cuda"), None, torch.float16)


def on_gpu(*shape, seed=1):
    return random(*shape, seed=seed).to("cuda", torch.float16)


def capture(linear, x):
    """A graph of three products in a row, and the tensor that it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            y = linear(x)
    return graph, y


@pytest.mark.parametrize("rows", [4, 700])  # both paths
def test_graphs_replay_with_new_inputs(linear, rows):
    x = on_gpu(rows, 8192)
    linear(x)
    graph, y = capture(linear, x)
    for seed in range(3):
        x.copy_(on_gpu(rows, 8192, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, linear(x))


def test_graphs_and_eager_calls_run_side_by_side(linear):
    x = on_gpu(4, 8192)
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
    x, values, stream = torch.zeros(4, 8192, dtype=torch.float16, device="cuda"), on_gpu(4, 8192), torch.cuda.Stream()
    expected = linear(values)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.copy_(values)
        y = linear(x)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_more_activations_than_32_bits_count():
    linear = CudaLinear(make_weight(columns=4096, group_size=128).to("cuda"), None, torch.float16)
    rows = 2**31 // 4096 + 1000
    if torch.cuda.mem_get_info()[0] < 3 * rows * 4096 * 2:
        pytest.skip("needs more memory")
    x = torch.zeros(rows, 4096, dtype=torch.float16, device="cuda")
    x[-8:] = on_gpu(8, 4096)
    expected = linear(x[-8:])
    layer = (linear.packed, linear.scale, linear.zero, None, 4, 128, 64)
    for split in (0, 1):
        y = torch.ops.gptqkit.linear(x, *layer, split)
        assert torch.allclose(y[-8:], expected, rtol=1e-2, atol=1e-2)


def test_more_weights_than_32_bits_count():
    weight = make_weight(bits=2, columns=1024, group_size=1024)
    small = CudaLinear(weight.to("cuda"), None, torch.float16)
    copies = 2**31 // (64 * 1024) + 1
    if torch.cuda.mem_get_info()[0] < 64 * copies * 1024 * 4:
        pytest.skip("needs more memory")
    tensors = (small.packed.repeat(copies, 1, 1, 1, 1), small.scale.repeat(1, copies), small.zero.repeat(1, copies))
    sizes = (2, 1024, 64 * copies)
    dense = torch.ops.gptqkit.dequantize(*tensors, *sizes, 1024, torch.float16)
    assert torch.equal(dense[-64:].cpu(), weight.dequantize(torch.float16))
    x = on_gpu(3, 1024)
    one = torch.ops.gptqkit.linear(x, small.packed, small.scale, small.zero, None, 2, 1024, 64, 1)
    assert torch.equal(torch.ops.gptqkit.linear(x, *tensors, None, *sizes, 1)[:, -64:], one)  # sums in the same order


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # advice that has nothing to do with us
def test_compiles_with_graphs(linear):
    pytest.importorskip("triton")
    compiled = torch.compile(linear, fullgraph=True, mode="reduce-overhead")
    x = on_gpu(4, 8192)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(compiled(x).clone(), linear(x))
