"""How large the parts of a run are, from shapes alone: the model is on the meta device and has no weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import ArchitectureError
from .evaluation.perplexity import CHUNK
from .footprint import dry_run
from .matrices import decided_bytes, stored_bytes
from .quantizer.modules import Target, brought_in, check_overrides, find_blocks, find_head, find_targets
from .quantizer.stream import BlockStream, working_copy
from .rehearsal import UNTRACEABLE, Phase, rehearse
from .workload import Workload

EVALUATED = 8  # windows at a time, as `evaluate` takes them
FILE_BYTES = 16 << 10  # config, model card and the like
MATRIX_BYTES = 1 << 10  # headers of a matrix's tensors, and its row of the report


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """One kind of block, or the output layer; all in bytes.

    Attributes:
        name: The first of its kind.
        count: How many blocks are of this kind.
        weights: As stored, and as they work, which are others as soon as they are quantized; for GPTAQ also as they
            were.
        phases: What is held beside them in each phase of the work.
        results: Codes, scales and zeros as the solver leaves them.
        traced: Whether the work was rehearsed; otherwise it is estimated from the modules' sizes.
    """

    name: str
    count: int
    weights: int
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
            another, in that of the file; 0 without calibration.
        state: One sample's hidden states.
        output: The checkpoint's tensors with their headers, and its report.
        source: The float model's tensors.
        evaluation: What evaluating the checkpoint takes at the end, by name; empty where it is not asked for.
    """

    layers: int
    blocks: tuple[BlockSizes, ...]
    outside: int
    state: int
    output: int
    source: int
    evaluation: Mapping[str, int] = field(default_factory=dict)


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
        workload: Of it the number of samples, where hidden states are kept and `statistics_bytes` do not matter.

    Raises:
        ArchitectureError: No blocks.
        ConfigError: A module that the settings do not fit, or an override that fits none.
    """
    config = workload.config
    prefix, blocks = find_blocks(model)
    check_overrides(model, config)
    kinds: dict[object, list[tuple[str, int | None, nn.Module, list[Target]]]] = {}
    for layer, block in enumerate(blocks):
        name = f"{prefix}.{layer}"
        targets = find_targets(block, name, config)
        kinds.setdefault(_kind(block, targets, name), []).append((name, layer, block, targets))
    head = find_head(model, config)
    if head is not None:
        kinds[head.name] = [(head.name, None, head.module, [head])]
    chosen = [target for same in kinds.values() for *_, targets in same for target in targets]
    if not chosen:
        raise ArchitectureError("the overrides leave no module to quantize")

    stored = {id(tensor): tensor.nbytes for tensor in _tensors(model)}
    source = sum({id(tensor): tensor.nbytes for tensor in model.state_dict(keep_vars=True).values()}.values())
    output = source + FILE_BYTES + sum(stored_bytes(target) - target.weight.nbytes + MATRIX_BYTES for target in chosen)
    inside = {id(tensor) for part in brought_in(model, blocks) for tensor in _tensors(part)}
    dtype = torch.float32 if workload.device.type == "cpu" else next(model.parameters()).dtype
    measured = []
    with working_copy(model, torch.device("meta"), dtype):
        for same in kinds.values():
            name, place, module, targets = same[0]
            phases, traced = rehearse(model, blocks, place, targets, workload)
            copies = 2 if workload.streams == 2 and place is not None and targets else 1
            measured.append(
                BlockSizes(
                    name=name,
                    count=len(same),
                    weights=sum(stored[id(tensor)] + copies * tensor.nbytes for tensor in _tensors(module)),
                    phases=tuple(phases),
                    results=sum(map(decided_bytes, targets)),
                    traced=traced,
                )
            )
        sizes = [(tensor.nbytes, stored[id(tensor)]) for tensor in _tensors(model) if id(tensor) not in inside]
        state = _state(model, blocks, workload)
    return Sizes(
        layers=len(blocks),
        blocks=tuple(measured),
        outside=sum(working + (file if file != working else 0) for working, file in sizes) if workload.samples else 0,
        state=state,
        output=output,
        source=source,
        evaluation={} if workload.evaluate_on is None else _evaluation(model, measured, state, dtype, output, workload),
    )


def _evaluation(
    model: PreTrainedModel,
    blocks: Iterable[BlockSizes],
    state: int,
    worked: torch.dtype,
    output: int,
    workload: Workload,
) -> dict[str, int]:
    """The checkpoint as it is loaded, and the widest of a block and of the output layer and its losses.

    A CPU holds dense weights. Without calibration blocks were not walked, and only the output layer counts.
    """
    dtype, on_cpu = next(model.parameters()).dtype, workload.device.type == "cpu"
    if on_cpu and dtype == torch.float16:
        dtype = torch.float32
    dense = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    through = [phase for block in blocks for phase in block.phases if phase.solved is None and not phase.statistics]
    widest = max((phase.fixed + EVALUATED * phase.sample for phase in through), default=0) * dtype.itemsize
    length, vocabulary = workload.sequence_length, model.config.get_text_config().vocab_size
    logits = vocabulary * (EVALUATED * length * dtype.itemsize + min(length, CHUNK) * 8)  # losses in float32, twice
    return {
        "quantized model": dense if on_cpu else output,
        f"evaluation of {EVALUATED} windows": EVALUATED * state + max(widest // worked.itemsize, logits),
    }


def _state(model: PreTrainedModel, blocks: nn.ModuleList, workload: Workload) -> int:
    """Bytes of the hidden states of a sample."""
    if not workload.samples:
        return 0
    length = workload.sequence_length
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    try:
        with dry_run():
            return BlockStream(model, blocks).embed({"input_ids": tokens}).nbytes
    except UNTRACEABLE:
        return int(length * model.config.get_text_config().hidden_size * next(model.parameters()).itemsize)


def _kind(block: nn.Module, targets: Iterable[Target], prefix: str) -> object:
    """Equal for blocks of the same modules, shapes and settings."""
    shapes = tuple((name, tensor.shape) for name, tensor in block.state_dict().items())
    settings = tuple((each.name.removeprefix(prefix), each.config.bits, each.config.group_size) for each in targets)
    return type(block), shapes, settings


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
