"""Tensors that are no layer are refused before a kernel could read beyond them."""

import re

import pytest
import torch

from gptqkit.errors import ShapeError
from gptqkit.kernels.gemm import repack
from gptqkit.kernels.launcher import launcher_for
from support.emulation import move


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(96)}, "x is torch.float32"),
        ({"x": torch.zeros(2, 160).half()}, "weight is torch.int32 (1, 2, 3, 32, 4) on"),
        ({"weight": torch.zeros(1, 2, 4, 32, 4, dtype=torch.int32)}, "weight is torch.int32 (1, 2, 4, 32, 4) on"),
        ({"weight": torch.zeros(1, 2, 3, 32, 4)}, "weight is torch.float32"),
        ({"scale": torch.zeros(2, 64).half()}, "scale is torch.float16 (2, 64) on"),
        ({"scale": torch.zeros(3, 64).bfloat16()}, "scale is torch.bfloat16"),
        ({"scale": torch.zeros(64, 3).half().t()}, "scale is not contiguous"),
        ({"zero": torch.zeros(3, 64, dtype=torch.uint8)}, "zero is torch.uint8 (3, 64) on"),
        ({"zero": torch.zeros(3, 32, dtype=torch.int16)}, "zero is torch.int16"),
        ({"bias": torch.zeros(32).half()}, "bias is torch.float16 (32,) on"),
        ({"bits": 4}, "contiguous torch.int32 (1, 2, 4, 32, 4) on"),
        ({"group_size": 16}, "contiguous torch.float16 (6, 64) on"),
        ({"group_size": 0}, "contiguous torch.float16 (96, 64) on"),
        ({"out_features": 128}, "contiguous torch.int32 (2, 2, 3, 32, 4) on"),
    ],
)
def test_operands_that_do_not_fit_are_refused(make_layer, launcher, change, words):
    weight = repack(move(make_layer(bits=3).packed, launcher.device))
    operands = {
        "x": torch.zeros(2, 96).half(),
        "weight": weight.weight,
        "scale": weight.scale,
        "zero": weight.zero,
        "bias": None,
    }
    operands |= {"bits": 3, "group_size": 32, "out_features": 64, **change}
    operands = {k: v.to(launcher.device) if isinstance(v, torch.Tensor) else v for k, v in operands.items()}
    with pytest.raises(ShapeError, match=re.escape(words)):
        torch.ops.gptqkit.linear(**operands)
    with pytest.raises(ShapeError, match=re.escape(words)):
        torch.ops.gptqkit.gemm(**operands | {"x": torch.atleast_2d(operands["x"])}, split=1)
    x, _ = operands.pop("x"), operands.pop("bias")
    if x.dtype == torch.float16 and "bias" not in change:
        with pytest.raises(ShapeError, match=re.escape(words)):
            torch.ops.gptqkit.dequantize(**operands, in_features=x.shape[-1], dtype=torch.float16)


def test_other_shapes_and_dtypes_are_refused(make_layer, launcher):
    weight = repack(move(make_layer().packed, launcher.device))
    layer = (weight.weight, weight.scale, weight.zero)
    with pytest.raises(ShapeError, match=r"x has the shape \(2, 3, 96\), and two axes"):
        torch.ops.gptqkit.gemm(torch.zeros(2, 3, 96).half().to(launcher.device), *layer, None, 4, 32, 64, 1)
    with pytest.raises(ShapeError, match=r"torch\.float32 is asked for"):
        torch.ops.gptqkit.dequantize(*layer, 4, 32, 64, 96, torch.float32)
    with pytest.raises(ShapeError, match="the first operand is on cpu"):
        launcher_for(torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qweight": torch.zeros(12, 64)}, "qweight is torch.float32"),
        ({"qweight": torch.zeros(12, dtype=torch.int32)}, "qweight has the shape (12,)"),
        ({"rows": torch.zeros(95, dtype=torch.int32)}, "rows is torch.int32 (95,) on"),
        ({"rows": torch.zeros(96, dtype=torch.int64)}, "rows is torch.int64"),
        ({"scales": torch.zeros(3, 64)}, "scales is torch.float32"),
        ({"scales": torch.zeros(64).half()}, "scales has the shape (64,)"),
        ({"qzeros": torch.zeros(3, 64, dtype=torch.int32)}, "qzeros is torch.int32 (3, 64) on"),
        ({"qzeros": torch.zeros(2, 8, dtype=torch.int32)}, "qzeros is torch.int32 (2, 8) on"),
    ],
)
def test_words_that_do_not_fit_are_refused(make_layer, launcher, change, words):
    packed = move(make_layer().packed, launcher.device)
    change = {name: value.to(launcher.device) for name, value in change.items()}
    operators = torch.ops.gptqkit
    codes = {"qweight": packed.qweight, "rows": None, "bits": 4}
    grid = {"scales": packed.scales, "qzeros": packed.qzeros, "bits": 4, "zero_offset": 1}
    operator, operands = (
        (operators.repack_weight, codes) if codes.keys() & change.keys() else (operators.repack_grid, grid)
    )
    with pytest.raises(ShapeError, match=re.escape(words)):
        operator(**operands | change)
