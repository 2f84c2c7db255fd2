"""The compiled kernels: where they are found, how they are loaded, and why they are not.

The library speaks C (`csrc/api.h`), so one file serves every version of torch and Python. It is looked for beside this
module, where the wheel puts it, and then in the user's cache, where it is built once if nvcc is there.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from ..errors import BackendError
from . import build

ABI = 5
FILE_NAME = "libgptqkit.so"
OLDEST_CAPABILITY = (8, 0)  # Ampere: the first with the matrix instructions and asynchronous copies of the kernels

_LOG = logging.getLogger("gptqkit")
_HERE = Path(__file__).parent

# The functions that return an error code, with the types of their arguments; tensors are pointers.
_SIGNATURES = {
    "gptqkit_versions": [POINTER(c_int), POINTER(c_int)],
    "gptqkit_workspace": [c_int, c_int, c_int, c_int, POINTER(c_int64), POINTER(c_int64)],
    "gptqkit_gemm": [c_int, c_int, c_void_p, c_int64, *[c_void_p] * 7, *[c_int] * 5, c_void_p],
    "gptqkit_dequantize": [c_int, c_int, *[c_void_p] * 4, *[c_int] * 5, c_void_p],
    "gptqkit_sweep": [*[c_void_p] * 10, *[c_int] * 6, c_void_p],
}


class KernelLibrary:
    """A loaded library, checked for its interface's number.

    Attributes:
        driver: CUDA version that the driver serves, 1000 * major + 10 * minor; 0 where there is no driver.
        built: CUDA version that the library was built with; 0 in the emulator.

    Raises:
        BackendError: The file is no library for this machine, or has another interface.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = ctypes.CDLL(str(path))
            abi = int(self._handle.gptqkit_abi())
        except (OSError, AttributeError) as error:
            raise BackendError(f"{path} cannot be loaded: {error}; build it again") from error
        if abi != ABI:
            raise BackendError(f"{path} has interface {abi}, and this version of gptqkit needs {ABI}; build it again")
        for name, arguments in _SIGNATURES.items():
            getattr(self._handle, name).argtypes = arguments
        self._handle.gptqkit_error.restype = c_char_p
        self.driver, self.built = self._two_numbers("gptqkit_versions", c_int)

    def run(self, name: str, *arguments: object) -> None:
        """Call a function of `csrc/api.h`; an error code becomes a BackendError with the library's words."""
        code = getattr(self._handle, name)(*arguments)
        if code:
            raise BackendError(f"{name}: {self._handle.gptqkit_error(code).decode(errors='replace')} (code {code})")

    def workspace(self, m: int, n: int, k: int, split: int) -> tuple[int, int]:
        """Return how many float32 partial sums and int32 locks a product of these sizes needs."""
        return self._two_numbers("gptqkit_workspace", c_int64, m, n, k, split)

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

    def _two_numbers(self, name: str, kind: type[c_int] | type[c_int64], *arguments: int) -> tuple[int, int]:
        first, second = kind(), kind()
        self.run(name, *arguments, byref(first), byref(second))
        return first.value, second.value


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
    """Return the library of an installation's `folder`, or else of the user's cache, where it is built if need be.

    Raises:
        BackendError: There is none and it cannot be built, or the one found cannot be used.
    """
    path = folder / FILE_NAME
    library = KernelLibrary(path if path.exists() else _build_once(cache_folder / sources_hash() / FILE_NAME))
    library.check_driver()
    return library


def sources_hash() -> str:
    """Return a name for the sources as they are now, so that no library of others is taken for theirs."""
    digest = hashlib.sha256()
    for file in sorted([_HERE / "build.py", *(_HERE / "csrc").iterdir()]):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


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
