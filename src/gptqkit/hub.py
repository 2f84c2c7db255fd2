"""Models by name: a folder here, or files of the Hub."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .errors import CheckpointError, ConfigError, DatasetUnavailableError, UploadError
from .export.files import PICKLES, check_folder

UNUSED = (*PICKLES, ".gguf", ".onnx", ".h5", ".msgpack", ".ot")
"""How the names of weights end that are never read."""

_WEIGHTS = "model*.safetensors*"  # and their index, as we call them


def fetch(
    path_or_id: Path | str,
    revision: str | None = None,
    *,
    weights: bool = True,
    tokenizer: bool = False,
    gguf: bool = False,
) -> Path:
    """Return the folder of a model; what is on the Hub is brought into the Hub's cache, perhaps but for its `weights`.

    What can only be a folder is never asked of the Hub. With `gguf` a GGUF file, which is returned then, or a folder
    with one will do; where only the `tokenizer` is wanted, whatever is beside it.

    Raises:
        DatasetUnavailableError: There is no such folder, and the Hub has no such model or cannot be reached.
        CheckpointError: There is something other than a model in safetensors: the message says what, and what to do.
        ConfigError: A revision of a folder.
    """
    path = Path(at_home(path_or_id))
    if path.is_dir():
        if revision is not None:
            raise ConfigError(f"revision is {revision!r}, but {path} is a folder here, not on the Hub; leave it out")
        if not tokenizer:
            _recognize(path, {file.name for file in path.iterdir()}, gguf=gguf)
        return path
    if path.suffix == ".gguf" and path.is_file():
        if gguf:
            return path
        _recognize(path_or_id, {path.name})
    if path.exists():
        raise DatasetUnavailableError(f"{path} is no folder; give the folder that holds config.json")
    if is_local(path_or_id):
        raise DatasetUnavailableError(f"there is no folder {path}; give one, or the id of a model on the Hub")
    from huggingface_hub import snapshot_download  # here, because it takes long

    kinds = UNUSED if weights else (*UNUSED, ".safetensors")
    unused, where = [f"*{kind}" for kind in kinds], "" if revision is None else f" at revision {revision}"
    with _asking(f"there is no folder {path_or_id}, and the Hub does not give such a model{where}"):
        path = Path(snapshot_download(str(path_or_id), revision=revision, ignore_patterns=unused))
    if not tokenizer:
        here = {file.name for file in path.iterdir()}
        if "config.json" not in here or not any(name.endswith(".safetensors") for name in here):
            with suppress(DatasetUnavailableError):  # without a network: what is here is all that is known
                here.update(Remote(str(path_or_id), path.name).names())
        _recognize(path_or_id, here)
    return path


@dataclass(frozen=True)
class Remote:
    """Files of a repository on the Hub, at a commit, that are not fetched."""

    repository: str
    commit: str

    def names(self) -> list[str]:
        """Return the names of all files; DatasetUnavailableError where the Hub does not give them."""
        from huggingface_hub import HfApi

        with _asking(f"{self.repository}: the Hub does not give the list of its files"):
            return list(HfApi().list_repo_files(self.repository, revision=self.commit))

    def header(self, name: str) -> dict[str, tuple[str, list[int]]]:
        """Return dtype (such as "F16") and shape of every tensor in a safetensors file, without its data."""
        from huggingface_hub import HfApi

        with _asking(f"{self.repository}: the Hub does not give the header of {name}"):
            found = HfApi().parse_safetensors_file_metadata(self.repository, name, revision=self.commit)
        return {key: (info.dtype, info.shape) for key, info in found.tensors.items()}


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Ask the Hub; say `what` is wrong where it gives no answer."""
    try:
        yield
    except Exception as error:  # of the network, or of the Hub
        raise DatasetUnavailableError(f"{what}: {_first_line(error)}") from error


def _recognize(name: Path | str, files: Collection[str], *, gguf: bool = False) -> None:
    """Refuse files that are no model in safetensors, and say what they are and what to do."""
    safetensors, blocks, pickle = (
        min((file for file in files if file.endswith(kinds)), default="")
        for kinds in (".safetensors", ".gguf", PICKLES)
    )
    if "adapter_config.json" in files and "config.json" not in files:
        merge = f"M.from_pretrained({str(name)!r}).merge_and_unload().save_pretrained('merged')"
        raise CheckpointError(
            f"{name} holds an adapter (LoRA), no model; merge it into its model first, and give that: "
            f'python -c "from peft import AutoPeftModelForCausalLM as M; {merge}"'
        )
    if blocks and not safetensors:
        if gguf and "quantize_config.json" in files:  # ours
            return
        what = "give that file by itself" if gguf else "give the model that it was made from, in safetensors"
        raise CheckpointError(f"{name} holds GGUF ({blocks}), which is quantized already; {what}")
    if pickle and not safetensors:
        target = str(name) if Path(name).is_dir() else Path(name).name
        save = f"import AutoModelForCausalLM as M; M.from_pretrained({str(name)!r}).save_pretrained({target!r})"
        raise CheckpointError(
            f"{name} has only pickled weights ({pickle}); opening a pickle can run any code, so they are refused. If "
            f'you trust it, save it as safetensors: python -c "from transformers {save}", or, if '
            "it is quantized, with the program that wrote it"
        )


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a checkpoint to the Hub, into a repository that is made where it is not there; return its address.

    Hidden files and pickles stay here. Weights that an earlier upload left there, and that are not in `folder`, are
    deleted in the same commit. A new repository is made `private`, or as the Hub's default for its owner is.

    Raises:
        CheckpointError: A link in `folder` leaves it.
        UploadError: The Hub does not take it, or cannot be reached.
    """
    check_folder(folder)
    from huggingface_hub import HfApi

    try:
        made = HfApi().create_repo(repository, private=private or None, exist_ok=True)
        unwanted = [".*", "*/.*", *(f"*{kind}" for kind in PICKLES)]
        HfApi().upload_folder(
            repo_id=made.repo_id, folder_path=folder, ignore_patterns=unwanted, delete_patterns=[_WEIGHTS]
        )
    except Exception as error:  # of the network, or of the Hub
        command = ["hf", "upload", repository, str(folder), ".", "--delete", _WEIGHTS, *["--private"] * private]
        raise UploadError(
            f"{folder} is complete, but was not uploaded to {repository} ({_first_line(error)}); to try again: "
            f"{shlex.join(command)}"
        ) from error
    return str(made)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def at_home(name: Path | str) -> Path | str:
    """Return a path whose leading ~ stands for a home folder with that in its place; another name as it is.

    Raises:
        ConfigError: Neither a text nor a path, or an empty text.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise ConfigError(f"a path or id is needed, not a {type(name).__name__}; give a text or a pathlib.Path")
    if name == "":  # which would be the current folder
        raise ConfigError("a path or id is empty; give one, or '.' for the current folder")
    return Path(os.path.expanduser(name)) if str(name).startswith("~") else name


def is_local(name: Path | str) -> bool:
    """Whether a name can only be that of something on this machine, by its form or because of the folder it is in.

    >>> [is_local(name) for name in ("gpt2", "org/model", "./model", "/models/a", "a/b/c", Path("model"))]
    [False, False, True, True, True, True]
    """
    if isinstance(name, Path) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        return True
    return "/" in name and Path(name).parent.is_dir()
