"""Settings from plain dictionaries, and what a misspelt name may have meant."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from .errors import ConfigError
from .units import parse_size

T = TypeVar("T")


class Plain:
    """A dataclass of plain values."""

    def to_dict(self: Any) -> dict[str, Any]:
        """Return plain values for JSON."""
        return dataclasses.asdict(self)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question, to be put at the end of a message, or nothing where no name is alike.

    >>> did_you_mean("wikitext-2", ("wikitext2", "c4"))
    '; did you mean wikitext2?'
    >>> did_you_mean("q4_k_m", ("q4_k", "Q4_K_M"))
    '; did you mean Q4_K_M?'
    >>> did_you_mean("vlm", ("transformers", "vLLM"))
    '; did you mean vLLM?'
    """
    by_case = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_case, n=1)
    return f"; did you mean {by_case[found[0]]}?" if found else ""


def one_of(names: Iterable[str], given: object) -> str:
    """Return what to choose from in place of what was given, for the end of a message.

    >>> one_of(("fast", "best"), "bset")
    'choose one of fast, best; did you mean best?'
    """
    known = [*names]
    return f"choose one of {', '.join(known)}{did_you_mean(str(given), known)}"


_TYPES: dict[str, tuple[str, type, Callable[[Any], Any]]] = {
    "bool": ("True or False", bool, bool),
    "int": ("a whole number", Integral, int),
    "float": ("a number", Real, float),
}
"""By the annotation of a field: what to give, what it is an instance of, what it becomes."""


def check_types(record: Any) -> None:
    """Raise ConfigError where a field that takes True and False, numbers, sizes or one of some names has another.

    Numbers of numpy become Python's, which JSON can hold, and texts such as "8GiB" bytes.
    """
    for each in dataclasses.fields(record):
        kind, value = str(each.type).partition(" | ")[0], getattr(record, each.name)
        if value is None and (each.default is None or "None" in str(each.type)):
            continue
        names = [*each.metadata.get("choices", ())] if kind == "str" else []
        if names and value not in names:
            raise ConfigError(f"{each.name} is {value!r}; {one_of(names, value)}")
        if "size" in each.metadata:
            object.__setattr__(record, each.name, bytes_of(each.name, value))
            continue
        if kind not in _TYPES:
            continue
        wanted, number, make = _TYPES[kind]
        if not isinstance(value, number) or isinstance(value, bool) != (kind == "bool"):
            raise ConfigError(f"{each.name} is {value!r}; give {wanted}")
        object.__setattr__(record, each.name, make(value))


def check_positive(record: Any, *names: str) -> None:
    """Raise ConfigError where one of these fields is less than 1; None stands for no number."""
    for name in names:
        value = getattr(record, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be positive")


def check_seed(seed: int) -> None:
    """Raise ConfigError where a seed is none that generators of random numbers take."""
    if not isinstance(seed, Integral) or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {seed!r}; it must lie between 0 and 2^63 - 1")


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
        raise ConfigError(f"{values!r} is not a {kind.__name__}; give one, or a dictionary of its fields")
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if "quant_method" in values:
        raise ConfigError(
            f"these are a checkpoint's settings, not those of {kind.__name__}: give bits, group_size, sym, desc_act "
            "and format by name, and what `dynamic` says as overrides"
        )
    for name in values:
        if name not in names:
            raise ConfigError(f"{name!r} is not a setting of {kind.__name__}{did_you_mean(str(name), names)}")
    try:
        return kind(**values)
    except TypeError as error:  # a value of another type than its check compares with
        raise ConfigError(f"these are not settings of {kind.__name__}: {error}") from error
