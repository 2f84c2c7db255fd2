"""A model on disk: opened, not loaded. The weights of a part, such as a block, are read when its turn comes."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .architecture import explain, take_generation_config, without_bars
from .empty import check_finite, open_empty
from .errors import CheckpointError
from .export.files import copy_beside
from .export.modules import FUSED, split_name
from .export.names import StoredNames
from .export.scaled import FloatShards
from .export.shards import Shards, read_json, some
from .hub import UNUSED, fetch
from .targets import find_blocks, is_tied, output_layer
from .units import counted


class FloatModel:
    """A folder of safetensors, or a model of the Hub that is fetched into its cache, as the source of a quantization.

    Only the tensors of the part at hand are in memory.

    Attributes:
        path: The directory.
        trusted: Whether its own code may run.
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
        self.trusted = trust_remote_code
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
        """Return the rows and columns of FP8 tensors that share a scale, where config.json says so.

        Under the name that transformers' own quantizer gives them, or in the groups of compressed-tensors.
        """
        quantization = read_json(self.path / "config.json").get("quantization_config")
        if not isinstance(quantization, dict):
            return None
        groups = quantization.get("config_groups")
        weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
        tiles = [each["block_structure"] for each in weights if each and each.get("block_structure")]
        if any(tile != tiles[0] for tile in tiles):
            raise CheckpointError(f"FP8 tensors of {self.path} have tiles of different sizes, {tiles}; not read here")
        return quantization.get("weight_block_size") or next(iter(tiles), None)

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
            check_finite(name, self._tensors.get(name))
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
        self.empty.make(self._absent, device, dtype)
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

    def stored_bytes(self) -> tuple[int, dict[str, int]]:
        """Return the bytes of all stored tensors, and by its name those of each value of a tensor of the model."""
        total, each = 0, dict[str, int]()
        for stored in self._tensors.where:
            meta, own = self._tensors.meta(stored), self.names.working(stored)
            total += meta.nbytes
            apart = [name for parameter in self.names.parameters(stored) for name in self._apart(parameter)]
            each |= dict.fromkeys(apart if own is None else [own], meta.itemsize)
        return total, each

    def identity(self) -> dict[str, Any]:
        """Return what tells this model from others: digests of config.json and, in part, of the files of weights."""
        config = hashlib.sha256((self.path / "config.json").read_bytes()).hexdigest()
        return {"config.json": config, **{file.name: _digest(file) for file in sorted(self._tensors.files)}}

    def copy_files(self, directory: Path) -> None:
        """Copy what belongs to the model beside its weights, but for what is there already and for code."""
        leave = ("README.md", ".safetensors", ".index.json", *UNUSED, *(() if self.trusted else (".py",)))
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
        known = [split_name(name) for name in self._tensors.where.keys() - self.passthrough]
        alike, counts = {(prefix, inner) for prefix, _, inner in known}, Counter[str]()
        for prefix, number, _ in known:  # of the blocks of a list
            counts[prefix] = max(counts[prefix], int(number or -1) + 1)
        ignored = "|".join(self.empty.stacked._keys_to_ignore_on_load_unexpected or ())
        predicting = getattr(self.model.config.get_text_config(), "num_nextn_predict_layers", None) or 0
        extra: dict[str, int] = {}
        for name in self.passthrough:
            prefix, number, inner = split_name(name)
            more = int(number or -1) >= counts[prefix] + predicting and (prefix, inner) in alike
            if more and not (ignored and re.search(ignored, name)):
                extra[name] = counts[prefix]
        if extra:
            raise CheckpointError(
                f"{self.path} holds {some(extra)}, but config.json describes "
                f"{counted(next(iter(extra.values())), 'block')}; fetch config.json again"
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
        found = {name for name, tensor in self.model.named_parameters() if id(tensor) in own}
        return found - self._tied()  # parameters on the meta device are not the same one any more

    def _made_elsewhere(self) -> set[str]:
        """Return the names in the model that need not be in the files."""
        model = self.empty.stacked
        others = self._tied() | {name for name, _ in model.named_buffers()}
        ignored = model._keys_to_ignore_on_load_missing or ()
        return others | {name for name in model.state_dict() if any(re.search(key, name) for key in ignored)}

    def _tied(self) -> set[str]:
        """Return the names of parameters that are tied to others."""
        return {*self.empty.tied, *self.empty.tied.values()}


def _return_memory() -> None:
    """Give freed memory back to the system: glibc keeps some, which comes to more from block to block."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


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
