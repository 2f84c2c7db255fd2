"""What a folder that came from elsewhere may make us do while it is opened.

transformers believes config.json: it builds 100,000 blocks or embeddings of a trillion numbers before it compares a
shape, and fetches what a config names. Here the tensors in the files decide what can be built, and nothing is fetched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from .errors import CheckpointError
from .export.files import check_folder
from .export.shards import Shards, read_json

_LAYERS = 1000  # of which a config may speak, however few tensors there are
_PARAMETERS = 1000  # that may be made, ...
_BUFFERED = 1 << 28  # and numbers in buffers, which no file holds
_ONE_AT_A_TIME = threading.RLock()  # what is switched off meanwhile is so for all threads


@contextmanager
def confined(folder: Path, tensors: Shards | None = None, *, trusted: bool = False) -> Iterator[None]:
    """Open a folder without the network, its files checked, and models no larger than its tensors can fill.

    Of one whose code is `trusted` to run, the network is not limited. `tensors` are those of the folder, where they are
    open already.

    Raises:
        CheckpointError: As `check_folder`, or config.json describes another model than the one in the files.
    """
    described = folder  # a GGUF file, which says itself how many blocks it has
    if folder.is_dir():
        check_folder(folder)
        if tensors is None and any(folder.glob("*.safetensors")):
            tensors = Shards.of_folder(folder)
        described = folder / "config.json"
        _check_config(described, None if tensors is None else len(tensors.where))
    with _ONE_AT_A_TIME:
        before = constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = before or not trusted
        try:
            with nullcontext() if tensors is None else _bounded(described, tensors):
                yield
        finally:
            constants.HF_HUB_OFFLINE = before


@contextmanager
def _bounded(described: Path, tensors: Shards) -> Iterator[None]:
    """Stop the building of models that the tensors cannot fill; not that of other threads' models."""
    own = threading.get_ident()
    count, size = len(tensors.where), sum(file.stat().st_size for file in tensors.files)
    left = {"parameters": 8 * count + _PARAMETERS, "weights": 8 * size, "buffered": 8 * size + _BUFFERED}

    def made(kind: str) -> Any:
        def account(module: nn.Module, name: str, tensor: Tensor | None) -> None:
            if tensor is not None and threading.get_ident() == own:
                left[kind] -= tensor.numel()
                left["parameters"] -= kind == "weights"
                if min(left.values()) < 0 or not (tensor.numel() or kind == "buffered"):
                    what = f"{name} of a {type(module).__name__} is {tuple(tensor.shape)}"
                    raise _contradiction(described, what, f"hold {count} tensors and {size} bytes")

        return account

    with (
        register_module_parameter_registration_hook(made("weights")),
        register_module_buffer_registration_hook(made("buffered")),
    ):
        yield


def _check_config(file: Path, tensors: int | None) -> None:
    """Refuse a config that speaks of more layers than there are tensors, or would run code of the Hub."""
    for key, value in _entries(read_json(file)):
        if tensors is not None and "layer" in key and type(value) is int and value > max(_LAYERS, tensors):
            raise _contradiction(file, f"{key} is {value}", f"hold {tensors} tensors")
        if "attn_implementation" in key and "/" in str(value):
            raise CheckpointError(f"{file}: {key} is {value!r}, code that is not run; take the entry out")


def _entries(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys and values of a config and of those inside it."""
    for key, value in values.items() if isinstance(values, dict) else ():
        yield key, value
        yield from _entries(value)


def _contradiction(file: Path, described: str, held: str) -> CheckpointError:
    return CheckpointError(f"{file} describes another model: {described}, but the files {held}; fetch it again")
