"""Every setting of a quantization, in one frozen dataclass, checked once."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..errors import ConfigError
from ..export.formats import FORMATS
from ..export.recipes import TYPES, grid_settings
from ..settings import check_positive, check_types, settings_of
from .methods import METHODS

BITS = (2, 3, 4, 8)
GRIDS = ("minmax", "mse", "sim")
_GPTQ: Mapping[str, Any] = {"method": "gptq", "grid": "mse", "refine_rounds": 2}
_LOAQ: Mapping[str, Any] = {"method": "loaq", "grid": "sim", "refine_rounds": 2, "two_sided": True}
QUALITIES: Mapping[str, Mapping[str, Any]] = {
    "fast": {**_GPTQ, "two_sided": False, "learn_iterations": 0, "tune_epochs": 0},
    "balanced": {**_LOAQ, "learn_iterations": 0, "tune_epochs": 0},
    "best": {**_LOAQ, "learn_iterations": 40, "tune_epochs": 4},
}
"""What a quality stands for, where a setting is not given by itself."""

_WITHOUT_MOMENTS: Mapping[str, Any] = {"grid": "minmax", "refine_rounds": 0, "two_sided": False}

_BY_QUALITY: Any = None
_BY_METHOD: Any = None
_BY_TOKENS: Any = None


_compiled = cache(re.compile)  # whose own cache holds 512, and there may be an override for every Linear


@dataclass(frozen=True, kw_only=True)
class ModuleOverride:
    """What one regular expression changes for the modules it matches; None keeps the common setting.

    Attributes:
        bits: 2, 3, 4 or 8.
        group_size: Input columns per group; -1 for one group per row.
        type: Block type of a GGUF file, such as "q6_k".
        skip: Leave the module in floating point.
    """

    bits: int | None = None
    group_size: int | None = None
    type: str | None = None
    skip: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        if self.skip and (self.bits is not None or self.group_size is not None or self.type is not None):
            raise ConfigError("an override either skips a module or changes its bits, group_size or type, not both")
        if self.type is not None:
            grid_settings(self.type)
        _check_grid(self.bits, self.group_size)


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Every setting of a quantization.

    Every field but `overrides` is an option of the command line, whose help is the text below. A `group_size` of -1 is
    kept as None.

    Attributes:
        bits: Bits per weight.
        group_size: Input columns that share a scale and a zero point; -1 for one group per row.
        target_bits: Bits per weight on average, such as 3.25, scales and zero points included, but not the g_idx that
            files of gptq carry beside them. The parts of every block get 2, 3, 4 or 8 bits, in groups of `group_size`
            or halves of it down to 32, or stay in floating point, so that most is spent where it matters most. Modules
            that have an override keep it.
        target_size: The most that all tensors of the checkpoint may take, in bytes or such as "4GB"; bits are chosen as
            with `target_bits`, which it replaces.
        sym: Symmetric grids: the zero point is fixed at 2^(bits-1), and scales may be negative. Asymmetric
            ones choose a zero point for every group.
        quality: "fast" solves every layer with gptq and refines it; "balanced" takes loaq, simulated grids and
            `two_sided`; "best" also learns the rounding of every block in 40 steps, and tunes the scales of the whole
            model. Each sets `method`, `grid`, `refine_rounds`, `two_sided`, `learn_iterations` and `tune_epochs`, where
            not given. By default "balanced", or "fast" where a method is given.
        method: "rtn" rounds to nearest; "gptq" moves each column's error onto later columns (arXiv 2210.17323);
            "gptaq" also corrects for the errors of earlier layers (arXiv 2504.02692), column by column; "qep" does that
            before the sweep, in all columns (arXiv 2504.09629); "loaq" also makes up for the errors of what outputs are
            added to (arXiv 2509.06297).
        desc_act: Quantize columns in order of decreasing diag(H), H being the Hessian. Groups follow that order, so the
            checkpoint needs g_idx, unless `static_groups` is on. "rtn" rounds every column by itself, in any order.
        static_groups: Fix all grids before the sweep, for groups in the original order; g_idx is not needed then.
        act_group_aware: Sort columns by diag(H) within their groups, and the groups as well; g_idx is not needed. On by
            default, unless `desc_act` is on.
        damp_percent: Damping added to the Hessian's diagonal, as a fraction of its mean; raised tenfold, and reported,
            where the Hessian is singular. By default 0.01, and sqrt(columns / tokens) of every entry of the diagonal
            besides: the fewer tokens, the less what they have in common says about other text.
        grid: How each group's grid is chosen: "minmax" spans minimum to maximum; "mse" searches for the least error of
            the weights, weighted by diag(H); "sim" then tries the sweep itself on grids nearby, but for static groups,
            K-quants and "rtn", which has none. With "rtn" the default is "minmax".
        alpha: Strength of the correction for earlier layers, from 0 to 1; by default 0.25 for gptaq, 0.5 for qep and
            loaq. Not for methods without it.
        refine_rounds: How often, after the sweep, every group's scale and then its codes are decided again, all others
            being known (arXiv 2309.01885); 0 for not at all.
        two_sided: Weigh errors of a layer's outputs with one another, by what they change of the float model's
            predictions, and move those of some rows onto others, too (arXiv 2505.22988); learned rounding weighs those
            of a block's output by it. Encoders, and what no gradient reaches, are solved without. Takes two
            to three times as long, and gradients of 32 samples behind all blocks are kept.
        learn_iterations: Steps of learned rounding after a block is solved: its codes and scales are moved until its
            output comes nearest to the float model's (arXiv 2309.05516, from the method's own solution); 0 for none.
        tune_epochs: How often the samples are gone through to tune all scales of the finished model on the divergence
            of its predictions from the float model's, both in memory as a whole; 0 for not at all.
        true_sequential: Calibrate each layer on the outputs of the layers already quantized in the same block.
        block_size: Columns per lazy update of the sweep; affects only the speed.
        float64: Factorize and sweep in double precision.
        skip_nonfinite: Leave out, and count, calibration samples with NaN or infinity in their activations, instead of
            stopping.
        lm_head: Quantize the output layer too, which must not be tied to the embedding.
        overrides: Settings for single modules by regular expression, matched with `re.search` against the module's full
            name; the first match counts. Each is a `ModuleOverride` or a dictionary of its fields.
        format: Checkpoint format; "gptq" is version 1, which has no zero point 0. "awq" and "marlin" hold 4 bits, and
            no act-order without `static_groups`.
        type: Of the format "gguf", which it chooses: the recipe, tensor by tensor as in llama.cpp, where Q4_K_M is
            usual, or one block type for all Linears, such as q4_k. It decides `bits`, `group_size` and `sym`.

    Raises:
        ConfigError: A value or a combination that cannot be.

    >>> QuantizeConfig(bits=3, group_size=64, sym=False).act_group_aware
    True
    >>> QuantizeConfig(bits=5)
    Traceback (most recent call last):
        ...
    gptqkit.errors.ConfigError: bits is 5; choose 2, 3, 4 or 8
    """

    bits: int = field(default=4, metadata={"choices": BITS})
    group_size: int | None = 128
    target_bits: float | None = None
    target_size: int | str | None = field(default=None, metadata={"size": True})
    sym: bool = field(default=True, metadata={"off": "asym"})
    quality: str = field(default=_BY_METHOD, metadata={"choices": QUALITIES})
    method: str = field(default=_BY_QUALITY, metadata={"choices": METHODS})
    desc_act: bool = False
    static_groups: bool = False
    act_group_aware: bool | None = None
    damp_percent: float = _BY_TOKENS
    grid: str = field(default=_BY_QUALITY, metadata={"choices": GRIDS})
    alpha: float = _BY_METHOD
    refine_rounds: int = _BY_QUALITY
    two_sided: bool = _BY_QUALITY
    learn_iterations: int = _BY_QUALITY
    tune_epochs: int = _BY_QUALITY
    true_sequential: bool = True
    block_size: int = 128
    float64: bool = False
    skip_nonfinite: bool = False
    lm_head: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    format: str = field(default="gptq_v2", metadata={"choices": FORMATS})
    type: str | None = field(default=None, metadata={"choices": TYPES})

    def __post_init__(self) -> None:
        check_types(self)
        if self.type is not None:
            self._take_type(self.type)
        _check_grid(self.bits if self.type is None else None, self.group_size)
        if self.group_size == -1:
            object.__setattr__(self, "group_size", None)
        if self.quality is None:
            object.__setattr__(self, "quality", "balanced" if self.method is None else "fast")
        for name, value in QUALITIES[self.quality].items():
            if getattr(self, name) is None:
                if self.method == "rtn" and name in _WITHOUT_MOMENTS:
                    value = _WITHOUT_MOMENTS[name]
                elif name == "tune_epochs" and self.type is not None:  # scales of two levels cannot move freely
                    value = 0
                object.__setattr__(self, name, value)
        if self.desc_act and self.act_group_aware:
            raise ConfigError("desc_act and act_group_aware are two orders of the same columns; choose one")
        if self.act_group_aware is None:
            object.__setattr__(self, "act_group_aware", not self.desc_act)
        if self.damp_percent is not None and not 0 < self.damp_percent < 1:
            raise ConfigError(f"damp_percent is {self.damp_percent}; it must lie between 0 and 1 (0.01 is usual)")
        if self.method in ("rtn", "gptq"):
            if self.alpha is not None:
                raise ConfigError(f"alpha is {self.alpha}, but {self.method} has no correction; leave it out (None)")
        elif self.alpha is None:
            object.__setattr__(self, "alpha", 0.25 if self.method == "gptaq" else 0.5)
        elif not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha is {self.alpha}; it must lie between 0 and 1 (0.25 is published)")
        for name, usual in {"refine_rounds": 2, "learn_iterations": 40, "tune_epochs": 4}.items():
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 for none, or such as {usual}")
        if self.refine_rounds and self.method == "rtn":
            raise ConfigError("refine_rounds needs the Hessian, which rtn does without; leave it out, or choose gptq")
        if self.two_sided and self.method == "rtn":
            raise ConfigError("two_sided moves errors onto other rows, as rtn does not; leave it out, or choose gptq")
        self._check_choice()
        if self.tune_epochs and self.type is not None:
            raise ConfigError(f"tune_epochs is {self.tune_epochs}, but scales of GGUF's blocks are not tuned; give 0")
        check_positive(self, "block_size")
        if not isinstance(self.overrides, Mapping):
            raise ConfigError(f"overrides is {self.overrides!r}; give a dictionary of settings by pattern")
        overrides = {pattern: _override(pattern, override) for pattern, override in self.overrides.items()}
        object.__setattr__(self, "overrides", overrides)
        for pattern, override in overrides.items():
            if self.type is not None and (override.bits, override.group_size) != (None, None):
                raise ConfigError(f"override {pattern!r} gives bits or groups, which GGUF's types decide; give a type")
            try:
                _compiled(pattern)
            except (re.error, TypeError) as error:
                raise ConfigError(f"override pattern {pattern!r} is not a regular expression: {error}") from error

    def _check_choice(self) -> None:
        if self.target_bits is not None and not 2 < self.target_bits < 16:
            raise ConfigError(
                f"target_bits is {self.target_bits:g}; give more than 2 and less than 16 bits per weight, such as 3.25"
            )
        choices = [name for name in ("target_bits", "target_size") if getattr(self, name) is not None]
        if choices and self.type is not None:
            raise ConfigError(f"{choices[0]} and gguf's types both choose bits; leave one out")
        if len(choices) > 1:
            raise ConfigError("target_bits and target_size both choose bits; leave one out")

    @property
    def chooses_bits(self) -> bool:
        """Whether bits are chosen by what they do."""
        return self.target_bits is not None or self.target_size is not None

    def plain_rounding(self) -> QuantizeConfig:
        """Return the same grids without search or solver: what every method is compared with."""
        plain: dict[str, Any] = {"method": "rtn", "grid": "minmax", "alpha": None}
        return dataclasses.replace(self, **plain, refine_rounds=0, two_sided=False, learn_iterations=0)

    def for_module(self, name: str) -> QuantizeConfig | None:
        """Return the settings for the module called `name`, or None where it stays in floating point."""
        override = self.override_of(name)
        if override is None or override.skip:
            return None if override else self
        if override.type is not None:
            return self.with_type(override.type)
        own = copy.copy(self)  # `replace` would check all overrides again, of which there may be thousands
        if override.bits is not None:
            object.__setattr__(own, "bits", override.bits)
        if override.group_size is not None:
            object.__setattr__(own, "group_size", None if override.group_size == -1 else override.group_size)
        return own

    def override_of(self, name: str) -> ModuleOverride | None:
        """Return the first override whose pattern matches the module called `name`; None where there is none."""
        return next((override for pattern, override in self.overrides.items() if _compiled(pattern).search(name)), None)

    def with_type(self, name: str) -> QuantizeConfig:
        """Return the same settings for another type of block."""
        return dataclasses.replace(self, type=name, **grid_settings(name))

    def _take_type(self, name: str) -> None:
        """Let the type decide the format and the grid; refuse settings that say something else."""
        if self.desc_act and not self.static_groups and self.method != "rtn":
            raise ConfigError("GGUF has no index of groups; set static_groups beside desc_act, or leave desc_act out")
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        check_given(name, {key: value for key, value in vars(self).items() if value != usual[key]})
        for key, value in {"format": "gguf", **grid_settings(name)}.items():
            object.__setattr__(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizeConfig:
        """Return the configuration that `to_dict` wrote.

        Raises:
            ConfigError: A key that is no setting, or a bad value.
        """
        return settings_of(cls, values)


def check_given(kind: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError where settings that were given are not what a type of GGUF makes them."""
    for key, value in {"format": "gguf", **grid_settings(kind)}.items():
        if given.get(key, value) != value:
            raise ConfigError(f"{key} is {given[key]}, but the type {kind} makes it {value}; leave it out")


def _override(pattern: Any, given: Any) -> ModuleOverride:
    if not isinstance(given, (ModuleOverride, Mapping)):
        raise ConfigError(
            f"override {pattern!r} is {given!r}; give {{'skip': True}} to leave such modules in floating point, or "
            "other settings, such as {'bits': 8}"
        )
    return settings_of(ModuleOverride, given)


def _check_grid(bits: int | None, group_size: int | None) -> None:
    if bits is not None and bits not in BITS:
        raise ConfigError(f"bits is {bits}; choose 2, 3, 4 or 8")
    if group_size is not None and group_size != -1 and group_size < 1:
        raise ConfigError(f"group_size is {group_size}; give a positive number, or -1 for one group per row")
