"""Random quantized weights, and GPTQ's tensors of them written by another program: numpy's."""

import numpy as np
import torch

from gptqkit.quantizer.quantized import QuantizedWeight


def random_weight(bits=4, rows=64, columns=96, group_size=32, *, sym=False, act_order=False, zeros=None, seed=0):
    """zeros: (least, largest) zero point."""
    generator = torch.Generator().manual_seed(100 * seed + bits)
    size = group_size or columns
    least, largest = zeros or (1, 2**bits - 1)
    zero = torch.randint(least, largest + 1, (rows, -(-columns // size)), generator=generator)
    scale = (torch.rand(zero.shape, generator=generator) / 7 + 1e-4).half().float()
    scale *= torch.randint(0, 2, scale.shape, generator=generator) * 2 - 1
    order = torch.randperm(columns, generator=generator) if act_order else torch.arange(columns)
    return QuantizedWeight(
        codes=torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8),
        scale=scale,
        offset=-(zero.fill_(2 ** (bits - 1)) if sym else zero) * scale,
        group_index=(order // size).int(),
        bits=bits,
        group_size=size,
        sym=sym,
    )


def words(codes, bits):
    """The little-endian bit stream of non-negative integers along the last axis, in int32 words."""
    each = (codes.numpy().astype(np.int64)[..., None] >> np.arange(bits)) & 1
    stream = each.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    return torch.from_numpy(np.packbits(stream, axis=-1, bitorder="little").view("<i4").copy())


def gptq_tensors(weight, *, version):
    """The four tensors of a layer, as the files of GPTQ hold them."""
    zero = (-weight.offset / weight.scale).round().long()
    return {
        "qweight": words(weight.codes, weight.bits).T.contiguous(),
        "qzeros": words(((zero - (2 - version)) % 2**weight.bits).T, weight.bits),
        "scales": weight.scale.half().T.contiguous(),
        "g_idx": weight.group_index,
    }


def same(left, right):
    """Whether two weights hold the same bits."""
    pairs = [(getattr(left, part), getattr(right, part)) for part in ("codes", "scale", "offset", "group_index")]
    alike = all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
    return alike and (left.bits, left.group_size, left.sym) == (right.bits, right.group_size, right.sym)
