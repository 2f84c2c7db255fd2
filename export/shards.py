"""The safetensors files of a checkpoint directory as one set of named tensors.

Only safetensors files are ever opened: pickles can run code. Nothing outside the directory is followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Shards:
    """The tensors of several safetensors files by name, mapped on demand."""

    def __init__(self, files: dict[Path, Any], where: dict[str, Path]) -> None:
        self._files = files
        self._where = where

    @property
    def files(self) -> list[Path]:
        """The files, in order."""
        return list(self._files)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._where)

    @property
    def where(self) -> dict[str, Path]:
        """The file of every tensor."""
        return dict(self._where)

    def get(self, name: str) -> Tensor:
        """The tensor called `name`, mapped from its file.

        Raises:
            CheckpointError: No such tensor, or one of a dtype that torch does not know.
        """
        if name not in self._where:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it has {some(self._where)}")
        try:
            return cast(Tensor, self._files[self._where[name]].get_tensor(name))
        except SafetensorError as error:
            raise CheckpointError(f"{self._where[name]}: {name} cannot be read: {error}") from error

    def below(self, name: str, keys: Iterable[str]) -> dict[str, Tensor]:
        """Those of the tensors `name.key` that exist, by key."""
        return {key: self.get(f"{name}.{key}") for key in keys if f"{name}.{key}" in self._where}

    @classmethod
    def open(cls, path: Path, base_name: object) -> Shards:
        """All tensors of the checkpoint in the directory `path`.

        Args:
            path: The directory.
            base_name: AutoGPTQ's name of the weight file without its suffix, from its quantize_config.json.

        Raises:
            CheckpointError: No safetensors files, several without an index, an index that points elsewhere or to what
                is not there, or damaged headers.
        """
        index = _find_index(path)
        if index is not None:
            weight_map = _weight_map(index)
            files = {path / file: _open(path / file) for file in dict.fromkeys(weight_map.values())}
            held = {file: set(handle.keys()) for file, handle in files.items()}
            for name, file in weight_map.items():
                if name not in held[path / file]:
                    raise CheckpointError(
                        f"{index} puts {name} into {file}, which does not hold it; fetch both files again"
                    )
            return cls(files, {name: path / file for name, file in weight_map.items()})
        single = _find_single(path, base_name)
        handle = _open(single)
        return cls({single: handle}, dict.fromkeys(handle.keys(), single))


def _find_index(path: Path) -> Path | None:
    if (path / "model.safetensors.index.json").exists():
        return path / "model.safetensors.index.json"
    found = sorted(path.glob("*.safetensors.index.json"))
    if len(found) > 1:
        raise CheckpointError(f"{path} has several indices: {some(file.name for file in found)}; keep the right one")
    return found[0] if found else None


def _find_single(path: Path, base_name: object) -> Path:
    found = sorted(path.glob("*.safetensors"))
    for file in (path / "model.safetensors", path / f"{base_name}.safetensors"):
        if file in found:
            return file
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{path} has {len(found)} safetensors files ({some(file.name for file in found)}) and no index; fetch "
            "model.safetensors.index.json"
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{path} has only pickled weights ({some(pickles)}); opening a pickle can run any code, so they are "
            "refused. Save the checkpoint again as safetensors with the program that wrote it"
        )
    raise CheckpointError(f"{path} has no safetensors file; fetch the weights")


def _weight_map(index: Path) -> dict[str, str]:
    """The file of every tensor: plain safetensors names beside the index, never paths."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; fetch it again")
    for name, file in weight_map.items():
        plain = isinstance(file, str) and not any(mark in file for mark in "/\\:\0") and file.endswith(".safetensors")
        if not plain:
            raise CheckpointError(
                f"{index} puts {name} into {file!r}; only safetensors files beside the index are opened"
            )
    return cast(dict[str, str], weight_map)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing, though the index names it; fetch it") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or cut off ({error}); fetch it again") from error


def some(names: Iterable[str], limit: int = 4) -> str:
    """The first few of `names`, for messages."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: No such file, or no JSON object in it.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; fetch it, or give the directory that holds it") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, not an object; fetch it again")
    return cast(dict[str, Any], values)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals itself, and 0 differs from -0."""
    right = right.detach().cpu()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))
