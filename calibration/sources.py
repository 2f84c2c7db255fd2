"""Anything that a user gives as text -> documents. Only data files are read; no code of a data set is ever run.

Local files are not left to `datasets.load_dataset`: it reports every call over the network, leaves files in its cache,
and turns text into dates and numbers where it looks like them.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CalibrationError, DatasetUnavailableError

Document: TypeAlias = str | Sequence[Mapping[str, Any]] | Tensor
"""Text, the messages of one chat, or token ids (n,) int64. A document without content is the empty string."""

COLUMNS = ("text", "content", "messages", "input_ids")
"""The columns that are looked for, in this order, where none is named."""

ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".parquet", ".safetensors")

SHORTHANDS = {  # id on the Hub, split for evaluation, whether calibration reads only as much of it as it needs
    "wikitext2": ("Salesforce/wikitext:wikitext-2-raw-v1", "test", False),
    "c4": ("allenai/c4:en", "validation", True),
    "pile": ("NeelNanda/pile-10k", "train", False),
}
C4_DOCUMENTS = 1100  # The GPTQ paper's code evaluates on so many, the first of C4's validation split.


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one source, in its own order, to be read once."""

    name: str  # in error messages
    items: Iterable[Document]
    endless: bool = False  # Only as many as needed should be read.
    ready: bool = False  # They are samples, to be used as they are: a 2-D tensor, or .safetensors files.


def open_source(source: Any, *, column: str | None, split: str | None, evaluation: bool) -> Documents:
    """Open a source of any kind that `Calibration` lists; for `evaluation` a data set's test split instead of train.

    Raises:
        CalibrationError: The source is empty, damaged, of an unknown kind, or has no such column or split.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.
    """
    if isinstance(source, str) and (
        source in SHORTHANDS or not (os.path.exists(source) or source.lower().endswith(ENDINGS))
    ):
        return _open_hub(source, column, split, evaluation)
    if split is not None:
        raise CalibrationError(f"split is {split!r}, but only data sets of the Hub, named by a string, have splits")
    if isinstance(source, (str, Path)):
        return _open_files([Path(source)], column)
    if isinstance(source, Tensor) and source.ndim in (1, 2):
        documents = _documents([source] if source.ndim == 1 else source, "the tensor")
        return Documents("the tensor", list(documents), ready=source.ndim == 2)
    if isinstance(source, Sequence) and source and not isinstance(source, bytes):
        if all(isinstance(item, Path) for item in source):
            return _open_files(source, column)
        return Documents("the list", list(_documents(source, "the list")))
    import datasets  # here, because it takes seconds

    if isinstance(source, (datasets.Dataset, datasets.IterableDataset)):
        documents = _read_dataset(lambda: source, "the data set", column)
        return Documents("the data set", documents, endless=isinstance(source, datasets.IterableDataset))
    raise CalibrationError(
        f"{reprlib.repr(source)} cannot be read; give a file, a folder, a data set of the Hub, a list of paths (as "
        "pathlib.Path), of strings, of chats (each a list of messages) or of lists of token ids, a tensor of token ids "
        "(1-D, or 2-D for ready samples), or a datasets.Dataset"
    )


def _open_files(paths: Sequence[Path], column: str | None) -> Documents:
    name = ", ".join(map(str, paths))
    documents: list[Document] = []
    ready: set[bool] = set()
    for path in paths:
        for file in _list_files(path):
            documents += _documents(_column(_read_file(file, column), str(file), column), str(file))
            ready.add(file.suffix.lower() == ".safetensors")
    if len(ready) > 1:
        raise CalibrationError(f"{name} holds both text and .safetensors files, whose samples are ready; give one kind")
    return Documents(name, documents, ready=True in ready)


def _list_files(path: Path) -> list[Path]:
    """Return the file itself, or every readable file of a folder and its subfolders, sorted by path."""
    if not path.exists():
        raise DatasetUnavailableError(f"there is no file or folder {path}")
    inside = path.rglob("*") if path.is_dir() else [path]
    files = sorted(file for file in inside if file.suffix.lower() in ENDINGS and file.is_file())
    if not files:
        raise CalibrationError(f"{path} is or holds no file that can be read; such files end in {', '.join(ENDINGS)}")
    return files


def _read_file(path: Path, column: str | None) -> Iterator[Any]:
    """Yield the records of a file: texts with their line ends as they are, mappings from columns, or samples."""
    kind, place = path.suffix.lower(), str(path)
    csv_limit = csv.field_size_limit(2**31 - 1)  # documents are longer than the csv module's 128 KiB
    try:
        if kind == ".parquet":
            import pyarrow.parquet  # here, because it takes long; `datasets` is built upon it

            with pyarrow.parquet.ParquetFile(path) as table:
                for batch in table.iter_batches(batch_size=1024, columns=_needed(table.schema_arrow.names, column)):
                    yield from batch.to_pylist()
        elif kind == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                if list(tensors.keys()) != ["input_ids"] or len(tensors.get_slice("input_ids").get_shape()) != 2:
                    raise ValueError("it must hold one tensor, input_ids (samples, length), and nothing else")
                yield from tensors.get_tensor("input_ids")
        else:
            with path.open(encoding="utf-8" if kind == ".txt" else "utf-8-sig", newline="") as file:
                if kind == ".txt":
                    yield file.read()
                elif kind == ".csv":
                    yield from csv.DictReader(file, strict=True)
                elif kind == ".jsonl":
                    for number, line in enumerate(file, start=1):
                        place = f"line {number} of {path}"
                        if line.strip():
                            yield json.loads(line)
                elif isinstance(records := json.load(file), list):
                    yield from records
                else:
                    raise ValueError("it must hold a list; if it has one record per line, name it .jsonl")
    except (OSError, ValueError, RuntimeError, csv.Error, SafetensorError) as error:
        raise CalibrationError(f"{place} cannot be read as {kind}: {error}") from error
    finally:
        csv.field_size_limit(csv_limit)


def _open_hub(source: str, column: str | None, split: str | None, evaluation: bool) -> Documents:
    path, evaluation_split, streamed = SHORTHANDS.get(source, (source, "test", True))
    match = re.fullmatch(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?::([\w.-]+))?", path)
    if match is None:
        raise DatasetUnavailableError(
            f"{source[:80]!r} is no existing file or folder, and cannot be a data set of the Hub "
            f"(organisation/name, or organisation/name:configuration) or one of {', '.join(SHORTHANDS)}; "
            "to use the string itself as text, put it into a list"
        )
    split = split or (evaluation_split if evaluation else "train")
    limit = C4_DOCUMENTS if evaluation and source == "c4" else None
    streaming = limit is not None or (streamed and not evaluation)
    name = f"{source} ({split})"

    def load() -> Any:
        import datasets

        return datasets.load_dataset(match[1], match[2], split=split, streaming=streaming)

    documents = itertools.islice(_read_dataset(load, name, column), limit)
    return Documents(name, documents, endless=streaming and limit is None)


def _read_dataset(load: Callable[[], Any], name: str, column: str | None) -> Iterator[Document]:
    """Yield the documents of the data set that `load` opens, as far as they are asked for."""
    from datasets.exceptions import DatasetsError

    try:
        dataset = load()
        needed = _needed(dataset.column_names or (), column)  # decoding the other columns may cost much
        yield from _documents(_column(dataset.select_columns(needed) if needed else dataset, name, column), name)
    except CalibrationError:
        raise
    except (OSError, DatasetsError, ValueError, RuntimeError) as error:
        raise DatasetUnavailableError(
            f"{name} cannot be read: {error}; check its name, its split and its configuration "
            "(organisation/name:configuration), the network and your rights, or give a local file"
        ) from error


def _needed(names: Sequence[str], column: str | None) -> list[str] | None:
    """Return the one column to read, where the names of all columns tell."""
    return next(([name] for name in ([column] if column else COLUMNS) if name in names), None)


def _column(records: Iterable[Any], name: str, column: str | None) -> Iterator[Any]:
    """Yield one column of records that have columns, and others as they are; the first record says which column."""
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            yield record
            continue
        present = ", ".join(map(repr, record)) or "none"
        if column is None:
            found = _needed(list(record), None) or [key for key, value in record.items() if isinstance(value, str)]
            if len(found) != 1:
                raise CalibrationError(
                    f"{name} has none of the columns {', '.join(COLUMNS)}, and {len(found)} others with text; name one "
                    f"with column: {present}"
                )
            column = found[0]
        if column not in record:
            raise CalibrationError(f"record {number} of {name} has no column {column!r}; its columns are {present}")
        yield record[column]


def _documents(values: Iterable[Any], name: str) -> Iterator[Document]:
    for number, value in enumerate(values):
        document = _document(value)
        if document is None:
            raise CalibrationError(
                f"document {number} of {name} is {reprlib.repr(value)}; it must be text, a chat (a list of messages "
                "with 'role' and 'content') or a list of token ids (whole numbers)"
            )
        yield document


def _document(value: Any) -> Document | None:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return value.detach().to("cpu", torch.int64) if whole and value.ndim == 1 else None
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        if not value:
            return ""
        if all(isinstance(item, Mapping) and "role" in item for item in value):
            return value
        if all(type(item) is int and -(1 << 63) <= item < 1 << 63 for item in value):
            return torch.tensor(value, dtype=torch.int64)
    return None
