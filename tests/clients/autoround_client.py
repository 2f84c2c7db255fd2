"""auto-round reads its own checkpoints: the weights that it decodes and the logits that it computes, on the CPU.

`weight.<module>` (out, in) float16 of every quantized layer, and `logits` in float16. It has no kernel for AWQ's layout
on CPUs; there a float model computes with what its own function unpacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from auto_round.export.export_to_awq.utils import dequantize_gemm
from reading import answer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


def read(checkpoint: Path, input_ids: Tensor, _: str | None) -> dict[str, Tensor]:
    config = AutoConfig.from_pretrained(checkpoint)
    settings = config.quantization_config
    if settings["packing_format"] == "auto_round:auto_awq":
        tensors = load_file(checkpoint / "model.safetensors")
        names = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
        weights = {name: unpacked(tensors, name, settings) for name in names}
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        whole = tensors | {f"{name}.weight": weight for name, weight in weights.items()}
        whole.setdefault("lm_head.weight", whole["model.embed_tokens.weight"])
        model.load_state_dict(whole)
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16, device_map="cpu")
        layers = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
        with torch.inference_mode():
            weights = {
                name: layer(torch.eye(layer.infeatures, dtype=torch.float16)).T.contiguous()
                for name, layer in layers.items()
            }
    with torch.inference_mode():
        logits = model(input_ids).logits.float()
    return {"logits": logits, **{f"weight.{name}": weight for name, weight in weights.items()}}


def unpacked(tensors: dict[str, Tensor], name: str, settings: dict[str, Any]) -> Tensor:
    parts = (tensors.pop(f"{name}.{suffix}") for suffix in ("qweight", "qzeros", "scales"))
    return dequantize_gemm(*parts, settings["bits"], settings["group_size"]).T.contiguous()


if __name__ == "__main__":
    answer(read)
