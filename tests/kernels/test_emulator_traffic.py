"""What the kernels' accesses cost: transfers of shared and sectors of global memory, as the emulator counts them.

test_planted_bugs.py shows that a layout with conflicts is counted as one.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.kernels import BFLOAT16, FLOAT16, Kernels, Layer, Traffic, activations, aligned, pack_stream

BITS = (2, 3, 4, 8)


@pytest.fixture(scope="module")
def kernels(emulator_path: Path) -> Iterator[Kernels]:
    kernels = Kernels(emulator_path)
    kernels.handle.gptqkit_emulator_count(1)
    yield kernels
    kernels.handle.gptqkit_emulator_count(0)


def excesses(traffic: list[Traffic]) -> dict[tuple[str, str, int], float]:
    """The worst spent / least of each kind of access: file, function, bytes of a lane."""
    worst: dict[tuple[str, str, int], float] = {}
    for each in traffic:
        kind = (each.file, each.function, each.bytes)
        worst[kind] = max(worst.get(kind, 0), each.excess)
    return worst


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("m", "dtype"), [(3, FLOAT16), (16, BFLOAT16), (30, FLOAT16), (70, BFLOAT16)])
def test_gemm_has_no_bank_conflicts_and_reads_and_writes_whole_sectors(
    kernels: Kernels, bits: int, m: int, dtype: int
) -> None:
    layer = Layer(kernels, bits=bits, dtype=dtype, n=320, k=384, group=64)
    kernels.gemm(layer, activations(m, 384, dtype), split=2, bias=aligned(320, np.uint16, 0))
    traffic = excesses(kernels.traffic())
    assert traffic.pop(("gemm.cuh", "store_global", 4)) == 8  # a ticket, once per tile
    assert set(traffic.values()) == {1}
    kernel = "gemm_narrow.cuh" if m <= 16 else "gemm_wide.cuh"
    assert set(traffic) >= {
        (kernel, "copy_async_from", 16),  # the weight
        (kernel, "copy_async_to", 16),
        (kernel, "load_shared", 16),
        (kernel, "store_shared", 4),  # the sums
        ("gemm.cuh", "load_shared", 4),
        ("gemm.cuh", "store_for_blocks", 4),  # the workspace
        ("gemm.cuh", "load_from_blocks", 4),
        ("gemm.cuh", "load_constant", 16),  # scales
        ("gemm.cuh", "load_constant", 16 if bits == 8 else 8 if bits == 4 else 4),  # zeros
        ("gemm.cuh", "load_constant", 2),  # bias
        ("gemm.cuh", "store_global", 2),  # y
    }
    assert (kernel, 8) in {(file, size) for file, _, size in traffic}  # x


@pytest.mark.parametrize("bits", BITS)
def test_dequantize_reads_the_weight_and_writes_whole_sectors(kernels: Kernels, bits: int) -> None:
    layer = Layer(kernels, bits=bits, dtype=FLOAT16, n=128, k=192, group=64)
    kernels.dequantize(layer, 0, 128)
    traffic = {function: excess for (_, function, size), excess in excesses(kernels.traffic()).items() if size >= 8}
    assert traffic == {"load_constant": 1, "store_global": 1}


@pytest.mark.parametrize("bits", BITS)
def test_repacking_reads_and_writes_whole_sectors(kernels: Kernels, bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (192, 128))
    packed = pack_stream(codes, bits)
    kernels.repack_weight(bits, aligned(packed.shape, np.int32, packed), 128, 192)
    assert set(excesses(kernels.traffic()).values()) == {1}
