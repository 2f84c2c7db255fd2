"""The methods: what each needs to know of a Linear's inputs, and the function that solves one weight.

A new method is one function, with a `Method` beside it, and one entry of `METHODS`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .grid import Snap
    from .quantized import QuantizedWeight

METHODS = {
    "rtn": "quantizer.gptq:RTN",
    "gptq": "quantizer.gptq:GPTQ",
    "gptaq": "quantizer.gptq:GPTAQ",
    "qep": "quantizer.gptq:QEP",
    "loaq": "quantizer.gptq:LOAQ",
}
"""Every method by name, with the place of its `Method` in this package."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """What calibration found out about the inputs x of a Linear: means over tokens.

    Attributes:
        hessian: H, the mean of x xT, (in, in) float32.
        cross: C, the mean of (x~ - x) xT, (in, in) float32, x~ the float model's inputs; where the method needs it and
            tokens of both models can be paired.
        drift: D, the mean of (r~ - r) xT, (out, in) float32, r what the Linear's outputs are added to, and r~ the same
            in the float model; where the method needs it and there is such a sum.
        tokens: How many the means are of; None where they are exact.
        outputs: F, (out, out) float32, what errors of outputs weigh with one another; several where the weight is those
            of several Linears, one below the other. Empty where each output weighs the same by itself.
        prepared: What a solver wants to keep of them, such as factors, for the next weight that receives the same.
    """

    hessian: Tensor
    cross: Tensor | None = None
    drift: Tensor | None = None
    tokens: int | None = None
    outputs: Sequence[Tensor] = ()
    prepared: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """What a solver found.

    Attributes:
        weight: Codes, scales and offsets.
        loss: (out,) float64, E Hd ET of every row, E = W - Q; Hd is the damped Hessian, and W includes the method's
            correction. None for plain rounding, and where errors of outputs weigh together.
        loss_before: The same before the refinement, where there was one.
        damp_percent: What was added to diag H in the end, on average, as a share of its mean; None for plain rounding.
        damp_escalations: How often damping had to grow.
        dead_columns: Columns whose inputs were always zero.
        latent: (out, in) float32, the values that were rounded: W with all that was moved onto it.
    """

    weight: QuantizedWeight
    loss: Tensor | None = None
    loss_before: Tensor | None = None
    damp_percent: float | None = None
    damp_escalations: int = 0
    dead_columns: int = 0
    latent: Tensor | None = None

    def to(self, device: torch.device | str) -> Solution:
        """Return the same with its tensors on `device`."""
        return self._each(lambda part: part.to(device), self.weight.to(device))

    def refined(self) -> float | None:
        """Return what refinement left of the loss; None where nothing was refined, or nothing lost."""
        if self.loss is None or self.loss_before is None or not float(self.loss_before.sum()):
            return None
        return round(float(self.loss.sum() / self.loss_before.sum()), 4)

    def rows(self, part: slice) -> Solution:
        """Return some rows."""
        return self._each(lambda tensor: tensor[part].clone(), self.weight.rows(part))

    def _each(self, change: Callable[[Tensor], Tensor], weight: QuantizedWeight) -> Solution:
        tensors = {name: getattr(self, name) for name in ("loss", "loss_before", "latent")}
        changed: dict[str, Any] = {name: None if each is None else change(each) for name, each in tensors.items()}
        return replace(self, weight=weight, **changed)


if TYPE_CHECKING:
    Solve: TypeAlias = Callable[[Tensor, Moments | None, Any, Snap], Solution]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How weights are solved.

    Attributes:
        solve: (weight, moments, config, snap) -> solution. weight is W, (out, in) in any float dtype; it and the
            moments, None without calibration, are not modified. config is a QuantizeConfig; snap is what the file can
            hold.
        needs: "hessian" where it cannot do without calibration, "cross" where it compares with the float model, and
            "drift" where it also compares what outputs are added to.
    """

    solve: Solve
    needs: frozenset[str] = frozenset()


def needs_calibration(config: Any) -> str:
    """Return which setting of a QuantizeConfig can do nothing without calibration text; empty where none is."""
    if find_method(config.method).needs:
        return f"method {config.method!r}"
    settings = ("target_bits", "target_size", "learn_iterations", "tune_epochs")
    return next((name for name in settings if getattr(config, name)), "")


def needs_cross(config: Any) -> bool:
    """Whether they ask for C, which pairs what a Linear receives with what it receives in the float model."""
    return "cross" in find_method(config.method).needs


def needs_drift(config: Any) -> bool:
    """Whether they ask for D, which pairs what a Linear's outputs are added to with the same in the float model."""
    return "drift" in find_method(config.method).needs


def pairs_models(config: Any) -> bool:
    """Whether they compare the quantized model's hidden states with the float model's."""
    return needs_cross(config) or config.learn_iterations > 0


def find_method(name: str) -> Method:
    """Return the method called `name`, one of `METHODS`."""
    return cast(Method, resolve_name(f"gptqkit.{METHODS[name]}"))
