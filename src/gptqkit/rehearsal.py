"""The walk through one block by shapes alone: its own code on the meta device, where only the solver is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .calibration.batches import CalibrationBatches
from .calibration.hessian import InputStatistics
from .calibration.windows import TokenWindows
from .footprint import Footprint, dry_run
from .matrices import solver_bytes
from .progress import silent
from .quantizer.block import quantize_block, quantize_head
from .quantizer.config import QuantizeConfig
from .quantizer.modules import Target
from .quantizer.ranks import Ranks
from .quantizer.solving import Solving
from .quantizer.states import States
from .quantizer.stream import BlockStream, float_copy

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The most that is held at a time during a forward pass or the solving of a module, weights and input aside; bytes.

    Attributes:
        solved: The module that is solved; None in a forward pass.
        statistics: Sums over what modules receive.
        fixed: All else, whatever the number of samples in a pass.
        sample: And for each of them.
    """

    solved: str | None
    statistics: int
    fixed: int
    sample: int


def rehearse(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    layer: int | None,
    targets: Sequence[Target],
    config: QuantizeConfig,
    *,
    length: int,
    samples: int,
    statistics_bytes: int,
) -> tuple[int, list[Phase]]:
    """Bytes of one sample's hidden states, and the phases of the work on one block or on the output layer.

    Args:
        model: On the meta device, in the dtype in which it works.
        blocks: Its blocks.
        layer: Number of the block; None for the output layer.
        targets: What is quantized in it.
        config: All settings.
        length: Tokens per sample.
        samples: As many as go through at once, at the most: in between, what is held is taken to lie on a line, or
            below it where the height moves from one moment to another. 2 at least.
        statistics_bytes: See `quantize_block`.

    Raises:
        ArchitectureError, RuntimeError: Shapes that depend on numbers, or operators without a meta kernel.
    """
    dtype = next(model.parameters()).dtype
    experts = 1 + max((target.expert or 0 for target in targets), default=0)
    heights = []
    for count in (1, samples):
        batches = _Batches(TokenWindows(torch.zeros(count, length, dtype=torch.int64)), count, _META)
        with dry_run(experts) as footprint:
            states = States(
                BlockStream(model, blocks),
                batches,
                Ranks.alone(_META),
                None,
                dtype,
                "device",
                None,
                paired=config.method == "gptaq",
            )
            original = None if layer is None or states.float is None or not targets else float_copy(blocks[layer])
            solving = _Solving(config, footprint)
            if layer is None:
                quantize_head(solving, states, targets[0])
            else:
                quantize_block(solving, states, layer, blocks[layer], original, list(targets), statistics_bytes)
                states.advance(layer, original)
                solving.passed(statistics=0)
        heights.append(solving.phases)
    phases = []
    for one, most in zip(*heights, strict=True):
        slope = (most.fixed - one.fixed) // (samples - 1)
        phases.append(replace(one, fixed=most.fixed - slope * samples, sample=slope))
    return states.quantized.sample_bytes, phases


def solver_phase(targets: Sequence[Target], statistics: int, *, calibrated: bool) -> Phase:
    """The solving of that one of `targets` which takes most."""
    sizes = {target.name: solver_bytes(target, calibrated=calibrated) for target in targets}
    solved = max(sizes, key=lambda name: sizes[name])
    return Phase(solved=solved, statistics=statistics, fixed=sizes[solved], sample=0)


class _Batches(CalibrationBatches):
    def add(
        self,
        statistics: Sequence[InputStatistics],
        samples: range,  # noqa: ARG002
        inputs: Tensor,
        float_inputs: Tensor | None,
        **_: Any,
    ) -> None:
        streams = [stream.flatten(0, -2) for stream in (inputs, float_inputs) if stream is not None]
        for stream in streams:
            torch.isfinite(stream)
        for one in statistics:
            one.update(*streams)


class _Solving(Solving):
    """Notes what is held, and solves nothing.

    Attributes:
        phases: So far, with all samples in `fixed`.
    """

    def __init__(self, config: QuantizeConfig, footprint: Footprint) -> None:
        super().__init__(config, Ranks.alone(_META), silent, 0, None, None)
        self.phases: list[Phase] = []
        self._footprint = footprint
        self._before = footprint.peak = footprint.live

    @property
    def _held(self) -> int:
        return self._footprint.live - self._before

    def passed(self, statistics: int) -> None:
        """A forward pass has ended."""
        held = self._footprint.peak - self._before - statistics
        self.phases.append(Phase(solved=None, statistics=statistics, fixed=held, sample=0))
        self._footprint.peak = self._footprint.live

    def gather(self, *_: Any) -> None:
        self.passed(self._held)

    def solve(
        self,
        targets: list[Target],
        layer: int | None,  # noqa: ARG002
        statistics: Sequence[InputStatistics | None],
        pool: InputStatistics | None,
    ) -> None:
        phase = solver_phase(targets, self._held, calibrated=True)
        if pool is not None:  # statistics are filled up with it: two more sets of sums
            most = max(sum(each.nbytes for each in one.sums) for one in statistics if one is not None)
            phase = replace(phase, fixed=phase.fixed + 2 * most)
        self.phases.append(phase)

    def replace(self, targets: Any) -> None:
        pass
