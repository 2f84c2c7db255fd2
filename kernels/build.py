"""Compile the CUDA sources of `csrc` into one shared library, or check that they compile well.

    python kernels/build.py TARGET [--arch 90]     the library, for all architectures or for some
    python kernels/build.py --check [--arch 90]    every source: no spilled registers, the expected instructions

`setup.py` loads this file by its path before gptqkit or torch are there, so it needs Python and nvcc alone. What cannot
be done is a `BuildError`: there is no such tool, or it refuses a source.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
ARCHITECTURES = ("80", "89", "90", "120", "100")
"""Compute capabilities that the library holds machine code for; the last also as PTX, for 11.0 and later ones."""

_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", "0")
_EXPECTED = ("HMMA.16816.F32", "LDGSTS")  # of every gemm kernel: the tensor cores' product, the asynchronous copy
_NO_CUOBJDUMP = "cuobjdump is neither on PATH nor beside nvcc nor in triton; install the CUDA toolkit's"


class BuildError(RuntimeError):
    """The sources could not be compiled; the message has the compiler's words."""


def find_nvcc() -> Path | None:
    """Return the compiler nvcc of CUDA_HOME, of PATH or of /usr/local/cuda, or None."""
    home = os.environ.get("CUDA_HOME")  # the name by which every CUDA build is told
    candidates = [home and Path(home, "bin", "nvcc"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((Path(path) for path in candidates if path and Path(path).is_file()), None)


def build(target: Path, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile all sources into the shared library `target`, whose folder is made if need be."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Compressed machine code: the library is read once per process, and a wheel carries it.
    linking = ["-cudart", "static", "-shared", "--compress-mode=size", "-o", str(target)]
    _nvcc(*linking, *map(str, sorted(SOURCES.glob("*.cu"))), architectures=architectures, ptx=True)


def sources_hash() -> str:
    """Return a name for the sources as they are now, so that no library of others is taken for theirs."""
    digest = hashlib.sha256()
    for file in sorted([Path(__file__), *SOURCES.iterdir()], key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def compile_object(source: Path, target: Path, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile one source into the object file `target`; spilled registers are an error."""
    strict = ("-Xptxas", "--warn-on-spills,-Werror")
    _nvcc(*strict, "-c", str(source), "-o", str(target), architectures=architectures)


def check(architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile every source, and look for the instructions that gemm kernels are made of where cuobjdump is found."""
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(SOURCES.glob("*.cu")):
            compiled = Path(folder, source.stem + ".o")
            compile_object(source, compiled, architectures)
            for text in disassemble(compiled) if source.stem == "gemm" and _find_cuobjdump() else ():
                name = text.split(maxsplit=1)[0]
                missing = [instruction for instruction in _EXPECTED if instruction not in text]
                if missing and "gemm" in name:  # not what adds their parts
                    raise BuildError(f"{name} has no {' and no '.join(missing)}")


def disassemble(compiled: Path) -> list[str]:
    """Return the machine code of each kernel of an object file; a text begins with the kernel's mangled name."""
    tool = _find_cuobjdump()
    if tool is None:
        raise BuildError(_NO_CUOBJDUMP)
    return re.split(r"^\s*Function : ", _run([tool, "-sass", str(compiled)]), flags=re.MULTILINE)[1:]


def resources(compiled: Path) -> dict[str, tuple[int, int]]:
    """Return each kernel's registers and bytes of static shared memory by its mangled name, of an object file."""
    tool = _find_cuobjdump()
    if tool is None:
        raise BuildError(_NO_CUOBJDUMP)
    found = re.findall(r"Function (\w+):\s+REG:(\d+) .*?SHARED:(\d+)", _run([tool, "-res-usage", str(compiled)]))
    return {name: (int(registers), int(shared)) for name, registers, shared in found}


def _find_cuobjdump() -> str | None:
    """Return the tool of that name of PATH, of the toolkit, or the one that comes with triton; None without any."""
    nvcc, triton = find_nvcc(), importlib.util.find_spec("triton")
    folders = [nvcc.resolve().parent] if nvcc else []
    folders += [
        Path(each, "backends", "nvidia", "bin") for each in (triton and triton.submodule_search_locations) or ()
    ]
    beside = (str(folder / "cuobjdump") for folder in folders if (folder / "cuobjdump").is_file())
    return shutil.which("cuobjdump") or next(beside, None)


def _nvcc(*arguments: str, architectures: Sequence[str], ptx: bool = False) -> None:
    """Run nvcc for those of `architectures` that it knows, with PTX for later ones or without."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc is neither in CUDA_HOME nor on PATH nor in /usr/local/cuda; install the CUDA toolkit")
    listed = _run([str(nvcc), "--list-gpu-code"]).split()
    known = [each for each in architectures if f"sm_{each}" in listed]
    if not known:
        wanted = ", ".join(f"sm_{each}" for each in architectures)
        raise BuildError(f"{nvcc} knows none of {wanted}; use a CUDA toolkit of version 12.8 or later")
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in known]
    codes += [f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}"] if ptx else []
    _run([str(nvcc), *_FLAGS, f'-DGPTQKIT_SOURCES="{sources_hash()}"', *codes, *arguments])


def _run(command: Sequence[str]) -> str:
    """Return what a command printed, on both channels."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        words = done.stdout[:8000]  # the first error counts; what follows from it can fill many screens
        raise BuildError(f"{' '.join(command)} ended with status {done.returncode}:\n{words}")
    return done.stdout


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compile or check the CUDA sources.")
    parser.add_argument("target", type=Path, nargs="?", help="the shared library to write")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, metavar="CAPABILITY", help="as in 90; default: all")
    parser.add_argument("--check", action="store_true", help="look for spilled registers; writes nothing")
    options = parser.parse_args()
    if options.target is None and not options.check:
        parser.error("a target or --check is needed")
    try:
        if options.check:
            check(options.arch)
            sys.stdout.write("no kernel spills registers\n")
        else:
            build(options.target, options.arch)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
