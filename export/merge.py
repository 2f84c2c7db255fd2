"""Safetensors files cut and joined without reading tensors: part files become shards of a checkpoint.

A safetensors file is 8 bytes of header length, a JSON header and the tensors' bytes. Inside a file tensors lie by
falling size of their elements, then by name, so that each is aligned.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a part file.

    Attributes:
        name: Full name.
        part: File name of the part.
        dtype: As safetensors spells it.
        shape: Its shape.
        start: First byte in the part's data.
        stop: Byte after its last.
        checksum: CRC-32 of its bytes.
    """

    name: str
    part: str
    dtype: str
    shape: list[int]
    start: int
    stop: int
    checksum: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def read_entries(part: Path) -> list[Entry]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: Not a whole safetensors file.
    """
    with part.open("rb") as stream:
        header, data = _header(stream, part)
        tensors = {name: value for name, value in header.items() if name != "__metadata__"}
        entries = []
        for name, value in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = value["data_offsets"]
            checksum = _checksum(stream, data + start, stop - start, part)
            shape = list(value["shape"])
            entries.append(
                Entry(
                    name=name,
                    part=part.name,
                    dtype=value["dtype"],
                    shape=shape,
                    start=start,
                    stop=stop,
                    checksum=checksum,
                )
            )
    return entries


def plan_shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Tensors in order, cut into shards of at most `max_bytes`; a larger tensor gets a shard of its own."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.size > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.size
    return [sorted(shard, key=lambda entry: (-_BYTES.get(entry.dtype, 1), entry.name)) for shard in shards]


def write_shard(target: Path, entries: Sequence[Entry], parts: Path) -> None:
    """Join tensors of the parts in the folder `parts` into one file, read it back, and let it appear under its name.

    Raises:
        CheckpointError: A part is cut off or has changed, or the shard reads back differently.
        OSError: The disk refused.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        stop = offset + entry.size
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    temporary = target.with_name(f".{target.name}.tmp")
    with temporary.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for part, group in _by_part(entries):
            with (parts / part).open("rb") as stream:
                _, data = _header(stream, parts / part)
                for entry in group:
                    for piece in _pieces(stream, data + entry.start, entry.size, parts / part):
                        out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    with temporary.open("rb") as stream:
        _, data = _header(stream, temporary)
        offset = data
        for entry in entries:
            if _checksum(stream, offset, entry.size, temporary) != entry.checksum:
                raise CheckpointError(f"{entry.name} reads back differently; disk or memory is faulty")
            offset += entry.size
    temporary.rename(target)


def _by_part(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Neighbouring entries of one part together, in order."""
    group: list[Entry] = []
    for entry in entries:
        if group and group[0].part != entry.part:
            yield group[0].part, group
            group = []
        group.append(entry)
    if group:
        yield group[0].part, group


def _header(stream: BinaryIO, file: Path) -> tuple[Mapping[str, Any], int]:
    """The header, and where the data begin."""
    try:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: Mapping[str, Any] = json.loads(stream.read(length))
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or cut off ({error})") from error
    return header, 8 + length


def _pieces(stream: BinaryIO, offset: int, size: int, file: Path) -> Iterator[bytes]:
    stream.seek(offset)
    while size:
        piece = stream.read(min(size, _CHUNK))
        if not piece:
            raise CheckpointError(f"{file} is cut off; delete the unfinished job and start it anew")
        yield piece
        size -= len(piece)


def _checksum(stream: BinaryIO, offset: int, size: int, file: Path) -> int:
    value = 0
    for piece in _pieces(stream, offset, size, file):
        value = zlib.crc32(piece, value)
    return value
