"""Compile the CUDA sources of `csrc` into one shared library, or check that they compile well.

    python kernels/build.py TARGET [--arch 90]     the library, for all architectures or for some
    python kernels/build.py TARGET --emulator      the same sources for the CPU (g++), for tests; also with --sanitize
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
ARCHITECTURES = ("80", "89", "90", "100")
"""Compute capabilities that the library holds machine code for; the newest also as PTX, for later ones."""

_HOST = ("-std=c++17", "-fPIC", "-fvisibility=hidden")
_DEVICE = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--threads", "0")
_SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
_EXPECTED = ("HMMA.16816.F32", "LDGSTS")
"""What every gemm kernel must contain: the tensor cores' product and the asynchronous copy."""


class BuildError(RuntimeError):
    """The sources could not be compiled; the message has the compiler's words."""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What ptxas says of one kernel.

    Attributes:
        source: File name of the source.
        architecture: As in "90".
        name: The kernel's mangled name.
        registers: Per thread.
        spill_bytes: Stored and loaded again because registers ran out.
    """

    source: str
    architecture: str
    name: str
    registers: int
    spill_bytes: int


def find_nvcc() -> Path | None:
    """The compiler nvcc of CUDA_HOME, of PATH or of /usr/local/cuda, or None."""
    home = os.environ.get("CUDA_HOME")  # the name by which every CUDA build is told
    candidates = [Path(home, "bin", "nvcc")] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.is_file()), None)


def known_architectures(nvcc: Path, wanted: Sequence[str] = ARCHITECTURES) -> tuple[str, ...]:
    """Those of `wanted` that this nvcc compiles for.

    Raises:
        BuildError: None of them.
    """
    listed = _run([str(nvcc), "--list-gpu-code"]).split()
    known = tuple(architecture for architecture in wanted if f"sm_{architecture}" in listed)
    if not known:
        raise BuildError(f"{nvcc} knows none of sm_{', sm_'.join(wanted)}; use a CUDA toolkit of version 12.8 or later")
    return known


def build(target: Path, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile all sources into the shared library `target`, whose folder is made if need be.

    Raises:
        BuildError: There is no nvcc, or it refuses the sources.
    """
    nvcc = _need_nvcc()
    known = known_architectures(nvcc, architectures)
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in known]
    codes.append(f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Compressed machine code: the library is read once per process, and a wheel carries it.
    linking = ["-cudart", "static", "-shared", "--compress-mode=size"]
    _run([str(nvcc), *_DEVICE, *codes, *linking, *map(str, _sources()), "-o", str(target)])


def build_emulator(target: Path, flags: Sequence[str] = ("-O1",), sources: Path = SOURCES) -> None:
    """Compile the same sources with g++ and the emulator in them, `csrc/emulator*`: for tests.

    Args:
        target: The shared library to write; its folder is made if need be.
        flags: Optimization and checks, as in ("-O1", "-fsanitize=address").
        sources: The folder of the sources, if not ours.

    Raises:
        BuildError: There is no g++, or it refuses the sources.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", *_HOST, *flags, "-DGPTQKIT_EMULATOR", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
    with tempfile.TemporaryDirectory() as folder:

        def compile_one(source: Path) -> str:
            compiled = str(Path(folder, source.stem + ".o"))
            _run([*command, "-c", "-x", "c++", str(source), "-o", compiled])
            return compiled

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sorted([*sources.glob("*.cu"), *sources.glob("*.cc")])))
        _run([*command, "-shared", *objects, "-o", str(target)])


def check(architectures: Sequence[str] = ARCHITECTURES) -> list[KernelReport]:
    """Compile every source and collect what ptxas says of each kernel on each architecture.

    Raises:
        BuildError: There is no nvcc, a source does not compile, or a gemm kernel lacks an instruction that it is made
            of (looked for where cuobjdump is found).
    """
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for source in _sources():
            compiled = Path(folder, source.stem + ".o")
            reports += _read_ptxas(source.name, compile_object(source, compiled, architectures))
            if source.stem == "gemm" and _find_cuobjdump() is not None:
                _check_instructions(compiled)
    return reports


def compile_object(source: Path, target: Path, architectures: Sequence[str] = ARCHITECTURES) -> str:
    """Compile one source into the object file `target`; what ptxas says of its kernels.

    Raises:
        BuildError: There is no nvcc, or it refuses the source.
    """
    nvcc = _need_nvcc()
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in known_architectures(nvcc, architectures)]
    return _run([str(nvcc), *_DEVICE, *codes, "-Xptxas", "-v", "-c", str(source), "-o", str(target)])


def disassemble(compiled: Path) -> list[str]:
    """The machine code of each kernel of an object file; a text begins with the kernel's mangled name.

    Raises:
        BuildError: There is no cuobjdump.
    """
    tool = _find_cuobjdump()
    if tool is None:
        raise BuildError("cuobjdump is neither on PATH nor beside nvcc nor in triton; install the CUDA toolkit's")
    return re.split(r"^\s*Function : ", _run([str(tool), "-sass", str(compiled)]), flags=re.MULTILINE)[1:]


def _read_ptxas(source: str, said: str) -> list[KernelReport]:
    pattern = r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'(.*?)Used (\d+) registers"
    reports = []
    for name, architecture, between, registers in re.findall(pattern, said, re.DOTALL):
        spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", between))
        reports.append(
            KernelReport(
                source=source, architecture=architecture, name=name, registers=int(registers), spill_bytes=spills
            )
        )
    return reports


def _check_instructions(compiled: Path) -> None:
    for text in disassemble(compiled):
        missing = [instruction for instruction in _EXPECTED if instruction not in text]
        if missing:
            raise BuildError(f"{text.split(maxsplit=1)[0]} has no {' and no '.join(missing)}")


def _find_cuobjdump() -> Path | None:
    """The tool of that name of PATH, of the toolkit, or the one that comes with triton; None where there is none."""
    on_path = shutil.which("cuobjdump")
    nvcc = find_nvcc()
    candidates = [Path(on_path)] if on_path else []
    candidates += [nvcc.resolve().parent / "cuobjdump"] if nvcc else []
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations if triton else None) or ():
        candidates.append(Path(folder, "backends", "nvidia", "bin", "cuobjdump"))
    return next((path for path in candidates if path.is_file()), None)


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cu"))


def _need_nvcc() -> Path:
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc is neither in CUDA_HOME nor on PATH nor in /usr/local/cuda; install the CUDA toolkit")
    return nvcc


def _run(command: list[str]) -> str:
    """What the command printed, on both channels.

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


def _summary(reports: Sequence[KernelReport]) -> str:
    """One line per source and architecture, and one per kernel that spills."""
    lines = []
    for source, architecture in dict.fromkeys((report.source, report.architecture) for report in reports):
        kernels = [report for report in reports if (report.source, report.architecture) == (source, architecture)]
        most = max(report.registers for report in kernels)
        spilling = [report for report in kernels if report.spill_bytes]
        counts = f"{len(kernels)} kernels, up to {most} registers, {len(spilling)} spill"
        lines.append(f"{source} sm_{architecture}: {counts}")
        lines += [f"    {report.name}: {report.spill_bytes} bytes" for report in spilling]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command line; 0, or 1 where a kernel spills."""
    parser = argparse.ArgumentParser(description="Compile or check the CUDA sources.")
    parser.add_argument("target", type=Path, nargs="?", help="the shared library to write")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, metavar="CAPABILITY", help="as in 90; default: all")
    parser.add_argument("--emulator", action="store_true", help="for the CPU, with g++")
    parser.add_argument("--sanitize", action="store_true", help="with --emulator: AddressSanitizer and UBSan")
    parser.add_argument("--check", action="store_true", help="report registers and spills; writes nothing")
    options = parser.parse_args()
    if options.check:
        reports = check(options.arch)
        sys.stdout.write(_summary(reports))
        return int(any(report.spill_bytes for report in reports))
    if options.target is None:
        parser.error("a target or --check is needed")
    if options.emulator:
        build_emulator(options.target, _SANITIZED if options.sanitize else ("-O1",))
    else:
        build(options.target, options.arch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
