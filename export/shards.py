"""The safetensors files of a checkpoint directory as one set of named tensors, and how such files are written.

Only safetensors files are ever opened: pickles can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from ..errors import CheckpointError
from ..hub import Remote
from .files import check_file

MAX_SHARD_BYTES = 4 << 30
LONGEST_NAME = 500  # of a tensor: what becomes of names is found with regular expressions, which take time
JOINED_BYTES = 64 << 20  # files are joined up to this, so that joining takes little memory
_PART_BYTES = 1 << 30  # of what is written at a time, and so in memory


class Shards:
    """The tensors of several safetensors files by name, mapped on demand.

    Attributes:
        where: The file of every tensor.
    """

    def __init__(self, where: Mapping[str, Path], handles: Mapping[Path, Any]) -> None:
        for name, file in where.items():
            if not (0 < len(name) <= LONGEST_NAME and name.isascii() and name.isprintable()):
                raise CheckpointError(
                    f"{file} holds a tensor called {ascii(name)[:40]}...; names are 1 to {LONGEST_NAME} printable "
                    "ASCII characters"
                )
        self.where = dict(where)
        self._handles = handles

    @property
    def files(self) -> list[Path]:
        """The files, in order."""
        return list(self._handles)

    def get(self, name: str) -> Tensor:
        """Return the tensor called `name`, mapped from its file; CheckpointError where torch cannot."""
        if name not in self.where:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; it has {some(self.where)}")
        try:
            return cast(Tensor, self._handles[self.where[name]].get_tensor(name))
        except (SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{self.where[name]}: {name} cannot be read: {error}") from error

    def meta(self, name: str) -> Tensor:
        """Return the shape and dtype of a tensor, as one on the meta device; its values are not read."""
        found = getattr(self._handles[self.where[name]], "meta", None)  # GGUF
        return self.get(name).to("meta") if found is None else cast(Tensor, found(name))

    def nbytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in its file."""
        stored = getattr(self._handles[self.where[name]], "nbytes", None)  # GGUF
        return self.get(name).nbytes if stored is None else int(stored(name))

    def slice(self, name: str) -> Any:
        """Return a handle of the tensor `name`, of which nothing is read yet, as transformers' loader takes it."""
        return self._handles[self.where[name]].get_slice(name)

    def below(self, name: str, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return those of the tensors `name.key` that exist, by key."""
        return {key: self.get(f"{name}.{key}") for key in keys if f"{name}.{key}" in self.where}

    def mapped_anew(self, names: Iterable[str]) -> Shards:
        """Return some of the tensors in mappings of their own: what is written into them goes when they go."""
        where = {name: self.where[name] for name in names}
        return Shards(where, {file: _open(file) for file in dict.fromkeys(where.values())})

    @classmethod
    def of_files(cls, files: Iterable[Path], remote: Remote | None = None) -> Shards:
        """Return all tensors of some files, of those that are missing as `of_folder`."""
        handles = {file: _open(file, remote) for file in files}
        return cls({name: file for file, handle in handles.items() for name in handle.keys()}, handles)  # noqa: SIM118

    @classmethod
    def of_folder(cls, path: Path, base_name: object = None, remote: Remote | None = None) -> Shards:
        """Return all tensors of the checkpoint in the directory `path`.

        `base_name` is AutoGPTQ's name of the weight file without its suffix, from its quantize_config.json. Of files
        that are only on the Hub, at `remote`, the tensors are on the meta device.

        Raises:
            CheckpointError: No safetensors files, several without an index, an index that points elsewhere or to what
                is not there, or damaged headers.
        """
        usual = path / "model.safetensors.index.json"
        indices = [usual] if usual.exists() else sorted(path.glob("*.safetensors.index.json"))
        if not indices:
            files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
            if not files and remote is not None:
                files = [path / name for name in remote.names() if "/" not in name and name.endswith(".safetensors")]
            return cls.of_files([_find_single(path, files, base_name)], remote)
        index = indices[0]
        if len(indices) > 1:
            found = some(file.name for file in indices)
            raise CheckpointError(f"{path} has several indices: {found}; keep the right one")
        where = {name: path / file for name, file in read_weight_map(index).items()}
        handles = {file: _open(file, remote) for file in dict.fromkeys(where.values())}
        held = {file: set(handle.keys()) for file, handle in handles.items()}
        for name, file in where.items():
            if name not in held[file]:
                raise CheckpointError(
                    f"{index} puts {name} into {file.name}, which does not hold it; fetch both files again, "
                    "or let `gptqkit doctor` make the index anew"
                )
        return cls(where, handles)

    @classmethod
    def without_index(cls, path: Path) -> Shards:
        """Return all tensors of the safetensors files in `path`, whatever an index says.

        Raises:
            CheckpointError: Damaged files, files that are missing, as the index or the names of the others tell, or
                tensors of one name in several.
        """
        held: Counter[str] = Counter()
        broken, files = [], sorted(path.glob("*.safetensors"))
        for file in files:
            try:
                held.update(_open(file).keys())
            except CheckpointError as error:
                broken.append(str(error))
        if broken:
            raise CheckpointError("; ".join(broken))
        listed: Iterable[str] = held if _are_whole(files) else ()
        with suppress(CheckpointError, ValueError):
            [index] = path.glob("*.safetensors.index.json")
            listed = read_weight_map(index)
        lost, twice = [name for name in listed if name not in held], [name for name in held if held[name] > 1]
        if lost or twice or not listed:
            where = "several files" if twice and not lost else "no file"
            raise CheckpointError(f"{path}: {some(lost or twice) or 'tensors'} are in {where}; fetch the files again")
        return cls.of_files(files)


def write_files(stem: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int = MAX_SHARD_BYTES) -> list[Path]:
    """Write tensors, in order, into as many files STEM.N.safetensors as `max_bytes` makes necessary, synced.

    Each is made when its turn comes; one that is larger gets a file of its own.
    """
    files: list[Path] = []
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if batch and size + tensor.nbytes > max_bytes:
            files.append(_save(stem.with_name(f"{stem.name}.{len(files)}.safetensors"), batch))
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor.nbytes
    files.append(_save(stem.with_name(f"{stem.name}.{len(files)}.safetensors"), batch))
    return files


def join_files(files: Sequence[Path], directory: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
    """Make the shards of a checkpoint of `files`, with an index where there are several: links, and small ones joined.

    The files stay as they are; they are on the file system of `directory`, so that nothing is copied.

    Raises:
        CheckpointError: A file is damaged, tensors of one name stand in two, or a shard reads back differently.
        OSError: The disk refused.
    """
    seen: dict[str, Path] = {}
    for file in files:
        for name in _open(file).keys():  # noqa: SIM118
            if seen.setdefault(name, file) != file:
                raise CheckpointError(f"{name} stands in two files, {seen[name]} and {file}")
    groups: list[list[Path]] = []
    for file in files:
        if groups and sum(each.stat().st_size for each in (*groups[-1], file)) <= min(max_bytes, JOINED_BYTES):
            groups[-1].append(file)
        else:
            groups.append([file])
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, start=1):
        single = len(groups) == 1
        shard = directory / ("model.safetensors" if single else f"model-{number:05}-of-{len(groups):05}.safetensors")
        parts = Shards.of_files(group)
        if len(group) == 1:
            _link(group[0], shard)
        else:
            _save(shard, {name: parts.get(name) for name in parts.where})
            written = Shards.of_files([shard])
            for name in parts.where:
                check_same(f"{name} in {shard}", written.get(name), parts.get(name))
        weight_map |= dict.fromkeys(parts.where, shard.name)
        total += sum(parts.get(name).nbytes for name in parts.where)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / "model.safetensors.index.json", index)


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write tensors, in order, as the shards of a checkpoint, none beyond `max_bytes`; errors as of `join_files`."""
    parts = write_files(directory / ".part", tensors, min(max_bytes, _PART_BYTES))
    join_files(parts, directory, max_bytes)
    for part in parts:
        part.unlink()


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


def _save(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write and sync one file; clones let go of memory that a tensor shares with others."""
    ready = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        if own.untyped_storage().nbytes() != own.nbytes or own.data_ptr() in seen:
            own = own.clone()
        seen.add(own.data_ptr())
        ready[name] = own
    path.touch()
    mode = path.stat().st_mode  # safetensors would let nobody but its owner read a file
    try:
        save_file(ready, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error
    path.chmod(mode)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
    return path


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as indented JSON that ends in a newline, the same on every system."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def _are_whole(files: Sequence[Path]) -> bool:
    """Whether files are all those of one numbered set, or the only one."""
    numbers = [re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.safetensors", file.name) for file in files]
    sets = {(each[1], int(each[2])) if each else (file.name, 1) for each, file in zip(numbers, files, strict=True)}
    return [size for _, size in sets] == [len(files)]


def _find_single(path: Path, found: Sequence[Path], base_name: object) -> Path:
    if len(found) == 1 and _are_whole(found):
        return found[0]
    for file in (path / "model.safetensors", path / f"{base_name}.safetensors"):
        if file in found:
            return file
    if found:
        raise CheckpointError(
            f"{path} has {len(found)} files of weights ({some(file.name for file in found)}) and no index; fetch "
            "model.safetensors.index.json, or let `gptqkit doctor` make it anew"
        )
    raise CheckpointError(f"{path} has no safetensors file; fetch the weights")


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of every tensor: plain safetensors names beside the index, never paths."""
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


class _Header:
    """The header of a safetensors file as a handle of it."""

    def __init__(self, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        dtype, shape = self._tensors[name]
        if dtype not in str_to_torch_dtype:
            raise CheckpointError(f"{name} has the dtype {dtype!r}, which is not known here")
        return torch.empty(shape, dtype=str_to_torch_dtype[dtype], device="meta")


def _open(file: Path, remote: Remote | None = None) -> Any:
    if remote is not None and not file.exists():
        return _Header(remote.header(file.name))
    if file.suffix == ".gguf":
        from .gguf_file import GgufFile  # here, because nobody else needs it

        return GgufFile(file)
    try:
        return safe_open(check_file(file), framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or cut off ({error}); fetch it again") from error
    except (OSError, MemoryError) as error:
        raise CheckpointError(
            f"{file} cannot be mapped into memory ({error}); free some, or raise its limit"
        ) from error


def some(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few of `names`, for messages."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; CheckpointError where there is none."""
    content = check_file(path).read_bytes()
    try:
        values = json.loads(content.decode("utf-8-sig"))
        if rb"\u" in content:  # perhaps half of a surrogate pair, which nobody could write again
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, not an object; fetch it again")
    return cast(dict[str, Any], values)


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            found.update(piece)
    return found.hexdigest()


def check_same(name: str, written: Tensor, wanted: Tensor) -> None:
    """Raise CheckpointError where a tensor that was read back is not, bit for bit, what was to be written."""
    if not same_bits(written, wanted):
        raise CheckpointError(f"{name} reads back differently; disk or memory is faulty")


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors hold the same bits: NaN equals itself, and 0 differs from -0."""
    right = right.detach().cpu()
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))
