"""llm-compressor quantizes a float model with its own solver, once for each entry of RECIPES, for us to read.

    python llmcompressor_write.py MODEL --tokens FILE --out FOLDER [--only REGEX]

Tokens are a safetensors file with one int64 tensor `input_ids` (windows, length).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

GROUP, ROW = "group", "channel"
# Bits, strategy, columns per group, symmetric, order of columns, dtype of the model, bits of down_proj where others.
RECIPES: dict[str, tuple[int, str, int | None, bool, str | None, torch.dtype, int | None]] = {
    "w4-g128-sym-ct": (4, GROUP, 128, True, "static", torch.float16, None),
    "w4-g128-asym-ct": (4, GROUP, 128, False, None, torch.float16, None),
    "w4-g64-asym-bfloat16-ct": (4, GROUP, 64, False, "static", torch.bfloat16, None),
    "w8-row-sym-ct": (8, ROW, None, True, None, torch.float16, None),
    "w4-w8-g128-asym-ct": (4, GROUP, 128, False, None, torch.float16, 8),
    "w3-g64-asym-ct": (3, GROUP, 64, False, None, torch.float16, None),
    "w2-g64-asym-ct": (2, GROUP, 64, False, None, torch.float16, None),
}


def groups_of(name: str) -> dict[str, QuantizationScheme]:
    bits, strategy, size, symmetric, order, _, others = RECIPES[name]

    def scheme(bits: int, targets: list[str]) -> QuantizationScheme:
        settings: dict[str, Any] = {"num_bits": bits, "strategy": strategy, "group_size": size, "actorder": order}
        return QuantizationScheme(targets=targets, weights=QuantizationArgs(symmetric=symmetric, **settings))

    groups = {"group_0": scheme(bits, ["Linear"])}
    if others is not None:
        apart = ["q", "k", "v", "o", "gate", "up"]
        groups = {"group_0": scheme(bits, [f"re:.*{part}_proj$" for part in apart])}
        groups["group_1"] = scheme(others, ["re:.*down_proj$"])
    return groups


def write(model: str, input_ids: Tensor, out: Path, groups: dict[str, QuantizationScheme], dtype: torch.dtype) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    rows = input_ids.tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    oneshot(
        model=loaded,
        dataset=data,
        recipe=GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        max_seq_length=input_ids.shape[1],
        num_calibration_samples=len(rows),
    )
    loaded.save_pretrained(out, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    input_ids = load_file(arguments.tokens)["input_ids"]
    for name in RECIPES:
        if re.search(arguments.only, name) and not (arguments.out / name).exists():
            torch.manual_seed(0)
            write(arguments.model, input_ids, arguments.out / name, groups_of(name), RECIPES[name][5])


if __name__ == "__main__":
    main()
