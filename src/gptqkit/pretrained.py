"""What transformers' `from_pretrained` does with checkpoints in our formats: it lets `gptqkit.loading` load them.

Imported while transformers is, so that nothing of ours, and little of transformers, can be imported at the top.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.quantizers.base import HfQuantizer
from transformers.utils import quantization_config as theirs

from .errors import CheckpointError, ConfigError
from .export.autoround import plain_config
from .export.formats import declared_format
from .kernels.backends import check_backend
from .modes import in_plain_modes

if TYPE_CHECKING:
    import torch


class _Kept:
    """The quantization config of a checkpoint, kept as it is; transformers' own leave out what they do not know.

    A caller's `quantization_config=GPTQConfig(bits, backend=...)` sets the backend.
    """

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)
        self.quant_method = theirs.QuantizationMethod(values["quant_method"])
        self.backend = "auto"
        self._values = values

    def to_dict(self) -> dict[str, Any]:
        """Return what stood in config.json."""
        return copy.deepcopy(self._values)

    @classmethod
    def from_dict(cls, values: dict[str, Any], **options: Any) -> Any:
        """Return the config of a checkpoint that gptqkit reads; transformers' own for all others, such as FP8."""
        ours: Any = super()
        if values["quant_method"] != "gptq":
            try:
                declared_format(plain_config(values, "config.json"), "config.json")
            except CheckpointError:
                original: Any = next(kind for kind in cls.__mro__ if kind.__module__ == theirs.__name__)
                return original.from_dict(values, **options)
        return ours.from_dict(values, **options)


def _kept(original: type) -> type:
    """Return a class of the same name, which transformers compares with that of a caller's config."""
    return type(original.__name__, (_Kept, original), {"__module__": __name__})


GPTQConfig, AwqConfig = _kept(theirs.GPTQConfig), _kept(theirs.AwqConfig)
CompressedTensorsConfig, AutoRoundConfig = _kept(theirs.CompressedTensorsConfig), _kept(theirs.AutoRoundConfig)
CONFIGS = {
    "gptq": GPTQConfig,
    "awq": AwqConfig,
    "compressed-tensors": CompressedTensorsConfig,
    "auto-round": AutoRoundConfig,
}


def quantizer_maker(original: Any) -> Any:
    """Return what makes our quantizer for checkpoints that gptqkit reads, and the `original` one for all else."""

    def make_quantizer(config: Any, **options: Any) -> Any:
        return (Quantizer if isinstance(config, _Kept) else original)(config, **options)

    return make_quantizer


class Quantizer(HfQuantizer):  # type: ignore[misc]
    """Makes of the model that transformers made, without weights, the one that `gptqkit.load` would return.

    That happens at the end. While transformers reads the files, the model has no modules, so there is nothing to load.
    """

    def update_device_map(self, device_map: Any) -> dict[str, Any] | None:
        """Return a map with one device; "auto" is the first GPU, or else the CPU."""
        if isinstance(device_map, dict) and set(device_map) == {""}:
            return {"": _device(device_map[""])}
        if device_map in (None, "auto"):
            return device_map and {"": _device(device_map)}
        raise ConfigError(
            f"device_map is {device_map!r}, but gptqkit runs a model on one device; give auto, cpu, cuda or cuda:N"
        )

    def preprocess_model(
        self, model: Any, dtype: Any = None, device_map: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        """Empty the model, and remember what was in it."""
        super().preprocess_model(model, dtype, **kwargs)
        check_backend(self.quantization_config.backend)
        if not checkpoint_files or getattr(model.config, "distributed_config", None) is not None:
            raise ConfigError(
                "a quantized checkpoint is loaded from its own files into one process; leave out state_dict, tp_plan "
                "and distributed_config"
            )
        self._dtype, self._device = dtype, _device((device_map or {"": "cpu"})[""])
        self._files = [Path(file) for file in checkpoint_files]
        self._model = dict(model.__dict__)
        contents = ("_modules", "_parameters", "_buffers", "all_tied_weights_keys")
        model.__dict__.update({name: {} for name in contents})
        model.__dict__.update(_is_hf_initialized=True, _keys_to_ignore_on_load_unexpected={""})

    @in_plain_modes
    def postprocess_model(self, model: Any, **kwargs: Any) -> None:
        """Fill the model from its files."""
        from .architecture import initialize_buffers
        from .empty import EmptyModel
        from .export.checkpoint import open_checkpoint
        from .loading import install, ready
        from .saving import Saver

        for name in ("_is_hf_initialized", "_keys_to_ignore_on_load_unexpected"):
            del model.__dict__[name]
        model.__dict__.update(self.__dict__.pop("_model"))
        checkpoint = open_checkpoint(self._files[0].parent)
        if {file.name for file in checkpoint.tensors.files} != {file.name for file in self._files}:
            raise CheckpointError(f"{checkpoint.path} holds several models; keep one, and do not ask for a variant")
        empty = EmptyModel(initialize_buffers(model))
        backend = self.quantization_config.backend
        install(empty, checkpoint, device=self._device, dtype=self._dtype, backend=backend, whole=False)
        model.__dict__.update(ready(empty, checkpoint, self._device).__dict__)
        model.save_pretrained = Saver(model, checkpoint.path)
        super().postprocess_model(model, **kwargs)

    @property
    def is_trainable(self) -> bool:
        """Say that gradients of quantized weights do not exist."""
        return False

    def is_serializable(self) -> bool:
        """Say that transformers itself cannot save the model: a `Saver` does."""
        return False


def _device(device: Any) -> torch.device:
    from .loading import choose_device

    return choose_device(f"cuda:{device}" if isinstance(device, int) else device)
