"""Every setting of a quantization, in one frozen dataclass, checked once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ConfigError

Method = Literal["rtn", "gptq", "gptaq"]
Format = Literal["gptq", "gptq_v2"]

METHODS: tuple[Method, ...] = ("rtn", "gptq", "gptaq")
FORMATS: tuple[Format, ...] = ("gptq", "gptq_v2")
BITS = (2, 3, 4, 8)


@dataclass(frozen=True, kw_only=True)
class ModuleOverride:
    """What one regular expression changes for the modules it matches; None keeps the common setting.

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: Input columns per group; -1 for one group per row.
        skip: Leave the module in floating point.
    """

    bits: int | None = None
    group_size: int | None = None
    skip: bool = False

    def __post_init__(self) -> None:
        if self.skip and (self.bits is not None or self.group_size is not None):
            raise ConfigError("an override either skips a module or changes its bits or group_size, not both")
        if self.bits is not None:
            _check_bits(self.bits)
        if self.group_size is not None:
            object.__setattr__(self, "group_size", _per_row_is_negative(self.group_size))


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Every setting of a quantization.

    Attributes:
        bits: Bits per weight: 2, 3, 4 or 8.
        group_size: Input columns that share one scale and zero; None (or -1) for one group per row.
        sym: Symmetric groups: the zero is always 2^(bits - 1).
        method: "rtn" rounds to nearest; "gptq" moves each column's error onto later columns (arXiv 2210.17323);
            "gptaq" also corrects for the error of the layers before (arXiv 2504.02692).
        desc_act: Take the columns in the order of falling diag(H). Groups follow that order (g_idx is not monotonic)
            unless `static_groups`.
        static_groups: Fix every group's grid on the original columns before the sweep, so that g_idx stays trivial.
        act_group_aware: Sort columns inside each group, and whole groups, by diag(H): g_idx stays trivial. By default
            on, unless `desc_act`.
        damp: Share of mean(diag H) added to the diagonal; escalated times 10, and reported, where H is singular.
        mse: Search each group's grid for the least squared error weighted by the Hessian's diagonal, instead of
            spanning minimum to maximum. By default on, except for "rtn".
        alpha: Strength of GPTAQ's correction.
        true_sequential: Inside a block, let later modules see the outputs of the quantized earlier ones.
        block_size: Columns per lazy update of the sweep; changes the speed only.
        float64: Factorise and sweep in double precision.
        skip_nonfinite: Leave calibration samples with non-finite activations out (reported) instead of stopping.
        lm_head: Quantize the output layer too.
        overrides: Per-module settings by regular expression, matched with `re.search` against the module's full name;
            the first match counts.
        format: Checkpoint format: "gptq" (v1, stores zero - 1, so zeros start at 1) or "gptq_v2" (stores the zero).

    Raises:
        ConfigError: A value or a combination that cannot be.

    >>> QuantizeConfig(bits=3, group_size=64, sym=False).act_group_aware
    True
    >>> QuantizeConfig(bits=5)
    Traceback (most recent call last):
        ...
    gptqkit.errors.ConfigError: bits is 5; choose 2, 3, 4 or 8
    """

    bits: int = 4
    group_size: int | None = 128
    sym: bool = True
    method: Method = "gptq"
    desc_act: bool = False
    static_groups: bool = False
    act_group_aware: bool | None = None
    damp: float = 0.01
    mse: bool | None = None
    alpha: float = 0.25
    true_sequential: bool = True
    block_size: int = 128
    float64: bool = False
    skip_nonfinite: bool = False
    lm_head: bool = False
    overrides: Mapping[str, ModuleOverride] = field(default_factory=dict)
    format: Format = "gptq_v2"

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        if self.group_size is not None:
            size = _per_row_is_negative(self.group_size)
            object.__setattr__(self, "group_size", None if size == -1 else size)
        if self.method not in METHODS:
            raise ConfigError(f"method is {self.method!r}; choose one of {', '.join(METHODS)}")
        if self.format not in FORMATS:
            raise ConfigError(f"format is {self.format!r}; choose one of {', '.join(FORMATS)}")
        if self.desc_act and self.act_group_aware:
            raise ConfigError("desc_act and act_group_aware are two orders of the same columns; choose one")
        if self.act_group_aware is None:
            object.__setattr__(self, "act_group_aware", not self.desc_act)
        if self.mse is None:
            object.__setattr__(self, "mse", self.method != "rtn")
        if not 0 < self.damp < 1:
            raise ConfigError(f"damp is {self.damp}; it must lie between 0 and 1 (0.01 is usual)")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha is {self.alpha}; it must lie between 0 and 1 (0.25 is published)")
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; it must be positive")
        for pattern, override in self.overrides.items():
            if not isinstance(override, ModuleOverride):
                raise ConfigError(f"the override of {pattern!r} is {override!r}; give a ModuleOverride")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"override pattern {pattern!r} is no regular expression: {error}") from error

    @property
    def min_zero(self) -> int:
        """The smallest zero that the checkpoint format can hold: v1 stores zero - 1, so 1."""
        return 1 if self.format == "gptq" else 0

    def plain_rounding(self) -> QuantizeConfig:
        """The same grids without search or solver: what every method is compared with."""
        return dataclasses.replace(self, method="rtn", mse=False)

    def for_module(self, name: str) -> QuantizeConfig | None:
        """The settings that hold for the module called `name`, or None where it stays in floating point."""
        for pattern, override in self.overrides.items():
            if re.search(pattern, name):
                if override.skip:
                    return None
                return dataclasses.replace(
                    self,
                    bits=self.bits if override.bits is None else override.bits,
                    group_size=self.group_size if override.group_size is None else override.group_size,
                )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizeConfig:
        """The configuration that `to_dict` wrote.

        Raises:
            ConfigError: A key that is no setting, or a bad value.
        """
        _check_keys(cls, values)
        overrides = values.get("overrides", {})
        for override in overrides.values():
            _check_keys(ModuleOverride, override)
        return cls(**{**values, "overrides": {key: ModuleOverride(**value) for key, value in overrides.items()}})


def _check_keys(kind: type[QuantizeConfig] | type[ModuleOverride], values: Mapping[str, Any]) -> None:
    unknown = set(values) - {f.name for f in dataclasses.fields(kind)}
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(sorted(unknown))}")


def _check_bits(bits: int) -> None:
    if type(bits) is not int or bits not in BITS:
        raise ConfigError(f"bits is {bits}; choose 2, 3, 4 or 8")


def _per_row_is_negative(group_size: int) -> int:
    if type(group_size) is int and (group_size == -1 or group_size > 0):
        return group_size
    raise ConfigError(f"group_size is {group_size!r}; give a positive number, or -1 for one group per row")
