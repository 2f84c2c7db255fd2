"""Experts that transformers keeps stacked in one parameter, as modules with one Linear per matrix.

transformers' experts interface takes an implementation by name; ours is a loop over experts that multiplies by these
Linears, with the module's own gate. So experts are Linears like any others: captured, solved, written and loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .calibration.capture import routed_tokens
from .export.modules import FUSED

IMPLEMENTATION = "gptqkit"


class Expert(nn.Module):
    """The matrices of one expert: views of the stacks of all, by their names in the module that held these.

    gate_proj and up_proj are the halves of gate_up_proj, also where its rows take turns (gpt-oss): as GPTQModel has it.
    """

    def take(self, stacks: Mapping[str, Tensor], number: int, experts: Any) -> None:
        """Replace the matrices that are in `stacks`; others, such as quantized ones, stay."""
        for name in stacked_names(experts)[:2]:
            if name not in stacks:
                continue
            weight = stacks[name][number].T if experts.is_transposed else stacks[name][number]
            bias = None
            if experts.has_bias:
                own_biases = stacks.get(f"{name}_bias")
                bias = weight.new_empty(len(weight), device="meta") if own_biases is None else own_biases[number]
            parts = FUSED.get(name, (name,))
            biases = [None] * len(parts) if bias is None else bias.chunk(len(parts))
            for own, rows, its in zip(parts, weight.chunk(len(parts)), biases, strict=True):
                self.add_module(own, _linear(rows, its))

    def forward(self, x: Tensor, experts: Any) -> Tensor:
        """Return what this expert makes of its tokens, (tokens, in) -> (tokens, out)."""
        own: dict[str, Any] = self._modules
        inner: Tensor = own["up_proj"](x)
        if experts.has_gate:
            inner = experts._apply_gate(torch.cat([own["gate_proj"](x), inner], -1))
        else:
            inner = experts.act_fn(inner)
        out: Tensor = own["down_proj"](inner)
        return experts.post_expert_norm(out) if experts.has_post_expert_norm else out


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` keeps experts stacked in the way that transformers marks (`use_experts_implementation`).

    Other parameters with three dimensions are used in ways that nobody says, and stay in floating point.
    """
    if not isinstance(getattr(module, "is_transposed", None), bool):
        return False
    up, down = (getattr(module, name, None) for name in stacked_names(module)[:2])
    return all(isinstance(stack, Tensor) and stack.ndim == 3 and stack.is_floating_point() for stack in (up, down))


def stacked_names(experts: Any) -> tuple[str, ...]:
    """Return the names of the parameters that hold what all experts have: up and down projections, then biases."""
    names = ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")
    return (*names, *(f"{name}_bias" for name in names)) if experts.has_bias else names


def find_stacked(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of `model` that keep their experts stacked, by name."""
    for name, module in model.named_modules():
        if is_stacked(module):
            yield name, module


def split_experts(experts: Any, stacks: Mapping[str, Tensor]) -> None:
    """Give a module one `Expert` per expert, whose weights are views of `stacks`, instead of its stacked parameters.

    Experts that are split already take what the stacks hold, which may be some of their matrices.
    """
    for name in stacks:
        experts._parameters.pop(name, None)
    for number in range(len(next(iter(stacks.values())))):
        experts._modules.setdefault(str(number), Expert()).take(stacks, number, experts)
    experts.config._experts_implementation_internal = IMPLEMENTATION


def is_split(module: nn.Module) -> bool:
    """Whether the experts of `module` were split."""
    return isinstance(module._modules.get("0"), Expert)


def run_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, inputs: bool = False
) -> Tensor:
    """Do what transformers' loops over experts do, with the split experts of `self`.

    The weights are those of outputs, or of `inputs`.
    """
    if not is_split(self):  # its experts stayed stacked
        out: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
        return out
    total = torch.zeros_like(hidden_states)
    for number in torch.unique(top_k_index).tolist():
        if number < self.num_experts:  # some routers number "no expert" so
            tokens, slots = routed_tokens(top_k_index, number)
            entering, weights = hidden_states[tokens], top_k_weights[tokens, slots, None]
            expert = self._modules[str(number)]
            own = expert(entering * weights, self) if inputs else expert(entering, self) * weights
            total.index_add_(0, tokens, own.to(total.dtype))
    return total


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)
