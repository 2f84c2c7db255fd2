"""How time and memory grow with blocks, width and calibration tokens, and what that comes to for large models.

    python benchmarks/scale.py [--out benchmarks/results] [--only blocks width tokens] [--seconds 900]

Random Llama models in float32 files are quantized on the CPU (gptq, 4 bits, groups of 128), each in a process of its
own. Memory is read from /proc while the process works: "anonymous" is what it holds; "resident" includes the pages of
mapped files, which the kernel takes back when it needs them. Both leave out what the process had before the call.
"planned" is what `gptqkit plan` says beforehand, also without that. Writes scale.json and, where matplotlib is
installed, scale.png.

The projection says how much memory and disk a plan asks for with 128 x 2048 tokens, on a GPU in bfloat16, and how long
this machine's CPU would take at the rate of the widest model measured. Its assumptions stand in scale.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import gptqkit
from gptqkit.architecture import empty_model
from gptqkit.budget import make_plan
from gptqkit.machine import Machine
from gptqkit.sizes import measure, shapes_of
from gptqkit.units import size_text, time_text
from gptqkit.workload import Workload

SERIES = {
    "blocks": [{"blocks": blocks, "width": 768} for blocks in (4, 8, 16, 32)],
    "width": [{"blocks": 2, "width": width} for width in (256, 512, 1024, 2048)],
    "tokens": [
        {"blocks": 2, "width": 512, "samples": samples, "activations": place}
        for place in ("memory", "disk")
        for samples in (16, 64, 256, 1024)
    ],
}
DEFAULTS = {"samples": 16, "length": 128, "activations": "memory", "batch_size": 8}
UNKNOWN = Machine(memory=None, program=0, gpu=None, disk=None)
ASSUMPTIONS = [
    "128 samples of 2048 tokens, gptq, 4 bits, groups of 128, true_sequential, batches of 8, hidden states in RAM",
    "memory and disk: the formulas of gptqkit/sizes.py, which the points above and tests compare with real runs",
    "work: forward passes at 2 operations per weight and token, all passes of a block counted as whole; statistics at "
    "2 k^2 per token; solving at k^3 + 12 n k^2 for a weight (n, k)",
    "time: that work at the rate of the widest model measured here; a GPU or a larger CPU differs by its own rate",
    "experts: an even share of the tokens for each",
]


def llama(blocks: int, width: int) -> transformers.LlamaConfig:
    """A Llama of so many blocks, with the usual proportions."""
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=-(-width * 11 // 512) * 128,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=512,
        max_position_embeddings=2048,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )


LARGE = {
    "8B": transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
    ),
    "70B": transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
    ),
    "400B, 128 experts": transformers.Qwen3MoeConfig(
        hidden_size=4096,
        moe_intermediate_size=2688,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        architectures=["Qwen3MoeForCausalLM"],
    ),
}


def make_model(point: dict[str, Any], folder: Path) -> None:
    """Write a random model to disk."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(llama(point["blocks"], point["width"])).save_pretrained(folder)


def status(key: str) -> int:
    """A line of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


def run_point(point: dict[str, Any], model: Path, out: Path) -> dict[str, Any]:
    """Quantize and measure; in a process that does nothing else."""
    tokens = torch.randint(512, (point["samples"], point["length"]), generator=torch.Generator().manual_seed(1))
    planned = gptqkit.plan(model, out, timed=False, **plan_options(point))
    before = {"anonymous": status("RssAnon"), "resident": status("VmRSS")}
    peak, done = before["anonymous"], threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, status("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    result = gptqkit.quantize(
        model,
        tokens,
        out,
        samples=point["samples"],
        sequence_length=point["length"],
        batch_size=point["batch_size"],
        activations=point["activations"],
        device="cpu",
    )
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    need = planned.needs["RAM"]
    return {
        **point,
        "seconds": seconds,
        "solver_seconds": sum(module.seconds for module in result.report.modules),
        "anonymous": peak - before["anonymous"],
        "resident": status("VmHWM") - before["resident"],
        "planned": need.total - need.parts["allowance"] - need.parts["Python, torch, transformers"],
        "model_bytes": sum(file.stat().st_size for file in model.glob("*.safetensors")),
        "output_bytes": sum(file.stat().st_size for file in out.iterdir()),
        "planned_output_bytes": planned.sizes.output,
    }


def plan_options(point: dict[str, Any]) -> dict[str, Any]:
    """The options of a point as `gptqkit.plan` takes them."""
    return {
        "samples": point["samples"],
        "sequence_length": point["length"],
        "batch_size": point["batch_size"],
        "activations": point["activations"],
        "device": "cpu",
    }


def measure_series(name: str, deadline: float) -> list[dict[str, Any]]:
    """All points of a series, each in a process of its own."""
    results = []
    for changes in SERIES[name]:
        point = {**DEFAULTS, **changes}
        if time.monotonic() > deadline:
            print("out of time: what follows is not measured")
            break
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--point", json.dumps(point), "--folder", folder]
            subprocess.run([*command, "--make"], check=True)
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(found.stdout.splitlines()[-1])
        results.append(result)
        tokens = result["samples"] * result["length"]
        print(
            f"{name:7} {result['blocks']:3} blocks, width {result['width']:4}, {tokens:6} tokens, states in "
            f"{result['activations']:6}: {result['seconds']:6.1f} s, anonymous {size_text(result['anonymous'])}, "
            f"resident {size_text(result['resident'])}, planned {size_text(result['planned'])}, "
            f"model {size_text(result['model_bytes'])}",
            flush=True,
        )
    return results


def operations(config: Any, tokens: int) -> float:
    """Operations of a whole run; see ASSUMPTIONS."""
    width = config.hidden_size
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    queries, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    experts = getattr(config, "num_experts", 1)
    active = getattr(config, "num_experts_per_tok", 1) if experts > 1 else 1
    inner = config.moe_intermediate_size if experts > 1 else config.intermediate_size
    shapes = [(queries, width), (keys, width), (keys, width), (width, queries)]
    expert_shapes = [(2 * inner, width), (width, inner)]
    solving = sum(k**3 + 12 * n * k**2 for n, k in [*shapes, *(experts * expert_shapes)])
    per_token = sum(n * k for n, k in shapes) + active * sum(n * k for n, k in expert_shapes)
    statistics = 2 * (width**2 + queries**2 + active * (width**2 + inner**2))
    passes = 5  # one for each of four inputs, and one through
    return config.num_hidden_layers * (solving + tokens * (passes * 2 * per_token + statistics))


def project(name: str, rate: float) -> dict[str, Any]:
    """Memory, disk and time of a large model."""
    config = LARGE[name]
    model = shapes_of(empty_model(config, torch.bfloat16))
    workload = Workload(
        config=gptqkit.QuantizeConfig(),
        sequence_length=2048,
        device=torch.device("cuda"),
        samples=128,
        batch_size=8,
        activations="memory",
    )
    made = make_plan(partial(measure, model), workload, UNKNOWN)
    work = operations(config, 128 * 2048)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_bytes": made.sizes.source,
        "output_bytes": made.sizes.output,
        **{name: {"total": need.total, "parts": dict(need.parts)} for name, need in made.needs.items()},
        "operations": work,
        "seconds_here": work / rate,
    }


def plot(report: dict[str, Any], path: Path) -> None:
    """Time and memory of every series; skipped without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = {name: points for name, points in report["series"].items() if points}
    figure, panels = pyplot.subplots(2, len(series), figsize=(4 * len(series), 6), squeeze=False)
    for column, (name, points) in zip(panels.T, series.items(), strict=True):
        for place in dict.fromkeys(point["activations"] for point in points):
            chosen = [point for point in points if point["activations"] == place]
            x = [point["samples"] * point["length"] if name == "tokens" else point[name] for point in chosen]
            where = f"states {'in memory' if place == 'memory' else 'on disk'}, " if name == "tokens" else ""
            label = f"{where}measured"
            column[0].plot(x, [point["seconds"] for point in chosen], marker="o", label=label)
            [line] = column[1].plot(x, [point["anonymous"] / 2**20 for point in chosen], marker="o", label=label)
            planned = [point["planned"] / 2**20 for point in chosen]
            column[1].plot(x, planned, linestyle="--", color=line.get_color(), label=f"{where}planned")
        if name != "tokens":
            column[1].plot(x, [point["model_bytes"] / 2**20 for point in chosen], color="grey", label="model on disk")
        for panel in column:
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:.0f}")
            panel.yaxis.set_major_formatter("{x:.0f}")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=7)
        column[1].set_xlabel("calibration tokens" if name == "tokens" else name)
    panels[0][0].set_ylabel("seconds")
    panels[1][0].set_ylabel("memory of the run, MiB")
    figure.suptitle(f"{report['cpu']}, {report['threads']} thread(s), torch {report['torch']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def cpu_name() -> str:
    """The processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Measure, project, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    parser.add_argument("--only", nargs="+", choices=tuple(SERIES), default=tuple(SERIES), help="series to measure")
    parser.add_argument("--plot", action="store_true", help="measure nothing: draw what scale.json holds")
    parser.add_argument("--seconds", type=float, default=900, help="start no further point after these (default 900)")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.make:
        make_model(arguments.point, arguments.folder / "model")
        return
    if arguments.point:
        print(json.dumps(run_point(arguments.point, arguments.folder / "model", arguments.folder / "out")))
        return
    deadline = time.monotonic() + arguments.seconds
    path = arguments.out / "scale.json"
    if arguments.plot:
        plot(json.loads(path.read_text()), arguments.out / "scale.png")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "series": {},
    }
    for name in arguments.only:
        report["series"][name] = measure_series(name, deadline)
        path.write_text(json.dumps(report, indent=1) + "\n")  # a late failure loses nothing
    widest = max((point for points in report["series"].values() for point in points), key=lambda point: point["width"])
    work = operations(llama(widest["blocks"], widest["width"]), widest["samples"] * widest["length"])
    report["operations_per_second"] = work / widest["seconds"]
    report["assumptions"] = ASSUMPTIONS
    report["projection"] = {name: project(name, report["operations_per_second"]) for name in LARGE}
    for name, found in report["projection"].items():
        print(
            f"{name}: {found['parameters'] / 1e9:.1f} billion parameters, "
            f"GPU {size_text(found['GPU memory']['total'])}, RAM {size_text(found['RAM']['total'])}, "
            f"disk {size_text(found['disk']['total'])}, {found['operations']:.2e} operations, "
            f"{time_text(found['seconds_here'])} on this CPU"
        )
    path.write_text(json.dumps(report, indent=1) + "\n")
    plot(report, arguments.out / "scale.png")


if __name__ == "__main__":
    main()
