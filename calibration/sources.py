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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ..errors import CalibrationError, DatasetUnavailableError
from ..hub import at_home, is_local
from ..settings import did_you_mean
from .records import KINDS, Document, Reader, alike, is_single, names_of, needed_columns, shown

ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".parquet", ".safetensors")

SHORTHANDS = {  # id on the Hub, split for evaluation, whether only as much of it is read as is needed
    "wikitext2": ("Salesforce/wikitext:wikitext-2-raw-v1", "test", False),
    "c4": ("allenai/c4:en", "validation", True),
    "pile": ("NeelNanda/pile-10k", "train", False),
}
C4_DOCUMENTS = 1100  # The GPTQ paper's code evaluates on so many, the first of C4's validation split.
BATCH = 64 << 20  # bytes of a .parquet file that are decoded at once


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of one source, in its own order, to be read once."""

    name: str  # in error messages
    items: Iterator[Document]
    endless: bool = False  # Only as many as needed should be read.


def open_source(
    source: Any, *, column: str | None, split: str | None, evaluation: bool, partial: bool = True
) -> Documents:
    """Open a source of any kind that `Calibration` lists; `partial` where the first documents may be enough.

    One that is open is returned as it is. Without a `column`, it is found; without a `split`, "train" is taken, or for
    `evaluation` the test split.

    Raises:
        CalibrationError: The source is empty, damaged, of an unknown kind, or has no such column or split.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.
    """
    if isinstance(source, Documents):
        return source
    if isinstance(source, (str, Path)):
        source = at_home(source)
    if isinstance(source, str) and (
        source in SHORTHANDS or not (os.path.exists(source) or source.lower().endswith(ENDINGS))
    ):
        return _open_hub(source, column, split, evaluation, partial)
    if isinstance(source, Mapping) and source and all(hasattr(each, "column_names") for each in source.values()):
        split = split or ("test" if evaluation else "train")
        if split not in source:
            raise CalibrationError(f"the data set has no split {split!r}, but {names_of(source)}; name one with split")
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
        return _open_files([Path(at_home(file)) for file in source], column)
    if isinstance(source, Dataset) and not isinstance(source, Iterable):  # of torch, which knows its items by number
        source = map(source.__getitem__, range(len(source)))  # type: ignore[arg-type]
    nothing = isinstance(source, (bytes, Sequence)) and (isinstance(source, bytes) or not source)
    if nothing or not isinstance(source, Iterable):
        raise CalibrationError(
            f"{shown(source)} cannot be read; give a file, a folder, a list of them, a data set (of the Hub, or one "
            f"that is open), or {KINDS}"
        )
    name = "the list" if isinstance(source, Sequence) else "the tensor" if isinstance(source, Tensor) else "the source"
    turned = getattr(source, "collate_fn", None) is default_collate
    documents = Reader(name, column, turned=turned).documents([source] if is_single(source) else source)
    return Documents(name, alike(documents, name), endless=_is_endless(source))


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
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        several = "; where several sources are given, each must be one" if len(paths) > 1 else ""
        raise DatasetUnavailableError(f"there is no file or folder {missing}{several}")
    files = [file for path in paths for file in _list_files(path)]
    if column is not None and all(file.suffix.lower() == ".txt" for file in files):
        raise CalibrationError(f"column is {column!r}, but {name} holds plain text, without columns; leave column out")
    documents = (
        document for file in files for document in Reader(str(file), column).documents(_read_file(file, column))
    )
    return Documents(name, alike(documents, name))


def _list_files(path: Path) -> list[Path]:
    """Return the file itself, or every readable file of a folder and its subfolders, sorted by path."""
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
            needed = needed_columns(schema.names, column)
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
        needed = needed_columns(dataset.column_names or (), column)  # decoding the other columns may cost much
        yield from alike(Reader(name, column).documents(dataset.select_columns(needed) if needed else dataset), name)
    except CalibrationError:
        raise
    except (OSError, DatasetsError, ValueError, RuntimeError) as error:
        word = name.partition(" ")[0]
        meant = "" if word in SHORTHANDS else did_you_mean(word, SHORTHANDS)
        raise DatasetUnavailableError(
            f"{name} cannot be read: {error}{meant or ';'} check its name, its split and its configuration "
            "(organisation/name:configuration), the network and your rights, or give a local file"
        ) from error
