"""The order in which the Linears of a block are solved, and what is calibrated in one pass."""

import dataclasses

import pytest

from gptqkit import subsets
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.subsets import group_subsets, portions
from gptqkit.targets import Target

EXPERTS = [f"mlp.experts.{number}.{part}" for number in range(12) for part in ("w1", "w2", "w3")]
NAMES = ["attention.q", "attention.k", *EXPERTS, "mlp.shared.0.up", "mlp.shared.1.up"]


def target(name, *, split=False):
    expert = int(name.split(".")[2]) if split and name in EXPERTS else None
    experts = None if expert is None else "mlp.experts"
    return Target(f"model.layers.3.{name}", name, (32, 32), experts=experts, expert=expert, config=QuantizeConfig())


def names_of(groups):
    return [([[each.inner for each in subset] for subset in group.subsets], group.routed) for group in groups]


def traced(called):
    """What is seen of a mixture of experts whose router chooses the experts `called`, in that order."""
    found = [(NAMES[:2], False)]
    for number in called:
        expert = f"mlp.experts.{number}"
        found += [([f"{expert}.w1", f"{expert}.w3"], True), ([f"{expert}.w2"], True)]
    return [*found, (["mlp.shared.0.up"], False), (["mlp.shared.1.up"], False)]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("called", [[7, 2], [11], list(range(12))])
def test_the_same_matrix_of_all_experts_is_one_group_whichever_were_called(called, split):
    up = [[f"mlp.experts.{number}.w1", f"mlp.experts.{number}.w3"] for number in range(12)]
    down = [[f"mlp.experts.{number}.w2"] for number in range(12)]
    # Modules that see every token and only look alike stay apart: the second may depend on the first.
    others = [([[f"mlp.shared.{number}.up"]], False) for number in (0, 1)]
    groups = group_subsets([target(name, split=split) for name in NAMES], traced(called))
    assert names_of(groups) == [([NAMES[:2]], False), (up, True), (down, True), *others]


def test_what_was_never_called_is_no_expert():
    groups = group_subsets([target(name) for name in [*NAMES, "mlp.spare"]], traced([0]))
    assert names_of(groups) == names_of(group_subsets([target(name) for name in NAMES], traced([0])))


def test_targets_that_are_left_out_leave_no_gap():
    chosen = [target(name) for name in ("attention.k", "mlp.shared.1.up")]
    groups = group_subsets(chosen, [(["attention.k"], False), (["mlp.shared.1.up"], False)])
    assert names_of(groups) == [([["attention.k"]], False), ([["mlp.shared.1.up"]], False)]


def test_portions_are_as_few_as_the_budget_allows(monkeypatch):
    def sizes_of(groups, budget, *, cross):
        monkeypatch.setattr(subsets, "STATISTICS_BYTES", budget)
        found = list(portions(groups, cross=cross))
        assert [each for portion in found for each in portion] == [
            (group, subset) for group in groups for subset in group.subsets
        ]
        return [len(portion) for portion in found]

    [_, up, *_] = groups = group_subsets([target(name) for name in NAMES], traced([0]))
    one = 4 * 32 * 32  # a matrix of 32 x 32 in float32
    assert sizes_of(groups, 27 * one, cross=False) == [27]
    for budget, expected in ((12 * one, [12]), (12 * one - 1, [11, 1]), (5 * one, [5, 5, 2]), (1, [1] * 12)):
        assert sizes_of([up], budget, cross=False) == expected
        assert sizes_of([up], 2 * budget, cross=True) == expected
    for number in (1, 3):
        up.subsets[number][0] = dataclasses.replace(up.subsets[number][0], shape=(32, 64))
    assert sizes_of([up], 5 * one, cross=False) == [2, 2, 5, 3]
