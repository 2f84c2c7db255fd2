"""Settings from plain dictionaries, and what a misspelt name may have meant."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, TypeVar

from .errors import ConfigError
from .units import parse_size

T = TypeVar("T")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question, to be put at the end of a message, or nothing where no name is alike.

    >>> did_you_mean("wikitext-2", ("wikitext2", "c4"))
    '; did you mean wikitext2?'
    """
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def check_types(record: Any) -> None:
    """Raise ConfigError where a field that takes True and False, whole numbers or one of some names has another."""
    for each in dataclasses.fields(record):
        kind, value = str(each.type).removesuffix(" | None"), getattr(record, each.name)
        if value is None and (each.default is None or kind != str(each.type)):
            continue
        names = [*each.metadata.get("choices", ())] if kind == "str" else []
        if names and value not in names:
            raise ConfigError(f"{each.name} is {value!r}; choose one of {', '.join(names)}")
        if kind not in ("bool", "int"):
            continue
        if not isinstance(value, bool if kind == "bool" else Integral) or isinstance(value, bool) != (kind == "bool"):
            wanted = "True or False" if kind == "bool" else "a whole number"
            raise ConfigError(f"{each.name} is {value!r}; give {wanted}")


def check_positive(record: Any, *names: str) -> None:
    """Raise ConfigError where one of these fields is less than 1; None stands for no number."""
    for name in names:
        value = getattr(record, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be positive")


def bytes_of(name: str, size: int | str) -> int:
    """Return the bytes of a number or of a text such as "500MB" or "1GiB".

    >>> bytes_of("memory", "8GiB")
    8589934592

    Raises:
        ConfigError: `name` is no such thing, or not positive.
    """
    try:
        found = parse_size(size) if isinstance(size, str) else size
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if isinstance(found, bool) or not isinstance(found, Integral) or found < 1:
        raise ConfigError(f"{name} is {size!r}; give bytes, or a text such as 8GiB")
    return int(found)


def settings_of(kind: type[T], values: T | Mapping[str, Any]) -> T:
    """Return the dataclass of settings `kind` as it is, or made of a dictionary of its fields.

    Raises:
        ConfigError: A name that is no setting, or a value that cannot be.
    """
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(f"{values!r} is no {kind.__name__}; give one, or a dictionary of its fields")
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in values:
        if name not in names:
            raise ConfigError(f"{name!r} is no setting of {kind.__name__}{did_you_mean(str(name), names)}")
    try:
        return kind(**values)
    except TypeError as error:  # a value of another type than its check compares with
        raise ConfigError(f"these are no settings of {kind.__name__}: {error}") from error
