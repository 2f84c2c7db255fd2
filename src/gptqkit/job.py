"""The work directory of a quantization: finished blocks are on disk, and another process can go on from there.

It stands beside the checkpoint to be, `.NAME.gptqkit-work`, and vanishes with the job:

    lock                     held by the process at work
    job.json                 what is being made, from what: only the same job goes on here
    chosen.json              the settings with bits for every module, where these are chosen
    block-N.K.safetensors    the tensors of a finished block, as they will stand in the checkpoint
    block-N.json             its record; written last: a block without it is not finished
    hidden-N-R.bin ...       hidden states that enter block N, of the samples of process R; float-N-R.bin of
                             the float model, where methods or learning compare with it
    encoded-N-R.bin ...      those that left an encoder, for its decoder; encoded-float-N-R.bin likewise
    hidden-beside-N-R.bin    what enters it beside them, where blocks hand on more; float-beside-N-R.bin likewise
    states.json              which of these files are whole; written last
    gradients-N-R.bin        with two_sided: those behind block N in the float model; every process makes them anew
    checkpoint/              the directory that becomes the target
    complete.json            it is complete; where it is gone, it is the target by now

Hidden states are saved at most every few minutes (on disk they are there anyway): resuming runs the finished blocks
after the last save again. Every file is synced before another one refers to it; what was never finished is written
again under the same name. JSON files carry a checksum of their own, and one of every file that they refer to.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .calibration.cache import ActivationCache, Handed
from .distributed import Processes
from .errors import CheckpointError, GptqkitError, OutputExistsError, RankError, ResumeError
from .export.shards import digest, read_json, some
from .export.staging import check_target, remove_leftovers, replace_directory, sync_directory
from .identity import differences, versions
from .quantizer.config import QuantizeConfig
from .report import ModuleReport
from .run import LARGEST_BATCH
from .units import counted

_LOG = logging.getLogger("gptqkit")

SAVE_SECONDS = 300.0
"""Least time between two saves of hidden states that are not on disk anyway."""

_OWN = re.compile(  # the files of a job
    r"lock|((job|chosen|states|complete|head|block-\d+)\.json|(outside|head|block-\d+)\.\d+\.safetensors)(\.tmp)?"
    r"|((hidden|float)(-beside)?|encoded|encoded-float|gradients)-\d+r?-\d+\.bin|checkpoint"
    r"|\.tmp\w{6}"  # a file that safetensors was writing when it was killed
)


def states_file(folder: Path, stream: str, layer: int, rank: int, *, again: bool = False) -> Path:
    """Return where a process keeps the hidden states of a stream that enter block `layer`, or gradients behind it.

    `again` is for what is read from such files, perhaps those of other processes.
    """
    return folder / f"{stream}-{layer:05}{'r' * again}-{rank}.bin"


class Job:
    """A work directory, made or taken up where an earlier process left it; a context that keeps or discards it.

    Rank 0 writes it all, but for hidden states, of which every process writes its own.

    Attributes:
        folder: The directory.
        records: Those of the finished blocks, in order.
        states: What states.json says; None before the first save.
        batch_size: Samples per batch, at most: what is asked for, or less where the job was begun with less.

    Raises:
        OutputExistsError: The target exists, or an unfinished job is there and `resume` is not set.
        ResumeError: The unfinished job is another one by its `identity`, or another process is at work on it.
    """

    def __init__(
        self, out: Path, identity: Mapping[str, Any], processes: Processes, *, resume: bool, overwrite: bool
    ) -> None:
        self.folder, self.out = work_path(out), out
        self._processes, self._overwrite, self._lock = processes, overwrite, -1
        self.batch_size: int | None = identity.get("batch_size")
        try:
            with processes.together():
                if processes.rank == 0:
                    self._open(json.loads(json.dumps(identity)), resume=resume)
            with processes.together():
                found = (*self._read(), self.batch_size) if processes.rank == 0 else ([], None, None)
            self.records: list[dict[str, Any]]
            self.states: dict[str, Any] | None
            self.records, self.states, self.batch_size = processes.gather(found)[0]
        except BaseException:  # Ctrl-C too: a notebook that goes on must not hold the lock
            if self._lock >= 0 and not (self.folder / "job.json").exists():  # no job has begun
                _delete(self.folder)
            self._unlock()
            raise
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
        if error is None or self._lock < 0:  # it is done, or rank 0's
            return
        again = isinstance(error, (OSError, MemoryError, RankError)) or not isinstance(error, GptqkitError)
        if self.records or (again and (self.folder / "chosen.json").exists()):
            advice = "resume the job (resume=True, --resume)" if again else "resumed, the job would fail again"
            kept = f"what is finished ({counted(len(self.records), 'block')})" if self.records else "the choice of bits"
            _LOG.warning("%s is kept in %s; %s", kept, self.folder, advice)
            self._unlock()
        else:
            self._discard()

    def check_shared(self) -> None:
        """Raise RankError where a process does not see the work directory."""
        with self._processes.together():
            if not (self.folder / "job.json").exists():
                raise RankError(
                    f"rank {self._processes.rank} does not see {self.folder} of rank 0; give an output folder on a "
                    "file system that all machines share"
                )

    def chosen(self) -> QuantizeConfig | None:
        """Return the settings that this job chose before, where it did."""
        file, found = self.folder / "chosen.json", None
        with self._processes.together():
            if self._processes.rank == 0 and (self.records or file.exists()):
                found = self._read_json(file)["config"]
        found = self._processes.gather(found)[0]
        return None if found is None else QuantizeConfig.from_dict(found)

    def choose(self, config: QuantizeConfig) -> QuantizeConfig:
        """Keep settings with chosen bits for those that resume; return rank 0's, which all go on with."""
        with self._processes.together():
            if self._processes.rank == 0:
                self._write_json("chosen.json", {"config": config.to_dict()})
        return QuantizeConfig.from_dict(self._processes.gather(config.to_dict())[0])

    def stem(self, layer: int | None) -> Path:
        """Return path and beginning of the names of the files of a block; None is the output layer."""
        return self.folder / ("head" if layer is None else f"block-{layer:05}")

    def commit(
        self, layer: int | None, written: Mapping[str, Any], reports: list[ModuleReport], progress: Mapping[str, Any]
    ) -> None:
        """Let a block that was written count from now on; `written` is its `record_of`.

        `progress` is what else the next process must know.
        """
        rows = [dataclasses.asdict(report) for report in reports]
        record = {"number": len(self.records), **written, "reports": rows}
        record |= {"seconds": self.seconds, **progress}
        self._write_json(f"{self.stem(layer).name}.json", record)
        self.records.append(record)

    def save_states(self, layer: int, caches: Mapping[str, ActivationCache | Handed]) -> None:
        """Save the hidden states that enter block `layer`, if it is time to; those saved before are deleted."""
        on_disk = all(cache.file is not None for cache in caches.values())
        late = self._processes.gather(time.monotonic() - self._saved > SAVE_SECONDS)[0]
        if not on_disk and not late:
            return
        before = {} if self.states is None else self.states["files"]
        kept = {stream: files for stream, files in before.items() if stream.startswith("encoded")}  # they do not change
        mine = {}
        for stream, cache in caches.items():
            if stream in kept:
                continue
            file = states_file(self.folder, stream, layer, self._processes.rank)
            cache.save(file)
            mine[stream] = (file.name, cache.samples.start, cache.samples.stop, digest(file))
        files = {stream: [of_one[stream] for of_one in self._processes.gather(mine)] for stream in mine}
        files |= kept
        self.states = {"layer": layer, "files": files}
        if self._processes.rank == 0:
            self._write_json("states.json", self.states)
            whole = {name for of_stream in files.values() for name, *_ in of_stream}
            for old in self.folder.glob("*.bin"):
                if old.name not in whole and not old.name.startswith("gradients"):
                    old.unlink()
        self._processes.gather(None)  # nobody goes on to the next files before
        self._saved = time.monotonic()

    def publish(self, directory: Path) -> None:
        """Let a complete directory in the work directory appear as the checkpoint, and end the job."""
        self._write_json("complete.json", {})
        replace_directory(directory, Path(os.path.realpath(self.out)), overwrite=self._overwrite)
        self._discard()

    def _open(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Make the work directory, or take it up."""
        known = self.folder / "job.json"
        remove_leftovers(self.out)
        self._lock = _locked(self.folder)
        unfinished = _is_unfinished(self.folder)
        environment: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "processes": self._processes.size,
            **versions(),
        }
        if not unfinished or (self._overwrite and not resume):
            _clear(self.folder)
            check_target(self.out, overwrite=self._overwrite)
            self._write_json(known.name, {"job": identity, "environment": environment})
            sync_directory(self.folder.parent)
            return
        if not resume:
            raise OutputExistsError(
                f"{self.folder} holds an unfinished job for {self.out.name}; resume it (resume=True, --resume), or "
                "delete that folder to start again"
            )
        begun, identity, asked = self._read_json(known), dict(identity), identity.get("batch_size")
        for job, place in ((begun["job"], begun["environment"]), (identity, environment)):
            place["batch_size"] = job.pop("batch_size") or LARGEST_BATCH  # a smaller one may let a job go on
        different = differences(begun["job"], identity)
        if different:
            raise ResumeError(
                f"the unfinished job in {self.folder} is another one: {some(different)}. Start with what it was "
                "started with, or delete that folder to start again"
            )
        self.batch_size = min(environment["batch_size"], begun["environment"]["batch_size"])
        if self.batch_size < environment["batch_size"]:
            if asked is not None:
                _LOG.warning("batch_size stays %d, with which the job was begun, instead of %d", self.batch_size, asked)
            environment["batch_size"] = self.batch_size
        elsewhere = differences(begun["environment"], environment)
        if elsewhere:
            _LOG.warning("resumed otherwise than it was begun, so last digits may differ: %s", some(elsewhere))
        for old in (self.folder / "complete.json", *self.folder.glob(".tmp??????")):  # the directory is made anew
            old.unlink(missing_ok=True)
        sync_directory(self.folder)

    def _unlock(self) -> None:
        """Let other processes at the work directory."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _discard(self) -> None:
        """Delete the work directory."""
        _delete(self.folder)
        self._unlock()

    def _read(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Read what finished blocks and saved hidden states there are, and check every file that they refer to."""
        files, saved = sorted(self.folder.glob("block-*.json")), self.folder / "states.json"
        records = [self._read_json(file) for file in (*files, *self.folder.glob("head.json"))]
        states = self._read_json(saved) if saved.exists() else None
        found = [record.get("number") for record in records]
        wanted = list(range(max(len(records), states["layer"] if states else 0)))
        if found != wanted:  # what cleans up old files took one
            lost = next((number for number in wanted if number not in found), len(records))
            raise self._damaged(Path(f"{self.stem(lost)}.json"))
        expected_of = {name: expected for record in records for name, expected in record["digests"].items()}
        for of_stream in (states or {"files": {}})["files"].values():
            expected_of |= {name: expected for name, _, _, expected in of_stream}
        for name, expected in expected_of.items():
            file = self.folder / name
            if not file.is_file() or digest(file) != expected:
                raise self._damaged(file)
        return records, states

    def _damaged(self, file: Path) -> ResumeError:
        return ResumeError(
            f"the unfinished job is damaged: {file}; delete {self.folder}, or start anew with --overwrite "
            "(overwrite=True)"
        )

    def _read_json(self, file: Path) -> dict[str, Any]:
        """Read what `_write_json` wrote."""
        try:
            values: dict[str, Any] = read_json(file)
        except CheckpointError as error:
            raise self._damaged(file) from error
        if values.pop("sha256", None) != _checksum(values):
            raise self._damaged(file)
        return values

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file for good."""
        temporary = self.folder / f"{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({**values, "sha256": _checksum(json.loads(json.dumps(values)))}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.folder / name)
        sync_directory(self.folder)


def remove_ended(out: Path) -> None:
    """Remove the work directory for `out` that a job left which was killed in its first or last steps, if any."""
    folder = work_path(out)
    if not folder.is_dir() or _is_unfinished(folder):
        return
    with suppress(ResumeError):  # it is at work
        lock = _locked(folder)
        try:
            if not _is_unfinished(folder):
                remove_leftovers(out)
                _delete(folder)
        finally:
            os.close(lock)


def _is_unfinished(folder: Path) -> bool:
    """Whether there is anything to resume: no job that was killed in its first steps, or when its target was there."""
    appeared = (folder / "complete.json").exists() and not (folder / "checkpoint").exists()
    return (folder / "job.json").exists() and not appeared


def _locked(folder: Path) -> int:
    """Lock a work directory, made where it is not there, against all other processes; return the lock's descriptor.

    Raises:
        ResumeError: Another process has locked it, or what stands there was not made by a job.
        OSError: It cannot be made or locked.
    """
    while True:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise ResumeError(f"{folder} is no folder, and jobs need one of their own there; remove it")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            foreign = [entry.name for entry in folder.iterdir() if not _OWN.fullmatch(entry.name)]
            if foreign:
                raise ResumeError(
                    f"{folder} holds {some(foreign)}, which no job wrote; move that away, or choose another output"
                )
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except (FileExistsError, FileNotFoundError):  # another process has just deleted the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), (folder / "lock").stat()):
                    return lock
            os.close(lock)  # the lock of a job that was just deleted: nobody else would look at it
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                raise ResumeError(f"another process is at work in {folder}; wait for it, or stop it") from error
            if not (folder / "job.json").exists():
                _delete(folder)
            why = f"{error.strerror}: nothing can be locked there; choose an output on another file system"
            raise OSError(error.errno, why, str(folder)) from error


def _clear(folder: Path) -> None:
    """Delete a job and all that it made, but for the lock."""
    (folder / "job.json").unlink(missing_ok=True)  # from here on nobody resumes it
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != "lock":
            entry.unlink(missing_ok=True)


def _delete(folder: Path) -> None:
    """Delete a work directory that this process has locked."""
    _clear(folder)
    (folder / "lock").unlink(missing_ok=True)
    with suppress(OSError):  # another process has made its lock there by now
        folder.rmdir()


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def work_path(target: Path) -> Path:
    """Return where the work directory of the checkpoint `target` is."""
    target = Path(os.path.realpath(target))
    return target.with_name(f".{target.name}.gptqkit-work")
