"""Modules solved, remembered and reported."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..calibration.activations import HiddenStates
from ..calibration.batches import CalibrationBatches
from ..calibration.statistics import InputStatistics
from ..errors import GptqkitError
from ..progress import Progress, ProgressCallback, silent
from .config import Method, QuantizeConfig
from .journal import Journal, Resumed, Step
from .modules import Target
from .quantized import QuantizedWeight
from .ranks import Ranks
from .report import ModuleReport
from .sharing import Solved, solve_shared
from .solver import Solution, output_power, solve_gptaq, solve_gptq, solve_rtn


@dataclass(frozen=True, eq=False)
class WalkResult:
    """Everything that a walk decided.

    Attributes:
        weights: The quantized weight of every target, by full module name, on the CPU; empty where a journal took them.
        reports: One per target, in the order in which they were solved.
        excluded_samples: Samples left out for non-finite activations.
        tokens: Tokens that counted at the end of the walk.
        block_weights: Weights in the blocks' tensors of two and more dimensions.
        quantized_weights: Those among them that were quantized.
        batch_size: Samples per forward pass in the end: what was asked for, or less where memory ran out.
    """

    weights: dict[str, QuantizedWeight]
    reports: list[ModuleReport]
    excluded_samples: int
    tokens: int
    block_weights: int
    quantized_weights: int
    batch_size: int


class Solving:
    """What has been decided so far, and the solver that the settings name.

    Args:
        config: The settings.
        ranks: The processes that solve together.
        progress: Called once per module, on rank 0.
        total: Modules in all.
        journal: Takes finished parts.
        resumed: Where an earlier walk stopped.
    """

    def __init__(
        self,
        config: QuantizeConfig,
        ranks: Ranks,
        progress: ProgressCallback,
        total: int,
        journal: Journal | None,
        resumed: Resumed | None,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.journal = journal
        self.weights: dict[str, QuantizedWeight] = {}
        self.places: dict[str, tuple[str, int | None]] = {}
        self.reports: list[ModuleReport] = list(resumed.reports) if resumed is not None else []
        self._kept = len(self.reports)
        self._progress = progress if ranks.rank == 0 else silent
        self._total = total

    def finish(
        self,
        layer: int | None,
        batches: CalibrationBatches | None = None,
        hidden: HiddenStates | None = None,
        hidden_float: HiddenStates | None = None,
    ) -> None:
        """Hand what was solved since the last call to the journal, where there is one, and forget the weights."""
        if batches is not None:  # go on like the rank that has least memory, so that a resumed job does the same
            batches.batch_size = min(self.ranks.gather(batches.batch_size))
        if self.journal is None:
            return
        step = Step(
            layer=layer,
            weights=self.weights,
            places=self.places,
            reports=self.reports[self._kept :],
            hidden=hidden,
            hidden_float=hidden_float,
            counts=batches.counts if batches is not None else torch.ones(0, dtype=torch.bool),
            batch_size=batches.batch_size if batches is not None else 1,
        )
        self.journal.keep(step)
        self.weights, self.places, self._kept = {}, {}, len(self.reports)

    def gather(
        self, batches: CalibrationBatches, statistics: list[InputStatistics], layer: int | None, module: str
    ) -> None:
        """Bring together what all ranks found out about the inputs of some modules, of which `module` is the first."""
        self.ranks.add_up(*statistics)
        if self.config.skip_nonfinite:
            batches.settle(self.ranks.gather(batches.counts), layer=layer, module=module)

    def solve(
        self,
        targets: list[Target],
        layer: int | None,
        statistics: Sequence[InputStatistics | None],
        pool: InputStatistics | None,
    ) -> None:
        """Solve modules, remember and report the results; experts' statistics are filled up with those of the pool."""

        def solve(index: int, rows: slice) -> Solved:
            target, sums = targets[index], statistics[index]
            if sums is not None and pool is not None:
                sums = sums.filled_up(pool)
            weight = target.weight.detach()[rows].to(self.ranks.device, torch.float32)
            start = time.perf_counter()
            try:
                hessian = sums.hessian() if sums is not None else None
                solution = self._solution(weight, hessian, sums, target.config)
            except GptqkitError as problem:
                raise type(problem)(f"{target.name}: {problem}") from problem
            seconds = time.perf_counter() - start
            if hessian is None:
                return Solved(solution=solution, sums=(seconds,))
            plain = solve_rtn(weight, target.config.plain_rounding())
            powers = error_powers(weight, (solution.weight, plain.weight), hessian)
            return Solved(solution=solution, sums=(seconds, *powers))

        shapes = [(target.weight.shape[0], target.weight.shape[1]) for target in targets]
        solved = solve_shared(self.ranks, shapes, solve)
        for target, shape, sums, one in zip(targets, shapes, statistics, solved, strict=True):
            self.weights[target.name] = one.solution.weight.to("cpu")
            self.places[target.name] = (target.parameter, target.expert)
            self._report(target, layer, shape, sums, pool, one)

    def replace(self, targets: Iterable[Target]) -> None:
        """Put the solutions in the places of the modules' weights."""
        for target in targets:
            target.replace_weight(self.weights[target.name].to(target.weight.device).dequantize())

    def _report(
        self,
        target: Target,
        layer: int | None,
        shape: tuple[int, int],
        statistics: InputStatistics | None,
        pool: InputStatistics | None,
        solved: Solved,
    ) -> None:
        solution, (seconds, *powers) = solved.solution, solved.sums
        error, rounding_error = None, None
        if powers:
            whole, lost, lost_by_rounding = powers
            error, rounding_error = (math.sqrt(part / whole) if whole > 0 else 0.0 for part in (lost, lost_by_rounding))
        self.reports.append(
            ModuleReport(
                name=target.name,
                layer=layer,
                shape=shape,
                bits=target.config.bits,
                group_size=solution.weight.group_size,
                error=error,
                rounding_error=rounding_error,
                worse_than_rounding=error is not None and rounding_error is not None and error > rounding_error,
                damp=solution.damp,
                damp_escalations=solution.damp_escalations,
                dead_columns=solution.dead_columns,
                seconds=seconds,
                method=self._method(target.config, statistics),
                tokens=None if statistics is None else statistics.tokens,
                prior_tokens=0 if statistics is None or pool is None else max(0, shape[1] - statistics.tokens),
            )
        )
        self._progress(
            Progress(
                stage="quantize",
                done=len(self.reports),
                total=self._total,
                layer=layer,
                module=target.name,
                error=error,
                rounding_error=rounding_error,
            )
        )

    def result(self, blocks: nn.Module, *, excluded_samples: int, tokens: int, batch_size: int) -> WalkResult:
        """Everything that was decided, and how much of `blocks` it covers."""
        shapes = [report.shape for report in self.reports if report.layer is not None]
        return WalkResult(
            weights=self.weights,
            reports=self.reports,
            excluded_samples=excluded_samples,
            tokens=tokens,
            block_weights=sum(tensor.numel() for tensor in blocks.parameters() if tensor.dim() >= 2),
            quantized_weights=sum(rows * columns for rows, columns in shapes),
            batch_size=batch_size,
        )

    def _solution(
        self, weight: Tensor, hessian: Tensor | None, statistics: InputStatistics | None, config: QuantizeConfig
    ) -> Solution:
        method = self._method(config, statistics)
        if method == "rtn" or hessian is None or statistics is None:
            return solve_rtn(weight, config, hessian)
        cross = statistics.cross()
        if method == "gptaq" and cross is not None:
            return solve_gptaq(weight, hessian, cross, config)
        return solve_gptq(weight, hessian, config)

    @staticmethod
    def _method(config: QuantizeConfig, statistics: InputStatistics | None) -> Method:
        """The method that the statistics allow: GPTAQ needs pairs of inputs, which some experts do not have."""
        return (
            "gptq" if config.method == "gptaq" and statistics is not None and not statistics.paired else config.method
        )


def error_powers(weight: Tensor, candidates: Iterable[QuantizedWeight], hessian: Tensor) -> list[float]:
    """||W X||^2, then ||(W - Q) X||^2 of every candidate Q, per token: sums over the rows of W.

    Args:
        weight: W, (out, in) float32.
        candidates: Quantized weights of the same shape.
        hessian: H = mean over tokens of x xT, (in, in) float32, not damped.
    """
    whole = output_power(weight, hessian)
    return [whole, *(output_power(weight - candidate.dequantize(), hessian) for candidate in candidates)]
