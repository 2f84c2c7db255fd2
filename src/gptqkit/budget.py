"""What a run needs, compared with what there is: choices where there are some, and a refusal with a way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .calibration.activations import PLACES, Place
from .errors import DoesNotFitError
from .export.writer import MAX_SHARD_BYTES
from .machine import Machine
from .sizes import LARGEST_BATCH, BlockSizes, Sizes, Workload
from .units import size_text

ALLOWANCE = 0.05  # for allocators and libraries, as a share of everything else
FEWEST_SAMPLES = 32  # fewer samples, or shorter ones, are not advised
SHORTEST = 256

Measure = Callable[[Workload], Sizes]


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

    def check(self) -> None:
        """Raise DoesNotFitError where something is missing: what, how much, and which option makes it fit."""
        if self.fits:
            return
        missing = [
            f"{size_text(need.total)} of {name} needed, {size_text(need.available or 0)} there, "
            f"the largest part {max(need.parts, key=lambda part: need.parts[part])}"
            for name, need in self.needs.items()
            if need.missing
        ]
        if self.remedies:
            advice = f"any of these makes it fit: {'; '.join(self.remedies)}"
            if len(self.remedies) == 1:
                advice = f"this makes it fit: {self.remedies[0]}"
        else:
            wanted = [f"{size_text(need.total)} of {name}" for name, need in (self.least or {}).items() if need.missing]
            advice = f"no option makes it fit; the least that would do is {' and '.join(wanted)}"
        raise DoesNotFitError(f"the run does not fit: {'; '.join(missing)}. {advice[0].upper()}{advice[1:]}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "fits": self.fits,
            "blocks": self.sizes.layers,
            "device": str(self.workload.device),
            "method": self.workload.config.method,
            "samples": self.workload.samples if self.workload.calibrated else 0,
            "sequence_length": self.workload.length if self.workload.calibrated else 0,
            "batch_size": self.workload.batch_size if self.workload.calibrated else None,
            "activations": self.workload.activations if self.workload.calibrated else None,
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
    measure = _remembering(measure)
    plan = _choose(measure, workload, machine)
    if plan.fits:
        return plan
    remedies, least = _remedies(measure, workload, machine)
    if [name for name, need in plan.needs.items() if need.missing] == ["disk"]:
        remedies = (*remedies, f"another folder for the checkpoint, with {size_text(plan.needs['disk'].total)} free")
    return dataclasses.replace(plan, remedies=remedies, least=least)


def _remembering(measure: Measure) -> Measure:
    """`measure`, but asked once only where what differs does not matter to sizes."""
    known: list[tuple[Workload, Sizes]] = []

    def remember(workload: Workload) -> Sizes:
        plain = dataclasses.replace(workload, samples=1, batch_size=None, activations="auto", activation_memory=None)
        found = next((sizes for asked, sizes in known if asked == plain), None)
        if found is None:
            found = measure(workload)
            known.append((plain, found))
        return found

    return remember


def _choose(measure: Measure, workload: Workload, machine: Machine) -> Plan:
    """The first choice that fits, or else the one that needs least.

    Statistics of experts are gathered in more passes only where nothing else helps.
    """
    sizes = measure(workload)
    while True:
        plan = _choose_for(sizes, workload, machine)
        largest = max((phase.statistics for block in sizes.blocks for phase in block.phases), default=0)
        workload = dataclasses.replace(workload, statistics_bytes=min(workload.statistics_bytes, largest) // 2)
        smaller = sizes if plan.fits else measure(workload)
        if smaller == sizes:
            return plan
        sizes = smaller


def _choose_for(sizes: Sizes, workload: Workload, machine: Machine) -> Plan:
    choices = [
        dataclasses.replace(workload, batch_size=batch_size, activations=place)
        for batch_size in _batch_sizes(workload)
        for place in _places(workload)
    ]
    plans = [Plan(workload=choice, sizes=sizes, needs=_needs(sizes, choice, machine)) for choice in choices]
    allowed = (
        plan
        for plan in plans
        if plan.fits and (workload.activations != "auto" or _within_budget(plan, workload, machine))
    )
    return next(allowed, plans[-1])


def _batch_sizes(workload: Workload) -> list[int]:
    if workload.batch_size is not None or not workload.calibrated:
        return [workload.batch_size or 1]
    sizes = [min(LARGEST_BATCH, workload.samples)]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes


def _places(workload: Workload) -> list[Place]:
    if workload.activations != "auto":
        return [workload.activations]
    if not workload.calibrated:
        return ["memory"]
    return [
        place
        for place in PLACES
        if (place != "device" or workload.device.type != "cpu") and (place != "disk" or workload.writes)
    ]


def _within_budget(plan: Plan, workload: Workload, machine: Machine) -> bool:
    """Whether hidden states in RAM stay within what they are given, by default half of what the program leaves."""
    if plan.workload.activations != "memory" or not workload.writes:
        return True
    budget = workload.activation_memory
    if budget is None and machine.memory is not None:
        budget = (machine.memory - machine.program) // 2
    return budget is None or plan.needs["RAM"].parts.get("hidden states", 0) <= budget


def _needs(sizes: Sizes, workload: Workload, machine: Machine) -> dict[str, Need]:
    """What `workload`, its choices made, needs of everything at its height."""
    states = sizes.state * sizes.streams * workload.share
    on_cpu = workload.device.type == "cpu"
    work = max(
        (parts for block in sizes.blocks for parts in _working(block, sizes, workload)),
        key=lambda parts: sum(parts.values()),
    )
    memory = {"Python, torch, transformers": machine.program}
    if on_cpu:
        memory |= work
    in_memory = workload.activations == "memory" or (on_cpu and workload.activations == "device")
    memory["hidden states"] = states if in_memory else 0
    results = [block.results * (1 if workload.writes else block.count) for block in sizes.blocks]
    memory["quantized weights"] = max(results) if workload.writes else sum(results)
    needs = {"RAM": Need(parts=_with_allowance(memory), available=machine.memory)}
    if not on_cpu:
        gpu = {**work, "hidden states": states if workload.activations == "device" else 0}
        needs["GPU memory"] = Need(parts=_with_allowance(gpu), available=machine.gpu)
    if workload.writes:
        disk = {"checkpoint": sizes.output}
        joined = min(sizes.output, MAX_SHARD_BYTES)
        kept = 2 * sizes.state * sizes.streams * workload.samples
        if kept > joined:
            disk["hidden states, to resume from"] = kept
        else:
            disk["a file while it is joined"] = joined
        needs["disk"] = Need(parts=_nonzero(disk), available=machine.disk)
    return needs


def _working(block: BlockSizes, sizes: Sizes, workload: Workload) -> Iterator[dict[str, int]]:
    """What is on the device, hidden states aside, at every height of the work on one block."""
    resident = {
        "one block": block.weights,
        "its weights as stored": block.stored,
        "its float copy": block.float_copy,
        "outside the blocks": sizes.outside,
    }
    batch = min(workload.batch_size or 1, workload.share)
    here = workload.activations == "device" or (workload.activations == "memory" and workload.device.type == "cpu")
    per_sample = 0 if here else sizes.state  # from elsewhere, the states of a batch are brought here
    forward = f"forward pass of {batch} samples" if batch > 1 else "forward pass of a sample"
    for phase in block.phases:
        what, beside = (forward, batch * per_sample) if phase.solved is None else (f"solver of {phase.solved}", 0)
        yield {**resident, "statistics of inputs": phase.statistics, what: phase.fixed + batch * phase.sample + beside}
    if not block.phases:
        yield resident


def _nonzero(parts: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _with_allowance(parts: Mapping[str, int]) -> dict[str, int]:
    kept = _nonzero(parts)
    return {**kept, "allowance": round(sum(kept.values()) * ALLOWANCE)} if kept else kept


def _remedies(
    measure: Measure, workload: Workload, machine: Machine
) -> tuple[tuple[str, ...], Mapping[str, Need] | None]:
    """Single options that make `workload` fit, or else as few as are needed together, or else what the least needs."""

    def fits(changes: list[dict[str, Any]]) -> bool:
        changed = _changed(workload, changes)
        return _choose(measure, changed, machine).fits

    options = list(_options(workload, machine))
    single = [next((value for value in values if fits([value])), None) for values in options]
    found = [_described(value) for value in single if value is not None]
    if found:
        return tuple(found), None
    together = [values[-1] for values in options if "device" not in values[-1]]
    if not fits(together):
        smallest = _changed(workload, together)
        return (), _choose(measure, smallest, machine).needs
    for value in reversed(list(together)):  # what costs quality goes first
        without = [other for other in together if other is not value]
        if fits(without):
            together = without
    return (" with ".join(map(_described, together)),), None


def _options(workload: Workload, machine: Machine) -> Iterator[list[dict[str, Any]]]:
    """Every option with its values, the mildest first; options that cost quality come last."""
    if workload.calibrated and (workload.activations != "auto" or workload.activation_memory is not None):
        yield [{"activations": place} for place in ("memory", "disk")]
    if workload.begun:
        return
    if workload.config.float64:
        yield [{"float64": False}]
    if workload.config.lm_head:
        yield [{"lm_head": False}]
    if workload.device.type == "cuda":
        yield [{"device": "cpu"}]
    elif machine.gpu is not None:
        yield [{"device": "cuda"}]
    if not workload.calibrated:
        return
    if workload.batch_size is not None and workload.batch_size > 1:
        yield [{"batch_size": size} for size in _halves(workload.batch_size, 1)]
    if not workload.config.true_sequential:
        yield [{"true_sequential": True}]
    if workload.samples > FEWEST_SAMPLES:
        yield [{"samples": samples} for samples in _halves(workload.samples, FEWEST_SAMPLES)]
    if workload.length > SHORTEST:
        yield [{"sequence_length": length} for length in _halves(workload.length, SHORTEST)]
    if workload.config.method == "gptaq":
        yield [{"method": "gptq"}]


def _halves(value: int, least: int) -> list[int]:
    values = []
    while value > least:
        value = max(value // 2, least)
        values.append(value)
    return values


def _changed(workload: Workload, changes: list[dict[str, Any]]) -> Workload:
    for change in changes:
        [(name, value)] = change.items()
        if name == "sequence_length":
            workload = dataclasses.replace(workload, length=value)
        elif name == "device":
            workload = dataclasses.replace(workload, device=torch.device(value))
        elif name in ("samples", "batch_size", "activations"):
            workload = dataclasses.replace(workload, **change)
        else:
            workload = dataclasses.replace(workload, config=dataclasses.replace(workload.config, **change))
    return workload


def _described(change: Mapping[str, Any]) -> str:
    [(name, value)] = change.items()
    return f"{name}={value!r}"
