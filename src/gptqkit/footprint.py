"""How many bytes a computation keeps alive, counted on real tensors, or on the meta device without any."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Footprint(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made inside the context and still alive.

    Views count as nothing. What a kernel needs for itself while it runs is not seen.

    Attributes:
        live: Bytes alive now.
        peak: The most that were alive at a time.

    >>> with Footprint() as footprint:
    ...     first = torch.zeros(1000)
    ...     second = first.view(10, 100) + 1
    ...     del first, second
    >>> footprint.live, footprint.peak
    (0, 8000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `function`, and count the storages that it made."""
        given = {storage_id(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage_id(tensor) not in given:
                self.count(tensor)
        return result

    def count(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` from now until it is gone, if that is not done already."""
        storage, identity = tensor.untyped_storage(), storage_id(tensor)
        if identity in self._counted:
            return
        size = storage.nbytes()
        self._counted.add(identity)
        self.live += size
        self.peak = max(self.peak, self.live)

        def forget() -> None:
            self._counted.discard(identity)
            self.live -= size

        weakref.finalize(storage, forget)


def storage_id(tensor: Tensor) -> int:
    """What tells the storage of `tensor` from all others that are alive, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def dry_run(experts: int = 1) -> Iterator[Footprint]:
    """Run a model on the meta device: shapes without numbers, and what they would take.

    Questions that only numbers could answer get a likely answer: a number is 0, a truth value False; all elements of a
    vector are nonzero, and of a larger mask, such as one expert's of the choices of all tokens, an even share.
    Attention is taken to be fused where queries and values are equally wide: then the scores are never in memory as a
    whole.

    Args:
        experts: Among how many the elements of a mask are shared.
    """
    with Footprint() as footprint, _Answers(experts), _FusedAttention():
        yield footprint


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._experts = experts

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return False if args[0].dtype == torch.bool else 0
        if function is torch.ops.aten.nonzero.default and args[0].is_meta:
            share = 1 if args[0].dim() == 1 else self._experts
            rows = -(-args[0].numel() // share)
            return args[0].new_empty((rows, args[0].dim()), dtype=torch.int64)
        return function(*args, **(kwargs or {}))


class _FusedAttention(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is scaled_dot_product_attention and len(args) >= 3 and args[0].shape[-1] == args[2].shape[-1]:
            return torch.empty_like(args[0])
        return function(*args, **(kwargs or {}))
