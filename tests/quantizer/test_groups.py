import itertools

from gptqkit.quantizer.groups import Group, group_stages, split_group

LAYER = "model.layers.3"
EXPERTS = [f"{LAYER}.mlp.experts.{number}.w{matrix}" for number in range(12) for matrix in (1, 2, 3)]
NAMES = [
    f"{LAYER}.self_attn.q",
    f"{LAYER}.self_attn.k",
    *EXPERTS,
    f"{LAYER}.mlp.shared.0.up",
    f"{LAYER}.mlp.shared.1.up",
]


def stages_of(called):
    """What a trace sees of a Mixtral whose router chooses the experts `called`, in that order."""
    stages = [NAMES[:2]]
    for number in called:
        expert = f"{LAYER}.mlp.experts.{number}"
        stages += [[f"{expert}.w1", f"{expert}.w3"], [f"{expert}.w2"]]
    return [*stages, [f"{LAYER}.mlp.shared.0.up"], [f"{LAYER}.mlp.shared.1.up"]]


def test_experts_are_grouped_and_those_without_tokens_are_found():
    for called in ([7, 2], [11], list(range(12))):
        routed = [name for name in EXPERTS if int(name.split(".")[5]) in called]
        groups, silent = group_stages(stages_of(called), NAMES, routed)
        assert not silent
        first = [[f"{LAYER}.mlp.experts.{number}.w1", f"{LAYER}.mlp.experts.{number}.w3"] for number in range(12)]
        second = [[f"{LAYER}.mlp.experts.{number}.w2"] for number in range(12)]
        # Modules that see every token and only look alike stay apart: the second may depend on the first.
        others = [Group([[f"{LAYER}.mlp.shared.{number}.up"]]) for number in (0, 1)]
        assert groups == [Group([NAMES[:2]]), Group(first, routed=True), Group(second, routed=True), *others]


def test_what_was_never_called_is_no_expert():
    names = [*NAMES, f"{LAYER}.mlp.spare"]
    groups, silent = group_stages(stages_of([0]), names, EXPERTS[:3])
    assert silent == [f"{LAYER}.mlp.spare"]
    assert sorted(itertools.chain.from_iterable(name for group in groups for name in group.stages)) == sorted(NAMES)


def test_a_group_is_cut_only_where_its_statistics_need_more_than_the_budget():
    group = Group([[name] for name in "abcdef"], routed=True)
    assert split_group(group, lambda _: 10, 60) == [group]
    assert [len(part.stages) for part in split_group(group, lambda _: 10, 59)] == [5, 1]
    assert [len(part.stages) for part in split_group(group, lambda _: 10, 1)] == [1] * 6
    parts = split_group(group, lambda name: 30 if name in "bd" else 10, 40)
    assert [[stage[0] for stage in part.stages] for part in parts] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert all(part.routed for part in parts)
