"""A float model that is opened, not loaded: the weights of each block are read when its turn comes."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from .architecture import explain, open_empty, without_bars
from .errors import CheckpointError
from .export.names import StoredNames
from .export.shards import PICKLES, Shards, some
from .quantizer.modules import brought_in, find_blocks, output_layer
from .quantizer.stream import working_copy
from .quantizer.weights import InMemory, Weights

_OTHER_WEIGHTS = (*PICKLES, ".gguf", ".onnx", ".h5", ".msgpack", ".ot")


class FloatModel(Protocol):
    """A float model and its weights, a part at a time. A part is the number of a block, or None for everything else.

    Attributes:
        model: The transformers model; its weights may be on the meta device.
        weights: Brings the weights of a part to the device for a while.
        names: What the tensors are called in files.
        carried: Names of stored tensors that the model has no place for.
    """

    model: PreTrainedModel
    weights: Weights
    names: StoredNames
    carried: list[str]

    def tensors(self, part: int | None) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a part by name, as they are in the source; tied tensors once."""

    def identity(self) -> dict[str, Any]:
        """What tells this model from others, as plain values for JSON."""

    def copy_files(self, directory: Path) -> None:
        """Copy what belongs to the model beside its weights, but for what is there already."""


class LoadedModel:
    """A model in memory as a source; it is left as it was.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.weights: Weights = InMemory(model)
        self.names = StoredNames(model)
        self.carried: list[str] = []
        self._prefix = find_blocks(model)[0]

    def tensors(self, part: int | None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a part by name; tied tensors once."""
        seen: set[int] = set()
        chosen = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and part_of(name, self._prefix) == part:
                chosen[name] = tensor.detach()
            seen.add(id(tensor))
        yield from self.names.revert(chosen).items()

    def identity(self) -> dict[str, Any]:
        """Architecture, and a digest of names, shapes and some numbers of every tensor."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            some_of_it = tensor.flatten()[:: max(1, tensor.numel() // 1024)].float().cpu().contiguous()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + some_of_it.numpy().tobytes())
        return {"class": type(self.model).__name__, "weights": digest.hexdigest()}

    def copy_files(self, directory: Path) -> None:
        """A model in memory has no files."""


class StoredModel:
    """A folder of safetensors as a source. Only the tensors of the part at hand are in memory.

    Args:
        path_or_id: A directory, or the id of a model on the Hub, whose files are then fetched into the Hub's cache.
        trust_remote_code: Run code that the model brings along.

    Raises:
        DatasetUnavailableError: It cannot be found or fetched.
        CheckpointError: It is quantized, has no safetensors, or weights are missing or damaged.
        ArchitectureError: A model that transformers does not know, or only by running its code.
    """

    def __init__(self, path_or_id: str | Path, *, trust_remote_code: bool = False) -> None:
        with explain(path_or_id), without_bars():
            self.path = _local(path_or_id)
            self.model = open_empty(self.path, trust_remote_code=trust_remote_code)
            if (self.path / "generation_config.json").exists() and self.model.can_generate():
                self.model.generation_config = GenerationConfig.from_pretrained(self.path)
        self._dtype = self.model.config.dtype or torch.float32
        self.weights: Weights = self
        self._code = trust_remote_code
        self._where = Shards.open(self.path, None).where
        self._prefix, self._blocks = find_blocks(self.model)
        self.names = StoredNames(self.model, self._where)
        self._shares = {name: self.names.shares(name) for name in self._where}
        self.carried = [name for name, found in self._shares.items() if not found]
        found = {parameter for shares in self._shares.values() for parameter in shares}
        missing = set(self.model.state_dict()) - found - self._made_elsewhere()
        if missing:
            raise CheckpointError(f"{path_or_id} lacks {some(sorted(missing))}; fetch its files again")

    def outside(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Everything but the blocks, and but the output layer where that has weights of its own."""
        aside = brought_in(self.model, self._blocks)
        left = {id(tensor) for module in aside for tensor in module.parameters()}
        wanted = {
            name for name, tensor in self.model.named_parameters(remove_duplicate=False) if id(tensor) not in left
        }
        wanted |= {name for name, _ in self.model.named_buffers() if part_of(name, self._prefix) is None}
        chosen = [name for name, found in self._shares.items() if not wanted.isdisjoint(found)]
        return self._resident(self.model, chosen, device, dtype, leave=aside)

    def block(self, layer: int, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """The weights of one block."""
        chosen = [name for name in self._where if self._part(name) == layer]
        return self._resident(self._blocks[layer], chosen, device, dtype)

    def head(self, device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
        """The weights of the output layer."""
        output = output_layer(self.model)
        own = {id(tensor) for tensor in output.parameters()} if output is not None else set()
        wanted = {name for name, tensor in self.model.named_parameters() if id(tensor) in own}
        chosen = [name for name, found in self._shares.items() if not wanted.isdisjoint(found)]
        return self._resident(output or nn.Module(), chosen, device, dtype)

    def tensors(self, part: int | None) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of a part by name, as they are in the files."""
        for name in self._where:
            if self._part(name) == part:
                yield name, self._read(name)

    def identity(self) -> dict[str, Any]:
        """config.json, and per file of weights its size and a digest of its header and of pieces of its data."""
        files = sorted(set(self._where.values()))
        config = hashlib.sha256((self.path / "config.json").read_bytes()).hexdigest()
        return {"config.json": config, **{file.name: _digest(file) for file in files}}

    def copy_files(self, directory: Path) -> None:
        """Copy what belongs to the model beside its weights, but for what is there already and for code."""
        _copy_files(self.path, directory, code=self._code)

    def _part(self, name: str) -> int | None:
        """The part that a stored tensor belongs to."""
        return part_of(self._shares[name][0], self._prefix) if self._shares[name] else None

    def _read(self, name: str) -> Tensor:
        with self._open(self._where[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged, cut off or gone ({error}); fetch it again") from error

    def _made_elsewhere(self) -> set[str]:
        """Names in the model that need not be in the files."""
        tied: Mapping[str, str] = getattr(self.model, "all_tied_weights_keys", {})
        buffers = {name for name, _ in self.model.named_buffers()}
        ignored = self.model._keys_to_ignore_on_load_missing or ()
        return {
            name
            for name in self.model.state_dict()
            if name in buffers or name in tied or name in tied.values() or any(re.search(key, name) for key in ignored)
        }

    @contextmanager
    def _resident(
        self,
        module: nn.Module,
        names: list[str],
        device: torch.device,
        dtype: torch.dtype,
        leave: Sequence[nn.Module] = (),
    ) -> Iterator[None]:
        """The stored tensors `names` in their places in the model, on `device`; buffers of `module` too."""
        slots = [
            (owner, key, tensor)
            for owner in self.model.modules()
            for key, tensor in owner._parameters.items()
            if tensor is not None
        ]
        conversions = getattr(self.model, "_weight_conversions", None)
        try:
            with without_bars():
                self._load(names, device)
                self.model.tie_weights()
            with working_copy(module, device, dtype, leave=leave):
                yield
        finally:
            for owner, key, tensor in slots:
                owner._parameters[key] = tensor
            if conversions is None:
                self.model.__dict__.pop("_weight_conversions", None)
            else:
                self.model._weight_conversions = conversions

    def _load(self, names: list[str], device: torch.device) -> None:
        handles: dict[Path, Any] = {
            file: safe_open(file, framework="pt") for file in {self._where[name] for name in names}
        }
        state = {name: handles[self._where[name]].get_slice(name) for name in names}
        settings = LoadStateDictConfig(
            dtype=self._dtype,
            dtype_plan=self.model._get_dtype_plan(self._dtype),
            device_map={"": device},
            weight_mapping=get_model_conversion_mapping(self.model),
        )
        found, _ = convert_and_load_state_dict_in_model(self.model, state, settings)
        wrong = [*found.mismatched_keys, *found.error_msgs, *found.conversion_errors]
        if wrong:
            raise CheckpointError(
                f"{self.path} does not fit the model that its config.json describes: {some(map(str, wrong))}"
            )


def part_of(name: str, prefix: str) -> int | None:
    """The number of the block that a name in the model belongs to; None outside the blocks.

    >>> part_of("model.layers.3.mlp.up_proj.weight", "model.layers"), part_of("lm_head.weight", "model.layers")
    (3, None)
    """
    inner = name.removeprefix(f"{prefix}.")
    number = inner.split(".", 1)[0]
    return int(number) if inner != name and number.isdigit() else None


def _local(path_or_id: str | Path) -> Path:
    path = Path(path_or_id)
    if path.is_dir():
        return path
    return Path(
        snapshot_download(
            str(path_or_id), ignore_patterns=[f"*{kind}" for kind in (*PICKLES, ".gguf", ".onnx", ".h5", ".msgpack")]
        )
    )


def _digest(file: Path) -> str:
    """Of the size, the first mebibyte (the header) and 64 pieces of the rest: a whole file would take minutes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 20))
        for piece in range(64):
            stream.seek(size * piece // 64)
            digest.update(stream.read(4096))
    return digest.hexdigest()


def _copy_files(source: Path, target: Path, *, code: bool) -> None:
    for entry in sorted(source.iterdir()):
        there = target / entry.name
        if (
            entry.name.startswith(".")
            or entry.name == "README.md"
            or entry.name.endswith((*_OTHER_WEIGHTS, ".safetensors", ".index.json"))
        ):
            continue
        if entry.is_file() and not there.exists() and (code or entry.suffix != ".py"):
            shutil.copyfile(entry, there)
        elif entry.is_dir() and not entry.is_symlink() and (entry / "config.json").exists():
            shutil.copytree(entry, there, dirs_exist_ok=True)  # such as 1_Pooling of a sentence-embedding model
