"""The cuda backend and its operators: the same on the kernels' emulator and, where there is one, on a GPU."""

import copy
import dataclasses
import gc
import math
import re
import weakref
from itertools import product

import pytest
import torch
from torch.export import Dim

from gptqkit.errors import BackendError, ShapeError
from gptqkit.kernels import ops
from gptqkit.kernels.cuda import CudaLinear, unfit
from gptqkit.kernels.library import Shape
from gptqkit.kernels.linear import TorchLinear, make_linear
from gptqkit.kernels.ops import BITS, Device, Launcher, Plan, Tuning, file_name, launcher_for, tuning_for
from support.kernel_cases import LARGEST_ERROR, make_weight, product_error, random, relative_error, with_free_grids

DTYPES = (torch.float16, torch.bfloat16)
SHAPES = ((64, 64), (96, 288), (160, 96), (32, 224), (100, 160))  # outputs, inputs: ragged and whole tiles
GROUPS = (16, 32, 64, 128, None)  # None: one per row
UNEVEN = torch.tensor([0] * 40 + [1] * 24 + [2] * 32)
operators = torch.ops.gptqkit


def shuffled(columns, group_size):
    return torch.randperm(columns, generator=torch.Generator().manual_seed(3)) // group_size


def operands(layer):
    """What the operators take for a layer: its tensors, its sizes."""
    return (layer.packed, layer.scale, layer.zero), (layer.bits, layer.group_size, layer.out_features)


def largest_error(y):
    """Over that of a dense product: as measured on the emulator, and twice on a GPU, whose sums nobody has measured."""
    return 2 if y.is_cuda else LARGEST_ERROR


def assert_as_good_as_dense(y, x, weight, bias=None):
    assert product_error(y.cpu(), x, weight, bias) <= largest_error(y)


@pytest.mark.parametrize("rows", [1, 5, 8, 13, 16, 33, 70])
@pytest.mark.parametrize(("bits", "dtype"), list(product(BITS, DTYPES)))
def test_every_group_split_zero_order_and_shape(place, bits, dtype, rows):
    # Over rows, bits and dtype every group meets every split, kind of zero, order and shape.
    device, _, kind = place
    turn = rows + bits + DTYPES.index(dtype)
    for number, group_size in enumerate(GROUPS):
        n, k = SHAPES[(turn + number) % 5]
        zeros = ({"least_zero": 1}, {}, {"zeros": 1 << bits - 1}, {"zeros": 0}, {"zeros": 1 << bits})
        index = shuffled(k, group_size) if number % 2 and group_size and k % group_size == 0 else None
        weight = make_weight(bits, n, k, group_size or k, index=index, seed=number, **zeros[(turn + 2 * number) % 5])
        x, bias = random(rows, k, seed=turn).to(dtype), torch.linspace(-3, 3, n) if number % 2 else None
        layer = kind(weight.to(device), bias, dtype)
        tensors, sizes = operands(layer)
        split = (1, 2, 3, 7)[(turn + number // 2) % 4]
        in_order = x if layer.order is None else x[:, layer.order.cpu()]
        y = operators.linear(in_order.to(device), *tensors, layer.bias, *sizes, split)
        assert_as_good_as_dense(y, x, weight, bias)
        place.reorder(turn)
        assert torch.equal(operators.linear(in_order.to(device), *tensors, layer.bias, *sizes, split), y)


@pytest.mark.parametrize("rows", [1, 13, 33, 120])
@pytest.mark.parametrize(("bits", "dtype"), list(product((*BITS, 5, 6), DTYPES)))
def test_any_scales_and_offsets(place, bits, dtype, rows):
    """As GGUF's blocks have them, of 5 and 6 bits, too; 120 rows take the dense path."""
    device, _, kind = place
    for number, group_size in enumerate(GROUPS):
        n, k = SHAPES[(rows + bits + number) % 5]
        index = shuffled(k, group_size) if number % 2 and group_size and k % group_size == 0 else None
        weight = with_free_grids(make_weight(bits, n, k, group_size or k, index=index, seed=number))
        assert unfit(weight, dtype) is None
        layer = kind(weight.to(device), torch.linspace(-3, 3, n) if number % 2 else None, dtype)
        for x in (random(rows, k).to(dtype), torch.eye(k, dtype=dtype)[:rows]):
            y = layer(x.to(device))
            assert_as_good_as_dense(y, x, weight, layer.bias.cpu() if number % 2 else None)
        if not number % 2:
            assert torch.equal(y.cpu(), weight.dequantize(dtype).t()[: len(y)])
        layer.to(torch.bfloat16)
        assert layer.scale.dtype == layer.zero.dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_float32_grids_are_dequantized_to_the_bit(place, dtype):
    """Also where their products are no float32 values, which are rounded before offsets are added."""
    device, _, kind = place
    weight = dataclasses.replace(make_weight(4, scale=torch.rand(64, 3)), offset=torch.randn(64, 3))
    layer = kind(weight.to(device), None, dtype)
    tensors, sizes = operands(layer)
    assert torch.equal(operators.dequantize(*tensors, *sizes, 96, dtype).cpu(), weight.dequantize(dtype))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantizes_to_the_definition_bit_for_bit(place, bits, dtype):
    device, _, kind = place
    scales = torch.randint(1, 0x7C00, (64, 3), dtype=torch.int16).view(torch.float16).float()  # products overflow
    scales[5, 1] = 0
    kinds = [{"zeros": 0}, {"zeros": 2**bits}, {"index": shuffled(96, 32)}, {"scale": scales}, {"group_size": 128}]
    for settings in (*kinds, *({"rows": n, "columns": k, "group_size": 16} for n, k in SHAPES)):
        weight = make_weight(bits, **settings)
        layer = kind(weight.to(device), None, dtype)
        tensors, sizes = operands(layer)
        dense = operators.dequantize(*tensors, *sizes, weight.in_features, dtype).cpu()
        expected = weight.dequantize(dtype)
        assert torch.equal(dense, expected if layer.order is None else expected[:, layer.order.cpu()])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unit_inputs_read_off_the_weight_exactly(place, bits, dtype):
    """Also the proof that the hardware multiplies subnormal float16 operands, on which the kernel counts."""
    device, _, kind = place
    for zeros in ({}, {"zeros": 0}, {"zeros": 2**bits}):
        # Any float16 scale but 0 for which no weight overflows, subnormal ones too.
        scale = torch.randint(1, 0x5BF0, (160, 6), generator=torch.Generator().manual_seed(1), dtype=torch.int16)
        scale = scale.view(torch.float16).float() * (torch.arange(6) % 2 * 2 - 1)
        weight = make_weight(bits, 160, 96, 16, scale=scale, **zeros)
        layer = kind(weight.to(device), None, dtype)
        unit = torch.eye(96, dtype=dtype, device=device)
        for rows in (unit[:8], unit):
            assert torch.equal(layer(rows).cpu(), weight.dequantize(dtype).t()[: len(rows)])


def test_inputs_beyond_the_last_do_not_overflow(place):
    # All weights are (15 - 16) * 30000; a padded code 0 would be -480000, infinite in float16.
    weight = make_weight(4, 32, 96, 96, zeros=16, scale=torch.full((32, 1), 30000.0))
    weight = dataclasses.replace(weight, codes=torch.full_like(weight.codes, 15)).to(place.device)
    for rows in (1, 20):
        y = place.linear(weight, None, torch.float16)(torch.full((rows, 96), 2**-10, device=place.device).half())
        assert (y == -30000 * 96 / 1024).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [3, 16, 20, 40])
def test_float16_scales_are_exact_beside_bfloat16_activations(place, bits, rows):
    device, _, kind = place
    generator = torch.Generator().manual_seed(bits)
    scale = (1025 + 2 * torch.randint(0, 512, (96, 3), generator=generator)) / 1024  # none is a bfloat16 value
    weight = make_weight(bits, 96, 96, 32, scale=scale)
    x = torch.randint(-2, 3, (rows, 96), generator=generator).bfloat16()
    dense = weight.dequantize(torch.float32 if rows <= 16 else torch.bfloat16)  # more rows round each weight, once
    expected = (x.double() @ dense.double().t()).bfloat16()
    assert torch.equal(kind(weight.to(device), None, torch.bfloat16)(x.to(device)).cpu(), expected)
    rounded = dataclasses.replace(weight, scale=scale.bfloat16().float())
    assert not torch.equal((x.double() @ rounded.dequantize(torch.float64).t()).bfloat16(), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_groups_lose_nothing_where_activations_are_not_centred(place, bits, dtype):
    # The sums with codes and with zeros are far larger than their difference; what is lost must vanish in y's rounding.
    device, _, kind = place
    weight = make_weight(bits, 32, 28672, 28672, zeros=1 << bits - 1)
    x = (random(3, 28672) + 1).to(dtype)
    exact = x.double() @ weight.dequantize(torch.float64).t()
    y = kind(weight.to(device), None, dtype)(x.to(device))
    assert relative_error(y, exact) <= largest_error(y) * relative_error(exact.to(dtype), exact)


@pytest.mark.parametrize(("dtype", "index"), [(torch.float16, None), (torch.bfloat16, shuffled(256, 128))])
def test_layer_takes_any_number_and_layout_of_rows(place, dtype, index, monkeypatch):
    device, launcher, kind = place
    monkeypatch.setattr(ops, "PRODUCT_TILE", 1)  # the dense path works through a small buffer
    monkeypatch.setattr(ops, "DENSE_STEP", 64)
    tuning = dataclasses.replace(launcher.tuning, dense_bytes=1, crossover=dict.fromkeys(BITS, 100))
    monkeypatch.setattr(launcher, "tuning", tuning)
    weight, bias = make_weight(3, 100, 256, 128, index=index), torch.randn(100)
    layer, without_bias = (kind(weight.to(device), each, dtype) for each in (bias, None))
    for shape in ((0, 256), (256,), (1, 256), (2, 49, 256), (100, 256), (2, 75, 256)):
        x = random(*shape).to(dtype)
        # Rows apart, and not aligned; made where it is used, because moving it would close the gaps.
        apart = torch.empty(*shape[:-1], 264, dtype=dtype, device=device)[..., 4:260].copy_(x)
        y, again = layer(x.to(device)), layer(apart)
        if not x.numel():
            assert y.shape == again.shape == (0, 100)
            continue
        assert_as_good_as_dense(y, x, weight, bias)
        if y.is_cuda and y.numel() >= 100 * 100:  # dense: cuBLAS has other kernels, with other sums, for such rows
            assert_as_good_as_dense(again, x, weight, bias)
        else:
            assert torch.equal(again, y)
        assert_as_good_as_dense(without_bias(x.to(device)), x, weight)
        x.view(-1, 256)[0] = torch.nan  # one row does not see another
        assert torch.equal(layer(x.to(device)).view(-1, 100)[1:], y.view(-1, 100)[1:])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [16, 32, 128])
def test_memory_is_that_of_a_packed_file(emulation, bits, group_size):
    weight = make_weight(bits, 256, 256, group_size, index=shuffled(256, group_size))
    file = 256 * 256 * bits / 8 + weight.scale.numel() * (2 + bits / 8) + 4 * 256
    held = sum(buffer.nbytes for buffer in emulation.linear(weight, None, torch.float16).buffers())
    # Zeros of 8 bits take 16, so that 256 is one: 160 bits for 152 in groups of 16.
    assert abs(held / file - 1) <= (0.053 if (bits, group_size) == (8, 16) else 0.05)


def test_a_layer_frees_its_codes_and_follows_its_tensors(emulation):
    """Tensors are checked once; whatever takes their place is checked again."""
    weight = make_weight(bits=8, index=shuffled(96, 32))
    layer = emulation.linear(weight, random(64), torch.float16)
    other = emulation.linear(make_weight(8, seed=1), random(64), torch.float16)
    x = random(3, 96).half()
    y = layer(x)
    old = [weakref.ref(weight.codes), weakref.ref(layer.packed)]
    del weight
    layer._apply(torch.clone)  # as every move does
    gc.collect()
    assert [each() for each in old] == [None, None]
    assert torch.equal(layer(x), y)
    assert list(layer.parameters()) == []
    twin = copy.deepcopy(layer)
    for buffer in layer.buffers():
        buffer.zero_()
    assert torch.equal(twin(x), y)
    assert not layer(x).any()
    for assign in (False, True):
        layer.load_state_dict(twin.state_dict(), assign=assign)
        assert torch.equal(layer(x), y)
    layer.to(torch.bfloat16)
    assert layer.scale.dtype == torch.float16
    assert_as_good_as_dense(layer(x.bfloat16()), x.bfloat16(), make_weight(8, index=shuffled(96, 32)), random(64))
    assert not torch.equal(other(x), y)
    layer.to(torch.float16)
    for name, wrong in (("packed", layer.packed[..., :2]), ("scale", layer.scale.double()), ("zero", other.packed)):
        right = getattr(layer, name)
        setattr(layer, name, wrong)
        with pytest.raises(ShapeError, match="weight" if name == "packed" else name):
            layer(x)
        setattr(layer, name, right)


def test_gradients_reach_the_input(place):
    device, _, kind = place
    weight = make_weight()
    x = random(3, 96).to(device, torch.float16).requires_grad_()
    kind(weight.to(device), None, torch.float16)(x).float().sum().backward()
    assert relative_error(x.grad, weight.dequantize(torch.float64).sum(0).expand(3, -1)) < 1e-3


def test_autocast_casts_activations_as_a_dense_linear_does(place):
    device, _, kind = place
    weight, x = make_weight(), random(3, 96)
    for bias in (None, random(64)):
        layer = kind(weight.to(device), bias, torch.float16)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert_as_good_as_dense(layer(x.to(device)), x.bfloat16(), weight, bias)


def test_activations_that_do_not_fit_the_layer_are_refused(place):
    device, _, kind = place
    layer = kind(make_weight().to(device), random(64), torch.float16)
    for columns in (32, 160):
        with pytest.raises(ShapeError, match=f"x has {columns} columns on .*, and the layer takes 96 columns on"):
            layer(random(2, columns).half().to(device))
    with pytest.raises(ShapeError, match="x has 96 columns on meta"):
        layer(torch.empty(2, 96, device="meta"))
    with pytest.raises(ShapeError, match=r"x is torch\.float32, and the kernels compute in float16 or bfloat16"):
        layer(random(2, 96).to(device))
    with pytest.raises(ShapeError, match=r"bias is torch\.float16 .*torch\.bfloat16 \(64,\) .*is needed"):
        layer(random(2, 96).bfloat16().to(device))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(96)}, "x is torch.float32"),
        ({"x": torch.zeros(2, 160).half()}, "weight is torch.int32 (1, 2, 3, 32, 4) on"),
        ({"weight": torch.zeros(1, 2, 4, 32, 4, dtype=torch.int32)}, "weight is torch.int32 (1, 2, 4, 32, 4) on"),
        ({"weight": torch.zeros(1, 2, 3, 32, 4)}, "weight is torch.float32"),
        ({"scale": torch.zeros(2, 64).half()}, "scale is torch.float16 (2, 64) on"),
        ({"scale": torch.zeros(3, 64).bfloat16()}, "scale is torch.bfloat16"),
        ({"scale": torch.zeros(64, 3).half().t()}, "scale is not contiguous"),
        ({"zero": torch.zeros(3, 64, dtype=torch.uint8)}, "zero is torch.uint8 (3, 64) on"),
        ({"zero": torch.zeros(3, 32, dtype=torch.int16)}, "zero is torch.int16"),
        ({"bias": torch.zeros(32).half()}, "bias is torch.float16 (32,) on"),
        ({"bits": 4}, "contiguous torch.int32 (1, 2, 4, 32, 4) on"),
        ({"group_size": 16}, "contiguous torch.float16 (6, 64) on"),
        ({"group_size": 0}, "contiguous torch.float16 (96, 64) on"),
        ({"out_features": 128}, "contiguous torch.int32 (2, 2, 3, 32, 4) on"),
    ],
)
def test_operators_refuse_tensors_that_are_no_layer(place, change, words):
    """Before a kernel could read beyond them."""
    device, _, kind = place
    layer = kind(make_weight(bits=3).to(device), None, torch.float16)
    given = {"x": torch.zeros(2, 96).half(), "weight": layer.packed, "scale": layer.scale, "zero": layer.zero}
    given |= {"bias": None, "bits": 3, "group_size": 32, "out_features": 64, **change}
    given = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    for split in (None, 0, 1):
        with pytest.raises(ShapeError, match=re.escape(words)):
            operators.linear(**given, split=split)
    x, _ = given.pop("x"), given.pop("bias")
    if x.dtype == torch.float16 and "bias" not in change:
        with pytest.raises(ShapeError, match=re.escape(words)):
            operators.dequantize(**given, in_features=x.shape[-1], dtype=torch.float16)


def test_groups_larger_than_rows_reach_the_kernels_as_one(place):
    """Whatever a file says: the interface has 32 bits for it."""
    device, _, kind = place
    weight = dataclasses.replace(make_weight(4, 64, 96, 96), group_size=(1 << 32) + 32)
    layer, x = kind(weight.to(device), None, torch.float16), random(3, 96).half()
    assert_as_good_as_dense(layer(x.to(device)), x, weight)
    assert layer._layer.record.group == 96


def test_other_dtypes_devices_and_splits_are_refused(place):
    device, _, kind = place
    tensors, sizes = operands(kind(make_weight().to(device), None, torch.float16))
    with pytest.raises(ShapeError, match=r"torch\.float32 is asked for"):
        operators.dequantize(*tensors, *sizes, 96, torch.float32)
    with pytest.raises(ShapeError, match="the first operand is on cpu"):
        launcher_for(torch.device("cpu"))
    with pytest.raises(BackendError, match="split is outside"):
        operators.linear(torch.zeros(2, 96).half().to(device), *tensors, None, *sizes, 1000)


@pytest.mark.parametrize("bits", [3, 8])
def test_operators_pass_opcheck(place, bits):
    device, _, kind = place
    layer = kind(make_weight(bits).to(device), random(64), torch.float16)
    tensors, sizes = operands(layer)
    for bias, split in ((None, None), (layer.bias, 1)):
        x = random(2, 3, 96).half().to(device)
        torch.library.opcheck(operators.linear.default, (x, *tensors, bias, *sizes, split))
    torch.library.opcheck(operators.dequantize.default, (*tensors, *sizes, 96, torch.bfloat16))


def test_compiles_and_exports_into_one_graph_for_any_number_of_tokens(place):
    device, _, kind = place
    layer = kind(make_weight(3, index=shuffled(96, 32)).to(device), random(64), torch.float16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        x = random(4, 96).half().to(device)
        program = torch.export.export(layer, (x,), dynamic_shapes={"x": {0: Dim.DYNAMIC}})
        assert operators.linear.default in {node.target for node in program.graph.nodes}
        for tokens in (1, 5, 120):
            x = random(tokens, 96).half().to(device)
            assert torch.equal(compiled(x), layer(x))
            assert torch.equal(program.module()(x), layer(x))
        traced = torch.fx.experimental.proxy_tensor.make_fx(layer)(x)
        assert operators.linear.default in {node.target for node in traced.graph.nodes}


@pytest.mark.parametrize(
    ("settings", "dtype", "reason"),
    [
        ({}, torch.float32, "compute in float16 or bfloat16"),
        ({"columns": 80, "group_size": 16}, torch.float16, "80 columns"),
        ({"group_size": 24}, torch.float16, "groups of 24.*groups of a multiple of 16"),
        ({"index": UNEVEN}, torch.float16, "cannot be sorted"),
    ],
)
def test_refusals_say_why(settings, dtype, reason):
    assert re.search(reason, unfit(make_weight(**settings), dtype))


def test_other_layers_are_served_and_not_on_a_cpu():
    some_zero = {"scale": torch.rand(64, 3).half().float() * torch.tensor([1, 1, 0])}
    for settings in ({"group_size": 96}, {"group_size": 64}, {"index": shuffled(96, 32)}, {"zeros": 17}, some_zero):
        assert unfit(make_weight(**settings), torch.float16) is None
    with pytest.raises(BackendError, match=r"'cuda' cannot serve layer: .*cuda devices only, and the layer is on cpu"):
        make_linear(make_weight(), None, torch.float16, name="layer", backend="cuda")


def test_choice_on_a_gpu(gpu, monkeypatch):
    weight = make_weight().to(gpu)
    for backend in ("auto", "cuda"):
        layer = make_linear(weight, None, torch.float16, name="layer", backend=backend)
        assert isinstance(layer, CudaLinear)
        assert layer.choice.name == "cuda"
    x = random(3, 96).half()
    assert_as_good_as_dense(layer(x.to(gpu)), x, make_weight())

    def refused(reason, dtype=torch.float16):
        with pytest.raises(BackendError, match=reason):
            make_linear(weight, None, dtype, name="layer", backend="cuda")
        fallback = make_linear(weight, None, dtype, name="layer")
        assert isinstance(fallback, TorchLinear)
        assert fallback.choice.fallback
        assert re.search(f"not cuda, because .*{reason}", fallback.choice.reason)

    refused("load with such a dtype", torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr("gptqkit.kernels.library.OLDEST_CAPABILITY", (99, 0))
        refused("compute capability")
    monkeypatch.setattr("gptqkit.kernels.library.find_library", lambda: (None, "no nvcc"))
    refused("no nvcc")


def test_plans_fill_whole_waves_of_a_device(emulation):
    """On a device of 132 multiprocessors."""
    launcher = Launcher(emulation.launcher.library, torch.device("cpu"), Tuning(), Device(132, 50 << 20))
    for rows, outputs, inputs in product((1, 8, 16, 32, 64, 100), (64, 1024, 4096, 28672, 640_000), (32, 4096, 28672)):
        shape = Shape(4, 0, outputs, inputs, 128)
        split, floats, locks = launcher.plan(shape, rows)
        kernel = launcher.library.kernel(shape, rows)
        tiles = -(-rows // kernel.tokens) * -(-outputs // kernel.columns)
        assert 1 <= split <= min(64, max(1, inputs // 64))
        assert floats == (split > 1) * split * tiles * kernel.tokens * kernel.columns
        assert locks == (split > 1 and rows <= 16) * tiles
        waves = tiles * split / (132 * kernel.blocks)
        if inputs >= 4096 and 1024 <= outputs <= 28672:
            assert waves <= 1 or waves / math.ceil(waves) > 0.84  # no stub of a wave
            assert tiles * split > 0.9 * 132  # all multiprocessors work
    assert launcher.plan(Shape(4, 0, 640_000, 4096, 128), 1).split == 1
    assert launcher.plan(Shape(4, 0, 4096, 4096, 128), 1 << 20) == Plan(0)
    assert tuning_for("no such GPU") == Tuning()
    assert file_name("NVIDIA H200") == "nvidia-h200.json"


def test_the_dense_weight_fits_the_cache_unless_that_leaves_multiprocessors_idle(emulation):
    launcher = Launcher(emulation.launcher.library, torch.device("cpu"), Tuning(), Device(132, 50 << 20))
    for rows, outputs, inputs in product((1, 512, 2048, 1 << 16), (100, 4096, 8192, 28672), (4096, 28672)):
        step = launcher._dense_rows(rows, outputs, inputs)
        assert step == outputs or step % 256 == 0
        more_parts = -(-outputs // step) + 1
        assert 2 * step * inputs <= 50 << 20 or step <= 256 or (outputs // more_parts - 256) * rows < 132 * 128 * 128
