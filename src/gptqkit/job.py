"""One quantization that ends in a checkpoint: finished blocks are on disk, and another process can go on from there.

Everything is in a work directory beside the checkpoint to be, `.NAME.gptqkit-work`:

    lock                     held by the process at work
    job.json                 what is being made, from what: only the same job goes on here
    block-N.K.safetensors    the tensors of a finished block, as they will stand in the checkpoint
    block-N.json             its record; written last: a block without it is not finished
    hidden-N-R.bin ...       hidden states that enter block N, of the samples of process R; float-N-R.bin for GPTAQ
    states.json              which of these files are whole; written last
    checkpoint/              the directory that becomes the target
    complete.json            it is complete; where it is gone, it is the target by now

Hidden states are saved at most every few minutes (on disk they are there anyway): resuming runs the finished blocks
after the last save again. Every file is synced before another one refers to it. The directory vanishes with the job.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from .calibration.cache import ActivationCache
from .calibration.samples import Samples
from .distributed import Processes
from .errors import CheckpointError, ConversionError, OutputExistsError, RankError, ResumeError, ShapeError
from .export.checkpoint import (
    Checkpoint,
    check_written,
    matrices,
    open_checkpoint,
    part_of_checkpoint,
    write_configs,
    write_report,
)
from .export.formats import Declared, LayerSpec, find_format
from .export.shards import MAX_SHARD_BYTES, Shards, join_files, read_json, same_bits, some, write_files
from .export.staging import check_target, replace_directory, sync_directory
from .model import FloatModel
from .quantizer.config import QuantizeConfig
from .quantizer.quantized import QuantizedWeight
from .report import ModuleReport
from .version import __version__

_LOG = logging.getLogger("gptqkit")

SAVE_SECONDS = 300.0
"""Least time between two saves of hidden states that are not on disk anyway."""


class Job:
    """A work directory, made or taken up where an earlier process left it; a context that keeps or discards it.

    Rank 0 writes it all, but for hidden states, of which every process writes its own.

    Args:
        out: The checkpoint to make.
        identity: What decides the result, as plain values for JSON; see `identity_of`.
        processes: The processes of the job.
        resume: Go on where there is an unfinished job.
        overwrite: Replace a quantized model at `out`.

    Attributes:
        folder: The work directory.
        records: Those of the finished blocks, in order.
        states: What states.json says; None before the first save.

    Raises:
        OutputExistsError: The target exists, or an unfinished job is there and `resume` is not set.
        ResumeError: The unfinished job is another one, or another process is at work on it.
        RankError: The processes do not see one work directory.
    """

    def __init__(
        self, out: Path, identity: Mapping[str, Any], processes: Processes, *, resume: bool, overwrite: bool
    ) -> None:
        self.out, self.folder = out, work_path(out)
        self._processes, self._overwrite, self._lock = processes, overwrite, -1
        with processes.together():
            if processes.rank == 0:
                self._open(identity, resume=resume)
        self.records: list[dict[str, Any]] = [
            read_json(file) for file in [*sorted(self.folder.glob("block-*.json")), *self.folder.glob("head.json")]
        ]
        try:
            with processes.together():
                if not (self.folder / "job.json").exists():
                    raise RankError(
                        f"rank {processes.rank} does not see {self.folder} of rank 0; give an output folder on a file "
                        "system that all machines share"
                    )
        except RankError as error:
            self.__exit__(type(error), error, None)
            raise
        self.records = processes.gather(self.records)[0]
        saved = self.folder / "states.json"
        self.states: dict[str, Any] | None = processes.gather(read_json(saved) if saved.exists() else None)[0]
        self._start = self._saved = time.monotonic()
        self._before: float = self.records[-1]["seconds"] if self.records else 0.0

    @property
    def seconds(self) -> float:
        """Time spent on the job, in this process and those before it, up to their last finished block."""
        return self._before + time.monotonic() - self._start

    @property
    def reports(self) -> list[ModuleReport]:
        """One per module of the finished blocks."""
        rows = [row for record in self.records for row in record["reports"]]
        return [ModuleReport(**{**row, "shape": tuple(row["shape"])}) for row in rows]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or self._processes.rank:
            return
        if self.records:
            _LOG.warning(
                "%d finished blocks are kept in %s; resume the job to go on from there", len(self.records), self.folder
            )
            self._close()
        else:
            self._discard()

    def _open(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        identity = json.loads(json.dumps(identity))
        environment = {"threads": torch.get_num_threads(), "processes": self._processes.size, **versions()}
        if self.folder.is_symlink():
            raise ResumeError(f"{self.folder} is a link, and jobs need a folder of their own there; remove it")
        known, complete = ((self.folder / name).exists() for name in ("job.json", "complete.json"))
        appeared = complete and not (self.folder / "checkpoint").exists()
        if self.folder.exists() and (appeared or not known):  # of a job killed in its first or last steps
            self._lock_it()
            self._discard()
        if not self.folder.exists():
            check_target(self.out, overwrite=self._overwrite)
            self.folder.mkdir(parents=True)
            self._lock_it()
            self._write_json("job.json", {"job": identity, "environment": environment})
            sync_directory(self.folder.parent)
            return
        if not resume:
            raise OutputExistsError(
                f"{self.folder} holds an unfinished job for {self.out.name}; resume it (resume=True, --resume), or "
                "delete that folder to start again"
            )
        self._lock_it()
        begun = read_json(self.folder / "job.json")
        different = differences(begun["job"], identity)
        if different:
            self._close()
            raise ResumeError(
                f"the unfinished job in {self.folder} is another one: {some(different)}. Start with what it was "
                "started with, or delete that folder to start again"
            )
        elsewhere = differences(begun["environment"], environment)
        if elsewhere:
            _LOG.warning("resumed in another environment, so last bits may differ: %s", some(elsewhere))
        self._delete_remains()

    def _delete_remains(self) -> None:
        """Delete what was never finished."""
        states = self.folder / "states.json"
        whole = {
            file for files in (read_json(states)["files"].values() if states.exists() else ()) for file, *_ in files
        }
        for record in [*self.folder.glob("block-*.json"), *self.folder.glob("head.json")]:
            whole |= set(read_json(record)["files"])
        for file in [*self.folder.glob("*.bin"), *self.folder.glob("*.safetensors"), *self.folder.glob("*.tmp")]:
            if file.name not in whole:
                file.unlink()

    def _lock_it(self) -> None:
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ResumeError(f"another process is at work in {self.folder}; wait for it, or stop it") from error

    def _close(self) -> None:
        """Leave the job as it is, for another process to go on."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _discard(self) -> None:
        """Delete the job and all that it made."""
        (self.folder / "job.json").unlink(missing_ok=True)  # from here on nobody resumes it
        shutil.rmtree(self.folder, ignore_errors=True)
        self._close()

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file for good."""
        temporary = self.folder / f"{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.folder / name)
        sync_directory(self.folder)

    def write_block(
        self, model: FloatModel, layer: int | None, solved: Mapping[str, QuantizedWeight], config: QuantizeConfig
    ) -> Checkpoint:
        """Write the tensors of a block, or of the output layer, and read them back; they do not count yet.

        Args:
            model: The float model, with what the block holds beside its quantized weights.
            layer: Number of the block; None for the output layer.
            solved: The quantized weights by the names of their modules in the model.
            config: The settings.

        Returns:
            What was written.

        Raises:
            ConversionError, ShapeError: A weight that the format cannot hold.
            CheckpointError: A tensor reads back differently from what was written.
            OSError: The disk refused.
        """
        layers = {stored_module(model, name): weight for name, weight in solved.items()}
        others = dict(model.others(layer, solved.keys())) if layer is not None else {}
        files = write_files(self.folder / _stem(layer), _packed(layers, others, config))
        tensors = Shards.of_files(files)
        for name, tensor in others.items():
            if not same_bits(tensors.get(name), tensor):
                raise CheckpointError(f"{name} reads back differently; disk or memory is faulty")
        specs = {name: LayerSpec.of(weight) for name, weight in layers.items()}
        part = part_of_checkpoint(tensors, _declared(config), specs, path=self.folder)
        for name, weight in layers.items():
            check_written(name, part.weight(name), weight)
        return part

    def commit(
        self, layer: int | None, part: Checkpoint, reports: list[ModuleReport], progress: Mapping[str, Any]
    ) -> None:
        """Let a block that was written count from now on.

        Args:
            layer: Number of the block; None for the output layer.
            part: What was written.
            reports: Of its modules.
            progress: Whatever else the next process must know, as plain values for JSON.
        """
        record = {
            "layer": layer,
            "files": [file.name for file in part.tensors.files],
            "layers": {name: dataclasses.asdict(spec) for name, spec in part.layers.items()},
            "matrices": matrices(part.other_names, part.tensors),
            "reports": [dataclasses.asdict(report) for report in reports],
            "seconds": self.seconds,
            **progress,
        }
        self._write_json(f"{_stem(layer)}.json", record)
        self.records.append(record)

    def read_block(self, record: Mapping[str, Any], config: QuantizeConfig) -> Checkpoint:
        """Open what an earlier process wrote of a block."""
        specs = {name: LayerSpec(**spec) for name, spec in record["layers"].items()}
        tensors = Shards.of_files(self.folder / file for file in record["files"])
        return part_of_checkpoint(tensors, _declared(config), specs, path=self.folder)

    def states_file(self, stream: str, layer: int, *, again: bool = False) -> Path:
        """Return where this process keeps the hidden states "hidden" or "float" that enter block `layer`.

        Args:
            stream: Which.
            layer: Number of the block.
            again: For what is read from such files, perhaps those of other processes.
        """
        return self.folder / f"{stream}-{layer:05}{'r' * again}-{self._processes.rank}.bin"

    def save_states(self, layer: int, caches: Mapping[str, ActivationCache]) -> None:
        """Save the hidden states that enter block `layer`, if it is time to; those saved before are deleted."""
        on_disk = all(cache.file is not None for cache in caches.values())
        late = self._processes.gather(time.monotonic() - self._saved > SAVE_SECONDS)[0]
        if not on_disk and not late:
            return
        mine = {}
        for stream, cache in caches.items():
            file = self.states_file(stream, layer)
            cache.save(file)
            mine[stream] = (file.name, cache.samples.start, cache.samples.stop)
        files = {stream: [of_one[stream] for of_one in self._processes.gather(mine)] for stream in mine}
        shape = list(next(iter(caches.values())).shape)
        self.states = {"layer": layer, "shape": shape, "files": files}
        if self._processes.rank == 0:
            self._write_json("states.json", self.states)
        self._processes.gather(None)  # nothing is deleted before that is written
        for old in self.folder.glob(f"*-{self._processes.rank}.bin"):
            if old.name not in {name for name, *_ in mine.values()}:
                old.unlink()
        self._saved = time.monotonic()

    def load_states(self, stream: str, cache: ActivationCache) -> None:
        """Fill `cache` with what was saved last, by whichever processes."""
        for name, start, stop in (self.states or {"files": {stream: []}})["files"][stream]:
            cache.load(self.folder / name, range(start, stop))

    def finish(
        self,
        model: FloatModel,
        config: QuantizeConfig,
        report: Mapping[str, Any],
        tokenizer: Any | None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
        measure: Callable[[Path], Mapping[str, Any]] = lambda _: {},
    ) -> None:
        """Make the checkpoint of all blocks and of what stands outside them, and let it appear under its name.

        Args:
            model: The float model.
            config: The settings.
            report: quantization_report.json.
            tokenizer: Saved beside the weights.
            max_shard_bytes: Of the checkpoint's files, at most.
            measure: Called with the complete directory; what it returns is merged into the report.

        Raises:
            CheckpointError: The checkpoint does not read back as what was solved.
            OSError: The disk refused; the blocks stay, so that the job can go on.
        """
        specs = {name: LayerSpec(**each) for record in self.records for name, each in record["layers"].items()}
        floats = [name for record in self.records for name in record["matrices"]]
        rest = ((name, tensor) for name, tensor in model.others(None, ()) if name.removesuffix(".weight") not in specs)
        parts = [self.folder / file for record in self.records for file in record["files"]]
        directory, complete = self.folder / "checkpoint", self.folder / "complete.json"
        complete.unlink(missing_ok=True)
        sync_directory(self.folder)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        join_files([*parts, *write_files(self.folder / "outside", rest, max_shard_bytes)], directory, max_shard_bytes)
        quantization = find_format(config.format).write_config(config, specs, floats)
        if model.passthrough:
            quantization.setdefault("meta", {})["passthrough_tensors"] = model.passthrough
        own = model.model
        model_config = {**json.loads(own.config.to_json_string()), "architectures": [type(own).__name__]}
        generation = json.loads(own.generation_config.to_json_string()) if own.can_generate() else None
        write_configs(directory, quantization, model_config, generation, tokenizer)
        model.copy_files(directory)
        if open_checkpoint(directory).layers != specs:
            raise CheckpointError(f"{directory} reads back with other quantized layers than were written")
        write_report(directory, {**report, **measure(directory)})
        self._write_json(complete.name, {})
        replace_directory(directory, Path(os.path.realpath(self.out)), overwrite=self._overwrite)
        self._discard()


def stored_module(model: FloatModel, name: str) -> str:
    """Return what the checkpoint calls a module of the model."""
    return model.names.stored(f"{name}.weight").removesuffix(".weight")


def work_path(target: Path) -> Path:
    """Return where the work directory of the checkpoint `target` is."""
    target = Path(os.path.realpath(target))
    return target.with_name(f".{target.name}.gptqkit-work")


def identity_of(
    model: FloatModel, config: QuantizeConfig, samples: Samples | None, batch_size: int | None, device: torch.device
) -> dict[str, Any]:
    """Return all that decides the result of a job, as plain values for JSON: only the same may go on."""
    calibration: dict[str, Any] = {}
    if samples is not None:
        digest = hashlib.sha256(samples.input_ids.numpy().tobytes())
        if samples.attention_mask is not None:
            digest.update(samples.attention_mask.numpy().tobytes())
        count, length = samples.input_ids.shape
        calibration = {"samples": count, "length": length, "tokens": digest.hexdigest()}
    return {
        "model": model.identity(),
        "config": config.to_dict(),
        "calibration": calibration,
        "batch_size": batch_size,
        "device": device.type,
    }


def check_agreement(processes: Processes, identity: Mapping[str, Any]) -> None:
    """Raise RankError where processes were started for different jobs, naming what differs."""
    jobs = processes.gather({**identity, "versions": versions()})
    with processes.together():
        for rank, job in enumerate(jobs):
            different = differences(jobs[0], job, form=f"{{}} is {{!r}} on rank 0, {{!r}} on rank {rank}")
            if different:
                raise RankError(
                    f"the processes were started for different jobs: {some(different)}; start all with the same "
                    "arguments, files and versions"
                )


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part."""
    return {"gptqkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def differences(before: Any, now: Any, where: str = "", form: str = "{} was {!r}, now {!r}") -> list[str]:
    """Return what differs between two trees of plain values, as text.

    Args:
        before: One tree.
        now: The other.
        where: Name of their root.
        form: How to say it of a name and two values.

    >>> differences({"bits": 4, "model": {"size": 1}}, {"bits": 3, "model": {"size": 1}})
    ['bits was 4, now 3']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            text
            for key in dict.fromkeys([*before, *now])
            for text in differences(before.get(key), now.get(key), f"{where}.{key}" if where else str(key), form)
        ]
    return [] if before == now else [form.format(where, before, now)]


def _stem(layer: int | None) -> str:
    return "head" if layer is None else f"block-{layer:05}"


def _declared(config: QuantizeConfig) -> Declared:
    return Declared(
        format=config.format,
        bits=config.bits,
        group_size=config.group_size,
        sym=config.sym,
        desc_act=config.desc_act,
    )


def _packed(
    layers: Mapping[str, QuantizedWeight], others: Mapping[str, Tensor], config: QuantizeConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a block, packed when its turn comes."""
    for name, weight in layers.items():
        try:
            tensors = find_format(config.format).pack(weight)
        except (ConversionError, ShapeError) as error:
            raise type(error)(f"{name}: {error}") from error
        yield from ((f"{name}.{key}", tensor) for key, tensor in tensors.items())
    yield from others.items()
