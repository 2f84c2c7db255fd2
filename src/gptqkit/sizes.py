"""How large the parts of a run are, from shapes alone: the model is on the meta device and has no weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .calibration.activations import Place
from .errors import ArchitectureError
from .footprint import dry_run
from .matrices import decided_bytes, pieces, solver_bytes, stored_bytes
from .quantizer.config import QuantizeConfig
from .quantizer.groups import Group
from .quantizer.modules import (
    Target,
    check_overrides,
    find_blocks,
    find_head,
    find_targets,
    is_tied,
    output_layer,
)
from .quantizer.stream import BlockStream, working_copy
from .quantizer.walk import STATISTICS_BYTES
from .tracing import NOTHING, Height, Pass, arrange_passes, trace_block

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
class PassSizes:
    """The modules of a block that are solved after one pass over the samples; all in bytes.

    Attributes:
        statistics: Second moments of all their inputs, and of the pools of experts.
        solver: What the solver of one module needs beside them, for the module that needs most.
        solved: Name of that module.
        forward: What the pass holds, or turning what it gathers into statistics.
    """

    statistics: int
    solver: int
    solved: str
    forward: Height


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
        passes: In the order of the work; none where nothing is quantized.
        forward: What the pass through the whole block holds.
        results: Codes, scales and zeros as the solver leaves them.
        traced: Whether the passes were traced; otherwise they are estimated from the modules' sizes.
    """

    name: str
    count: int
    weights: int
    stored: int
    float_copy: int
    passes: tuple[PassSizes, ...]
    forward: Height
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
        workload: Of it `samples`, `batch_size` and where hidden states are kept do not matter.

    Raises:
        ArchitectureError: No blocks.
        ConfigError: A module that the settings do not fit, or an override that fits none.
    """
    prefix, blocks = find_blocks(model)
    check_overrides(model, workload.config)
    targets = [find_targets(block, f"{prefix}.{layer}", workload.config) for layer, block in enumerate(blocks)]
    head = find_head(model, workload.config)
    chosen = [target for of_block in targets for target in of_block] + ([head] if head else [])
    if not chosen:
        raise ArchitectureError("the overrides leave no module to quantize")
    dtype = torch.float32 if workload.device.type == "cpu" else next(model.parameters()).dtype
    output, source = _model_bytes(model, chosen)
    own_head = output_layer(model)
    aside = [blocks] if own_head is None or is_tied(model) else [blocks, own_head]
    inside = {id(tensor) for module in aside for tensor in _tensors(module)}
    outside = [tensor for tensor in _tensors(model) if id(tensor) not in inside]
    stored = [_bytes(block) for block in blocks]
    stored_head = head.weight.nbytes if head else 0
    outside_bytes = sum(tensor.nbytes for tensor in outside if tensor.dtype != dtype and tensor.is_floating_point())
    kinds: dict[object, list[int]] = {}
    for layer, block in enumerate(blocks):
        kinds.setdefault(_kind(block, targets[layer], f"{prefix}.{layer}."), []).append(layer)
    measured = []
    with working_copy(model, torch.device("meta"), dtype):
        outside_bytes += sum(tensor.nbytes for tensor in outside)
        stream = BlockStream(model, blocks)
        with dry_run():
            state = stream.embed(
                {"input_ids": torch.zeros(1, workload.length, dtype=torch.int64, device="meta")}
            ).nbytes
        for same in kinds.values():
            layer = same[0]
            passes, through, traced = _passes(stream, layer, targets[layer], workload)
            measured.append(
                BlockSizes(
                    name=f"{prefix}.{layer}",
                    count=len(same),
                    weights=_bytes(blocks[layer]),
                    stored=stored[layer],
                    float_copy=_bytes(blocks[layer]) if _paired(workload) and targets[layer] else 0,
                    passes=passes,
                    forward=through,
                    results=sum(map(decided_bytes, targets[layer])),
                    traced=traced,
                )
            )
        if head is not None:
            norm = Height(fixed=0, sample=4 * state)
            received = Height(fixed=0, sample=state)
            gathered = Pass(groups=(Group([[head.name]]),), top=norm, kept=received, widest=received)
            measured.append(
                BlockSizes(
                    name=head.name,
                    count=1,
                    weights=head.weight.nbytes,
                    stored=stored_head,
                    float_copy=0,
                    passes=(_pass(gathered, [head], workload, pools=0),),
                    forward=norm,
                    results=decided_bytes(head),
                    traced=True,
                )
            )
    return Sizes(
        layers=len(blocks),
        blocks=tuple(measured),
        outside=outside_bytes if workload.calibrated else 0,
        state=state if workload.calibrated else 0,
        streams=(2 if _paired(workload) else 1) if workload.calibrated else 0,
        output=output,
        source=source,
    )


def _passes(
    stream: BlockStream, layer: int, targets: Sequence[Target], workload: Workload
) -> tuple[tuple[PassSizes, ...], Height, bool]:
    """The passes over one block, what the one through it holds, and whether they could be traced."""
    if not workload.calibrated:
        empty = Pass(groups=(), top=NOTHING, kept=NOTHING, widest=NOTHING)
        return tuple(_pass(empty, [target], workload, pools=0) for target in targets), NOTHING, True
    by_name = {target.name: target for target in targets}

    def size(name: str) -> int:
        return _statistics(by_name[name], workload)

    arrange = partial(
        arrange_passes,
        size=size,
        statistics_bytes=workload.statistics_bytes,
        true_sequential=workload.config.true_sequential,
    )
    trace = trace_block(stream, layer, targets, length=workload.length, arrange=arrange)
    pools: dict[str, int] = {}  # by the kind of expert; they stay until the block is finished
    passes = []
    for one in trace.passes:
        names = [name for group in one.groups for stage in group.stages for name in stage]
        for group in one.groups:
            if group.routed:
                pools[group.stages[0][0].rpartition(".")[2]] = size(group.stages[0][0])
        passes.append(_pass(one, [by_name[name] for name in names], workload, pools=sum(pools.values())))
    return tuple(passes), trace.through, trace.exact


def _pass(one: Pass, targets: Sequence[Target], workload: Workload, *, pools: int) -> PassSizes:
    """The sizes of one pass that serves `targets`."""
    streams = 2 if _paired(workload) else 1
    itemsize = targets[0].weight.dtype.itemsize
    routed = {name for group in one.groups if group.routed for stage in group.stages for name in stage}
    needs = {}
    for target in targets:
        rows, columns = target.weight.shape
        needs[target.name] = solver_bytes(
            rows, columns, target.config, calibrated=workload.calibrated, copies_weight=itemsize != 4
        )
        if target.name in routed:  # filled up with the pool: two more sets of sums
            needs[target.name] += 2 * _statistics(target, workload)
    solved = max(needs, key=lambda name: needs[name])
    leaders = [stage[0] for group in one.groups for stage in group.stages]
    by_name = {target.name: target for target in targets}
    columns = max((by_name[name].weight.shape[1] for name in leaders), default=0)
    # Of one module at a time: a test for NaN, or float32 copies, and the difference of two streams; and some rows of
    # the product. What the first stream fed is kept while the second is run.
    turning = max((itemsize + 3) / itemsize, (streams * 4 * (itemsize != 4) + 4 * (streams - 1)) / itemsize)
    product = min(columns, 1024) * columns * 4
    held = one.kept.sample * (streams - 1)
    forward = Height(
        fixed=one.top.fixed + one.kept.fixed * (streams - 1) + product,
        sample=max(one.top.sample + held, one.kept.sample + held + round(one.widest.sample * turning)),
    )
    return PassSizes(
        statistics=pools + sum(_statistics(by_name[name], workload) for name in leaders),
        solver=needs[solved],
        solved=solved,
        forward=forward,
    )


def _statistics(target: Target, workload: Workload) -> int:
    """Sums of one input, float64."""
    return 8 * target.weight.shape[1] ** 2 * (2 if _paired(workload) else 1)


def _paired(workload: Workload) -> bool:
    return workload.calibrated and workload.config.method == "gptaq"


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
