"""Which backend serves a layer, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..errors import BackendError
from .cpu_backend import CpuLinear
from .int4_backend import CpuInt4Linear
from .linear import QuantLinear
from .packed import PackedWeight
from .torch_backend import TorchLinear

BACKENDS: Mapping[str, type[QuantLinear]] = MappingProxyType(
    {kind.backend: kind for kind in (TorchLinear, CpuLinear, CpuInt4Linear)}
)

# What "auto" tries, in this order. All compute the same weights, exactly; the last serves every layer.
AUTOMATIC: tuple[type[QuantLinear], ...] = (CpuLinear, TorchLinear)

UNAVAILABLE: Mapping[str, str] = MappingProxyType(
    {"cuda": "this version has no CUDA kernels; 'torch' (and 'auto') run on NVIDIA GPUs through torch"}
)


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """The backend of one layer, or the backends of a whole model, in words.

    Attributes:
        name: The backend's name; those of a model with several are joined by "+".
        reason: Why it was chosen.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        """One line for logs and terminals."""
        return f"{self.name}: {self.reason}"


def check_backend(requested: str) -> None:
    """Refuse a name that stands for no backend, before any work starts.

    Raises:
        BackendError: `requested` is neither "auto" nor the name of a backend of this version.
    """
    if requested in UNAVAILABLE:
        raise BackendError(f"backend {requested!r} is not available: {UNAVAILABLE[requested]}")
    if requested != "auto" and requested not in BACKENDS:
        raise BackendError(f"backend is {requested!r}; choose one of auto, {', '.join(BACKENDS)}")


def choose_backend(requested: str, packed: PackedWeight, dtype: torch.dtype) -> BackendChoice:
    """The backend for one layer: the one asked for, or with "auto" the first of `AUTOMATIC` that can serve it.

    Args:
        requested: "auto" or the name of a backend.
        packed: The layer, on the device that it is to run on.
        dtype: The dtype of its activations.

    Raises:
        BackendError: No such backend, or it cannot serve the layer.
    """
    check_backend(requested)
    candidates = AUTOMATIC if requested == "auto" else (BACKENDS[requested],)
    refusals: list[str] = []
    for kind in candidates:
        refusal = kind.refusal(packed, dtype)
        if refusal is None:
            how = "chosen automatically" if requested == "auto" else "as asked for"
            return BackendChoice(name=kind.backend, reason="; ".join([kind.summary, how, *refusals]))
        refusals.append(f"not {kind.backend}, because {refusal}")
    raise BackendError(f"backend {requested!r} cannot serve {packed.name}: {'; '.join(refusals)}")


def make_linear(choice: BackendChoice, packed: PackedWeight, dtype: torch.dtype) -> QuantLinear:
    """The layer that runs `packed` on the chosen backend for activations of `dtype`."""
    return BACKENDS[choice.name](packed, dtype)


def summarize(choices: Iterable[BackendChoice]) -> BackendChoice:
    """The choices for a model's layers as one, each with the number of layers that it holds for.

    >>> one = BackendChoice(name="torch", reason="as asked for")
    >>> print(summarize([one, one]))
    torch: as asked for (2 layers)
    """
    counted = Counter(choices)
    names = dict.fromkeys(choice.name for choice in counted)
    lines = [
        f"{choice.reason if len(names) == 1 else choice} ({count} layer{'s' if count > 1 else ''})"
        for choice, count in counted.items()
    ]
    return BackendChoice(name="+".join(names), reason=" | ".join(lines))
