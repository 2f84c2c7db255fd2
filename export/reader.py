"""Checkpoints opened without loading them: configs, headers and g_idx are checked, tensors stay on disk.

Reads what gptqkit, GPTQModel, AutoGPTQ and optimum write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from ..errors import CheckpointError
from ..quantizer.config import Format
from ..quantizer.quantized import QuantizedWeight
from .gptq import ZERO_OFFSET, check_index, check_layer, check_values, decode_zeros, from_tensors, trivial_index
from .quantization_config import QuantizationSettings, read_settings
from .shards import Shards, read_json, some

_PACKED = ("qweight", "qzeros", "scales", "g_idx")
_KEYS = (*_PACKED, "bias")


class LayerTensors(TypedDict):
    """The tensors of one quantized layer, as they lie in the file; g_idx is made where the file has none."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What is known of a quantized layer without reading its weights.

    Attributes:
        name: Full name of the module.
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        bits: 2, 3, 4 or 8.
        group_size: Columns per group (all columns where a group is a whole row).
        zero_offset: What to add to a stored zero: 1 in version 1, 0 in version 2.
        sym: Declared symmetric.
        has_bias: Whether the layer has a bias.
        act_order: Whether g_idx is more than k // group_size.
    """

    name: str
    in_features: int
    out_features: int
    bits: int
    group_size: int
    zero_offset: int
    sym: bool
    has_bias: bool
    act_order: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: Its directory.
        model_config: config.json.
        settings: What its quantization config declares.
        quantization_config: The quantization config as it stands in the file.
        layers: Every quantized layer by name, in the order of the files.
        other_names: Names of all tensors that belong to no quantized layer.
        files: The safetensors files, in order.
    """

    path: Path
    model_config: dict[str, Any]
    settings: QuantizationSettings
    quantization_config: dict[str, Any]
    layers: dict[str, LayerSpec]
    other_names: list[str]
    files: list[Path]
    _tensors: Shards = field(repr=False)

    @property
    def bits(self) -> int:
        """Bits that the quantization config declares for most layers."""
        return self.settings.bits

    @property
    def group_size(self) -> int | None:
        """Columns per group that the quantization config declares; None for one group per row."""
        return self.settings.group_size

    @property
    def sym(self) -> bool:
        """Whether the quantization config declares symmetric groups."""
        return self.settings.sym

    @property
    def desc_act(self) -> bool:
        """Whether the quantization config declares act-order; `LayerSpec.act_order` says what the tensors hold."""
        return self.settings.desc_act

    @property
    def format(self) -> Format:
        """The layout, "gptq" or "gptq_v2"."""
        return self.settings.format

    @property
    def tensor_names(self) -> list[str]:
        """The names of all tensors, in the order of the files."""
        return self._tensors.names

    def tensor(self, name: str) -> Tensor:
        """The tensor called `name`, mapped from its file: nothing is read before its values are used.

        Raises:
            CheckpointError: No such tensor.
        """
        return self._tensors.get(name)

    def layer(self, name: str) -> LayerTensors:
        """The tensors of a quantized layer, mapped from the file, after their small ones have been checked.

        Raises:
            CheckpointError: No such layer, or values that no reader could use.
        """
        spec = self._spec(name)
        tensors = self._tensors.below(name, _KEYS)
        check_values(name, tensors, bits=spec.bits, sym=spec.sym, format=self.format)
        return {
            "qweight": tensors["qweight"],
            "qzeros": tensors["qzeros"],
            "scales": tensors["scales"],
            "g_idx": tensors["g_idx"] if "g_idx" in tensors else trivial_index(spec.in_features, spec.group_size),
            "bias": tensors.get("bias"),
        }

    def quantized_weight(self, name: str) -> QuantizedWeight:
        """The codes, scales and zeros of a quantized layer.

        Raises:
            CheckpointError: No such layer, values that no reader could use, or bfloat16 scales that float16 cannot
                hold.
        """
        spec = self._spec(name)
        return from_tensors(
            name,
            self._tensors.below(name, _KEYS),
            bits=spec.bits,
            group_size=spec.group_size,
            sym=spec.sym,
            format=self.format,
        )

    def zeros(self, name: str) -> Tensor:
        """The zeros of a quantized layer, (groups, out) int16, without reading its weights."""
        spec = self._spec(name)
        return decode_zeros(self.tensor(f"{name}.qzeros"), spec.bits, self.format)

    def _spec(self, name: str) -> LayerSpec:
        if name not in self.layers:
            raise CheckpointError(f"{self.path} has no quantized layer {name!r}; it has {some(self.layers)}")
        return self.layers[name]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint in the directory `path`, checked: configs, index, headers, shapes, dtypes and g_idx.

    Raises:
        CheckpointError: A file is missing, damaged, contradictory or of an unknown format; the message names the file
            or the tensor.
        OSError: A file that cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the directory that holds config.json")
    model_config = read_json(path / "config.json")
    quantization_config = _quantization_config(path, model_config)
    settings = read_settings(quantization_config, str(path))
    tensors = Shards.open(path, quantization_config.get("model_file_base_name"))
    layers = _layers(tensors, settings)
    own = {f"{name}.{key}" for name in layers for key in _KEYS}
    return Checkpoint(
        path=path,
        model_config=model_config,
        settings=settings,
        quantization_config=quantization_config,
        layers=layers,
        other_names=[name for name in tensors.names if name not in own],
        files=tensors.files,
        _tensors=tensors,
    )


def _quantization_config(path: Path, model_config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's quantization_config, or quantize_config.json; both, where both are there, must agree."""
    inside = model_config.get("quantization_config")
    beside = read_json(path / "quantize_config.json") if (path / "quantize_config.json").exists() else None
    if inside is None and beside is None:
        raise CheckpointError(
            f"{path} is not quantized: config.json has no quantization_config and there is no quantize_config.json"
        )
    if inside is not None and not isinstance(inside, dict):
        raise CheckpointError(f"{path / 'config.json'}: quantization_config is no JSON object; fetch the file again")
    if inside is not None and beside is not None:
        for key in ("bits", "group_size", "checkpoint_format"):
            if key in inside and key in beside and inside[key] != beside[key]:
                raise CheckpointError(
                    f"{path}: config.json says {key} {inside[key]!r} but quantize_config.json says {beside[key]!r}; "
                    "correct the wrong one"
                )
    return {**(beside or {}), **(inside or {})}


def _layers(tensors: Shards, settings: QuantizationSettings) -> dict[str, LayerSpec]:
    """Every quantized layer, its tensors' shapes and dtypes checked against each other and against the settings."""
    layers = {}
    for full_name in tensors.names:
        name, _, key = full_name.rpartition(".")
        if key not in _PACKED or name in layers:
            continue
        bits, group_size, sym = settings.for_module(name)
        found = tensors.below(name, _KEYS)
        size = check_layer(name, found, bits=bits, group_size=group_size)
        check_index(name, found)
        columns = found["qweight"].shape[0] * 32 // bits
        layers[name] = LayerSpec(
            name=name,
            in_features=columns,
            out_features=found["qweight"].shape[1],
            bits=bits,
            group_size=size,
            zero_offset=ZERO_OFFSET[settings.format],
            sym=sym,
            has_bias="bias" in found,
            act_order="g_idx" in found and not found["g_idx"].equal(trivial_index(columns, size)),
        )
    if not layers:
        raise CheckpointError(f"no tensor of {tensors.files[0].parent} is quantized: none ends in .qweight")
    return layers
