"""Linears solved by several processes together are those of one; here, processes are threads that take turns."""

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gptqkit.calibration.statistics import InputStatistics
from gptqkit.distributed import Processes
from gptqkit.errors import AbandonedError, GptqkitError, NonFiniteError, RankError
from gptqkit.export.formats import find_snap
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.gptq import solve_gptq
from gptqkit.solving import Measured, merge, solve_all
from gptqkit.targets import Target

CPU = torch.device("cpu")
ORDERS = {
    "natural": {"act_group_aware": False},
    "act_group_aware": {"act_group_aware": True},
    "desc_act": {"desc_act": True},
    "desc_act+static": {"desc_act": True, "static_groups": True},
    "per_row": {"group_size": None},
    "float64": {"float64": True},
}


class Threads:
    """Processes that are threads, of which one works at a time."""

    def __init__(self, size):
        self.turn, self.meeting, self.told = threading.Lock(), threading.Barrier(size, timeout=60), [None] * size

    def exchange(self, rank, value):
        self.told[rank] = value
        self.turn.release()
        self.meeting.wait()  # all have spoken
        values = list(self.told)
        self.meeting.wait()  # all have heard
        self.turn.acquire()
        return values


@dataclasses.dataclass(frozen=True)
class Thread(Processes):
    threads: Threads

    def gather(self, value):
        return self.threads.exchange(self.rank, value)


def solved_together(size, measured, weights, outputs=None):
    """What each of several processes gets, or the error that it ends with."""
    threads = Threads(size)

    def work(rank):
        processes = Thread(rank, size, CPU, threads)
        with threads.turn, torch.no_grad():
            try:
                known = None if outputs is None else lambda these: {each.name: outputs[each.name] for each in these}
                return list(solve_all(measured, lambda target: weights[target.name], processes, known))
            except GptqkitError as error:
                return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


def problem(config):
    """Linears that share an input, but for the last, and their weights."""
    generator, shapes = torch.Generator().manual_seed(0), ((64, 96), (135, 96), (40, 96))
    weights = {str(number): torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    targets = [Target(name, name, tuple(weight.shape), config=config) for name, weight in weights.items()]
    mixing = torch.randn(96, 96, generator=generator)
    found = []
    for _ in range(2):
        x = torch.randn(300, 96, generator=generator) @ mixing
        statistics = InputStatistics(96, CPU, cross=config.method == "gptaq")
        statistics.update(x, x + torch.randn(300, 96, generator=generator) if statistics.paired else None)
        found.append(statistics)
    return [Measured(targets[:-1], found[0]), Measured(targets[-1:], found[1])], weights


FAST = [
    ("gptq", "natural"),
    ("gptq", "act_group_aware"),
    ("gptq", "per_row"),
    ("rtn", "act_group_aware"),
    ("gptaq", "desc_act"),
]
SLOW = [pair for pair in itertools.product(("rtn", "gptq", "gptaq"), ORDERS) if pair not in FAST]


@pytest.mark.parametrize(("method", "order"), [*FAST, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_any_number_of_processes_solves_alike(method, order):
    """One, two and four: whole Linears in turn, and shared rows where fewer Linears than processes are left."""
    config = QuantizeConfig(bits=3, sym=False, method=method, **{"group_size": 16, **ORDERS[order]})
    measured, weights = problem(config)
    [alone] = solved_together(1, measured, weights)
    assert [target.name for _, target, _ in alone] == list(weights)
    for size in (2, 4):
        for found in solved_together(size, measured, weights):
            for (one, target, ours), (their_one, their_target, theirs) in zip(found, alone, strict=True):
                assert (one, target) == (their_one, their_target)
                for name in ("codes", "scale", "offset", "group_index"):
                    expected = getattr(theirs.solution.weight, name)
                    assert torch.equal(getattr(ours.solution.weight, name), expected), (size, name)
                assert ours.errors == pytest.approx(theirs.errors, rel=1e-6)
                if method != "rtn":
                    assert ours.solution.loss.tolist() == pytest.approx(theirs.solution.loss.tolist(), rel=1e-5)
                for fact in ("damp_percent", "damp_escalations", "dead_columns"):
                    assert getattr(ours.solution, fact) == getattr(theirs.solution, fact)


@pytest.mark.parametrize("size", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 4))])
def test_linears_whose_outputs_weigh_together_are_those_that_each_is_alone(size):
    """Those that share an input are solved as one weight, unless settings differ, and divided among processes."""
    config = QuantizeConfig(bits=3, sym=False, method="gptq", group_size=16, two_sided=True)
    measured, weights = problem(config)
    measured[0].targets.append(dataclasses.replace(measured[0].targets[0], config=dataclasses.replace(config, bits=2)))
    measured[0].targets[-1] = dataclasses.replace(measured[0].targets[-1], name="other")
    weights["other"], outputs = weights["0"], {}
    for name, weight in weights.items():
        drawn = torch.randn(200, len(weight), generator=torch.Generator().manual_seed(7)) @ torch.randn(
            len(weight), len(weight), generator=torch.Generator().manual_seed(8)
        )
        outputs[name] = drawn.T @ drawn / 200
    expected = {}
    for one in measured:
        for target in one.targets:
            moments = dataclasses.replace(one.moments(), outputs=[outputs[target.name]])
            solution = solve_gptq(weights[target.name], moments, target.config, find_snap(target.config))
            lost = weights[target.name] - solution.weight.dequantize()
            expected[target.name] = (
                solution.weight,
                float(((outputs[target.name] @ lost) * (lost @ moments.hessian)).sum()),
            )
    for found in solved_together(size, measured, weights, outputs):
        assert [target.name for _, target, _ in found] == ["0", "1", "other", "2"]
        for _, target, ours in found:
            weight, error = expected[target.name]
            assert ours.solution.weight.bits == weight.bits == target.config.bits
            assert float((ours.solution.weight.codes != weight.codes).float().mean()) < 0.01
            assert ours.errors[1] == pytest.approx(error, rel=0.01)


def test_a_linear_that_cannot_be_solved_is_named_and_all_stop():
    measured, weights = problem(QuantizeConfig(method="gptq", group_size=16))
    weights["1"][3, 3] = torch.nan
    other, own = solved_together(2, measured, weights)
    assert isinstance(own, NonFiniteError)
    assert isinstance(other, AbandonedError)
    assert str(own).startswith("1: the weight holds NaN")
    assert str(own) in str(other)


def test_parts_of_different_arithmetic_are_refused():
    measured, weights = problem(QuantizeConfig(group_size=16, desc_act=True, damp_percent=0.01))
    [(_, _, one), *_] = solved_together(1, measured, weights)[0]
    other_damping = dataclasses.replace(one.solution, damp_percent=0.1)
    other_groups = dataclasses.replace(one.solution.weight, group_index=one.solution.weight.group_index.flip(0))
    for solution, said in (
        (other_damping, r"dampings 0.01 and 0.1.*one kind of hardware"),
        (dataclasses.replace(one.solution, weight=other_groups), "other groups"),
    ):
        with pytest.raises(RankError, match=said):
            merge([one, None, dataclasses.replace(one, solution=solution)])
