"""transformers, with the compressed-tensors package, reads checkpoints on the CPU.

`logits` in float16 as `from_pretrained` gives them, `logits_float32` with the same weights in float32, and
`weight.<module>` (out, in) float16, what compressed-tensors decodes for the first forward pass.
"""

from __future__ import annotations

from pathlib import Path

import torch
from reading import answer
from torch import Tensor
from transformers import AutoModelForCausalLM


def read(checkpoint: Path, input_ids: Tensor, kernel: str | None) -> dict[str, Tensor]:
    if kernel is not None:
        raise ValueError("compressed-tensors has no kernels to choose from; leave --kernel out")
    found = {}
    with torch.inference_mode():
        for dtype, name in ((torch.float16, "logits"), (torch.float32, "logits_float32")):
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, device_map="cpu")
            found[name] = model(input_ids).logits.float()
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    return found | {f"weight.{name}": layer.weight.half().contiguous() for name, layer in layers.items()}


if __name__ == "__main__":
    answer(read)
