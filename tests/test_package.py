"""What is installed is what is in the repository, under one name."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import gptqkit

SOURCES = Path(gptqkit.__file__).parent.parent
SUBPACKAGES = ("calibration", "evaluation", "export", "kernels", "quantizer")


def test_public_names_are_there_and_documented():
    assert len(set(gptqkit.__all__)) == len(gptqkit.__all__)
    for name in set(gptqkit.__all__) - {"__version__"}:
        text = getattr(gptqkit, name).__doc__
        assert text, name
        assert not text.startswith(f"{name}("), f"{name} is a dataclass without a docstring of its own"
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        gptqkit.no_such_name  # noqa: B018


def test_import_loads_nothing_heavy():
    loaded = python("-c", "import gptqkit, sys; print(*sys.modules)", path=SOURCES).split()
    assert "gptqkit.version" in loaded
    assert not {"torch", "transformers", "datasets", "gptqkit.api"} & set(loaded)


def test_only_dependencies_are_imported(all_module_names):
    """Whatever is imported is a listed dependency, or one that a listed dependency lists (yaml is PyYAML)."""
    listed = required_by("gptqkit")
    allowed = {"gptqkit", "yaml", *listed, *sys.stdlib_module_names}.union(*map(required_by, listed))
    for name in all_module_names:
        tree = ast.parse(Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8"))
        found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level}
        assert {module.partition(".")[0] for module in found} <= allowed, name


@pytest.mark.parametrize("name", SUBPACKAGES)
def test_root_folder_is_linked_into_the_package(root, name):
    link = root / "src" / "gptqkit" / name
    assert os.readlink(link) == f"../../{name}"
    assert link.resolve() == root / name


def test_kernels_is_no_regular_package(root):
    # As a top-level package it would shadow Hugging Face's `kernels`, which transformers imports.
    assert not (root / "kernels" / "__init__.py").exists()


def test_ci_sets_up_with_the_readme_commands(root):
    readme = (root / "README.md").read_text(encoding="utf-8")
    block = re.search(r"## Set up by hand\n\n((?:    .+\n)+)", readme)
    assert block is not None
    commands = [line.strip() for line in block[1].splitlines()]
    assert len(commands) == 3
    script = (root / ".ci" / "run").read_text(encoding="utf-8").replace('"$venv"', ".venv")
    script = script.replace('"$venv/bin/python"', ".venv/bin/python").replace(" VENV=.venv", "")
    assert "\n".join(commands) in script


@pytest.fixture
def sources(root, tmp_path):
    """A copy of what a wheel is built from, so that no build folder is left in the repository."""
    for name in ("src", *SUBPACKAGES):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        shutil.copytree(root / name, tmp_path / "sources" / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path / "sources")
    return tmp_path / "sources"


@pytest.mark.slow
def test_the_wheel_holds_every_source_file_and_works_away_from_the_repository(
    sources, root, all_module_names, tmp_path
):
    wheel = build_wheel(sources, tmp_path / "wheel", kernels="never")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    expected = {f"gptqkit/{file.name}" for file in (root / "src" / "gptqkit").glob("*.py")} | {"gptqkit/py.typed"}
    for name in SUBPACKAGES:
        files = [*(root / name).glob("*.py"), *(root / name).glob("csrc/*"), *(root / name).glob("devices/*.json")]
        expected |= {f"gptqkit/{file.relative_to(root).as_posix()}" for file in files}
    assert sorted(names) == sorted(expected)

    installed = tmp_path / "installed"
    python("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel))
    imports = f"import importlib, sys\nfor name in {all_module_names!r}: print(importlib.import_module(name).__file__)"
    files = python("-c", imports, path=installed).splitlines()
    assert len(set(files)) == len(all_module_names)
    assert all(Path(file).is_relative_to(installed) for file in files)
    [folder] = installed.glob("gptqkit-*.dist-info")
    assert (folder / "licenses" / "LICENSE").read_bytes() == (root / "LICENSE").read_bytes()
    version = re.search(r"^Version: (.+)$", (folder / "METADATA").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    command = python(str(installed / "bin" / "gptqkit"), "--version", path=installed)
    assert command == python("-m", "gptqkit", "--version", path=installed) == f"gptqkit {version[1]}\n"


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "required"])
@pytest.mark.parametrize("compiles", [True, False])
def test_kernels_are_in_the_wheel_where_they_compile_and_stop_it_only_where_required(
    sources, tmp_path, kernels, compiles
):
    result = "target.write_bytes(b'kernels')" if compiles else "raise BuildError('no such instruction')"
    with (sources / "kernels" / "build.py").open("a", encoding="utf-8") as script:
        script.write(f"\n\ndef find_nvcc():\n    return Path('nvcc')\n\n\ndef build(target):\n    {result}\n")
    if kernels == "required" and not compiles:
        with pytest.raises(AssertionError, match="the CUDA kernels cannot be built: no such instruction"):
            build_wheel(sources, tmp_path, kernels=kernels)
        return
    wheel = build_wheel(sources, tmp_path, kernels=kernels)
    library = "gptqkit/kernels/libgptqkit.so"
    assert "gptqkit/kernels/library.py" in zipfile.ZipFile(wheel).namelist()
    assert (library in zipfile.ZipFile(wheel).namelist()) == compiles
    if compiles:
        assert zipfile.ZipFile(wheel).read(library) == b"kernels"
        assert re.fullmatch(r"gptqkit-[^-]+-py3-none-(linux|macosx|win)\w+\.whl", wheel.name)


def required_by(package):
    """What a package cannot be without, by the names under which it is imported."""
    lines = [line for line in metadata.requires(package) or () if "extra ==" not in line]
    return {re.match(r"[\w.-]+", line)[0].replace("-", "_").lower() for line in lines}


def build_wheel(sources, target, *, kernels):
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), str(sources))
    python(*command, GPTQKIT_KERNELS=kernels)
    [path] = target.glob("*.whl")
    return path


def python(*words, path=None, **settings):
    """Run Python away from the repository, with `path` in front of the import path; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
