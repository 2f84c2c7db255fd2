"""What a quantization did to every module, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import CheckpointError, ConfigError
from .quantizer.config import QuantizeConfig
from .settings import Plain


@dataclass(frozen=True, kw_only=True)
class ModuleReport:
    """What happened to one module.

    Attributes:
        name: Full name.
        layer: Number of its block, in the order in which they run: those of an encoder, then those of its decoder; None
            outside the blocks.
        shape: (out, in).
        bits: Bits per weight.
        group_size: Columns per group.
        error: ||(W - Q) X|| / ||W X|| on the calibration inputs of the quantized model, with `two_sided` in a norm by
            what outputs change of predictions, where that could be measured; None without calibration.
        rounding_error: The same for plain rounding to min-max grids.
        worse_than_rounding: Whether `error` exceeds `rounding_error`.
        refined: What the refinement after the sweep left of the solver's squared error, as a share of 4 digits; None
            without one.
        damp_percent: What was added to diag H in the end, on average, as a share of its mean.
        damp_escalations: How often damping had to grow.
        dead_columns: Columns whose inputs were always zero.
        seconds: Time of the solver.
        method: The method that solved it: "gptq" instead of what was asked for where an expert's inputs have no pairs
            in the float model.
        tokens: Calibration tokens that reached it; None without calibration.
        prior_tokens: Tokens' worth of what all experts of the layer received, that filled up its statistics: an expert
            that few tokens are routed to is not left to these alone.
    """

    name: str
    layer: int | None
    shape: tuple[int, int]
    bits: int
    group_size: int
    error: float | None
    rounding_error: float | None
    worse_than_rounding: bool
    damp_percent: float | None
    damp_escalations: int
    dead_columns: int
    seconds: float
    method: str
    tokens: int | None = None
    prior_tokens: int = 0
    refined: float | None = None


@dataclass(frozen=True, kw_only=True)
class BlockReport:
    """What learned rounding did to one block.

    Attributes:
        layer: Number of the block.
        error: ||B(x) - B~(x~)|| / ||B~(x~)|| on the samples kept aside, of the block B on the quantized model's hidden
            states and its float twin B~ on the float model's; the norm weighs what changes predictions (see `fisher`).
        error_before: The same of what learning began with.
        codes_changed: Share of the codes that are others now.
    """

    layer: int
    error: float
    error_before: float
    codes_changed: float


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """What tuning the scales of the whole model did.

    Attributes:
        divergence: KL(float model || quantized model) in nats per token, on the samples kept aside.
        divergence_before: The same before; equal where nothing better was found, and nothing changed.
    """

    divergence: float
    divergence_before: float


@dataclass(frozen=True, kw_only=True)
class QuantizationReport(Plain):
    """A quantization as a whole.

    Attributes:
        model: Name of the model, without local folders.
        config: The settings.
        samples: Calibration samples given.
        sequence_length: Tokens per sample.
        seed: Seed that chose the samples.
        calibration: The fields of `Calibration` that were asked for, but for defaults, its source by name; empty
            without calibration.
        tokens: Calibration tokens that counted (no padding, no excluded samples).
        excluded_samples: Samples left out for non-finite activations.
        batch_size: Samples per forward pass in the end: what was asked for, or less where memory ran out.
        block_weights: Weights in matrices (and fused experts) of the repeated blocks.
        quantized_weights: Those among them that were quantized; the rest stays in floating point.
        device: Type of device that did the work.
        seconds: Time of the job, from when its samples were drawn until the last module was solved; of one that was
            interrupted, without the blocks that were begun and not finished.
        versions: Versions of the packages that took part.
        digests: What tells the model from others: digests of its config and, in part, of its weights.
        left_in_float: Linears that could not be quantized, and why.
        modules: One entry per quantized module, in the order in which they were solved.
        blocks: One entry per block whose rounding was learned; `error` of its modules is that of before.
        tuning: What tuning the scales did; None where that was not asked for.
        perplexity: What was measured on the finished checkpoint: one row per text, with its name and the scores.
    """

    model: str
    config: QuantizeConfig = field(repr=False)
    samples: int
    sequence_length: int
    seed: int
    tokens: int
    excluded_samples: int
    batch_size: int
    block_weights: int
    quantized_weights: int
    device: str
    seconds: float
    versions: dict[str, str] = field(repr=False)
    calibration: dict[str, Any] = field(default_factory=dict, repr=False)
    digests: dict[str, str] = field(default_factory=dict, repr=False)
    left_in_float: dict[str, str] = field(default_factory=dict, repr=False)
    modules: list[ModuleReport] = field(default_factory=list, repr=False)
    blocks: list[BlockReport] = field(default_factory=list, repr=False)
    tuning: TuningReport | None = None
    perplexity: list[dict[str, Any]] = field(default_factory=list, repr=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationReport:
        """Return the report that a checkpoint carries; the times, which it does not carry, are 0.

        Raises:
            CheckpointError: Values that are no report.
        """
        try:
            rows = [{"seconds": 0.0, **row, "shape": tuple(row["shape"])} for row in values["modules"]]
            its = {
                "config": QuantizeConfig.from_dict(values["config"]),
                "modules": [ModuleReport(**row) for row in rows],
                "tuning": TuningReport(**values["tuning"]) if values.get("tuning") else None,
                "blocks": [BlockReport(**row) for row in values.get("blocks", [])],
            }
            return cls(**{"seconds": 0.0, **values, **its})
        except (ConfigError, KeyError, TypeError) as error:
            raise CheckpointError(f"quantization_report.json is damaged, or of another version: {error!r}") from error
