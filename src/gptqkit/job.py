"""One quantization that ends in a checkpoint: what is finished is on disk, and another process can go on from there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from .calibration.windows import TokenWindows
from .errors import RankError
from .export.reader import Checkpoint, open_checkpoint
from .export.shards import some
from .export.work import WorkDirectory, differences, work_path
from .export.writer import finish_checkpoint, write_part
from .quantizer.config import QuantizeConfig
from .quantizer.journal import Resumed, Step
from .quantizer.quantized import QuantizedWeight
from .quantizer.ranks import Ranks
from .quantizer.report import ModuleReport
from .source import FloatModel
from .version import __version__

_LOG = logging.getLogger("gptqkit")
_OUTSIDE = "outside"


class Job:
    """The journal of a walk, in a work directory beside the checkpoint to be.

    Every rank writes its own samples' hidden states; rank 0 writes all else.

    Args:
        out: The checkpoint to make.
        source: The float model.
        config: The settings.
        windows: The calibration tokens.
        batch_size: Samples per forward pass, as asked for; None for as many as fit.
        ranks: The processes of the job.
        resume: Go on where there is an unfinished job.
        overwrite: Replace a quantized model at `out`.

    Raises:
        OutputExistsError, ResumeError: See `WorkDirectory`.
        RankError: The ranks do not see one work directory.
    """

    def __init__(
        self,
        out: Path,
        source: FloatModel,
        config: QuantizeConfig,
        windows: TokenWindows | None,
        batch_size: int | None,
        ranks: Ranks,
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        self.out = out
        self.folder = work_path(out)
        self._ranks = ranks
        self._samples = 0 if windows is None else len(windows.input_ids)
        self._work: WorkDirectory | None = None
        with ranks.together():
            if ranks.rank == 0:
                what = identity(source, config, windows, batch_size, ranks.device)
                environment = {"threads": torch.get_num_threads(), "ranks": ranks.size, **versions()}
                self._work = WorkDirectory(out, what, resume=resume, overwrite=overwrite, environment=environment)
        self._source = source
        self._config = config
        self._start = time.perf_counter()
        steps = self._steps()
        self._before: float = steps[-1]["seconds"] if steps else 0.0
        try:
            self._check_shared()
        except BaseException as error:
            self.__exit__(None, error, None)
            raise

    @property
    def work(self) -> WorkDirectory:
        """The work directory, on rank 0.

        Raises:
            ValueError: On another rank.
        """
        if self._work is None:
            raise ValueError("only rank 0 has the work directory")
        return self._work

    def __enter__(self) -> Job:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._work is None or error is None:
            return
        if self._work.records:
            count = len(self._work.records)
            _LOG.warning("%d finished parts are kept in %s; resume the job to go on from there", count, self.folder)
            self._work.close()
        else:
            self._work.discard()

    def _check_shared(self) -> None:
        """Make sure that all ranks see one work directory."""
        marks = [self.folder / f"rank-{rank}" for rank in range(self._ranks.size)]
        advice = "give an output folder on a file system that all machines share"
        with self._ranks.together():
            try:
                marks[self._ranks.rank].touch()
            except FileNotFoundError as error:
                raise RankError(f"rank {self._ranks.rank} does not see {self.folder} of rank 0; {advice}") from error
        with self._ranks.together():
            if self._ranks.rank == 0:
                for rank, mark in enumerate(marks):
                    if not mark.exists():
                        raise RankError(f"{self.folder} of rank {rank} is not that of rank 0; {advice}")
                    mark.unlink()

    @property
    def seconds(self) -> float:
        """Time spent on the job, in this process and those before it, up to their last finished block."""
        return self._before + time.perf_counter() - self._start

    def resumed(self) -> Resumed | None:
        """Where to go on; None for a new job."""
        return self._ranks.gather(self._resumed())[0]

    def _steps(self) -> list[dict[str, Any]]:
        """The records of the finished parts of the walk."""
        records = [] if self._work is None else self._work.records
        return [record["data"] for record in records if record["name"] != _OUTSIDE]

    def _resumed(self) -> Resumed | None:
        steps = self._steps()
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
            hidden=self.folder / last["hidden"] if last["hidden"] else None,
            hidden_float=self.folder / last["float"] if last["float"] else None,
        )

    def file(self, stream: str, layer: int) -> Path:
        """Where the hidden states that enter block `layer` belong."""
        return self.folder / f"{stream}-{layer:05}.bin"

    def keep(self, step: Step) -> None:
        """Write a finished block: its hidden states, its tensors, and last its record."""
        files: dict[str, str | None] = {}
        for stream, states in (("hidden", step.hidden), ("float", step.hidden_float)):
            files[stream] = None
            if states is not None and step.layer is not None:
                file = self.file(stream, step.layer + 1)
                states.save(file)
                files[stream] = file.name
        self._ranks.barrier()  # the states of all samples are there
        if self._ranks.rank:
            return
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
            for file in self.folder.glob(f"{stream}-*.bin"):
                if file.name < (files[stream] or "z"):  # other ranks may be writing those of the next block already
                    file.unlink()

    def _as_stored(self, step: Step) -> tuple[dict[str, QuantizedWeight], dict[str, Tensor]]:
        """The quantized weights and the other tensors of a finished part under their names in the checkpoint."""
        names, model = self._source.names, self._source.model
        solved = {step.places[name]: weight for name, weight in step.weights.items()}
        touched = {parameter for parameter, _ in solved}
        touched |= {f"{parameter}_bias" for parameter, expert in solved if expert is not None}
        weights: dict[str, QuantizedWeight] = {}
        others: dict[str, Tensor] = {}
        for stored, tensor in self._source.tensors(step.layer):
            shares = names.shares(stored)
            if touched.isdisjoint(shares):
                if step.layer is not None:
                    others[stored] = tensor
                continue
            own = names.find(stored)
            for part in names.parts(shares[0]) if own is None and len(shares) == 1 else [own] if own else ():
                weight = solved.get((part.parameter, part.expert))
                if weight is not None:
                    weights[part.module] = weight if part.rows is None else weight.rows(part.rows)
                else:  # an expert that was left out, or the bias of one that was not
                    others[part.name] = tensor if own else names.cut(part.parameter, tensor)[part.name]
            for parameter in shares[1:] and shares:  # one stored tensor became several parameters: under their names
                name = parameter.removesuffix(".weight")
                if (parameter, None) in solved:
                    weights[name] = solved[parameter, None]
                else:
                    others[parameter] = model.get_parameter(parameter).detach().to(tensor.dtype)
        return weights, others

    def finish(
        self,
        report: Mapping[str, Any],
        tokenizer: Any | None,
        *,
        max_shard_bytes: int,
        measure: Callable[[Path], Mapping[str, Any]],
    ) -> None:
        """Write what stands outside the blocks as it is in the source, and make the checkpoint of all parts.

        Args:
            report: quantization_report.json.
            tokenizer: Saved beside the weights.
            max_shard_bytes: See `finish_checkpoint`.
            measure: See `finish_checkpoint`.
        """
        if not self.work.has(_OUTSIDE):
            done = {name for record in self.work.records for name in record["layers"]}
            rest = self._source.tensors(None)
            others = {name: tensor for name, tensor in rest if name.removesuffix(".weight") not in done}
            write_part(self.work, _OUTSIDE, {}, others, self._config)
        model = self._source.model
        finish_checkpoint(
            self.work,
            config=self._config,
            model_config={**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]},
            report=report,
            tokenizer=tokenizer,
            generation_config=json.loads(model.generation_config.to_json_string()) if model.can_generate() else None,
            carried=self._source.carried,
            copy_files=self._source.copy_files,
            max_shard_bytes=max_shard_bytes,
            measure=measure,
        )


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
    source: FloatModel,
    config: QuantizeConfig,
    windows: TokenWindows | None,
    batch_size: int | None,
    device: torch.device,
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


def check_agreement(
    ranks: Ranks,
    source: FloatModel,
    config: QuantizeConfig,
    windows: TokenWindows | None,
    batch_size: int | None,
    out: Path | str | None,
) -> None:
    """Check that all ranks were started for the same job.

    Raises:
        RankError: They were not; what differs is named.
    """
    if ranks.size == 1:
        return
    what = {**identity(source, config, windows, batch_size, ranks.device), "versions": versions()}
    jobs = ranks.gather({**what, "checkpoint": out is not None})
    with ranks.together():
        for rank, job in enumerate(jobs):
            different = differences(jobs[0], job, form=f"{{}} is {{!r}} on rank 0, {{!r}} on rank {rank}")
            if different:
                raise RankError(
                    f"the ranks were started for different jobs: {some(different)}; start all with the same arguments, "
                    "files and versions"
                )


def versions() -> dict[str, str]:
    """The versions of the packages that take part."""
    return {"gptqkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
