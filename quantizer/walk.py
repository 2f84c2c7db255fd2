"""The walk through a model: block by block, each module solved on what the quantized model feeds it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
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
from .report import ModuleReport
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
    weights = weights or InMemory(model)
    resumed = journal.resumed() if journal is not None else None
    walk = _Walk(config, device, progress, total, journal, resumed)
    first = resumed.layers if resumed is not None else 0
    if windows is None:
        for layer in range(first, len(blocks)):
            with weights.block(layer, torch.device("cpu"), torch.float32):
                for target in targets[layer]:
                    walk.solve(target, layer, None)
                walk.finish(layer)
        if head is not None and not (resumed and resumed.head):
            with weights.head(torch.device("cpu"), torch.float32):
                walk.solve(head, None, None)
                walk.finish(None)
        return walk.result(blocks, excluded_samples=0, tokens=0, batch_size=batch_size)

    batches = CalibrationBatches(windows, batch_size, device)
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
        self.stream, self.batches, self._journal = stream, batches, walk.journal
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
        start = batches.samples.start
        sample = stream.embed(batches[range(start, start + 1)])
        self.quantized = new("hidden", tuple(sample.shape[1:]))
        self.float = new("float", tuple(sample.shape[1:])) if paired else None

        def use(samples: range, states: Tensor) -> None:
            self.quantized.write(samples, states)
            if self.float is not None:
                self.float.write(samples, states)

        batches.each(lambda samples: stream.embed(batches[samples]), use)

    def first_sample(self) -> tuple[Mapping[str, Tensor], Tensor]:
        """A batch of one sample and its hidden states, to trace with."""
        samples = range(self.batches.samples.start, self.batches.samples.start + 1)
        return self.batches[samples], self.quantized.read(samples)

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
        return self._journal.file(name, layer) if self._journal is not None else None


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
    stages = stream.stages(layer, *states.first_sample(), modules)
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
        for stage, sums in zip(group, statistics, strict=True):
            for name in stage:
                by_name[name].replace_weight(walk.solve(by_name[name], layer, sums).dequantize())


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
    walk.solve(head, None, sums)


class _Walk:
    """What has been decided so far, and the solver that the settings name."""

    def __init__(
        self,
        config: QuantizeConfig,
        device: torch.device,
        progress: ProgressCallback,
        total: int,
        journal: Journal | None,
        resumed: Resumed | None,
    ) -> None:
        self.config = config
        self.journal = journal
        self.weights: dict[str, QuantizedWeight] = {}
        self.reports: list[ModuleReport] = list(resumed.reports) if resumed is not None else []
        self._kept = len(self.reports)
        self._device = device
        self._progress = progress
        self._total = total

    def finish(
        self, layer: int | None, batches: CalibrationBatches | None = None, states: _States | None = None
    ) -> None:
        """Hand what was solved since the last call to the journal, where there is one, and forget the weights."""
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

    def solve(self, target: Target, layer: int | None, statistics: InputStatistics | None) -> QuantizedWeight:
        """Solve one module, remember the result and report it."""
        start = time.perf_counter()
        weight = target.weight.detach().to(self._device, torch.float32)
        try:
            hessian = statistics.hessian() if statistics is not None else None
            solution = self._solution(weight, hessian, statistics, target.config)
        except GptqkitError as problem:
            raise type(problem)(f"{target.name}: {problem}") from problem
        seconds = time.perf_counter() - start
        error, rounding_error = None, None
        if hessian is not None:
            plain = solve_rtn(weight, target.config.plain_rounding())
            error, rounding_error = relative_errors(weight, (solution.weight, plain.weight), hessian)
        self.reports.append(
            ModuleReport(
                name=target.name,
                layer=layer,
                shape=(weight.shape[0], weight.shape[1]),
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
        return solution.weight

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


def relative_errors(weight: Tensor, candidates: Iterable[QuantizedWeight], hessian: Tensor) -> list[float]:
    """||(W - Q) X|| / ||W X|| of every candidate Q: the share of the module's output that it changes.

    Args:
        weight: W, (out, in) float32.
        candidates: Quantized weights of the same shape.
        hessian: H = mean over tokens of x xT, (in, in) float32, not damped.
    """
    whole = output_power(weight, hessian)
    lost = [output_power(weight - candidate.dequantize(), hessian) for candidate in candidates]
    return [math.sqrt(power / whole) if whole > 0 else 0.0 for power in lost]
