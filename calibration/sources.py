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
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import default_collate

from ..errors import CalibrationError, DatasetUnavailableError
from ..hub import is_local
from ..settings import did_you_mean
from .chats import Chat

Document: TypeAlias = str | Chat | Tensor
"""Text, a chat, or token ids, int64: (n,) of a document, (1, n) of a ready sample. One without content is empty."""

COLUMNS = ("text", "content", "messages", "input_ids")
"""The columns that are looked for, in this order, where none is named."""

ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".parquet", ".safetensors")

SHORTHANDS = {  # id on the Hub, split for evaluation, whether only as much of it is read as is needed
    "wikitext2": ("Salesforce/wikitext:wikitext-2-raw-v1", "test", False),
    "c4": ("allenai/c4:en", "validation", True),
    "pile": ("NeelNanda/pile-10k", "train", False),
}
C4_DOCUMENTS = 1100  # The GPTQ paper's code evaluates on so many, the first of C4's validation split.
BATCH = 64 << 20  # bytes of a .parquet file that are decoded at once
MOST = 4 << 30  # characters of one file: more is a mistake, or a file that is small but unpacks to anything
NESTING = 2  # lists in a list: a batch of records, each of which holds several documents

_KINDS = (
    "text, a chat (a list of messages with 'role' and 'content'), token ids (whole numbers of 64 bits), a record of "
    "one of these, or a batch of them"
)


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one source, in its own order, to be read once."""

    name: str  # in error messages
    items: Iterator[Document]
    endless: bool = False  # Only as many as needed should be read.


def open_source(
    source: Any, *, column: str | None, split: str | None, evaluation: bool, partial: bool = True
) -> Documents:
    """Open a source of any kind that `Calibration` lists.

    Args:
        source: What was given.
        column: That of structured sources; None finds it.
        split: That of a data set with several; None takes "train", or for `evaluation` the test split.
        evaluation: Whether it is to be measured on.
        partial: Whether the first documents may be enough.

    Raises:
        CalibrationError: The source is empty, damaged, of an unknown kind, or has no such column or split.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.
    """
    if isinstance(source, str) and (
        source in SHORTHANDS or not (os.path.exists(source) or source.lower().endswith(ENDINGS))
    ):
        return _open_hub(source, column, split, evaluation, partial)
    if isinstance(source, Mapping) and source and all(hasattr(each, "column_names") for each in source.values()):
        split = split or ("test" if evaluation else "train")
        if split not in source:
            raise CalibrationError(f"the data set has no split {split!r}, but {_names(source)}; name one with split")
        source, split = source[split], None
    if split is not None:
        raise CalibrationError(f"split is {split!r}, but only data sets with several splits, as on the Hub, have any")
    if isinstance(source, (str, Path)):
        return _open_files([Path(source)], column)
    if hasattr(source, "itertuples"):  # of pandas, which would go through its columns' names
        source = source.to_dict("records")
    if hasattr(source, "column_names"):
        documents = _read_dataset(lambda: source, "the data set", column)
        return Documents("the data set", documents, endless=_is_endless(source))
    if isinstance(source, Sequence) and source and all(map(_is_file, source)):
        return _open_files([Path(file) for file in source], column)
    nothing = isinstance(source, (bytes, Sequence)) and (isinstance(source, bytes) or not source)
    if nothing or not isinstance(source, Iterable):
        raise CalibrationError(
            f"{_shown(source)} cannot be read; give a file, a folder, a list of them, a data set (of the Hub, or one "
            f"that is open), or {_KINDS}"
        )
    name = "the list" if isinstance(source, Sequence) else "the tensor" if isinstance(source, Tensor) else "the source"
    single = hasattr(source, "dtype") or isinstance(source, Mapping) or _is_chat(source) or _ids(source) is not None
    turned = getattr(source, "collate_fn", None) is default_collate
    documents = _Reader(name, column, turned=turned).documents([source] if single else source)
    return Documents(name, _alike(documents, name), endless=_is_endless(source))


def _is_endless(source: Any) -> bool:
    """Whether nothing tells how much there is; a DataLoader has a length, which may not be asked for."""
    try:
        return len(source) < 0
    except TypeError:
        return True


def _is_file(item: Any) -> bool:
    """Whether an item of a list is a file: a path, or a string that ends as data files do."""
    return isinstance(item, Path) or (isinstance(item, str) and item.lower().endswith(ENDINGS) and "\n" not in item)


def _open_files(paths: Sequence[Path], column: str | None) -> Documents:
    name = ", ".join(map(str, paths[:4])) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
    files = [file for path in paths for file in _list_files(path)]
    documents = (
        document for file in files for document in _Reader(str(file), column).documents(_read_file(file, column))
    )
    return Documents(name, _alike(documents, name))


def _alike(documents: Iterable[Document], name: str) -> Iterator[Document]:
    """Yield documents, of which either all or none may be ready samples."""
    kinds = set()
    for document in documents:
        if len(document):
            kinds.add(is_ready(document))
        if len(kinds) > 1:
            raise CalibrationError(
                f"{name} holds both text and ready samples (token ids in two dimensions, or with an attention_mask, or "
                "in .safetensors files); give one kind"
            )
        yield document


def is_ready(document: Document | None) -> bool:
    """Whether a document is a ready sample, to be used as it is."""
    return isinstance(document, Tensor) and document.ndim == 2


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

            schema = pyarrow.parquet.read_schema(path)
            needed = _needed(schema.names, column)
            # A text that comes in every row stands once in the file, and stays one until its row's turn comes.
            texts = [each.name for each in schema if str(each.type) in ("string", "binary", "large_string")]
            with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as table:
                groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
                widest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
                for batch in table.iter_batches(batch_size=min(1024, 1 + BATCH // (widest + 1)), columns=needed):
                    for row in range(len(batch)):
                        yield from batch.slice(row, 1).to_pylist()
        elif kind == ".safetensors":
            with safe_open(path, framework="pt") as tensors:
                if list(tensors.keys()) != ["input_ids"] or len(tensors.get_slice("input_ids").get_shape()) != 2:
                    raise ValueError("it must hold one tensor, input_ids (samples, length), and nothing else")
                yield tensors.get_tensor("input_ids")
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
    except (OSError, ValueError, RuntimeError, MemoryError, csv.Error, SafetensorError) as error:
        raise CalibrationError(f"{place} cannot be read as {kind}: {error}") from error
    finally:
        csv.field_size_limit(csv_limit)


def _open_hub(source: str, column: str | None, split: str | None, evaluation: bool, partial: bool) -> Documents:
    path, evaluation_split, streamed = SHORTHANDS.get(source, (source, "test", True))
    match = re.fullmatch(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?::([\w.-]+))?", path)
    if match is None:
        raise DatasetUnavailableError(
            f"{source[:80]!r} is no existing file or folder, and cannot be a data set of the Hub "
            f"(organisation/name, or organisation/name:configuration) or one of {', '.join(SHORTHANDS)}; "
            "to use the string itself as text, put it into a list"
        )
    if is_local(path.partition(":")[0]):
        raise DatasetUnavailableError(f"there is no file or folder {source}")
    split = split or (evaluation_split if evaluation else "train")
    limit = C4_DOCUMENTS if evaluation and source == "c4" else None
    streaming = limit is not None or (streamed and partial)
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
        yield from _alike(_Reader(name, column).documents(dataset.select_columns(needed) if needed else dataset), name)
    except CalibrationError:
        raise
    except (OSError, DatasetsError, ValueError, RuntimeError) as error:
        word = name.partition(" ")[0]
        meant = "" if word in SHORTHANDS else did_you_mean(word, SHORTHANDS)
        raise DatasetUnavailableError(
            f"{name} cannot be read: {error}{meant or ';'} check its name, its split and its configuration "
            "(organisation/name:configuration), the network and your rights, or give a local file"
        ) from error


def _needed(names: Sequence[str], column: str | None) -> list[str] | None:
    """Return the column to read, and what tells padding, where the names of all columns tell."""
    found = next((name for name in ([column] if column else COLUMNS) if name in names), None)
    if found is None:
        return None
    masked = found in ("input_ids", column)
    return [found, *(name for name in names if name == "attention_mask" and name != found and masked)]


class _Reader:
    """What turns any items into documents; the first record says which column holds them.

    Args:
        name: Of the source, for error messages.
        column: The column; None finds it.
        turned: Whether torch collated the records: a list of a column's first entries, one of its second, and so on.
    """

    def __init__(self, name: str, column: str | None, *, turned: bool = False) -> None:
        self._name, self._column, self._named, self._turned = name, column, column is not None, turned
        self._number, self._item, self._characters = 0, None, 0

    def documents(self, items: Iterable[Any]) -> Iterator[Document]:
        """Yield the documents in every item."""
        for self._number, self._item in enumerate(items):
            yield from self._inside(self._turn(self._item), NESTING)

    def _inside(self, value: Any, depth: int, mask: Any = None) -> Iterator[Document]:
        """Yield the documents in a text, a chat, token ids (with the mask that tells their padding), or what has such.

        Records are looked into at their column, batches at each entry, at most `depth` times.
        """
        if hasattr(value, "tolist") and not isinstance(value, Tensor):  # of numpy
            value = self._numbers(value.tolist()) if value.dtype.kind in "iu" and value.size else value.tolist()
        ids = _ids(value)
        if value is None or isinstance(value, str):
            yield self._text(value or "")
        elif isinstance(value, Mapping):
            column = self._find(value)
            mask = value.get("attention_mask") if column == "input_ids" or self._named else None
            found, mask = self._turn(value[column]), self._turn(mask)
            yield from self._inside(found, depth, mask.tolist() if hasattr(mask, "tolist") else mask)
        elif ids is not None:
            yield from self._rows(ids, mask)
        elif _is_chat(value):
            yield Chat(value, f"document {self._number} of {self._name}")
        elif depth and isinstance(value, Sequence) and not isinstance(value, bytes):
            if isinstance(value, tuple) and len(value) > 1 and _tensors(value):
                raise self._nameless()
            masks = [None] * len(value) if mask is None else mask
            if not isinstance(masks, Sequence) or len(masks) != len(value):
                raise self._refusal()
            for entry, its in zip(value, masks, strict=True):
                yield from self._inside(entry, depth - 1, its)
        else:
            raise self._refusal()

    def _turn(self, column: Any) -> Any:
        """Return a column by records, where torch collated it by places."""
        if not self._turned or not isinstance(column, (list, tuple)) or not _tensors(column):
            return column
        if all(each.ndim == 1 for each in column):
            return torch.stack(list(column), -1)
        if len(column) > 1:
            raise self._nameless()
        return column

    def _text(self, text: str) -> str:
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            raise CalibrationError(
                f"document {self._number} of {self._name} holds half of a surrogate pair, character {error.start}, "
                "which no file in UTF-8 can; read it again with the right encoding"
            ) from error
        self._characters += len(text)
        if self._characters > MOST:
            raise CalibrationError(
                f"document {self._number} of {self._name} brings its text to more than {MOST >> 20} Mi characters; "
                "give a part of it"
            )
        return text

    def _rows(self, ids: Tensor, mask: Any) -> Iterator[Tensor]:
        """Yield one document, or ready samples: ids with a mask, or in two dimensions."""
        kept = torch.ones_like(ids) if mask is None else self._numbers(mask)
        if kept.shape != ids.shape:
            raise self._refusal()
        if mask is None and ids.ndim == 1:
            yield ids
            return
        length = ids.shape[-1]
        for row, its in zip(ids.reshape(-1, length), kept.reshape(-1, length).bool(), strict=True):
            yield row[its][None]

    def _numbers(self, values: Any) -> Tensor:
        try:
            return torch.tensor(values)
        except (RuntimeError, TypeError, ValueError) as error:  # ragged, too large, or no numbers
            raise self._refusal() from error

    def _find(self, record: Mapping[Any, Any]) -> str:
        """Return the column of a record that holds documents."""
        if self._column is None:
            texts = [key for key, value in record.items() if isinstance(value, str)]
            found = _needed(list(record), None) or texts
            if found is texts and len(texts) != 1:
                raise CalibrationError(
                    f"{self._name} has none of the columns {', '.join(COLUMNS)}, and {len(texts)} others with text; "
                    f"name one with column: {_names(record)}"
                )
            self._column = found[0]
        if self._column not in record:
            raise CalibrationError(
                f"record {self._number} of {self._name} has no column {self._column!r}; its columns are "
                f"{_names(record)}"
            )
        return self._column

    def _nameless(self) -> CalibrationError:
        return CalibrationError(
            f"document {self._number} of {self._name} is several tensors, and nothing says which of them is a mask; "
            "give dictionaries of input_ids and attention_mask"
        )

    def _refusal(self) -> CalibrationError:
        return CalibrationError(f"document {self._number} of {self._name} is {_shown(self._item)}; it must be {_KINDS}")


def _ids(value: Any) -> Tensor | None:
    """Return token ids, int64, that are a tensor or a list of whole numbers; None for anything else."""
    if isinstance(value, Tensor):
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return value.detach().to("cpu", torch.int64) if whole and value.ndim else None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return None
    if all(isinstance(item, (int, Integral)) and not isinstance(item, bool) for item in value):
        return torch.tensor(value, dtype=torch.int64) if -(1 << 63) <= min(value) <= max(value) < 1 << 63 else None
    return None


def _tensors(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(isinstance(each, Tensor) for each in values)


def _is_chat(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        return False
    return all(isinstance(item, Mapping) and "role" in item for item in value)


def _shown(value: Any) -> str:
    """Return a value for a message, whatever its size."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__} with a huge number"


def _names(keys: Iterable[Any]) -> str:
    listed = [reprlib.repr(key) for key in keys]
    return (", ".join(listed[:8]) or "none") + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
