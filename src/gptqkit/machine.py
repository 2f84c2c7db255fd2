"""How much memory and disk there is for this process."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

RESERVE = 128 << 20
"""Bytes of RAM that a process is not given: libraries load more as they go, and allocators keep pieces of what was
freed (up to 87 MiB were seen, benchmarks/results/scale.json)."""

# What control groups call their limit, what is used of it, and the part of that which is cached files.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run can use, in bytes; None where this cannot be found out.

    Attributes:
        memory: RAM that this process can have, what it has already included, less a reserve; swap does not count.
        program: RAM that it has already: Python, torch and transformers.
        gpu: Memory of the GPU that is free, or held by torch without use; None without a GPU.
        disk: Free where the checkpoint is to be written.
    """

    memory: int | None
    program: int
    gpu: int | None
    disk: int | None


def look(device: torch.device, folder: Path, *, processes: int = 1) -> Machine:
    """What there is now.

    Args:
        device: The GPU to look at; for a CPU, the first GPU where there is one.
        folder: Where files are to be written; it need not exist yet.
        processes: How many on this machine share its RAM.
    """
    program = _program()
    found = (_available(), _cgroup_room(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))
    limits = [limit for limit in found if limit is not None]
    gpu = None
    if torch.cuda.is_available():
        place = device if device.type == "cuda" else torch.device("cuda", 0)
        free, _ = torch.cuda.mem_get_info(place)
        gpu = free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return Machine(
        memory=max(0, min(limits) // processes - RESERVE) + program if limits else None,
        program=program,
        gpu=gpu,
        disk=shutil.disk_usage(existing).free,
    )


def _available() -> int | None:
    """What Linux says can be had without swapping; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _program() -> int:
    """The resident memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _cgroup_room(root: Path, membership: Path) -> int | None:
    """What control groups (version 2, or 1) leave to this process; None where they set no limit.

    Cached files count as room: the kernel gives them up first.

    Args:
        root: Where control groups are mounted.
        membership: The file that names the groups of this process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "memory" if controllers else root
        files = _VERSION_1 if controllers else _VERSION_2
        # In a container the path is the host's, and the group that counts is mounted as the root.
        group = mount / inside.strip("/")
        rooms += [_room(folder, *files) for folder in {mount, group, *group.parents} if folder.is_relative_to(mount)]
    return min((room for room in rooms if room is not None), default=None)


def _room(folder: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max"
        return None
    return max(0, most - used + int(statistics.get(cached, 0)))
