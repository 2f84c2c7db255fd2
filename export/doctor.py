"""Known damage of GPTQ checkpoints, recognised in their tensors, and repaired.

The tensors decide: zero points of symmetric layers are 2^(bits - 1), which tells version 1 from version 2; g_idx says
whether groups are in order; shapes say bits and group size. Codes, scales and all other tensors keep their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError, ConversionError, ShapeError
from ..hub import at_home, fetch
from ..modes import in_plain_modes
from ..quantizer.quantized import trivial_index
from ..settings import Plain
from .bits import pack, unpack
from .checkpoint import REPORT, Checkpoint, read_quantization_config, whole_checkpoint
from .convert import check_apart, fill, update_report, write_quantization_config
from .files import check_folder
from .formats import declared_format, find_format
from .gptq import kind_of_zeros, settings_of_shapes
from .shards import Shards, read_json, same_bits
from .staging import check_target, staged

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # how much less than a zero point they store
_KEYS = ("bits", "group_size", "desc_act", "sym")  # without which some readers do not load a file


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One kind of damage to a checkpoint.

    Attributes:
        what: What is wrong.
        layers: Number of layers that have it; 0 where it is not one of layers.
        example: One of these layers.
        repair: What repairs it; None where nothing does but other files.
    """

    what: str
    layers: int = 0
    example: str | None = None
    repair: str | None = None

    def __str__(self) -> str:
        where = f" (layers: {self.layers}, such as {self.example})" if self.layers else ""
        return f"{self.what}{where}; " + (f"repair: {self.repair}" if self.repair else "no repair: download again")


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Plain):
    """What `doctor` found.

    Attributes:
        damage: Every kind of damage; empty for a healthy checkpoint.
        notes: What the tensors do not tell.
        written: Whether a repaired checkpoint was written.
    """

    damage: tuple[Damage, ...]
    notes: tuple[str, ...] = ()
    written: bool = False


@dataclass
class _Case:
    """A checkpoint that says it is `label`, is `meant` and becomes `target`, with `values` in its quantization config.

    The zero points of the layers in `middle` are 2^(bits - 1).
    """

    path: Path
    values: dict[str, Any]
    label: str
    meant: str
    target: str
    opened: Checkpoint = field(init=False)
    middle: set[str] = field(default_factory=set)
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def found(self, what: str, layers: Sequence[str], repair: str | None = None) -> None:
        """Add damage, if any layer has it."""
        if layers:
            self.damage.append(Damage(what=what, layers=len(layers), example=layers[0], repair=repair))


@in_plain_modes
def doctor(
    checkpoint: Path | str, out: Path | str | None = None, *, format: str | None = None, revision: str | None = None
) -> Diagnosis:
    """Return the known damage of a checkpoint, a directory or an id on the Hub, and write a repaired one.

    Recognised are, in GPTQ's formats, zero points of another version than declared, 3-bit zeros of GPTQModel before 7.0
    (both in symmetric layers only), desc_act that contradicts g_idx, and missing settings and g_idx; in all formats, an
    index that does not fit its files, files that are cut off or missing, and scales that no weights can have.

    Args:
        checkpoint: What to examine; it stays as it is.
        out: Directory to write, if there is damage and all of it can be repaired.
        format: Version that `out` is to have, "gptq" or "gptq_v2"; by default the one of the zero points.
        revision: Branch, tag or commit of a checkpoint on the Hub.

    Raises:
        DatasetUnavailableError: There is no such directory, nor such a model on the Hub.
        CheckpointError: No quantized checkpoint, or configs that cannot be read.
        ConversionError: A layer holds what `format` cannot, or the checkpoint is GGUF.
        ConfigError: Another `format`, or one without `out` or beside GPTQ's; `out` inside the checkpoint or around it.
        OutputExistsError, OSError: `out` exists, or the disk refused; nothing is left behind.
    """
    if format not in (None, *VERSIONS):
        raise ConfigError(f"format is {format!r}; choose one of {', '.join(VERSIONS)}")
    place = Path(at_home(checkpoint))
    kinds = {file.suffix for file in (place, *place.glob("*"))}
    if ".gguf" in kinds and ".safetensors" not in kinds:
        raise ConversionError(f"{checkpoint} is GGUF, which is not examined; gptqkit inspect reads it")
    source = fetch(checkpoint, revision)
    target = None if out is None else Path(at_home(out))
    if format is not None and target is None:
        raise ConfigError(f"format is {format!r}, but nothing is to be written; give out (OUT), too")
    if target is not None:
        check_apart(source, target)
        check_target(target, overwrite=None)
    case = _examine(source, format)
    written = target is not None and bool(case.damage) and all(damage.repair for damage in case.damage)
    if target is not None and written:
        _write(case, target)
    return Diagnosis(damage=tuple(case.damage), notes=tuple(case.notes), written=written)


def _examine(path: Path, format: str | None = None) -> _Case:
    check_folder(path)
    model_config = read_json(path / "config.json")
    values = read_quantization_config(path, model_config)
    label = declared_format(values, str(path))
    if format is not None and label not in VERSIONS:
        raise ConfigError(f"format is {format!r}, but {path} is {label}, which has one version; leave it out")
    case = _Case(path, values, label, label, label)
    missing = [key for key in _KEYS if values.get(key) is None] if label in VERSIONS else []
    if not missing:  # else the tensors are asked first
        find_format(label).read_config(values, str(path))
    try:
        try:
            tensors = Shards.of_folder(path, values.get("model_file_base_name"))
        except CheckpointError:
            tensors = Shards.without_index(path)
            case.damage.append(Damage(what="the index is missing or contradicts the files", repair="it is made anew"))
        if missing:
            values |= {key: value for key, value in settings_of_shapes(tensors).items() if key in missing}
        declared = find_format(label).read_config(values, str(path))
        case.opened = whole_checkpoint(tensors, declared, path, model_config, values)
    except CheckpointError as error:
        if not values:  # then nothing says that it is quantized
            raise
        case.damage.append(Damage(what=str(error).removesuffix("; fetch it again")))
        return case
    if label in VERSIONS:
        _judge_zero_points(case, format, missing)
        _judge_order(case, missing)
    if missing:
        repair = ", ".join(f"{key} is {str(values[key]).lower()}" for key in missing)
        case.damage.append(Damage(what="the quantization config lacks " + ", ".join(missing), repair=repair))
    _judge_scales(case)
    return case


def _judge_zero_points(case: _Case, format: str | None, missing: Sequence[str]) -> None:
    """Find out which version symmetric layers are of, and choose the one to write."""
    layers, get = case.opened.layers, case.opened.tensor
    kinds = {name: kind_of_zeros(get(f"{name}.qzeros"), spec.bits) for name, spec in layers.items() if spec.sym}
    if "sym" in missing:
        case.values["sym"] = all(kinds.values())
        kinds = kinds if case.values["sym"] else {}
    case.middle = {name for name, kind in kinds.items() if kind}
    [other] = VERSIONS.keys() - {case.label}
    contrary, swapped = ([name for name in kinds if kinds[name] == kind] for kind in (other, "swapped"))
    if contrary and len(contrary) == len(case.middle):
        case.meant = other
    case.target = format or case.meant
    case.found("3-bit zero points are those that GPTQModel before 7.0 shifted wrongly", swapped, "they become 4")
    what = "the config becomes" if case.meant == case.target != case.label else "zero points are written for"
    found = f"zero points are those of {other}, but the config says {case.label}"
    case.found(found, contrary, f"{what} {case.target}")
    if not case.middle:
        case.notes.append(f"no layer has symmetric zero points, so {case.label} cannot be told from {other}")


def _judge_order(case: _Case, missing: Sequence[str]) -> None:
    """Compare desc_act with g_idx, and find out where that is missing."""
    layers = case.opened.layers
    ordered = [name for name, spec in layers.items() if spec.act_order]
    grouped = [name for name, spec in layers.items() if spec.group_size < spec.in_features]
    lacking = [name for name in layers if f"{name}.g_idx" not in case.opened.tensors.where]
    if "desc_act" in missing and not set(lacking).isdisjoint(grouped):
        case.found("neither desc_act nor g_idx says in which order groups are", lacking)
    else:
        case.found("g_idx is missing", lacking, "it is written as k // group_size")
    declared = case.opened.declared
    if declared.desc_act and declared.static_groups and not ordered:
        case.notes.append("desc_act is true and all groups are in order, as static_groups leaves them")
        return
    if "desc_act" not in missing and declared.desc_act != bool(ordered):
        found = "false, but groups are not" if ordered else "true, but all groups are"
        case.found(f"desc_act is {found} in order", ordered or grouped, f"it becomes {str(bool(ordered)).lower()}")
    if grouped or "desc_act" in missing:
        case.values["desc_act"] = bool(ordered)


def _judge_scales(case: _Case) -> None:
    """Look for scales that are no numbers, or zero in groups with other codes than the zero point."""
    broken, lost, layout = [], [], find_format(case.meant)
    for name, spec in case.opened.layers.items():
        tensors = {key: tensor for key, tensor in _repaired(case, name, case.meant).items() if key != "bias"}
        scales = {key: tensor for key, tensor in tensors.items() if tensor.is_floating_point()}
        if not all(bool(tensor.isfinite().all()) for tensor in scales.values()):
            broken.append(name)
        elif any(bool((tensor == 0).any()) for tensor in scales.values()):
            ones = {key: tensor.masked_fill(tensor == 0, 1) for key, tensor in scales.items()}
            weight, empty = (layout.unpack(name, each, spec) for each in ({**tensors, **ones}, tensors))
            index = weight.group_index.long()
            if bool(((empty.scale == 0)[:, index] & (weight.codes != weight.zero_point()[:, index])).any()):
                lost.append(name)
    case.found("scales are NaN or infinite", broken)
    case.found("scales are zero in groups whose codes are not", lost)


def _repaired(case: _Case, name: str, target: str) -> dict[str, Tensor]:
    """Return the tensors that a layer is to have in the format `target`, by suffix."""
    tensors = case.opened.tensors.below(name, (*case.opened.format.suffixes, "bias"))
    if case.label in VERSIONS:
        spec = case.opened.layers[name]
        zero = unpack(tensors["qzeros"], spec.bits).to(torch.int16) + VERSIONS[case.meant]
        if name in case.middle:
            zero.fill_(1 << (spec.bits - 1))
        try:
            tensors["qzeros"] = pack(zero - VERSIONS[target], spec.bits)
        except ShapeError as error:
            raise ConversionError(f"{name} has zero points that {target} cannot hold: {error}") from error
        tensors.setdefault("g_idx", trivial_index(spec.in_features, spec.group_size))
    return tensors


def _tensors(case: _Case) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors as they are to be written."""
    for name in case.opened.layers:
        yield from ((f"{name}.{key}", tensor) for key, tensor in _repaired(case, name, case.target).items())
    yield from ((name, case.opened.tensor(name)) for name in case.opened.other_names)


def _write(case: _Case, out: Path) -> None:
    values = case.values
    if case.label in VERSIONS:
        values = {"quant_method": "gptq", **values, "checkpoint_format": case.target, "format": case.target}
    with staged(out) as directory:
        fill(directory, case.path, _tensors(case))
        write_quantization_config(directory, values, case.target)
        if (directory / REPORT).exists():
            update_report(directory, case.path, case.target)
        again = _examine(directory)
        if again.damage or not all(same_bits(again.opened.tensor(name), tensor) for name, tensor in _tensors(case)):
            raise CheckpointError(f"what was written to {out} reads back differently; disk or memory is faulty")
