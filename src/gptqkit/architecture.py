"""Models of transformers as a configuration describes them: the right class, built without weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.utils import logging as transformers_logging

from .calibration.batches import out_of_memory
from .errors import ArchitectureError, DatasetUnavailableError, GptqkitError
from .export.formats import find_quantization
from .export.gguf_file import GgufFile
from .export.scaled import has_scales

LONGEST_QUOTE = 300  # characters of what another library says


def model_class(config: PretrainedConfig, *, trust_remote_code: bool = False) -> Any:
    """Return the class that `config` names, be it a language model, a composite model or an encoder.

    AutoModelForCausalLM where the class is none of transformers' own, or the model's own code is trusted.
    """
    if not (trust_remote_code and getattr(config, "auto_map", None)):
        for name in config.architectures or ():
            found = getattr(transformers, name, None)
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                return found
    return AutoModelForCausalLM


def open_config(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of the model in a folder or a GGUF file."""
    if path.is_file():
        with explain(path):
            return GgufFile(path).complete(AutoConfig.from_pretrained(path.parent, gguf_file=path.name))
    file = path / "config.json"
    with explain(file if file.exists() else path):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def read_config(path: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of the model in a checkpoint, as if it were not quantized.

    What it says of quantization would put transformers' quantizers in charge.
    """
    config = open_config(path, trust_remote_code=trust_remote_code)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def take_generation_config(model: Any, path: Path) -> None:
    """Give a model what generation_config.json in its folder says, where there is one."""
    file = path / "generation_config.json"
    if file.exists() and model.can_generate():
        with explain(file):
            model.generation_config = GenerationConfig.from_pretrained(path)


def is_float(config: PretrainedConfig) -> bool:
    """Whether a model has no quantized weights, but for FP8 and MXFP4, which are read; then `config` forgets these."""
    quantization = find_quantization(config.to_dict())
    if quantization is not None and not has_scales(quantization):
        return False
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # else transformers would put its own quantizer in charge
    return True


def empty_model(
    config: PretrainedConfig, dtype: torch.dtype, *, kind: Any = None, trust_remote_code: bool = False
) -> Any:
    """Return the model of `config` in evaluation mode, parameters on the meta device; buffers have their first values.

    No memory is taken for weights, not even in passing: the stacked experts of one block can be larger than RAM.

    `kind` is the class; None for that of `model_class`.
    """
    kind = kind or model_class(config, trust_remote_code=trust_remote_code)
    with torch.device("meta"), meta_device_safe_creation_ops():
        if kind is AutoModelForCausalLM:
            model = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        else:
            model = kind._from_config(config, dtype=dtype)
    return initialize_buffers(model).eval().requires_grad_(False)


def initialize_buffers(model: Any) -> Any:
    """Give the buffers of a model on the meta device their first values; its parameters stay as they are."""
    # As transformers does after it has loaded a model: buffers such as inv_freq are in no file.
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    return model


@contextmanager
def explain(path_or_id: Path | str) -> Iterator[None]:
    """Turn whatever other libraries raise about a file, or the files of a model, into one line that names it.

    Rust's panics among it, which are no `Exception`.
    """
    try:
        yield
    except (GptqkitError, MemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if out_of_memory(error):
            raise
        said = " ".join(str(error).split())
        what = f"{path_or_id} cannot be read ({type(error).__name__}: {said[:LONGEST_QUOTE]})"
        if isinstance(error, OSError):
            raise DatasetUnavailableError(what) from error
        why = "it is damaged, or nothing that this version of transformers knows"
        if "trust_remote_code" in said:
            why = "trust_remote_code (--trust-remote-code) runs the code that comes with it"
        raise ArchitectureError(f"{what}; {why}") from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Silence transformers' progress bars: the library reports through callbacks only."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
