"""Quantized experts in the place of a parameter that holds the matrices of all experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import BackendError

_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm)


class Pieces(nn.Module):
    """One expert's matrix, cut into layers by rows: gate and up projections are stored apart and used as one.

    Args:
        layers: The layers; each takes (..., in).
        rows: Which outputs of the whole each layer gives; a single None where there is one layer for all of them.
        out_features: Outputs of the whole.
    """

    def __init__(self, layers: Sequence[nn.Module], rows: Sequence[slice | None], out_features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rows = list(rows)
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        """The output of the whole matrix, (..., out) in the dtype of `x`, which is (..., in)."""
        outputs: list[Tensor] = [layer(x) for layer in self.layers]
        if len(outputs) == 1:
            return outputs[0]
        whole: Tensor = outputs[0].new_empty(*x.shape[:-1], self.out_features)
        for rows, output in zip(self.rows, outputs, strict=True):
            whole[..., slice(None) if rows is None else rows] = output
        return whole


class QuantExperts(nn.Module):
    """Stands where a module of experts keeps a parameter with one matrix per expert.

    `stack[number]` gives a handle of that expert's matrix; `F.linear(x, handle)` and `x @ handle` run its layers. It
    can do nothing else, so the module must take its experts one by one (transformers' experts implementation "eager").

    Args:
        experts: Every expert's layers, in order.
    """

    def __init__(self, experts: Sequence[Pieces]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def __getitem__(self, number: int | Tensor) -> _Handle:
        return _Handle(self.experts[int(number)])

    def __len__(self) -> int:
        return len(self.experts)


class _Handle:
    """One expert's matrix for the product that it is used in."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The product of the first argument with the matrix."""
        linear = func is functional.linear
        bias = (kwargs or {}).get("bias", args[2] if len(args) > 2 else None)
        if (linear or func in _PRODUCTS) and len(args) > 1 and isinstance(args[0], Tensor) and isinstance(args[1], cls):
            output = args[1]._layer(args[0])
            return output if bias is None else output + bias
        raise BackendError(
            f"quantized experts are used in {getattr(func, '__name__', func)}, which is neither F.linear nor a plain "
            "product; this model cannot run with quantized experts"
        )
