"""What is installed is what is in the repository, under one name."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

SUBPACKAGES = ("calibration", "evaluation", "export", "kernels", "quantizer")


@pytest.fixture(scope="module")
def sources(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, so that no build folder is left in the repository."""
    sources = tmp_path_factory.mktemp("sources")
    for name in ("src", *SUBPACKAGES):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        shutil.copytree(root / name, sources / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, sources)
    return sources


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without kernels."""
    return _build_wheel(sources, tmp_path_factory.mktemp("wheel"), kernels="never")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed in, away from the repository."""
    target = tmp_path_factory.mktemp("installed")
    _run("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    return target


@pytest.mark.slow
def test_wheel_holds_every_source_file_once_and_nothing_else(wheel: Path, root: Path) -> None:
    expected = {f"gptqkit/{file.name}" for file in (root / "src" / "gptqkit").glob("*.py")} | {"gptqkit/py.typed"}
    for name in SUBPACKAGES:
        files = [*(root / name).glob("*.py"), *(root / name).glob("csrc/*"), *(root / name).glob("devices/*.json")]
        expected |= {f"gptqkit/{file.relative_to(root).as_posix()}" for file in files}
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(expected)


@pytest.mark.slow
def test_wheel_with_kernels_serves_every_python_of_the_platform(sources: Path, tmp_path: Path) -> None:
    copy = tmp_path / "sources"
    shutil.copytree(sources, copy, symlinks=True, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    with (copy / "kernels" / "build.py").open("a", encoding="utf-8") as script:
        script.write("\n\ndef find_nvcc():\n    return Path('nvcc')\n")
        script.write("\n\ndef build(target):\n    target.write_bytes(b'kernels')\n")
    path = _build_wheel(copy, tmp_path, kernels="auto")
    assert re.fullmatch(r"gptqkit-[^-]+-py3-none-(linux|macosx|win)\w+\.whl", path.name)
    assert zipfile.ZipFile(path).read("gptqkit/kernels/libgptqkit.so") == b"kernels"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "required"])
def test_kernels_that_do_not_compile_stop_the_build_only_where_required(
    sources: Path, tmp_path: Path, kernels: str
) -> None:
    copy = tmp_path / "sources"
    shutil.copytree(sources, copy, symlinks=True, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    with (copy / "kernels" / "build.py").open("a", encoding="utf-8") as script:
        script.write("\n\ndef find_nvcc():\n    return Path('nvcc')\n")
        script.write("\n\ndef build(target):\n    raise BuildError('no such instruction')\n")
    if kernels == "required":
        with pytest.raises(AssertionError, match="the CUDA kernels cannot be built: no such instruction"):
            _build_wheel(copy, tmp_path, kernels=kernels)
    else:
        names = zipfile.ZipFile(_build_wheel(copy, tmp_path, kernels=kernels)).namelist()
        assert "gptqkit/kernels/library.py" in names
        assert "gptqkit/kernels/libgptqkit.so" not in names


@pytest.mark.slow
def test_every_installed_module_imports_from_there(installed: Path, all_module_names: list[str]) -> None:
    imports = f"import importlib\nfor name in {all_module_names!r}: importlib.import_module(name)"
    where = "import sys\nprint(*sorted({m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'gptqkit' "
    where += "and getattr(m, '__file__', None)}), sep='\\n')"
    files = _run("-c", f"{imports}\n{where}", path=installed).splitlines()
    assert len(files) == len(all_module_names)
    assert all(Path(file).is_relative_to(installed) for file in files)


@pytest.mark.slow
def test_wheel_installs_the_command_with_the_stated_version(installed: Path) -> None:
    output = _run(str(installed / "bin" / "gptqkit"), "--version", path=installed)
    [metadata] = installed.glob("gptqkit-*.dist-info/METADATA")
    version = re.search(r"^Version: (.+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert output.strip() == f"gptqkit {version[1]}"


@pytest.mark.slow
def test_wheel_carries_the_licence(installed: Path, root: Path) -> None:
    [licence] = installed.glob("gptqkit-*.dist-info/licenses/LICENSE")
    assert licence.read_bytes() == (root / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_root_folder_is_linked_into_the_package(root: Path, name: str) -> None:
    link = root / "src" / "gptqkit" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{name}"
    assert link.resolve() == root / name


def test_kernels_is_no_regular_package(root: Path) -> None:
    # As a top-level package it would shadow Hugging Face's `kernels`, which transformers imports.
    assert not (root / "kernels" / "__init__.py").exists()


def test_ci_sets_up_with_the_readme_commands(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## Set up by hand\n\n((?:    .+\n)+)", readme)
    assert block is not None
    commands = [line.strip() for line in block[1].splitlines()]
    assert len(commands) == 3
    script = (root / ".ci" / "run").read_text(encoding="utf-8").replace('"$venv"', ".venv")
    script = script.replace('"$venv/bin/python"', ".venv/bin/python").replace(" VENV=.venv", "")
    assert "\n".join(commands) in script


def _build_wheel(sources: Path, target: Path, *, kernels: str) -> Path:
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), str(sources))
    _run(*command, settings={"GPTQKIT_KERNELS": kernels})
    [path] = target.glob("*.whl")
    return path


def _run(*command: str, path: Path | None = None, settings: Mapping[str, str] | None = None) -> str:
    """Run Python away from the repository, with `path` in front of the import path; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(settings or {})
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
