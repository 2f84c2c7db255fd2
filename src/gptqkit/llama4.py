"""Llama 4's mixtures of experts, which transformers does not mark, called like those that it marks.

Its own forward pass multiplies every token by every expert at once, with zeros for all experts but the chosen. Here an
expert is given the tokens that chose it, times their weights: the same sums.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from .experts import run_experts


class _Experts(Llama4TextExperts):  # type: ignore[misc]
    is_transposed, has_gate, has_bias, has_post_expert_norm = True, True, False, False  # as transformers marks others

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_experts(self, hidden_states, top_k_index, top_k_weights, inputs=True)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gated: Tensor = up * self.act_fn(gate)
        return gated


class _Mixture(Llama4TextMoe):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(tokens)
        chosen = logits.topk(self.top_k, dim=1).indices
        routed: Tensor = self.experts(tokens, chosen, scores.gather(1, chosen))
        return self.shared_expert(tokens) + routed, logits


def mark_experts(model: PreTrainedModel) -> None:
    """Let the experts of `model` be found and split like those of other models."""
    for module in model.modules():
        if isinstance(module, Llama4TextMoe):
            module.__class__, module.experts.__class__ = _Mixture, _Experts
            module.experts.config = model.config.get_text_config()
