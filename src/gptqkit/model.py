"""A model on disk: opened, not loaded. The weights of a part, such as a block, are read when its turn comes."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from .architecture import empty_model, explain, is_float, open_config, take_generation_config, without_bars
from .bounds import confined
from .errors import CheckpointError, NonFiniteError
from .experts import find_stacked, split_experts, stacked_names
from .export.files import copy_beside
from .export.modules import FUSED
from .export.names import StoredNames
from .export.scaled import FloatShards
from .export.shards import Shards, read_json, some
from .hub import UNUSED, fetch
from .targets import find_blocks, is_tied, output_layer


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
        """Put stored tensors into their places in the model that works.

        Args:
            tensors: Where they are.
            names: What they are called.
            chosen: Those wanted; all that belong to one parameter, or to the experts of one module, come together.
            device: Where they are wanted.
            dtype: Of floating-point parameters; None for that of the empty model. Buffers keep theirs.

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
            _check_finite(name, own)
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
            _check_finite(name, own)
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


class FloatModel:
    """A folder of safetensors as the source of a quantization. Only the tensors of the part at hand are in memory.

    Args:
        path_or_id: A directory, or the id of a model on the Hub, whose files are then fetched into the Hub's cache.
        trust_remote_code: Run code that the model brings along.
        revision: Branch, tag or commit of a model on the Hub.

    Attributes:
        path: The directory.
        empty: The model without weights; `model` is the form of it that works, whose weights come and go.
        dtype: Of the files.
        blocks: The repeated blocks in the order in which they run: those of an encoder before those of its decoder.
        paths: Their names in the model.
        stacks: The numbers of the blocks of each stack.
        names: What the tensors are called in the files.
        passthrough: Names of stored tensors that the model has no place for.

    Raises:
        CheckpointError: It has no safetensors, or weights are missing or damaged.
        GptqkitError: As `open_empty` raises.
    """

    def __init__(self, path_or_id: str | Path, *, trust_remote_code: bool = False, revision: str | None = None) -> None:
        self._code = trust_remote_code
        with explain(path_or_id), without_bars():
            self.path = fetch(path_or_id, revision).absolute()  # whatever becomes the working directory
            stored = Shards.of_folder(self.path)
            self.empty = open_empty(self.path, stored, trust_remote_code=trust_remote_code)
            self.model = self.empty.model
            self.dtype: torch.dtype = self.model.dtype
            take_generation_config(self.model, self.path)
        found = find_blocks(self.model)
        self.paths = [path for stack in found for path in stack]
        self.blocks = nn.ModuleList(block for stack in found for block in stack.values())
        ends = [0, *itertools.accumulate(map(len, found))]
        self.stacks = [range(*each) for each in itertools.pairwise(ends)]
        self._numbers = {path: number for number, path in enumerate(self.paths)}
        self._tensors: Shards = FloatShards(stored, self.dtype, self._tile())
        self.names = StoredNames(self.empty.stacked, self.empty.names, self._tensors.where)
        self.empty.untie(self._tensors, self.names)
        self.passthrough = [name for name in self._tensors.where if not self.names.parameters(name)]
        absent = set(self.empty.stacked.state_dict())
        absent -= {name for stored in self._tensors.where for name in self.names.parameters(stored)}
        missing = absent - self._made_elsewhere()
        self._absent = sorted(absent - self._tied() - {name for name, _ in self.empty.stacked.named_buffers()})
        if missing:
            raise CheckpointError(f"{path_or_id} lacks {some(sorted(missing))}; fetch its files again")
        self._check_more_blocks()
        self.empty.check(self._tensors, self.names, [name for name in self._tensors.where if self.names.known(name)])

    @property
    def tensor_names(self) -> list[str]:
        """Names of all stored tensors."""
        return list(self._tensors.where)

    def _tile(self) -> Any:
        """Return the rows and columns of FP8 tensors that share a scale, where config.json says so."""
        quantization = read_json(self.path / "config.json").get("quantization_config")
        return quantization.get("weight_block_size") if isinstance(quantization, dict) else None

    def part_of(self, name: str) -> int | None:
        """Return the number of the block that a name in the model belongs to; None outside the blocks."""
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((self._numbers[path] for path in paths if path in self._numbers), None)

    @contextmanager
    def outside(self, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
        """Bring everything but the blocks, and but the output layer where that has weights of its own, for a while."""
        head = self._own_head()
        for name in self._chosen(head.__contains__):  # if it is only copied, nobody else looks at it
            _check_finite(name, self._tensors.get(name))
        chosen = self._chosen(lambda name: self.part_of(name) is None and name not in head)
        with self._resident(self.model, chosen, device, dtype):
            self.empty.make(self._absent, device, dtype)
            yield

    def block(self, layer: int, device: torch.device, dtype: torch.dtype) -> Any:
        """Bring the weights of one block for a while."""
        chosen = self._chosen(lambda name: self.part_of(name) == layer)
        return self._resident(self.blocks[layer], chosen, device, dtype)

    def head(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Bring the weights of an output layer that has its own for a while."""
        own = self._own_head()
        return self._resident(output_layer(self.model) or nn.Module(), self._chosen(own.__contains__), device, dtype)

    def whole(self, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
        """Return the model with all its weights, in evaluation mode."""
        self.empty.fill(self._tensors, self.names, self._chosen(lambda _: True), device, dtype)
        return self.model.to(device)

    def others(self, part: int | None, solved: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield what a part of the checkpoint (a block, or None for what is outside) holds beside the `solved` modules.

        Stored tensors are taken over as they are. Where some of what was fused or stacked in one of them is quantized,
        the rest is written apart, under the model's names, from the weights that are there now.
        """
        for stored in self._tensors.where:
            parameters = self.names.parameters(stored)
            if (self.part_of(parameters[0]) if parameters else None) != part:
                continue
            own = self.names.working(stored)
            if own is not None:
                if own.removesuffix(".weight") not in solved:
                    yield stored, self._tensors.get(stored)
                continue
            apart = [name for parameter in parameters for name in self._apart(parameter)]
            if not any(name.rpartition(".")[0] in solved for name in apart):
                yield stored, self._tensors.get(stored)
                continue
            dtype = self._tensors.get(stored).dtype
            for name in apart:
                if name.removesuffix(".weight") not in solved:
                    yield name, self.model.get_parameter(name).detach().to(dtype)

    def identity(self) -> dict[str, Any]:
        """Return what tells this model from others: digests of config.json and, in part, of the files of weights."""
        config = hashlib.sha256((self.path / "config.json").read_bytes()).hexdigest()
        return {"config.json": config, **{file.name: _digest(file) for file in sorted(self._tensors.files)}}

    def copy_files(self, directory: Path) -> None:
        """Copy what belongs to the model beside its weights, but for what is there already and for code."""
        leave = ("README.md", ".safetensors", ".index.json", *UNUSED, *(() if self._code else (".py",)))
        copy_beside(self.path, directory, leave=leave, folders=False)

    @contextmanager
    def _resident(
        self, module: nn.Module, chosen: list[str], device: torch.device, dtype: torch.dtype
    ) -> Iterator[None]:
        """Keep stored tensors, and the buffers of `module`, on `device` while the context lasts."""
        try:
            self.empty.fill(self._tensors.mapped_anew(chosen), self.names, chosen, device, dtype)
            for owner in module.modules():
                for key, buffer in owner._buffers.items():
                    owner._buffers[key] = None if buffer is None else buffer.to(device)
            yield
        finally:
            self.empty.clear(module)
            _return_memory()

    def _check_more_blocks(self) -> None:
        """Refuse tensors of blocks beyond those that the model has, but for what transformers leaves out on purpose."""
        known = self._tensors.where.keys() - self.passthrough
        patterns, counts = set(map(_pattern, known)), Counter[str]()
        for name in known:  # of the blocks of its list
            counts[_list(name)] = max(counts[_list(name)], _number(name) + 1)
        ignored = "|".join(self.empty.stacked._keys_to_ignore_on_load_unexpected or ())
        predicting = getattr(self.model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
        extra = [name for name in self.passthrough if _number(name) >= counts[_list(name)] + predicting]
        extra = [name for name in extra if _pattern(name) in patterns and not (ignored and re.search(ignored, name))]
        if extra:
            raise CheckpointError(
                f"{self.path} holds {some(extra)}, but config.json describes {counts[_list(extra[0])]} blocks; "
                "fetch config.json again"
            )

    def _chosen(self, wanted: Any) -> list[str]:
        """Return the stored tensors of which some parameter is wanted."""
        return [stored for stored in self._tensors.where if any(map(wanted, self.names.parameters(stored)))]

    def _apart(self, parameter: str) -> list[str]:
        """Return the tensors of the model that works which `parameter` comes to: of a stack, those of all experts."""
        experts = self.empty.experts.get(parameter)
        if experts is None:
            return [parameter]
        attribute = parameter.rpartition(".")[2]
        matrix, end = attribute.removesuffix("_bias"), "bias" if attribute.endswith("_bias") else "weight"
        count = len(self.empty.stacked.get_parameter(parameter))
        return [f"{experts}.{n}.{each}.{end}" for n in range(count) for each in FUSED.get(matrix, (matrix,))]

    def _own_head(self) -> set[str]:
        """Return the names of the output layer's tensors, where it has its own."""
        output = output_layer(self.model)
        if output is None or is_tied(self.model):
            return set()
        own = {id(tensor) for tensor in output.parameters()}
        return {name for name, tensor in self.model.named_parameters() if id(tensor) in own}

    def _made_elsewhere(self) -> set[str]:
        """Return the names in the model that need not be in the files."""
        model = self.empty.stacked
        others = self._tied() | {name for name, _ in model.named_buffers()}
        ignored = model._keys_to_ignore_on_load_missing or ()
        return others | {name for name in model.state_dict() if any(re.search(key, name) for key in ignored)}

    def _tied(self) -> set[str]:
        """Return the names of parameters that are tied to others."""
        return {*self.empty.tied, *self.empty.tied.values()}


def open_empty(path_or_id: str | Path, tensors: Shards | None = None, *, trust_remote_code: bool = False) -> EmptyModel:
    """Return the float model of a folder or Hub id without its weights, in the dtype of its files.

    `tensors` are those of the folder, where they are open already.

    Raises:
        DatasetUnavailableError: It cannot be found or fetched.
        CheckpointError: It is quantized.
        ArchitectureError: A model that transformers does not know, or only by running its code.
    """
    with explain(path_or_id), without_bars():
        with confined(path_or_id, tensors, trusted=trust_remote_code):
            config = open_config(path_or_id, trust_remote_code=trust_remote_code)
            if not is_float(config):
                raise CheckpointError(f"{path_or_id} is quantized already; start from the float model")
            model = empty_model(config, config.dtype or torch.float32, trust_remote_code=trust_remote_code)
        return EmptyModel(model)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, key = name.rpartition(".")
    model.get_submodule(owner)._parameters[key] = parameter


def _parameter(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return nn.Parameter(tensor.detach().to(device, wanted), requires_grad=False)


def _return_memory() -> None:
    """Give freed memory back to the system: glibc keeps some, which comes to more from block to block."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _check_finite(name: str, tensor: Tensor) -> None:
    ordered = tensor.numel() and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if ordered and not all(map(torch.isfinite, tensor.aminmax())):
        raise NonFiniteError(f"{name} holds NaN or infinity; fetch the files again")


def _number(name: str) -> int:
    """Return the first number among the parts of a name, -1 where there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _list(name: str) -> str:
    """Return the part of a name before its first number: what the list of blocks is called."""
    return re.split(r"\.\d+\.", name, maxsplit=1)[0]


def _pattern(name: str) -> str:
    """Return a name without its first number, which is that of a block."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _misfit(name: str, found: Iterable[int], needed: Iterable[int]) -> CheckpointError:
    return CheckpointError(
        f"{name} has shape {tuple(found)}; the model that config.json describes needs {tuple(needed)}"
    )


def _digest(file: Path) -> str:
    """Return that of the size, the first mebibyte (the header) and 64 pieces of the rest: a file would take minutes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        for piece in range(64):
            stream.seek(size * piece // 64)
            digest.update(stream.read(4096))
    return digest.hexdigest()
