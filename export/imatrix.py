"""Importance matrices: GGUF files of what the inputs of all Linears come to, which llama.cpp's quantizer weighs by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ArchitectureError
from .gguf_model import architecture_of, split_name


def write_imatrix(
    file: Path,
    sums: Iterable[tuple[str, Tensor, int]],
    model_config: Mapping[str, Any],
    *,
    dataset: str,
    samples: int,
    length: int,
) -> None:
    """Write an importance matrix as llama-imatrix does: in_sum2, (experts or 1, in), and counts, (experts or 1, 1).

    `sums` has of every Linear its name, the sums over tokens of x_j^2, (in,), and the number of tokens; `samples` of
    `length` tokens were read of the text called `dataset`. The file appears when it is complete. ArchitectureError for
    a Linear for which llama.cpp has no name.
    """
    from gguf import GGUFWriter  # here, because it takes long

    found: dict[str, dict[int, tuple[Tensor, int]]] = {}
    modules = architecture_of(model_config).modules
    for name, squares, tokens in sums:
        place = split_name(name, modules)
        if place is None:
            raise ArchitectureError(f"{name} has no name in llama.cpp's {model_config['model_type']}")
        found.setdefault(place[0], {})[place[1] or 0] = squares, tokens
    incomplete = file.with_name(f".{file.name}.gptqkit-incomplete")
    try:
        writer = GGUFWriter(incomplete, "")
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [dataset])
        writer.add_uint32("imatrix.chunk_count", samples)
        writer.add_uint32("imatrix.chunk_size", length)
        for name, experts in found.items():
            rows, counts = zip(*(experts[number] for number in sorted(experts)), strict=True)
            writer.add_tensor(f"{name}.weight.in_sum2", torch.stack(rows).float().numpy())
            writer.add_tensor(f"{name}.weight.counts", torch.tensor(counts, dtype=torch.float32)[:, None].numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        incomplete.replace(file)
    finally:
        incomplete.unlink(missing_ok=True)
