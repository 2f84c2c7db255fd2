"""Random weights, and what runs the kernels."""

from typing import NamedTuple

import pytest
import torch

from gptqkit.kernels.cuda import CudaLinear
from gptqkit.kernels.ops import Launcher, launcher_for
from gptqkit.quantizer.quantized import QuantizedWeight


@pytest.fixture(scope="session")
def make_weight():
    """Makes a random weight; `zeros` span 0 ... 2^bits - 1, from `least_zero` on, or are the one number given."""

    def make(bits=4, rows=64, columns=96, group_size=32, least_zero=0, zeros=None, scale=None, index=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        groups = -(-columns // group_size)
        codes = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
        if scale is None:
            scale = (torch.rand(rows, groups, generator=generator) / 50 + 1e-3).half().float()
        zero = torch.randint(least_zero, least_zero + 2**bits, scale.shape, generator=generator)
        zero = zero if zeros is None else torch.full_like(zero, zeros)
        return QuantizedWeight(
            codes=codes,
            scale=scale,
            offset=-(zero * scale),
            group_index=(torch.arange(columns) // group_size if index is None else index).int(),
            bits=bits,
            group_size=group_size,
            sym=False,
        )

    return make


class Place(NamedTuple):
    """Where the kernels run."""

    device: torch.device
    launcher: Launcher
    linear: type[CudaLinear]

    def reorder(self, seed):
        """Let the emulator's threads run in another order."""
        if self.device.type == "cpu":
            self.launcher.library._handle.gptqkit_emulator_seed(seed)


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """The kernels' emulator and, where there is one, a GPU."""
    if request.param == "emulator":
        emulation = request.getfixturevalue("emulation")
        return Place(torch.device("cpu"), emulation.launcher, emulation.linear)
    device = torch.device("cuda", torch.cuda.current_device())
    return Place(device, launcher_for(device), CudaLinear)
