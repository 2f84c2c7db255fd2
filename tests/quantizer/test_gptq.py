import dataclasses
import itertools

import pytest
import torch

from gptqkit.errors import ConfigError, NonFiniteError, ShapeError, SingularHessianError
from gptqkit.quantizer import gptq
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.factor import factorize
from gptqkit.quantizer.gptq import correction, output_error
from gptqkit.quantizer.grid import IntegerZeroPoint
from gptqkit.quantizer.methods import Moments
from gptqkit.quantizer.order import column_order
from support.reference import correlated, damped, moments, nearest_plane, textbook_gptq
from support.solvers import solve_gptaq, solve_gptq, solve_loaq, solve_qep, solve_rtn

ORDERS = {
    "natural": {"act_group_aware": False},
    "act_group_aware": {"act_group_aware": True},
    "desc_act": {"desc_act": True},
    "desc_act+static": {"desc_act": True, "static_groups": True},
    "static": {"act_group_aware": False, "static_groups": True},
}


def config(**changes):
    usual = {"quality": "fast", "bits": 3, "group_size": 16, "sym": False, "float64": True, "refine_rounds": 0}
    return QuantizeConfig(**usual | changes)


def problem(rows, columns, tokens):
    weight, inputs = correlated(rows, columns, tokens)
    return weight, moments(inputs)


def permutation_of(hessian, settings, columns):
    return column_order(
        hessian.diagonal(),
        settings.group_size or columns,
        desc_act=settings.desc_act,
        static_groups=settings.static_groups,
        act_group_aware=settings.act_group_aware,
    ).permutation


def per_weight_grid(solved):
    index = solved.group_index.long()
    return solved.scale.double()[:, index], solved.zero_point().double()[:, index]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("bits", "sym", "group_size"), [(2, False, 16), (3, True, 48), (4, False, None), (8, False, 32)]
)
def test_codes_equal_the_textbook_loop(order, bits, sym, group_size):
    """Given the grids that the solver chose, re-inverting the remaining Hessian at every column gives its codes."""
    weight, hessian = problem(24, 96, 800)
    settings = config(bits=bits, sym=sym, group_size=group_size, block_size=32, **ORDERS[order])
    solved = solve_gptq(weight, hessian, settings).weight
    scale, zero = per_weight_grid(solved)
    expected = textbook_gptq(weight, damped(hessian), permutation_of(hessian, settings, 96), scale, zero, 2**bits - 1)
    assert torch.equal(solved.codes.double(), expected)


@pytest.mark.parametrize("order", ORDERS)
def test_gptaq_codes_equal_the_textbook_loop(order):
    weight, inputs = correlated(24, 96, 800)
    float_inputs = inputs + 0.3 * correlated(24, 96, 800, seed=1)[1]
    hessian, cross = moments(inputs), (float_inputs - inputs).T @ inputs / len(inputs)
    settings = config(method="gptaq", block_size=32, alpha=0.5, **ORDERS[order])
    solved = solve_gptaq(weight, hessian, cross, settings).weight
    scale, zero = per_weight_grid(solved)
    permutation = permutation_of(hessian, settings, 96)
    expected = textbook_gptq(weight, damped(hessian), permutation, scale, zero, 7, cross=cross, alpha=0.5)
    assert torch.equal(solved.codes.double(), expected)
    assert not torch.equal(solved.codes, solve_gptq(weight, hessian, settings).weight.codes)


def test_codes_equal_babais_nearest_plane():
    weight, hessian = problem(16, 64, 500)
    solved = solve_gptq(weight, hessian, config(**ORDERS["natural"])).weight
    scale, zero = per_weight_grid(solved)
    assert torch.equal(solved.codes.double(), nearest_plane(weight, damped(hessian), scale, zero, 7))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("group_size", "grid"),
    [
        (24, "mse"),
        (64, "mse"),
        (None, "sim"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((8, "mse"), (None, "mse"), (64, "sim"))),
    ],
)
def test_block_size_does_not_change_the_codes(order, group_size, grid):
    weight, inputs = correlated(16, 192, 1000)
    cross = 0.1 * correlated(192, 192, 1)[0]
    shared = config(group_size=group_size, grid=grid, method="gptaq", **ORDERS[order])
    blocks = [dataclasses.replace(shared, block_size=size) for size in (1, 50, 128, 1000)]
    results = [solve_gptaq(weight, moments(inputs), cross, each).weight for each in blocks]
    for other in results[1:]:
        for part in ("codes", "scale", "offset"):
            assert torch.equal(getattr(other, part), getattr(results[0], part))


@pytest.mark.parametrize("order", ORDERS)
def test_groups_are_fitted_to_compensated_weights(order):
    """With min-max grids, a group's range is that of its weights after all earlier columns moved their errors."""
    weight, hessian = problem(8, 64, 500)
    settings = config(bits=4, grid="minmax", block_size=64, **ORDERS[order])
    solved = solve_gptq(weight, hessian, settings).weight
    permutation = permutation_of(hessian, settings, 64)
    scale, zero = per_weight_grid(solved)
    for start in range(0, 64, 16):
        columns = permutation[start : start + 16] if not settings.static_groups else torch.arange(start, start + 16)
        done = permutation[:start]
        current = weight.clone()
        if not settings.static_groups and start:  # the optimum of the remaining columns, given those already rounded
            rest = permutation[start:]
            lost = weight[:, done] - (solved.codes[:, done].double() - zero[:, done]) * scale[:, done]
            h = damped(hessian)
            current[:, rest] += lost @ h[done][:, rest] @ torch.linalg.inv(h[rest][:, rest])
        low = current[:, columns].amin(1).clamp(max=0)
        high = current[:, columns].amax(1).clamp(min=0)
        group = solved.group_index[columns[0]].long()
        torch.testing.assert_close(solved.scale[:, group], ((high - low) / 15).half().float(), rtol=0, atol=0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("float64", [True, False])
def test_loss_of_the_sweep_is_the_output_error(order, float64):
    weight, hessian = problem(16, 128, 900)
    solution = solve_gptq(weight, hessian, config(float64=float64, block_size=48, **ORDERS[order]))
    error = weight - solution.weight.dequantize().double()
    exact = ((error @ damped(hessian)) * error).sum(1)
    assert solution.loss.tolist() == pytest.approx(exact.tolist(), rel=1e-10 if float64 else 1e-4)


@pytest.mark.parametrize("order", ORDERS)
def test_scaling_the_hessian_or_the_weights(order):
    weight, hessian = problem(16, 64, 500)
    settings = config(**ORDERS[order])
    plain = solve_gptq(weight, hessian, settings).weight
    assert torch.equal(solve_gptq(weight, 7.3 * hessian, settings).weight.codes, plain.codes)
    doubled = solve_gptq(2 * weight, hessian, settings).weight
    assert torch.equal(doubled.codes, plain.codes)
    assert torch.equal(doubled.scale, 2 * plain.scale)


def test_desc_act_does_not_depend_on_the_order_of_the_columns():
    weight, inputs = correlated(16, 64, 500)
    shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    settings = config(desc_act=True)
    plain = solve_gptq(weight, moments(inputs), settings).weight
    shuffled = solve_gptq(weight[:, shuffle], moments(inputs[:, shuffle]), settings).weight
    assert torch.equal(shuffled.codes, plain.codes[:, shuffle])
    assert torch.equal(shuffled.group_index, plain.group_index[shuffle])


def test_gptq_lies_between_rounding_and_the_best_of_all_codes():
    weight, hessian = problem(64, 6, 200)
    h = damped(hessian)
    settings = config(bits=2, group_size=None, act_group_aware=False)
    solved = solve_gptq(weight, hessian, settings).weight
    scale, zero = per_weight_grid(solved)
    every = torch.tensor(list(itertools.product(range(4), repeat=6)), dtype=torch.float64)

    def loss(codes):
        error = weight - (codes - zero) * scale
        return ((error @ h) * error).sum(-1)

    best = torch.stack([loss(codes.expand(64, 6)) for codes in every]).amin(0)
    rounded = (torch.round(weight / scale) + zero).clamp(0, 3)
    found = loss(solved.codes.double())
    assert bool((found >= best - 1e-9).all())
    assert best.sum() <= found.sum() < loss(rounded).sum()


@pytest.mark.parametrize("settings", [{}, {"grid": "sim", "refine_rounds": 2}])
def test_moments_of_any_magnitude_give_the_same_codes(settings):
    """Whose products float32 does not hold, as where activations grow without bound."""
    weight, hessian = problem(16, 64, 100)
    found = []
    for factor in (1.0, 2.0**70, 2.0**-70):
        given = Moments(hessian=hessian.float() * factor, tokens=100)
        how = config(float64=False, damp_percent=None, **settings)
        found.append(gptq.solve_gptq(weight.float(), given, how, IntegerZeroPoint()).weight)
    for other in found[1:]:
        assert torch.equal(other.codes, found[0].codes)
        assert torch.equal(other.scale, found[0].scale)


def test_correction_rows_are_least_squares_solutions():
    """P[q, F] = alpha C[q, F] inv(H[F, F]); and without the triangle, W C inv(H) = W (C UT) U."""
    _, inputs = correlated(1, 40, 400)
    float_inputs = inputs + 0.2 * correlated(1, 40, 400, seed=1)[1]
    hessian, cross = damped(moments(inputs)), (float_inputs - inputs).T @ inputs / len(inputs)
    upper = factorize(moments(inputs), torch.arange(40), 0.01, torch.float64).upper
    found = correction(cross, upper, 0.25)
    for q in range(39):
        explicit = 0.25 * cross[q, q + 1 :] @ torch.linalg.inv(hessian[q + 1 :, q + 1 :])
        torch.testing.assert_close(found[q, q + 1 :], explicit, rtol=1e-8, atol=1e-10)
    assert float(found.tril().abs().max()) == 0
    inverse = torch.linalg.inv(upper)
    torch.testing.assert_close(cross @ torch.linalg.inv(hessian), cross @ inverse.T @ inverse)


@pytest.mark.parametrize("order", ORDERS)
def test_qep_is_gptq_of_the_weight_that_makes_up_for_earlier_layers(order):
    """Of W + alpha W C inv(H), with strength 1 the least-squares solution of W* x = W x~ that is drawn towards W."""
    weight, inputs = correlated(24, 96, 800)
    float_inputs = inputs + 0.3 * correlated(24, 96, 800, seed=1)[1]
    hessian, cross = moments(inputs), (float_inputs - inputs).T @ inputs / len(inputs)
    for alpha in (0.5, 1.0):
        settings = config(method="qep", block_size=32, alpha=alpha, **ORDERS[order])
        found = solve_qep(weight, hessian, cross, settings).weight
        corrected = weight + alpha * weight @ cross @ torch.linalg.inv(damped(hessian))
        expected = solve_gptq(corrected, hessian, settings).weight
        assert torch.equal(found.codes, expected.codes)
        torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=0)
    ridge = (0.01 * hessian.diagonal().mean() * len(inputs)).sqrt() * torch.eye(96, dtype=torch.float64)
    wanted = torch.cat([float_inputs, ridge]) @ weight.T
    torch.testing.assert_close(corrected, torch.linalg.lstsq(torch.cat([inputs, ridge]), wanted).solution.T)


@pytest.mark.parametrize("order", ORDERS)
def test_loaq_also_makes_up_for_what_outputs_are_added_to(order):
    """Of W + alpha (W C + D) inv(H), with strength 1 the least-squares solution of W* x = W x~ + r~ - r."""
    weight, inputs = correlated(24, 96, 800)
    float_inputs = inputs + 0.3 * correlated(24, 96, 800, seed=1)[1]
    apart = 0.2 * inputs @ correlated(24, 96, 800, seed=2)[0].T + correlated(8, 24, 800, seed=3)[1]  # r~ - r
    hessian, cross = moments(inputs), (float_inputs - inputs).T @ inputs / len(inputs)
    drift = apart.T @ inputs / len(inputs)
    for alpha in (0.5, 1.0):
        settings = config(method="loaq", block_size=32, alpha=alpha, **ORDERS[order])
        found = solve_loaq(weight, hessian, cross, drift, settings).weight
        corrected = weight + alpha * (weight @ cross + drift) @ torch.linalg.inv(damped(hessian))
        expected = solve_gptq(corrected, hessian, settings).weight
        assert torch.equal(found.codes, expected.codes)
        torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=0)
    ridge = (0.01 * hessian.diagonal().mean() * len(inputs)).sqrt() * torch.eye(96, dtype=torch.float64)
    wanted = torch.cat([float_inputs @ weight.T + apart, ridge @ weight.T])
    torch.testing.assert_close(corrected, torch.linalg.lstsq(torch.cat([inputs, ridge]), wanted).solution.T)
    alone = solve_loaq(weight, hessian, cross, None, settings).weight
    assert torch.equal(alone.codes, solve_qep(weight, hessian, cross, settings).weight.codes)


def test_methods_that_share_moments_do_not_share_corrections():
    """What one prepares for all weights with its inputs is not what another needs."""
    weight, inputs = correlated(24, 96, 800)
    hessian, cross = moments(inputs), 0.05 * correlated(96, 96, 1, seed=2)[0]
    known = {"hessian": hessian, "cross": cross, "drift": 0.05 * correlated(24, 96, 1, seed=3)[0]}
    together = Moments(**known)
    for solve in (gptq.solve_gptq, gptq.solve_gptaq, gptq.solve_loaq, gptq.solve_qep, gptq.solve_gptq):
        alone = Moments(**known)
        found, expected = (
            solve(weight, given, config(method="qep"), IntegerZeroPoint()).weight for given in (together, alone)
        )
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scale, expected.scale)


@pytest.mark.parametrize("float64", [True, False])
def test_gptaq_on_equal_streams_is_gptq_to_the_bit(float64):
    weight, hessian = problem(16, 96, 500)
    settings = config(float64=float64, method="gptaq")
    plain = solve_gptq(weight, hessian, settings).weight
    same = solve_gptaq(weight, hessian, torch.zeros(96, 96, dtype=torch.float64), settings).weight
    assert torch.equal(plain.codes, same.codes)
    assert torch.equal(plain.scale, same.scale)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 4))])
def test_gptq_beats_rounding_and_gptaq_beats_gptq_against_the_float_stream(order, bits):
    weight, float_inputs = correlated(64, 128, 4000)
    drift = torch.eye(128) + 0.2 * correlated(128, 128, 1, seed=1)[0] / 128**0.5
    inputs = float_inputs @ drift  # what errors in earlier layers do
    hessian, cross = moments(inputs), (float_inputs - inputs).T @ inputs / len(inputs)
    settings = config(bits=bits, float64=False, method="gptaq", **ORDERS[order])
    w = weight.float()
    rounded = solve_rtn(weight, dataclasses.replace(settings, grid="minmax")).weight.dequantize()
    gptq = solve_gptq(weight, hessian, settings).weight.dequantize()
    gptaq = solve_gptaq(weight, hessian, cross, settings).weight.dequantize()
    assert output_error(w - gptq, hessian.float()) < 0.8 * output_error(w - rounded, hessian.float())
    target = float_inputs @ weight.T
    assert (target - inputs @ gptaq.double().T).norm() < (target - inputs @ gptq.double().T).norm()


def test_simulated_grids_are_the_best_that_the_textbook_loop_finds_nearby():
    """One symmetric group: the loss of whole sweeps on the searched grid and on wider and narrower ones, row by row."""
    weight, hessian = problem(24, 32, 800)
    settings = config(bits=2, sym=True, group_size=32, act_group_aware=False)
    start = solve_gptq(weight, hessian, settings).weight.scale.double()
    zero = torch.full((24, 32), 2.0, dtype=torch.float64)
    losses = []
    for factor in (1, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3):
        scale = (start * factor).half().double().expand(-1, 32)
        codes = textbook_gptq(weight, damped(hessian), torch.arange(32), scale, zero, 3)
        lost = weight - scale * (codes - zero)
        losses.append(((lost @ damped(hessian)) * lost).sum(1))
    solved = solve_gptq(weight, hessian, dataclasses.replace(settings, grid="sim")).weight
    lost = weight - solved.dequantize().double()
    found = ((lost @ damped(hessian)) * lost).sum(1)
    assert torch.allclose(found, torch.stack(losses).amin(0), rtol=1e-6)
    assert (found < 0.999 * losses[0]).sum() > 8


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("order", ["natural", "act_group_aware", "desc_act"])
@pytest.mark.parametrize("group_size", [16, None])
def test_simulated_grids_lose_less(order, bits, group_size):
    weight, hessian = problem(64, 128, 800)
    settings = config(bits=bits, group_size=group_size, block_size=32, float64=False, **ORDERS[order])
    searched, simulated = (
        solve_gptq(weight, hessian, dataclasses.replace(settings, grid=grid)).weight.dequantize()
        for grid in ("mse", "sim")
    )
    errors = [output_error(weight.float() - each, hessian.float()) for each in (searched, simulated)]
    assert errors[1] < 0.98 * errors[0]


def test_output_error_is_the_mean_square_of_the_outputs():
    weight, inputs = correlated(8, 32, 300)
    expected = float((inputs @ weight.T).square().sum() / 300)
    assert output_error(weight.float(), moments(inputs).float()) == pytest.approx(expected, rel=1e-4)


def test_inputs_are_not_modified():
    weight, inputs = correlated(8, 32, 300)
    hessian, cross = moments(inputs), 0.1 * moments(inputs)
    before = [tensor.clone() for tensor in (weight, hessian, cross)]
    solve_gptaq(weight, hessian, cross, config(method="gptaq", desc_act=True))
    solve_gptq(weight, hessian, config(static_groups=True))
    solve_rtn(weight, config(), hessian)
    for now, then in zip((weight, hessian, cross), before, strict=True):
        assert torch.equal(now, then)


def test_group_index_is_trivial_exactly_where_promised():
    weight, inputs = correlated(8, 64, 300)
    for name, order in ORDERS.items():
        solved = solve_gptq(weight, moments(inputs), config(**order)).weight
        assert solved.trivial_group_index == (name != "desc_act")


def test_dead_columns_are_reported_and_do_no_harm():
    weight, inputs = correlated(8, 32, 300)
    inputs[:, [3, 17]] = 0
    solution = solve_gptq(weight, moments(inputs), config())
    assert solution.dead_columns == 2
    assert torch.isfinite(solution.weight.dequantize()).all()
    solution = solve_gptq(weight, torch.zeros(32, 32, dtype=torch.float64), config(grid="minmax"))
    assert solution.dead_columns == 32
    assert torch.equal(solution.weight.codes, solve_rtn(weight, config(grid="minmax")).weight.codes)


def test_damping_grows_and_says_so_where_the_hessian_is_not_positive_definite():
    weight, hessian = problem(8, 32, 300)
    hessian[0, 1] = hessian[1, 0] = 1.5 * float((hessian[0, 0] * hessian[1, 1]).sqrt())
    solution = solve_gptq(weight, hessian, config())
    assert solution.damp_escalations >= 1
    assert solution.damp_percent == pytest.approx(0.01 * 10**solution.damp_escalations)
    hessian[0, 1] = hessian[1, 0] = 1e9
    with pytest.raises(SingularHessianError, match="even with damping 1000"):
        solve_gptq(weight, hessian, config())


@pytest.mark.parametrize("tokens", [60, 100, 400])
def test_few_tokens_are_trusted_less(tokens):
    """The Hessian is damped as documented; and on other tokens of the same kind, what is solved is better for it."""
    weight, inputs = correlated(64, 96, 20_000)
    few, others = moments(inputs[:tokens]), moments(inputs[tokens:])
    usual, published = (
        gptq.solve_gptq(
            weight, Moments(hessian=few, tokens=tokens), config(bits=2, damp_percent=damp), IntegerZeroPoint(least=0)
        )
        for damp in (None, 0.01)
    )
    mean = few.diagonal().mean()
    added = 0.01 * mean + min(1, 96 / tokens) ** 0.5 * few.diagonal()
    scale, zero = per_weight_grid(usual.weight)
    expected = textbook_gptq(weight, few + added.diag(), permutation_of(few, config(), 96), scale, zero, 3)
    assert torch.equal(usual.weight.codes.double(), expected)
    assert usual.damp_percent == pytest.approx(float(added.mean() / mean))
    assert published.damp_percent == 0.01
    errors = [output_error(weight - each.weight.dequantize(), others) for each in (usual, published)]
    assert errors[0] < 0.95 * errors[1]


def test_bad_input_is_named():
    weight, hessian = problem(8, 32, 300)
    with pytest.raises(ConfigError, match="32 columns are not a multiple of group_size 24"):
        solve_gptq(weight, hessian, config(group_size=24))
    with pytest.raises(ShapeError, match=r"hessian is \(16, 16\)"):
        solve_gptq(weight, hessian[:16, :16], config())
    with pytest.raises(NonFiniteError, match="Hessian"):
        solve_gptq(weight, torch.full((32, 32), torch.nan), config())
    for place in ((3, 4), (4, 3)):  # a factorization reads one triangle only
        broken = hessian.clone()
        broken[place] = torch.nan
        with pytest.raises(NonFiniteError, match="Hessian"):
            solve_gptq(weight, broken, config())
    cross = torch.zeros(32, 32, dtype=torch.float64)
    cross[3, 4] = torch.inf
    for solve in (solve_gptaq, solve_qep):
        with pytest.raises(NonFiniteError, match="C holds"):
            solve(weight, hessian, cross, config(method="gptaq"))
    weight[0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="weight"):
        solve_gptq(weight, hessian, config())


def test_rounding_with_a_search_clips_as_squares_ask_for():
    """No weight moves, so a row of one outlier is met best by a grid of half its range, which a sweep would not try."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    weight[:, 5] = 4.0
    settings = config(bits=2, group_size=64, float64=False, sym=True)
    found = solve_rtn(weight, dataclasses.replace(settings, grid="mse"), torch.eye(64)).weight
    assert bool((found.scale[:, 0] * 3 < 0.7 * 8).all())

    def lost(share):
        scale = share * 8 / 3
        return ((weight / scale).round().clamp(-2, 1) * scale - weight).square().sum(1)

    best = torch.stack([lost(share / 100) for share in range(30, 101)]).amin(0)
    assert bool(((found.dequantize() - weight).square().sum(1) < 1.02 * best).all())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"desc_act": True}, [11, 1, 7, 5, 4, 10, 9, 3, 2, 6, 0, 8]),
        ({"desc_act": True, "static_groups": True}, [11, 1, 7, 5, 4, 10, 9, 3, 2, 6, 0, 8]),
        ({"act_group_aware": True}, [11, 10, 9, 8, 1, 3, 2, 0, 7, 5, 4, 6]),  # the largest of groups: 9, 8 and 10
    ],
    ids=str,
)
def test_the_order_is_the_one_that_is_described(flags, expected):
    diagonal = torch.tensor([1.0, 9, 3, 4, 7, 7.5, 2, 8, 0, 5, 6, 10])
    order = column_order(diagonal, 4, **{"desc_act": False, "static_groups": False, "act_group_aware": False, **flags})
    assert order.permutation.tolist() == expected
    group = [place // 4 if flags == {"desc_act": True} else column // 4 for place, column in enumerate(expected)]
    assert order.group.tolist() == group


@pytest.mark.parametrize("order", [{"act_group_aware": False}, {"desc_act": True, "static_groups": True}], ids=str)
def test_without_correlation_gptq_is_rounding_weighed_by_the_squares_of_inputs(order):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator)
    hessian = torch.exp(3 * torch.randn(96, generator=generator)).diag()
    settings = QuantizeConfig(
        method="gptq", bits=3, group_size=16, sym=False, grid="mse", refine_rounds=0, learn_iterations=1,
        damp_percent=1e-9, **order,
    )  # fmt: skip
    found = gptq.solve_gptq(weight, Moments(hessian=hessian), settings, IntegerZeroPoint()).weight
    rounded = gptq.solve_rtn(weight, Moments(hessian=hessian), settings, IntegerZeroPoint()).weight
    even = gptq.solve_rtn(weight, None, settings, IntegerZeroPoint()).weight
    assert float((found.scale != rounded.scale).float().mean()) < 0.02
    assert float((found.codes != rounded.codes).float().mean()) < 0.02
    assert float((found.scale != even.scale).float().mean()) > 0.5
