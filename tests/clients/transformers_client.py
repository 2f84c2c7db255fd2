"""transformers, through GPTQModel's layers and, for GPTQ, optimum, reads checkpoints on the CPU.

`logits` in float16 as `from_pretrained` gives them. Where the kernel is GPTQModel's plain torch layers (gptq_torch)
also `logits_float32`, with the same layers and float32 activations.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from reading import answer
from torch import Tensor
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig


def read(checkpoint: Path, input_ids: Tensor, kernel: str | None) -> dict[str, Tensor]:
    options = {}
    if kernel is not None:
        # transformers takes only the backend from it; everything else comes from the checkpoint.
        settings = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
        kind = AwqConfig if settings["quant_method"] == "awq" else GPTQConfig
        options["quantization_config"] = kind(bits=settings["bits"], backend=kernel)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16, device_map="cpu", **options)
    with torch.inference_mode():
        found = {"logits": model(input_ids).logits.float()}
        if kernel == "gptq_torch":
            # transformers forbids `model.float()` for quantized models; the layers themselves allow it.
            found["logits_float32"] = torch.nn.Module.float(model)(input_ids).logits
    return found


if __name__ == "__main__":
    answer(read)
