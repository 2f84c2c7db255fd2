"""Perplexity in llama.cpp of our GGUF files beside those of llama.cpp's own quantizer, of the example model.

    python benchmarks/llamacpp.py [--windows N] [--json FILE]

Needs `.clients/llama` (tests/clients/environments llama). Every file is run by llama.cpp, whose logits on the same
tokens give perplexity and the mean divergence from its float16 file. llama.cpp's quantizer runs with and without an
importance matrix; that is ours (`gptqkit imatrix`), from the calibration text that GPTQ gets.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
MODEL = EXAMPLES / "models/gutenberg-llama-6m"
TEXTS = {"wikitext2": EXAMPLES / "data/wikitext2-test.txt", "books": EXAMPLES / "data/heldout.txt"}
TYPES = ("Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
OURS: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq"},
    "qep": {"method": "qep"},
    "balanced": {"quality": "balanced"},
}
LENGTH = 512


def requantize(source: Path, target: Path, kind: str, imatrix: Path | None) -> None:
    """Let llama.cpp quantize a file; inside its environment."""
    import llama_cpp
    from gguf import GGUFReader, LlamaFileType

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 1, int(LlamaFileType[f"MOSTLY_{kind}"])
    if imatrix is not None:
        found = {tensor.name: tensor.data for tensor in GGUFReader(imatrix).tensors}
        sums = [name.removesuffix(".in_sum2") for name in found if name.endswith(".in_sum2")]
        means = [(found[f"{name}.in_sum2"] / found[f"{name}.counts"]).astype(np.float32).ravel() for name in sums]
        params.imatrix = (llama_cpp.llama_model_imatrix_data * (len(sums) + 1))()
        for entry, name, mean in zip(params.imatrix, sums, means, strict=False):
            entry.name, entry.size = name.encode(), mean.size
            entry.data = mean.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not quantize {source}")


def measure(files: list[Path], tokens: np.ndarray[Any, Any]) -> list[dict[str, float]]:
    """Perplexity of files on windows of tokens, and divergence from the first; inside llama.cpp's environment."""
    import llama_cpp

    defaults = llama_cpp.llama_model_default_params

    def plain() -> Any:
        params = defaults()
        params.use_extra_bufts = False  # AMX, which crashes on some virtual machines
        return params

    llama_cpp.llama_cpp.llama_model_default_params = plain
    sizes = {"n_ctx": LENGTH, "n_batch": LENGTH, "n_ubatch": LENGTH}
    models = [llama_cpp.Llama(str(f), **sizes, logits_all=True, verbose=False, n_threads=1) for f in files]
    losses, distances = np.zeros(len(files)), np.zeros(len(files))
    for row in tokens:
        reference = None
        for number, model in enumerate(models):
            model.reset()
            model.eval(row.tolist())
            logits = np.array(model.scores[:LENGTH], np.float64)
            logits -= logits.max(-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            reference = logits if reference is None else reference
            losses[number] -= logits[np.arange(LENGTH - 1), row[1:]].mean() / len(tokens)
            distances[number] += (np.exp(reference) * (reference - logits)).sum(-1).mean() / len(tokens)
    pairs = zip(np.exp(losses).tolist(), distances.tolist(), strict=True)
    return [{"perplexity": perplexity, "kl_divergence": distance} for perplexity, distance in pairs]


def inside(task: dict[str, Any]) -> None:
    """Do what another process asked for, in llama.cpp's environment."""
    for source, target, kind, imatrix in task["quantize"]:
        requantize(Path(source), Path(target), kind, imatrix and Path(imatrix))
    files = [Path(file) for file in task["files"]]
    print("\n" + json.dumps({name: measure(files, np.array(rows)) for name, rows in task["tokens"].items()}))


def write_float(target: Path) -> Path:
    """The model as a float16 file, by the writer of our files."""
    from gptqkit.export.gguf import write_model

    shutil.copytree(MODEL, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    write_model(target)
    return target / "model.gguf"


def main() -> None:
    """Quantize, let llama.cpp quantize and measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="calibration windows (default 32)")
    parser.add_argument("--windows", type=int, default=24, help="windows evaluated per text (default 24)")
    parser.add_argument("--json", type=Path, default=Path("llamacpp.json"))
    arguments = parser.parse_args()
    import torch
    from transformers import AutoTokenizer

    import gptqkit

    calibration = gptqkit.Calibration(
        str(EXAMPLES / "data/calibration.txt"), samples=arguments.samples, sequence_length=LENGTH
    )
    tokenizer, tokens = AutoTokenizer.from_pretrained(MODEL), {}
    for name, file in TEXTS.items():
        ids = tokenizer(file.read_bytes().decode(), verbose=False)["input_ids"]
        tokens[name] = np.array(ids[: arguments.windows * LENGTH]).reshape(-1, LENGTH).tolist()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        whole, imatrix = write_float(work / "float"), work / "imatrix.gguf"
        gptqkit.imatrix(MODEL, calibration, imatrix)
        files, jobs = {("float16", ""): whole}, []
        for kind in TYPES:
            for by, matrix in (("llama.cpp", None), ("llama.cpp, importance matrix", str(imatrix))):
                files[kind, by] = work / f"{kind}-{len(by)}.gguf"
                jobs.append((str(whole), str(files[kind, by]), kind, matrix))
            for by, how in OURS.items():
                out = work / f"{kind}-{by}"
                gptqkit.quantize(MODEL, calibration, out, {"type": kind, **how})
                files[kind, by] = out / "model.gguf"
                print(kind, by, flush=True)
        task = {"quantize": jobs, "files": list(map(str, files.values())), "tokens": tokens}
        (work / "task.json").write_text(json.dumps(task))
        command = [str(ROOT / ".clients/llama/bin/python"), __file__, "--inside", str(work / "task.json")]
        answer = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ).stdout
        found = json.loads(answer.splitlines()[-1])
        rows = [
            {"type": kind, "by": by, "bytes": file.stat().st_size, "scores": {name: found[name][n] for name in found}}
            for n, ((kind, by), file) in enumerate(files.items())
        ]
    versions = {"gptqkit": gptqkit.__version__, "torch": torch.__version__, "llama-cpp-python": "0.3.36"}
    settings = {
        "model": MODEL.name,
        "samples": arguments.samples,
        "windows": arguments.windows,
        "sequence_length": LENGTH,
    }
    report = {**settings, "seed": 0, "device": platform.machine(), "versions": versions, "rows": rows}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        scores = " | ".join(f"{each['perplexity']:.2f}, {each['kl_divergence']:.4f}" for each in row["scores"].values())
        print(f"| {row['type']} | {row['by']} | {row['bytes'] / 2**20:.2f} | {scores} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(json.loads(Path(sys.argv[2]).read_text()))
    else:
        main()
