"""The emulator finds bugs: each of these changes to the kernels makes a product wrong, is a fault, or costs transfers.

Races and what blocks leave for each other are found whatever the order of threads is, so their faults are named here.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOST = ["g++", "-O0", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DGPTQKIT_EMULATOR"]

# What is broken: file, text, replacement, bits of the layers that show it, what is said of it.
BUGS = {
    "the ring of up to 16 tokens is read one stage too early": (
        "gemm_narrow.cuh", "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();", 4, "a copy is still bringing",
    ),
    "the ring of more tokens is read one stage too early": (
        "gemm_wide.cuh", "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();", 4, "a copy is still bringing",
    ),
    "nobody waits for the other threads' copies of tokens": (
        "gemm_wide.cuh", "block_barrier(); // everybody's part", "// everybody's part", 4, "a race",
    ),
    "the sums of up to 16 tokens overwrite a ring that is still read": (
        "gemm_narrow.cuh", "block_barrier(); // the ring becomes", "// the ring becomes", 4, "a race",
    ),
    "the sums of more tokens overwrite a ring that is still read": (
        "gemm_wide.cuh", "block_barrier(); // the ring becomes", "// the ring becomes", 4, "a race",
    ),
    "the sums of up to 16 tokens are read before they are written": (
        "gemm_narrow.cuh", "    block_barrier();\n    store_tile", "    store_tile", 4, "a race",
    ),
    "the sums of more tokens are read before they are written": (
        "gemm_wide.cuh", "    block_barrier();\n    store_tile", "    store_tile", 4, "a race",
    ),
    "the ring has one stage less than it uses": (
        "gemm.cu", "larger(kWideRingBytes<BITS, TOKENS>, kSum", "larger(kWideRingBytes<BITS, TOKENS> * 3 / 4, 0 * kSum",
        4, "outside shared memory",
    ),
    "the ticket is taken before the block's sums are there": (
        "gemm.cuh", "    device_fence();\n    block_barrier();", "    device_fence();", 4, "no barrier between another",
    ),
    "the ticket is taken before the block's sums are visible": (
        "gemm.cuh", "    device_fence();\n    block_barrier();", "    block_barrier();", 4, "no fence between another",
    ),
    "the block's sums become visible after the ticket": (
        "gemm.cuh", "    device_fence();\n    block_barrier();\n    if (thread == 0) {",
        "    block_barrier();\n    if (thread != 0) device_fence();\n    if (thread == 0) {", 4,
        "no fence between another",
    ),
    "who came last is asked before it is known": (
        "gemm.cuh", "    block_barrier();\n    if (!load_shared", "    if (!load_shared", 4,
        "a race|ticket",
    ),
    "the others' sums are read without a fence": (
        "gemm.cuh", "(last)) return;\n    device_fence();", "(last)) return;", 4, "no fence between a ticket and",
    ),
    "the blocks of a tile leave their sums in one place": (
        "gemm.cuh", "a.workspace + plane * blockIdx.y + mine", "a.workspace + mine", 4, "two blocks write one float",
    ),
    "the others' sums are read from another plane": (
        "gemm.cuh", "a.workspace + plane * block + mine", "a.workspace + plane * (block + 1) + mine", 4,
        "no block has written",
    ),
    "the last group is lost": (
        "gemm_narrow.cuh", "    add_sums();\n\n    copy_wait<0>", "    copy_wait<0>", 4, "error",
    ),
    "inputs beyond K are read": ("gemm_narrow.cuh", "|| whole ?", "|| true ?", 4, "error"),
    "some lanes stay away from the tensor cores": (
        "gemm_narrow.cuh", "multiply_add<T>(sum_x[m]", "if (c < a.m) multiply_add<T>(sum_x[m]", 4, "emulator",
    ),
    "a split code loses a bit": ("fragments.cuh", "word[2] >> 7, 0x01000100", "word[2] >> 8, 0x01000100", 3, "error"),
    "rows of sums meet in the same banks": (
        "gemm.cuh", "(part * TOKENS + token) * (COLUMNS + 4)", "(part * TOKENS + token) * COLUMNS", 4,
        "store_shared: 4 times",
    ),
    "rows of tokens meet in the same banks": (
        "gemm_wide.cuh", "kTokenRow = 160", "kTokenRow = 128", 4, "load_shared: 4 times",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def objects(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The sources that no bug touches, compiled."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("objects")
    names = ("api.cu", "repack.cu", "dequantize.cu", "emulator_machine.cc", "emulator_memory.cc")
    sources = [str(root / "kernels" / "csrc" / name) for name in names]
    subprocess.run([*HOST, "-O1", "-c", "-x", "c++", *sources], cwd=folder, check=True)
    return [str(path) for path in folder.glob("*.o")]


def result(folder: Path, objects: list[str], bits: int, root: Path) -> subprocess.CompletedProcess[str]:
    """Compile the gemm of `folder` for one kind of layer and run the cases."""
    text = (folder / "gemm.cu").read_text(encoding="utf-8").replace("start<BFloat16>", "start<Float16>")
    for other in (2, 3, 4, 8):
        text = text.replace(f"return start<T, {other}>", f"return start<T, {bits}>")
    (folder / "gemm.cu").write_text(text, encoding="utf-8")
    library = folder / "library.so"
    subprocess.run(
        [*HOST, "-shared", "-x", "c++", "gemm.cu", "-x", "none", *objects, "-o", library], cwd=folder, check=True
    )
    command = [sys.executable, str(root / "tests" / "support" / "kernel_cases.py"), str(library), "--bits", str(bits)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str, root: Path, objects: list[str], tmp_path: Path) -> None:
    file, text, replacement, bits, words = BUGS[bug]
    shutil.copytree(root / "kernels" / "csrc", tmp_path, dirs_exist_ok=True)
    source = (tmp_path / file).read_text(encoding="utf-8")
    assert source.count(text) == 1, "the sources have changed: plant the bug anew"
    (tmp_path / file).write_text(source.replace(text, replacement), encoding="utf-8")
    done = result(tmp_path, objects, bits, root)
    assert done.returncode != 0
    assert re.search(words, done.stderr), done.stderr


def test_without_a_bug_nothing_is_found(root: Path, objects: list[str], tmp_path: Path) -> None:
    shutil.copytree(root / "kernels" / "csrc", tmp_path, dirs_exist_ok=True)
    done = result(tmp_path, objects, 4, root)
    assert done.returncode == 0, done.stderr
