"""How much RAM, GPU memory and disk a job needs, estimated from shapes before it starts; good to about a third.

Of one Linear, weight (n, k), s bytes per number of the solver (4, or 8 with float64), p = 1 for GPTAQ, else 0:

    statistics   4 k^2 (1 + p)                          H and C, of one subset that shares an input, or of experts
    moments      4 k^2 (1 + p) + 4 n k                  their means; W in float32
    solver       s n k + 4 s k^2                        while H is factorized, or
                 s n k (4 + p) + s k^2 (1 + p) + n k    in the sweep: W twice, Q, E, w when rounded; R, P; codes
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .calibration.config import Calibration
from .errors import DoesNotFitError
from .evaluating import check_length, default_length
from .loading import choose_device
from .model import EmptyModel, open_empty
from .pipeline import STATISTICS_BYTES
from .quantizer.config import QuantizeConfig
from .quantizer.methods import find_method
from .run import LARGEST_BATCH, Run
from .targets import Target, find_blocks, find_head, find_targets
from .units import size_text

_LOG = logging.getLogger("gptqkit")


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

    def total(self, name: str) -> int:
        """Return all that is needed of "RAM", "GPU memory" or "disk"."""
        return sum(self.needs[name].values())

    def check(self) -> None:
        """Refuse what surely cannot run, and log a warning for what may not.

        Raises:
            DoesNotFitError: Even the least does not fit.
        """
        for name, least in self.least.items():
            there = self.available[name]
            if there is None:
                continue
            advice = {
                "disk": "choose another folder, or free some",
                "RAM": "free some, or use a larger machine",
                "GPU memory": "use --device cpu, or a larger GPU",
            }[name]
            if least > there:
                raise DoesNotFitError(
                    f"{size_text(least)} of {name} is the least that this job needs, and there is {size_text(there)}; "
                    f"{advice}"
                )
            if self.total(name) > there:
                _LOG.warning(
                    "about %s of %s may be needed, and there is %s; if it runs out, use fewer or shorter samples, a "
                    "smaller batch size or --activations disk",
                    size_text(self.total(name)),
                    name,
                    size_text(there),
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "blocks": self.blocks,
            "activations": self.activations,
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "needs": {
                name: {"parts": dict(parts), "total": self.total(name), "available": self.available[name]}
                for name, parts in self.needs.items()
            },
        }


def plan(
    model: str | Path,
    out: str | Path | None = None,
    config: QuantizeConfig | None = None,
    *,
    calibration: Calibration | None = None,
    run: Run | None = None,
) -> MemoryEstimate:
    """Return what `quantize` with the same arguments needs, and what there is; no weights are read.

    Args:
        model: Hub id or folder of a float model.
        out: Where the checkpoint would go; its disk is looked at.
        config: All settings of the quantization; None for the defaults.
        calibration: How many samples, of which length; the source is not looked at.
        run: Where and how it would run.

    Raises:
        GptqkitError: A model or settings that do not fit; see `errors`.
    """
    config, run = config or QuantizeConfig(), run or Run()
    calibration = calibration or Calibration(None)
    empty = open_empty(model, trust_remote_code=run.trust_remote_code)
    length = calibration.sequence_length or default_length(empty.model)
    check_length(empty.model, length)
    samples = 0 if not find_method(config.method).needs else calibration.samples
    folder = Path.cwd() if out is None else Path(out).parent
    return estimate(empty, config, samples, length, run, choose_device(run.device), folder)


def estimate(
    empty: EmptyModel,
    config: QuantizeConfig,
    samples: int,
    length: int,
    run: Run,
    device: torch.device,
    folder: Path,
    processes: int = 1,
) -> MemoryEstimate:
    """Return what a job needs, by the formulas above.

    Args:
        empty: The model without weights, in the dtype of its files.
        config: The settings.
        samples: Calibration samples; 0 for none.
        length: Tokens per sample.
        run: Of it the batch size and the place of hidden states.
        device: Where blocks run.
        folder: Where the checkpoint is to be written.
        processes: How many share the samples, and on this machine the RAM.
    """
    model = empty.model
    prefix, blocks = find_blocks(model)
    targets, _ = find_targets(model, prefix, blocks, config)
    head = find_head(model, config)
    on_cpu, stored = device.type == "cpu", model.dtype
    dtype = torch.float32 if on_cpu else stored
    paired = "cross" in find_method(config.method).needs and samples > 0
    streams, batch = 1 + paired, min(run.batch_size or LARGEST_BATCH, max(samples, 1))
    hidden = model.config.get_text_config().hidden_size * dtype.itemsize * length
    states = -(-samples // processes) * hidden * streams

    source = _bytes(model, stored)
    every = [target for of_block in [*targets, [head] if head else []] for target in of_block]
    output = source + sum(_packed_bytes(target) - _weights(target) * stored.itemsize for target in every)
    cast = 1 if stored == dtype else 1 + stored.itemsize / dtype.itemsize  # read, then brought into another dtype
    outside = (_bytes(model, dtype) - _bytes(blocks, dtype)) * bool(samples)
    block = max((_bytes(each, dtype) for each in blocks), default=0)
    statistics = max((_statistics_bytes(each, paired) for each in targets), default=0) * bool(samples)
    widest = max((sum(target.shape) for target in every), default=0)
    # Of the samples of a batch: what a block holds at its widest, and their hidden states before and after it.
    forward = round(batch * (2 * hidden + 2.5 * widest * dtype.itemsize * length)) * bool(samples)
    solver = max((_solver_bytes(target, paired, calibrated=samples > 0) for target in every), default=0)
    results = max((sum(1.7 * _weights(target) for target in each) for each in targets), default=0)
    work = {
        "one block": round(block * (cast + paired)),
        "outside the blocks": round(outside * cast),
        "statistics of inputs": statistics,
        "forward pass or solver": max(forward, solver),
    }
    machine = {
        "RAM": None if (free := available_ram()) is None else free // processes,
        "GPU memory": None if on_cpu else _available_gpu(device),
        "disk": _free_disk(folder),
    }
    place = run.activations if run.activations != "auto" else _choose(states, work, machine)
    ram = {"quantized weights": round(results), "hidden states": states * (place == "memory")}
    needs: dict[str, dict[str, int]] = {"RAM": {**work, **ram} if on_cpu else ram}
    if not on_cpu:
        needs["GPU memory"] = {**work, "hidden states": states * (place == "device")}
    needs["disk"] = {"checkpoint": output, "hidden states": 2 * states * processes}
    least = {"RAM" if on_cpu else "GPU memory": block + statistics // 2, "disk": output}
    return MemoryEstimate(
        needs=needs,
        available={name: machine[name] for name in needs},
        least=least,
        activations=place,
        blocks=len(blocks),
        source_bytes=source,
        output_bytes=output,
    )


def available_ram(root: Path = Path("/")) -> int | None:
    """Return the bytes of RAM that can be had without swapping, within control groups; None if unknown."""
    found: list[int] = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    groups = root / "sys/fs/cgroup"
    for folder, most, used, cached in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            room = int((folder / most).read_text()) - int((folder / used).read_text())
            found.append(max(0, room + int(statistics.get(cached, 0))))  # cached files are given up first
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found, default=None)


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


def _weights(target: Target) -> int:
    return target.shape[0] * target.shape[1]


def _packed_bytes(target: Target) -> int:
    """Return what one Linear takes in the checkpoint: codes, zero points, scales and g_idx."""
    (rows, columns), bits = target.shape, target.config.bits
    groups = columns // (target.config.group_size or columns)
    return rows * columns * bits // 8 + groups * rows * bits // 8 + groups * rows * 2 + 4 * columns


def _statistics_bytes(targets: list[Target], paired: bool) -> int:
    """Return what the statistics of one pass take: of the widest input, or of all experts up to the limit."""
    of_one = [4 * (1 + paired) * target.shape[1] ** 2 for target in targets]
    experts = sum(
        size
        for size, target in zip(of_one, targets, strict=True)
        if target.inner.endswith("down_proj") and target.experts
    )
    return max([*of_one, min(experts, STATISTICS_BYTES)], default=0)


def _solver_bytes(target: Target, paired: bool, *, calibrated: bool) -> int:
    """Return what solving one Linear takes beside its statistics."""
    (n, k), s = target.shape, 8 if target.config.float64 else 4
    if not calibrated:
        return 4 * n * k * 4
    moments = 4 * k * k * (1 + paired) + 4 * n * k
    factor = s * n * k + 4 * s * k * k
    sweep = s * n * k * (4 + paired) + s * k * k * (1 + paired) + n * k
    return moments + max(factor, sweep)


def _available_gpu(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _free_disk(folder: Path) -> int:
    folder = Path(os.path.abspath(folder))
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
