"""A few small calls of every kernel, for `compute-sanitizer --tool racecheck python benchmarks/sanitize.py`."""

from __future__ import annotations

import torch
from layers import random_layer

from gptqkit.kernels.gemm import dequantize, repack

ROWS = (1, 16, 24, 70)  # one for each kernel
SPLITS = (1, 3)


def main() -> None:
    """Run; the sanitizer reports."""
    device = torch.device("cuda", torch.cuda.current_device())
    for bits in (2, 3, 4, 8):
        for dtype in (torch.float16, torch.bfloat16):
            for group_size in (32, 128):
                layer = repack(random_layer(96, 384, bits=bits, group_size=group_size, device=device))
                dequantize(layer, dtype)
                tensors = (layer.weight, layer.scale, layer.zero)
                bias = torch.zeros(96, dtype=dtype, device=device)
                for rows in ROWS:
                    x = torch.randn(rows, 384, device=device).to(dtype)
                    for split in SPLITS:
                        torch.ops.gptqkit.gemm(x, *tensors, bias, bits, group_size, 96, split)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
