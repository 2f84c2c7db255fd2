import pytest
import torch

from gptqkit.calibration.hessian import InputStatistics, full_float32
from gptqkit.errors import CalibrationError, ShapeError


def streams(tokens=4000, columns=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator) + 0.5
    return x, x + 0.1 * torch.randn(tokens, columns, generator=generator)


@pytest.mark.parametrize("split", [[4000], [1, 3999], [1000, 7, 2000, 993], [100] * 40])
def test_streaming_equals_one_product_in_double_precision(split):
    x, x_float = streams()
    statistics = InputStatistics(48, torch.device("cpu"), cross=True)
    for part, part_float in zip(x.split(split), x_float.split(split), strict=True):
        statistics.update(part, part_float)
    exact = x.double().T @ x.double() / 4000
    exact_cross = (x_float - x).double().T @ x.double() / 4000
    assert float((statistics.hessian() - exact).norm() / exact.norm()) < 1e-6
    assert float((statistics.cross() - exact_cross).norm() / exact_cross.norm()) < 2e-6
    assert statistics.tokens == 4000


def test_half_precision_inputs_are_summed_in_float32():
    x, _ = streams()
    statistics = InputStatistics(48, torch.device("cpu"))
    statistics.update(x.bfloat16())
    exact = x.bfloat16().double().T @ x.bfloat16().double() / 4000
    assert float((statistics.hessian() - exact).norm() / exact.norm()) < 1e-6
    assert statistics.cross() is None


def test_streams_that_do_not_pair_are_refused():
    x, x_float = streams()
    with pytest.raises(ShapeError, match="come with every update"):
        InputStatistics(48, torch.device("cpu")).update(x, x_float)
    with pytest.raises(ShapeError, match="token by token"):
        InputStatistics(48, torch.device("cpu"), cross=True).update(x, x_float[1:])
    with pytest.raises(CalibrationError, match="no calibration token"):
        InputStatistics(48, torch.device("cpu")).hessian()


def test_reduced_precision_products_are_off_inside_and_back_outside():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
