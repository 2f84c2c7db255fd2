"""What every test shares: no network, GPU tests skipped where there is none, the example model and text."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Before anything imports huggingface_hub, which reads it once: a test that asks the Hub fails at once, and says so.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before anything imports torch: with matrices this small, threads wait for each other longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "gptqkit"


def module_names() -> list[str]:
    """Full names of all modules of gptqkit, found in its sources through the links."""
    folders = [PACKAGE, *sorted(path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")]
    return [
        ".".join([*folder.relative_to(PACKAGE.parent).parts, *([] if file.stem == "__init__" else [file.stem])])
        for folder in folders
        for file in sorted(folder.glob("*.py"))
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `module_name` once for every module of gptqkit."""
    if "module_name" in metafunc.fixturenames:
        metafunc.parametrize("module_name", module_names())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def emulator_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel library with an emulator in place of the GPU, compiled once for all processes that run tests."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    from support.emulator import build_emulator

    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    path = folder / "libgptqkit_emulator.so"
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists():
            build_emulator(path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
    return path


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def all_module_names() -> list[str]:
    """Full names of all modules of gptqkit."""
    return module_names()


@pytest.fixture(scope="session")
def example_data(root: Path) -> Path:
    """The folder with calibration.txt, heldout.txt and wikitext2-test.txt."""
    return root / "examples" / "data"


@pytest.fixture(scope="session")
def example_model(root: Path) -> Path:
    """The folder of a small real Llama: 6 blocks, hidden size 256, tied embeddings, 512 positions."""
    return root / "examples" / "models" / "gutenberg-llama-6m"


@pytest.fixture(scope="session")
def tokenizer(example_model: Path) -> Any:
    """The tokenizer of `example_model`: 4,096 tokens, adds no special tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(example_model)


@pytest.fixture(scope="session")
def small_text(example_data: Path) -> str:
    """About 4,000 characters of book text: some thousand tokens."""
    with (example_data / "calibration.txt").open(encoding="utf-8", newline="") as file:
        return file.read(4000)


@pytest.fixture(scope="session")
def device_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a simulated GPU needs of torch."""
    from support.simulated_gpu import load_guard

    load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device "cuda": a simulated one whose kernels run on the emulator, and a real one where there is one."""
    if request.param == "real":
        yield "cuda"
        return
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a real GPU")
    from support.simulated_gpu import simulated_gpu

    library = request.getfixturevalue("emulation").launcher.library
    request.getfixturevalue("device_guard")
    monkeypatch.setattr("gptqkit.kernels.library.find_library", lambda: (library, ""))
    monkeypatch.setattr("gptqkit.kernels.trial.fault", lambda *_: "")  # operators alone reach the emulator from here
    with simulated_gpu():
        yield "cuda"


@pytest.fixture(scope="session")
def emulation(emulator_path: Path) -> Any:
    """Operators on the CPU, run by the kernels' emulator; see support.emulation."""
    from support.emulation import Emulation

    return Emulation(emulator_path)


@pytest.fixture(scope="session")
def job_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the float models of `support.jobs`."""
    from support.jobs import MODELS

    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def undisturbed(job_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The report and the files of a job of `support.jobs` that one process made with one thread, undisturbed."""
    from support.jobs import contents, quantize

    @cache
    def make(case: str) -> Any:
        out = tmp_path_factory.mktemp("undisturbed") / "out"
        return quantize(job_models, case, out).report, contents(out)

    return make


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch work as in the processes of `support.jobs`."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
