"""A GGUF file as it is read: its metadata, and its tensors under the names that transformers gives them.

Nothing in the file is believed: every length is compared with what is there before anything is made of it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .blocks import BLOCKS, decode
from .files import check_file
from .gguf_model import (
    ARCHITECTURES,
    FULL_EVERY,
    Architecture,
    in_halves,
    module_name,
    query_scalar,
    yarn_attention_factor,
)

FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""By ggml's number of the type."""

_KINDS = {kind.number: kind for kind in BLOCKS.values()}
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))  # of metadata, for struct
_STRING, _ARRAY = 8, 9
_UNREAD = {  # by the name that transformers gives a setting: what its reader of GGUF leaves out
    "head_dim": "attention.key_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufFile:
    """An opened GGUF file, under the names that transformers gives its tensors, as safetensors' handle of a file.

    Matrices in blocks of `BLOCKS` are tensors `MODULE.TYPE` of whole blocks, but for the embedding, which is decoded.

    Raises:
        CheckpointError: The file is damaged, or of an architecture or with tensors that are not read here.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        check_file(file)
        empty = not file.stat().st_size
        self._data = cast(Any, np.zeros(0, np.uint8) if empty else np.memmap(file, mode="c", dtype=np.uint8))
        try:
            header = _Header(memoryview(self._data))
        except NotImplementedError as error:
            raise CheckpointError(f"{file} holds {error}; {', '.join(BLOCKS)} and floats are read here") from error
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise CheckpointError(f"{file} is damaged or cut off ({error}); fetch it again") from error
        self.metadata = header.metadata
        parts = self.metadata.get("split.count", 1)
        if parts != 1:  # the first of them alone says what model it is
            raise CheckpointError(f"{file} is one of {parts} parts; join them with llama-gguf-split --merge")
        self.architecture = self._architecture()
        blocks = {int(found[1]) for name in header.tensors if (found := re.match(r"blk\.(\d{1,6})\.", name))}
        count = self.metadata.get(f"{self.architecture.name}.block_count")
        if blocks != set(range(len(blocks))) or count != len(blocks):
            raise CheckpointError(f"{file} speaks of {count} blocks and holds {len(blocks)}; fetch it again")
        self._factors = {name: header.tensors[name] for name in _FACTORS if name in header.tensors}
        for name, (_, number, _) in self._factors.items():
            if number:
                raise CheckpointError(f"{file}: {name} is of GGML type {number}; llama.cpp writes F32, type 0")
        if tuple(self._factors) not in ((), _FACTORS[:1], _FACTORS[1:]):
            raise CheckpointError(f"{file} holds {' and '.join(self._factors)} only; fetch it again")
        self._tensors: dict[str, tuple[int, int, tuple[int, ...], int | None]] = {}
        for name, (shape, number, start) in header.tensors.items():
            for full_name, expert in self._names(name, shape, number):
                if full_name in self._tensors:
                    raise CheckpointError(f"{file}: {name} stands for {full_name}, which is there already")
                self._tensors[full_name] = start, number, shape, expert

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor, mapped from the file where its rows are in transformers' order there."""
        start, number, shape, expert = self._tensors[name]
        kind = _KINDS.get(number)
        size = _nbytes(shape, number)
        rows = math.prod(shape[1:])
        raw = torch.from_numpy(np.asarray(self._data[start : start + size]))
        tensor = raw.view(rows, -1) if kind else raw.view(FLOATS[number]).view(shape[::-1])
        if expert is not None:
            tensor = tensor.view(shape[2], shape[1], -1)[expert]
        module, _, suffix = name.rpartition(".")
        if kind is not None and suffix == "weight":
            tensor = decode(kind, tensor).dequantize()
        heads = self._heads(module)
        if heads and tensor.shape[0] % (2 * heads):
            raise CheckpointError(f"{self._file}: {name} has {tensor.shape[0]} rows for {heads} heads; fetch it again")
        tensor = in_halves(tensor, heads) if heads else tensor
        return tensor - self.architecture.shift if self.architecture.shift and "norm" in module else tensor

    get_slice = get_tensor

    def meta(self, name: str) -> Tensor:
        """Return the shape and dtype of a tensor, as one on the meta device; nothing is read or decoded."""
        _, number, shape, expert = self._tensors[name]
        kind, sizes = _KINDS.get(number), shape[::-1] if expert is None else shape[1::-1]
        dtype = torch.float32 if kind else FLOATS[number]
        if kind and not name.endswith(".weight"):
            sizes, dtype = (*sizes[:-1], sizes[-1] // kind.columns * kind.size), torch.uint8
        return torch.empty(sizes, dtype=dtype, device="meta")

    def nbytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in the file."""
        _, number, shape, expert = self._tensors[name]
        return _nbytes(shape, number) // (1 if expert is None else shape[2])

    def complete(self, config: Any) -> Any:
        """Return transformers' config of the file with what it does not read, or llama.cpp takes for granted."""
        name, get = self.architecture.name, self.metadata.get
        if self.architecture is ARCHITECTURES["mixtral"]:  # read as a Llama
            from transformers import MixtralConfig  # here, because it takes long

            values = config.to_dict() | {"architectures": ["MixtralForCausalLM"]}
            del values["model_type"]
            config = MixtralConfig(**values)
        for key, ours in _UNREAD.items():
            if hasattr(config, key) and f"{name}.{ours}" in self.metadata:
                setattr(config, key, get(f"{name}.{ours}"))
        if hasattr(config, "query_pre_attn_scalar"):
            sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim
            config.query_pre_attn_scalar = query_scalar(name, *sizes)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)  # gemma3
        rope.update(self._rope(config.max_position_embeddings))
        if rope.get("rope_type") == "longrope" and hasattr(config, "original_max_position_embeddings"):  # phi3
            config.original_max_position_embeddings = rope["original_max_position_embeddings"]
        rotated, size = get(f"{name}.rope.dimension_count"), get(f"{name}.attention.key_length")
        if rotated and size and rotated != size:  # phi3
            rope["partial_rotary_factor"] = rotated / size
        pairs = (rotated or size or config.hidden_size // config.num_attention_heads) // 2
        if any(len(rope.get(key, [0] * pairs)) != pairs for key in ("short_factor", "long_factor")):
            raise CheckpointError(f"{self._file}: tensors of rotary frequencies do not have {pairs} values")
        if name in FULL_EVERY:
            config.layer_types = self._layer_types(config.num_hidden_layers)
        if name == "gemma3":
            config.rope_parameters["sliding_attention"]["rope_theta"] = get("gemma3.rope.freq_base_swa", 10000.0)
        return config

    def _layer_types(self, layers: int) -> list[str]:
        """Return how layers attend, as transformers calls it."""
        name = self.architecture.name
        sliding = self.metadata.get(f"{name}.attention.sliding_window_pattern", FULL_EVERY[name])
        if not self.metadata.get(f"{name}.attention.sliding_window", name == "gemma2"):
            sliding = [False] * layers
        if type(sliding) is int:  # where 0 is none
            sliding = [not sliding or (layer + 1) % sliding for layer in range(layers)]
        if not isinstance(sliding, list) or len(sliding) != layers:
            raise CheckpointError(f"{self._file}: sliding_window_pattern is {sliding!r} for {layers} layers")
        return ["sliding_attention" if each else "full_attention" for each in sliding]

    def _rope(self, positions: int) -> dict[str, Any]:
        """Return what the file says of scaled rotary positions, as transformers calls it."""
        own = f"{self.architecture.name}.rope.scaling."
        kind, factor = self.metadata.get(f"{own}type", "none"), self.metadata.get(f"{own}factor", 1.0)
        original = self.metadata.get(f"{own}original_context_length", positions)
        scale = self.metadata.get(f"{own}attn_factor", 1.0)
        if self._factors:  # where both are Llama 3.1's, longrope takes them as they are
            factors = {
                f"{length}_factor": self._floats(f"rope_factors_{length}.weight") for length in ("short", "long")
            }
            more = {"factor": 1.0, "attention_factor": scale, "original_max_position_embeddings": original}
            return {"rope_type": "longrope", **factors, **more}
        if kind == "yarn":
            more = {"attention_factor": scale * yarn_attention_factor(factor)}
            return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original, **more}
        return {"rope_type": kind, "factor": factor} if kind == "linear" else {}

    def _floats(self, name: str) -> list[float]:
        """Return the values of a tensor of rotary frequencies, or of that which stands for all of them."""
        shape, number, start = self._factors.get("rope_freqs.weight") or self._factors[name]
        raw = torch.from_numpy(np.asarray(self._data[start : start + _nbytes(shape, number)]))
        values: list[float] = raw.view(torch.float32).tolist()
        return values

    def _architecture(self) -> Architecture:
        name = self.metadata.get("general.architecture")
        for kind, found in ARCHITECTURES.items():
            if found.name == name and (kind == "mixtral") == (
                name == "llama" and "llama.expert_count" in self.metadata
            ):
                return found
        known = dict.fromkeys(each.name for each in ARCHITECTURES.values())
        raise CheckpointError(f"{self._file} is of the architecture {name!r}; {', '.join(known)} are read here")

    def _names(self, name: str, shape: tuple[int, ...], number: int) -> Iterator[tuple[str, int | None]]:
        """Yield the names in transformers' model of one tensor: one, or one per expert."""
        stem, _, suffix = name.rpartition(".")
        module = module_name(stem, self.architecture.modules)
        if name in _FACTORS:  # `_rope` reads them
            return
        if module is None or suffix not in ("weight", "bias") or (suffix == "bias" and number not in FLOATS):
            raise CheckpointError(f"{self._file} holds {name}, which {self.architecture.name} is not known to have")
        stacked = "{}" in module
        if len(shape) != (3 if stacked else 1 if "norm" in module or suffix == "bias" else 2):
            raise CheckpointError(f"{self._file}: {name} has {len(shape)} dimensions; fetch it again")
        if number in _KINDS and suffix == "weight" and stem != "token_embd":
            suffix = _KINDS[number].name
        for expert in range(shape[2]) if stacked else (None,):
            yield f"{module.format(expert)}.{suffix}", expert

    def _heads(self, module: str) -> int:
        """Return the heads of a projection whose rows stand in another order; 0 for all others."""
        key = {"q_proj": "head_count", "k_proj": "head_count_kv"}.get(module.rpartition(".")[2])
        if key is None or not self.architecture.rotated:
            return 0
        name = self.architecture.name
        heads = self.metadata.get(f"{name}.attention.{key}", self.metadata.get(f"{name}.attention.head_count"))
        if type(heads) is not int or heads < 1:
            raise CheckpointError(f"{self._file}: {name}.attention.{key} is {heads!r}; fetch it again")
        return heads


class _Header:
    """The metadata of a file, but for arrays, and of every tensor its dimensions, its type and where it begins.

    Raises:
        ValueError, struct.error: Anything that does not fit into the file.
        NotImplementedError: A tensor of a type that is unknown here.
    """

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, 4
        if bytes(data[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version, tensors, entries = self._take("I"), self._take("Q"), self._take("Q")
        if version not in (2, 3):
            raise ValueError(f"version {version}, where 2 and 3 are read")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            self._entry()
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name, axes = self._text(), self._take("I")
            if name in self.tensors or not 1 <= axes <= 4:
                raise ValueError(f"two tensors {name}, or one of {axes} dimensions")
            shape = tuple(self._take("Q") for _ in range(axes))
            self.tensors[name] = shape, self._take("I"), self._take("Q")
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {alignment!r}")
        begin = -(-self._place // alignment) * alignment
        for name, (shape, number, start) in self.tensors.items():
            size = _nbytes(shape, number)
            if not size or start % 8 or begin + start + size > len(data):
                raise ValueError(f"{name}, {shape}, of {size} bytes from {start} on")
            self.tensors[name] = shape, number, begin + start

    def _entry(self) -> None:
        key, kind = self._text(), self._take("I")
        if key in self.metadata:
            raise ValueError(f"two values of {key}")
        if kind == _ARRAY and key.endswith("sliding_window_pattern"):
            self.metadata[key] = self._scalars()
        elif kind == _ARRAY:
            self._skip_array()
        elif kind == _STRING:
            self.metadata[key] = self._text()
        elif kind in _SCALARS:
            self.metadata[key] = self._take(_SCALARS[kind])
        else:
            raise ValueError(f"a value of type {kind}")

    def _take(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._place)
        self._place += struct.calcsize(form)
        return value

    def _text(self) -> str:
        begin = self._skip(self._take("Q"))
        return bytes(self._data[begin : self._place]).decode()

    def _skip(self, length: int) -> int:
        """Go on by `length` bytes; return where they begin."""
        begin = self._place
        if length > len(self._data) - begin:
            raise ValueError(f"{length} bytes at {begin}")
        self._place += length
        return begin

    def _scalars(self) -> list[Any]:
        """Return an array of scalars."""
        kind, length = self._take("I"), self._take("Q")
        if kind not in _SCALARS:
            raise ValueError(f"an array of values of type {kind}")
        form = f"<{length}{_SCALARS[kind]}"
        begin = self._skip(length * struct.calcsize(f"<{_SCALARS[kind]}"))
        return list(struct.unpack_from(form, self._data, begin))

    def _skip_array(self) -> None:
        kind, length = self._take("I"), self._take("Q")
        if kind == _STRING:
            for _ in range(length):
                self._skip(self._take("Q"))
        elif kind in _SCALARS:
            self._skip(length * struct.calcsize(f"<{_SCALARS[kind]}"))
        else:
            raise ValueError(f"an array of values of type {kind}")


def _nbytes(shape: Sequence[int], number: int) -> int:
    """Return the bytes of a tensor, dimensions being GGUF's.

    NotImplementedError for a type that is unknown here, ValueError for rows of broken blocks.
    """
    kind = _KINDS.get(number)
    if kind is None and number not in FLOATS:
        raise NotImplementedError(f"a tensor of ggml's type {number}")
    if kind is None:
        return math.prod(shape) * FLOATS[number].itemsize
    if shape[0] % kind.columns:
        raise ValueError(f"rows of {shape[0]} are no whole blocks of {kind.columns}")
    return math.prod(shape) // kind.columns * kind.size
