"""A model without weights, and how stored tensors get into it."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from .architecture import empty_model, explain, is_float, open_config, without_bars
from .bounds import confined
from .errors import CheckpointError, NonFiniteError
from .experts import find_stacked, split_experts, stacked_names
from .export.names import StoredNames
from .export.shards import Shards, some


class EmptyModel:
    """A model without weights, in two forms, and how stored tensors get into it.

    transformers' own form knows how tensors are renamed, cut apart and stacked when they are loaded. The form that
    works has the same modules, but experts are split into Linears. What is loaded goes through the one into the other.

    Attributes:
        stacked: The form of transformers; its parameters are always on the meta device.
        model: The form that works.
        names: Names of all tensors in it.
        split: Those of split experts.
        experts: The modules of split experts, by the names of the parameters that were stacked.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        model.tie_weights()
        self.stacked = model
        self.model: PreTrainedModel = copy.deepcopy(model)
        if model.config.get_text_config().model_type == "llama4_text":
            from .llama4 import mark_experts  # no other model needs transformers' code of it

            mark_experts(self.model)
        self.experts: dict[str, str] = {}
        for name, experts in list(find_stacked(self.model)):
            stacks = {stack: experts._parameters[stack] for stack in stacked_names(experts)}
            self.experts |= {f"{name}.{stack}": name for stack in stacks}
            split_experts(experts, stacks)
        self.names = frozenset(self.model.state_dict())
        self.split = self.names - frozenset(self.stacked.state_dict())

    @property
    def tied(self) -> Mapping[str, str]:
        """The parameters of transformers' form that are tied, and to which others."""
        tied: Mapping[str, str] = getattr(self.stacked, "all_tied_weights_keys", {})  # a model's own code may lack it
        return tied

    def fill(
        self,
        tensors: Shards,
        names: StoredNames,
        chosen: Iterable[str],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Put the `chosen` of stored tensors into their places in the model that works.

        All that belong to one parameter, or to the experts of one module, come together. `dtype` is that of
        floating-point parameters, by default of the empty model; buffers keep theirs.

        Raises:
            CheckpointError: They do not fit the model.
            NonFiniteError: They hold NaN or infinity.
        """
        of_experts = {name: place for name in chosen if (place := names.working(name)) in self.split}
        others = [name for name in chosen if name not in of_experts]
        self._load({name: tensors.slice(name) for name in others}, device)
        stacks: dict[str, dict[str, Tensor]] = defaultdict(dict)
        made: dict[int, nn.Parameter] = {}  # what is tied stays one tensor
        for name, parameter in list(self.stacked.named_parameters(remove_duplicate=False)):
            if parameter.is_meta:
                continue
            own = made.setdefault(id(parameter), _parameter(parameter, device, dtype))
            check_finite(name, own)
            if name in self.experts:
                stacks[self.experts[name]][name.rpartition(".")[2]] = own
            else:
                _set(self.model, name, own)
            _set(self.stacked, name, _parameter(parameter, torch.device("meta"), None))
        for experts, its in stacks.items():
            split_experts(self.model.get_submodule(experts), its)
        for name in {name for stored in others for name in names.parameters(stored)}:
            owner, _, key = name.rpartition(".")
            if key in self.stacked.get_submodule(owner)._buffers:
                self.model.get_submodule(owner)._buffers[key] = self.stacked.get_submodule(owner)._buffers[key]
        for name, place in of_experts.items():
            own = _parameter(tensors.get(name), device, dtype or self.model.get_parameter(str(place)).dtype)
            check_finite(name, own)
            _set(self.model, str(place), own)

    def untie(self, tensors: Shards, names: StoredNames) -> None:
        """Let go of ties between weights that differ in the files, as transformers does, for T5 1.1 among others."""
        for name, origin in list(self.tied.items()):
            pair = [names.stored(each) for each in (name, origin)]
            if all(each in tensors.where for each in pair) and not torch.equal(*map(tensors.get, pair)):
                for form in (self.stacked, self.model):
                    form.all_tied_weights_keys.pop(name)
                    _set(form, name, _parameter(form.get_parameter(name), torch.device("meta"), None))

    def make(self, names: Iterable[str], device: torch.device, dtype: torch.dtype | None = None) -> None:
        """Fill in what files may lack, and what is the same in every new model, such as Marian's sinusoids."""
        ignored = "|".join(self.stacked._keys_to_ignore_on_load_missing or ())
        for name in [name for name in names if ignored and re.search(ignored, name)]:
            first, second = self._initialized(name), self._initialized(name)
            if torch.equal(first, second):
                _set(self.model, name, _parameter(first, device, dtype))

    def _initialized(self, name: str) -> Tensor:
        """Return what transformers makes of a parameter in a new model; NaN where it makes nothing of it."""
        path, _, key = name.rpartition(".")
        owner: Any = self.model.get_submodule(path)
        for other in owner.parameters(recurse=False):
            other._is_hf_initialized = True
        empty, owner._is_hf_initialized = owner._parameters[key], False
        owner._parameters[key] = _parameter(torch.full(empty.shape, torch.nan), torch.device("cpu"), empty.dtype)
        self.model.initialize_weights()
        made: Tensor = owner._parameters[key].detach()
        owner._parameters[key] = empty
        return made

    def check(self, tensors: Shards, names: StoredNames, chosen: Iterable[str]) -> None:
        """Raise CheckpointError where stored tensors do not fit the model; none of them is read."""
        stacked, working = self.stacked.state_dict(), self.model.state_dict()
        others: dict[str, Tensor] = {}
        for name in chosen:
            stored, place = tensors.meta(name), names.working(name)
            single = place in self.split
            wanted = [working[str(place)]] if single else [stacked[each] for each in names.parameters(name)]
            if any(each.is_floating_point() for each in wanted) and not stored.is_floating_point():
                raise CheckpointError(f"{name} is {stored.dtype}; floating point is needed: fetch the files again")
            if not single:
                others[name] = stored
            elif stored.shape != wanted[0].shape:
                raise _misfit(name, stored.shape, wanted[0].shape)
        self._load(others, torch.device("meta"))

    def _load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Let transformers load stored tensors, or handles of them, into its form of the model."""
        dtype = self.stacked.dtype
        settings = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=self.stacked._get_dtype_plan(dtype),
            device_map={"": device},
            weight_mapping=get_model_conversion_mapping(self.stacked),
        )
        with without_bars():
            found, _ = convert_and_load_state_dict_in_model(self.stacked, dict(state), settings)
        for name, stored, needed in found.mismatched_keys:
            raise _misfit(name, stored, needed)
        if found.conversion_errors or found.error_msgs:
            wrong = [*found.conversion_errors, *map(str, found.error_msgs)]
            raise CheckpointError(f"{some(wrong)}: the stored tensors do not fit together; fetch the files again")
        for name, origin in self.tied.items():  # a file may hold either
            if self.stacked.get_parameter(origin).is_meta:
                _set(self.stacked, origin, self.stacked.get_parameter(name))
        if self.tied:
            self.stacked.tie_weights(recompute_mapping=False)

    def clear(self, module: nn.Module) -> None:
        """Let go of the weights of a module of the model that works."""
        for owner in module.modules():
            for key, parameter in owner._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    owner._parameters[key] = _parameter(parameter, torch.device("meta"), None)


def open_empty(path: Path, tensors: Shards | None = None, *, trust_remote_code: bool = False) -> EmptyModel:
    """Return the float model of a folder without its weights, in the dtype of its files.

    `tensors` are those of the folder, where they are open already.

    Raises:
        CheckpointError: It is quantized.
        ArchitectureError: A model that transformers does not know, or only by running its code.
    """
    with explain(path), without_bars():
        with confined(path, tensors, trusted=trust_remote_code):
            config = open_config(path, trust_remote_code=trust_remote_code)
            if not is_float(config):
                raise CheckpointError(f"{path} is quantized already; start from the float model")
            model = empty_model(config, config.dtype or torch.float32, trust_remote_code=trust_remote_code)
        return EmptyModel(model)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, key = name.rpartition(".")
    model.get_submodule(owner)._parameters[key] = parameter


def _parameter(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return nn.Parameter(tensor.detach().to(device, wanted), requires_grad=False)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise NonFiniteError where a stored tensor holds NaN or infinity."""
    ordered = tensor.numel() and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if ordered and not all(map(torch.isfinite, tensor.aminmax())):
        raise NonFiniteError(f"{name} holds NaN or infinity; fetch the files again")


def _misfit(name: str, found: Iterable[int], needed: Iterable[int]) -> CheckpointError:
    return CheckpointError(
        f"{name} has shape {tuple(found)}; the model that config.json describes needs {tuple(needed)}"
    )
