"""The operators on the CPU: the kernels' own sources, run by their emulator."""

import dataclasses

import torch

from gptqkit.kernels import ops
from gptqkit.kernels.cuda_backend import CudaLinear
from gptqkit.kernels.gemm import refusal
from gptqkit.kernels.launcher import Launcher
from gptqkit.kernels.library import KernelLibrary
from gptqkit.kernels.tuning import Tuning

# Splits K = 128 already, so that small layers see everything.
TUNING = Tuning(
    blocks_per_multiprocessor=2,
    least_inputs_per_block=64,
    crossover=dict.fromkeys((2, 3, 4, 8), 100),
    dense_bytes=1 << 25,
)


class EmulatedLinear(CudaLinear):
    """The cuda backend's layer where the emulator serves the CPU."""

    backend = "emulated"
    device_type = "cpu"

    @classmethod
    def refusal(cls, packed, dtype):
        return refusal(packed, dtype)


@dataclasses.dataclass
class Emulation:
    """Registers the emulator for the CPU while it lives."""

    launcher: Launcher
    operators: torch.library.Library


def emulate(path):
    launcher = Launcher(KernelLibrary(path), torch.device("cpu"), TUNING, multiprocessors=8)
    operators = torch.library.Library("gptqkit", "IMPL")
    ops.implement(operators, "CPU", launcher)
    return Emulation(launcher, operators)


def move(packed, device):
    """The same layer with its tensors on `device`."""
    tensors = {
        field.name: value.to(device)
        for field in dataclasses.fields(packed)
        if isinstance(value := getattr(packed, field.name), torch.Tensor)
    }
    return dataclasses.replace(packed, **tensors)
