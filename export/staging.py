"""A directory that appears complete or not at all.

It is written beside its target, as `.NAME.gptqkit-incomplete-XXXXXXXX`, synced, and renamed; a crash leaves that there,
or what was to be replaced, as `.NAME.gptqkit-replaced-XXXXXXXX`. The next write of the same target removes both.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError, OutputExistsError
from .scaled import says_quantized


@contextmanager
def staged(target: Path, *, overwrite: bool | None = None) -> Iterator[Path]:
    """Give a new directory to fill; it becomes `target` when the block ends, and vanishes when the block raises.

    With `overwrite`, a quantized model that is there already is replaced then; None where users cannot ask for that.
    Errors are those of `check_target`.
    """
    remove_leftovers(target)
    check_target(target, overwrite=overwrite)
    with scratch(target) as directory:
        yield directory
        replace_directory(directory, Path(os.path.realpath(target)), overwrite=overwrite)


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """Give a new directory beside `target`, which vanishes when the block ends; after a crash, with the next write."""
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = _beside(target, "incomplete")
    directory.mkdir()
    try:
        with held(directory):
            yield directory
    finally:  # Ctrl-C too: nothing half-written stays
        shutil.rmtree(directory, ignore_errors=True)


def replace_directory(directory: Path, target: Path, *, overwrite: bool | None = None) -> None:
    """Sync `directory` and let it appear as `target`, in the place of a quantized model where that is wanted.

    The target stays as it was on any error, such as those of `check_target`.
    """
    sync_files(directory)
    check_target(target, overwrite=overwrite)
    _rename(directory, target)
    sync_directory(target.parent)


def remove_leftovers(target: Path) -> None:
    """Remove what crashes left beside `target`, but for what another process is still at work on.

    Where a crash came between moving the old one away and the new one in, the old one comes back.
    """
    target = Path(os.path.realpath(target))
    name = re.compile(rf"\.{re.escape(target.name)}\.gptqkit-(incomplete|replaced)-[0-9a-f]{{8}}")
    for entry in sorted(target.parent.iterdir()) if target.parent.is_dir() else ():
        found = name.fullmatch(entry.name)
        if found is None or entry.is_symlink() or not entry.is_dir():
            continue
        with held(entry) as ours:
            if ours and found[1] == "replaced" and not os.path.lexists(target):
                entry.rename(target)
            elif ours:
                shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def held(directory: Path) -> Iterator[bool]:
    """Lock a directory against the cleaning up of other processes; gives whether that could be done."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def check_target(target: Path, *, overwrite: bool | None) -> None:
    """Refuse a target that must not be replaced or cannot be made, before any work starts.

    Raises:
        OutputExistsError: The target is there and not empty, and `overwrite` is not set or it holds no quantized model.
        OSError: No directory can be made there.
    """
    real = Path(os.path.realpath(target))
    above = next((folder for folder in real.parents if folder.exists()), real)
    if not above.is_dir():
        raise NotADirectoryError(f"{target} cannot be made: {above} is no directory; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{target} cannot be made: {above} is not writable; choose another place")
    if os.path.ismount(real):
        raise OSError(f"{target} is a mount point, in whose place no directory can be put; choose one inside it")
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return
    replaceable = target.is_dir() and _holds_quantized_model(target)
    if not overwrite:
        how = ", or overwrite it (overwrite=True, --overwrite)" if replaceable and overwrite is not None else ""
        raise OutputExistsError(f"{target} exists already; choose another directory{how}")
    if not replaceable:
        raise OutputExistsError(
            f"{target} holds something other than a quantized model, so it is not overwritten; choose another directory"
        )


def _holds_quantized_model(directory: Path) -> bool:
    """A float model does not count, one in FP8 or MXFP4 neither: it may be the only copy."""
    try:
        return says_quantized(directory)
    except CheckpointError:
        return False


def _rename(directory: Path, target: Path) -> None:
    if not target.exists():
        directory.rename(target)
        return
    old = _beside(target, "replaced")
    with held(target):
        target.rename(old)
        try:
            directory.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old)


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.gptqkit-{what}-{secrets.token_hex(4)}")


def sync_files(directory: Path) -> None:
    """Make all files in a directory last, and their names."""
    for root, _, files in os.walk(directory):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(root))


def sync_directory(directory: Path) -> None:
    """Make the names in a directory last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
