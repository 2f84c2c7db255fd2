"""How far a client's answer about a checkpoint is from our own reading of it, and how far it may be.

- The weights that a client decodes equal ours in every bit (both rounded once to float16).
- Logits with float32 activations agree to FLOAT32_BOUND: only the order of summation may differ.
- Logits and log-probabilities in a client's float16 arithmetic lie no further from our float32 ones than HALF_FACTOR
  times our own float16 arithmetic does; kernels that work in bfloat16 get eight times that (three bits fewer).
- Perplexities agree to PERPLEXITY_BOUND, relative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import gptqkit

# Logits reach 18, where neighbouring float32 numbers are 2e-6 apart; a control shows what one changed code does.
FLOAT32_BOUND = 1e-4
HALF_FACTOR = 2.0
BFLOAT16_FACTOR = 8 * HALF_FACTOR
PERPLEXITY_BOUND = 1e-3


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What we read: weights rounded to float16, logits in float32 and float16 arithmetic (None where not wanted)."""

    weights: dict[str, Tensor]
    logits: Tensor | None
    logits_float16: Tensor | None


@dataclass
class Agreement:
    """Differences found so far, as text, and whether all lie within their bounds."""

    findings: list[str] = field(default_factory=list)
    holds: bool = True

    def note(self, what: str, value: float, bound: float) -> None:
        within = value <= bound
        self.holds &= within
        self.findings.append(f"{what} {value:.1e}" + ("" if within else f" (more than {bound:.1e})"))


def read(path: Path, input_ids: Tensor | None = None) -> Reading:
    """Our own reading of a checkpoint; without `input_ids` only of its weights."""
    checkpoint = gptqkit.open_checkpoint(path)
    weights = {name: checkpoint.weight(name).dequantize(torch.float16) for name in checkpoint.layers}
    if input_ids is None:
        return Reading(weights=weights, logits=None, logits_float16=None)
    return Reading(
        weights=weights,
        logits=logits(path, input_ids, torch.float32),
        logits_float16=logits(path, input_ids, torch.float16),
    )


def logits(path: Path, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
    model, _ = gptqkit.load(path, device="cpu", backend="torch", dtype=dtype)
    with torch.inference_mode():
        return model(input_ids).logits.float()


def compare(answer: Mapping[str, Tensor], reading: Reading, input_ids: Tensor, factor: float) -> Agreement:
    """How far a client's answer is from our reading; its arithmetic may be `factor` times as far off as our float16."""
    agreement = Agreement()
    theirs = {key.removeprefix("weight."): value for key, value in answer.items() if key.startswith("weight.")}
    if theirs:
        same = sum(name in theirs and torch.equal(theirs[name], weight) for name, weight in reading.weights.items())
        agreement.holds &= same == len(reading.weights) == len(theirs)
        agreement.findings.append(f"{same} of {len(reading.weights)} weights equal")
    if reading.logits is None or reading.logits_float16 is None:
        agreement.holds &= bool(theirs)
        return agreement
    ours, half = of_tokens(reading.logits, input_ids), of_tokens(reading.logits_float16, input_ids)
    if "logits_float32" in answer:
        agreement.note("float32 logits", distance(answer["logits_float32"], reading.logits), FLOAT32_BOUND)
    if "logits" in answer:
        bound = factor * distance(reading.logits_float16, reading.logits)
        agreement.note("logits", distance(answer["logits"], reading.logits), bound)
    logprobs = answer["logprobs"] if "logprobs" in answer else of_tokens(answer["logits"], input_ids)
    agreement.note("logprobs", distance(logprobs, ours), factor * distance(half, ours))
    relative = (perplexity(logprobs) / perplexity(ours) - 1).abs().item()
    agreement.note("perplexity", relative, PERPLEXITY_BOUND)
    return agreement


def distance(left: Tensor, right: Tensor) -> float:
    return (left.float() - right.float()).abs().max().item()


def of_tokens(values: Tensor, input_ids: Tensor) -> Tensor:
    """The log-probability of every token after the first, (windows, length - 1), from the logits."""
    return values[:, :-1].float().log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


def perplexity(logprobs: Tensor) -> Tensor:
    return logprobs.double().mean().neg().exp()
