"""What a run needs, compared with what there is: choices where there are some, and a refusal with a way out."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .calibration.activations import PLACES
from .errors import DoesNotFitError
from .export.writer import MAX_SHARD_BYTES
from .machine import Machine
from .sizes import BlockSizes, Sizes
from .units import size_text
from .workload import LARGEST_BATCH, Workload

_LOG = logging.getLogger("gptqkit")

ALLOWANCE = 0.05  # for allocators and libraries, as a share of everything else
FEWEST_SAMPLES = 32  # fewer samples, or shorter ones, are not advised
SHORTEST = 256

Measure = Callable[[Workload], Sizes]
Change = tuple[str, Any]  # an option and its value


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a run needs of one resource at its height, in bytes.

    Attributes:
        parts: By name, in the order of the table.
        available: What there is; None where this is not known, and nothing is refused.
    """

    parts: Mapping[str, int]
    available: int | None

    @property
    def total(self) -> int:
        """All parts."""
        return sum(self.parts.values())

    @property
    def missing(self) -> int:
        """What is needed beyond what there is; 0 where it fits."""
        return 0 if self.available is None else max(0, self.total - self.available)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run is to be done, and what it needs.

    Attributes:
        workload: What is asked for, with every choice made: `batch_size` is a number, `activations` a place.
        sizes: What the plan was made from.
        needs: By resource: "RAM", "GPU memory" where there is one to be used, and "disk".
        remedies: Where it does not fit: changes that make it fit, each by itself; checked, not guessed.
        least: Where no change makes it fit: what the most modest one needs.
        seconds: Estimated time, where a block was timed.
    """

    workload: Workload
    sizes: Sizes
    needs: Mapping[str, Need]
    remedies: tuple[str, ...] = ()
    least: Mapping[str, Need] | None = None
    seconds: float | None = None

    @property
    def fits(self) -> bool:
        """Whether there is enough of everything."""
        return not any(need.missing for need in self.needs.values())

    @property
    def untraced(self) -> list[str]:
        """Kinds of blocks whose forward pass could not be traced by shapes, so that its memory is a coarse estimate."""
        return [block.name for block in self.sizes.blocks if not block.traced]

    def check(self, *, fit_check: bool = True) -> None:
        """Say where something is missing: what, how much, and which option makes it fit.

        Args:
            fit_check: Refuse; False only warns, as is always done where the estimate is coarse.

        Raises:
            DoesNotFitError: Something is missing.
        """
        if self.fits:
            return
        missing = [
            f"{size_text(need.total)} of {name} needed, {size_text(need.available or 0)} there, "
            f"the largest part {max(need.parts, key=lambda part: need.parts[part])}"
            for name, need in self.needs.items()
            if need.missing
        ]
        if self.remedies:
            beginning = "This makes it fit" if len(self.remedies) == 1 else "Any of these makes it fit"
            advice = f"{beginning}: {'; '.join(self.remedies)}"
        else:
            wanted = [f"{size_text(need.total)} of {name}" for name, need in (self.least or {}).items() if need.missing]
            advice = f"No option makes it fit; the least that would do is {' and '.join(wanted)}"
        problem = f"the run does not fit: {'; '.join(missing)}. {advice}"
        if self.untraced:
            _LOG.warning("by a coarse estimate, %s", problem)
        elif not fit_check:
            _LOG.warning("%s. Not refused, as fit_check=False", problem)
        else:
            raise DoesNotFitError(f"{problem}. If this is wrong, fit_check=False (--no-fit-check) goes on all the same")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        asked = self.workload
        return {
            "fits": self.fits,
            "blocks": self.sizes.layers,
            "device": str(asked.device),
            "method": asked.config.method,
            "samples": asked.samples,
            "sequence_length": asked.sequence_length if asked.samples else 0,
            "batch_size": asked.batch_size if asked.samples else None,
            "activations": asked.activations if asked.samples else None,
            "source_bytes": self.sizes.source,
            "output_bytes": self.sizes.output,
            "needs": {
                name: {"parts": dict(need.parts), "total": need.total, "available": need.available}
                for name, need in self.needs.items()
            },
            "untraced": self.untraced,
            "remedies": list(self.remedies),
            "seconds": self.seconds,
        }


def make_plan(measure: Measure, workload: Workload, machine: Machine) -> Plan:
    """The plan for `workload`: its open choices made, and ways out where it does not fit.

    Hidden states go to the device where they fit, else into RAM up to the budget, else to disk; batches are as large as
    fits, and are halved only when no place helps; only after that are experts' statistics gathered in more passes.

    Args:
        measure: Sizes of a workload, as `sizes.measure` gives them for a model; called again for others where this one
            does not fit.
        workload: What is asked for.
        machine: What there is.
    """
    known: dict[str, Sizes] = {}

    def choose(asked: Workload) -> Plan:
        """The first choice that fits, or else the one that needs least."""
        largest = max(LARGEST_BATCH, asked.batch_size or 0)  # what else is left out does not matter to sizes
        key = repr((asked.config, asked.sequence_length, asked.device, asked.evaluate_on, largest))
        if key not in known:
            known[key] = measure(asked)
        sizes = known[key]
        plans = []
        for choice in _choices(asked, sizes):
            plans.append(Plan(workload=choice, sizes=sizes, needs=_needs(sizes, choice, machine)))
            if plans[-1].fits and _within_budget(plans[-1], asked, machine):
                break
        return plans[-1]

    plan = choose(workload)
    if plan.fits:
        return plan
    remedies, least = _remedies(choose, workload, machine)
    if [name for name, need in plan.needs.items() if need.missing] == ["disk"]:
        remedies = (*remedies, f"another folder for the checkpoint, with {size_text(plan.needs['disk'].total)} free")
    return dataclasses.replace(plan, remedies=remedies, least=least)


def _choices(workload: Workload, sizes: Sizes) -> Iterator[Workload]:
    """`workload` with its open choices made, the best first."""
    phases = [phase for block in sizes.blocks for phase in block.phases]
    most = min(workload.statistics_bytes, max(phase.statistics for phase in phases))
    budgets = [workload.statistics_bytes, *_halves(most, max(phase.stage for phase in phases))]
    batch_sizes, places = [workload.batch_size or 1], list(PLACES)
    if workload.batch_size is None and workload.samples:
        largest = min(LARGEST_BATCH, workload.samples)
        batch_sizes = [largest, *_halves(largest, 1)]
    if workload.activations != "auto":
        places = [workload.activations]
    elif not workload.samples:
        places = ["memory"]
    else:
        if workload.device.type == "cpu":
            places.remove("device")
        if not workload.writes:
            places.remove("disk")
    for budget, batch_size, place in itertools.product(budgets, batch_sizes, places):
        yield dataclasses.replace(workload, batch_size=batch_size, activations=place, statistics_bytes=budget)


def _within_budget(plan: Plan, asked: Workload, machine: Machine) -> bool:
    """Whether "auto" may put hidden states there: into RAM up to a budget, by default half of what there is."""
    if asked.activations != "auto" or plan.workload.activations != "memory" or not asked.writes:
        return True
    budget = asked.activation_memory
    if budget is None and machine.memory is not None:
        budget = (machine.memory - machine.program) // 2
    return budget is None or plan.sizes.state * asked.streams * plan.workload.share <= budget


def _needs(sizes: Sizes, workload: Workload, machine: Machine) -> dict[str, Need]:
    """What `workload`, its choices made, needs of everything at its height."""
    states = sizes.state * workload.streams
    work = max((_work(block, sizes, workload) for block in sizes.blocks), key=lambda parts: sum(parts.values()))
    on_device = workload.device.type != "cpu" and workload.activations == "device"
    held = {"hidden states": 0 if workload.activations == "disk" else states * workload.share}
    results = [block.results * (1 if workload.writes else block.count) for block in sizes.blocks]
    decided = {"quantized weights": max(results) if workload.writes else sum(results)}
    program = {"Python, torch, transformers": machine.program}
    if workload.device.type == "cpu":
        needs = {"RAM": _need([{**work, **held, **decided}, sizes.evaluation], machine.memory, program)}
    else:
        needs = {
            "RAM": _need([decided if on_device else {**held, **decided}], machine.memory, program),
            "GPU memory": _need([{**work, **held} if on_device else work, sizes.evaluation], machine.gpu, {}),
        }
    if workload.writes:
        joined = ("a file while it is joined", min(sizes.output, MAX_SHARD_BYTES))
        kept = ("hidden states, to resume from", 2 * states * workload.samples)
        name, size = max(joined, kept, key=lambda part: part[1])
        needs["disk"] = Need(parts={"checkpoint": sizes.output, name: size}, available=machine.disk)
    return needs


def _need(heights: list[Mapping[str, int]], available: int | None, always: Mapping[str, int]) -> Need:
    """The parts of the largest of some heights, with what is there at all of them, and an allowance."""
    most = max(heights, key=lambda parts: sum(parts.values()))
    parts = {name: size for name, size in {**always, **most}.items() if size}
    allowance = round(sum(parts.values()) * ALLOWANCE)
    return Need(parts={**parts, "allowance": allowance} if allowance else parts, available=available)


def _work(block: BlockSizes, sizes: Sizes, workload: Workload) -> dict[str, int]:
    """What is on the device, hidden states aside, at the height of the work on one block."""
    batch = min(workload.batch_size or 1, workload.share)
    brought = 0  # where states are elsewhere, those of a batch are brought to the device
    if workload.activations == "disk" or (workload.activations == "memory" and workload.device.type != "cpu"):
        brought = sizes.state
    heights = []
    for phase in block.phases:
        if phase.solved is None:
            what = f"forward pass of {batch} samples" if batch > 1 else "forward pass of a sample"
            held = phase.fixed + batch * (phase.sample + brought)
        else:
            what, held = f"solver of {phase.solved}", phase.fixed
        statistics = min(phase.statistics, max(phase.stage, workload.statistics_bytes))
        heights.append({"statistics of inputs": statistics, what: held})
    most = max(heights, key=lambda parts: sum(parts.values()))
    return {"one block": block.weights, "outside the blocks": sizes.outside, **most}


def _remedies(
    choose: Callable[[Workload], Plan], workload: Workload, machine: Machine
) -> tuple[tuple[str, ...], Mapping[str, Need] | None]:
    """Single options that make `workload` fit, or else as few as are needed together, or else what the least needs."""

    def fits(changes: list[Change]) -> bool:
        return choose(_changed(workload, changes)).fits

    options = {name: values for name, values in _options(workload, machine).items() if values}
    single = [
        next(((name, value) for value in values if fits([(name, value)])), None) for name, values in options.items()
    ]
    found = [change for change in single if change is not None]
    if found:
        return tuple(_described([change]) for change in found), None
    together = [(name, values[-1]) for name, values in options.items() if name != "device"]
    if not fits(together):
        return (), choose(_changed(workload, together)).needs
    for change in reversed(together.copy()):  # what costs quality goes first
        without = [other for other in together if other != change]
        if fits(without):
            together = without
    return (_described(together),), None


def _options(workload: Workload, machine: Machine) -> dict[str, list[Any]]:
    """Every option with the values that may help, the mildest first; options that cost quality come last."""
    config, open_choices = workload.config, workload.activations == "auto" and workload.activation_memory is None
    options: dict[str, list[Any]] = {
        "activations": [] if open_choices else ["memory", "disk"][: 1 + workload.writes],
        "evaluate_on": [] if workload.evaluate_on is None else [None],
    }
    if workload.begun:
        return options
    return options | {
        "float64": [False] * config.float64,
        "lm_head": [False] * config.lm_head,
        "device": ["cpu"] if workload.device.type == "cuda" else ["cuda"] if machine.gpu is not None else [],
        "batch_size": _halves(workload.batch_size or 1, 1),
        "true_sequential": [True] * (not config.true_sequential),
        "samples": _halves(workload.samples, FEWEST_SAMPLES),
        "sequence_length": _halves(workload.sequence_length, SHORTEST),
        "method": ["gptq"] * (config.method == "gptaq"),
    }


def _halves(value: int, least: int) -> list[int]:
    """`value` halved again and again, down to `least`."""
    values = []
    while value > least:
        value = max(value // 2, least)
        values.append(value)
    return values


def _changed(workload: Workload, changes: list[Change]) -> Workload:
    """`workload` with other options, its own or those of its config."""
    for name, value in changes:
        changed: dict[str, Any] = {name: torch.device(value) if name == "device" else value}
        if not hasattr(workload, name):
            changed = {"config": dataclasses.replace(workload.config, **changed)}
        workload = dataclasses.replace(workload, **changed)
    return workload


def _described(changes: list[Change]) -> str:
    return " with ".join(f"{name}={value!r}" for name, value in changes)
