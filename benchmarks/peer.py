"""Quantizes a float model with another program; `peers.py` runs this in that program's environment.

    python benchmarks/peer.py PROGRAM MODEL --tokens FILE --out FOLDER --settings JSON [--group-size N]

Tokens are a safetensors file with one int64 tensor `input_ids` (windows, length). Prints the seconds from the loaded
program to the written checkpoint.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/clients"))


def gptqmodel(model: str, input_ids: Tensor, out: Path, settings: dict[str, Any]) -> None:
    """Write what GPTQModel makes of it, a gptq_v2 checkpoint."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT

    config = QuantizeConfig(**settings, format=FORMAT.GPTQ_V2, device="cpu", offload_to_disk=False)
    quantizer = GPTQModel.load(model, config, dtype=torch.float32)
    windows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in input_ids]
    quantizer.quantize(windows, batch_size=8, backend=BACKEND.GPTQ_TORCH)
    quantizer.save(str(out))


def llmcompressor(model: str, input_ids: Tensor, out: Path, settings: dict[str, Any]) -> None:
    """Write what llm-compressor makes of it, in float16: of other scales its files are not read here."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor_write import write

    how = {"strategy": "group", "symmetric": settings.pop("sym"), **settings}
    weights = QuantizationArgs(num_bits=how.pop("bits"), **how)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    write(model, input_ids, out, groups, torch.float16)


def autoround(model: str, input_ids: Tensor, out: Path, settings: dict[str, Any]) -> None:
    """Write what auto-round makes of it, its weights multiplied out."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    how = {"device_map": "cpu", "dataset": list(input_ids.split(8)), **settings}
    AutoRound(loaded, tokenizer, seqlen=input_ids.shape[1], nsamples=len(input_ids), **how).quantize()
    loaded.save_pretrained(out)  # its own "fake" format takes the tensors of float32 sources back to what they were
    tokenizer.save_pretrained(out)


PROGRAMS: dict[str, Callable[[str, Tensor, Path, dict[str, Any]], None]] = {
    "gptqmodel": gptqmodel,
    "llmcompressor": llmcompressor,
    "autoround": autoround,
}


def main() -> None:
    """Run one program once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--group-size", type=int, default=128)
    arguments = parser.parse_args()
    input_ids = load_file(arguments.tokens)["input_ids"]
    torch.manual_seed(0)
    __import__({"autoround": "auto_round"}.get(arguments.program, arguments.program))
    start = time.perf_counter()
    settings = {"group_size": arguments.group_size, **arguments.settings}
    PROGRAMS[arguments.program](arguments.model, input_ids, arguments.out, settings)
    print(json.dumps({"seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
