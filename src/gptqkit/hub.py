"""Models by name: a folder here, or files of the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import ConfigError, DatasetUnavailableError
from .export.files import PICKLES

UNUSED = (*PICKLES, ".gguf", ".onnx", ".h5", ".msgpack", ".ot")
"""How the names of weights end that are never read."""


def fetch(path_or_id: Path | str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the folder of a model, or its GGUF file; what is on the Hub is brought into the Hub's cache.

    Args:
        path_or_id: A folder, or the id of a model on the Hub. What can only be a folder is never asked of the Hub.
        revision: Branch, tag or commit of a model on the Hub.
        weights: Whether its weights are needed.

    Raises:
        DatasetUnavailableError: There is no such folder, and the Hub has no such model or cannot be reached.
        ConfigError: A revision of a folder.
    """
    path = Path(path_or_id)
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"revision is {revision!r}, but {path} is a folder here, not on the Hub; leave it out")
        return path
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.exists():
        raise DatasetUnavailableError(f"{path} is no folder; give the folder that holds config.json")
    if is_local(path_or_id):
        raise DatasetUnavailableError(f"there is no folder {path}; give one, or the id of a model on the Hub")
    from huggingface_hub import snapshot_download  # here, because it takes long

    kinds = UNUSED if weights else (*UNUSED, ".safetensors")
    try:
        unused = [f"*{kind}" for kind in kinds]
        return Path(snapshot_download(str(path_or_id), revision=revision, ignore_patterns=unused))
    except Exception as error:  # of the network, or of the Hub
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DatasetUnavailableError(
            f"there is no folder {path_or_id}, and the Hub does not give such a model"
            f"{'' if revision is None else f' at revision {revision}'}: {reason}"
        ) from error


def is_local(name: Path | str) -> bool:
    """Whether a name can only be that of something on this machine, by its form or because of the folder it is in.

    >>> [is_local(name) for name in ("gpt2", "org/model", "./model", "/models/a", "a/b/c", Path("model"))]
    [False, False, True, True, True, True]
    """
    if isinstance(name, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return True
    return "/" in name and Path(name).parent.is_dir()
