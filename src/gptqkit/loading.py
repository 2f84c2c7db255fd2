"""Checkpoints and float models as transformers models that are ready to run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .architecture import empty_model, explain, model_class, without_bars
from .errors import CheckpointError, ConfigError
from .export.reader import open_checkpoint
from .export.shards import read_json, some
from .installing import install
from .kernels.backend import check_backend

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
    with explain(path):
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # else transformers would put its own quantizer in charge
        stored = config.dtype or checkpoint.layer(next(iter(checkpoint.layers)))["scales"].dtype
        wanted = _choose_dtype(dtype, stored, place)
        model = empty_model(config, wanted)
    choice = install(model, checkpoint, backend=backend, device=place, dtype=wanted)
    model.to(place).eval().requires_grad_(False)
    with explain(path):
        if (checkpoint.path / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
        tokenizer = load_tokenizer(checkpoint.path, trust_remote_code=False)
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
    with explain(path_or_id), without_bars():
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
        if hasattr(config, "quantization_config"):
            raise CheckpointError(f"{path_or_id} is quantized; give its directory to gptqkit.load")
        wanted = _choose_dtype(dtype, config.dtype or torch.float32, place)
        kind = model_class(config, trust_remote_code=trust_remote_code)
        code = {"trust_remote_code": trust_remote_code} if kind is AutoModelForCausalLM else {}
        model, found = kind.from_pretrained(
            path_or_id, dtype=wanted, use_safetensors=True, output_loading_info=True, **code
        )
        if found["missing_keys"]:
            raise CheckpointError(f"{path_or_id} lacks {some(found['missing_keys'])}; fetch its files again")
        tokenizer = load_tokenizer(path_or_id, trust_remote_code=trust_remote_code)
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


def load_tokenizer(path_or_id: Path | str, *, trust_remote_code: bool) -> Any | None:
    """The tokenizer of a model; None where its directory has none."""
    path = Path(path_or_id)
    if path.is_dir() and not any((path / file).exists() for file in _TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
