"""Check that every CUDA source compiles without spilled registers, into the instructions that gemm kernels are made of.

    python benchmarks/machine_code.py [--arch 90]     for all architectures of the library, or for some

The instructions are looked for where cuobjdump is found, which comes with the CUDA toolkit and with triton.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gptqkit.kernels.build import ARCHITECTURES, SOURCES, BuildError, find_nvcc, run, run_nvcc

EXPECTED = ("HMMA.16816.F32", "LDGSTS")  # of every gemm kernel: the tensor cores' product, the asynchronous copy


def compile_object(source: Path, target: Path, architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile one source into the object file `target`; spilled registers are an error."""
    strict = ("-Xptxas", "--warn-on-spills,-Werror")
    run_nvcc(*strict, "-c", str(source), "-o", str(target), architectures=architectures)


def check(architectures: Sequence[str] = ARCHITECTURES) -> None:
    """Compile every source, and look for the expected instructions."""
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(SOURCES.glob("*.cu")):
            compiled = Path(folder, source.stem + ".o")
            compile_object(source, compiled, architectures)
            for text in disassemble(compiled) if source.stem == "gemm" and find_cuobjdump() else ():
                name = text.split(maxsplit=1)[0]
                missing = [instruction for instruction in EXPECTED if instruction not in text]
                if missing and "gemm" in name:  # not what adds their parts
                    raise BuildError(f"{name} has no {' and no '.join(missing)}")


def disassemble(compiled: Path) -> list[str]:
    """The machine code of each kernel of an object file; a text begins with the kernel's mangled name."""
    return re.split(r"^\s*Function : ", cuobjdump("-sass", compiled), flags=re.MULTILINE)[1:]


def resources(compiled: Path) -> dict[str, tuple[int, int]]:
    """Each kernel's registers and bytes of static shared memory by its mangled name, of an object file."""
    found = re.findall(r"Function (\w+):\s+REG:(\d+) .*?SHARED:(\d+)", cuobjdump("-res-usage", compiled))
    return {name: (int(registers), int(shared)) for name, registers, shared in found}


def cuobjdump(what: str, compiled: Path) -> str:
    """What cuobjdump says of an object file."""
    tool = find_cuobjdump()
    if tool is None:
        raise BuildError("cuobjdump is neither on PATH nor beside nvcc nor in triton; install the CUDA toolkit's")
    return run([tool, what, str(compiled)])


def find_cuobjdump() -> str | None:
    """The tool of that name of PATH, of the toolkit, or the one that comes with triton; None without any."""
    nvcc, triton = find_nvcc(), importlib.util.find_spec("triton")
    folders = [nvcc.resolve().parent] if nvcc else []
    folders += [
        Path(each, "backends", "nvidia", "bin") for each in (triton and triton.submodule_search_locations) or ()
    ]
    beside = (str(folder / "cuobjdump") for folder in folders if (folder / "cuobjdump").is_file())
    return shutil.which("cuobjdump") or next(beside, None)


def main() -> None:
    """Check, and say so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES, metavar="CAPABILITY", help="as in 90; default: all")
    try:
        check(parser.parse_args().arch)
    except BuildError as error:
        sys.exit(str(error))
    print("no kernel spills registers")


if __name__ == "__main__":
    main()
