"""The operators on the CPU: the kernels' own sources, run by their emulator."""

from ctypes import c_char_p
from typing import NamedTuple

import torch

from gptqkit.kernels import cuda, ops
from gptqkit.kernels.library import KernelLibrary

# Splits K = 128 already, so that small layers see everything.
TUNING = ops.Tuning(block_inputs=16, part_bytes=1 << 30, crossover=dict.fromkeys((2, 3, 4, 8), 100))


class Traffic(NamedTuple):
    """What one access in the sources cost: `spent` and `least` are transfers for shared memory, bytes for global."""

    file: str
    line: int
    function: str
    bytes: int  # of a lane
    instructions: int  # of warps
    spent: int
    least: int

    @property
    def conflicts(self):
        return self.function in ("load_shared", "store_shared", "copy_async_to") and self.spent > self.least


class Emulation:
    """Registers the emulator for the CPU while it lives; its `linear` is the cuda backend's layer there."""

    def __init__(self, path):
        self.library = KernelLibrary(path)
        self.launcher = ops.Launcher(self.library, torch.device("cpu"), TUNING, ops.Device(8, 1 << 20))
        self.operators = torch.library.Library("gptqkit", "IMPL")
        ops.implement(self.operators, "CPU", lambda _: self.launcher)

        class EmulatedLinear(cuda.CudaLinear):
            device_type = "cpu"
            launcher = staticmethod(lambda _: self.launcher)

            @classmethod
            def refusal(cls, weight, dtype):
                return cuda.unfit(weight, dtype)

        self.linear = EmulatedLinear

    def reorder(self, seed):
        """Let threads run in another order."""
        self.library._handle.gptqkit_emulator_seed(seed)

    def count_traffic(self, counting):
        self.library._handle.gptqkit_emulator_count(int(counting))

    def traffic(self):
        """The traffic of the last launch, if it was counted."""
        report = self.library._handle.gptqkit_emulator_traffic
        report.restype = c_char_p
        words = [line.split() for line in report().decode().splitlines()]
        return [Traffic(file, int(line), name, *map(int, numbers)) for file, line, name, *numbers in words]
