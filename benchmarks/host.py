"""What an eager call of a quantized layer costs the host, beside torch's dense Linear: needs a C compiler, and no GPU.

    python benchmarks/host.py [--out benchmarks/results] [--rounds 300]

The layer runs on a library whose functions do nothing, and the dense Linear multiplies 8 x 8 numbers on the CPU, so
that both times are all but those of Python, torch's dispatcher and the allocation of the result: on a GPU each adds its
launches. A call of the layer splits its inputs between blocks, which needs locks and a workspace. Both take turns in
one process; the times are the best of all rounds. Writes host.json.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from layers import random_weight
from timing import write

from gptqkit.kernels.build import sources_hash
from gptqkit.kernels.cuda import CudaLinear
from gptqkit.kernels.library import KernelLibrary
from gptqkit.kernels.ops import Device, Launcher, Tuning

CALLS = 100  # of a round
NOTHING = f"""
const char *gptqkit_sources(void) {{ return "{sources_hash()}"; }}
const char *gptqkit_error(int code) {{ return ""; }}
int gptqkit_versions(int *driver, int *built) {{ return *driver = *built = 0; }}
long long gptqkit_user(void *stream) {{ return 1; }}
int gptqkit_kernel(void *layer, int m, int *numbers) {{
    const int known[] = {{8, 64, 8, 1, 256, 73728, 2}};
    for (int i = 0; i < 7; i++) numbers[i] = known[i];
    return 0;
}}
int gptqkit_gemm(void) {{ return 0; }}
int gptqkit_dequantize(void) {{ return 0; }}
int gptqkit_sweep(void) {{ return 0; }}
"""


def make_layer(folder: Path) -> CudaLinear:
    """A layer of 4096 x 4096 at 4 bits on the CPU whose kernels do nothing."""
    path = folder / "nothing.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=NOTHING.encode(), check=True)
    cpu = torch.device("cpu")
    launcher = Launcher(KernelLibrary(path), cpu, Tuning(), Device(132, 50 << 20))

    class IdleLinear(CudaLinear):
        launcher = staticmethod(lambda _: made)

    made = launcher
    return IdleLinear(random_weight(4096, 4096, bits=4, group_size=128, device=cpu), None, torch.float16)


def best_times(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of one call of each."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                work()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS)
    return best


@torch.no_grad()
def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for host.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dense, small, x = torch.nn.Linear(8, 8, bias=False), torch.randn(1, 8), torch.randn(1, 4096).half()
    with tempfile.TemporaryDirectory() as folder:
        layer = make_layer(Path(folder))
        works = {
            "quantized layer": lambda: layer(x),
            "nn.Linear": lambda: dense(small),
            "its forward": lambda: layer.forward(x),
            "F.linear": lambda: torch.nn.functional.linear(small, dense.weight),
        }
        seconds = best_times(works, arguments.rounds)
    ratio = seconds["quantized layer"] / seconds["nn.Linear"]
    print(", ".join(f"{name} {each * 1e6:.2f} us" for name, each in seconds.items()))
    print(f"an eager call of a quantized layer takes {ratio:.2f} times a dense one's time on the host")
    report = {"torch": torch.__version__, "threads": 1, "seconds": seconds, "layer_over_linear": round(ratio, 3)}
    write(report, arguments.out / "host.json")


if __name__ == "__main__":
    main()
