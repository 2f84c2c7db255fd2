"""Spreading the solving: who solves what, and that rows depend on no other rows. With processes: test_ranks.py."""

import dataclasses

import pytest
import torch

from gptqkit.errors import RankError
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.ranks import Ranks
from gptqkit.quantizer.sharing import Solved, merge, plan, solve_shared
from gptqkit.quantizer.solver import solve_gptaq, solve_gptq, solve_rtn
from support.reference import correlated, moments

ORDERS = {
    "natural": {"act_group_aware": False},
    "act_group_aware": {"act_group_aware": True},
    "desc_act": {"desc_act": True},
    "desc_act+static": {"desc_act": True, "static_groups": True},
    "per_row": {"group_size": None},
}


def solver(method, **changes):
    """A solver of rows of one (135, 96) weight, and the weight's number of rows."""
    weight, inputs = correlated(135, 96, 500)
    float_inputs = inputs + 0.3 * correlated(135, 96, 500, seed=1)[1]
    hessian, cross = moments(inputs).float(), ((float_inputs - inputs).T @ inputs / len(inputs)).float()
    config = QuantizeConfig(**{"bits": 3, "group_size": 16, "sym": False, "method": method, **changes})

    def solve(rows):
        if method == "rtn":
            return Solved(solution=solve_rtn(weight[rows], config, hessian))
        if method == "gptq":
            return Solved(solution=solve_gptq(weight[rows], hessian, config))
        return Solved(solution=solve_gptaq(weight[rows], hessian, cross, config))

    return solve, len(weight)


@pytest.mark.parametrize("mse", [False, True])
@pytest.mark.parametrize("float64", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", ["rtn", "gptq", "gptaq"])
def test_rows_depend_on_no_other_rows(method, order, float64, mse):
    solve, rows = solver(method, float64=float64, mse=mse, **ORDERS[order])
    whole = solve(slice(0, rows)).solution
    parts = merge([solve(slice(0, 32)), solve(slice(32, 96)), solve(slice(96, rows))]).solution
    for name in ("codes", "scale", "zero", "group_index"):
        assert torch.equal(getattr(parts.weight, name), getattr(whole.weight, name)), name
    assert parts.loss is None if method == "rtn" else parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert (parts.damp, parts.dead_columns) == (whole.damp, whole.dead_columns)


def test_parts_of_different_arithmetic_are_refused():
    solve, _ = solver("gptq", desc_act=True)
    one, other = solve(slice(0, 32)), solve(slice(32, 64))
    with pytest.raises(RankError, match=r"dampings 0.01 and 0.1.*one kind of hardware"):
        merge([one, dataclasses.replace(other, solution=dataclasses.replace(other.solution, damp=0.1))])
    weight = dataclasses.replace(other.solution.weight, group_index=other.solution.weight.group_index.flip(0))
    with pytest.raises(RankError, match="other groups"):
        merge([one, dataclasses.replace(other, solution=dataclasses.replace(other.solution, weight=weight))])


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("shapes", [[(100, 64)], [(4096, 4096), (1024, 4096), (99, 4096)], [(64, 32), (33, 128)] * 20])
def test_every_row_is_solved_once(shapes, size):
    units = plan(shapes, size)
    for module, (rows, _) in enumerate(shapes):
        slices = [unit.rows for unit in units if unit.module == module]
        assert [row for part in slices for row in range(part.start, part.stop)] == list(range(rows))
        assert all(part.start % 32 == 0 for part in slices)
        if len(shapes) >= size:
            assert len(slices) == 1


def test_no_rank_has_more_than_one_module_too_many():
    shapes = [(64 * (1 + index % 7), 32 * (1 + index % 5)) for index in range(60)]
    cost = [rows * columns**2 + columns**3 for rows, columns in shapes]
    for size in (2, 3, 8):
        load = [sum(cost[unit.module] for unit in plan(shapes, size) if unit.rank == rank) for rank in range(size)]
        assert max(load) - min(load) <= max(cost)


def test_alone_modules_are_solved_when_asked_for():
    asked = []

    def solve(module, rows):
        asked.append((module, rows))
        return Solved(solution=None)

    results = solve_shared(Ranks.alone(), [(7, 4), (9, 4)], solve)
    assert asked == []
    next(results)
    assert asked == [(0, slice(0, 7))]
    assert len(list(results)) == 1
    assert asked[1] == (1, slice(0, 9))
