"""The compiled kernels: where they are found, how they are loaded, and why they are not.

The library speaks C (`csrc/api.h`), so one file serves every version of torch and Python. It is looked for beside this
module, where the wheel puts it, and then in the user's cache, where it is built once if nvcc is there.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn

import torch

from ..errors import BackendError
from . import build

FILE_NAME = "libgptqkit.so"
OLDEST_CAPABILITY = (8, 0)  # Ampere: the first with the matrix instructions and asynchronous copies of the kernels

_LOG = logging.getLogger("gptqkit")
_HERE = Path(__file__).parent


class Shape(NamedTuple):
    """A layer but for its tensors, in the order of `gptqkit_layer`: `dtype` is the interface's number.

    `free` is 1 for float32 scales and offsets, 0 for float16 scales and whole zero points.
    """

    bits: int
    dtype: int
    n: int
    k: int
    group: int
    free: int = 0


class LayerRecord(Structure):
    """`gptqkit_layer` of `csrc/api.h`."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("weight", "scale", "zero", "bias")),
        *((name, c_int32) for name in Shape._fields),
    ]


class Kernel(NamedTuple):
    """The numbers of `gptqkit_kernel`."""

    tokens: int
    columns: int
    sharing: int
    locks: int
    threads: int
    shared: int
    blocks: int


# The functions that return an error code, with the types of their arguments; tensors and records are pointers.
_SIGNATURES = {
    "versions": [POINTER(c_int), POINTER(c_int)],
    "kernel": [POINTER(LayerRecord), c_int, c_void_p],
    "gemm": [c_void_p, c_void_p, c_int64, *[c_void_p] * 3, c_int, c_int, c_void_p],
    "dequantize": [c_void_p, c_void_p, c_int, c_int, c_void_p],
    "sweep": [*[c_void_p] * 9, *[c_int] * 3, c_void_p],
}


class KernelLibrary:
    """A loaded library, checked to be that of the sources.

    Attributes:
        functions: Those of `csrc/api.h` that return an error code, by their names without "gptqkit_".
        driver: CUDA version that the driver serves, 1000 * major + 10 * minor; 0 where there is no driver.
        built: CUDA version that the library was built with; 0 in the emulator.

    Raises:
        BackendError: The file is no library for this machine, or was built from other sources.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = ctypes.CDLL(str(path))
            self._handle.gptqkit_sources.restype = c_char_p
            sources = self._handle.gptqkit_sources().decode(errors="replace")
        except (OSError, AttributeError) as error:
            raise BackendError(f"{path} cannot be loaded: {error}; build it again") from error
        if sources != build.sources_hash():
            raise BackendError(
                f"{path} was built from other sources, {sources}, than those of this gptqkit, {build.sources_hash()}; "
                "build it again"
            )
        self._handle.gptqkit_error.restype = c_char_p
        self.user = self._handle.gptqkit_user
        self.user.argtypes, self.user.restype = [c_void_p], c_int64
        self.functions = {name: getattr(self._handle, f"gptqkit_{name}") for name in _SIGNATURES}
        for name, arguments in _SIGNATURES.items():
            self.functions[name].argtypes = arguments
        driver, built = c_int(), c_int()
        self.run("versions", byref(driver), byref(built))
        self.driver, self.built = driver.value, built.value

    def kernel(self, shape: Shape, rows: int) -> Kernel:
        """Return what is to know of the kernel for such a layer and `rows` rows of x, on the current device."""
        numbers = (c_int32 * len(Kernel._fields))()
        self.run("kernel", byref(LayerRecord(None, None, None, None, *shape)), rows, numbers)
        return Kernel(*numbers)

    def run(self, name: str, *arguments: object) -> None:
        """Call a function of `csrc/api.h` by its name without "gptqkit_"; an error code becomes a BackendError."""
        if code := self.functions[name](*arguments):
            self.fail(name, code)

    def fail(self, name: str, code: int) -> NoReturn:
        """Raise a BackendError with the library's words for a code."""
        words = self._handle.gptqkit_error(code).decode(errors="replace")
        raise BackendError(f"gptqkit_{name}: {words} (code {code})")

    def check_driver(self) -> None:
        """Refuse a driver that cannot run the library: one of an older major version than the compiler."""
        if self.driver == 0:
            raise BackendError("no NVIDIA driver answers; install one")
        if self.driver // 1000 < self.built // 1000:
            serves, needed = (f"{version // 1000}.{version % 1000 // 10}" for version in (self.driver, self.built))
            raise BackendError(
                f"the NVIDIA driver serves CUDA {serves}, and {self.path} was built with CUDA {needed}; update the "
                f"driver, or build with an nvcc of CUDA {self.driver // 1000}"
            )


def library_for(device: torch.device) -> tuple[KernelLibrary | None, str]:
    """Return the library that serves a GPU, or None and why there is none, in half a sentence."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return None, f"{torch.cuda.get_device_name(device)} has compute capability {capability}, and 8.0 is needed"
    return find_library()


@cache
def find_library() -> tuple[KernelLibrary | None, str]:
    """Return the library of this installation; looked for, and if need be built, at the first call only."""
    try:
        return open_library(_HERE, Path.home() / ".cache" / "gptqkit"), ""
    except RuntimeError as error:  # a BackendError, or no home directory
        return None, str(error)


def open_library(folder: Path, cache_folder: Path) -> KernelLibrary:
    """Return the library of an installation's `folder`, or else of the user's cache, where it is built if need be."""
    path = folder / FILE_NAME
    library = KernelLibrary(path if path.exists() else _build_once(cache_folder / build.sources_hash() / FILE_NAME))
    library.check_driver()
    return library


def _build_once(target: Path) -> Path:
    """Return `target`, built under a lock unless it is there; other processes wait, and find it."""
    if target.exists():
        return target
    import fcntl  # POSIX only, as building is; the rest of this module imports anywhere

    nvcc = build.find_nvcc()
    if nvcc is None:
        raise BackendError(
            "the kernels are not built and nvcc is not found; install the CUDA toolkit, or a built wheel"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also by a crash
            if not target.exists():
                _LOG.warning("building the CUDA kernels into %s; this happens once and takes minutes", target)
                partial = target.with_suffix(f".{os.getpid()}")
                build.build(partial)
                partial.rename(target)
    except (OSError, build.BuildError) as error:
        raise BackendError(f"the kernels could not be built with {nvcc}: {error}") from error
    return target
