"""Any source of calibration or evaluation text, opened as rows or as ready windows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import CalibrationError
from .files import ENDINGS, is_windows_file, list_files, read_values, read_windows
from .hub import SHORTHANDS, is_dataset, open_dataset, open_hub_set
from .rows import FixedWindows, Row, Rows, to_ids, to_row

Source: TypeAlias = Any
"""str, Path, list[Path], list[str], list[list[dict]], list[list[int]], Tensor, datasets.Dataset: see `open_source`."""

ACCEPTED = (
    "a file, a folder, a data set of the Hub, several paths (as pathlib.Path), a list of strings, of chats (each a "
    "list of messages) or of token ids (each a list of int), a tensor of token ids, or a datasets.Dataset"
)


def open_source(
    source: Source, *, column: str | None = None, split: str | None = None, evaluation: bool = False
) -> Rows | FixedWindows:
    """The rows of a source, or its windows where it holds ready ones (2-D tensors and .safetensors files).

    Args:
        source: A string is a shorthand (wikitext2, c4, pile), else an existing file or folder, else the id of a data
            set on the Hub (organisation/name or organisation/name:configuration). A Path is a file or folder, a list
            of them several. A list of strings is a list of texts, never of paths. Further: a list of chats (lists of
            messages), a list of lists of token ids, a tensor of token ids (1-D: one document; 2-D: ready windows), a
            `datasets.Dataset` or `datasets.IterableDataset`.
        column: Where records have columns, the one to read; None finds it.
        split: The split of a data set on the Hub; None takes its training split, or the test split for `evaluation`.
        evaluation: Whether the rows are for evaluation instead of calibration.

    Raises:
        CalibrationError: The source is empty, of an unknown kind, damaged, or has no such column or split.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.
    """
    if isinstance(source, str) and _names_hub_set(source):
        return open_hub_set(source, column=column, split=split, evaluation=evaluation)
    if split is not None:
        raise CalibrationError(f"split is {split!r}, but only data sets of the Hub, named by a string, have splits")
    if isinstance(source, (str, Path)):
        return _open_files(list_files(Path(source)), str(source), column)
    if isinstance(source, Tensor):
        return _open_tensor(source)
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        return _open_list(source, column)
    if is_dataset(source):
        return open_dataset(source, column=column)
    raise CalibrationError(f"a source of type {type(source).__name__} cannot be read; give {ACCEPTED}")


def _names_hub_set(source: str) -> bool:
    """Whether the string does not stand for a file or folder; a missing file with a known ending is still a file."""
    return source in SHORTHANDS or not (os.path.exists(source) or source.lower().endswith(ENDINGS))


def _open_files(files: list[Path], name: str, column: str | None) -> Rows | FixedWindows:
    ready = [path for path in files if is_windows_file(path)]
    if not ready:
        rows: list[Row] = []
        for path in files:
            rows += [to_row(value, str(path), number) for number, value in enumerate(read_values(path, column))]
        return Rows(name, rows)
    if len(ready) < len(files):
        other = next(path for path in files if path not in ready)
        raise CalibrationError(
            f"{ready[0]} holds ready windows, {other} does not; give files of one kind, "
            "because ready windows are used exactly as they are"
        )
    windows = [read_windows(path) for path in ready]
    for path, tensor in zip(ready, windows, strict=True):
        if tensor.shape[1] != windows[0].shape[1]:
            raise CalibrationError(
                f"the windows in {path} have {tensor.shape[1]} tokens, those in {ready[0]} {windows[0].shape[1]}; "
                "give files whose windows are of one length"
            )
    return FixedWindows(name, torch.cat(windows))


def _open_tensor(tensor: Tensor) -> Rows | FixedWindows:
    if tensor.ndim not in (1, 2):
        raise CalibrationError(
            f"the tensor has shape {tuple(tensor.shape)}; token ids must be (tokens,) or (samples, length)"
        )
    ids = to_ids(tensor, "the tensor")
    return Rows("the tensor", [ids]) if ids.ndim == 1 else FixedWindows("the tensor", ids)


def _open_list(items: Sequence[Any], column: str | None) -> Rows | FixedWindows:
    name = "the list"
    if not items:
        raise CalibrationError(f"the list is empty; give {ACCEPTED}")
    if all(isinstance(item, Path) for item in items):
        files = [file for item in items for file in list_files(item)]
        return _open_files(files, ", ".join(str(item) for item in items), column)
    if any(isinstance(item, Path) for item in items):
        raise CalibrationError("the list holds paths and other things; give one kind, strings that are paths as Path")
    if isinstance(items[0], int):
        raise CalibrationError("the list holds token ids; give a list of lists of them, one per document, or a tensor")
    return Rows(name, [to_row(item, name, number) for number, item in enumerate(items)])
