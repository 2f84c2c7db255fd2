"""GGUF's block types, to the bit: codes, scales and offsets of a row in blocks of 32 or 256 columns.

A block of a legacy type holds float16 d and, where it has offsets, m: value = d * q + m, or d * (q - 2^(bits - 1)). A
K-quant's super-block holds one d and, where it has offsets, one dmin, and of every group whole multiples sc and m:
value = d * sc * q - dmin * m, or d * sc * (q - 2^(bits - 1)). float32 holds every scale and offset exactly, and all
values are rounded as llama.cpp rounds them, so a `QuantizedWeight` is the same weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ConversionError
from ..quantizer.quantized import QuantizedWeight, trivial_index
from ..quantizer.superblock import Float16Offset, TwoLevel
from .recipes import grid_settings

_ROWS = 4096  # encoded at a time


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """One type of block.

    Attributes:
        name: As in the name of its tensors, such as "q4_k".
        number: ggml's.
        bits: Bits per code.
        group_size: Columns that share a scale.
        sym: Without offsets.
        fields: Names and bytes of the parts of a block, in order.
        runs: How many codes follow each other, one a byte, before the next so many go into higher bits of these bytes;
            the same of their high bits, where these stand apart.
        snap: What its grids can be.
    """

    name: str
    number: int
    bits: int
    group_size: int
    sym: bool
    fields: dict[str, int]
    runs: tuple[int, int]
    snap: Float16Offset | TwoLevel

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return self.snap.columns if isinstance(self.snap, TwoLevel) else self.group_size

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return sum(self.fields.values())

    @property
    def low_bits(self) -> int:
        """Bits of a code that stand in "qs"; others are in "qh"."""
        return self.fields["qs"] * 8 // self.columns


_LEGACY, _LONG = (16, 1), (32, 32)
_LAYOUTS: dict[str, tuple[int, dict[str, int], tuple[int, int], Float16Offset | TwoLevel]] = {
    "q4_0": (2, {"d": 2, "qs": 16}, _LEGACY, Float16Offset()),
    "q4_1": (3, {"d": 2, "m": 2, "qs": 16}, _LEGACY, Float16Offset()),
    "q5_0": (6, {"d": 2, "qh": 4, "qs": 16}, _LEGACY, Float16Offset()),
    "q5_1": (7, {"d": 2, "m": 2, "qh": 4, "qs": 16}, _LEGACY, Float16Offset()),
    "q8_0": (8, {"d": 2, "qs": 32}, _LONG, Float16Offset()),
    "q2_k": (10, {"scales": 16, "qs": 64, "d": 2, "m": 2}, _LONG, TwoLevel((0, 15), 15)),
    "q3_k": (11, {"qh": 32, "qs": 64, "scales": 12, "d": 2}, _LONG, TwoLevel((-32, 31))),
    "q4_k": (12, {"d": 2, "m": 2, "scales": 12, "qs": 128}, _LONG, TwoLevel((0, 63), 63)),
    "q5_k": (13, {"d": 2, "m": 2, "scales": 12, "qh": 32, "qs": 128}, _LONG, TwoLevel((0, 63), 63)),
    "q6_k": (14, {"qs": 128, "qh": 64, "scales": 16, "d": 2}, (64, 32), TwoLevel((-128, 127))),
}
BLOCKS = {
    name: BlockType(name=name, number=number, fields=fields, runs=runs, snap=snap, **grid_settings(name))
    for name, (number, fields, runs, snap) in _LAYOUTS.items()
}
"""Every block type that is written and read here, by name."""


def encode(kind: BlockType, weight: QuantizedWeight) -> Tensor | None:
    """Return the blocks of a weight on the grid of `kind`, (out, bytes) uint8; None where they cannot hold it exactly.

    Columns are whole blocks, and groups those of the type.
    """
    rows, groups = weight.scale.shape
    parts = []
    for start in range(0, rows, _ROWS):
        some = slice(start, start + _ROWS)
        per_block = kind.columns // kind.group_size
        scale, offset = (each[some].reshape(-1, per_block) for each in (weight.scale, weight.offset))
        if kind.sym and not torch.equal(scale * -(2 ** (kind.bits - 1)), offset):
            return None
        fields = _encode_grids(kind, scale, offset)
        if fields is None:
            return None
        fields |= _encode_codes(kind, weight.codes[some].reshape(-1, kind.columns))
        blocks = torch.cat([fields[name] for name in kind.fields], dim=1)
        parts.append(blocks.view(-1, groups // per_block * kind.size))
    return torch.cat(parts)


def decode(kind: BlockType, blocks: Tensor) -> QuantizedWeight:
    """Return the weight that blocks, (out, bytes) uint8, hold."""
    rows = blocks.shape[0]
    columns = blocks.shape[1] // kind.size * kind.columns
    sizes = list(kind.fields.values())
    fields = dict(zip(kind.fields, torch.split(blocks.reshape(-1, kind.size), sizes, dim=1), strict=True))
    scale, offset = _decode_grids(kind, fields)
    return QuantizedWeight(
        codes=_decode_codes(kind, fields).view(rows, columns),
        scale=scale.view(rows, -1),
        offset=offset.view(rows, -1),
        group_index=trivial_index(columns, kind.group_size, blocks.device),
        bits=kind.bits,
        group_size=kind.group_size,
        sym=kind.sym,
    )


def transcribe(weight: QuantizedWeight) -> tuple[BlockType, Tensor]:
    """Return the block type that holds a weight exactly, and its blocks; ConversionError where none does."""
    for kind, same in _exact_forms(weight):
        blocks = encode(kind, same)
        if blocks is not None:
            return kind, blocks
    raise ConversionError(
        "no block type holds these scales and zero points; quantize symmetrically, or for the format gguf"
    )


def _exact_forms(weight: QuantizedWeight) -> Iterator[tuple[BlockType, QuantizedWeight]]:
    """Yield the block types that may hold a weight exactly, and the same values on their groups and codes.

    First those of its own grid, then the smallest. An integer zero point makes values (code - zero) * scale: whole
    steps between -2^bits and 2^bits, which a symmetric type of perhaps one more bit holds. ConversionError for groups
    that are no blocks.
    """
    columns, size = weight.in_features, weight.group_size
    if not weight.trivial_group_index:
        raise ConversionError(
            "its groups do not follow the order of the columns (desc_act), as GGUF's do; quantize with static_groups"
        )
    for kind in BLOCKS.values():
        own = (kind.bits, kind.group_size, kind.sym) == (weight.bits, weight.group_size, weight.sym)
        if own and columns % kind.columns == 0:
            yield kind, weight
    if columns % 32 or (size % 32 and size < columns):
        raise ConversionError(f"groups of {size} in {columns} columns are not whole blocks of 32, as GGUF needs them")
    group = torch.arange(0, columns, 32, device=weight.codes.device) // size
    scale, offset = weight.scale[:, group].contiguous(), weight.offset[:, group].contiguous()
    index = trivial_index(columns, 32, group.device)
    base = replace(weight, scale=scale, offset=offset, group_index=index, group_size=32)
    zero, exact = base.nearest_zeros()
    steps = weight.codes.to(torch.int32) - zero.repeat_interleave(32, 1).to(torch.int32) if exact.all() else None
    for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"):
        kind, half = BLOCKS[name], 2 ** (BLOCKS[name].bits - 1)
        if not kind.sym and kind.bits >= weight.bits:
            yield kind, replace(base, bits=kind.bits, sym=False)
        elif kind.sym and steps is not None and -half <= int(steps.min()) <= int(steps.max()) < half:
            codes = (steps + half).to(torch.uint8)
            yield kind, replace(base, codes=codes, offset=scale * -half, bits=kind.bits, sym=True)


def _encode_grids(kind: BlockType, scale: Tensor, offset: Tensor) -> dict[str, Tensor] | None:
    """Return d, m and scales of blocks from the scales and offsets of their groups, (blocks, groups)."""
    if not isinstance(kind.snap, TwoLevel):
        grids = {"d": scale} if kind.sym else {"d": scale, "m": offset}
        if not all(torch.equal(each.half().float(), each) for each in grids.values()):
            return None
        return {name: each.half().contiguous().view(torch.uint8) for name, each in grids.items()}
    scales = _factors(scale, *kind.snap.scales)
    offsets = None if kind.sym else _factors(-offset, 0, kind.snap.offsets)
    if scales is None or (offsets is None and not kind.sym):
        return None
    fields = {"d": scales[0].view(torch.uint8)}
    if offsets is not None:
        fields["m"] = offsets[0].view(torch.uint8)
    multiples = scales[1]
    if kind.name == "q2_k" and offsets is not None:
        fields["scales"] = (multiples | offsets[1] << 4).to(torch.uint8)
    elif kind.name == "q3_k":
        high = multiples + 32
        fields["scales"] = torch.cat([_join(high & 15, 4, 8), _join(high >> 4, 2, 4)], 1)
    elif kind.name == "q6_k":
        fields["scales"] = multiples.to(torch.int8).view(torch.uint8)
    elif offsets is not None:
        both = torch.stack([multiples, offsets[1]], 1).view(-1, 2, 2, 4)  # sc and m, of the first and last four groups
        first = both[:, :, 0] | both[:, :, 1] >> 4 << 6
        last = both[:, 0, 1] & 15 | (both[:, 1, 1] & 15) << 4
        fields["scales"] = torch.cat([first.flatten(1), last], 1).to(torch.uint8)
    return fields


def _decode_grids(kind: BlockType, fields: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets of groups, (blocks, groups) float32."""
    unit = fields["d"].contiguous().view(torch.float16).float()
    floor = fields["m"].contiguous().view(torch.float16).float() if "m" in fields else None
    if not isinstance(kind.snap, TwoLevel):
        return unit, unit * -(2 ** (kind.bits - 1)) if floor is None else floor
    packed = fields["scales"]
    depth = packed
    if kind.name == "q2_k":
        multiple, depth = packed & 15, packed >> 4
    elif kind.name == "q3_k":
        multiple = _split(packed[:, :8], 4, 8).short() + 16 * _split(packed[:, 8:], 2, 4) - 32
    elif kind.name == "q6_k":
        multiple = packed.contiguous().view(torch.int8)
    else:
        first, last = packed[:, :8].reshape(-1, 2, 4), packed[:, 8:]
        low = torch.stack([last & 15, last >> 4], 1)
        multiple, depth = torch.cat([first & 63, low | first >> 6 << 4], 2).unbind(1)
    scale = unit * multiple.float()
    return scale, scale * -(2 ** (kind.bits - 1)) if floor is None else -(floor * depth.float())


def _encode_codes(kind: BlockType, codes: Tensor) -> dict[str, Tensor]:
    low = kind.low_bits
    if kind.name == "q8_0":
        return {"qs": codes ^ 128}  # int8
    fields = {"qs": _join(codes & 2**low - 1, low, kind.runs[0])}
    if "qh" in kind.fields:
        fields["qh"] = _join(codes >> low, kind.bits - low, kind.runs[1])
    return fields


def _decode_codes(kind: BlockType, fields: dict[str, Tensor]) -> Tensor:
    low = kind.low_bits
    if kind.name == "q8_0":
        return fields["qs"] ^ 128
    codes = _split(fields["qs"], low, kind.runs[0])
    return codes | _split(fields["qh"], kind.bits - low, kind.runs[1]) << low if "qh" in fields else codes


def _join(values: Tensor, bits: int, run: int) -> Tensor:
    """Return bytes, (blocks, bytes), of values of so many bits: of 8 / bits runs, the first in the lowest bits."""
    parts = values.view(len(values), -1, 8 // bits, run).to(torch.uint8)
    joined = torch.zeros_like(parts[:, :, 0])
    for part in range(8 // bits):
        joined |= parts[:, :, part] << bits * part
    return joined.flatten(1)


def _split(packed: Tensor, bits: int, run: int) -> Tensor:
    """Return what `_join` joined, (blocks, values)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(-1, 1)
    values: Tensor = packed.reshape(len(packed), -1, 1, run) >> shifts & 2**bits - 1
    return values.flatten(1)


def _factors(values: Tensor, least: int, most: int) -> tuple[Tensor, Tensor] | None:
    """Return a float16 number per row, (rows, 1), and the whole multiples of it that make `values`; None if none do.

    The largest value is tried as every multiple, beginning with the largest: ours is that.
    """
    unit = torch.zeros(len(values), 1, dtype=torch.float16, device=values.device)
    multiples = torch.zeros_like(values, dtype=torch.int32)
    left = values.any(1).nonzero().flatten()
    for times in sorted(range(least, most + 1), key=abs, reverse=True):
        if not len(left) or not times:
            break
        open_values = values[left]
        widest = open_values.gather(1, open_values.abs().argmax(1, keepdim=True))
        tried = (widest / times).half()
        found = (open_values / tried.float()).round()
        exact = (found * tried.float() == open_values) & (found >= least) & (found <= most)
        good = exact.all(1)
        unit[left[good]] = tried[good]
        multiples[left[good]] = found[good].int()
        left = left[~good]
    return None if len(left) else (unit, multiples)
