"""The walk through a model: block by block, each module solved on what the quantized model feeds it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..calibration.activations import Place
from ..calibration.batches import CalibrationBatches
from ..calibration.windows import TokenWindows
from ..errors import ArchitectureError
from ..progress import ProgressCallback, silent
from .block import quantize_block, quantize_head
from .config import QuantizeConfig
from .journal import Journal
from .modules import check_overrides, find_blocks, find_head, find_targets
from .ranks import Ranks
from .solving import Solving, WalkResult
from .states import States
from .stream import BlockStream, float_copy
from .weights import InMemory, Weights

STATISTICS_BYTES = 8 << 30


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
    statistics_bytes: int = STATISTICS_BYTES,
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
        statistics_bytes: How much the statistics of a layer's experts may take at once; what is more is calibrated in
            several passes.
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
    solving = Solving(config, ranks, progress, total, journal, resumed)
    first = resumed.layers if resumed is not None else 0
    if windows is None:
        for layer in range(first, len(blocks)):
            with weights.block(layer, torch.device("cpu"), torch.float32):
                solving.solve(targets[layer], layer, [None] * len(targets[layer]), None)
                solving.finish(layer)
        if head is not None and not (resumed and resumed.head):
            with weights.head(torch.device("cpu"), torch.float32):
                solving.solve([head], None, [None], None)
                solving.finish(None)
        return solving.result(blocks, excluded_samples=0, tokens=0, batch_size=batch_size)

    batches = CalibrationBatches(windows, batch_size, device)
    batches.samples = ranks.share(len(windows.input_ids), batch_size)
    if resumed is not None:
        batches.counts, batches.batch_size = resumed.counts, resumed.batch_size
    stream = BlockStream(model, blocks)
    dtype = torch.float32 if device.type == "cpu" else next(model.parameters()).dtype
    if first < len(blocks) or (head is not None and not (resumed and resumed.head)):
        with weights.outside(device, dtype):
            paired = config.method == "gptaq"
            states = States(stream, batches, ranks, journal, dtype, activations, resumed, paired=paired)
            for layer in range(first, len(blocks)):
                with weights.block(layer, device, dtype):
                    original = float_copy(blocks[layer]) if states.float is not None and targets[layer] else None
                    quantize_block(solving, states, layer, blocks[layer], original, targets[layer], statistics_bytes)
                    if layer + 1 < len(blocks) or head is not None:
                        states.advance(layer, original)
                    if layer + 1 == len(blocks) and head is None:
                        solving.finish(layer, batches)
                    else:
                        solving.finish(layer, batches, states.quantized, states.float)
            if head is not None:
                with weights.head(device, dtype):
                    quantize_head(solving, states, head)
                    solving.finish(None, batches)
    return solving.result(
        blocks, excluded_samples=batches.excluded, tokens=batches.tokens, batch_size=batches.batch_size
    )
