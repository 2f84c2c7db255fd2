"""`save_pretrained` of models that were loaded from a quantized checkpoint."""

from __future__ import annotations

import inspect
import json
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .architecture import empty_model, explain, read_config
from .empty import EmptyModel
from .errors import CheckpointError, ConfigError
from .export.checkpoint import Checkpoint, lasting_config, open_checkpoint, write_configs
from .export.names import StoredNames
from .export.shards import MAX_SHARD_BYTES, same_bits, some, write_shards
from .export.staging import remove_leftovers, scratch, sync_directory, sync_files
from .kernels.linear import QuantLinear
from .modes import in_plain_modes
from .settings import bytes_of

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


class Saver:
    """The `save_pretrained` of one loaded model: writes its checkpoint again.

    Backends keep weights in forms of their own, so the codes come from the files that the model was loaded from. The
    two are compared first, tensor by tensor: what is written is what is in memory, or nothing is. The model is not kept
    alive; a copy of it gets a `Saver` of its own.
    """

    def __init__(self, model: Any, path: Path) -> None:
        self._model = weakref.ref(model)
        self._path = path.absolute()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._model(), self._path)

    @in_plain_modes
    def __call__(
        self,
        save_directory: Path | str,
        is_main_process: bool = True,
        *,
        max_shard_size: int | str = MAX_SHARD_BYTES,
        **others: Any,
    ) -> None:
        """Write the weights as they are in the files, to the bit, and the configs as they are in memory.

        What config.json says of the class and the dtype stays what it was: it speaks of the files.
        As with every model of transformers, the tokenizer is saved by its own `save_pretrained`, and other files in
        the directory stay. Stopped at any moment, this leaves the directory that the model was loaded from as a
        whole checkpoint, and another one that held a model without config.json: it is to be called again.

        Args:
            save_directory: May exist. In the one that the model was loaded from only the configs are written.
            is_main_process: Write anything at all.
            max_shard_size: Of a file of weights: bytes, or a text such as "500MB"; no more than 4 GiB is used.
            others: Those of transformers' `save_pretrained`, with their defaults only.

        Raises:
            ConfigError: An option that is not for quantized models, or a model that was let go of.
            CheckpointError: The model or its files were changed since it was loaded, or the files are gone.
            OSError: The disk refused.
        """
        most = min(bytes_of("max_shard_size", max_shard_size), MAX_SHARD_BYTES)
        _check_defaults(others)
        if not is_main_process:
            return
        model = self._model()
        if model is None:
            raise ConfigError("nothing holds the model any more; keep it in a variable while it is saved")
        checkpoint = open_checkpoint(self._path)
        if checkpoint.format.finish is not None:
            raise ConfigError(f"{self._path} holds a GGUF file, which is not written again; copy that")
        with explain(self._path):
            changed = list(_changes(model, checkpoint))
        if changed:
            raise CheckpointError(
                f"the model differs from {self._path}, which it was loaded from, in {some(changed)}; a quantized model "
                "can only be saved unchanged, so load it again"
            )
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target / "model")
        with scratch(target / "model") as staging:
            values = checkpoint.quantization_config
            another = not target.samefile(checkpoint.path)
            if another:
                values = lasting_config(values)
                write_shards(staging, ((each, checkpoint.tensor(each)) for each in checkpoint.tensors.where), most)
            _write_configs(model, checkpoint.model_config, values, staging)
            sync_files(staging)
            if another:  # of files of two models nobody must read a third
                (target / "config.json").unlink(missing_ok=True)
                for file in [file for file in target.iterdir() if _WEIGHTS.fullmatch(file.name)]:
                    file.unlink()
            for file in sorted(staging.iterdir(), key=lambda file: file.name == "config.json"):
                file.replace(target / file.name)
            sync_directory(target)


def _changes(model: Any, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the names of what in a model is not what its checkpoint says: of tensors, or of layers put in its place."""
    dtype, current = model.config.dtype, model.state_dict()
    trusted = type(model).__module__.startswith("transformers_modules.")  # its own code runs already
    config = read_config(checkpoint.path, trust_remote_code=trusted)
    empty = EmptyModel(empty_model(config, dtype, kind=type(model)))
    names = StoredNames(empty.stacked, empty.names, checkpoint.float_names)
    empty.untie(checkpoint.tensors, names)
    modules = dict(model.named_modules())
    for name in filter(lambda name: names.known(f"{name}.weight"), checkpoint.layers):
        path = str(names.working(f"{name}.weight")).removesuffix(".weight")
        empty.model.set_submodule(path, nn.Identity())
        layer = modules.get(path)
        if not isinstance(layer, QuantLinear):
            yield path
            continue
        weight = checkpoint.weight(name).to(next(layer.buffers()).device)
        fresh = type(layer)(weight, None if layer.bias is None else checkpoint.bias(name), dtype)
        yield from _different(fresh.state_dict(prefix=f"{path}."), current)
    others = [name for name in checkpoint.other_names if names.known(name)]
    empty.fill(checkpoint.tensors, names, others, torch.device("cpu"))
    yield from _different(empty.model.state_dict(), current)
    yield from current


def _different(wanted: dict[str, Tensor], current: dict[str, Tensor]) -> Iterator[str]:
    """Take what is wanted out of `current`, and yield the names of what is not there, or not the same."""
    for name, tensor in wanted.items():
        found = current.pop(name, None)
        if found is None or tensor.is_meta or not same_bits(tensor.to("cpu", found.dtype), found):
            yield name


def _write_configs(model: Any, stored: dict[str, Any], quantization: dict[str, Any], directory: Path) -> None:
    """Write the configs of the model, with the class and the dtype of its files, which their config.json says."""
    config = json.loads(model.config.to_json_string())
    for key in ("dtype", "torch_dtype", "architectures", "quantization_config"):
        config.pop(key, None)
    own = {"dtype": stored.get("dtype") or stored.get("torch_dtype"), "architectures": stored.get("architectures")}
    config |= {key: value for key, value in own.items() if value}
    generation = json.loads(model.generation_config.to_json_string()) if model.can_generate() else None
    write_configs(directory, quantization, config, generation, None)


def _check_defaults(options: dict[str, Any]) -> None:
    """Refuse options of transformers that ask for something other than a whole checkpoint as it was."""
    known = inspect.signature(PreTrainedModel.save_pretrained).parameters
    for name, value in options.items():
        default = known[name].default if name in known else name == "safe_serialization"  # a habit of version 4
        if value != default:
            raise ConfigError(f"save_pretrained of a quantized model does not take {name}={value!r}; leave it out")
