"""Compile the CUDA sources of `csrc` into one shared library, or check that they compile well.

    python kernels/build.py TARGET [--arch 90]     the library, for all architectures or for some
    python kernels/build.py --check [--arch 90]    every source: no spilled registers, the expected instructions

`setup.py` loads this file by its path before gptqkit or torch are there, so it needs Python and nvcc alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parent / "csrc"
ARCHITECTURES = ("80", "89", "90", "120", "100")
"""Compute capabilities that the library holds machine code for; the last also as PTX, for 11.0 and later ones."""

_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", "0")
_EXPECTED = ("HMMA.16816.F32", "LDGSTS")
"""What every gemm kernel must contain: the tensor cores' product and the asynchronous copy."""


class BuildError(RuntimeError):
    """The sources could not be compiled; the message has the compiler's words."""


class KernelReport(NamedTuple):
    """What ptxas says of one kernel, by its mangled name, on one architecture, as in "90"."""

    source: str
    architecture: str
    name: str
    registers: int
    spill_bytes: int


def find_nvcc() -> Path | None:
    """Return the compiler nvcc of CUDA_HOME, of PATH or of /usr/local/cuda, or None."""
    home = os.environ.get("CUDA_HOME")  # the name by which every CUDA build is told
    candidates = [home and Path(home, "bin", "nvcc"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


def build(target: Path, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile all sources into the shared library `target`, whose folder is made if need be.

    Raises:
        BuildError: There is no nvcc, or it refuses the sources.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Compressed machine code: the library is read once per process, and a wheel carries it.
    linking = ["-cudart", "static", "-shared", "--compress-mode=size"]
    _nvcc(*linking, *map(str, sorted(SOURCES.glob("*.cu"))), "-o", str(target), architectures=architectures, ptx=True)


def compile_object(source: Path, target: Path, architectures: Sequence[str] = ARCHITECTURES) -> str:
    """Compile one source into the object file `target`; return what ptxas says of its kernels.

    Raises:
        BuildError: There is no nvcc, or it refuses the source.
    """
    return _nvcc("-Xptxas", "-v", "-c", str(source), "-o", str(target), architectures=architectures)


def check(architectures: Sequence[str] = ARCHITECTURES) -> list[KernelReport]:
    """Compile every source; return what ptxas says of each kernel on each architecture.

    Raises:
        BuildError: There is no nvcc, a source does not compile, or a gemm kernel lacks an instruction that it is made
            of (looked for where cuobjdump is found).
    """
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(SOURCES.glob("*.cu")):
            compiled = Path(folder, source.stem + ".o")
            reports += read_ptxas(source.name, compile_object(source, compiled, architectures))
            if source.stem == "gemm" and _find_cuobjdump() is not None:
                check_instructions(compiled)
    return reports


def read_ptxas(source: str, said: str) -> list[KernelReport]:
    """Return the reports in what ptxas said of one source."""
    pattern = r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'(.*?)Used (\d+) registers"
    return [
        KernelReport(source, architecture, name, int(registers), sum(map(int, re.findall(r"(\d+) bytes spill", text))))
        for name, architecture, text, registers in re.findall(pattern, said, re.DOTALL)
    ]


def check_instructions(compiled: Path) -> None:
    """Refuse an object file of gemm kernels of which one lacks an expected instruction."""
    for text in disassemble(compiled):
        missing = [instruction for instruction in _EXPECTED if instruction not in text]
        if missing:
            raise BuildError(f"{text.split(maxsplit=1)[0]} has no {' and no '.join(missing)}")


def disassemble(compiled: Path) -> list[str]:
    """Return the machine code of each kernel of an object file; a text begins with the kernel's mangled name.

    Raises:
        BuildError: There is no cuobjdump.
    """
    tool = _find_cuobjdump()
    if tool is None:
        raise BuildError("cuobjdump is neither on PATH nor beside nvcc nor in triton; install the CUDA toolkit's")
    return re.split(r"^\s*Function : ", run([tool, "-sass", str(compiled)]), flags=re.MULTILINE)[1:]


def summary(reports: Sequence[KernelReport]) -> str:
    """Return one line per source and architecture, and one per kernel that spills."""
    lines = []
    for place in dict.fromkeys(report[:2] for report in reports):
        kernels = [report for report in reports if report[:2] == place]
        most, spilling = max(each.registers for each in kernels), [each for each in kernels if each.spill_bytes]
        lines.append(f"{place[0]} sm_{place[1]}: {len(kernels)} kernels, up to {most} registers, {len(spilling)} spill")
        lines += [f"    {each.name}: {each.spill_bytes} bytes" for each in spilling]
    return "\n".join(lines) + "\n"


def run(command: Sequence[str]) -> str:
    """Return what a command printed, on both channels.

    Raises:
        BuildError: It is not there or failed.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        words = done.stdout[:8000]  # the first error counts; what follows from it can fill many screens
        raise BuildError(f"{' '.join(command)} ended with status {done.returncode}:\n{words}")
    return done.stdout


def _nvcc(*arguments: str, architectures: Sequence[str], ptx: bool = False) -> str:
    """Run nvcc for those of `architectures` that it knows, with PTX for later ones or without; return what it said."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc is neither in CUDA_HOME nor on PATH nor in /usr/local/cuda; install the CUDA toolkit")
    listed = run([str(nvcc), "--list-gpu-code"]).split()
    known = [each for each in architectures if f"sm_{each}" in listed]
    if not known:
        wanted = ", ".join(f"sm_{each}" for each in architectures)
        raise BuildError(f"{nvcc} knows none of {wanted}; use a CUDA toolkit of version 12.8 or later")
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in known]
    codes += [f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"] if ptx else []
    return run([str(nvcc), *_FLAGS, *codes, *arguments])


def _find_cuobjdump() -> str | None:
    """Return the tool of that name of PATH, of the toolkit, or the one that comes with triton; None without any."""
    nvcc, triton = find_nvcc(), importlib.util.find_spec("triton")
    folders = [nvcc.resolve().parent] if nvcc else []
    folders += [
        Path(each, "backends", "nvidia", "bin") for each in (triton and triton.submodule_search_locations) or ()
    ]
    beside = (str(folder / "cuobjdump") for folder in folders if (folder / "cuobjdump").is_file())
    return shutil.which("cuobjdump") or next(beside, None)


def main() -> int:
    """Run the command line; return 0, or 1 where a kernel spills."""
    parser = argparse.ArgumentParser(description="Compile or check the CUDA sources.")
    parser.add_argument("target", type=Path, nargs="?", help="the shared library to write")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, metavar="CAPABILITY", help="as in 90; default: all")
    parser.add_argument("--check", action="store_true", help="report registers and spills; writes nothing")
    options = parser.parse_args()
    if options.check:
        reports = check(options.arch)
        sys.stdout.write(summary(reports))
        return int(any(report.spill_bytes for report in reports))
    if options.target is None:
        parser.error("a target or --check is needed")
    build(options.target, options.arch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
