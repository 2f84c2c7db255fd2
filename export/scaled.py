"""Source files in FP8 or MXFP4: tensors with scales beside them, multiplied out as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .formats import find_quantization
from .shards import Shards, read_json, some

_FP8 = ("F8_E4M3", "F8_E5M2")
_FP4 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu"
)  # of codes 0 to 7; 8 to 15 are the same, negative


def has_scales(quantization: object) -> bool:
    """Whether a quantization config speaks of tensors in FP8 or MXFP4, which `FloatShards` reads."""
    if not isinstance(quantization, Mapping):
        return False
    method = quantization.get("quant_method")
    compressed = method == "compressed-tensors" and quantization.get("format") == "float-quantized"
    return compressed or method in ("fp8", "fbgemm_fp8", "mxfp4")


def says_quantized(directory: Path) -> bool:
    """Whether a model's folder says that it is quantized; one in FP8 or MXFP4 is read as a float model."""
    if any((directory / name).is_file() for name in ("quantize_config.json", "quant_config.json")):
        return True
    if not (directory / "config.json").exists():
        return False
    found = find_quantization(read_json(directory / "config.json"))
    return bool(found) and not has_scales(found)


class FloatShards(Shards):
    """The tensors of a source in floating point, under the names that they have without their scales.

    An FP8 tensor `name` is multiplied by `name_scale_inv` or `name_scale` (DeepSeek's own files: `scale` beside
    `weight`): a number, one per row, or one per tile. Of MXFP4, gpt-oss's experts, `name_blocks` holds two codes a
    byte, in blocks of 32 that share a power of two in `name_scales`; rows and columns are swapped. Scales of
    activations are left out.

    `tile` is rows and columns per scale, where the config says so; else scales divide a tensor evenly. `scaled` tells
    of the tensors with scales what the files call them and their scales. CheckpointError for FP8 or MXFP4 without any.
    """

    def __init__(self, stored: Shards, dtype: torch.dtype, tile: Any = None) -> None:
        right = isinstance(tile, (list, tuple)) and [type(each) for each in tile] == [int, int] and min(tile) > 0
        self._stored, self._dtype, self._tile = stored, dtype, tuple(tile) if right else None
        self.scaled: dict[str, tuple[str, str]] = {}
        missing, gone = [], set()
        for name in stored.where:
            kind = stored.slice(name).get_dtype()
            if name.endswith("_blocks") and kind == "U8":
                plain, scales = name.removesuffix("_blocks"), [name.removesuffix("blocks") + "scales"]
            elif kind in _FP8:
                owner = name.removesuffix("weight")
                plain, scales = name, [f"{name}_scale_inv", f"{name}_scale", f"{owner}scale"]
                gone |= {f"{owner}input_scale", f"{owner}activation_scale"}
            else:
                continue
            found = next((each for each in scales if each in stored.where), None)
            if found is None:
                missing.append(name)
            else:
                self.scaled[plain] = name, found
                gone |= {name, found}
        if missing:
            raise CheckpointError(
                f"{some(missing)}: stored as FP8 or FP4 without scales, so their values are not known; fetch all files"
            )
        where = {name: file for name, file in stored.where.items() if name not in gone}
        super().__init__(where | {name: stored.where[raw] for name, (raw, _) in self.scaled.items()}, stored._handles)

    def get(self, name: str) -> Tensor:
        """Return the tensor called `name`; CheckpointError where it cannot be read, or its scales do not fit it."""
        if name not in self.scaled:
            return super().get(name)
        return self._multiplied(name, *map(self._stored.get, self.scaled[name]))

    def meta(self, name: str) -> Tensor:
        """Return the shape and dtype of a tensor, as one on the meta device; CheckpointError as `get`."""
        if name not in self.scaled:
            return super().meta(name)
        return self._multiplied(name, *map(self._stored.meta, self.scaled[name]))

    def _multiplied(self, name: str, tensor: Tensor, scale: Tensor) -> Tensor:
        raw, scales = self.scaled[name]
        value = _from_fp8(tensor, scale, self._tile) if raw == name else _from_fp4(tensor, scale)
        if value is None:
            raise CheckpointError(
                f"{scales} is {scale.dtype} {tuple(scale.shape)}, which does not fit {raw}, {tensor.dtype} "
                f"{tuple(tensor.shape)}; fetch the files again"
            )
        return value.to(self._dtype)

    def slice(self, name: str) -> Any:
        """Return a handle of the tensor `name`, of which nothing is read yet unless it has scales."""
        return self.get(name) if name in self.scaled else super().slice(name)

    def mapped_anew(self, names: Iterable[str]) -> Shards:
        """Return some of the tensors in mappings of their own."""
        raw = [each for name in names for each in self.scaled.get(name, (name,))]
        return FloatShards(self._stored.mapped_anew(raw), self._dtype, self._tile)


def _from_fp8(tensor: Tensor, scale: Tensor, tile: tuple[int, int] | None) -> Tensor | None:
    """Return the values of an FP8 tensor with one scale, one per row or one per tile; None where they do not fit."""
    factor = _powers(scale) if scale.dtype == torch.uint8 else scale.float()
    if factor.numel() == 1:
        return tensor.float() * factor.reshape(())
    if factor.ndim == tensor.ndim - 1:  # one per row
        factor = factor.unsqueeze(-1)
    if factor.ndim != tensor.ndim or 0 in factor.shape:
        return None
    sizes = [size // count for size, count in zip(tensor.shape, factor.shape, strict=True)]
    counts = [-(-size // own) for size, own in zip(tensor.shape[-2:], tile or (), strict=False)]
    if counts == list(factor.shape[-2:]):
        sizes[-2:] = tile or ()  # the last tile of a row or column may be smaller
    for axis, size in enumerate(sizes):
        factor = factor.repeat_interleave(size, axis)[(slice(None),) * axis + (slice(tensor.shape[axis]),)]
    return tensor.float() * factor if factor.shape == tensor.shape else None


def _from_fp4(blocks: Tensor, scales: Tensor) -> Tensor | None:
    """Return (experts, in, out) from codes (experts, out, in / 32, 16) and their exponents (experts, out, in / 32)."""
    if blocks.shape[:-1] != scales.shape or scales.dtype != torch.uint8 or scales.ndim < 2:
        return None
    values = torch.cat([_FP4, -_FP4]).to(blocks.device)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], -1).flatten(-2)
    return (pairs * _powers(scales).unsqueeze(-1)).flatten(-2).transpose(-1, -2)


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of two whose exponents, plus 127, are bytes."""
    return torch.exp2(exponents.float() - 127)
