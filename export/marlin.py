"""Marlin's layout: 4 bits, symmetric, groups of 128 columns or whole rows, in the order of its kernel's tensor cores.

Of a layer with K inputs, N outputs and G groups:

    B          int32 (K / 16, 2 N)       codes in tiles of 16 x 16
    s          float16 (G, N)            scales, permuted (bfloat16 is read, never written)
    workspace  int32 (N / 128 * 16,)     zeros: room for the kernel's locks; may be missing

The layout of Marlin's own checkpoints and of AutoGPTQ's with is_marlin_format. Servers make it of GPTQ's tensors
while they load, and load no checkpoints in it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, ShapeError
from ..quantizer.config import QuantizeConfig
from ..quantizer.grid import IntegerZeroPoint
from ..quantizer.quantized import QuantizedWeight
from . import gptq
from .bits import pack, unpack
from .formats import Declared, Format, LayerSpec
from .layers import BIAS, SCALES, WORDS, check_kinds, check_shapes, make_weight, refuse_act_order, stored_grid
from .modules import meta_of, outside_blocks

_BITS, _TILE, _GROUP = 4, 16, 128
_COLUMNS, _ROWS = 128, 256  # what in_features and out_features must be multiples of
_KINDS = {"B": WORDS, "s": SCALES, "workspace": (1, (torch.int32,)), "bias": BIAS}


def check_spec(spec: LayerSpec) -> None:
    """Raise ConfigError or ShapeError for what Marlin cannot hold."""
    if spec.bits != _BITS or not spec.sym:
        raise ConfigError(
            f"marlin holds symmetric 4-bit codes only, not {'' if spec.sym else 'a'}symmetric {spec.bits}-bit ones; "
            "compressed-tensors and gptq_v2 hold them"
        )
    refuse_act_order(spec, "marlin")
    if spec.out_features % _ROWS or spec.in_features % _COLUMNS:
        raise ShapeError(
            f"{(spec.out_features, spec.in_features)} is its shape, and marlin needs multiples of {_ROWS} rows and "
            f"{_COLUMNS} columns"
        )
    if spec.group_size not in (_GROUP, spec.in_features):
        raise ConfigError(f"marlin holds groups of {_GROUP} columns or whole rows, not of {spec.group_size}")


def _nbytes(spec: LayerSpec) -> int:
    return spec.out_features * (spec.in_features + 4 * spec.groups + 1) // 2


def pack_layer(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one layer, exact and contiguous; `check_spec` comes first.

    Raises:
        ConversionError: Scales that float16 cannot hold.
    """
    _, scales = stored_grid(weight, "marlin")
    rows, columns = weight.codes.shape
    tiles = weight.codes.t().reshape(columns // _TILE, _TILE, rows // _TILE, _TILE).transpose(1, 2)
    order = _scale_order(weight.group_size < columns)
    return {
        "B": pack(tiles.reshape(-1, _CODE_ORDER.numel())[:, _CODE_ORDER].view(columns // _TILE, -1), _BITS),
        "s": scales.t().reshape(-1, order.numel())[:, order].view(-1, rows).contiguous(),
        "workspace": torch.zeros(rows // 128 * 16, dtype=torch.int32),
    }


def layer_spec(name: str, tensors: Mapping[str, Tensor], declared: Declared) -> LayerSpec:
    """Return what a layer's tensors are, from shapes and dtypes.

    Raises:
        CheckpointError: A tensor is missing, or its dtype or shape contradicts the config or the others.
    """
    check_kinds(name, tensors, _KINDS, ("B", "s"))
    tiles, words = tensors["B"].shape
    columns, rows = tiles * _TILE, words // 2
    if not tiles or not words or columns % _COLUMNS or words % (2 * _ROWS):
        raise CheckpointError(
            f"{name}.B has shape {(tiles, words)}, which stands for no multiples of {_COLUMNS} columns and {_ROWS} "
            "rows; fetch the files again"
        )
    size = declared.group_size or columns
    shapes = {"s": (-(-columns // size), rows), "workspace": (rows // 128 * 16,), "bias": (rows,)}
    check_shapes(name, tensors, shapes, f"B {(tiles, words)}", declared.group_size)
    return LayerSpec(in_features=columns, out_features=rows, bits=_BITS, group_size=size, sym=True, act_order=False)


def unpack_layer(name: str, tensors: Mapping[str, Tensor], spec: LayerSpec) -> QuantizedWeight:
    """Return the weight that a layer's tensors hold, exactly; CheckpointError for scales that are not finite."""
    rows, columns = spec.out_features, spec.in_features
    order = _scale_order(spec.group_size < columns)
    ordered = unpack(tensors["B"], _BITS).view(-1, _CODE_ORDER.numel())[:, _CODE_ORDER.argsort()]
    tiles = ordered.view(columns // _TILE, rows // _TILE, _TILE, _TILE).permute(1, 3, 0, 2)
    scales = tensors["s"].reshape(-1, order.numel())[:, order.argsort()].view(-1, rows)
    return make_weight(spec, tiles.reshape(rows, columns), scales.t(), None, where=f"{name}.s")


def write_config(
    config: QuantizeConfig,
    layers: Mapping[str, LayerSpec],
    matrices: Sequence[str],  # noqa: ARG001  # a module without B is in floating point
) -> dict[str, Any]:
    """Return the quantization config of a checkpoint, as AutoGPTQ wrote it."""
    return {
        "quant_method": "gptq",
        "bits": _BITS,
        "group_size": config.group_size or -1,
        "desc_act": False,
        "sym": True,
        "lm_head": any(map(outside_blocks, layers)),
        "checkpoint_format": "marlin",
        "is_marlin_format": True,
        "meta": meta_of(config),
    }


def read_config(values: Mapping[str, Any], where: str) -> Declared:
    """Return what a quantization config declares; `where` is its file, for messages.

    Raises:
        CheckpointError: Missing keys, or values that cannot be.
    """
    bits, size = values.get("bits", _BITS), values.get("group_size")
    if bits != _BITS or size not in (-1, _GROUP) or values.get("sym") is False or values.get("desc_act"):
        raise CheckpointError(
            f"{where}: marlin is 4 bits, symmetric, in groups of {_GROUP} or -1 and without desc_act; here bits is "
            f"{bits!r}, group_size {size!r}, sym {values.get('sym')!r}, desc_act {values.get('desc_act')!r}"
        )
    return gptq.read_config({**values, "bits": bits, "sym": True}, where)


def _code_order() -> Tensor:
    """Return which of 1024 codes, four tiles side by side, stands at each place: what a warp's lanes load at once."""
    order = []
    for lane in range(32):
        column = lane // 4
        rows = (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4) + 8, 2 * (lane % 4) + 9)
        own = [16 * row + column + 8 * half for half in (0, 1) for row in rows]
        order += [place + 256 * tile for tile in range(4) for place in own]
    return torch.tensor(order).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def _scale_order(grouped: bool) -> Tensor:
    """Return which of 64 (or, for whole rows, 32) scales stands at each place."""
    if grouped:
        return torch.arange(64).view(8, 8).t().flatten()
    return torch.tensor([2 * lane + place for lane in range(4) for place in (0, 1, 8, 9, 16, 17, 24, 25)])


_CODE_ORDER = _code_order()

FORMAT = Format(
    suffixes=("B", "s", "workspace"),
    snap=IntegerZeroPoint(),
    check=check_spec,
    nbytes=_nbytes,
    pack=pack_layer,
    spec=layer_spec,
    unpack=unpack_layer,
    write_config=write_config,
    read_config=read_config,
    uniform=True,
)
