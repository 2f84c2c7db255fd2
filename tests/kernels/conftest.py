"""Random layers whose codes, zeros and scales are known."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gptqkit.export.pack import pack
from gptqkit.kernels.packed import PackedWeight


@dataclass
class Layer:
    """A packed layer and, in float64, the exact weight (out, in) that it stands for."""

    packed: PackedWeight
    weight: Tensor


class MakeLayer:
    """Makes layers; a class so that tests can name the fixture's type."""

    def __call__(
        self,
        *,
        bits: int = 4,
        rows: int = 64,
        columns: int = 96,
        group_size: int = 32,
        zero_offset: int = 0,
        stored_zero: int | None = None,
        scale_dtype: torch.dtype = torch.float16,
        g_idx: Tensor | None = None,
        bias: bool = False,
        seed: int = 0,
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        groups = -(-columns // group_size)
        codes = torch.randint(0, 2**bits, (rows, columns), generator=generator)
        stored = torch.randint(0, 2**bits, (groups, rows), generator=generator)
        if stored_zero is not None:
            stored = torch.full_like(stored, stored_zero)
        scales = (torch.rand(groups, rows, generator=generator) / 50 + 1e-3).to(scale_dtype)
        trivial = torch.arange(columns) // group_size
        index = trivial if g_idx is None else g_idx
        weight = torch.empty(rows, columns, dtype=torch.float64)
        for column, group in enumerate(index.tolist()):
            weight[:, column] = (codes[:, column] - stored[group] - zero_offset).double() * scales[group].double()
        packed = PackedWeight(
            name="layer",
            qweight=pack(codes, bits).t().contiguous(),
            qzeros=pack(stored, bits),
            scales=scales,
            g_idx=index.to(torch.int32),
            bias=torch.randn(rows, generator=generator).half() if bias else None,
            bits=bits,
            group_size=group_size,
            zero_offset=zero_offset,
            act_order=not torch.equal(index, trivial),
        )
        return Layer(packed=packed, weight=weight)


@pytest.fixture(scope="session")
def make_layer() -> MakeLayer:
    return MakeLayer()
