"""GPTQModel quantizes a float model with its own solver, once for each entry of RECIPES, for us to read.

    python gptqmodel_write.py MODEL --tokens FILE --out FOLDER [--only REGEX]

Tokens are a safetensors file with one int64 tensor `input_ids` (windows, length).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD
from safetensors.torch import load_file
from torch import Tensor

RECIPES = {
    "w4-g128-sym-v1": {"bits": 4, "group_size": 128, "sym": True, "format": FORMAT.GPTQ},
    "w4-g128-asym-v1": {"bits": 4, "group_size": 128, "sym": False, "format": FORMAT.GPTQ},
    "w4-g128-asym-v2": {"bits": 4, "group_size": 128, "sym": False, "format": FORMAT.GPTQ_V2},
    "w4-g64-sym-act-order-v1": {"bits": 4, "group_size": 64, "sym": True, "desc_act": True, "format": FORMAT.GPTQ},
    "w3-g128-sym-v1": {"bits": 3, "group_size": 128, "sym": True, "format": FORMAT.GPTQ},
    "w3-g128-asym-v2": {"bits": 3, "group_size": 128, "sym": False, "format": FORMAT.GPTQ_V2},
    "w2-g64-asym-v2": {"bits": 2, "group_size": 64, "sym": False, "format": FORMAT.GPTQ_V2},
    "w8-row-sym-v1": {"bits": 8, "group_size": -1, "sym": True, "act_group_aware": False, "format": FORMAT.GPTQ},
    "w4-g128-asym-awq": {"bits": 4, "group_size": 128, "sym": False, "method": METHOD.AWQ, "format": FORMAT.GEMM},
    "w4-g64-sym-awq": {"bits": 4, "group_size": 64, "sym": True, "method": METHOD.AWQ, "format": FORMAT.GEMM},
}


def write(model: str, input_ids: Tensor, out: Path, settings: dict[str, object]) -> None:
    config = QuantizeConfig(**settings, device="cpu", offload_to_disk=False)
    quantizer = GPTQModel.load(model, config, dtype=torch.float16)
    windows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in input_ids]
    kernel = BACKEND.AWQ_TORCH if settings.get("method") == METHOD.AWQ else BACKEND.GPTQ_TORCH
    quantizer.quantize(windows, batch_size=4, backend=kernel)
    quantizer.save(str(out))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    input_ids = load_file(arguments.tokens)["input_ids"]
    for name, settings in RECIPES.items():
        if re.search(arguments.only, name) and not (arguments.out / name).exists():
            torch.manual_seed(0)
            write(arguments.model, input_ids, arguments.out / name, settings)


if __name__ == "__main__":
    main()
