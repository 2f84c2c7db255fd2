"""How large the parts of a run are, from shapes alone: the model is on the meta device and has no weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .calibration.activations import Place
from .errors import ArchitectureError
from .matrices import decided_bytes, stored_bytes
from .quantizer.config import QuantizeConfig
from .quantizer.modules import (
    Target,
    check_overrides,
    find_blocks,
    find_head,
    find_targets,
    is_tied,
    output_layer,
    pieces,
)
from .quantizer.stream import working_copy
from .quantizer.walk import STATISTICS_BYTES
from .rehearsal import Phase, rehearse, solver_phase

LARGEST_BATCH = 8  # samples per forward pass, unless told otherwise
FILE_BYTES = 16 << 10  # config, model card and the like
REPORT_BYTES = 560  # one module in quantization_report.json
ENTRY_BYTES = 72  # one tensor in the header of a safetensors file, beside its name


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run is asked to do.

    Attributes:
        config: Settings of the quantization.
        length: Tokens per sample.
        device: Where blocks run and solvers work.
        samples: Calibration samples.
        batch_size: Samples per forward pass; None for what fits.
        activations: Where hidden states are kept between blocks; "auto" for the fastest place where they fit.
        activation_memory: Bytes of RAM that "auto" may give to hidden states; None for half of what is free.
        statistics_bytes: How much the statistics of one pass may take, as long as those of one stage fit.
        calibrated: Whether there is calibration text; only plain rounding does without.
        processes: How many share the samples.
        begun: Whether the job goes on where it stopped: what shows in its result is decided.
        writes: Whether a checkpoint is written; without, everything stays in RAM.
    """

    config: QuantizeConfig
    length: int
    device: torch.device
    samples: int = 128
    batch_size: int | None = None
    activations: Literal["auto"] | Place = "auto"
    activation_memory: int | None = None
    statistics_bytes: int = STATISTICS_BYTES
    calibrated: bool = True
    processes: int = 1
    begun: bool = False
    writes: bool = True

    @property
    def place(self) -> Place:
        """Where hidden states are kept, in RAM where that is still open."""
        return "memory" if self.activations == "auto" else self.activations

    @property
    def share(self) -> int:
        """Samples of the process that has most: whole batches."""
        batch = self.batch_size or 1
        batches = -(-self.samples // batch)
        return min(self.samples, -(-batches // self.processes) * batch)


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """One kind of block, or the output layer; all in bytes.

    Attributes:
        name: The first of its kind.
        count: How many blocks are of this kind.
        weights: In the dtype in which they work.
        stored: In the dtype of the file; kept while the block works, and lent to the working weights where the dtype is
            the same, until these are replaced.
        float_copy: The block as it was, beside the one being quantized (gptaq).
        phases: What is held beside them in each phase of the work.
        results: Codes, scales and zeros as the solver leaves them.
        traced: Whether the work was rehearsed; otherwise it is estimated from the modules' sizes.
    """

    name: str
    count: int
    weights: int
    stored: int
    float_copy: int
    phases: tuple[Phase, ...]
    results: int
    traced: bool


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All parts of a run, in bytes.

    Attributes:
        layers: Number of blocks.
        blocks: Every kind of block, and the output layer where it is quantized.
        outside: Embedding and whatever else is outside the blocks, in the dtype in which it works and, where that is
            another, in that of the file.
        state: One sample's hidden states.
        streams: 2 where the float model's hidden states are kept too (gptaq), else 1, or 0 without calibration.
        output: The checkpoint's tensors with their headers, and its report.
        source: The float model's tensors.
    """

    layers: int
    blocks: tuple[BlockSizes, ...]
    outside: int
    state: int
    streams: int
    output: int
    source: int


def shapes_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` on the meta device: all shapes and dtypes, and no weights, wherever those of `model` are."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        for parameter in model.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def measure(model: PreTrainedModel, workload: Workload) -> Sizes:
    """The sizes of `workload` on `model`.

    Args:
        model: On the meta device, in the dtype of its files, in evaluation mode.
        workload: Of it the number of samples and where hidden states are kept do not matter.

    Raises:
        ArchitectureError: No blocks.
        ConfigError: A module that the settings do not fit, or an override that fits none.
    """
    config = workload.config
    prefix, blocks = find_blocks(model)
    check_overrides(model, config)
    targets = [find_targets(block, f"{prefix}.{layer}", config) for layer, block in enumerate(blocks)]
    head = find_head(model, config)
    chosen = [target for of_block in targets for target in of_block] + ([head] if head else [])
    if not chosen:
        raise ArchitectureError("the overrides leave no module to quantize")
    output, source = _model_bytes(model, chosen)
    dtype = torch.float32 if workload.device.type == "cpu" else next(model.parameters()).dtype
    streams = (2 if config.method == "gptaq" else 1) if workload.calibrated else 0
    kinds: dict[object, list[int]] = {}
    for layer, block in enumerate(blocks):
        kinds.setdefault(_kind(block, targets[layer], f"{prefix}.{layer}."), []).append(layer)
    parts: list[tuple[str, int | None, int, nn.Module, list[Target]]]
    parts = [(f"{prefix}.{same[0]}", same[0], len(same), blocks[same[0]], targets[same[0]]) for same in kinds.values()]
    if head is not None:
        parts.append((head.name, None, 1, head.module, [head]))
    stored = [_bytes(module) for *_, module, _ in parts]
    own_head = output_layer(model)
    aside = [blocks] if own_head is None or is_tied(model) else [blocks, own_head]
    inside = {id(tensor) for module in aside for tensor in _tensors(module)}
    outside = [tensor for tensor in _tensors(model) if id(tensor) not in inside]
    twice = sum(tensor.nbytes for tensor in outside if tensor.dtype != dtype and tensor.is_floating_point())
    measured, state = [], 0
    with working_copy(model, torch.device("meta"), dtype):
        for (name, place, count, module, found), from_file in zip(parts, stored, strict=True):
            state, phases, traced = _work(model, blocks, place, found, workload)
            measured.append(
                BlockSizes(
                    name=name,
                    count=count,
                    weights=_bytes(module),
                    stored=from_file,
                    float_copy=_bytes(module) if streams == 2 and place is not None and found else 0,
                    phases=tuple(phases),
                    results=sum(map(decided_bytes, found)),
                    traced=traced,
                )
            )
        outside_bytes = twice + sum(tensor.nbytes for tensor in outside)
    return Sizes(
        layers=len(blocks),
        blocks=tuple(measured),
        outside=outside_bytes if streams else 0,
        state=state,
        streams=streams,
        output=output,
        source=source,
    )


def _work(
    model: PreTrainedModel, blocks: nn.ModuleList, layer: int | None, targets: list[Target], workload: Workload
) -> tuple[int, list[Phase], bool]:
    """Bytes of one sample's hidden states, the phases of the work on a block, and whether it could be rehearsed."""
    if not workload.calibrated:
        return 0, [solver_phase(targets, 0, calibrated=False)] if targets else [], True
    try:
        state, phases = rehearse(
            model,
            blocks,
            layer,
            targets,
            workload.config,
            length=workload.length,
            samples=max(LARGEST_BATCH, workload.batch_size or 0),
            statistics_bytes=workload.statistics_bytes,
        )
        return state, phases, True
    except (ArchitectureError, RuntimeError):  # shapes that depend on numbers, or operators without a meta kernel
        # Three times the inputs and outputs of all but experts, and the statistics of all modules where they may be.
        sums = [8 * (2 if workload.config.method == "gptaq" else 1) * target.weight.shape[1] ** 2 for target in targets]
        statistics = min(sum(sums), max([*sums, workload.statistics_bytes]))
        features = sum(sum(target.weight.shape) for target in targets if not target.expert)
        width = next(model.parameters()).itemsize
        state = workload.length * model.config.get_text_config().hidden_size * width
        forward = Phase(solved=None, statistics=statistics, fixed=0, sample=3 * workload.length * features * width)
        return state, [forward, *([solver_phase(targets, statistics, calibrated=True)] if targets else [])], False


def _kind(block: nn.Module, targets: Sequence[Target], prefix: str) -> object:
    """Equal for blocks of the same modules, shapes and settings."""
    shapes = tuple((name, tensor.shape) for name, tensor in block.state_dict().items())
    settings = tuple((each.name.removeprefix(prefix), each.config.bits, each.config.group_size) for each in targets)
    return type(block), shapes, settings


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in _tensors(module))


def _model_bytes(model: PreTrainedModel, targets: Iterable[Target]) -> tuple[int, int]:
    """Bytes of the checkpoint, and of the float model."""
    packed: dict[str, list[Target]] = {}
    for target in targets:
        packed.setdefault(target.parameter, []).append(target)
    output, source = FILE_BYTES, 0
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        source += tensor.nbytes
        output += tensor.nbytes
        for target in packed.get(name, []):
            output += stored_bytes(target) - target.weight.nbytes + REPORT_BYTES
            output += 4 * pieces(target) * (ENTRY_BYTES + len(target.name))
        if name not in packed:
            output += ENTRY_BYTES + len(name)
    return output, source
