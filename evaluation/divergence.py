"""How far the predictions of two models lie apart, position by position."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ShapeError
from .perplexity import CHUNK


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(p || q) in nats at every position, (positions,) float32.

    p = softmax(reference) and q = softmax(logits), in float32: sum over the vocabulary of p (log p - log q).

    Args:
        reference: Logits of the float model, (positions, vocabulary) in any float dtype.
        logits: Logits of the other model for the same positions.

    Raises:
        ShapeError: The shapes differ.
    """
    _check(reference, logits)
    return torch.cat(
        [
            functional.kl_div(
                functional.log_softmax(q.float(), dim=-1),
                functional.log_softmax(p.float(), dim=-1),
                reduction="none",
                log_target=True,
            ).sum(-1)
            for p, q in zip(torch.split(reference, CHUNK), torch.split(logits, CHUNK), strict=True)
        ]
    )


def top1_agreement(reference: Tensor, logits: Tensor) -> Tensor:
    """Whether both models find the same token likeliest, (positions,) bool.

    Args:
        reference: Logits, (positions, vocabulary).
        logits: Logits of the other model for the same positions.

    Raises:
        ShapeError: The shapes differ.
    """
    _check(reference, logits)
    return reference.argmax(-1) == logits.argmax(-1)


def _check(reference: Tensor, logits: Tensor) -> None:
    if reference.shape != logits.shape:
        raise ShapeError(
            f"the reference's logits are {tuple(reference.shape)}, the model's {tuple(logits.shape)}; compare models "
            "that share a vocabulary"
        )
