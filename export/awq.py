"""AWQ's gemm layout: 4 bits, groups in the order of the columns, asymmetric or symmetric.

Of a layer with K inputs, N outputs and G groups:

    qweight   int32 (K, N / 8)     codes
    qzeros    int32 (G, N / 8)     zero points 0 ... 15
    scales    float16 (G, N)       (bfloat16 is read, never written)

Of every 8 outputs a word holds, from its lowest 4 bits on, the 0th, 2nd, 4th, 6th, 1st, 3rd, 5th and 7th.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, ConfigError, ShapeError
from ..quantizer.config import QuantizeConfig
from ..quantizer.grid import IntegerZeroPoint
from ..quantizer.quantized import QuantizedWeight
from . import gptq
from .bits import pack, unpack
from .formats import Declared, Format, LayerSpec
from .layers import BIAS, SCALES, WORDS, check_kinds, check_shapes, make_weight, refuse_act_order, stored_grid
from .modules import FLOAT, list_of_names, meta_of, names_in_float, outside_blocks, patterns_of, skipped_modules

_BITS, _PER_WORD = 4, 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 outputs stands at each place of a word
_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)
_KINDS = {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES, "bias": BIAS}


def check_spec(spec: LayerSpec) -> None:
    """Raise ConfigError or ShapeError for what AWQ cannot hold."""
    if spec.bits != _BITS:
        raise ConfigError(f"awq holds 4-bit codes only, not {spec.bits}-bit; compressed-tensors and gptq_v2 hold them")
    refuse_act_order(spec, "awq")
    if spec.out_features % _PER_WORD or spec.in_features % spec.group_size:
        raise ShapeError(
            f"{(spec.out_features, spec.in_features)} is its shape, and awq needs a multiple of {_PER_WORD} rows and "
            f"whole groups of {spec.group_size} columns"
        )


def _nbytes(spec: LayerSpec) -> int:
    return spec.out_features * (spec.in_features + 5 * spec.groups) // 2


def pack_layer(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors of one layer, exact and contiguous.

    Raises:
        ShapeError: Rows do not fill whole int32 words.
        ConversionError: Zero points outside 0 ... 15, or scales that float16 cannot hold.
    """
    zero, scales = stored_grid(weight, "awq")
    return {
        "qweight": pack(_reordered(weight.codes.t(), _ORDER), _BITS),
        "qzeros": pack(_reordered(zero.t(), _ORDER), _BITS),
        "scales": scales.t().contiguous(),
    }


def layer_spec(name: str, tensors: Mapping[str, Tensor], declared: Declared) -> LayerSpec:
    """Return what a layer's tensors are, from shapes and dtypes.

    Raises:
        CheckpointError: A tensor is missing, or its dtype or shape contradicts the config or the others.
    """
    if set(tensors) == {"scales"}:
        raise CheckpointError(
            f"{name}.scales divides activations, as AutoAWQ lets it where it has no other place for scales; only "
            "checkpoints whose weights alone are quantized are read here: quantize the model that it was made from"
        )
    check_kinds(name, tensors, _KINDS, ("qweight", "qzeros", "scales"))
    columns, words = tensors["qweight"].shape
    _, group_size, sym = declared.for_module(name)
    outputs, size = words * _PER_WORD, group_size or columns
    if not columns or not words or columns % size:
        raise CheckpointError(
            f"{name}.qweight has shape {(columns, words)}, which is not a whole number of groups of {size} columns, as "
            "the quantization config says; correct the config or fetch the files again"
        )
    groups = columns // size
    shapes = {"qzeros": (groups, words), "scales": (groups, outputs), "bias": (outputs,)}
    check_shapes(name, tensors, shapes, f"qweight {(columns, words)}", group_size)
    return LayerSpec(in_features=columns, out_features=outputs, bits=_BITS, group_size=size, sym=sym, act_order=False)


def unpack_layer(name: str, tensors: Mapping[str, Tensor], spec: LayerSpec) -> QuantizedWeight:
    """Return the weight that a layer's tensors hold, exactly; CheckpointError for scales that are not finite."""
    codes, zero = (_reordered(unpack(tensors[key], _BITS), _INVERSE).t() for key in ("qweight", "qzeros"))
    return make_weight(spec, codes.contiguous(), tensors["scales"].t(), zero, where=f"{name}.scales")


def write_config(config: QuantizeConfig, layers: Mapping[str, LayerSpec], matrices: Sequence[str]) -> dict[str, Any]:
    """Return the quantization config of a checkpoint: AutoAWQ's, and what GPTQModel asks for beside it.

    "zero_point" is always true, as readers take the zero points from the tensors then; "sym" tells what they are.
    """
    skipped = skipped_modules(layers, matrices)
    patterns = patterns_of(FLOAT, skipped, [*layers, *skipped])
    return {
        "quant_method": "awq",
        "bits": _BITS,
        "group_size": config.group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "format": "gemm",
        "sym": all(layer.sym for layer in layers.values()),
        "desc_act": False,
        "lm_head": any(map(outside_blocks, layers)),
        "modules_to_not_convert": names_in_float(layers, matrices),
        **({"dynamic": {pattern: {} for pattern in patterns}} if patterns else {}),  # GPTQModel's
        "meta": meta_of(config),
    }


def read_config(values: Mapping[str, Any], where: str) -> Declared:
    """Return what a quantization config declares: ours, AutoAWQ's or GPTQModel's; `where` is its file, for messages.

    Raises:
        CheckpointError: Missing keys, or values that cannot be.
    """
    bits, size = values.get("bits", values.get("w_bit")), values.get("group_size", values.get("q_group_size"))
    if bits != _BITS or type(bits) is not int:
        raise CheckpointError(f"{where}: bits is {bits!r}; awq is read here with 4 bits only")
    if size is None:
        raise CheckpointError(f"{where}: group_size is missing; add it, it cannot be guessed safely")
    list_of_names(values.get("modules_to_not_convert"), f"{where}: modules_to_not_convert")
    sym = values.get("sym", not values.get("zero_point", True))
    return gptq.read_config({**values, "bits": bits, "group_size": size, "sym": sym, "desc_act": False}, where)


def _reordered(values: Tensor, order: Sequence[int]) -> Tensor:
    """Return values, (..., n), with every 8 along the last axis in another order."""
    return values.reshape(*values.shape[:-1], -1, _PER_WORD)[..., list(order)].flatten(-2)


FORMAT = Format(
    suffixes=("qweight", "qzeros", "scales"),
    snap=IntegerZeroPoint(),
    check=check_spec,
    nbytes=_nbytes,
    pack=pack_layer,
    spec=layer_spec,
    unpack=unpack_layer,
    write_config=write_config,
    read_config=read_config,
    uniform=True,
)
