"""What the machine code of the gemm kernels says of their speed, without a GPU.

    python benchmarks/instructions.py [--out benchmarks/results] [--arch 90]

For every kernel and architecture: registers, bytes of shared memory, and how many blocks one multiprocessor holds. Then
a warp's instructions: for each unit of 64 x 64 codes, with those that the ends of groups of 128 inputs add on average
("fine": of 32; "free": of 32, with float32 scales and offsets); behind the loop, where loops count as often as they run
for a tile that eight blocks share, and branches not taken count, too; with the 16-byte loads of partial sums that are
under way at a time. Instructions per byte are those of a product of 16384 inputs shared by eight blocks, for each byte
of the weight. The share is theirs of the issue slots that pass while an H100's memory delivers the weight: calculated,
not measured; above 100 % the instructions are the limit and not the memory. Writes instructions.json. Needs nvcc and
cuobjdump, which comes with the CUDA toolkit and with triton.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from machine_code import compile_object, disassemble, resources

from gptqkit.kernels.build import SOURCES, find_nvcc
from gptqkit.kernels.library import Kernel, LayerRecord, Shape

# By compute capability: KiB of shared memory and warps of a multiprocessor. All have 65,536 registers.
ARCHITECTURES = {"80": (164, 64), "89": (100, 48), "90": (228, 64), "120": (100, 48)}
REGISTERS, RESERVED = 65536, 1024  # the latter: bytes of shared memory that every block takes for the system
BANDWIDTH = 3.0e12  # bytes per second that a copy moves on an H100
SLOTS = 132 * 4 * 1.755e9  # per second: multiprocessors, their schedulers, the clock
GROUP_UNITS = 2  # units of a group of 128 inputs
STEPS = 4  # of a unit
INPUTS, SPLIT, PARTS_AT_ONCE = 16384, 8, 4  # the last is kBlocks of add_parts
KERNEL = re.compile(r"gemm_(small|large)_mI\d+(B?Float16)Li(\d)ELi(\d+)E(?:Lb(\d)E)?Lb(\d)E")
ADD = re.compile(r"add_large_mI\d+(B?Float16)Li(\d+)E")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);")
JUMP = re.compile(r"BRA\S* .*0x([0-9a-f]+)")
Listing = list[tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel on one architecture; `group_end` is an average for each unit, `loads` are of partial sums."""

    architecture: str
    kernel: str
    dtype: str
    bits: int
    tokens: int
    fine: bool
    free: bool
    registers: int
    shared: int
    blocks: int
    unit: int
    products: int
    group_end: float
    behind: int
    loads: int
    per_byte: float
    share: float


def listing_of(text: str) -> Listing:
    """Addresses and instructions of a kernel."""
    return [(int(address, 16), words) for address, words in INSTRUCTION.findall(text)]


def loops_of(listing: Listing) -> list[Listing]:
    """All loops, but for the last instruction's that jumps to itself."""
    place = {address: index for index, (address, _) in enumerate(listing)}
    jumps = ((index, address, JUMP.search(words)) for index, (address, words) in enumerate(listing))
    return [
        listing[place[int(jump[1], 16)] : index + 1]
        for index, address, jump in jumps
        if jump and int(jump[1], 16) < address
    ]


def count(loop: Listing, name: str) -> int:
    """How many of the instructions have this name."""
    return sum(name in words for _, words in loop)


def optional_parts(loop: Listing) -> list[int]:
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


def once(listing: Listing) -> tuple[int, int]:
    """Instructions with those of loops as often as they run, and the 16-byte loads of one round of a loop."""
    rounds = -(-SPLIT // PARTS_AT_ONCE)
    loops = [loop for loop in loops_of(listing) if count(loop, "LDG.E.128")]
    listed = sum("NOP" not in words for _, words in listing)
    extra = sum((rounds - 1) * len(loop) for loop in loops)
    return listed + extra, min((count(loop, "LDG.E.128") for loop in loops), default=0)


def blocks_of(architecture: str, registers: int, shared: int, warps: int) -> int:
    """Blocks that one multiprocessor holds."""
    kibibytes, most_warps = ARCHITECTURES[architecture]
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, kibibytes * 1024 // (shared + RESERVED), most_warps // warps)


def read_kernel(library: ctypes.CDLL, shape: Shape, tokens: int) -> Kernel:
    """What the library says of a kernel; it asks for a device at the end, which there need not be."""
    numbers = (ctypes.c_int32 * len(Kernel._fields))()
    library.gptqkit_kernel(ctypes.byref(LayerRecord(None, None, None, None, *shape)), tokens, numbers)
    return Kernel(*numbers)


def read_rows(architecture: str, folder: Path) -> list[Row]:
    """All gemm kernels of an architecture."""
    compiled, linked = folder / "gemm.o", folder / f"gemm{architecture}.so"
    compile_object(SOURCES / "gemm.cu", compiled, (architecture,))
    subprocess.run([str(find_nvcc()), "-shared", "-cudart", "static", str(compiled), "-o", str(linked)], check=True)
    library, usage = ctypes.CDLL(str(linked)), resources(compiled)
    texts = {text.split(maxsplit=1)[0]: text for text in disassemble(compiled)}
    adding = {}
    for name, text in texts.items():
        if match := ADD.search(name):
            adding[match[1], int(match[2])] = once(listing_of(text))
    rows = []
    for name, text in texts.items():
        match = KERNEL.search(name)
        if match is None:
            continue
        kind, dtype, bits, tokens, free = match[1], match[2], int(match[3]), int(match[4]), match[6] == "1"
        fine, number = free or match[5] == "1", int(dtype == "BFloat16")
        kernel = read_kernel(library, Shape(bits, number, 64, INPUTS, 32 if fine else 128, int(free)), tokens)
        listing = listing_of(text)
        loop = max(loops_of(listing), key=lambda loop: (count(loop, "HMMA"), -len(loop)))
        parts = optional_parts(loop)
        # Where a kernel looks for ends of groups: once per unit or in each step, gemm_small_m also behind them.
        places = max(1, len(parts)) if kind == "large" else STEPS + 1 if fine else 1
        ends = 2 if fine else 1 / GROUP_UNITS
        behind, loads = once([each for each in listing if each[0] > loop[-1][0]])
        if kind == "large":  # another kernel adds the parts
            more, loads = adding[dtype, tokens]
            behind += more * tokens // 4 // SPLIT  # one of SPLIT blocks' share of its launch
        unit, group_end = len(loop) - sum(parts), sum(parts) / places * ends
        units = INPUTS // 64 / (SPLIT * kernel.sharing)
        per_byte = (units * (unit + group_end) + behind) / (units * 512 * bits)
        registers, static = usage[name]
        rows.append(
            Row(
                architecture=f"sm_{architecture}",
                kernel=kind,
                dtype=dtype.lower(),
                bits=bits,
                tokens=tokens,
                fine=fine,
                free=free,
                registers=registers,
                shared=kernel.shared,
                blocks=blocks_of(architecture, registers, kernel.shared + static % RESERVED, kernel.threads // 32),
                unit=unit,
                products=count(loop, "HMMA"),
                group_end=group_end,
                behind=behind,
                loads=loads,
                per_byte=round(per_byte, 4),
                share=round(per_byte * BANDWIDTH / SLOTS, 3),
            )
        )
    return sorted(rows, key=lambda row: (row.tokens, row.fine, row.free, row.dtype, row.bits))


def main() -> None:
    """Compile, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the file")
    parser.add_argument("--arch", nargs="+", choices=tuple(ARCHITECTURES), default=tuple(ARCHITECTURES))
    arguments = parser.parse_args()
    report = {
        "calculated_for": {"copy_bytes_per_second": BANDWIDTH, "issue_slots_per_second": SLOTS},
        "inputs": INPUTS,
        "split": SPLIT,
        "kernels": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for architecture in arguments.arch:
            print(f"sm_{architecture}")
            print("tokens | dtype    | bits | ends | registers | shared | blocks per SM | unit | behind")
            for row in read_rows(architecture, Path(folder)):
                ends = "free" if row.free else "fine" if row.fine else ""
                print(
                    f"{row.tokens:>6} | {row.dtype:<8} | {row.bits:>4} | {ends:>4} | "
                    f"{row.registers:>9} | {row.shared:>6} | {row.blocks:>13} | {row.unit:>4} | {row.behind:>6} | "
                    f"{row.loads} loads, {row.per_byte:.3f} per byte, {row.share:.0%}",
                    flush=True,
                )
                report["kernels"].append(asdict(row))
    rows = ",\n  ".join(json.dumps(row) for row in report.pop("kernels"))  # a line each
    text = json.dumps(report, indent=1).removesuffix("\n}") + f',\n "kernels": [\n  {rows}\n ]\n}}\n'
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "instructions.json").write_text(text)


if __name__ == "__main__":
    main()
