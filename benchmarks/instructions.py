"""Instructions of the gemm kernels' main loops, counted in the machine code: what can be said of speed without a GPU.

    python benchmarks/instructions.py [--out benchmarks/results]

A warp works through units of 64 x 64 codes. Per unit: the instructions that every unit takes, with the products of the
tensor cores among them, and those that the ends of groups of 128 inputs add on average. The share is theirs of the
issue slots that pass while an H100's memory delivers the unit: calculated, not measured; above 100 % the instructions
are the limit and not the memory. Writes instructions.json. Needs nvcc and cuobjdump, which comes with the CUDA toolkit
and with triton.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from gptqkit.kernels.build import SOURCES, compile_object, disassemble

ARCHITECTURE = "90"
BANDWIDTH = 3.0e12  # bytes per second that a copy moves on an H100
SLOTS = 132 * 4 * 1.755e9  # per second: multiprocessors, their schedulers, the clock
GROUP_UNITS = 2  # units of a group of 128 inputs
KERNEL = re.compile(r"gemm_(small|large)_mI\d+(B?Float16)Li(\d)ELi(\d)E(?:Lb(\d)E)?")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")
JUMP = re.compile(r"BRA .*0x([0-9a-f]+)")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One kernel's main loop, per unit.

    Attributes:
        kernel: "small" or "large", by the rows of x.
        dtype: Of activations.
        bits: Per code.
        tokens: Rows of x in a tile.
        every: Instructions of every unit.
        products: Those of the tensor cores among them.
        group_end: Instructions that groups of 128 inputs add, on average.
    """

    kernel: str
    dtype: str
    bits: int
    tokens: int
    every: int
    products: int
    group_end: float

    @property
    def share(self) -> float:
        """Of the issue slots that pass while memory delivers the unit's codes."""
        return (self.every + self.group_end) / (self.bits * 512 / BANDWIDTH * SLOTS)


def main_loop(text: str) -> list[tuple[int, str]]:
    """Addresses and instructions of the shortest loop that holds the most products."""
    listing = [(int(address, 16), words) for address, words in INSTRUCTION.findall(text)]
    place = {address: index for index, (address, _) in enumerate(listing)}
    loops = []
    for index, (address, words) in enumerate(listing):
        jump = JUMP.search(words)
        if jump and int(jump[1], 16) <= address:
            loops.append(listing[place[int(jump[1], 16)] : index + 1])
    return max(loops, key=lambda loop: (sum("HMMA" in words for _, words in loop), -len(loop)))


def optional_parts(loop: list[tuple[int, str]]) -> list[int]:
    """Lengths of the parts that a jump may leave out, but for the copies, which only the last units leave out."""
    parts, after = [], 0
    for address, words in loop:
        jump = JUMP.search(words)
        if not jump or address < after or not address < int(jump[1], 16) <= loop[-1][0]:
            continue
        part = [each for place, each in loop if address < place < int(jump[1], 16)]
        if not any("LDGSTS" in each or "HMMA" in each for each in part):
            parts.append(len(part))
            after = int(jump[1], 16)
    return parts


def read_loop(text: str) -> Loop | None:
    """The loop in one kernel's listing; None for other kernels and those for groups below 64 inputs."""
    name = KERNEL.search(text.split(maxsplit=1)[0])
    if name is None or name[5] == "1":
        return None
    loop = main_loop(text)
    parts = optional_parts(loop)
    # gemm_large_m looks for the end of a group in each step of a unit.
    places = max(1, len(parts)) if name[1] == "large" else 1
    return Loop(
        kernel=name[1],
        dtype=name[2].lower(),
        bits=int(name[3]),
        tokens=8 * int(name[4]),
        every=len(loop) - sum(parts),
        products=sum("HMMA" in words for _, words in loop),
        group_end=sum(parts) / places / GROUP_UNITS,
    )


def main() -> None:
    """Compile, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder, "gemm.o")
        compile_object(SOURCES / "gemm.cu", compiled, (ARCHITECTURE,))
        found = [read_loop(text) for text in disassemble(compiled)]
    loops = sorted((loop for loop in found if loop), key=lambda loop: (loop.tokens, loop.dtype, loop.bits))
    print("tokens | dtype    | bits | every unit | products | group end | share")
    for loop in loops:
        print(
            f"{loop.tokens:>6} | {loop.dtype:<8} | {loop.bits:>4} | {loop.every:>10} | {loop.products:>8} | "
            f"{loop.group_end:>9.0f} | {loop.share:>5.0%}"
        )
    report = {
        "architecture": f"sm_{ARCHITECTURE}",
        "calculated_for": {"copy_bytes_per_second": BANDWIDTH, "issue_slots_per_second": SLOTS},
        "loops": [asdict(loop) | {"share": round(loop.share, 3)} for loop in loops],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "instructions.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
