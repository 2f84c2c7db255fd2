"""The walk through a model: block by block, each module solved on what the quantized model feeds it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibration.activations import HiddenStates, Place
from ..calibration.batches import CalibrationBatches
from ..calibration.hessian import InputStatistics
from ..calibration.windows import TokenWindows
from ..errors import ArchitectureError, GptqkitError
from ..progress import Progress, ProgressCallback, silent
from .config import QuantizeConfig
from .journal import Journal, Resumed, Step
from .modules import Target, check_overrides, find_blocks, find_head, find_targets
from .quantized import QuantizedWeight
from .ranks import Ranks
from .report import ModuleReport
from .sharing import Solved, solve_shared
from .solver import Solution, output_power, solve_gptaq, solve_gptq, solve_rtn
from .stream import BlockStream, float_copy
from .weights import InMemory, Weights


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


@torch.no_grad()
def quantize_blocks(
    model: PreTrainedModel,
    windows: TokenWindows | None,
    config: QuantizeConfig,
    *,
    device: torch.device,
    batch_size: int = 8,
    weights: Weights | None = None,
    journal: Journal | None = None,
    activations: Place = "memory",
    ranks: Ranks | None = None,
    progress: ProgressCallback = silent,
) -> WalkResult:
    """Quantize every matrix in the repeated blocks of `model`, and its output layer where asked.

    The model comes back as it was: weights are replaced in working copies only, one block at a time. On a CPU the
    blocks run in float32, on a GPU in the model's own dtype; statistics and solvers always work in float32 (or
    float64).

    Args:
        model: A transformers model in eval mode; its weights may be on the meta device where `weights` brings them.
        windows: Calibration tokens; None only for plain rounding, which then reports no errors.
        config: All settings.
        device: Where blocks run and solvers work.
        batch_size: Samples per forward pass.
        weights: Brings the weights of each block; by default the model has them.
        journal: Takes every block as it is finished, and resumes.
        activations: Where hidden states are kept between blocks: "device", "memory" or, with a journal, "disk".
        ranks: The processes that share the work; all call this with equal arguments, and all get the result.
        progress: Called once per module.

    Raises:
        ArchitectureError: No blocks, or modules that are never called.
        ConfigError: A module that the settings do not fit, or an override that fits none; raised before any work.
        NonFiniteError: Non-finite activations, unless `skip_nonfinite`.
        SingularHessianError: A module that cannot be solved, by name.
    """
    prefix, blocks = find_blocks(model)
    check_overrides(model, config)
    targets = [find_targets(block, f"{prefix}.{layer}", config) for layer, block in enumerate(blocks)]
    head = find_head(model, config)
    total = sum(len(of_block) for of_block in targets) + (head is not None)
    if total == 0:
        raise ArchitectureError("the overrides leave no module to quantize")
    weights, ranks = weights or InMemory(model), ranks or Ranks.alone(device)
    resumed = journal.resumed() if journal is not None else None
    walk = _Walk(config, ranks, progress, total, journal, resumed)
    first = resumed.layers if resumed is not None else 0
    if windows is None:
        for layer in range(first, len(blocks)):
            with weights.block(layer, torch.device("cpu"), torch.float32):
                walk.solve(targets[layer], layer, [None] * len(targets[layer]))
                walk.finish(layer)
        if head is not None and not (resumed and resumed.head):
            with weights.head(torch.device("cpu"), torch.float32):
                walk.solve([head], None, [None])
                walk.finish(None)
        return walk.result(blocks, excluded_samples=0, tokens=0, batch_size=batch_size)

    batches = CalibrationBatches(windows, batch_size, device)
    batches.samples = ranks.share(len(windows.input_ids), batch_size)
    if resumed is not None:
        batches.counts, batches.batch_size = resumed.counts, resumed.batch_size
    stream = BlockStream(model, blocks)
    dtype = torch.float32 if device.type == "cpu" else next(model.parameters()).dtype
    if first < len(blocks) or (head is not None and not (resumed and resumed.head)):
        with weights.outside(device, dtype):
            states = _States(stream, batches, walk, dtype, activations, resumed)
            for layer in range(first, len(blocks)):
                with weights.block(layer, device, dtype):
                    original = float_copy(blocks[layer]) if states.float is not None and targets[layer] else None
                    _quantize_block(walk, states, layer, blocks[layer], original, targets[layer])
                    if layer + 1 < len(blocks) or head is not None:
                        states.advance(layer, original)
                    last = layer + 1 == len(blocks) and head is None
                    walk.finish(layer, batches, None if last else states)
            if head is not None:
                with weights.head(device, dtype):
                    _quantize_head(walk, states, head)
                    walk.finish(None, batches)
    return walk.result(blocks, excluded_samples=batches.excluded, tokens=batches.tokens, batch_size=batches.batch_size)


class _States:
    """The hidden states that enter the next block, in the quantized model and, for GPTAQ, in the float model."""

    def __init__(
        self,
        stream: BlockStream,
        batches: CalibrationBatches,
        walk: _Walk,
        dtype: torch.dtype,
        place: Place,
        resumed: Resumed | None,
    ) -> None:
        self.stream, self.batches, self._walk = stream, batches, walk
        paired = walk.config.method == "gptaq"
        first = 0 if resumed is None else resumed.layers

        def new(name: str, shape: tuple[int, ...]) -> HiddenStates:
            return HiddenStates(batches.samples, shape, dtype, batches.device, place, self._file(name, first))

        if resumed is not None and resumed.hidden is not None:
            self.quantized = new("hidden", resumed.shape)
            self.quantized.load(resumed.hidden)
            self.float = new("float", resumed.shape) if resumed.hidden_float is not None else None
            if self.float is not None and resumed.hidden_float is not None:
                self.float.load(resumed.hidden_float)
            return
        shape = tuple(stream.embed(batches[range(1)]).shape[1:])
        self.quantized = new("hidden", shape)
        self.float = new("float", shape) if paired else None

        def use(samples: range, states: Tensor) -> None:
            self.quantized.write(samples, states)
            if self.float is not None:
                self.float.write(samples, states)

        batches.each(lambda samples: stream.embed(batches[samples]), use)

    def stages(self, layer: int, modules: Mapping[str, nn.Module]) -> list[list[str]]:
        """Names of modules of a block in the order in which it calls them, those that share an input together."""
        found: list[list[str]] = []
        if self.batches.samples:  # the others learn it from those that have samples
            sample = range(self.batches.samples.start, self.batches.samples.start + 1)
            found = self.stream.stages(layer, self.batches[sample], self.quantized.read(sample), modules)
        return next(filter(None, self._walk.ranks.gather(found)))

    def advance(self, layer: int, original: nn.Module | None) -> None:
        """Let block `layer` take the states to the next: quantized, and as it was (`original`) for the float model."""
        self.quantized = self._through(layer, self.quantized, "hidden", None)
        if self.float is not None:
            self.float = self._through(layer, self.float, "float", original)

    def _through(self, layer: int, states: HiddenStates, name: str, block: nn.Module | None) -> HiddenStates:
        after = states.successor(self._file(name, layer + 1))
        self.batches.each(
            lambda samples: self.stream.run(layer, self.batches[samples], states.read(samples), block), after.write
        )
        return after

    def _file(self, name: str, layer: int) -> Path | None:
        journal = self._walk.journal
        return journal.file(name, layer) if journal is not None else None


def _quantize_block(
    walk: _Walk,
    states: _States,
    layer: int,
    block: nn.Module,
    original: nn.Module | None,
    targets: list[Target],
) -> None:
    """Solve the targets of one block, stage by stage: a stage is the modules that share one input."""
    if not targets:
        return
    stream, batches = states.stream, states.batches
    by_name = {target.name: target for target in targets}
    modules = {target.name: target.module for target in targets}
    stages = states.stages(layer, modules)
    twins = dict(zip(block.modules(), original.modules(), strict=True)) if original is not None else {}
    for group in [[stage] for stage in stages] if walk.config.true_sequential else [stages]:
        leaders = [modules[stage[0]] for stage in group]
        statistics = [
            InputStatistics(by_name[stage[0]].weight.shape[1], batches.device, cross=original is not None)
            for stage in group
        ]

        def run(samples: range, leaders: list[nn.Module] = leaders) -> list[tuple[Tensor, Tensor | None]]:
            received = stream.tap(layer, batches[samples], states.quantized.read(samples), leaders)
            in_float: list[Tensor] | list[None] = [None] * len(leaders)
            if states.float is not None:
                twin_leaders = [twins[leader] for leader in leaders]
                in_float = stream.tap(layer, batches[samples], states.float.read(samples), twin_leaders, original)
            return list(zip(received, in_float, strict=True))

        def use(
            samples: range,
            inputs: list[tuple[Tensor, Tensor | None]],
            group: list[list[str]] = group,
            statistics: list[InputStatistics] = statistics,
        ) -> None:
            for stage, sums, (x, x_float) in zip(group, statistics, inputs, strict=True):
                batches.add(sums, samples, x, x_float, layer=layer, module=stage[0], skip=walk.config.skip_nonfinite)

        batches.each(run, use)
        walk.gather(batches, statistics, layer, group[0][0])
        names = [(name, sums) for stage, sums in zip(group, statistics, strict=True) for name in stage]
        walk.solve([by_name[name] for name, _ in names], layer, [sums for _, sums in names])


def _quantize_head(walk: _Walk, states: _States, head: Target) -> None:
    stream, batches = states.stream, states.batches
    sums = InputStatistics(head.weight.shape[1], batches.device, cross=states.float is not None)

    def run(samples: range) -> tuple[Tensor, Tensor | None]:
        received = stream.tap_head(batches[samples], states.quantized.read(samples), head.module)
        if states.float is None:
            return received, None
        return received, stream.tap_head(batches[samples], states.float.read(samples), head.module)

    def use(samples: range, inputs: tuple[Tensor, Tensor | None]) -> None:
        batches.add(sums, samples, *inputs, layer=None, module=head.name, skip=walk.config.skip_nonfinite)

    batches.each(run, use)
    walk.gather(batches, [sums], None, head.name)
    walk.solve([head], None, [sums])


class _Walk:
    """What has been decided so far, and the solver that the settings name."""

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
        self.reports: list[ModuleReport] = list(resumed.reports) if resumed is not None else []
        self._kept = len(self.reports)
        self._progress = progress if ranks.rank == 0 else silent
        self._total = total

    def finish(
        self, layer: int | None, batches: CalibrationBatches | None = None, states: _States | None = None
    ) -> None:
        """Hand what was solved since the last call to the journal, where there is one, and forget the weights."""
        if batches is not None:  # go on like the rank that has least memory, so that a resumed job does the same
            batches.batch_size = min(self.ranks.gather(batches.batch_size))
        if self.journal is None:
            return
        step = Step(
            layer=layer,
            weights=self.weights,
            reports=self.reports[self._kept :],
            hidden=states.quantized if states is not None else None,
            hidden_float=states.float if states is not None else None,
            counts=batches.counts if batches is not None else torch.ones(0, dtype=torch.bool),
            batch_size=batches.batch_size if batches is not None else 1,
        )
        self.journal.keep(step)
        self.weights, self._kept = {}, len(self.reports)

    def gather(
        self, batches: CalibrationBatches, statistics: list[InputStatistics], layer: int | None, module: str
    ) -> None:
        """Bring together what all ranks found out about the inputs of some modules, of which `module` is the first."""
        self.ranks.add_up(*statistics)
        if self.config.skip_nonfinite:
            batches.settle(self.ranks.gather(batches.counts), layer=layer, module=module)

    def solve(self, targets: list[Target], layer: int | None, statistics: Sequence[InputStatistics | None]) -> None:
        """Solve modules, put the results in the places of their weights, remember and report them."""

        def solve(index: int, rows: slice) -> Solved:
            target, sums = targets[index], statistics[index]
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
        for target, shape, one in zip(targets, shapes, solved, strict=True):
            self._report(target, layer, shape, one)
            target.replace_weight(one.solution.weight.dequantize())

    def _report(self, target: Target, layer: int | None, shape: tuple[int, int], solved: Solved) -> None:
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
            )
        )
        self.weights[target.name] = solution.weight.to("cpu")
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

    @staticmethod
    def _solution(
        weight: Tensor, hessian: Tensor | None, statistics: InputStatistics | None, config: QuantizeConfig
    ) -> Solution:
        if config.method == "rtn" or hessian is None or statistics is None:
            return solve_rtn(weight, config, hessian)
        cross = statistics.cross()
        if config.method == "gptaq" and cross is not None:
            return solve_gptaq(weight, hessian, cross, config)
        return solve_gptq(weight, hessian, config)


def error_powers(weight: Tensor, candidates: Iterable[QuantizedWeight], hessian: Tensor) -> list[float]:
    """||W X||^2, then ||(W - Q) X||^2 of every candidate Q, per token: sums over the rows of W.

    Args:
        weight: W, (out, in) float32.
        candidates: Quantized weights of the same shape.
        hessian: H = mean over tokens of x xT, (in, in) float32, not damped.
    """
    whole = output_power(weight, hessian)
    return [whole, *(output_power(weight - candidate.dequantize(), hessian) for candidate in candidates)]
