"""Checkpoints and float models as transformers models that are ready to run."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from .architecture import (
    empty_model,
    explain,
    is_float,
    model_class,
    open_config,
    read_config,
    take_generation_config,
    without_bars,
)
from .bounds import confined
from .empty import EmptyModel
from .errors import CheckpointError, ConfigError, DatasetUnavailableError
from .export.checkpoint import Checkpoint, open_checkpoint
from .export.modules import list_of_names
from .export.names import StoredNames
from .export.scaled import FloatShards
from .export.shards import Shards, some
from .hub import at_home, fetch
from .kernels.backends import check_backend
from .kernels.linear import make_linear, summarize
from .model import FloatModel
from .modes import in_plain_modes
from .saving import Saver
from .targets import is_matrix, matrix
from .units import counted

_LOG = logging.getLogger("gptqkit")

# Buffers that old versions of transformers stored and that every model now makes by itself.
_STALE = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")

_TOKENIZER_FILES = ("tokenizer", "spiece.", "vocab.", "tekken.")  # how their names begin


@in_plain_modes
def load(
    path: Path | str,
    *,
    device: torch.device | str = "auto",
    backend: str = "auto",
    dtype: torch.dtype | str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load the model of a quantized checkpoint, in evaluation mode, and its tokenizer (None where it has none).

    Every quantized module is a `QuantLinear`; float weights are never made for them first. The model has two attributes
    beside its own: `gptqkit_backend`, a `BackendChoice` (also logged to "gptqkit" at INFO), and
    `gptqkit_quantization_config`, the checkpoint's quantization config. Its `save_pretrained` writes the checkpoint
    again, codes and scales to the bit, or refuses.

    Args:
        path: A directory in one of `FORMATS`, which gptqkit, GPTQModel, AutoGPTQ, AutoAWQ, optimum or llm-compressor
            wrote; a GGUF file, also of llama.cpp's tools; or the id of a model on the Hub, GGUF excepted, which is
            fetched into the Hub's cache.
        device: "auto" takes the first NVIDIA GPU if there is one, else the CPU.
        backend: "auto" or one of `BACKENDS`. With "auto", a GPU runs the bundled CUDA kernels; where they cannot serve
            a layer, torch does, and the logger warns and says why.
        dtype: Of activations and of all weights that are not quantized. "auto" is the checkpoint's, except that
            float16 becomes float32 on a CPU.
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Run the Python code that comes with the model, which transformers does not know.

    Raises:
        DatasetUnavailableError: There is no such folder, nor such a model on the Hub.
        CheckpointError: Files that are damaged or contradict each other; the message names the tensor.
        ArchitectureError: A model that transformers does not know, where no code from the checkpoint may run.
        BackendError: `backend` does not exist or cannot serve a layer.
        ConfigError: A device or dtype that cannot be, or a revision of a folder.
    """
    check_backend(backend)
    place = choose_device(device)
    path = at_home(path)
    checkpoint = open_checkpoint(path, revision=revision)
    with explain(path):
        with confined(checkpoint.path, checkpoint.tensors, trusted=trust_remote_code):
            config = read_config(checkpoint.path, trust_remote_code=trust_remote_code)
            wanted = _choose_dtype(dtype, config.dtype or torch.float16, place)
            built = empty_model(config, wanted, trust_remote_code=trust_remote_code)
        empty = EmptyModel(built)
    install(empty, checkpoint, device=place, dtype=wanted, backend=backend)
    model = ready(empty, checkpoint, place)
    model.save_pretrained = Saver(model, checkpoint.path)
    take_generation_config(model, checkpoint.path)
    return model, load_tokenizer(checkpoint.path, trust_remote_code=trust_remote_code)


def ready(empty: EmptyModel, checkpoint: Checkpoint, device: torch.device) -> Any:
    """Return the model that works, once all of a checkpoint was put into it, and log which backend runs it."""
    model: Any = empty.model
    empty.make([name for name, parameter in model.named_parameters() if parameter.is_meta], device)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        kind = type(model).__name__
        made = list_of_names(checkpoint.model_config.get("architectures"), "config.json: architectures")
        advice = f"open it as what it is, a {made[0]}" if made and kind not in made else "fetch its files again"
        raise CheckpointError(f"{checkpoint.path} lacks {some(missing)}, which {kind} has; {advice}")
    model.to(device).eval().requires_grad_(False)
    choice = model.gptqkit_backend = summarize(model)
    model.gptqkit_quantization_config = checkpoint.quantization_config
    _LOG.log(logging.WARNING if choice.fallback else logging.INFO, "backend %s", choice)
    return model


def install(
    empty: EmptyModel,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    cast: bool = False,
    whole: bool = True,
) -> None:
    """Put all tensors of a checkpoint, or of a part of one, into a model.

    `device` and `dtype` are those of activations; weights that are not quantized keep the dtype of the empty model,
    unless `cast`. With `whole`, a checkpoint that holds more than the model has is refused.

    Raises:
        CheckpointError: Tensors that do not fit the model.
        BackendError: `backend` cannot serve a layer.
    """
    names = StoredNames(empty.stacked, empty.names, checkpoint.float_names)
    empty.untie(checkpoint.tensors, names)
    places = {names.working(f"{name}.weight") for name in checkpoint.layers} - {None}
    twice = [name for name in checkpoint.other_names if names.working(name) in places]
    if twice:
        raise CheckpointError(f"{some(twice)}: the layer is quantized, too; remove the one that is not meant")
    unwanted = _unwanted(empty)
    for name in checkpoint.layers:
        if names.known(f"{name}.weight") or (whole and not unwanted.search(name)):
            path = _place(empty, checkpoint, names, name)
            bias = _bias(name, checkpoint.bias(name), empty.model.get_submodule(path))
            layer = make_linear(checkpoint.weight(name).to(device), bias, dtype, name=path, backend=backend)
            empty.model.set_submodule(path, layer)
    if whole:
        _check_rest(empty, checkpoint, names)
    others = [name for name in checkpoint.other_names if names.known(name)]
    empty.fill(checkpoint.tensors, names, others, device, dtype if cast else None)


def _place(empty: EmptyModel, checkpoint: Checkpoint, names: StoredNames, name: str) -> str:
    """Return the name of the Linear that a quantized layer stands for; refuse what does not fit."""
    model, spec = empty.model, checkpoint.layers[name]
    place = names.working(f"{name}.weight")
    if place is None or not place.endswith(".weight"):
        raise CheckpointError(
            f"{name} belongs to no module of {type(model).__name__}, which has for example "
            f"{some(module for module, _ in model.named_modules() if module)}; the model is built differently in this "
            "version of transformers"
        )
    path = place.removesuffix(".weight")
    owner = model.get_submodule(path)
    if not is_matrix(owner):
        raise CheckpointError(f"{name} is quantized, but the model has a {type(owner).__name__} there, no plain Linear")
    if place in (*empty.tied, *empty.tied.values()):
        raise CheckpointError(f"{name} is quantized, but its weight is tied to another; correct config.json")
    shape = matrix(owner).shape
    if shape != (spec.out_features, spec.in_features):
        raise CheckpointError(
            f"{name} stands for {spec.out_features} x {spec.in_features} weights (out x in), but the model that "
            f"config.json describes has {shape[0]} x {shape[1]}; fetch config.json again"
        )
    return path


def _bias(name: str, bias: Tensor | None, owner: Any) -> Tensor | None:
    """Return the bias that a layer is to have; AutoGPTQ stores zeros where the model has none."""
    if bias is None and owner.bias is not None:
        raise CheckpointError(f"{name}.bias is missing; fetch the files again")
    if bias is not None and owner.bias is None:
        if bias.any():
            raise CheckpointError(f"{name}.bias is not expected: the model has no bias there")
        return None
    return bias


def _unwanted(empty: EmptyModel) -> re.Pattern[str]:
    """Return what stored names match that the model leaves out, such as blocks that predict further tokens."""
    return re.compile("|".join([*_STALE, *(empty.stacked._keys_to_ignore_on_load_unexpected or ())]))


def _check_rest(empty: EmptyModel, checkpoint: Checkpoint, names: StoredNames) -> None:
    """Refuse stored tensors that the model has no place for."""
    meta = checkpoint.quantization_config.get("meta")
    allowed = {name for name, _ in empty.stacked.named_buffers()}
    passed = meta.get("passthrough_tensors") if isinstance(meta, dict) else None
    allowed |= {name for name in passed if isinstance(name, str)} if isinstance(passed, list) else set()
    unwanted = _unwanted(empty)
    rest = [name for name in checkpoint.other_names if not names.known(name)]
    unexpected = [name for name in rest if name not in allowed and not unwanted.search(name)]
    if unexpected:
        raise CheckpointError(
            f"{some(unexpected)}: no place for them in {type(empty.model).__name__}; config.json describes another "
            "model"
        )


def load_float(
    path_or_id: Path | str,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load a model that is not quantized, in evaluation mode, and its tokenizer (None where its directory has none).

    `device` and `dtype` are those of `load`.

    Raises:
        DatasetUnavailableError: It cannot be found or fetched, or has no safetensors.
        CheckpointError: It is quantized, or weights are missing.
        ArchitectureError: A model that transformers does not know, or only by running its code.
        ConfigError: A device or dtype that cannot be.
    """
    place, path = choose_device(device), fetch(path_or_id)
    with explain(path_or_id), without_bars(), confined(path, trusted=trust_remote_code):
        config = open_config(path, trust_remote_code=trust_remote_code)
        scaled = hasattr(config, "quantization_config")
        if not is_float(config):
            raise CheckpointError(f"{path_or_id} is quantized; give the float model")
        wanted = _choose_dtype(dtype, config.dtype or torch.float32, place)
        if not scaled:  # transformers would take FP8 for what it is without scales
            scaled = bool(FloatShards(Shards.of_folder(path), wanted).scaled)
        if scaled:
            source = FloatModel(path, trust_remote_code=trust_remote_code)
            return source.whole(place, wanted), load_tokenizer(source.path, trust_remote_code=trust_remote_code)
        kind = model_class(config, trust_remote_code=trust_remote_code)
        code = {"trust_remote_code": trust_remote_code} if kind is AutoModelForCausalLM else {}
        model, found = kind.from_pretrained(path, dtype=wanted, use_safetensors=True, output_loading_info=True, **code)
        if found["missing_keys"]:
            raise CheckpointError(f"{path_or_id} lacks {some(found['missing_keys'])}; fetch its files again")
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return model.to(place).eval().requires_grad_(False), tokenizer


def choose_device(device: torch.device | str) -> torch.device:
    """Return the device meant by `device`; "auto" is torch's current NVIDIA GPU if there is one, else the CPU.

    A GPU has its number: the threads in which transformers reads files have a current GPU of their own.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is {device!r}; give auto, cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; give auto, cpu, cuda or cuda:N")
    found = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= found:
        raise ConfigError(f"device is {device!r}, but torch sees {counted(found, 'NVIDIA GPU')}; give auto or cpu")
    return torch.device("cuda", torch.cuda.current_device()) if place.type == "cuda" and place.index is None else place


def _choose_dtype(dtype: torch.dtype | str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" and stored == torch.float16 else stored
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if named not in (torch.float16, torch.bfloat16, torch.float32):
        raise ConfigError(f"dtype is {dtype!r}; choose auto, float16, bfloat16 or float32")
    return named


def load_tokenizer(path: Path, *, trust_remote_code: bool) -> Any | None:
    """Return the tokenizer of a model; None where its directory has none."""
    if path.is_file():  # GGUF
        with explain(f"the tokenizer of {path}"):
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if not has_tokenizer(path):
        return None
    with explain(f"the tokenizer of {path}"):
        how = {"trust_remote_code": trust_remote_code, "local_files_only": not trust_remote_code}
        return AutoTokenizer.from_pretrained(path, **how)


def has_tokenizer(path: Path) -> bool:
    """Whether there is a tokenizer in a model's directory; GGUF files hold their own."""
    return path.is_file() or any(file.name.startswith(_TOKENIZER_FILES) for file in path.iterdir())


def open_tokenizer(tokenizer: Any, beside: Path | None = None, *, trust_remote_code: bool = False) -> Any:
    """Return a tokenizer as it is, or the one in a folder or of a Hub id; for None that of the model in `beside`.

    Raises:
        DatasetUnavailableError: There is none.
        ConfigError: It is neither.
    """
    if tokenizer is None and beside is not None:
        return load_tokenizer(beside, trust_remote_code=trust_remote_code)
    if not isinstance(tokenizer, (str, Path)):
        if tokenizer is not None and not callable(tokenizer):
            raise ConfigError(f"tokenizer is {tokenizer!r}; give a tokenizer, or the folder or Hub id of one")
        return tokenizer
    found = load_tokenizer(fetch(tokenizer, weights=False, tokenizer=True), trust_remote_code=trust_remote_code)
    if found is None:
        raise DatasetUnavailableError(f"{tokenizer} holds no tokenizer; give a folder with tokenizer.json")
    return found
