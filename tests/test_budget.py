"""What is chosen fits, what is refused does not, and what is advised makes it fit."""

import dataclasses
import random
import re

import pytest
import torch

from gptqkit.budget import make_plan
from gptqkit.errors import DoesNotFitError, GptqkitError
from gptqkit.machine import Machine
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.rehearsal import Phase
from gptqkit.sizes import BlockSizes, Sizes, measure, shapes_of
from gptqkit.workload import Workload
from support.models import build

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLENTY = 1 << 50
MACHINE = Machine(memory=PLENTY, program=0, gpu=PLENTY, disk=PLENTY)


def workload(device=CPU, **changes):
    return Workload(config=QuantizeConfig(), sequence_length=2048, device=device, **changes)


def sizes(workload):
    """Round numbers: a block of 1000, 100 per sample in its pass, states of 10 per sample, 500 on disk."""
    block = BlockSizes(
        name="layers.0",
        count=4,
        weights=1000,
        phases=(
            Phase(solved=None, statistics=200, stage=50, fixed=7, sample=100),
            Phase(solved="down", statistics=200, stage=50, fixed=300, sample=0),
        ),
        results=50,
        traced=True,
    )
    states = 10 * workload.sequence_length // 2048
    evaluation = {"quantized model": 2000, "evaluation of 8 windows": 3000} if workload.evaluate_on else {}
    return Sizes(layers=4, blocks=(block,), outside=40, state=states, output=500, source=4000, evaluation=evaluation)


def plan(machine=None, limits=None, **changes):
    return make_plan(sizes, workload(**changes), dataclasses.replace(machine or MACHINE, **(limits or {})))


def test_parts_add_up_at_the_height_of_the_work():
    made = plan(device=GPU, samples=128)
    on_gpu = made.needs["GPU memory"].parts
    assert on_gpu == {
        "one block": 1000,
        "outside the blocks": 40,
        "statistics of inputs": 200,
        "forward pass of 8 samples": 807,
        "hidden states": 1280,
        "allowance": round(0.05 * 3327),
    }
    assert made.needs["RAM"].parts == {"quantized weights": 50, "allowance": 2}
    assert made.needs["disk"].parts == {"checkpoint": 500, "hidden states, to resume from": 2560}
    # With one sample at a time, the solver is the height.
    assert "solver of down" in plan(device=GPU, batch_size=1).needs["GPU memory"].parts


@pytest.mark.parametrize(
    ("limits", "choice"),
    [
        ({}, ("device", 8)),
        ({"gpu": 3400}, ("memory", 8)),  # states of 1280 no longer fit beside the block
        ({"gpu": 3400, "memory": 1000}, ("disk", 8)),  # nor into RAM
        ({"gpu": 1950}, ("memory", 4)),  # nor do 8 samples in a pass
        ({"gpu": 1620}, ("memory", 2)),  # the solver just fits, and nothing larger
    ],
)
def test_hidden_states_move_away_before_batches_shrink(limits, choice):
    made = plan(device=GPU, samples=128, limits=limits)
    assert made.fits
    assert (made.workload.activations, made.workload.batch_size) == choice


def test_statistics_of_experts_are_gathered_in_more_passes_where_nothing_else_helps():
    made = plan(device=GPU, samples=128, limits={"gpu": 1500})
    assert made.fits
    assert made.workload.statistics_bytes == 50
    assert plan(device=GPU, samples=128, limits={"gpu": 1620}).workload.statistics_bytes > 200


def test_processes_share_the_samples_but_not_the_disk():
    alone, together = plan(samples=120), plan(samples=120, processes=4)
    assert alone.needs["RAM"].parts["hidden states"] == 1200
    assert together.needs["RAM"].parts["hidden states"] == 320  # four of the fifteen batches of 8
    assert alone.needs["disk"] == together.needs["disk"]


def test_ram_is_given_to_hidden_states_up_to_the_budget():
    assert plan(samples=128, limits={"memory": 4000}).workload.activations == "memory"
    assert plan(samples=128, activation_memory=1280, limits={"memory": 4000}).workload.activations == "memory"
    assert plan(samples=128, activation_memory=1279, limits={"memory": 4000}).workload.activations == "disk"
    assert plan(samples=200, limits={"memory": 3999}).workload.activations == "disk"  # more than half
    assert plan(samples=128, writes=False, activation_memory=0).workload.activations == "memory"  # no folder, no file


def test_what_is_fixed_stays_as_it_is():
    made = plan(device=GPU, activations="disk", batch_size=3)
    assert (made.workload.activations, made.workload.batch_size) == ("disk", 3)


def test_what_is_not_known_is_not_refused():
    made = plan(machine=Machine(memory=None, program=0, gpu=None, disk=None))
    assert made.fits
    made.check()


def test_the_evaluation_at_the_end_counts_where_it_takes_more():
    made = plan(device=GPU, evaluate_on="text", limits={"gpu": 4000})
    assert made.needs["GPU memory"].parts == {
        "quantized model": 2000,
        "evaluation of 8 windows": 3000,
        "allowance": 250,
    }
    assert "evaluate_on=None" in made.remedies
    assert plan(device=GPU, limits={"gpu": 4000}).fits
    # Hidden states are held to their budget whichever height counts.
    assert plan(evaluate_on="text", samples=128, activation_memory=1279).workload.activations == "disk"


@pytest.mark.parametrize(
    ("changes", "limits", "remedies"),
    [
        ({"activations": "memory", "samples": 512}, {"memory": 3000}, ("activations='disk'", "samples=128")),
        ({"batch_size": 64}, {"memory": 3500}, ("batch_size=16", "device='cuda'")),
        (
            {"samples": 128},
            {"disk": 2000},
            ("samples=64", "sequence_length=1024", "another folder for the checkpoint, with 2.99 KiB free"),
        ),
    ],
)
def test_the_options_that_help_are_named(changes, limits, remedies):
    made = plan(limits=limits, **changes)
    assert set(remedies) <= set(made.remedies), made.remedies
    with pytest.raises(DoesNotFitError, match=re.escape(remedies[0])):
        made.check()


def test_no_remedy_is_invented():
    made = plan(limits={"memory": 1000, "gpu": None})
    assert made.remedies == ()
    with pytest.raises(DoesNotFitError, match=r"No option makes it fit; the least that would do is [\d.]+ KiB of RAM"):
        made.check()
    least = made.least["RAM"].total
    assert not plan(limits={"memory": least - 1, "gpu": None}).remedies
    enough = plan(limits={"memory": least, "gpu": None})
    assert enough.fits or enough.remedies


def follow(asked, remedy):
    """`asked` with the options of a remedy, such as "samples=64 with method='gptq'"."""
    for option in remedy.split(" with "):
        name, value = option.split("=")
        value = eval(value)
        if name == "device":
            asked = dataclasses.replace(asked, device=torch.device(value))
        elif name in ("samples", "sequence_length", "batch_size", "activations", "evaluate_on"):
            asked = dataclasses.replace(asked, **{name: value})
        else:
            asked = dataclasses.replace(asked, config=dataclasses.replace(asked.config, **{name: value}))
    return asked


def test_every_remedy_makes_it_fit_and_every_plan_is_within_the_machine():
    """A real model, many machines."""
    model = shapes_of(build("mistral"))
    config = QuantizeConfig(group_size=32, method="gptaq", float64=True, true_sequential=False, lm_head=True)
    draw = random.Random(0)
    known = {}

    def sizes_of(asked):
        key = (repr(asked.config), asked.sequence_length, asked.device, asked.evaluate_on)
        if key not in known:
            known[key] = measure(model, asked)
        return known[key]

    seen = {"fits": 0, "helped": 0, "hopeless": 0, "together": 0}
    for _ in range(60):
        asked = Workload(
            config=config,
            sequence_length=64,
            device=draw.choice([CPU, GPU]),
            samples=draw.choice([16, 512]),
            batch_size=draw.choice([None, 32]),
            activations=draw.choice(["auto", "memory"]),
            evaluate_on=draw.choice([None, "text"]),
        )
        machine = Machine(
            memory=draw.choice([1 << 18, 3 << 18, 1 << 20, 3 << 20, 1 << 24]),
            program=0,
            gpu=draw.choice([1 << 18, 1 << 19, 1 << 20, 1 << 22]),
            disk=draw.choice([1 << 18, 1 << 20, 1 << 24]),
        )
        made = make_plan(sizes_of, asked, machine)
        if made.fits:
            seen["fits"] += 1
            made.check()
            assert all(sum(need.parts.values()) <= need.available for need in made.needs.values())
            continue
        with pytest.raises(GptqkitError):
            made.check()
        options = [remedy for remedy in made.remedies if not remedy.startswith("another folder")]
        seen["helped" if options else "hopeless"] += 1
        for remedy in options:
            seen["together"] += " with " in remedy
            assert make_plan(sizes_of, follow(asked, remedy), machine).fits, remedy
    assert all(seen.values()), seen
