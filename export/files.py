"""Files that came from elsewhere: which of them are opened, and which are copied.

A folder may hold links to secrets, pipes that never answer and devices that never end. Only regular files are opened,
and only such as belong to the folder: inside it or, in the Hub's cache, among the blobs of its repository.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
MAX_TEXT_BYTES = 256 << 20
"""Largest size of JSON and other text that is parsed."""

_TEXTS = (".json", ".jinja", ".txt", ".md", ".model", ".tiktoken")
_TEMPLATES = "additional_chat_templates"  # a folder that transformers reads


def check_file(file: Path, folder: Path | None = None) -> Path:
    """Return `file` if it is there to be opened as one of `folder`, by default the one it is in.

    Raises:
        CheckpointError: It is missing, no regular file, not of the folder, or text beyond `MAX_TEXT_BYTES`.
    """
    real, home = Path(os.path.realpath(file)), Path(os.path.realpath(folder or file.parent))
    try:
        found = file.stat()
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; fetch it, or give the directory that holds it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be opened: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} is no regular file; put a file in its place")
    if not any(real.is_relative_to(place) for place in _homes(home)):
        raise CheckpointError(f"{file} is a link that leaves its folder; put the file itself there")
    if file.suffix in _TEXTS and found.st_size > MAX_TEXT_BYTES:
        raise CheckpointError(f"{file} has {found.st_size} bytes; no more than {MAX_TEXT_BYTES} are read")
    return file


def check_folder(folder: Path) -> None:
    """Check all files of a model's folder before other packages open them; CheckpointError as `check_file`."""
    for entry in (*_visible(folder), *_visible(folder / _TEMPLATES)):
        named_a_file = entry.suffix in (*_TEXTS, ".safetensors")
        if not entry.is_dir() or named_a_file or (entry.name == _TEMPLATES and entry.is_symlink()):
            check_file(entry, folder)


def copy_beside(
    source: Path, target: Path, *, leave: tuple[str, ...], folders: bool = True, home: Path | None = None
) -> None:
    """Copy what belongs to a model beside its weights and is not there yet.

    Never copied are pickles, hidden files, linked folders, and code in folders. CheckpointError as `check_file`.

    In `source` itself names with the endings `leave` are left out. Without `folders`, only those are copied that hold a
    config.json, such as 1_Pooling of a sentence-embedding model. `home` is the model's folder, where `source` is one
    inside it.
    """
    home = home or source
    for entry in _visible(source):
        there = target / entry.name
        if not entry.is_dir():
            if not entry.name.endswith((*PICKLES, *leave)) and not there.exists():
                shutil.copyfile(check_file(entry, home), there)
        elif not entry.is_symlink() and (folders or (entry / "config.json").exists()):
            there.mkdir(exist_ok=True)
            copy_beside(entry, there, leave=(".py",), home=home)


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer in a folder as transformers opens it; None where there is none."""
    from transformers import AutoTokenizer  # here, because it takes long

    return AutoTokenizer.from_pretrained(folder, local_files_only=True) if any(folder.glob("tokenizer*")) else None


def _visible(folder: Path) -> Iterator[Path]:
    return (entry for entry in sorted(folder.glob("*")) if not entry.name.startswith("."))


def _homes(folder: Path) -> Iterator[Path]:
    """Yield the folders that hold the files of `folder`: itself and, in the Hub's cache, the blobs."""
    yield folder
    for above in folder.parents:
        if above.name == "snapshots" and above.parent.name.startswith("models--"):
            yield above.parent / "blobs"
