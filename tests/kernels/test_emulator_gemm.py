"""The gemm kernels, run by the emulator, against float64: no worse than a dense product at the same dtype."""

import mmap
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from support.kernels import (
    BFLOAT16,
    FLOAT16,
    KernelError,
    Kernels,
    Layer,
    activations,
    aligned,
    from_bits,
    gemm_error,
    to_bits,
)

# Measured: 0.6 to 0.9 for up to 16 tokens (products with codes are exact), 1.0 for more (weights rounded as there).
LARGEST_ERROR = 1.05

SHAPES = ((64, 64), (96, 288), (160, 96), (32, 224), (96, 160))  # outputs, inputs: ragged and whole tiles
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which mmap has no name for before Python 3.13
GROUPS = (16, 32, 64, 128, None)  # None: one per row


@pytest.fixture(scope="module")
def kernels(emulator_path: Path) -> Kernels:
    return Kernels(emulator_path)


@pytest.mark.parametrize("m", [1, 5, 8, 13, 33, 70])
@pytest.mark.parametrize(("bits", "dtype"), list(product((2, 3, 4, 8), (FLOAT16, BFLOAT16))))
def test_every_group_split_zero_and_shape(kernels: Kernels, bits: int, dtype: int, m: int) -> None:
    # Over m, bits and dtype every group meets every split, kind of zero and shape.
    turn = m + bits + dtype
    for place, group in enumerate(GROUPS):
        n, k = SHAPES[(turn + place) % len(SHAPES)]
        zeros, offset = (("random", 1), ("random", 0), (1 << bits - 1, 1), (0, 0), (1 << bits, 1))[
            (turn + 2 * place) % 5
        ]
        split = 1 + (turn + place // 2) % 3
        kernels.handle.gptqkit_emulator_seed(turn + place)
        layer = Layer(
            kernels, bits=bits, dtype=dtype, n=n, k=k, group=group or k, zeros=zeros, zero_offset=offset, seed=place
        )
        x = activations(m, k, dtype, seed=turn)
        bias = to_bits(np.linspace(-3, 3, n), dtype) if place % 2 else None
        error = gemm_error(kernels.gemm(layer, x, split=split, bias=bias), x, layer, bias)
        assert error < LARGEST_ERROR, f"n {n}, k {k}, group {group}, zeros {zeros}, offset {offset}, split {split}"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [3, 16, 20, 40])
def test_float16_scales_are_exact_beside_bfloat16_activations(kernels: Kernels, bits: int, m: int) -> None:
    random = np.random.default_rng(bits)
    scales = (1025 + 2 * random.integers(0, 512, (3, 96))) / 1024  # none is a bfloat16 value
    scales[:, :32] = 1 + 2**-10
    layer = Layer(kernels, bits=bits, dtype=BFLOAT16, n=96, k=96, group=32, scales=scales)
    x = aligned((m, 96), np.uint16, to_bits(random.integers(-2, 3, (m, 96)), BFLOAT16))
    integers = from_bits(x, BFLOAT16).astype(np.float64)

    def product_with(weight: np.ndarray) -> np.ndarray:
        # Up to 16 tokens no weight is rounded, with more tokens each one is, once.
        return to_bits(integers @ (weight if m <= 16 else from_bits(to_bits(weight, BFLOAT16), BFLOAT16)).T, BFLOAT16)

    expected = product_with(layer.exact)
    rounded_scales = from_bits(to_bits(scales, BFLOAT16), BFLOAT16)[np.arange(96) // 32]
    assert (product_with(((layer.codes - layer.zeros[np.arange(96) // 32]) * rounded_scales).T) != expected).any()
    np.testing.assert_array_equal(kernels.gemm(layer, x), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("zeros", ["random", "least", "most"])
def test_many_tokens_meet_the_weight_that_is_rounded_once(kernels: Kernels, bits: int, dtype: int, zeros: str) -> None:
    # Unit inputs read it off. Scales are any positive float16, subnormal ones too, for which no weight overflows.
    n, k, group = 320, 96, 16
    scales = np.random.default_rng(bits).integers(1, 0x5BF0, (k // group, n)).astype(np.uint16).view(np.float16)
    zero = {"random": "random", "least": 0, "most": 1 << bits}[zeros]
    offset = 0 if zeros == "least" else 1
    layer = Layer(kernels, bits=bits, dtype=dtype, n=n, k=k, group=group, zeros=zero, zero_offset=offset, scales=scales)
    x = aligned((k, k), np.uint16, to_bits(np.eye(k), dtype))
    expected = from_bits(to_bits(layer.exact, dtype), dtype).T
    np.testing.assert_array_equal(from_bits(kernels.gemm(layer, x), dtype), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_long_groups_lose_nothing_where_activations_are_not_centred(kernels: Kernels, bits: int, dtype: int) -> None:
    # The sums with codes and with zeros are far larger than their difference; what is lost must vanish in y's rounding.
    k = 28672
    layer = Layer(kernels, bits=bits, dtype=dtype, n=32, k=k, group=k, zeros=1 << bits - 1)
    x = aligned((3, k), np.uint16, to_bits(np.random.default_rng(0).standard_normal((3, k)) + 1, dtype))
    exact = from_bits(x, dtype).astype(np.float64) @ layer.exact.T
    errors = [np.linalg.norm(from_bits(y, dtype) - exact) for y in (kernels.gemm(layer, x), to_bits(exact, dtype))]
    assert errors[0] < LARGEST_ERROR * errors[1]


@pytest.mark.parametrize("m", [3, 16, 20])
def test_rows_of_x_may_lie_apart(kernels: Kernels, m: int) -> None:
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=64, k=96, group=32)
    x = activations(m, 96, FLOAT16, ldx=136)
    assert gemm_error(kernels.gemm(layer, x, ldx=136), x, layer) < LARGEST_ERROR


def test_one_row_of_any_stride(kernels: Kernels) -> None:
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=64, k=96, group=32)
    x = activations(1, 96, FLOAT16)
    np.testing.assert_array_equal(kernels.gemm(layer, x, ldx=97), kernels.gemm(layer, x))


@pytest.mark.parametrize("m", [5, 40])
@pytest.mark.parametrize("split", [1, 3])
def test_equal_calls_give_equal_bits_in_any_order_of_threads(kernels: Kernels, m: int, split: int) -> None:
    layer = Layer(kernels, bits=3, dtype=BFLOAT16, n=96, k=352, group=32)
    x = activations(m, 352, BFLOAT16)
    results = []
    for seed in (1, 2):
        kernels.handle.gptqkit_emulator_seed(seed)
        results.append(kernels.gemm(layer, x, split=split))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("m", [1, 9, 20])
def test_more_splits_than_work(kernels: Kernels, m: int) -> None:
    layer = Layer(kernels, bits=2, dtype=FLOAT16, n=32, k=64, group=16)
    x = activations(m, 64, FLOAT16)
    assert gemm_error(kernels.gemm(layer, x, split=7), x, layer) < LARGEST_ERROR


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
def test_one_token_does_not_see_another(kernels: Kernels, dtype: int) -> None:
    layer = Layer(kernels, bits=4, dtype=dtype, n=64, k=64, group=32)
    for m in (2, 20):
        x = activations(m, 64, dtype)
        expected = kernels.gemm(layer, x)
        x[0] = 0x7FFF  # NaN
        np.testing.assert_array_equal(kernels.gemm(layer, x)[1:], expected[1:])


def test_no_tokens_and_no_outputs_do_nothing(kernels: Kernels) -> None:
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=64, k=64, group=32)
    assert kernels.gemm(layer, activations(0, 64, FLOAT16)).shape == (0, 64)
    empty = Layer(kernels, bits=4, dtype=FLOAT16, n=0, k=64, group=32)
    assert kernels.gemm(empty, activations(2, 64, FLOAT16)).shape == (2, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 5}, "-1: bits"),
        ({"dtype": 2}, "-2: dtype"),
        ({"k": 72}, "-3: a size"),
        ({"group": 24}, "-4: the group size"),
        ({"group": 0}, "-4: the group size"),
        ({"split": 65}, "-5: split"),
        ({"split": 0}, "-5: split"),
        ({"ldx": 100}, "-6: a tensor"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(kernels: Kernels, change: dict[str, int], words: str) -> None:
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=64, k=96, group=32)
    x = activations(2, 96, FLOAT16)
    options = {name: change.pop(name) for name in ("split", "ldx") if name in change}
    for name, value in change.items():
        setattr(layer, name, value)
    with pytest.raises(KernelError, match=words):
        kernels.gemm(layer, x, **options)


def test_misaligned_x_is_refused(kernels: Kernels) -> None:
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=64, k=96, group=32)
    x = aligned((104,), np.uint16, 0)[1:97].reshape(1, 96)
    with pytest.raises(KernelError, match="-6: a tensor"):
        kernels.gemm(layer, x)


@pytest.mark.parametrize("m", [3, 17])
def test_rows_more_than_two_to_the_31_elements_apart(kernels: Kernels, m: int) -> None:
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=32, k=64, group=32)
    stride = 2**31 // (m - 1) // 8 * 8 + 8
    x = activations(m, 64, FLOAT16)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE  # only the pages that are touched take memory
    with mmap.mmap(-1, 2 * (stride * (m - 1) + 64), flags=flags) as memory:
        apart = np.frombuffer(memory, np.uint16)
        for row in range(m):
            apart[row * stride : row * stride + 64] = x[row]
        y = kernels.gemm(layer, apart, m=m, ldx=stride)
        del apart
    np.testing.assert_array_equal(y, kernels.gemm(layer, x))


@pytest.mark.parametrize("m", [1, 20])
def test_inputs_beyond_the_last_do_not_overflow(kernels: Kernels, m: int) -> None:
    # All weights are (15 - 16) * 30000; a padded code 0 would be -480000, infinite in float16.
    layer = Layer(kernels, bits=4, dtype=FLOAT16, n=32, k=96, group=96, zeros=16)
    layer.weight = kernels.repack_weight(4, np.full_like(layer.qweight, -1), 32, 96)
    layer.scales = to_bits(np.full((1, 32), 30000.0), FLOAT16)
    layer.scale, layer.zero = kernels.repack_grid(4, layer.scales, layer.qzeros, 1, 32, 1)
    x = aligned((m, 96), np.uint16, to_bits(np.float32(2**-10), FLOAT16))
    np.testing.assert_array_equal(kernels.gemm(layer, x).view(np.float16), np.float16(-30000 * 96 / 1024))
