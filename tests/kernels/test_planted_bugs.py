"""The emulator finds bugs: each of these changes to the kernels makes a product wrong or is a fault.

Not findable this way: a missing fence or barrier before the tickets, because blocks run one after another.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOST = ["g++", "-O0", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DGPTQKIT_EMULATOR"]

# What is broken: file, text, replacement, bits of the layers that show it.
BUGS = {
    "the ring of up to 16 tokens is read one stage too early": (
        "gemm_narrow.cuh", "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();", 4,
    ),
    "the ring of more tokens is read one stage too early": (
        "gemm_wide.cuh", "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();", 4,
    ),
    "nobody waits for the other threads' copies of tokens": (
        "gemm_wide.cuh", "block_barrier(); // everybody's part", "// everybody's part", 4,
    ),
    "the sums overwrite a ring that is still read": (
        "gemm_narrow.cuh", "block_barrier(); // the ring becomes", "// the ring becomes", 4,
    ),
    "sums are read before they are written": (
        "gemm_narrow.cuh", "    block_barrier();\n    store_tile", "    store_tile", 4,
    ),
    "the ring has one stage less than it uses": (
        "gemm.cu", "larger(kWideRingBytes<BITS, TOKENS>, kSum", "larger(kWideRingBytes<BITS, TOKENS> * 3 / 4, 0 * kSum",
        4,
    ),
    "the last group is lost": ("gemm_narrow.cuh", "    add_sums();\n\n    copy_wait<0>", "    copy_wait<0>", 4),
    "inputs beyond K are read": ("gemm_narrow.cuh", "|| whole ?", "|| true ?", 4),
    "some lanes stay away from the tensor cores": (
        "gemm_narrow.cuh", "multiply_add<T>(sum_x[m]", "if (c < a.m) multiply_add<T>(sum_x[m]", 4,
    ),
    "a split code loses a bit": ("fragments.cuh", "word[2] >> 7, 0x01000100", "word[2] >> 8, 0x01000100", 3),
}  # fmt: skip


@pytest.fixture(scope="module")
def objects(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The sources that no bug touches, compiled."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("objects")
    sources = [str(root / "kernels" / "csrc" / name) for name in ("api.cu", "repack.cu", "dequantize.cu")]
    subprocess.run([*HOST, "-c", "-x", "c++", *sources], cwd=folder, check=True)
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
    file, text, replacement, bits = BUGS[bug]
    shutil.copytree(root / "kernels" / "csrc", tmp_path, dirs_exist_ok=True)
    source = (tmp_path / file).read_text(encoding="utf-8")
    assert source.count(text) == 1, "the sources have changed: plant the bug anew"
    (tmp_path / file).write_text(source.replace(text, replacement), encoding="utf-8")
    assert result(tmp_path, objects, bits, root).returncode != 0


def test_without_a_bug_nothing_is_found(root: Path, objects: list[str], tmp_path: Path) -> None:
    shutil.copytree(root / "kernels" / "csrc", tmp_path, dirs_exist_ok=True)
    done = result(tmp_path, objects, 4, root)
    assert done.returncode == 0, done.stderr
