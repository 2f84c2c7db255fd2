"""What an encoder-decoder is called with: the first half of a text goes to its encoder, the second to its decoder.

So the decoder goes on with the text, and predicts each token from those before it and the whole first half, as it does
when it is trained with the second half as labels. The same text in both stacks would only have to be copied.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ArchitectureError
from .samples import Samples


def has_two_stacks(model: Any) -> bool:
    """Whether `model` is an encoder-decoder: one that takes tokens for its decoder beside its input."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def vocabulary(model: Any) -> int:
    """Return how many token ids all stacks of `model` know."""
    stacks = [model, model.get_decoder()] if has_two_stacks(model) else [model]
    return min(len(stack.get_input_embeddings().weight) for stack in stacks if hasattr(stack, "get_input_embeddings"))


def parts_of(samples: Samples, model: Any) -> list[Samples]:
    """Return what each stack of `model` gets: the samples as they are, or the parts for its encoder and its decoder.

    A sample of n tokens is cut behind max(1, n // 2) of them, and the decoder's part begins with the token with which
    `generate` begins (ArchitectureError where the model does not say which). The decoder's part is then the longer one
    of every sample of two tokens or more.
    """
    if not has_two_stacks(model):
        return [samples]
    ids, length = samples.input_ids, samples.input_ids.shape[1]
    counts = (
        torch.full((len(ids), 1), length) if samples.attention_mask is None else samples.attention_mask.sum(1, True)
    )
    cuts = (counts // 2).clamp(min=1)
    first = torch.arange(max(1, length // 2)).expand(len(ids), -1)
    second = cuts - 1 + torch.arange(length - first.shape[1] + 1)
    encoder, decoder = (ids.gather(1, places.clamp(max=length - 1)) for places in (first, second))
    decoder[:, 0] = _start(model)
    masks = first < cuts, second < counts
    return [Samples(part, None if mask.all() else mask) for part, mask in zip((encoder, decoder), masks, strict=True)]


def model_inputs(parts: Sequence[Samples], rows: slice, device: torch.device) -> dict[str, Tensor]:
    """Return what a model is called with: input_ids, where there is padding attention_mask, perhaps decoder_input_ids.

    A decoder, which sees no later tokens, needs no mask of the padding on its right.
    """
    first, *rest = parts
    mask = first.attention_mask
    named = {"input_ids": first.input_ids, "attention_mask": None if mask is None else mask.long()}  # as of tokenizers
    if rest:
        named["decoder_input_ids"] = rest[0].input_ids
    return {name: tensor[rows].to(device) for name, tensor in named.items() if tensor is not None}


def _start(model: Any) -> int:
    """Return the token with which `generate` lets the decoder begin."""
    sources = [source for source in (getattr(model, "generation_config", None), model.config) if source is not None]
    for name in ("decoder_start_token_id", "bos_token_id"):
        for source in sources:
            token = getattr(source, name, None)
            if isinstance(token, int):
                return token
    raise ArchitectureError(
        f"{type(model).__name__} does not say with which token its decoder begins; write decoder_start_token_id into "
        "its generation_config.json"
    )
