"""What the build script finds, reads and says."""

import shutil
import sys

import pytest

from gptqkit.kernels import build

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fv' for 'sm_90'
ptxas info    : Function properties for _Z1fv
    32 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compiling entry function '_Z1gv' for 'sm_90a'
ptxas info    : Function properties for _Z1gv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Puts an nvcc that knows two architectures, and a cuobjdump, in the place of others: scripts by name."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()

    def put(**scripts):
        for name, script in scripts.items():
            knows = '[ "$1" = --list-gpu-code ] && printf "sm_80\\nsm_90\\n" && exit\n' if name == "nvcc" else ""
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{knows}{script}\n", encoding="utf-8")
            (tmp_path / "bin" / name).chmod(0o755)
        return tmp_path / "bin"

    return put


def test_cuda_home_comes_first_and_only_known_architectures_are_compiled(tools, tmp_path):
    assert build.find_nvcc() != tmp_path / "bin" / "nvcc"
    folder = tools(nvcc='for last; do :; done; echo "$@" > "$last"')
    assert build.find_nvcc() == folder / "nvcc"
    build.build(tmp_path / "new" / "lib.so")
    command = (tmp_path / "new" / "lib.so").read_text(encoding="utf-8")
    assert all(f"code={code}" in command for code in ("sm_80", "sm_90", "compute_90"))
    assert "sm_100" not in command
    with pytest.raises(build.BuildError, match="knows none of sm_75"):
        build.build(tmp_path / "lib.so", ("75",))


def test_the_compilers_words_are_in_the_error(tools, tmp_path):
    tools(nvcc='echo "no room"; exit 2')
    with pytest.raises(build.BuildError, match="status 2:\nno room"):
        build.build(tmp_path / "new" / "lib.so")


def test_the_check_names_what_spills_and_what_lacks_tensor_cores(tools, monkeypatch, capsys):
    whole = 'printf "Function : _Z4gemm\\n  HMMA.16816.F32\\n  LDGSTS.E.BYPASS R1\\n"'
    folder = tools(nvcc=f'cat <<"END"{PTXAS}END', cuobjdump=whole)
    monkeypatch.setattr(sys, "argv", ["build.py", "--check"])
    assert build.main() == 1
    assert "gemm.cu sm_90: 2 kernels, up to 168 registers, 1 spill\n    _Z1fv: 20 bytes\n" in capsys.readouterr().out
    tools(nvcc=f'cat <<"END"{PTXAS.replace("8 bytes spill stores, 12", "0 bytes spill stores, 0")}END')
    assert build.main() == 0
    assert "gemm.cu sm_90: 2 kernels, up to 168 registers, 0 spill" in capsys.readouterr().out
    tools(cuobjdump=whole.replace("HMMA", "FFMA"))
    assert shutil.which("cuobjdump") == str(folder / "cuobjdump")
    with pytest.raises(build.BuildError, match=r"_Z4gemm has no HMMA\.16816\.F32$"):
        build.main()


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
def test_the_sources_compile_for_every_architecture_without_spills():
    text, well = build.check()
    assert well, text
