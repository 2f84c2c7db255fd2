"""What runs the kernels."""

from typing import NamedTuple

import pytest
import torch

from gptqkit.kernels.cuda import CudaLinear
from gptqkit.kernels.ops import Launcher, launcher_for


class Place(NamedTuple):
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
