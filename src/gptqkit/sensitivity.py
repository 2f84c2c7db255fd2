"""How sensitive every part of a model is: one pass over its blocks, solved at several widths and put back."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .calibration.batches import Batches
from .calibration.halves import parts_of
from .calibration.samples import Samples
from .distributed import Processes
from .errors import ConfigError, ShapeError
from .export.formats import find_format
from .job import Job
from .memory import checkpoint_bytes
from .model import FloatModel
from .pipeline import STATISTICS_BYTES
from .progress import Progress, ProgressCallback
from .quantizer.allocation import Width, allocate_bits
from .quantizer.config import BITS, ModuleOverride, QuantizeConfig
from .quantizer.gptq import solve_gptq
from .run import LARGEST_BATCH, Run
from .streams import Streams
from .subsets import Group, portions
from .targets import Target, find_head, find_targets, matrix, misfits, refuse
from .units import size_text

_LOG = logging.getLogger("gptqkit")
SAMPLES = 4  # on which a block shows what an error inside it does to its output
PLAIN: Mapping[str, Any] = {"grid": "mse", "refine_rounds": 0, "learn_iterations": 0}  # better ones choose alike


@dataclass(frozen=True)
class _Unresumed:
    """What `Streams` wants of a job: this one begins at the beginning, and keeps hidden states in `folder`."""

    folder: Path
    states: None = None

    def states_file(self, stream: str, layer: int, *, again: bool = False) -> Path:
        return self.folder / f"{stream}-{layer}{'-again' * again}.bin"


@torch.no_grad()
def with_chosen_bits(
    source: FloatModel,
    samples: Samples,
    config: QuantizeConfig,
    processes: Processes,
    run: Run,
    progress: ProgressCallback,
) -> QuantizeConfig:
    """Return the settings with an override for every module that gets other bits than `bits`.

    Linears that share an input, such as q, k and v, and all experts of a layer have the same bits, as servers need it.
    The loss of a width is tr(E Hd ET) of GPTQ's solution at it, times what such an error in this part does to the
    output of its block, measured at one width; outputs count relative to their own size, and losses of blocks add up.

    Args:
        source: The float model.
        samples: Calibration samples; they go through the float model.
        config: The settings, `target_bits` or `target_size` among them.
        processes: Those that share the samples.
        run: Batch size, and where hidden states are kept.
        progress: Called once per block.

    Raises:
        ConfigError: A format with one setting for all modules, a target that no widths reach, or, with `strict`,
            Linears that do not fit.
    """
    if find_format(config.format).uniform:
        raise ConfigError(
            f"{config.format} knows one setting of bits for all; leave target_bits and target_size out, or use gptq_v2"
        )
    blocks = dict(zip(source.paths, source.blocks, strict=True))
    targets, left = find_targets(source.model, blocks, config)
    refuse(misfits(targets, left, config) if run.strict else [])
    size = run.batch_size or LARGEST_BATCH
    mine = processes.share(len(samples.input_ids), size)
    batches = Batches(samples, parts_of(samples, source.model), mine, size, processes.device)
    dtype = torch.float32 if processes.device.type == "cpu" else source.model.dtype
    streams = Streams(source, batches, processes, paired=False, skip=config.skip_nonfinite)
    parts: dict[str, list[Width]] = {}
    members: dict[str, list[Target]] = {}
    place = "memory" if run.activations == "auto" else run.activations
    with tempfile.TemporaryDirectory(prefix="gptqkit-") as folder, source.outside(processes.device, dtype):
        streams.begin(cast(Job, _Unresumed(Path(folder))), dtype, place)
        for layer, own in enumerate(targets):
            streams.enter(layer)
            with source.block(layer, processes.device, dtype):
                for group, widths in _measured(layer, own, streams, config):
                    name = group.subsets[0][0].name
                    parts[name], members[name] = widths, [each for subset in group.subsets for each in subset]
                streams.advance("hidden", layer, source.blocks[layer])
            if processes.rank == 0:
                progress(Progress(stage="choose bits", done=layer + 1, total=len(targets), layer=layer))
    free = [target for group in members.values() for target in group]
    chosen = allocate_bits(parts, _budget(source, targets, free, parts, config))
    if processes.rank == 0:
        counts = Counter(dict.fromkeys(BITS, 0))
        for name, bits in chosen.items():
            counts[bits] += len(members[name])
        _LOG.info("chosen: %s", ", ".join(f"{count} modules of {bits} bits" for bits, count in counts.items() if count))
    overrides = {
        f"^{re.escape(target.name)}$": ModuleOverride(bits=bits, group_size=target.config.group_size)
        for name, bits in chosen.items()
        for target in members[name]
        if bits != target.config.bits
    }
    return dataclasses.replace(config, overrides={**overrides, **config.overrides})


def _budget(
    source: FloatModel,
    targets: Sequence[list[Target]],
    free: Sequence[Target],
    parts: Mapping[str, Sequence[Width]],
    config: QuantizeConfig,
) -> float:
    """Return the bits that the parts may take: by the average, or what the size leaves when all else has its place."""
    if config.target_size is None:
        return cast(float, config.target_bits) * sum(each.shape[0] * each.shape[1] for each in free)
    head = find_head(source.model, config)
    every = [target for own in targets for target in own] + ([head] if head else [])
    others = 8 * sum(checkpoint_bytes(source.model, every, config)) - sum(
        _size(each, each.config.bits) for each in free
    )
    least = others + sum(min(width.size for width in widths) for widths in parts.values())
    if least > 8 * config.target_size:
        asked, smallest = size_text(config.target_size), size_text(math.ceil(least / 8))
        raise ConfigError(f"target_size is {asked}, but the smallest widths make {smallest}; allow for more")
    return 8 * config.target_size - others


def _measured(
    layer: int, targets: list[Target], streams: Streams, config: QuantizeConfig
) -> Iterator[tuple[Group, list[Width]]]:
    """Yield the parts of a block whose bits are not given, with what each width loses and takes."""
    block, layout = streams.model.blocks[layer], find_format(config.format)
    given = [target for target in targets if any(re.search(pattern, target.name) for pattern in config.overrides)]
    for group in streams.trace(layer, [target for target in targets if target not in given]):
        members = [target for subset in group.subsets for target in subset]
        widths = [bits for bits in BITS if all(_holds(layout.check, target, bits) for target in members)]
        probe = min(widths, key=lambda bits: (abs(bits - config.bits), bits))
        lost, rounded = dict.fromkeys(widths, 0.0), dict[str, Tensor]()
        pools: dict[Any, Any] = {}
        for portion in portions([group], lambda subset: 4 * subset[0].shape[1] ** 2, STATISTICS_BYTES):
            for one in streams.collect(layer, portion, pools, None):
                moments = one.moments()
                for target in one.targets:
                    weight = matrix(block.get_submodule(target.inner)).detach().float()
                    for bits in widths:
                        settings = dataclasses.replace(target.config, bits=bits, **PLAIN)
                        solution = solve_gptq(weight, moments, settings, layout.snap)
                        lost[bits] += solution.loss or 0.0
                        if bits == probe:
                            rounded[target.inner] = solution.weight.dequantize()
        effect = streams.processes.gather(_effect(layer, rounded, streams))[0]
        scale = effect / lost[probe] if lost[probe] else 0.0
        sizes = {bits: sum(_size(each, bits) for each in members) for bits in widths}
        yield group, [Width(bits=bits, size=sizes[bits], loss=scale * lost[bits]) for bits in widths]


def _holds(check: Any, target: Target, bits: int) -> bool:
    try:
        check(dataclasses.replace(target.spec, bits=bits))
    except (ConfigError, ShapeError):
        return False
    return True


def _size(target: Target, bits: int) -> float:
    """Return the bits that a Linear takes: codes, and of every group a scale of 16 bits and a zero point."""
    rows, columns = target.shape
    return rows * (columns * bits + (16 + bits) * (columns // (target.config.group_size or columns)))


def _effect(layer: int, rounded: dict[str, Tensor], streams: Streams) -> float:
    """Return the squared distance of the block's output with some of its weights rounded, relative to its size."""
    if streams.processes.rank:
        return 0.0
    block = streams.model.blocks[layer]
    run = streams.first_samples(layer, SAMPLES)
    expected, kept = run(block).double(), {}
    for name, values in rounded.items():
        place = matrix(block.get_submodule(name))
        kept[name] = place.clone()
        place.copy_(values)
    found = run(block).double()
    for name, values in kept.items():
        matrix(block.get_submodule(name)).copy_(values)
    return float((found - expected).square().sum() / expected.square().sum().clamp(min=1e-30))
