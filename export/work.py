"""The work directory of a checkpoint that is being made: `.NAME.gptqkit-work` beside its target.

    lock                        held by the process at work
    job.json                    what is being made, from what: only the same job goes on here
    PART.safetensors            tensors of a finished part (a block, say), as they will stand in the checkpoint
    PART.json                   its record; written last: a part without it does not exist
    hidden-*.bin, float-*.bin   hidden states for the next block
    shards.json                 once all parts are there: which tensors go into which file
    checkpoint/                 the directory that becomes the target

Every file is written under another name, synced and renamed, so that whatever happens at any moment, what is there is
whole. The directory vanishes with the last step of a job.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, OutputExistsError, ResumeError
from .merge import Entry, plan_shards, read_entries, write_shard
from .shards import read_json, some
from .staging import check_target, replace_directory, sync_directory

_LOG = logging.getLogger("gptqkit")


class WorkDirectory:
    """The directory of one job; made, or taken up where an earlier process left it.

    Args:
        target: The checkpoint directory to make.
        job: What identifies the job, as plain values for JSON.
        resume: Go on with the same job where there is one; otherwise one that is there is an error.
        overwrite: Replace a quantized model at the target when the new one is complete.
        environment: What may change the last bits of a result; where it differs on resuming, the logger warns.

    Raises:
        OutputExistsError: The target exists, or an unfinished job is there and `resume` is not set.
        ResumeError: The unfinished job is another one, or another process is at work on it.
    """

    def __init__(
        self,
        target: Path,
        job: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        self.target = Path(os.path.realpath(target))
        self.path = work_path(target)
        self._overwrite = overwrite
        if self.path.is_symlink():
            raise ResumeError(f"{self.path} is a link, and jobs need a folder of their own there; take it away")
        self._delete_remains()
        if (self.path / "job.json").exists():
            if not resume:
                raise OutputExistsError(
                    f"{self.path} holds an unfinished job for {target.name}; resume it (resume=True, --resume), or "
                    "delete that folder to start anew"
                )
            self._lock_it()
            begun = read_json(self.path / "job.json")
            different = differences(begun["job"], json.loads(json.dumps(job)))
            if different:
                self.close()
                raise ResumeError(
                    f"the unfinished job in {self.path} is another one: {some(different)}. Start with what it was "
                    "started with, or delete that folder to start anew"
                )
            elsewhere = differences(begun["environment"], json.loads(json.dumps(environment or {})))
            if elsewhere:
                _LOG.warning("resumed in another environment, so last bits may differ: %s", some(elsewhere))
        else:
            check_target(self.target, overwrite=overwrite)
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_it()
            self.write_json("job.json", {"job": job, "environment": environment or {}})
            sync_directory(self.path.parent)
        self.records = self._read_records()

    def _delete_remains(self) -> None:
        """Delete what is left of a job that was killed while it began, or when it had ended but for this."""
        joined = (self.path / "shards.json").exists() and not (self.path / "checkpoint").exists()
        if (joined and self.target.exists()) or (self.path.exists() and not (self.path / "job.json").exists()):
            self._lock_it()
            shutil.rmtree(self.path)
            self.close()

    def _lock_it(self) -> None:
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ResumeError(f"another process is at work in {self.path}; wait for it, or stop it") from error

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write a JSON file for good."""
        temporary = self.path / f".{name}.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / name)
        sync_directory(self.path)

    def part(self, name: str) -> Path:
        """Where the tensors of the part `name` are to be written, before `commit` makes them count."""
        return self.path / f".{name}.safetensors.tmp"

    def commit(self, name: str, record: Mapping[str, Any]) -> None:
        """Let the part `name` count from now on.

        Args:
            name: Its name; its file has been written to `part(name)`.
            record: What to remember of it, as plain values for JSON.
        """
        temporary = self.part(name)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        final = self.path / f"{name}.safetensors"
        temporary.rename(final)
        whole = {**record, "name": name, "number": len(self.records)}
        whole["entries"] = [entry.to_dict() for entry in read_entries(final)]
        self.write_json(f"{name}.json", whole)
        self.records.append(whole)

    def has(self, name: str) -> bool:
        """Whether the part `name` is finished."""
        return any(record["name"] == name for record in self.records)

    def assemble(self, max_shard_bytes: int) -> Path:
        """Join all parts into the shards of the checkpoint and return its directory.

        A part is deleted as soon as the shards that hold its tensors are on disk, so that never more than a shard and
        a part exist twice.

        Raises:
            CheckpointError: A file changed under us.
            OSError: The disk refused.
        """
        directory = self.path / "checkpoint"
        directory.mkdir(exist_ok=True)
        if not (self.path / "shards.json").exists():
            entries = [Entry(**entry) for record in self.records for entry in record["entries"]]
            seen: dict[str, str] = {}
            for entry in entries:
                if entry.name in seen:
                    raise CheckpointError(f"{entry.name} stands in two parts, {seen[entry.name]} and {entry.part}")
                seen[entry.name] = entry.part
            planned = plan_shards(entries, max_shard_bytes)
            names = shard_names(len(planned))
            shards = {name: [entry.to_dict() for entry in shard] for name, shard in zip(names, planned, strict=True)}
            self.write_json("shards.json", shards)
        plan = {
            name: [Entry(**entry) for entry in entries]
            for name, entries in read_json(self.path / "shards.json").items()
        }
        later = [{entry.part for entry in shard} for shard in plan.values()]
        for number, (name, shard) in enumerate(plan.items()):
            if not (directory / name).exists():
                write_shard(directory / name, shard, self.path)
                sync_directory(directory)
            for part in later[number] - set().union(*later[number + 1 :]):
                (self.path / part).unlink(missing_ok=True)
        if len(plan) > 1:
            total = sum(entry.size for shard in plan.values() for entry in shard)
            weight_map = {entry.name: name for name, shard in plan.items() for entry in shard}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
            (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8", newline="\n")
        return directory

    def finish(self) -> None:
        """Let the checkpoint appear under its name, and delete everything else."""
        replace_directory(self.path / "checkpoint", self.target, overwrite=self._overwrite)
        self.discard()

    def discard(self) -> None:
        """Delete the job and all that it made."""
        (self.path / "job.json").unlink(missing_ok=True)  # from here on nobody resumes it
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Leave the job as it is, for another process to go on."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read_records(self) -> list[dict[str, Any]]:
        known = [read_json(file) for file in self.path.glob("*.json") if file.name not in ("job.json", "shards.json")]
        records = sorted(known, key=lambda record: int(record["number"]))
        names = {record["name"] for record in records}
        for file in [*self.path.glob("*.safetensors"), *self.path.glob(".*.tmp")]:
            if file.name.startswith(".") or file.stem not in names:
                file.unlink()  # a part that was never finished
        return records


def work_path(target: Path) -> Path:
    """Where the work directory of the checkpoint `target` is."""
    target = Path(os.path.realpath(target))
    return target.with_name(f".{target.name}.gptqkit-work")


def shard_names(count: int) -> Sequence[str]:
    """File names of so many shards, as transformers names them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]


def differences(before: Any, now: Any, where: str = "", form: str = "{} was {!r}, now {!r}") -> list[str]:
    """What differs between two trees of plain values, as text.

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
