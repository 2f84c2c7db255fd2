"""auto-round quantizes a float model, once for each entry of RECIPES, in layouts of its own, for us to read.

    python autoround_write.py MODEL --tokens FILE --out FOLDER [--only REGEX]

It rounds to the nearest, which is quickest: what is compared is how its files are read. No tokens are needed for that.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

OTHERS = {"down_proj": {"bits": 8}, "k_proj": {"bits": 16}, "model.layers.1.mlp.up_proj": {"group_size": 64}}
# Bits, columns per group, symmetric, its name of the layout, settings of single modules.
RECIPES: dict[str, tuple[int, int, bool, str, dict[str, Any]]] = {
    "w4-g128-sym-ar": (4, 128, True, "auto_round", {}),  # which is auto_round:auto_gptq then
    "w4-g128-asym-ar": (4, 128, False, "auto_round", {}),  # which is auto_round:auto_awq then
    "w4-g64-sym-gptqmodel-ar": (4, 64, True, "auto_round:gptqmodel", {}),
    "w4-g128-sym-mixed-ar": (4, 128, True, "auto_round", OTHERS),
    "w8-g128-sym-ar": (8, 128, True, "auto_round", {}),
    "w3-g64-asym-ar": (3, 64, False, "auto_round", {}),
    "w2-g64-asym-ar": (2, 64, False, "auto_round", {}),
}


def write(model: str, out: Path, recipe: tuple[int, int, bool, str, dict[str, Any]]) -> None:
    bits, size, sym, layout, others = recipe
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16)
    how = {"bits": bits, "group_size": size, "sym": sym, "layer_config": dict(others), "device_map": "cpu"}
    work = AutoRound(loaded, AutoTokenizer.from_pretrained(model), iters=0, disable_opt_rtn=True, **how)
    work.quantize_and_save(str(out), format=layout)
    for inner in [file.parent for file in out.glob("*/config.json")]:  # it makes a folder of its own in there
        for file in inner.iterdir():
            file.rename(out / file.name)
        inner.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    for name, recipe in RECIPES.items():
        if re.search(arguments.only, name) and not (arguments.out / name).exists():
            write(arguments.model, arguments.out / name, recipe)


if __name__ == "__main__":
    main()
