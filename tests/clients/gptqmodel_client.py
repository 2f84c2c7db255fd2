"""GPTQModel reads checkpoints: the weights that it decodes and the logits that it computes, on the CPU.

`logits` as GPTQModel computes them in float16. Where the kernel is its plain torch layers (gptq_torch, awq_torch) also
`weight.<module>` (out, in) float16 of every quantized layer, and with gptq_torch `logits_float32` with the same layers
and float32 activations, where only the order of summation is left to differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
from gptqmodel import GPTQModel
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from reading import answer
from torch import Tensor


def read(checkpoint: Path, input_ids: Tensor, kernel: str | None) -> dict[str, Tensor]:
    model = GPTQModel.load(str(checkpoint), device="cpu", backend=kernel or "auto", dtype=torch.float16).model
    layers = {name: module for name, module in model.named_modules() if isinstance(module, TorchLinear)}
    with torch.inference_mode():
        found = {"logits": model(input_ids).logits.float()}
        if kernel == "gptq_torch":
            found |= {f"weight.{name}": layer.dequantize_weight().T.contiguous() for name, layer in layers.items()}
            found["logits_float32"] = model.float()(input_ids).logits
        if kernel == "awq_torch":
            layers = {name: module for name, module in model.named_modules() if isinstance(module, AwqTorchLinear)}
            for name, layer in layers.items():
                dense = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size)
                found[f"weight.{name}"] = dense.T.contiguous()
    return found


if __name__ == "__main__":
    answer(read)
