"""How much RAM, GPU memory and disk a job needs, estimated from shapes before it starts; good to about a third.

Of one Linear, weight (n, k), s bytes per number of the solver (4, or 8 with float64), p = 1 where hidden states are
compared with the float model's (gptaq, qep, loaq, learned rounding), else 0:

    statistics   4 k^2 (1 + p)                          H and C, of one subset that shares an input, or of experts
                 4 n^2                                  with two_sided: F, of all Linears of a block, or of experts
    moments      4 k^2 (1 + p) + 4 n k                  their means; W in float32
                 8 n k                                  with loaq: the sum and mean of D
    solver       s n k + s k^2 (3 + p)                  while H is factorized, and P is made, or
                 s n k (4 + p) + s k^2 (1 + p) + n k    in the sweep: W twice, Q, E, w when rounded; R, P; codes
                 9 s n k + s k^2 (2 + p)                while it is refined: also H; codes, Q, E, w as floats
                 3 s n k + 3 s n^2                      besides, with two_sided: W twice, E; F twice, its factor. W
                                                        is of all Linears that are solved together, those that share
                                                        an input, up to a size; n above is that of one of 8 parts
    checkpoint   as the format says, to the byte
    gradients    2 d per block and token of 32 samples  with two_sided: behind all blocks, which are d wide
    learning     20 n k                                 latent, in units of codes too; its move, slope, gradient
                 16 vocabulary per token of a sample    with two_sided: logits, chances, their sums, gradients

What the C library keeps of freed RAM does not count: some 100 MiB.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .calibration.config import Calibration
from .calibration.halves import has_two_stacks
from .empty import EmptyModel, open_empty
from .errors import DoesNotFitError
from .evaluating import check_length, default_length
from .export.convert import check_apart
from .export.formats import find_format
from .export.shards import JOINED_BYTES
from .fisher import AT_ONCE, SAMPLES
from .hub import at_home, fetch
from .learning import BATCH as LEARNED_AT_ONCE
from .loading import choose_device
from .modes import in_plain_modes
from .pipeline import PROBE
from .quantizer.config import QuantizeConfig
from .quantizer.methods import needs_calibration, needs_cross, needs_drift, pairs_models
from .quantizer.rows import PARTS
from .run import LARGEST_BATCH, Run
from .sensitivity import check_reachable
from .settings import settings_of
from .solving import alike
from .subsets import STATISTICS_BYTES, input_bytes, output_bytes
from .targets import Target, checkpoint_bytes, find_blocks, find_head, find_targets
from .tuning import BATCH as TUNED_AT_ONCE
from .units import size_text

_LOG = logging.getLogger("gptqkit")
_ADVICE = {
    "disk": "choose another folder, or free some",
    "RAM": "free some, or use a larger machine",
    "GPU memory": "use --device cpu, or a larger GPU",
}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What a job needs, and what there is, in bytes.

    Attributes:
        needs: Parts by name, of "RAM", "GPU memory" and "disk".
        available: What there is of each; None where that is not known.
        least: What surely is needed of each: less than that, and the job is refused.
        activations: Where hidden states will be kept: what was asked for, or the fastest place where they fit.
        blocks: Number of blocks.
        source_bytes: Size of the float model.
        output_bytes: Size of the checkpoint.
    """

    needs: Mapping[str, Mapping[str, int]]
    available: Mapping[str, int | None]
    least: Mapping[str, int]
    activations: str
    blocks: int
    source_bytes: int
    output_bytes: int

    def __repr__(self) -> str:
        found = {name: self.available[name] for name in self.needs}
        there = {name: "an unknown size" if size is None else size_text(size) for name, size in found.items()}
        shown = ", ".join(f"{name}: {size_text(self.total(name))} of {size}" for name, size in there.items())
        return f"MemoryEstimate({shown}, blocks={self.blocks}, activations={self.activations!r})"

    def total(self, name: str) -> int:
        """Return all that is needed of "RAM", "GPU memory" or "disk"."""
        return sum(self.needs[name].values())

    def check(self) -> None:
        """Refuse what surely cannot run, and log a warning for what may not.

        Raises:
            DoesNotFitError: Even the least does not fit.
        """
        for name, least in self.least.items():
            there, total = self.available[name], self.total(name)
            if there is not None and least > there:
                raise DoesNotFitError(
                    f"{size_text(least)} of {name} is the least that this job needs, and there is {size_text(there)}; "
                    f"{_ADVICE[name]}"
                )
            if there is not None and total > there:
                helps = "another folder" if name == "disk" else "a smaller batch size, --activations disk"
                _LOG.warning(
                    f"about {size_text(total)} of {name} may be needed, and there is {size_text(there)}; if it runs "
                    f"out, use fewer or shorter samples, {helps} or --quality fast"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        keys = ("blocks", "activations", "source_bytes", "output_bytes")
        needs = {
            name: {"parts": dict(parts), "total": self.total(name), "available": self.available[name]}
            for name, parts in self.needs.items()
        }
        return {**{key: getattr(self, key) for key in keys}, "needs": needs}


@in_plain_modes
def plan(
    model: str | Path,
    out: str | Path | None = None,
    config: QuantizeConfig | Mapping[str, Any] | None = None,
    *,
    calibration: Calibration | Mapping[str, Any] | None = None,
    run: Run | Mapping[str, Any] | None = None,
) -> MemoryEstimate:
    """Return what `quantize` with the same arguments needs, and what there is; no weights are read.

    Args:
        model: Hub id or folder of a float model.
        out: Where the checkpoint would go; its disk is looked at.
        config: All settings of the quantization; None for the defaults.
        calibration: How many samples, of which length, also as a dictionary; the source is not looked at.
        run: Where and how it would run.

    Raises:
        GptqkitError: A model or settings that do not fit; see `errors`.
    """
    config, run = settings_of(QuantizeConfig, config or {}), settings_of(Run, run or {})
    if calibration is None or isinstance(calibration, Mapping):
        calibration = {"source": None, **(calibration or {})}
    calibration = settings_of(Calibration, calibration)
    folder = fetch(model, run.revision, weights=False)
    empty = open_empty(folder, trust_remote_code=run.trust_remote_code)
    length = calibration.sequence_length or default_length(empty.model)
    check_length(empty.model, length)
    shape = (calibration.samples, length) if needs_calibration(config) else None
    if out is not None:
        check_apart(folder, Path(at_home(out)))
    if config.chooses_bits:
        targets, head = find_targets(empty.model, config)[0], find_head(empty.model, config)
        every = [each for own in [*targets, [head] if head else []] for each in own]
        check_reachable(sum(checkpoint_bytes(empty.model, every, config)), targets, config)
    beside = Path.cwd() if out is None else Path(at_home(out)).parent
    return estimate(empty, config, shape, run, choose_device(run.device), beside)


def estimate(
    empty: EmptyModel,
    config: QuantizeConfig,
    shape: Sequence[int] | None,
    run: Run,
    device: torch.device,
    folder: Path,
    processes: int = 1,
) -> MemoryEstimate:
    """Return what a job needs, by the formulas above, whose checkpoint goes to `folder`.

    `shape` is the number of calibration samples, and of tokens of each; None where there are none. So many `processes`
    share the samples, and on this machine the RAM.
    """
    model, stored, on_cpu = empty.model, empty.model.dtype, device.type == "cpu"
    blocks = nn.ModuleList(block for stack in find_blocks(model) for block in stack.values())
    targets, head = find_targets(model, config)[0], find_head(model, config)
    parts = [*targets, [head] if head else []]
    every = [target for part in parts for target in part]
    dtype = torch.float32 if on_cpu else stored
    paired, cross = (bool(shape) and needs(config) for needs in (pairs_models, needs_cross))
    samples, length = shape or PROBE.input_ids.shape
    tokens = min(run.batch_size or LARGEST_BATCH, samples) * (length // 2 + 1 if has_two_stacks(model) else length)
    width = model.config.get_text_config().hidden_size * dtype.itemsize
    states = width * length * -(-samples // processes) * (1 + paired)
    behind = width * length * len(blocks) if shape and config.two_sided else 0  # all blocks, of one sample
    gradients = behind * -(-min(samples, SAMPLES) // processes) * torch.bfloat16.itemsize // dtype.itemsize
    states = max(states, behind * min(samples, AT_ONCE))

    output = sum(checkpoint_bytes(model, every, config)) if config.target_size is None else int(config.target_size)
    block = max(_bytes(each, dtype) for each in blocks)
    statistics = max(_pass_bytes(part, cross) for part in parts) if shape else 0
    forward = _forward_bytes([target for part in targets for target in part], tokens, width, dtype, paired)
    solver = max(_solver_bytes(unit, cross, calibrated=shape is not None) for part in parts for unit in _units(part))
    learning, tuning = _backward_bytes(model, parts, config, dtype, (samples, length))
    work = {
        "one block": block * (1 + paired),
        "outside the blocks": _bytes(model, dtype) - _bytes(blocks, dtype),
        "statistics of inputs": statistics,
        "forward pass, solver or learning": max(forward, solver, learning),
    }
    machine = _available(device, folder, processes)
    place = run.activations if run.activations != "auto" else _choose(states + gradients, work, machine)
    in_ram = place == "memory" or (on_cpu and place == "device")
    kept = {"hidden states": states, "gradients": gradients}
    ram = {name: size * in_ram for name, size in kept.items()}
    ram["quantized weights"] = round(1.7 * max(sum(target.weights for target in part) for part in parts))
    needs: dict[str, dict[str, int]] = {"RAM": {**work, **ram} if on_cpu else ram}
    if not on_cpu:
        needs["GPU memory"] = {**work, **{name: size * (place == "device") for name, size in kept.items()}}
    computes = needs["RAM" if on_cpu else "GPU memory"]  # in what the work is done
    computes["tuning, when these are gone"] = max(0, tuning - sum(computes.values()))
    on_disk = {"hidden states": 2 * states * processes, "gradients": gradients * processes * (place == "disk")}
    needs["disk"] = {"checkpoint": output, "files to be joined": output * _made_again(parts, config, run), **on_disk}
    return MemoryEstimate(
        needs=needs,
        available={name: machine[name] for name in needs},
        least={"RAM" if on_cpu else "GPU memory": block + statistics // 2, "disk": output},
        activations=place,
        blocks=len(blocks),
        source_bytes=_bytes(model, stored),
        output_bytes=output,
    )


def _available(device: torch.device, folder: Path, processes: int) -> dict[str, int | None]:
    """Return the bytes that there are for one process; None where that is not known."""
    ram, gpu = available_ram(), None if device.type == "cpu" else _available_gpu(device)
    return {"RAM": None if ram is None else ram // processes, "GPU memory": gpu, "disk": _free_disk(folder)}


def available_ram(root: Path = Path("/")) -> int | None:
    """Return the bytes of RAM that can be had without swapping, within control groups; None if unknown."""
    found = [int(line.split()[1]) << 10 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        own = mount / line.removeprefix("0::/")  # in a container, this may be the host's: then only the mount is there
        found += [room for group in (own / "_").parents if group.is_relative_to(mount) for room in _room(group)]
    return min(found, default=None)


def _room(group: Path) -> list[int]:
    """Return what one control group leaves, with the cached files that it would give up first; nothing if unlimited."""
    try:
        room = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return []
    cached = dict(line.split() for line in _lines(group / "memory.stat")).get("inactive_file", 0)
    return [max(0, room + int(cached))]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _choose(states: int, work: Mapping[str, int], machine: Mapping[str, int | None]) -> str:
    """Return the fastest place where hidden states fit: the GPU, half of the free RAM, or the disk."""
    gpu, ram = machine["GPU memory"], machine["RAM"]
    if gpu is not None and sum(work.values()) + states < 0.8 * gpu:
        return "device"
    return "memory" if ram is None or states <= ram // 2 else "disk"


def _bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the size of a module's parameters, floating-point ones in `dtype`."""
    return sum(
        parameter.numel() * (dtype.itemsize if parameter.is_floating_point() else parameter.itemsize)
        for parameter in module.parameters()
    )


def _forward_bytes(targets: Sequence[Target], tokens: int, width: int, dtype: torch.dtype, paired: bool) -> int:
    """Return what a block takes at its widest, with hidden states before and after it, and the other model's inputs."""
    widest = max((sum(target.shape) for target in targets), default=0)
    return round(tokens * (2 * width + 2.5 * widest * dtype.itemsize) * (1 + paired / 2))


def _made_again(parts: Sequence[list[Target]], config: QuantizeConfig, run: Run) -> bool:
    """Whether other files are made of all parts: small ones are joined, and some formats are one file."""
    largest, most = max(sum(target.packed_bytes for target in part) for part in parts), int(run.shard_size)
    return 2 * largest <= min(most, JOINED_BYTES) or find_format(config.format).finish is not None


def _pass_bytes(targets: list[Target], cross: bool) -> int:
    """Return what is known at once: of the widest input or all experts', and of all outputs, each up to the limit."""
    widest, of_experts = 0, Counter[tuple[str, str]]()
    for target in targets:
        if target.experts is not None:
            of_experts[target.experts, target.inner.rpartition(".")[2]] += input_bytes(target, cross=cross)
        widest = max(widest, input_bytes(target, cross=cross))
    sides = [output_bytes(target) for target in targets if target.config.two_sided]
    inputs = max(widest, min(max(of_experts.values(), default=0), STATISTICS_BYTES))
    return inputs + max(max(sides, default=0), min(sum(sides), STATISTICS_BYTES))


def _units(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Yield Linears that may be solved together: of one module, and as wide."""
    same: dict[tuple[str, int], list[Target]] = {}
    for target in targets:
        same.setdefault((target.inner.rpartition(".")[0], target.shape[1]), []).append(target)
    for each in same.values():
        yield from alike(each)


def _solver_bytes(unit: Sequence[Target], cross: bool, *, calibrated: bool) -> int:
    """Return what solving Linears together takes beside their statistics."""
    target, n = unit[0], sum(each.shape[0] for each in unit)
    k, s = target.shape[1], 8 if target.config.float64 else 4
    if not calibrated:
        return 12 * n * k
    moments = 4 * k * k * (1 + cross) + 4 * n * k * (1 + 2 * needs_drift(target.config))
    factor = s * n * k + s * k * k * (3 + cross)
    rows = -(-n // PARTS) if target.config.two_sided else n
    sweep = s * rows * k * (4 + cross) + s * k * k * (1 + cross) + rows * k
    refined = 9 * s * rows * k + s * k * k * (2 + cross) if target.config.refine_rounds else 0
    kept = 0
    if target.config.two_sided:  # F and its factor, of all; and what factorizing one takes
        squares = [each.shape[0] ** 2 for each in unit]
        kept = 2 * s * (n * k + sum(squares) + max(squares))
    return moments + max(factor, sweep, refined) + kept


def _backward_bytes(
    model: Any,
    parts: Sequence[Sequence[Target]],
    config: QuantizeConfig,
    dtype: torch.dtype,
    shape: Sequence[int],
) -> tuple[int, int]:
    """Return what learned rounding or `two_sided` takes beside a block, and what tuning the scales takes in all.

    Backpropagation keeps about six tensors as wide as a block is at its widest, of each sample and block, and of logits
    five; tuning also stretched weights and, where these are narrower, their float32 originals. Where memory runs out,
    tuning goes on with less and takes longer: this is what it takes where there is room.
    """
    (samples, length), (*blocks, _) = shape, parts
    kept = [6 * max((sum(target.shape) for target in part), default=0) * dtype.itemsize * length for part in blocks]
    logits = 4 * length * model.config.get_text_config().vocab_size
    learning = tuning = 0
    if config.learn_iterations:
        codes = max(sum(target.weights for target in part) for part in blocks)
        learning = max(kept) * min(LEARNED_AT_ONCE, samples) + 20 * codes
    if config.two_sided:
        learning = max(learning, max(kept) * min(AT_ONCE, samples), 4 * logits)
    if config.tune_epochs:
        weights = sum(target.weights for part in parts for target in part)
        stretched = (dtype.itemsize + 4 * (dtype.itemsize < 4)) * weights
        tuning = 2 * _bytes(model, dtype) + stretched + (sum(kept) + 5 * logits) * min(TUNED_AT_ONCE, samples)
    return learning, tuning


def _available_gpu(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _free_disk(folder: Path) -> int:
    folder = Path(os.path.abspath(folder))
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
