"""Rows from data sets: the Hugging Face Hub, or `datasets` objects that the caller made.

Only data files are read. No code that comes with a data set is ever executed: since version 4, which this package
requires, `datasets` refuses sets that need it, and nothing here could ask it to.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import CalibrationError, DatasetUnavailableError
from .rows import Row, Rows, column_values, find_column, to_row

_ID = re.compile(r"(?P<path>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[\w.-]+))?")


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """How one data set of the Hub is read.

    Attributes:
        path: Its id.
        config: Its configuration, where it has several.
        calibration_split: The split for calibration.
        evaluation_split: The split for evaluation.
        streamed: Read over the network as rows are asked for, instead of downloading (and caching) the whole.
        evaluation_rows: How many rows, from the first on, an evaluation uses; None for all.
    """

    path: str
    config: str | None = None
    calibration_split: str = "train"
    evaluation_split: str = "test"
    streamed: bool = True
    evaluation_rows: int | None = None


SHORTHANDS = {
    "wikitext2": HubSet(path="Salesforce/wikitext", config="wikitext-2-raw-v1", streamed=False),
    # The 1100 rows are those of the GPTQ paper's code, which evaluates on the start of C4's validation split.
    "c4": HubSet(path="allenai/c4", config="en", evaluation_split="validation", evaluation_rows=1100),
    "pile": HubSet(path="NeelNanda/pile-10k", evaluation_split="train", streamed=False),
}


def find_hub_set(source: str) -> HubSet:
    """The data set that a shorthand, `organisation/name` or `organisation/name:configuration` stands for.

    Raises:
        DatasetUnavailableError: The string cannot be the id of a data set.
    """
    if source in SHORTHANDS:
        return SHORTHANDS[source]
    match = _ID.fullmatch(source)
    if match is None:
        raise DatasetUnavailableError(
            f"{source[:80]!r} is no existing file or folder, and cannot be a data set of the Hub "
            f"(organisation/name, or organisation/name:configuration) or one of {', '.join(SHORTHANDS)}; "
            "to calibrate on text itself, give a list of strings"
        )
    return HubSet(path=match["path"], config=match["config"])


def open_hub_set(source: str, *, column: str | None, split: str | None, evaluation: bool) -> Rows:
    """The rows of a data set on the Hub; streamed ones are fetched as they are iterated over.

    An evaluation downloads the whole split, unless the set says how many rows are enough.

    Raises:
        DatasetUnavailableError: The set cannot be reached or does not exist.
        CalibrationError: The split or configuration does not exist, or the set consists of code.
    """
    import datasets  # here, because it takes seconds and only data sets need it

    hub_set = find_hub_set(source)
    split = split or (hub_set.evaluation_split if evaluation else hub_set.calibration_split)
    limit = hub_set.evaluation_rows if evaluation else None
    streamed = hub_set.streamed and (limit is not None or not evaluation)
    name = f"{source} ({split})"
    try:
        with _reachable(source):
            dataset = datasets.load_dataset(hub_set.path, hub_set.config, split=split, streaming=streamed)
    except ValueError as error:
        raise CalibrationError(
            f"the data set {source!r} cannot give split {split!r}: {error} "
            "(name a split with split, a configuration as organisation/name:configuration)"
        ) from error
    except RuntimeError as error:
        raise CalibrationError(
            f"the data set {source!r} cannot be read without executing code ({error}); "
            "gptqkit reads data files only: choose another set, or convert this one to .parquet or .jsonl"
        ) from error
    rows = itertools.islice(_read(dataset, column, name, source), limit)
    return Rows(name, rows, streamed=streamed and limit is None)


def is_dataset(source: object) -> bool:
    """Whether `source` is a `datasets.Dataset` or `datasets.IterableDataset`."""
    import datasets

    return isinstance(source, (datasets.Dataset, datasets.IterableDataset))


def open_dataset(dataset: Any, *, column: str | None) -> Rows:
    """The rows of a `datasets.Dataset` (read whole) or `datasets.IterableDataset` (read as far as needed)."""
    import datasets

    name = "the data set"
    return Rows(name, _read(dataset, column, name, name), streamed=isinstance(dataset, datasets.IterableDataset))


def _read(dataset: Any, column: str | None, name: str, source: str) -> Iterator[Row]:
    import datasets

    with _reachable(source):
        if isinstance(dataset, datasets.Dataset) and dataset.num_rows:  # leaves other, costly columns alone
            dataset = dataset.select_columns([find_column(dataset[0], column, name)])
        for number, value in enumerate(column_values(dataset, column, name)):
            yield to_row(value, name, number)


@contextmanager
def _reachable(source: str) -> Iterator[None]:
    """Turn what the network and `datasets` raise inside into a DatasetUnavailableError."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, DatasetsError) as error:
        raise DatasetUnavailableError(
            f"the data set {source!r} could not be fetched: {error} "
            "(check its name, the network and the rights to it, or give a local file instead)"
        ) from error
