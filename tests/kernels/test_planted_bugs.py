"""The emulator finds bugs: each of these changes to the kernels makes a product wrong, is a fault, or costs transfers.

Races and what blocks leave for each other are found whatever the order of threads is, so their faults are named here.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from gptqkit.kernels.build import sources_hash
from support.emulator import CSRC, EMULATOR, ROOT

pytestmark = pytest.mark.slow

SMALL, LARGE, BOTH = "gemm_small_m.cuh", "gemm_large_m.cuh", "gemm.cuh"
FENCE, BARRIER = "device_fence();", "    block_barrier();\n"

# What is broken: file, text, replacement, what is said of it.
BUGS = {
    "the ring for few tokens is read one stage too early": (
        SMALL, "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();", "a copy is still bringing"),
    "the ring for many tokens is read one stage too early": (
        LARGE, "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();", "a copy is still bringing"),
    "nobody waits for the other threads' copies of tokens": (
        LARGE, "block_barrier(); // everybody's part", "// everybody's part", "a race"),
    "the sums of few tokens overwrite a ring that is still read": (
        SMALL, "block_barrier(); // the ring becomes", "// the ring becomes", "a race"),
    "the sums of few tokens are read before they are written": (
        SMALL, f"{BARRIER}    const int token", "    const int token", "a race"),
    "the ring has one stage less than it uses": (
        "gemm.cu", "shared = kLargeMRingBytes<BITS, TOKENS>;", "shared = kLargeMRingBytes<BITS, TOKENS> * 3 / 4;",
        "outside shared memory"),
    "a block arrives before its sums are there": (
        SMALL, f"    {BARRIER}        if (thread == 0)", "        if (thread == 0)", "no barrier between another"),
    "a block arrives before its sums are visible": (SMALL, f"{FENCE} // for", "// for", "no fence between another"),
    "who came last is asked before it is known": (
        SMALL, f"    {BARRIER}        if (!load_shared", "        if (!load_shared", "a race|arrival"),
    "the others' sums are read without a fence": (SMALL, f"{FENCE}\n", "\n", "no fence between an arrival and"),
    "the blocks of a tile leave their sums in one place": (
        SMALL, "(a, place, blockIdx.y, 0)", "(a, place, 0, 0)", "two blocks write one vector"),
    "sums are read that no block has left": (
        BOTH, "block + b, r)", "block + b + 1, r)", "no block has written"),
    "some blocks' sums are passed over": (BOTH, "block += kBlocks", "block += kBlocks + 1", "error"),
    "the rows of many tokens change places": (
        LARGE, "token_of_row(r, lane % 4)", "token_of_row(r ^ 1, lane % 4)", "error"),
    "the last group is lost": (SMALL, "    add_sums();\n\n    // The warps", "    // The warps", "error"),
    "inputs beyond K are read": (SMALL, "|| whole ?", "|| true ?", "error"),
    "some lanes stay away from the tensor cores": (
        SMALL, "multiply_add<T>(sum_x[m]", "if (c < a.m) multiply_add<T>(sum_x[m]", "emulator"),
    "a split code loses a bit": ("fragments.cuh", "word[2] >> 7, 0x01000100", "word[2] >> 8, 0x01000100", "error"),
    "rows of tokens meet in the same banks": (LARGE, "kTokenRow = 160", "kTokenRow = 128", "load_shared: 4 times"),
    "none": ("gemm.cu", "namespace {", "namespace {", None),
}  # fmt: skip
HOST = ["g++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DGPTQKIT_EMULATOR", f"-I{EMULATOR}"]
HOST += [f'-DGPTQKIT_SOURCES="{sources_hash()}"']


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The sources that no bug touches, compiled."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("objects")
    sources = [*(CSRC / f"{name}.cu" for name in ("api", "dequantize", "sweep")), *EMULATOR.glob("*.cc")]
    subprocess.run([*HOST, f"-I{CSRC}", "-O1", "-c", "-x", "c++", *sources], cwd=folder, check=True)
    return list(folder.glob("*.o"))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug, objects, tmp_path):
    file, text, replacement, words = BUGS[bug]
    shutil.copytree(CSRC, tmp_path, dirs_exist_ok=True)
    source = (tmp_path / file).read_text(encoding="utf-8")
    assert source.count(text) == 1, "the sources have changed: plant the bug anew"
    (tmp_path / file).write_text(source.replace(text, replacement), encoding="utf-8")
    # For one kind of layer only, which takes less time to compile.
    bits = 3 if file == "fragments.cuh" else 4
    gemm = tmp_path / "gemm.cu"
    kinds = gemm.read_text(encoding="utf-8").replace("start<BFloat16>", "start<Float16>")
    gemm.write_text(re.sub(r"return start<T, \d>", f"return start<T, {bits}>", kinds), encoding="utf-8")
    library = [*HOST, f"-I{tmp_path}", "-O0", "-shared", "-x", "c++", "gemm.cu", "-x", "none", *objects, "-o", "lib.so"]
    subprocess.run(library, cwd=tmp_path, check=True)
    cases = [sys.executable, ROOT / "tests" / "support" / "kernel_cases.py", tmp_path / "lib.so", "--bits", str(bits)]
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    done = subprocess.run(cases, env=os.environ | path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (words is None), done.stderr
    assert words is None or re.search(words, done.stderr), done.stderr
