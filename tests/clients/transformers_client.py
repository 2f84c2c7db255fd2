"""transformers, through optimum and GPTQModel's layers, reads checkpoints on the CPU.

`logits_default` is what a plain `from_pretrained` computes, with whichever kernel is chosen for the checkpoint;
`logits_float16` and `logits` come from the plain torch layers, with float16 and float32 activations.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from reading import answer
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTQConfig


def read(checkpoint: Path, input_ids: Tensor) -> dict[str, Tensor]:
    stored = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16, device_map="cpu")
        found = {"logits_default": model(input_ids).logits.float()}
        config = GPTQConfig(bits=stored["bits"], backend="gptq_torch")  # only `backend` is taken from it
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, quantization_config=config, dtype=torch.float16, device_map="cpu"
        )
        found["logits_float16"] = model(input_ids).logits.float()
        # transformers forbids `model.float()` for quantized models; the layers themselves allow it.
        found["logits"] = torch.nn.Module.float(model)(input_ids).logits
    return found


if __name__ == "__main__":
    answer(read)
