"""The checkpoint formats: what each can hold, and the functions that write and read it.

A new format is one file of this folder, with a `Format`, and one entry of `FORMATS`. Nothing here imports torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import regex

from ..errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from ..quantizer.grid import Snap
    from ..quantizer.quantized import QuantizedWeight

FORMATS = {
    "gptq": "export.gptq:V1",
    "gptq_v2": "export.gptq:V2",
    "awq": "export.awq:FORMAT",
    "marlin": "export.marlin:FORMAT",
    "compressed-tensors": "export.compressed:FORMAT",
    "gguf": "export.gguf:GGUF",
}
"""Every format by name, with the place of its `Format` in this package."""

READERS = ("gptqkit", "GPTQModel", "transformers", "vLLM", "SGLang", "AutoGPTQ", "llama.cpp")
"""The programs of which it is known what they load; `readers.py` says what."""

_PLACES = ("quantization_config", "compression_config")  # the second in files of llm-compressor before 0.3
_UNNAMED = {  # configs that name no method, by what is in them
    "load_in_8bit": "bitsandbytes",
    "load_in_4bit": "bitsandbytes",
    "producer": "modelopt",
    "quantization_config": "sparseml",
}

MATCHING_SECONDS = 5.0
"""What matching the names of a checkpoint with its own patterns may take."""


_LITERAL = re.compile(r"\^?((?:[\w-]|\\\W)+)\$")
"""Patterns that match one name alone, whose characters are escaped."""

_Rule: TypeAlias = "tuple[int, Mapping[str, Any]]"
"""The place of a rule among all, and what it says."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a checkpoint's quantization config declares.

    Attributes:
        format: One of `FORMATS`.
        bits: Bits per code, unless `dynamic` says otherwise for a module.
        group_size: Columns per group; None for one group per row.
        sym: Symmetric.
        desc_act: Act-order; the tensors decide.
        static_groups: Groups follow the original order even so.
        writer: The program that wrote it, where it says so.
        dynamic: Settings of single modules by regular expression on the full name, as GPTQModel writes them: "-:" at
            its beginning stands for modules in floating point.
    """

    format: str
    bits: int
    group_size: int | None
    sym: bool
    desc_act: bool
    static_groups: bool = False
    writer: str | None = None
    dynamic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _spent: list[float] = field(default_factory=lambda: [0.0], repr=False, compare=False)

    def for_module(self, name: str) -> tuple[int, int | None, bool]:
        """Return bits, group_size and sym of the module `name`: the first pattern that matches counts.

        CheckpointError for a pattern with which that takes too long.
        """
        _, values = self._first(name, floats=False)
        size = values.get("group_size") or self.group_size
        return values.get("bits") or self.bits, None if size == -1 else size, bool(values.get("sym", self.sym))

    def for_fused(self, name: str) -> tuple[int, int | None, bool] | None:
        """Return what vLLM finds under the name of a module that it makes of several; None is floating point."""
        in_float, quantized = (self._first(name, floats=floats)[0] for floats in (True, False))
        return None if in_float < quantized else self.for_module(name)

    def needs_index(self, name: str) -> bool:
        """Return whether groups of the module `name` follow an order that a tensor must tell; errors as above."""
        _, values = self._first(name, floats=False)
        return bool(values.get("desc_act", self.desc_act)) and not self.static_groups

    def _first(self, name: str, *, floats: bool) -> _Rule:
        """Return the first rule of one kind that holds for a module; else one after all others, which says nothing."""
        names, patterns = self._rules[floats]
        own = names.get(name, (len(self.dynamic), {}))
        return next(((at, each) for at, pattern, each in patterns if at < own[0] and self._matches(pattern, name)), own)

    @cached_property
    def _rules(self) -> dict[bool, tuple[dict[str, _Rule], list[tuple[int, Any, Mapping[str, Any]]]]]:
        """The rules of quantized modules, and of those in floating point (True): by full names, and by patterns.

        There can be thousands of names.
        """
        rules = {floats: (dict[str, _Rule](), list[tuple[int, Any, Mapping[str, Any]]]()) for floats in (False, True)}
        for at, (key, values) in enumerate(self.dynamic.items()):
            (names, patterns), pattern = rules[key.startswith("-:")], key.removeprefix("-:").removeprefix("+:")
            if literal := _LITERAL.fullmatch(pattern):
                names.setdefault(re.sub(r"\\(.)", r"\1", literal[1]), (at, values))
            else:
                patterns.append((at, regex.compile(pattern), values))
        return rules

    def _matches(self, pattern: Any, name: str) -> bool:
        """Whether the name begins with what a pattern of unknown origin matches; all have `MATCHING_SECONDS` together.

        Patterns can take exponential time, and Python's own `re` has no limit.
        """
        begin = time.monotonic()
        try:
            return pattern.match(name, timeout=max(1e-3, MATCHING_SECONDS - sum(self._spent))) is not None
        except TimeoutError as error:
            raise CheckpointError(
                f"the config's pattern {pattern.pattern!r} takes more than {MATCHING_SECONDS} seconds to match; make "
                "it simpler"
            ) from error
        finally:
            self._spent[0] += time.monotonic() - begin


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What is known of a quantized layer without reading its weights.

    Attributes:
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        bits: Bits per code.
        group_size: Columns per group (all columns where a group is a whole row).
        sym: Declared symmetric.
        act_order: Whether the group of column k is not simply k // group_size.
        type: Block type, in GGUF.
    """

    in_features: int
    out_features: int
    bits: int
    group_size: int
    sym: bool
    act_order: bool
    type: str | None = field(default=None, compare=False)

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.in_features // self.group_size)

    @property
    def declared_group(self) -> int:
        """Columns per group as files declare them: -1 for whole rows."""
        return -1 if self.group_size == self.in_features else self.group_size

    def has(self, bits: int, group_size: int | None) -> bool:
        """Whether it is what these settings make of its shape; None is one group per row."""
        return (self.bits, self.group_size) == (bits, group_size or self.in_features)

    @classmethod
    def of(cls, weight: QuantizedWeight) -> LayerSpec:
        """Return that of a weight that is about to be written."""
        return cls(
            in_features=weight.in_features,
            out_features=weight.out_features,
            bits=weight.bits,
            group_size=weight.group_size,
            sym=weight.sym,
            act_order=not weight.trivial_group_index,
        )


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one format holds quantized weights.

    Attributes:
        suffixes: The tensors of a layer, below its name.
        snap: The nearest scale and offset that it can hold, on which the solver builds its grids.
        check: Raises, before any work, for what it cannot hold: ShapeError for the shape, ConfigError for the settings.
        nbytes: Bytes of all tensors of a layer but its bias.
        pack: A weight -> its tensors by suffix, exactly; ConversionError or ShapeError where it cannot hold it.
        spec: (name, tensors, declared) -> what they are, from shapes and dtypes; CheckpointError where they contradict.
        unpack: (name, tensors, spec) -> the weight, exactly; CheckpointError for values that no reader could use.
        write_config: (QuantizeConfig, layers, names of float matrices) -> the quantization config of a checkpoint.
        read_config: (quantization config, its file for messages) -> what it declares; CheckpointError.
        uniform: Whether its configs know one setting of bits and group size for all modules.
        snaps: By type of the settings, where the format has types; then `snap` is not used.
        choose: (settings of a module, its name, its columns, model's config) -> settings with the type of that module;
            ArchitectureError for models that it cannot hold.
        accept: (model's config, tokenizer, names of all tensors): raises GptqkitError, before any work, for what it
            cannot hold.
        finish: Makes another kind of file of the safetensors files in a directory that is complete otherwise.
        float_nbytes: (name, tensor, type, tied) -> what a tensor of no quantized layer takes, where it is not stored as
            it is; `tied` says that the embedding is the output layer, too.
    """

    suffixes: Sequence[str]
    snap: Snap
    nbytes: Callable[[LayerSpec], int]
    pack: Callable[[QuantizedWeight], dict[str, Tensor]]
    spec: Callable[[str, Mapping[str, Tensor], Declared], LayerSpec]
    unpack: Callable[[str, Mapping[str, Tensor], LayerSpec], QuantizedWeight]
    write_config: Callable[[Any, Mapping[str, LayerSpec], Sequence[str]], dict[str, Any]]
    read_config: Callable[[Mapping[str, Any], str], Declared]
    check: Callable[[LayerSpec], None] = lambda _: None
    uniform: bool = False
    snaps: Mapping[str, Snap] = field(default_factory=dict)
    choose: Callable[[Any, str, int, Mapping[str, Any]], Any] | None = None
    accept: Callable[[Mapping[str, Any], Any, Iterable[str]], None] = lambda *_: None
    finish: Callable[[Path], None] | None = None
    float_nbytes: Callable[[str, Tensor, str | None, bool], int] | None = None


def find_snap(config: Any) -> Snap:
    """Return what the grids of a module with these settings, a QuantizeConfig, can be in a file."""
    layout = find_format(config.format)
    return layout.snap if config.type is None else layout.snaps[config.type]


def find_format(name: str) -> Format:
    """Return the format called `name`, one of `FORMATS`."""
    return _format(FORMATS[name])


@cache
def _format(place: str) -> Format:
    return cast(Format, resolve_name(f"gptqkit.{place}"))


def find_quantization(model_config: Mapping[str, Any]) -> Any:
    """Return the quantization config that stands in a config.json, for the whole model or for its text; None if none.

    MLX's own, which names no method, is given its name.
    """
    text = model_config.get("text_config")
    parts = (model_config, text) if isinstance(text, dict) else (model_config,)
    found = next((part[key] for part in parts for key in _PLACES if part.get(key) is not None), None)
    mlx = model_config.get("quantization")
    if isinstance(mlx, dict) and "quant_method" not in {**mlx, **(found if isinstance(found, dict) else {})}:
        return {**mlx, "quant_method": "mlx"}
    return found


def without_quantization(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without what `find_quantization` finds in it."""
    plain = {key: value for key, value in model_config.items() if key not in _PLACES}
    text = plain.get("text_config")
    return {**plain, "text_config": without_quantization(text)} if isinstance(text, dict) else plain


def declared_format(values: Mapping[str, Any], where: str) -> str:
    """Return the format that a quantization config declares, whoever wrote it; CheckpointError for an unknown one.

    `where` is its file, for messages.
    """
    unnamed = next((name for key, name in _UNNAMED.items() if key in values), "gptq")
    method = values.get("quant_method", values.get("method", unnamed))
    if method == "gptq":
        # checkpoint_format overrides format, as in transformers; both are young, and files without them are version 1.
        layout = values.get("checkpoint_format") or values.get("format") or "gptq"
        name = "marlin" if values.get("is_marlin_format") else str(layout)
    else:
        layout = str(values.get("version" if "version" in values and method == "awq" else "format") or "").lower()
        plain = {"awq": ("gemm", ""), "compressed-tensors": ("pack-quantized",)}.get(str(method), (layout,))
        name = str(method) if layout in plain else f"{method}, {layout}"
    if name not in FORMATS:
        raise CheckpointError(
            f"{where}: the checkpoint format is {name!r}; {', '.join(FORMATS)} are read here. Save it again in one of "
            "these with the program that wrote it, or quantize the model that it was made from"
        )
    return name
