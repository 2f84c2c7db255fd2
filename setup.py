"""Build the CUDA kernels into the wheel where nvcc is found; without it, the wheel is pure Python.

The environment variable GPTQKIT_KERNELS changes that: "required" makes their absence an error, "never" leaves them out,
"auto" is the default. Neither torch nor a GPU is needed. Everything else about the package is in pyproject.toml.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
SETTINGS = ("auto", "required", "never")

spec = importlib.util.spec_from_file_location("kernel_build", ROOT / "kernels" / "build.py")
kernel_build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel_build)


class BuildKernels(build_ext):
    """Runs nvcc; the result is a plain shared library, which no version of Python is tied to."""

    def get_ext_filename(self, name):
        """The file's path below the packages' root."""
        return name.replace(".", os.sep) + ".so"

    def build_extension(self, extension):
        """Build the library where setuptools wants it; a CompileError is what `optional` forgives."""
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            kernel_build.build(target)
        except (OSError, kernel_build.BuildError) as error:
            raise CompileError(f"the CUDA kernels cannot be built: {error}") from error


class PlatformWheel(bdist_wheel):
    """Tags a wheel with kernels for the platform and any Python 3."""

    def get_tag(self):
        """Python, ABI and platform."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


def extensions():
    """The library, or nothing, as GPTQKIT_KERNELS says."""
    setting = os.environ.get("GPTQKIT_KERNELS", "auto")
    if setting not in SETTINGS:
        raise SystemExit(f"GPTQKIT_KERNELS is {setting!r}; choose one of {', '.join(SETTINGS)}")
    if setting == "never" or (setting == "auto" and kernel_build.find_nvcc() is None):
        return []
    sources = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "kernels" / "csrc").iterdir())]
    return [Extension("gptqkit.kernels.libgptqkit", sources, optional=setting == "auto")]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel})
