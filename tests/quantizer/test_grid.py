import pytest
import torch

from gptqkit.quantizer import grid as grids
from gptqkit.quantizer.grid import IntegerZeroPoint


def fit_grid(weight, *, min_zero=0, **settings):
    return grids.fit_grid(weight, snap=IntegerZeroPoint(least=min_zero), **settings)


def weights(columns=16, rows=40, seed=0):
    return torch.randn(columns, rows, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("min_zero", [0, 1])
def test_scales_are_float16_and_zeros_are_integers_in_range(bits, sym, search, min_zero):
    w = weights()
    grid = fit_grid(w, bits=bits, sym=sym, min_zero=min_zero, importance=torch.rand(16) if search else None)
    assert torch.equal(grid.scale.half().float(), grid.scale)
    assert torch.equal(-grid.zero * grid.scale, grid.offset)
    assert int(grid.zero.min()) >= min_zero
    assert int(grid.zero.max()) <= 2**bits - 1
    if sym:
        assert torch.equal(grid.zero, torch.full_like(grid.zero, 2 ** (bits - 1)))
    codes = grid.encode(w)
    assert torch.equal(grid.encode(grid.decode(codes)), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_min_max_grids_by_hand(bits):
    w = torch.tensor([[-1.0, 0.5, 0.0], [2.0, 3.0, 0.0]])
    top = 2**bits - 1
    grid = fit_grid(w, bits=bits, sym=False)
    expected = torch.tensor([3.0 / top, 3.0 / top, torch.finfo(torch.float16).tiny]).half().float()
    assert torch.equal(grid.scale, expected)
    assert grid.zero.tolist() == [round(1.0 / float(expected[0])), 0, 0]  # a row of positive weights has zero 0
    assert bool(((grid.decode(grid.encode(w)) - w).abs() <= 0.51 * grid.scale).all())


@pytest.mark.parametrize("bits", [2, 4])
def test_version_1_zeros_start_at_one_and_still_reach_the_maximum(bits):
    w = weights().abs()
    grid = fit_grid(w, bits=bits, sym=False, min_zero=1)
    assert grid.zero.tolist() == [1.0] * 40
    torch.testing.assert_close(grid.scale * (2**bits - 2), w.amax(0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tight", [True, False])
def test_the_search_never_raises_the_weighted_error_of_any_row(bits, sym, tight):
    w = weights()
    importance = torch.rand(16)
    plain = fit_grid(w, bits=bits, sym=sym)
    searched = fit_grid(w, bits=bits, sym=sym, importance=importance, tight=tight)

    def error(grid):
        return importance @ (grid.decode(grid.encode(w)) - w).abs().pow(2 if tight else 3)

    assert bool((error(searched) <= error(plain)).all())
    assert error(searched).sum() < (0.97 if bits == 4 else 0.9) * error(plain).sum()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_symmetric_grids_are_nearly_the_best_of_both_signs(bits):
    """Of all float16 scales that come into question, negative ones too: the side of the further step matters."""
    w, importance = weights(), torch.rand(16, generator=torch.Generator().manual_seed(1))
    found = fit_grid(w, bits=bits, sym=True, importance=importance, tight=True)
    lost = [importance @ (found.decode(found.encode(w)) - w).square()]
    for share in torch.linspace(-1.1, 1.1, 200):
        scale = (2 * w.abs().amax(0) * share / (2**bits - 1)).half().float()
        level = (w / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        lost.append(importance @ (level * scale - w).square())
    least = torch.stack(lost).amin(0).sum()
    assert lost[0].sum() < 1.05 * least
    positive = torch.stack(lost[101:]).amin(0).sum()
    assert positive > 1.02 * lost[0].sum()


def test_a_column_of_great_importance_is_met_more_closely():
    w = weights()
    importance = torch.ones(16)
    importance[5] = 1e4
    even = fit_grid(w, bits=2, sym=False, importance=torch.ones(16), tight=True)
    uneven = fit_grid(w, bits=2, sym=False, importance=importance, tight=True)
    distance = [(grid.decode(grid.encode(w)) - w)[5].square().sum() for grid in (even, uneven)]
    assert distance[1] < 0.3 * distance[0]


@pytest.mark.parametrize("sym", [True, False])
def test_grids_that_need_not_be_tight_clip_less(sym):
    w = weights(columns=128)
    importance = torch.ones(128)
    clipped = []
    for tight in (True, False):
        grid = fit_grid(w, bits=2, sym=sym, importance=importance, tight=tight)
        clipped.append(int(((grid.decode(grid.encode(w)) - w).abs() > 0.51 * grid.scale.abs()).sum()))
    assert clipped[1] < 0.6 * clipped[0]


@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_grids_that_are_tried_side_by_side_come_to_what_they_come_to_alone(sym, tight, monkeypatch):
    """Also of several groups at once."""
    generator = torch.Generator().manual_seed(4)
    weight, importance = torch.randn(16, 3, 40, generator=generator), torch.rand(16, 3, generator=generator) + 0.1
    how = {"bits": 3, "sym": sym, "tight": tight}
    monkeypatch.setattr(grids, "_FITTED", 1)
    alone = [fit_grid(weight[:, [each]], importance=importance[:, [each]], **how) for each in range(3)]
    values = torch.cat([grid.decode(grid.encode(weight[:, [each]])) for each, grid in enumerate(alone)], 1)
    for most in (1, 5 * weight.numel(), 2**20):
        monkeypatch.setattr(grids, "_FITTED", most)
        together = fit_grid(weight, importance=importance, **how)
        assert torch.equal(together.scale, torch.cat([each.scale for each in alone]))
        # Where no code is at its limit, all zero points one step further come to the same.
        assert torch.allclose(together.decode(together.encode(weight)), values, atol=1e-6)
