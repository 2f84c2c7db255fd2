"""A float model whose residual stream is rotated: the same function, without channels that stand out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .errors import ArchitectureError
from .export.convert import check_apart
from .export.modules import list_of_names
from .export.shards import read_json, write_json, write_shards
from .export.staging import staged
from .hub import at_home, fetch
from .model import FloatModel
from .modes import in_plain_modes
from .quantizer.rotation import Rotation
from .settings import check_seed

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Those of which every Linear that reads the residual stream does so behind an RMSNorm, and nothing else touches it."""

_BLOCK = r"(model\.layers\.\d+)\."
_READERS = (  # what reads the residual stream, and behind which norm
    (re.compile(_BLOCK + r"self_attn\.[qkv]_proj\.weight"), r"\1.input_layernorm.weight"),
    (
        re.compile(_BLOCK + r"(?:mlp|block_sparse_moe)\.(?:experts\.\d+\.)?(?:gate|gate_proj|up_proj|w1|w3)\.weight"),
        r"\1.post_attention_layernorm.weight",
    ),
    (re.compile(r"lm_head\.weight"), "model.norm.weight"),
)
_WRITERS = re.compile(
    _BLOCK + r"(?:self_attn\.o_proj|(?:mlp|block_sparse_moe)\.(?:experts\.\d+\.)?(?:down_proj|w2))\.(?:weight|bias)"
)
_NORMS = re.compile(_BLOCK + r"(?:input|post_attention)_layernorm\.weight|model\.norm\.weight")
_INSIDE = re.compile(
    _BLOCK + r"(?:self_attn\.(?:[qkv]_proj\.bias|[qk]_norm\.weight|rotary_emb\.inv_freq)|mlp\.(?:gate|up)_proj\.bias)"
)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@in_plain_modes
def rotate(model: str | Path, out: str | Path, *, seed: int = 0, revision: str | None = None) -> None:
    """Write a float model that computes the same as another one, with its residual stream rotated.

    Every hidden state x becomes x Q: embeddings and what writes to the stream are multiplied by Q, what reads from it
    by its inverse, and the weights of the norms between go into what reads, so that they are 1 (arXiv 2405.16406, R1).
    No runtime has to know of it. An output layer that was the embedding gets weights of its own, because the last norm
    goes into it. Computed in float64, rounded once to the dtype of the files.

    Args:
        model: Folder of a float model, or its id on the Hub.
        out: Folder to write, new or empty.
        seed: Of the rotation.
        revision: Branch, tag or commit of a model on the Hub.

    Raises:
        ArchitectureError: One that is not among `ARCHITECTURES`, or that has a tensor of which nothing is known.
        ConfigError: `out` inside the model or around it, or a seed that is none.
        OutputExistsError: `out` is there already.
        GptqkitError: As `FloatModel` raises.
    """
    check_seed(seed)
    path, out = fetch(model, revision), Path(at_home(out))
    check_apart(path, out)
    described = read_json(path / "config.json")
    named = list_of_names(described.get("architectures"), f"{path / 'config.json'}: architectures")
    own = [name for name in named if name not in ARCHITECTURES]
    if own and "auto_map" in described:  # it could only be opened by running its code
        raise _refusal(own[0])
    source = FloatModel(path)
    name = type(source.model).__name__
    if name not in ARCHITECTURES:
        raise _refusal(name)
    unknown = [each for each in source.tensor_names if not _known(each)]
    if unknown:
        raise ArchitectureError(f"{name} cannot be rotated: nothing is known of its tensor {unknown[0]}")
    rotation = Rotation(source.model.config.hidden_size, seed)
    with staged(out) as directory:
        write_shards(directory, _tensors(source, rotation))
        source.copy_files(directory)
        config = {**read_json(directory / "config.json"), "tie_word_embeddings": False}
        config.pop("quantization_config", None)  # of FP8, which was multiplied out
        write_json(directory / "config.json", config)


def _refusal(name: str) -> ArchitectureError:
    return ArchitectureError(f"{name} cannot be rotated; that is known of {', '.join(ARCHITECTURES)}")


def _known(name: str) -> bool:
    patterns = (*(reader for reader, _ in _READERS), _WRITERS, _NORMS, _INSIDE)
    return name == _EMBEDDING or any(pattern.fullmatch(name) for pattern in patterns)


def _tensors(source: FloatModel, rotation: Rotation) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the rotated model, block by block."""
    for part in (None, *range(len(source.blocks))):
        tensors = dict(source.others(part, ()))
        if part is None and _HEAD not in tensors:
            tensors[_HEAD] = tensors[_EMBEDDING]
        for name, tensor in tensors.items():
            yield name, _turned(name, tensor, tensors, rotation).to(tensor.dtype)


def _turned(name: str, tensor: Tensor, beside: Mapping[str, Tensor], rotation: Rotation) -> Tensor:
    """Return a tensor of the rotated model, of one of the float model and those beside it."""
    if _NORMS.fullmatch(name):
        return torch.ones_like(tensor)
    if name == _EMBEDDING:
        return rotation(tensor)
    if _WRITERS.fullmatch(name):
        return rotation(tensor.T).T if tensor.dim() > 1 else rotation(tensor)
    for reader, norm in _READERS:
        found = reader.fullmatch(name)
        if found:
            return rotation(tensor.double() * beside[found.expand(norm)].double())
    return tensor
