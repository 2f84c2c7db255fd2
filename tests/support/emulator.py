"""Compile the kernels' own sources with the emulator of a GPU in them, `tests/emulator`: needs g++ alone.

python tests/support/emulator.py TARGET [--sanitize]    with --sanitize: AddressSanitizer and UBSan
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from gptqkit.kernels.build import sources_hash  # noqa: E402 - as a script it knows no path to it

CSRC, EMULATOR = ROOT / "kernels" / "csrc", ROOT / "tests" / "emulator"
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def build_emulator(target, flags=("-O1",), sources=CSRC):
    """Compile the .cu files of `sources` for the CPU into the shared library `target`."""
    command = ["g++", "-std=c++17", "-fPIC", "-fvisibility=hidden", *flags, "-DGPTQKIT_EMULATOR"]
    command += [f'-DGPTQKIT_SOURCES="{sources_hash()}"']
    command += ["-Wall", "-Wextra", "-Wno-unknown-pragmas", f"-I{sources}", f"-I{EMULATOR}"]
    with TemporaryDirectory() as folder:

        def compile_one(source):
            compiled = f"{folder}/{source.stem}.o"
            subprocess.run([*command, "-c", "-x", "c++", str(source), "-o", compiled], check=True)
            return compiled

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sorted([*Path(sources).glob("*.cu"), *EMULATOR.glob("*.cc")])))
        subprocess.run([*command, "-shared", *objects, "-o", str(target)], check=True)


if __name__ == "__main__":
    Path(sys.argv[1]).parent.mkdir(parents=True, exist_ok=True)
    build_emulator(sys.argv[1], SANITIZED if "--sanitize" in sys.argv else ("-O1",))
