"""What the build script finds, reads and says."""

from pathlib import Path

import pytest

from gptqkit.kernels import build

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fv' for 'sm_90'
ptxas info    : Function properties for _Z1fv
    32 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compiling entry function '_Z1gv' for 'sm_100a'
ptxas info    : Function properties for _Z1gv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


def fake_tool(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that knows two architectures and refuses to compile."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    script = '[ "$1" = --list-gpu-code ] && printf "sm_80\\nsm_90\\n" && exit\necho "no room"; exit 2'
    return fake_tool(tmp_path / "bin" / "nvcc", script)


def test_registers_and_spills_are_read_from_ptxas() -> None:
    first, second = build._read_ptxas("f.cu", PTXAS)
    assert (first.name, first.architecture, first.registers, first.spill_bytes) == ("_Z1fv", "90", 168, 20)
    assert (second.name, second.architecture, second.registers, second.spill_bytes) == ("_Z1gv", "100", 40, 0)


def test_summary_names_what_spills() -> None:
    assert build._summary(build._read_ptxas("f.cu", PTXAS)).splitlines() == [
        "f.cu sm_90: 1 kernels, up to 168 registers, 1 spill",
        "    _Z1fv: 20 bytes",
        "f.cu sm_100: 1 kernels, up to 40 registers, 0 spill",
    ]


def test_cuda_home_comes_first(nvcc: Path) -> None:
    assert build.find_nvcc() == nvcc


def test_only_architectures_that_the_compiler_knows(nvcc: Path) -> None:
    assert build.known_architectures(nvcc) == ("80", "90")
    with pytest.raises(build.BuildError, match="knows none of sm_75"):
        build.known_architectures(nvcc, ("75",))


@pytest.mark.usefixtures("nvcc")
def test_the_compilers_words_are_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="status 2:\nno room"):
        build.build(tmp_path / "new" / "lib.so")


def test_a_source_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.cu").write_text("int f() { return undefined; }", encoding="utf-8")
    with pytest.raises(build.BuildError, match="undefined"):
        build.build_emulator(tmp_path / "lib.so", sources=tmp_path)


def test_a_gemm_without_tensor_cores_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = fake_tool(tmp_path / "cuobjdump", 'printf "Function : _Z4gemm\\n  LDGSTS.E.BYPASS R1\\n"')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build._find_cuobjdump() == tool
    with pytest.raises(build.BuildError, match=r"_Z4gemm has no HMMA\.16816\.F32$"):
        build._check_instructions(tmp_path / "gemm.o")
