"""Random layers for the benchmarks: the times do not depend on the values, only the results must be finite."""

from __future__ import annotations

import torch

from gptqkit.kernels.packed import PackedWeight


def random_layer(
    rows: int, columns: int, *, bits: int, group_size: int, device: torch.device, seed: int = 0
) -> PackedWeight:
    """A packed layer (rows out, columns in) with random codes and zeros, and scales that keep outputs near 1."""
    generator = torch.Generator(device).manual_seed(seed)
    groups = -(-columns // group_size)
    words = {"low": -(2**31), "high": 2**31 - 1, "dtype": torch.int32, "device": device, "generator": generator}
    scales = torch.rand(groups, rows, device=device, generator=generator) + 0.5
    return PackedWeight(
        name=f"random {rows} x {columns}",
        qweight=torch.randint(size=(columns * bits // 32, rows), **words),
        qzeros=torch.randint(size=(groups, rows * bits // 32), **words),
        scales=(scales * 2**-bits * columns**-0.5).half(),
        g_idx=(torch.arange(columns, device=device) // group_size).int(),
        bias=None,
        bits=bits,
        group_size=group_size,
        zero_offset=0,
        act_order=False,
    )
