"""A random Llama of given sizes in plain torch, with a key-value cache of fixed size, for benchmarks/model.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

MakeLinear = Callable[[int, int], nn.Module]  # out, in


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a Llama; the defaults are those of the 8B model."""

    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 32
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256

    @property
    def head(self) -> int:
        """Elements of one head."""
        return self.hidden // self.heads


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, sizes: Sizes, make: MakeLinear) -> None:
        super().__init__()
        self.sizes = sizes
        keys = sizes.key_heads * sizes.head
        self.q, self.o = make(sizes.hidden, sizes.hidden), make(sizes.hidden, sizes.hidden)
        self.k, self.v = make(keys, sizes.hidden), make(keys, sizes.hidden)
        self.gate, self.up = make(sizes.intermediate, sizes.hidden), make(sizes.intermediate, sizes.hidden)
        self.down = make(sizes.hidden, sizes.intermediate)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor] | None) -> Tensor:
        """The block's output; with a `cache`, x is one token that is written to the cache's last place."""
        batch, length, _ = x.shape
        normed = functional.rms_norm(x, x.shape[-1:])
        q, k, v = (
            part(normed).view(batch, length, -1, self.sizes.head).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            keys, values = cache
            keys[:, :, -1:] = k
            values[:, :, -1:] = v
            k, v = keys, values
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        normed = functional.rms_norm(x, x.shape[-1:])
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """The whole model; embedding and head are dense."""

    def __init__(self, sizes: Sizes, make: MakeLinear, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = torch.randn(sizes.vocabulary, sizes.hidden, device=device, dtype=dtype)
        self.head = torch.randn_like(self.embedding) * sizes.hidden**-0.5
        self.blocks = nn.ModuleList(Block(sizes, make) for _ in range(sizes.layers))

    def make_cache(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of `length` tokens for every block, random."""
        shape = (batch, self.sizes.key_heads, length, self.sizes.head)
        return [
            (self.embedding.new_empty(shape).normal_(), self.embedding.new_empty(shape).normal_()) for _ in self.blocks
        ]

    def forward(self, ids: Tensor, position: int = 0, caches: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Logits, (batch, length, vocabulary), of tokens that begin at `position`."""
        x = self.embedding[ids]
        places = torch.arange(position, position + ids.shape[1], device=ids.device)
        inverse = 10000.0 ** (-torch.arange(0, self.sizes.head, 2, device=ids.device) / self.sizes.head)
        angle = (places[:, None] * inverse).repeat(1, 2)
        rotation = (angle.cos().to(x.dtype), angle.sin().to(x.dtype))
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, None if caches is None else caches[index])
        return functional.linear(functional.rms_norm(x, x.shape[-1:]), self.head)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on (batch, heads, length, head)."""
    cosine, sine = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-high, low], dim=-1) * sine
