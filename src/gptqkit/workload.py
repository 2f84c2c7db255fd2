"""What a run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from .calibration.activations import Place
from .quantizer.config import QuantizeConfig
from .quantizer.walk import STATISTICS_BYTES

LARGEST_BATCH = 8  # samples per forward pass, unless told otherwise


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The settings of a run that decide what it needs.

    Attributes:
        config: Settings of the quantization.
        sequence_length: Tokens per sample.
        device: Where blocks run and solvers work.
        samples: Calibration samples; 0 for none, as only plain rounding can do.
        batch_size: Samples per forward pass; None for what fits.
        activations: Where hidden states are kept between blocks; "auto" for the fastest place where they fit.
        activation_memory: Bytes of RAM that "auto" may give to hidden states; None for half of what is free.
        statistics_bytes: How much the statistics of one pass may take, as long as those of one stage fit.
        processes: How many share the samples.
        begun: Whether the job goes on where it stopped: what shows in its result is decided.
        writes: Whether a checkpoint is written; without, everything stays in RAM.
        evaluate_on: The text whose perplexity is measured at the end; None for none.
    """

    config: QuantizeConfig
    sequence_length: int
    device: torch.device
    samples: int = 128
    batch_size: int | None = None
    activations: Literal["auto"] | Place = "auto"
    activation_memory: int | None = None
    statistics_bytes: int = STATISTICS_BYTES
    processes: int = 1
    begun: bool = False
    writes: bool = True
    evaluate_on: str | Path | None = None

    @property
    def streams(self) -> int:
        """How many kinds of hidden states there are: for GPTAQ the float model's too."""
        return 0 if not self.samples else 2 if self.config.method == "gptaq" else 1

    @property
    def share(self) -> int:
        """Samples of the process that has most: whole batches."""
        batch = self.batch_size or 1
        batches = -(-self.samples // batch)
        return min(self.samples, -(-batches // self.processes) * batch)
