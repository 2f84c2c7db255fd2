"""One quantization that ends in a checkpoint: what is finished is on disk, and another process can go on from there."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .calibration.windows import TokenWindows
from .export.reader import Checkpoint, open_checkpoint
from .export.work import WorkDirectory
from .export.writer import write_part
from .quantizer.config import QuantizeConfig
from .quantizer.journal import Resumed, Step
from .quantizer.quantized import QuantizedWeight
from .quantizer.report import ModuleReport
from .source import FloatModel

_OUTSIDE = "outside"


class Job:
    """The journal of a walk, in a work directory beside the checkpoint to be.

    Args:
        work: The work directory.
        source: The float model.
        config: The settings.
        samples: How many calibration samples there are.
    """

    def __init__(self, work: WorkDirectory, source: FloatModel, config: QuantizeConfig, samples: int) -> None:
        self.work = work
        self._source = source
        self._config = config
        self._samples = samples
        self._start = time.perf_counter()
        steps = [record["data"] for record in work.records if record["name"] != _OUTSIDE]
        self._before: float = steps[-1]["seconds"] if steps else 0.0

    @property
    def seconds(self) -> float:
        """Time spent on the job, in this process and those before it, up to their last finished block."""
        return self._before + time.perf_counter() - self._start

    def resumed(self) -> Resumed | None:
        """Where to go on; None for a new job."""
        steps = [record["data"] for record in self.work.records if record["name"] != _OUTSIDE]
        if not steps:
            return None
        last = steps[-1]
        counts = torch.ones(self._samples, dtype=torch.bool)
        counts[last["excluded"]] = False
        reports = [row for step in steps for row in step["reports"]]
        return Resumed(
            layers=sum(step["layer"] is not None for step in steps),
            head=last["layer"] is None,
            reports=[ModuleReport(**{**row, "shape": tuple(row["shape"])}) for row in reports],
            counts=counts,
            batch_size=last["batch_size"],
            shape=tuple(last["shape"]),
            hidden=self.work.path / last["hidden"] if last["hidden"] else None,
            hidden_float=self.work.path / last["float"] if last["float"] else None,
        )

    def file(self, stream: str, layer: int) -> Path:
        """Where the hidden states that enter block `layer` belong."""
        return self.work.path / f"{stream}-{layer:05}.bin"

    def keep(self, step: Step) -> None:
        """Write a finished block: its hidden states, its tensors, and last its record."""
        files: dict[str, str | None] = {}
        for stream, states in (("hidden", step.hidden), ("float", step.hidden_float)):
            files[stream] = None
            if states is not None and step.layer is not None:
                file = self.file(stream, step.layer + 1)
                states.save(file)
                files[stream] = file.name
        weights, others = self._as_stored(step)
        record = {
            "layer": step.layer,
            "reports": [dataclasses.asdict(report) for report in step.reports],
            "excluded": (~step.counts).nonzero().flatten().tolist(),
            "batch_size": step.batch_size,
            "shape": list(step.hidden.shape) if step.hidden is not None else [],
            "seconds": self.seconds,
            **files,
        }
        name = "head" if step.layer is None else f"block-{step.layer:05}"
        write_part(self.work, name, weights, others, self._config, record)
        for stream in ("hidden", "float"):
            for file in self.work.path.glob(f"{stream}-*.bin"):
                if file.name != files[stream]:
                    file.unlink()

    def _as_stored(self, step: Step) -> tuple[dict[str, QuantizedWeight], dict[str, Tensor]]:
        """The quantized weights and the other tensors of a finished part under their names in the checkpoint."""
        names = self._source.names
        solved = {f"{name}.weight": weight for name, weight in step.weights.items()}
        weights: dict[str, QuantizedWeight] = {}
        others: dict[str, Tensor] = {}
        for stored, tensor in self._source.tensors(step.layer):
            shares = names.shares(stored)
            if solved.keys().isdisjoint(shares):
                if step.layer is not None:
                    others[stored] = tensor
                continue
            for parameter in shares:
                for part in names.parts(parameter):
                    if parameter in solved:
                        weights[part.module] = solved[parameter]
                    else:  # one stored tensor became several parameters, not all of them quantized
                        others[part.name] = self._source.model.get_parameter(parameter).detach().to(tensor.dtype)
        return weights, others

    def keep_the_rest(self) -> None:
        """Write what stands outside the blocks and is not quantized, as it is in the source."""
        if self.work.has(_OUTSIDE):
            return
        done = {name for record in self.work.records for name in record["layers"]}
        others = {
            name: tensor for name, tensor in self._source.tensors(None) if name.removesuffix(".weight") not in done
        }
        write_part(self.work, _OUTSIDE, {}, others, self._config)


class StoredWeights(Mapping[str, QuantizedWeight]):
    """The quantized weights of a checkpoint by name, read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: Checkpoint | None = None

    @property
    def _checkpoint(self) -> Checkpoint:
        self._opened = self._opened or open_checkpoint(self._path)
        return self._opened

    def __getitem__(self, name: str) -> QuantizedWeight:
        if name not in self._checkpoint.layers:
            raise KeyError(name)
        return self._checkpoint.quantized_weight(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.layers)

    def __len__(self) -> int:
        return len(self._checkpoint.layers)


def identity(
    source: FloatModel, config: QuantizeConfig, windows: TokenWindows | None, batch_size: int, device: torch.device
) -> dict[str, Any]:
    """All that decides the result of a job, as plain values for JSON: only the same may go on."""
    calibration: dict[str, Any] = {}
    if windows is not None:
        digest = hashlib.sha256(windows.input_ids.numpy().tobytes())
        if windows.attention_mask is not None:
            digest.update(windows.attention_mask.numpy().tobytes())
        samples, length = windows.input_ids.shape
        calibration = {"samples": samples, "length": length, "tokens": digest.hexdigest()}
    return {
        "model": source.identity(),
        "config": config.to_dict(),
        "calibration": calibration,
        "batch_size": batch_size,
        "device": device.type,
    }
