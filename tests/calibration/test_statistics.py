import pytest
import torch

from gptqkit.calibration.statistics import InputStatistics, full_float32
from gptqkit.errors import CalibrationError


def streams(tokens=4000, columns=48):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, columns, generator=generator) @ torch.randn(columns, columns, generator=generator) + 0.5
    return x, x + 0.1 * torch.randn(tokens, columns, generator=generator)


@pytest.mark.parametrize("split", [[4000], [1, 3999], [100] * 40])
def test_streaming_equals_one_product_in_double_precision(split):
    x, x_float = streams()
    apart = torch.randn(4000, 20, generator=torch.Generator().manual_seed(1)) + x[:, :20]
    statistics = InputStatistics(48, torch.device("cpu"), cross=True, drift=20)
    for parts in zip(x.split(split), x_float.split(split), apart.split(split), strict=True):
        statistics.update(*parts)
    exact_drift = apart.double().T @ x.double() / 4000
    assert float((statistics.drift() - exact_drift).norm() / exact_drift.norm()) < 1e-6
    exact = x.double().T @ x.double() / 4000
    exact_cross = (x_float - x).double().T @ x.double() / 4000
    assert float((statistics.hessian() - exact).norm() / exact.norm()) < 1e-6
    assert float((statistics.cross() - exact_cross).norm() / exact_cross.norm()) < 2e-6
    assert statistics.tokens == 4000


def test_columns_beyond_one_slab_are_mirrored():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(640, 1100, generator=generator) * torch.exp(torch.randn(1100, generator=generator))
    statistics = InputStatistics(1100, torch.device("cpu"), cross=True)
    for part in x.split(64):
        statistics.update(part, 1.5 * part)
    exact = x.double().T @ x.double() / 640
    hessian, cross = statistics.hessian(), statistics.cross()
    assert torch.equal(hessian, hessian.T)
    assert float((hessian - exact).norm() / exact.norm()) < 1e-6
    assert float((cross - 0.5 * exact).norm() / exact.norm()) < 1e-6


def test_half_precision_inputs_are_summed_in_float32():
    x, _ = streams()
    statistics = InputStatistics(48, torch.device("cpu"))
    statistics.update(x.bfloat16())
    exact = x.bfloat16().double().T @ x.bfloat16().double() / 4000
    assert float((statistics.hessian() - exact).norm() / exact.norm()) < 1e-6
    assert statistics.cross() is None
    with pytest.raises(CalibrationError, match="no calibration token"):
        InputStatistics(48, torch.device("cpu")).hessian()


@pytest.mark.parametrize("old", [True, False])
def test_reduced_precision_products_are_off_inside_and_back_outside(old):
    """By torch's older interface and its newer one, after which the older one's question raises."""
    matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    try:
        if old:
            torch.set_float32_matmul_precision("medium")
        else:
            for matmul in matmuls:
                matmul.fp32_precision = "tf32"
        before = [matmul.fp32_precision for matmul in matmuls]
        with full_float32():
            assert [matmul.fp32_precision for matmul in matmuls] == ["ieee", "ieee"]
        assert [matmul.fp32_precision for matmul in matmuls] == before != ["ieee", "ieee"]
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("tokens", [0, 1, 20, 47])
def test_few_tokens_are_filled_up_with_the_mean_of_the_pool(tokens):
    x, x_float = streams(tokens=300)
    own, own_float = x[:tokens], x_float[:tokens]
    pool = InputStatistics(48, torch.device("cpu"), cross=True)
    few = InputStatistics(48, torch.device("cpu"), cross=True)
    rest = InputStatistics(48, torch.device("cpu"), cross=True)
    few.update(own, own_float)
    rest.update(x[tokens:], x_float[tokens:])
    for part in (few, rest):
        pool.absorb(part)
    assert pool.tokens == 300
    filled = few.filled_up(pool)
    x, x_float, own, own_float = (tensor.double() for tensor in (x, x_float, own, own_float))
    exact = (own.T @ own + (48 - tokens) * x.T @ x / 300) / 48
    exact_cross = ((own_float - own).T @ own + (48 - tokens) * (x_float - x).T @ x / 300) / 48
    assert float((filled.hessian() - exact).norm() / exact.norm()) < 1e-6
    assert float((filled.cross() - exact_cross).norm() / exact_cross.norm()) < 2e-6
    assert (filled.tokens, few.tokens) == (48, tokens)
    assert torch.linalg.cholesky_ex(filled.hessian())[1] == 0  # however few tokens there are


def test_enough_tokens_need_no_prior():
    x, _ = streams(tokens=48)
    statistics = InputStatistics(48, torch.device("cpu"))
    statistics.update(x)
    assert statistics.filled_up(statistics) is statistics
