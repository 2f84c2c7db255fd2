"""The operators on the CPU: the kernels' own sources, run by their emulator."""

import torch

from gptqkit.kernels import cuda, ops
from gptqkit.kernels.library import KernelLibrary

# Splits K = 128 already, so that small layers see everything.
TUNING = ops.Tuning(least_inputs_per_block=64, crossover=dict.fromkeys((2, 3, 4, 8), 100))


class Emulation:
    """Registers the emulator for the CPU while it lives; its `linear` is the cuda backend's layer there."""

    def __init__(self, path):
        self.launcher = ops.Launcher(KernelLibrary(path), torch.device("cpu"), TUNING, multiprocessors=8)
        self.operators = torch.library.Library("gptqkit", "IMPL")
        ops.implement(self.operators, "CPU", lambda _: self.launcher)

        class EmulatedLinear(cuda.CudaLinear):
            device_type = "cpu"
            launcher = staticmethod(lambda _: self.launcher)

            @classmethod
            def refusal(cls, weight, dtype):
                return cuda.unfit(weight, dtype)

        self.linear = EmulatedLinear
