"""What the build script finds and says, and what is read of the machine code."""

import importlib
import sys

import pytest

from gptqkit.kernels import build


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
    folder = tools(nvcc='all="$*"; until [ "$1" = -o ]; do shift; done; echo "$all" > "$2"')
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


@pytest.fixture
def machine_code(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return importlib.import_module("machine_code")


def test_the_check_names_what_lacks_tensor_cores(tools, machine_code, monkeypatch):
    whole = 'printf "Function : _Z4gemm\\n  HMMA.16816.F32\\n  LDGSTS.E.BYPASS R1\\n"'
    tools(nvcc="exit 0", cuobjdump=whole)
    monkeypatch.setattr(sys, "argv", ["machine_code.py"])
    machine_code.main()
    tools(cuobjdump=whole.replace("HMMA", "FFMA"))
    with pytest.raises(SystemExit, match=r"_Z4gemm has no HMMA\.16816\.F32$"):
        machine_code.main()


@pytest.mark.slow
@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
def test_spilled_registers_are_an_error(machine_code, tmp_path):
    work = "".join(f"a[{i}] = a[{i}] * a[{i * 7 % 64}] + a[{i * 13 % 64}]; " for i in range(64))
    load, store = (
        "".join(pattern.format(i) for i in range(64)) for pattern in ("p[{0} * 64 + t], ", "p[{0} * 64 + t] = a[{0}]; ")
    )
    source = tmp_path / "spill.cu"
    head = "__global__ void __launch_bounds__(1024, 2) spilling(float *p) { const int t = threadIdx.x; "
    source.write_text(f"{head} float a[] = {{{load}}}; __syncthreads(); {work} {store} }}", encoding="utf-8")
    with pytest.raises(build.BuildError, match="spilling"):
        machine_code.compile_object(source, tmp_path / "spill.o", ("90",))
