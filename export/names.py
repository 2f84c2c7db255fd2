"""The names of tensors in checkpoint files, and the parameters of the model that transformers makes of them.

transformers renames tensors when it loads them, cuts some apart, and stacks the matrices of a layer's experts into one
parameter. Checkpoints are written in the names of the source's files, one matrix per expert: what vLLM and transformers
expect of each architecture. What becomes of a name is asked of transformers, never looked up in a table of ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from .modules import FUSED


def stored_parts(model: PreTrainedModel) -> dict[str, str]:
    """Return what files call parts of names that transformers renames, such as ".block_sparse_moe." for ".mlp."."""
    entries = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    pairs = [(entry.target_patterns[0], entry.source_patterns[0]) for entry in entries]
    return {new: old for new, old in pairs if all(re.fullmatch(r"(\.\w+)+\.", part) for part in (new, old))}


class StoredNames:
    """What the tensors of a model are called in its files.

    A tensor of the model that is made of stored ones in any other way than one by one (a query that is cut out of a
    fused matrix, an expert that the files keep stacked, too) keeps the model's name, which transformers reads as well.

    The model is one as transformers builds it, also on the meta device. In the one that works, whose tensors are called
    `working`, experts are apart, such as "model.layers.0.mlp.experts.3.up_proj.weight".
    """

    def __init__(self, model: PreTrainedModel, working: Collection[str], stored: Iterable[str]) -> None:
        conversions = get_model_conversion_mapping(model)
        self._known: Mapping[str, Tensor] = model.state_dict()
        self._names = frozenset(working)
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}
        self._parameters: dict[str, list[str]] = {}
        self._working: dict[str, str] = {}
        for name in sorted(stored, key=dot_natural_key):  # some renamings depend on transformers' order
            self._find(name)
        self._stored = {working: name for name, working in self._working.items()}

    def parameters(self, stored: str) -> list[str]:
        """Return the parameters and buffers of the model that the stored tensor goes into.

        Several, where transformers cuts it apart; none, where the model has no place for it. Tensors of single experts
        go into the parameter of all of them or, where only we call them so, nowhere.
        """
        return self._parameters[stored]

    def stored(self, working: str) -> str:
        """Return what the files call, or shall call, a tensor of the model that works."""
        return self._stored.get(working, working)

    def working(self, stored: str) -> str | None:
        """Return the tensor of the model that works which is stored, as it is, under this name; None if none is."""
        return self._working.get(stored)

    def known(self, stored: str) -> bool:
        """Whether the model has a place for the stored tensor."""
        return bool(self._parameters[stored]) or stored in self._working

    def _find(self, stored: str) -> None:
        found, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._known)
        if found not in self._known and stored in self._known:
            found, pattern = stored, None
        self._parameters[stored] = [found] if found in self._known else []
        if found not in self._known:
            own = next(
                (name for name in (stored, stored.removeprefix(f"{self._prefix}.")) if name in self._names), None
            )
            if own is not None:
                self._working[stored] = own
        elif pattern is None:
            if found in self._names:
                self._working[stored] = found
        else:
            converter = self._by_pattern[pattern]
            first = converter.target_patterns[0]
            targets = [found.replace(first, target, 1) for target in converter.target_patterns]
            self._parameters[stored] = [target for target in targets if target in self._known]
            self._find_expert(stored, found, converter, pattern)

    def _find_expert(self, stored: str, parameter: str, converter: Any, pattern: str) -> None:
        """Remember a matrix or bias of a single expert that is merely stacked with others into `parameter`."""
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", stored)
        if not numbers or not all(isinstance(each, (MergeModulelist, Concatenate)) for each in converter.operations):
            return
        path, _, attribute = parameter.rpartition(".")
        matrix = attribute.removesuffix("_bias")
        parts = FUSED.get(matrix, ())
        if len(parts) == len(converter.source_patterns):
            matrix = parts[converter.source_patterns.index(pattern)]
        working = f"{path}.{numbers[-1]}.{matrix}.{'bias' if attribute.endswith('_bias') else 'weight'}"
        if working in self._names:
            self._working[stored] = working
