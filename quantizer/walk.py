"""The walk through a model: block by block, each module solved on what the quantized model feeds it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..calibration.batches import CalibrationBatches
from ..calibration.hessian import InputStatistics
from ..calibration.windows import TokenWindows
from ..errors import ArchitectureError, GptqkitError
from ..progress import Progress, ProgressCallback, silent
from .config import QuantizeConfig
from .modules import Target, check_overrides, find_blocks, find_head, find_targets, is_tied, output_layer
from .quantized import QuantizedWeight
from .report import ModuleReport
from .solver import Solution, output_power, solve_gptaq, solve_gptq, solve_rtn
from .stream import BlockStream, float_copy, working_copy


@dataclass(frozen=True, eq=False)
class WalkResult:
    """Everything that a walk decided.

    Attributes:
        weights: The quantized weight of every target, by full module name, on the CPU.
        reports: One per target, in the order in which they were solved.
        excluded_samples: Samples left out for non-finite activations.
        tokens: Tokens that counted at the end of the walk.
        block_weights: Weights in the blocks' tensors of two and more dimensions.
        quantized_weights: Those among them that were quantized.
    """

    weights: dict[str, QuantizedWeight]
    reports: list[ModuleReport]
    excluded_samples: int
    tokens: int
    block_weights: int
    quantized_weights: int


@torch.no_grad()
def quantize_blocks(
    model: PreTrainedModel,
    windows: TokenWindows | None,
    config: QuantizeConfig,
    *,
    device: torch.device,
    batch_size: int = 8,
    progress: ProgressCallback = silent,
) -> WalkResult:
    """Quantize every matrix in the repeated blocks of `model`, and its output layer where asked.

    The model comes back as it was: weights are replaced in working copies only. On a CPU the blocks run in float32, on
    a GPU in the model's own dtype; statistics and solvers always work in float32 (or float64).

    Args:
        model: A transformers causal LM in eval mode.
        windows: Calibration tokens; None only for plain rounding, which then reports no errors.
        config: All settings.
        device: Where blocks run and solvers work.
        batch_size: Samples per forward pass.
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
    walk = _Walk(config, device, progress, total)
    if windows is None:
        for layer, of_block in enumerate(targets):
            for target in of_block:
                walk.solve(target, layer, None)
        if head is not None:
            walk.solve(head, None, None)
        return walk.result(blocks, excluded_samples=0, tokens=0)

    stream = BlockStream(model, blocks)
    batches = CalibrationBatches(windows, batch_size, device)
    stored = next(model.parameters()).dtype
    dtype = torch.float32 if device.type == "cpu" else stored
    output = output_layer(model)
    aside = [blocks] if output is None or is_tied(model) else [blocks, output]
    with working_copy(model, device, dtype, leave=aside):
        hidden = [stream.embed(batch) for batch in batches]
        hidden_float = [state.clone() for state in hidden] if config.method == "gptaq" else None
        for layer, block in enumerate(blocks):
            with working_copy(block, device, dtype):
                original = float_copy(block) if hidden_float is not None and targets[layer] else None
                _quantize_block(walk, stream, batches, layer, block, original, targets[layer], hidden, hidden_float)
                for index, batch in enumerate(batches):
                    hidden[index] = stream.run(layer, batch, hidden[index])
                    if hidden_float is not None:
                        hidden_float[index] = stream.run(layer, batch, hidden_float[index], original)
        if head is not None:
            with working_copy(head.module, device, dtype):
                _quantize_head(walk, stream, batches, head, hidden, hidden_float)
    return walk.result(blocks, excluded_samples=batches.excluded, tokens=batches.tokens)


def _quantize_block(
    walk: _Walk,
    stream: BlockStream,
    batches: CalibrationBatches,
    layer: int,
    block: nn.Module,
    original: nn.Module | None,
    targets: list[Target],
    hidden: list[Tensor],
    hidden_float: list[Tensor] | None,
) -> None:
    """Solve the targets of one block, stage by stage: a stage is the modules that share one input."""
    if not targets:
        return
    by_name = {target.name: target for target in targets}
    modules = {target.name: target.module for target in targets}
    stages = stream.stages(layer, batches.first_sample(), hidden[0][:1], modules)
    twins = dict(zip(block.modules(), original.modules(), strict=True)) if original is not None else {}
    for group in [[stage] for stage in stages] if walk.config.true_sequential else [stages]:
        leaders = [modules[stage[0]] for stage in group]
        statistics = [
            InputStatistics(by_name[stage[0]].weight.shape[1], batches.device, cross=original is not None)
            for stage in group
        ]
        for index, batch in enumerate(batches):
            received = stream.tap(layer, batch, hidden[index], leaders)
            in_float: list[Tensor] | list[None] = [None] * len(group)
            if hidden_float is not None:
                twin_leaders = [twins[leader] for leader in leaders]
                in_float = stream.tap(layer, batch, hidden_float[index], twin_leaders, original)
            for stage, sums, x, x_float in zip(group, statistics, received, in_float, strict=True):
                batches.add(sums, index, x, x_float, layer=layer, module=stage[0], skip=walk.config.skip_nonfinite)
        for stage, sums in zip(group, statistics, strict=True):
            for name in stage:
                by_name[name].replace_weight(walk.solve(by_name[name], layer, sums).dequantize())


def _quantize_head(
    walk: _Walk,
    stream: BlockStream,
    batches: CalibrationBatches,
    head: Target,
    hidden: list[Tensor],
    hidden_float: list[Tensor] | None,
) -> None:
    sums = InputStatistics(head.weight.shape[1], batches.device, cross=hidden_float is not None)
    for index, batch in enumerate(batches):
        received = stream.tap_head(batch, hidden[index], head.module)
        in_float = stream.tap_head(batch, hidden_float[index], head.module) if hidden_float is not None else None
        batches.add(sums, index, received, in_float, layer=None, module=head.name, skip=walk.config.skip_nonfinite)
    walk.solve(head, None, sums)


class _Walk:
    """What has been decided so far, and the solver that the settings name."""

    def __init__(self, config: QuantizeConfig, device: torch.device, progress: ProgressCallback, total: int) -> None:
        self.config = config
        self.weights: dict[str, QuantizedWeight] = {}
        self.reports: list[ModuleReport] = []
        self._device = device
        self._progress = progress
        self._total = total

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

    def result(self, blocks: nn.Module, *, excluded_samples: int, tokens: int) -> WalkResult:
        """Everything that was decided, and how much of `blocks` it covers."""
        shapes = [report.shape for report in self.reports if report.layer is not None]
        return WalkResult(
            weights=self.weights,
            reports=self.reports,
            excluded_samples=excluded_samples,
            tokens=tokens,
            block_weights=sum(tensor.numel() for tensor in blocks.parameters() if tensor.dim() >= 2),
            quantized_weights=sum(rows * columns for rows, columns in shapes),
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
