"""Rows from local files: .txt .json .jsonl .csv .parquet, and windows from .safetensors.

Nothing is cached, converted on disk or executed, and text keeps its line ends as they are.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CalibrationError, DatasetUnavailableError
from .rows import column_values, find_column, to_ids

ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".parquet", ".safetensors")
_LARGEST_CSV_FIELD = 2**31 - 1


def list_files(path: Path) -> list[Path]:
    """The file itself, or every file of a known ending in a folder and its subfolders, sorted by path.

    Raises:
        DatasetUnavailableError: There is no such file or folder.
        CalibrationError: The ending is unknown, or a folder has no file that can be read.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
        if not files:
            raise CalibrationError(f"the folder {path} has no file that ends in one of {', '.join(ENDINGS)}")
        return files
    if not path.exists():
        raise DatasetUnavailableError(f"there is no file or folder {path}")
    if path.suffix.lower() not in ENDINGS:
        raise CalibrationError(
            f"{path} ends in {path.suffix or 'nothing'!r}; files that can be read end in {', '.join(ENDINGS)}"
        )
    return [path]


def is_windows_file(path: Path) -> bool:
    """Whether the file holds ready windows instead of rows."""
    return path.suffix.lower() == ".safetensors"


def read_windows(path: Path) -> Tensor:
    """The tensor `input_ids`, (samples, length) int64, of a .safetensors file that holds nothing else.

    Raises:
        CalibrationError: The file is damaged, or holds other tensors, another dtype or another number of axes.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            if names != ["input_ids"]:
                raise CalibrationError(
                    f"{path} holds {', '.join(names) or 'no tensor'}; "
                    "it must hold exactly one tensor, input_ids (samples, length)"
                )
            input_ids: Tensor = file.get_tensor("input_ids")
    except SafetensorError as error:
        raise CalibrationError(f"{path} is no readable .safetensors file: {error}") from error
    if input_ids.ndim != 2:
        raise CalibrationError(f"input_ids in {path} has shape {tuple(input_ids.shape)}; it must be (samples, length)")
    return to_ids(input_ids, f"input_ids in {path}")


def read_values(path: Path, column: str | None) -> Iterator[Any]:
    """What one file holds, a value per row: a .txt file is a single row, the others have one per record.

    Raises:
        CalibrationError: The file is damaged or not UTF-8, or it has no such column.
    """
    name = str(path)
    try:
        match path.suffix.lower():
            case ".txt":
                with path.open(encoding="utf-8", newline="") as file:
                    yield file.read()
            case ".json":
                yield from _record_values(iter(_json_list(path)), column, name)
            case ".jsonl":
                yield from _record_values(_json_lines(path), column, name)
            case ".csv":
                yield from column_values(_csv_records(path), column, name)
            case ".parquet":
                yield from _parquet_values(path, column)
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it first") from error


def _record_values(records: Iterator[Any], column: str | None, name: str) -> Iterator[Any]:
    """Records that are objects have columns; plain strings and lists are the values themselves."""
    for first in records:
        if isinstance(first, Mapping):
            yield from column_values(_objects(first, records, name), column, name)
        else:
            yield first
            yield from records


def _objects(first: Mapping[str, Any], rest: Iterator[Any], name: str) -> Iterator[Mapping[str, Any]]:
    yield first
    for number, record in enumerate(rest, start=1):
        if not isinstance(record, Mapping):
            raise CalibrationError(f"row {number} of {name} is of type {type(record).__name__}; row 0 is an object")
        yield record


def _json_list(path: Path) -> list[Any]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            records = json.load(file)
        except json.JSONDecodeError as error:
            raise CalibrationError(
                f"{path} is not JSON: {error}; if it has one record per line, name it .jsonl"
            ) from error
    if not isinstance(records, list):
        raise CalibrationError(f"{path} holds a JSON {type(records).__name__}; it must hold a list of records")
    return records


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise CalibrationError(f"line {number} of {path} is not JSON: {error}") from error


def _csv_records(path: Path) -> Iterator[dict[str, Any]]:
    limit = csv.field_size_limit(_LARGEST_CSV_FIELD)  # documents are longer than the csv module's 128 KiB
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from csv.DictReader(file, strict=True)
    except csv.Error as error:
        raise CalibrationError(f"{path} is no readable .csv file: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _parquet_values(path: Path, column: str | None) -> Iterator[Any]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            first = next(file.iter_batches(batch_size=1), None)
            if first is None:
                return
            found = find_column(first.to_pylist()[0], column, str(path))
            for batch in file.iter_batches(columns=[found]):
                yield from batch.column(0).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise CalibrationError(f"{path} is no readable .parquet file: {error}") from error
