"""Compile the CUDA sources of `csrc` into one shared library.

    python kernels/build.py TARGET [--arch 90]     for all architectures, or for some

`setup.py` loads this file by its path before gptqkit or torch are there, so it needs Python and nvcc alone. What cannot
be done is a `BuildError`: there is no such tool, or it refuses a source.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
ARCHITECTURES = ("80", "89", "90", "120", "100")
"""Compute capabilities that the library holds machine code for; the last also as PTX, for 11.0 and later ones."""

_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", "0")


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
    run_nvcc(*linking, *map(str, sorted(SOURCES.glob("*.cu"))), architectures=architectures, ptx=True)


def sources_hash() -> str:
    """Return a name for the sources as they are now, so that no library of others is taken for theirs."""
    digest = hashlib.sha256()
    for file in sorted([Path(__file__), *SOURCES.iterdir()], key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def run_nvcc(*arguments: str, architectures: Sequence[str], ptx: bool = False) -> None:
    """Run nvcc for those of `architectures` that it knows, with PTX for later ones or without."""
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
    run([str(nvcc), *_FLAGS, f'-DGPTQKIT_SOURCES="{sources_hash()}"', *codes, *arguments])


def run(command: Sequence[str]) -> str:
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
    parser = argparse.ArgumentParser(description="Compile the CUDA sources.")
    parser.add_argument("target", type=Path, help="the shared library to write")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, metavar="CAPABILITY", help="as in 90; default: all")
    options = parser.parse_args()
    try:
        build(options.target, options.arch)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
