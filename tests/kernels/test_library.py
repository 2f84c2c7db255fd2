"""The library is found or built once, checked, and its absence explained."""

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from gptqkit.errors import BackendError
from gptqkit.kernels import build
from gptqkit.kernels.library import FILE_NAME, KernelLibrary, open_library


@pytest.fixture
def fake_compiler(emulator_path, monkeypatch):
    """A compiler that takes a moment and copies the emulator; yields the calls."""
    calls = []

    def compile_library(target):
        calls.append(target)
        time.sleep(0.1)
        shutil.copy(emulator_path, target)

    monkeypatch.setattr(build, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(build, "build", compile_library)
    monkeypatch.setattr(KernelLibrary, "check_driver", lambda _: None)
    return calls


def test_installed_library_comes_first(emulator_path, tmp_path, fake_compiler):
    shutil.copy(emulator_path, tmp_path / FILE_NAME)
    assert open_library(tmp_path, tmp_path / "cache").path == tmp_path / FILE_NAME
    assert not fake_compiler


def test_library_is_built_once_also_when_asked_for_at_the_same_time(tmp_path, fake_compiler, caplog):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(open_library(tmp_path, tmp_path / "cache"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [path] = {each.path for each in found}
    assert (len(found), len(fake_compiler)) == (3, 1)
    assert path.parent.parent == tmp_path / "cache"
    assert "building the CUDA kernels" in caplog.text
    assert sorted(each.name for each in path.parent.iterdir()) == sorted([FILE_NAME, "lock"])
    assert open_library(tmp_path, tmp_path / "cache").path == path
    assert len(fake_compiler) == 1


def test_cache_tells_sources_apart(tmp_path, monkeypatch):
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    before = build.sources_hash()
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    assert build.sources_hash() == before
    with (tmp_path / "csrc" / "api.h").open("a", encoding="utf-8") as header:
        header.write("\n")
    assert build.sources_hash() != before


def test_no_library_and_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    with pytest.raises(BackendError, match="not built and nvcc is not found; install"):
        open_library(tmp_path, tmp_path)


@pytest.mark.usefixtures("fake_compiler")
def test_compiler_that_fails_leaves_nothing_to_load(tmp_path, monkeypatch):
    def refuse(target):
        target.write_text("half")
        raise build.BuildError("error: out of registers")

    monkeypatch.setattr(build, "build", refuse)
    with pytest.raises(BackendError, match="could not be built with nvcc: error: out of registers"):
        open_library(tmp_path, tmp_path / "cache")
    assert not list(tmp_path.rglob(FILE_NAME))


def test_files_that_are_no_library_of_ours_are_refused(tmp_path):
    path = tmp_path / FILE_NAME
    path.write_bytes(b"no library")
    with pytest.raises(BackendError, match="cannot be loaded"):
        KernelLibrary(path)
    other = tmp_path / "other.so"
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(other)]
    subprocess.run(command, input=b'extern "C" const char *gptqkit_sources() { return "99"; }', check=True)
    with pytest.raises(BackendError, match=r"built from other sources, 99, .*build it again"):
        KernelLibrary(other)


@pytest.mark.parametrize(
    ("driver", "built_with", "message"),
    [(0, 13000, "no NVIDIA driver"), (12090, 13000, r"serves CUDA 12\.9.*built with CUDA 13\.0; update the driver")],
)
def test_driver_must_be_recent_enough(emulator_path, driver, built_with, message):
    kernels = KernelLibrary(emulator_path)
    kernels.driver, kernels.built = driver, built_with
    with pytest.raises(BackendError, match=message):
        kernels.check_driver()
    kernels.driver = built_with
    kernels.check_driver()
