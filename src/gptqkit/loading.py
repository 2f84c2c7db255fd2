"""Checkpoints and float models as transformers models that are ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from .errors import ArchitectureError, CheckpointError, ConfigError, DatasetUnavailableError, GptqkitError
from .export.reader import Checkpoint, LayerSpec, open_checkpoint
from .export.shards import read_json, some
from .kernels.backend import BackendChoice, check_backend, choose_backend, make_linear, summarize
from .kernels.linear import QuantLinear
from .kernels.packed import PackedWeight

_LOG = logging.getLogger("gptqkit")

# Any of these means that a directory holds a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)

# Buffers that old versions of transformers stored and that every model now makes by itself.
_STALE = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")


def load(
    path: Path | str,
    *,
    device: torch.device | str = "auto",
    backend: str = "auto",
    dtype: torch.dtype | str = "auto",
) -> tuple[Any, Any]:
    """The model of a quantized checkpoint, in evaluation mode, and its tokenizer (None where it has none).

    Every quantized module is a `QuantLinear`; float weights are never made for them first. No code from the checkpoint
    is executed. The model has two attributes beside its own: `gptqkit_backend`, a `BackendChoice` (also logged to
    "gptqkit" at INFO), and `gptqkit_quantization_config`, the checkpoint's quantization config.

    Args:
        path: A directory that gptqkit, GPTQModel, AutoGPTQ or optimum wrote, in format gptq or gptq_v2.
        device: "auto" takes the first NVIDIA GPU if there is one, else the CPU.
        backend: "auto", "torch", "cuda", "cpu" or "cpu-int4"; see `kernels.backend`. With "auto", a GPU runs the
            bundled CUDA kernels; where they cannot serve a layer, torch does, and the logger warns and says why.
        dtype: Of activations and of all weights that are not quantized. "auto" is the checkpoint's, except that
            float16 becomes float32 on a CPU.

    Raises:
        CheckpointError: Files that are damaged or contradict each other; the message names the tensor.
        ArchitectureError: A model that transformers does not know without running code from the checkpoint.
        BackendError: `backend` does not exist or cannot serve a layer.
        ConfigError: A device or dtype that cannot be.
    """
    check_backend(backend)
    place = choose_device(device)
    checkpoint = open_checkpoint(path)
    with _explain(path):
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # else transformers would put its own quantizer in charge
        stored = config.dtype or checkpoint.layer(next(iter(checkpoint.layers)))["scales"].dtype
        wanted = _choose_dtype(dtype, stored, place)
        with init_empty_weights(include_buffers=False):  # buffers such as inv_freq are in no file
            model = AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=False)
    choice = _install_layers(model, checkpoint, backend, place, wanted)
    _install_tensors(model, checkpoint, place)
    model.to(place).eval().requires_grad_(False)
    with _explain(path):
        if (checkpoint.path / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
        tokenizer = _load_tokenizer(checkpoint.path, trust_remote_code=False)
    model.gptqkit_backend = choice
    model.gptqkit_quantization_config = checkpoint.quantization_config
    _LOG.log(logging.WARNING if choice.fallback else logging.INFO, "backend %s", choice)
    return model, tokenizer


def load_float(
    path_or_id: Path | str,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A model that is not quantized, in evaluation mode, and its tokenizer (None where its directory has none).

    Args:
        path_or_id: A directory, or the id of a model on the Hub.
        device: "auto" takes the first NVIDIA GPU if there is one, else the CPU.
        dtype: "stored" is the checkpoint's; "auto" too, except that float16 becomes float32 on a CPU.
        trust_remote_code: Run code that the model brings along.

    Raises:
        DatasetUnavailableError: It cannot be found or fetched, or has no safetensors.
        CheckpointError: It is quantized, or weights are missing.
        ArchitectureError: A model that transformers does not know, or only by running its code.
        ConfigError: A device or dtype that cannot be.
    """
    place = choose_device(device)
    with _explain(path_or_id), _without_bars():
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            raise CheckpointError(f"{path_or_id} is quantized; give its directory to gptqkit.load")
        wanted = _choose_dtype(dtype, config.dtype or torch.float32, place)
        model, found = AutoModelForCausalLM.from_pretrained(
            path_or_id,
            dtype=wanted,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
        if found["missing_keys"]:
            raise CheckpointError(f"{path_or_id} lacks {some(found['missing_keys'])}; fetch its files again")
        tokenizer = _load_tokenizer(path_or_id, trust_remote_code=trust_remote_code)
    return model.to(place).eval().requires_grad_(False), tokenizer


def is_quantized(path_or_id: Path | str) -> bool:
    """Whether this is a local directory that says it holds a quantized model.

    Raises:
        CheckpointError: Its config.json is damaged.
    """
    path = Path(path_or_id)
    if (path / "quantize_config.json").exists():
        return True
    return (path / "config.json").exists() and bool(read_json(path / "config.json").get("quantization_config"))


def choose_device(device: torch.device | str) -> torch.device:
    """The device meant by `device`; "auto" is torch's current NVIDIA GPU if there is one, else the CPU.

    Raises:
        ConfigError: No such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device is {device!r}; give auto, cpu, cuda or cuda:N") from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {device!r}; give auto, cpu, cuda or cuda:N")
    found = torch.cuda.device_count()
    if place.type == "cuda" and (place.index or 0) >= found:
        raise ConfigError(f"device is {device!r}, but torch sees {found} NVIDIA GPUs; give auto or cpu")
    return place


def _choose_dtype(dtype: torch.dtype | str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    if dtype == "stored":
        return stored
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" and stored == torch.float16 else stored
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if named not in (torch.float16, torch.bfloat16, torch.float32):
        raise ConfigError(f"dtype is {dtype!r}; choose auto, float16, bfloat16 or float32")
    return named


def _install_layers(
    model: nn.Module, checkpoint: Checkpoint, backend: str, device: torch.device, dtype: torch.dtype
) -> BackendChoice:
    """Put a `QuantLinear` in the place of every quantized module of `model`; what they run on."""
    modules = dict(model.named_modules())
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    choices = []
    for spec in checkpoint.layers.values():
        name = _full_name(model, spec.name, modules)
        if name is None:
            raise CheckpointError(
                f"{spec.name}.qweight belongs to no module of {type(model).__name__}, which has for example "
                f"{some(modules)}; the model is built differently in this version of transformers"
            )
        if f"{name}.weight" in (*tied, *tied.values()):
            raise CheckpointError(f"{spec.name} is quantized, but its weight is tied to another; correct config.json")
        packed = _read_layer(checkpoint, spec, name, modules[name], device)
        choices.append(choose_backend(backend, packed, dtype))
        model.set_submodule(name, make_linear(choices[-1], packed, dtype))
    return summarize(choices)


def _read_layer(
    checkpoint: Checkpoint, spec: LayerSpec, name: str, module: nn.Module, device: torch.device
) -> PackedWeight:
    """The words of a layer on `device`, checked against the module that they are to replace."""
    if isinstance(module, nn.Linear):
        shape = (module.out_features, module.in_features)
    elif isinstance(module, Conv1D):
        shape = (module.nf, module.nx)
    else:
        raise CheckpointError(f"{spec.name} is quantized, but the model has a {type(module).__name__} there, no Linear")
    if shape != (spec.out_features, spec.in_features):
        raise CheckpointError(
            f"{spec.name}.qweight stands for {spec.out_features} x {spec.in_features} weights (out x in), but the "
            f"model that config.json describes has {shape[0]} x {shape[1]}; fetch config.json again"
        )
    tensors = checkpoint.layer(spec.name)
    bias = tensors["bias"]
    if bias is None and module.bias is not None:
        raise CheckpointError(f"{spec.name}.bias is missing; fetch the files again")
    if bias is not None and module.bias is None:
        if bias.any():
            raise CheckpointError(f"{spec.name}.bias is not expected: the model has no bias there")
        bias = None  # AutoGPTQ stores zeros
    return PackedWeight(
        name=name,
        qweight=tensors["qweight"].to(device),
        qzeros=tensors["qzeros"].to(device),
        scales=tensors["scales"].to(device),
        g_idx=tensors["g_idx"].to(device),
        bias=None if bias is None else bias.to(device),
        bits=spec.bits,
        group_size=spec.group_size,
        zero_offset=spec.zero_offset,
        act_order=spec.act_order,
    )


def _install_tensors(model: Any, checkpoint: Checkpoint, device: torch.device) -> None:
    """Give `model` everything that is not quantized, in the dtypes that it was built with, and tie what is tied."""
    needed = model.state_dict()
    made_by_itself = {name for name, _ in model.named_buffers()} - set(needed)
    ignored = re.compile("|".join([*_STALE, *(model._keys_to_ignore_on_load_unexpected or ())]))
    state: dict[str, Tensor] = {}
    unexpected = []
    for stored_name in checkpoint.other_names:
        name = _full_name(model, stored_name, needed)
        if name is None:
            if stored_name not in made_by_itself and not ignored.search(stored_name):
                unexpected.append(stored_name)
            continue
        tensor, target = checkpoint.tensor(stored_name), needed[name]
        if tensor.shape != target.shape:
            raise CheckpointError(
                f"{stored_name} has shape {tuple(tensor.shape)}; the model that config.json describes needs "
                f"{tuple(target.shape)}"
            )
        state[name] = tensor.to(device, target.dtype)
    if unexpected:
        raise CheckpointError(
            f"{some(unexpected)}: no place for them in {type(model).__name__}; config.json describes another model"
        )
    missing = set(model.load_state_dict(state, strict=False, assign=True).missing_keys)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            missing -= {f"{name}.{key}" for key in module.state_dict()}
    # A file holds a tied weight once, under either name.
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    if missing:
        raise CheckpointError(f"{checkpoint.path} lacks {some(sorted(missing))}; fetch its files again")


def _full_name(model: Any, name: str, known: Iterable[str]) -> str | None:
    """`name` as `model` calls it: as stored, or with the prefix that checkpoints of the bare model leave out."""
    if name in known:
        return name
    prefixed = f"{model.base_model_prefix}.{name}"
    return prefixed if prefixed in known else None


def _load_tokenizer(path_or_id: Path | str, *, trust_remote_code: bool) -> Any | None:
    path = Path(path_or_id)
    if path.is_dir() and not any((path / file).exists() for file in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)


@contextmanager
def _explain(path_or_id: Path | str) -> Iterator[None]:
    """Turn what transformers raises about a model's files into our errors."""
    try:
        yield
    except GptqkitError:
        raise
    except OSError as error:
        raise DatasetUnavailableError(f"{path_or_id} cannot be loaded: {error}") from error
    except (KeyError, ValueError) as error:
        raise ArchitectureError(f"{path_or_id} is not a model that can be loaded: {error}") from error


@contextmanager
def _without_bars() -> Iterator[None]:
    """Silence transformers' progress bars: the library reports through callbacks only."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
