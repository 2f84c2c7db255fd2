"""The names of tensors in checkpoint files, and the parameters of the model that transformers makes of them.

transformers renames tensors when it loads them, and stacks the matrices of a layer's experts into one parameter with
three dimensions. Checkpoints are written in the names of the files, one matrix per expert: what vLLM and transformers
expect of each architecture. What becomes of a name is asked of transformers, never looked up in a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

_OWNER = 1 << 40  # tags are owner * _OWNER + row


@dataclass(frozen=True)
class Part:
    """A stored tensor, and the place in the model where it belongs.

    Attributes:
        name: Its name in the file, such as "model.layers.0.block_sparse_moe.experts.3.w1.weight".
        parameter: The parameter or buffer of the model, such as "model.layers.0.mlp.experts.gate_up_proj".
        expert: Which expert of a parameter that holds all of them; None for any other parameter.
        rows: Which rows of the (out, in) matrix, or of the bias; None for all of them.
    """

    name: str
    parameter: str
    expert: int | None = None
    rows: slice | None = None

    @property
    def module(self) -> str:
        """The name without what a Linear calls its tensors: under it stand qweight, qzeros, scales and g_idx."""
        return self.name.removesuffix(".weight").removesuffix(".bias")


class StoredNames:
    """What the tensors of a model are called in its files.

    Experts that the files keep stacked, too, get names of their own, one matrix per expert: `EXPERTS.3.gate_proj`,
    `EXPERTS.3.up_proj` and `EXPERTS.3.down_proj`. A parameter that is made of stored tensors in any other way than row
    by row keeps the model's name, which transformers reads as well.

    Args:
        model: The model; its weights may be on the meta device.
        stored: The names in the files; what is found there wins. None for a model in memory, which is stored in the
            names that its files had, or that transformers gives it.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[str] | None = None) -> None:
        self._model = model
        self._known: Mapping[str, Tensor] = model.state_dict()
        self._stored = None if stored is None else frozenset(stored)
        self._found: dict[str, str | None] = {}
        self._parts: dict[str, list[Part]] = {}
        self._shared: dict[str, list[str]] = {}
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        if self._stored is not None:
            for name in sorted(self._stored, key=dot_natural_key):  # some renamings depend on transformers' order
                self._rename(name)
            self._used = [entry for entry in conversions if entry.was_used()]
        else:  # as transformers does when it saves a model
            used = getattr(model, "_weight_conversions", None)
            if used is None:
                named = get_model_conversion_mapping(model, add_legacy=False)
                used = [entry for entry in named if not isinstance(entry, PrefixChange)]
            self._used = list(used)

    def parameter(self, name: str) -> str | None:
        """The parameter or buffer of the model that the stored tensor `name` goes into.

        The first, where transformers distributes it over several; None where the model has no place for it.
        """
        if name not in self._found:
            self._found[name] = self._rename(name) or self._own_place(name)
        return self._found[name]

    def shares(self, name: str) -> list[str]:
        """All parameters of the model that the stored tensor `name` goes into: a fused query, key and value, say."""
        parameter = self.parameter(name)
        if parameter is None:
            return []
        self.parts(parameter)
        return self._shared.get(name, [parameter])

    def parts(self, parameter: str) -> list[Part]:
        """The stored matrices that a parameter of the model is made of, by expert, in the order of the files.

        Raises:
            KeyError: The model has no such parameter.
        """
        if parameter not in self._parts:
            layer = _layer(parameter)
            self._find_parts([name for name in self._known if _layer(name) == layer])
        return self._parts[parameter]

    def find(self, name: str) -> Part | None:
        """The place in the model of the stored tensor `name`; None where it has none, or none of its own."""
        parameter = self.parameter(name)
        parts = [] if parameter is None else self.parts(parameter)
        return next((part for part in parts if part.name == name), None)

    def is_own(self, name: str) -> bool:
        """Whether only we call a tensor `name`: transformers cannot load what is stored under it."""
        return self._rename(name) is None and self.find(name) is not None

    def cut(self, parameter: str, value: Tensor) -> dict[str, Tensor]:
        """The stored tensors that the `value` of a parameter of the model comes to; views of it, (out, in)."""
        cut = {}
        transposed = value.ndim == 3 and is_transposed(self._model, parameter)
        for part in self.parts(parameter):
            piece = value if part.expert is None else value[part.expert]
            piece = piece.T if transposed and part.expert is not None else piece
            cut[part.name] = piece if part.rows is None else piece[part.rows]
        return cut

    def revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the model, by their names there, as files hold them: renamed, and unstacked where files do so.

        Args:
            tensors: All that belong together, such as those of one block.
        """
        with self._reverting():
            reverted = revert_weight_conversion(self._model, dict(tensors))
        return {self._as_stored(name): tensor for name, tensor in reverted.items()}

    def _rename(self, name: str) -> str | None:
        """As in transformers' convert_and_load_state_dict_in_model."""
        prefix = self._model.base_model_prefix
        found, _ = rename_source_key(name, self._renamings, self._converters, prefix, self._known)
        if found not in self._known and name in self._known:
            found = name
        return found if found in self._known else None

    def _own_place(self, name: str) -> str | None:
        """The parameter that holds what we call `name`: a matrix or bias of one expert among stacked ones."""
        match = re.fullmatch(r"(.+)\.\d+\.(?:gate|up|down)_proj\.(weight|bias)", name)
        if match is None:
            return None
        end = "_bias" if match[2] == "bias" else ""
        for attribute in ("gate_up_proj", "up_proj", "down_proj"):
            found = self._rename(f"{match[1]}.{attribute}{end}")
            if found is not None and any(part.name == name for part in self.parts(found)):
                return found
        return None

    def _find_parts(self, parameters: list[str]) -> None:
        """Learn how transformers takes these parameters apart from where it puts tags, one per row."""
        tags = {}
        for owner, name in enumerate(parameters):
            shape = [size if axis < 1 else 1 for axis, size in enumerate(self._known[name].shape)]
            if len(shape) == 3:
                shape[2 if is_transposed(self._model, name) else 1] = self._rows(name)
            tags[name] = torch.arange(owner * _OWNER, owner * _OWNER + torch.Size(shape).numel()).view(shape)
        found: dict[str, list[Part] | None] = {name: [] for name in parameters}
        for stored, tensor in self._revert_each(tags).items():
            first, last = int(tensor.min()) // _OWNER, int(tensor.max()) // _OWNER
            if first == last:
                name = parameters[first]
                so_far, part = found[name], self._part(stored, name, tensor.flatten() % _OWNER)
                found[name] = None if so_far is None or part is None else [*so_far, part]
            else:
                owners = [parameters[owner] for owner in sorted(set((tensor // _OWNER).flatten().tolist()))]
                found.update(dict.fromkeys(owners))
                self._shared[self._as_stored(stored)] = owners
        for name, parts in found.items():
            parts = parts or []
            as_one = parts[0].name if len(parts) == 1 else name
            if len(parts) == 1 and parts[0] == Part(as_one, name):
                parts = self._stacked(name, as_one) or parts
            elif sum(_size(part, self._rows(name)) for part in parts) != self._all_rows(name):
                parts = self._stacked(name, name) or [Part(self._as_stored(name), name)]
            self._parts[name] = sorted(parts, key=lambda part: dot_natural_key(part.name))

    def _part(self, stored: str, parameter: str, rows: Tensor) -> Part | None:
        """The part that holds these `rows` of a parameter, if they are some rows of one matrix, evenly spaced."""
        name, of_one = self._as_stored(stored), self._rows(parameter)
        first, count = int(rows[0]), rows.numel()
        step = int(rows[1]) - first if count > 1 else 1
        if step < 1 or not torch.equal(rows, torch.arange(first, first + count * step, step)):
            return None
        if count == self._all_rows(parameter):
            return Part(name, parameter)
        start, stop = first % of_one, first % of_one + (count - 1) * step + 1
        if stop > of_one:
            return None
        expert = first // of_one if self._known[parameter].ndim == 3 else None
        return Part(name, parameter, expert, None if count == of_one else slice(start, stop, step))

    def _stacked(self, parameter: str, stored: str) -> list[Part]:
        """One part per expert and matrix of a parameter, or of a bias, that stays stacked in the file."""
        path, _, attribute = parameter.rpartition(".")
        experts: Any = self._model.get_submodule(path)
        weight = attribute.removesuffix("_bias")
        shape = self._known[parameter].shape
        biases = weight != attribute
        if not hasattr(experts, "is_transposed") or len(shape) != (2 if biases else 3) or not hasattr(experts, weight):
            return []
        where = stored.rpartition(".")[0] if stored.endswith(f".{attribute}") else self._as_stored(path)
        rows = shape[1] if biases or experts.is_transposed is False else shape[2]
        names: dict[str, slice | None] = {weight: None}
        if weight == "gate_up_proj" and experts.has_gate:
            half = rows // 2
            gate, up = (slice(0, half, 1), slice(half, rows, 1))
            if not experts.is_concatenated:
                gate, up = (slice(0, rows, 2), slice(1, rows, 2))
            names = {"gate_proj": gate, "up_proj": up}
        end = "bias" if biases else "weight"
        return [
            Part(self._as_stored(f"{where}.{expert}.{name}.{end}"), parameter, expert, chosen)
            for expert in range(shape[0])
            for name, chosen in names.items()
        ]

    def _rows(self, parameter: str) -> int:
        """Rows of the (out, in) matrix, or of one expert's."""
        shape = self._known[parameter].shape
        if len(shape) == 3:
            return shape[2] if is_transposed(self._model, parameter) else shape[1]
        return shape[0] if len(shape) else 1

    def _all_rows(self, parameter: str) -> int:
        shape = self._known[parameter].shape
        return self._rows(parameter) * (shape[0] if len(shape) == 3 else 1)

    def _revert_each(self, tags: Mapping[str, Tensor]) -> dict[str, Tensor]:
        try:
            return self.revert(tags)
        except (ValueError, RuntimeError):  # an operation that needs whole tensors: such parameters keep their names
            reverted = {}
            for name, tensor in tags.items():
                try:
                    reverted.update(self.revert({name: tensor}))
                except (ValueError, RuntimeError):
                    reverted[name] = tensor
            return reverted

    def _as_stored(self, name: str) -> str:
        """`name`, or as the files have it: with or without the prefix that checkpoints of the bare model leave out."""
        if self._stored is None or name in self._stored:
            return name
        prefix = f"{self._model.base_model_prefix}."
        others = (name.removeprefix(prefix), prefix + name)
        return next((other for other in others if other in self._stored), name)

    @contextmanager
    def _reverting(self) -> Iterator[None]:
        """Let transformers revert what was done to these names, not what it did when it last loaded something."""
        attributes = self._model.__dict__
        before = attributes.get("_weight_conversions")
        attributes["_weight_conversions"] = self._used
        try:
            yield
        finally:
            if before is None:
                del attributes["_weight_conversions"]
            else:
                attributes["_weight_conversions"] = before


def is_transposed(model: PreTrainedModel, parameter: str) -> bool:
    """Whether stacked experts are kept as (experts, in, out) rather than (experts, out, in)."""
    return bool(getattr(model.get_submodule(parameter.rpartition(".")[0]), "is_transposed", False))


def _layer(name: str) -> str:
    """The name up to its first number: what belongs to one block."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def _size(part: Part, rows: int) -> int:
    return rows if part.rows is None else len(range(rows)[part.rows])
