"""Options of the command line, made from the dataclasses that hold the settings: types, defaults and docstrings."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from .calibration.config import Calibration
from .errors import ConfigError
from .hub import at_home
from .quantizer.config import ModuleOverride, QuantizeConfig, check_given
from .run import Run
from .settings import check_seed, did_you_mean
from .units import parse_size, size_text

T = TypeVar("T")

OVERRIDE = (
    "other settings for modules whose full name matches the regular expression; may be repeated, and the first "
    "--override or --skip that matches counts"
)


class Parser(argparse.ArgumentParser):
    """A parser whose usage errors take two lines and name what may have been meant."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here, where the command's own are known."""
        self._given = sys.argv[1:] if args is None else args
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Print two lines, not the whole usage, and exit with 2."""
        options = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        wrong = [option for option in options if option not in self._option_string_actions]
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice:
            message += did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2]))
        elif wrong and self._subparsers is None:
            message += did_you_mean(wrong[0], self._option_string_actions)
        self.exit(2, f"{self.prog}: usage error: {' '.join(message.split())}\nTry '{self.prog} --help'.\n")


class Once(argparse.Action):
    """Stores a value; a second one is a usage error, where the first would be lost in silence."""

    def __call__(self, _: Any, namespace: Any, values: Any, *__: Any) -> None:
        """Store the value, or refuse it."""
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "is given twice; give one text, and run the command once for each")
        setattr(namespace, self.dest, values)


def refuse(arguments: argparse.Namespace, why: str) -> NoReturn:
    """Exit as from a usage error of the command that was typed."""
    Parser(prog=f"gptqkit {arguments.command}").error(why)


def add_settings(command: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add what `quantize` and `plan` share, but for some fields of `Run`."""
    grid = command.add_argument_group("quantization")
    add_fields(grid, QuantizeConfig)
    add: dict[str, Any] = {"action": "append", "default": [], "dest": "overrides"}
    grid.add_argument("--override", type=_override, metavar="REGEX:bits=8,group_size=32", help=OVERRIDE, **add)
    grid.add_argument("--skip", type=_skip, metavar="REGEX", help="leave such modules in floating point", **add)
    add_fields(command.add_argument_group("calibration"), Calibration)
    add_fields(command.add_argument_group("run"), Run, without)


def add_fields(group: argparse._ActionsContainer, kind: type, without: Collection[str] = ()) -> None:
    """Add an option for every other plain field of a dataclass; what is not given is left to the dataclass."""
    texts = _attribute_texts(kind)
    for field in dataclasses.fields(kind):
        base = str(field.type).partition(" | ")[0]
        if base not in ("bool", "int", "float", "str") or field.name in without:
            continue
        option, shown = field.name.replace("_", "-"), cast(Any, field.default)
        how: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        opposite = None if base != "bool" or shown is False else field.metadata.get("off", f"no-{option}")
        if base == "bool":
            how["action"], shown = "store_true", "on" if shown else None
        elif "size" in field.metadata:
            how |= {"type": size, "metavar": "SIZE"}
            shown = None if shown is None else size_text(shown).replace(".00 ", "")
        else:
            how["type"], how["metavar"] = {"int": (int, "N"), "float": (float, "X"), "str": (str, "NAME")}[base]
            if "choices" in field.metadata:
                how |= {"choices": list(field.metadata["choices"]), "metavar": None}
        text = texts[field.name] + (f" (default: {shown})" if shown is not None else "")
        place = group.add_mutually_exclusive_group() if opposite else group
        place.add_argument(f"--{option}", help=text.replace("%", "%%"), **how)
        if opposite:
            how |= {"action": "store_false", "help": f"the opposite of --{option}"}
            place.add_argument(f"--{opposite}", **how)


def _attribute_texts(kind: type) -> dict[str, str]:
    """Return what the docstring of a dataclass says of each of its attributes, as help texts."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    text = re.sub(r"`(\w+)`", lambda name: "--" + name[1].replace("_", "-"), text)
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", text, re.MULTILINE)
    return {name: words[0].lower() + " ".join(words[1:].split()).rstrip(".") for name, words in found}


def from_options(arguments: argparse.Namespace, kind: type[T], **more: Any) -> T:
    """Return the dataclass that the options given stand for; what cannot be is a usage error."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    try:
        if "type" in given:  # the dataclass cannot tell a default from the same value given
            check_given(given["type"], given)
        elif given.get("format") == "gguf":
            raise ConfigError("--format gguf needs --type, such as Q4_K_M")
        return kind(**{**given, **more})
    except ConfigError as error:
        refuse(arguments, str(error))


def config_from_options(arguments: argparse.Namespace) -> QuantizeConfig:
    """Return the settings of quantization that the options stand for; a pattern given twice is a usage error."""
    overrides: dict[str, ModuleOverride] = {}
    for pattern, override in arguments.overrides:
        if overrides.setdefault(pattern, override) != override:
            refuse(arguments, f"{pattern!r} has two overrides; give one of them")
    return from_options(arguments, QuantizeConfig, overrides=overrides)


def name(text: str) -> str:
    """Return a name, which is not empty, of something here or on the Hub."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; a shell makes that of a variable that is not set")
    return text


def path(text: str) -> Path:
    """Return the file or folder of that name, also where the shell left a ~ in it, as in --out=~/OUT."""
    return Path(at_home(name(text)))


def new_file(text: str) -> Path:
    """Return a file that can be written: no folder, and in one that exists."""
    file = path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{file} cannot be written; give a file, in a folder that exists")
    return file


def picture(text: str) -> Path:
    """Return a file that can be written and is called what it will be, an SVG."""
    if not text.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an SVG, which is what is drawn; end it in .svg")
    return new_file(text)


def positive(text: str) -> int:
    """Return a whole number above 0."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def seed(text: str) -> int:
    """Return what generators of random numbers take as a seed."""
    try:
        check_seed(number := int(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return number


def size(text: str) -> int:
    """Return the bytes that a size stands for."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _override(text: str) -> tuple[str, ModuleOverride]:
    """Return the pattern and the changes of `REGEX:bits=8,group_size=32`.

    >>> _override("down_proj$:bits=8,group_size=32")
    ('down_proj$', ModuleOverride(bits=8, group_size=32, type=None, skip=False))
    """
    pattern, colon, changes = text.rpartition(":")
    change: dict[str, Any] = {}
    for item in changes.split(","):
        key, _, value = item.strip().partition("=")
        number = key in ("bits", "group_size") and re.fullmatch(r"-?\d+", value)
        if not colon or not (number or key == "type"):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not of the form 'REGEX:bits=8,group_size=32' or, for GGUF, 'REGEX:type=q6_k'"
            )
        change[key] = int(value) if number else value
    try:
        return pattern, ModuleOverride(**change)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _skip(text: str) -> tuple[str, ModuleOverride]:
    return text, ModuleOverride(skip=True)
