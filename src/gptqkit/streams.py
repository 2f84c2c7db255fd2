"""The calibration samples on their way through the blocks: what enters each, and what its Linears receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .calibration.batches import Batches
from .calibration.cache import ActivationCache
from .calibration.capture import BlockCall, block_call, capture_inputs, head_input, routed_tokens, routing, trace_inputs
from .calibration.statistics import InputStatistics
from .distributed import Processes
from .errors import ArchitectureError
from .job import Job
from .model import FloatModel
from .solving import Measured
from .subsets import Group, Subset, group_subsets
from .targets import Target, output_layer


class Streams:
    """The hidden states of the quantized model and, for methods that pair them, of the float model.

    What stands outside the blocks of `model` is there. With `skip`, samples with non-finite activations are left out.

    Attributes:
        caches: "hidden" and "float": what enters the next block.
    """

    def __init__(self, model: FloatModel, batches: Batches, processes: Processes, *, paired: bool, skip: bool) -> None:
        self.model, self.batches, self.processes, self.paired, self.skip = model, batches, processes, paired, skip
        self.caches: dict[str, ActivationCache] = {}
        self._returned = 0  # how many values a block returns as a tuple, as found when the first one runs
        self._axis = 0  # of the samples in hidden states

    def begin(self, job: Job, dtype: torch.dtype, place: str) -> int:
        """Fill the caches with what was saved last, or with embeddings; return the block that comes next."""
        batches, states = self.batches, job.states
        if job.records:
            self._returned, self._axis = job.records[-1]["returned"], job.records[-1]["axis"]
        layer = 0 if states is None else int(states["layer"])
        if states is None:
            one = self._call(range(1), 0).hidden
            self._axis = int(one.ndim > 3 and one.shape[1] == 1)  # Gemma 3n has several versions of each sample's
            if one.shape[self._axis] != 1:
                name = type(self.model.model).__name__
                raise ArchitectureError(f"{name} has its samples in another axis of hidden states than the first one")
            shape = tuple(one.movedim(self._axis, 0).shape[1:])
        else:
            shape = tuple(states["shape"])
        for stream in ("hidden", "float") if self.paired else ("hidden",):
            file = job.states_file(stream, layer, again=states is not None)
            self.caches[stream] = ActivationCache(batches.mine, shape, dtype, batches.device, place, file)
            if states is not None:
                job.load_states(stream, self.caches[stream])
        for batch in batches if states is None else ():
            call = batches.attempt(batch, self._call, 0)
            if call is not None:
                for cache in self.caches.values():
                    cache.write(batch, call.hidden.movedim(self._axis, 0))
        return layer

    def progress(self) -> dict[str, Any]:
        """Return what the next process must know, as plain values for JSON.

        From here on, all go on like the process that has least memory, so that a resumed job does the same.
        """
        self.batches.size = min(self.processes.gather(self.batches.size))
        excluded = (~self.batches.counts).nonzero().flatten().tolist()
        how = {"returned": self._returned, "axis": self._axis}
        return {"excluded": excluded, "batch_size": self.batches.size, **how}

    def trace(self, layer: int, targets: list[Target]) -> list[Group]:
        """Find the order of the Linears of a block, and which of them share an input, by running one sample."""
        found: list[tuple[list[str], bool]] = []
        if self.batches.mine and targets:  # processes without samples learn it from the others
            one = range(self.batches.mine.start, self.batches.mine.start + 1)
            block, hidden = self.model.blocks[layer], self._read(self.caches["hidden"], one)
            modules = {target.inner: block.get_submodule(target.inner) for target in targets}
            traced = trace_inputs(modules, partial(self._run, self._call(one, layer), hidden, block))
            tokens = hidden.shape[self._axis : -1].numel()
            found = [(names, received.shape[:-1].numel() != tokens) for names, received in traced]
        return group_subsets(targets, next(filter(None, self.processes.gather(found)), []))

    def collect(
        self,
        layer: int,
        portion: Sequence[tuple[Group, Subset]],
        pools: dict[Group, InputStatistics],
        twin: nn.Module | None,
    ) -> list[Measured]:
        """Run all samples once, and sum up what the subsets of a portion receive.

        Args:
            layer: Number of the block.
            portion: The subsets, each with its group.
            pools: What all experts of a group receive, by group; the first portion of a group adds its own.
            twin: The block with its float weights, where streams are paired.
        """
        into: dict[str, InputStatistics] = {}  # by the name of the first of a subset
        leaders: dict[str, tuple[Target, bool]] = {}
        measured: list[Measured] = []
        fresh = [group for group in dict.fromkeys(group for group, _ in portion) if group.routed and group not in pools]
        pools |= {group: self._statistics(group.subsets[0][0], group) for group in fresh}
        for group, subset in portion:
            statistics = into[subset[0].inner] = self._statistics(subset[0], group)
            leaders[subset[0].inner] = subset[0], group.routed
            measured.append(Measured(subset, statistics, pools.get(group)))
        for group in fresh:  # what experts of other portions receive goes into the pool alone
            for subset in group.subsets:
                leaders.setdefault(subset[0].inner, (subset[0], True))
                into.setdefault(subset[0].inner, pools[group])
        for batch in self.batches:
            captured = self.batches.attempt(batch, self._capture, layer, [each for each, _ in leaders.values()], twin)
            for name, (streams, tokens) in ({} if captured is None else captured).items():
                target, routed = leaders[name]
                where = f"{target.name}, block {layer}"
                rows = streams if into[name].paired else streams[:1]
                into[name].update(*self.batches.counted(batch, rows, tokens, where, routed=routed, skip=self.skip))
        self._add_up(dict.fromkeys(into.values()), f"{measured[0].targets[0].name}, block {layer}")
        for group, subset in portion:
            if group in fresh:
                pools[group].absorb(into[subset[0].inner])
        return measured

    def collect_head(self, head: Target) -> Measured:
        """Run all samples once, and sum up what the output layer receives."""
        statistics = InputStatistics(head.shape[1], self.batches.device, cross=self.paired)
        for batch in self.batches:
            streams = self.batches.attempt(batch, self._head_inputs)
            if streams is not None:
                rows = self.batches.counted(batch, streams, None, head.name, routed=False, skip=self.skip)
                statistics.update(*rows)
        self._add_up([statistics], head.name)
        return Measured([head], statistics)

    def advance(self, stream: str, layer: int, block: nn.Module, job: Job) -> None:
        """Let the hidden states of "hidden" or "float" through `block`, the stream's own of number `layer`."""
        cache = self.caches[stream]
        after = cache.successor(job.states_file(stream, layer + 1))
        for batch in self.batches:
            states = self.batches.attempt(batch, self._forward, layer, block, cache)
            if states is not None:
                after.write(batch, states.movedim(self._axis, 0))
        self.caches[stream] = after

    def distance(self, layer: int, batch: range) -> tuple[Tensor, Tensor]:
        """Return how far block `layer` takes a batch from where it is in the float model, which is a block ahead.

        Both are sums over the tokens that count: the squared distances, and the squares of the float model's states.
        """
        with torch.no_grad():
            call, entered = self._call(batch, layer), self.caches["hidden"].read(batch)
            expected = self.caches["float"].read(batch).float()
            apart = ~self.batches.mask(batch)
            shape = (len(batch), *[1] * (entered.dim() - 1))
            entered = entered.masked_fill(apart.all(1).view(shape), 0)  # a sample that was left out may hold NaN
            if expected.shape[-2] != apart.shape[1]:  # not a state per token
                apart = apart.all(1, keepdim=True)
            apart = apart.view(*shape[:-2], -1, 1)
        states = self._run(call, entered.movedim(0, self._axis), self.model.blocks[layer]).movedim(self._axis, 0)
        lost, whole = (each.masked_fill(apart, 0).square().sum() for each in (states.float() - expected, expected))
        return lost, whole

    def first_sample(self, layer: int) -> Callable[[nn.Module], Tensor]:
        """Return what runs block `layer`, or another in its place, on the first sample."""
        return partial(self._run, self._call(range(1), layer), self._read(self.caches["hidden"], range(1)))

    def _capture(
        self, batch: range, layer: int, leaders: Sequence[Target], twin: nn.Module | None
    ) -> dict[str, tuple[list[Tensor], Tensor | None]]:
        """Return what each of `leaders` receives of a batch, in both models where there is a twin, and of which tokens.

        In the float model tokens go to the experts that they go to in the quantized one.
        """
        call, routes = self._call(batch, layer), None
        seen: list[dict[str, Tensor]] = []
        for block, stream in ((self.model.blocks[layer], "hidden"), (twin, "float")):
            if block is None:
                continue
            modules = {target.inner: block.get_submodule(target.inner) for target in leaders}
            experts = {target.experts: block.get_submodule(target.experts) for target in leaders if target.experts}
            with routing(experts, impose=routes) as taken:
                run = partial(call, block, self._read(self.caches[stream], batch))
                seen.append(capture_inputs(modules, run))
            routes = taken
        captured: dict[str, tuple[list[Tensor], Tensor | None]] = {}
        for target in leaders:
            none = call.hidden.new_empty(0, target.shape[1])
            tokens = None
            if routes and target.experts is not None and target.expert is not None:
                tokens = routed_tokens(routes[target.experts][0], target.expert)[0]
            captured[target.inner] = [each.get(target.inner, none) for each in seen], tokens
        return captured

    def _head_inputs(self, batch: range) -> list[Tensor]:
        model, head = self.model, output_layer(self.model.model) or nn.Module()
        tensors = self.batches.tensors(batch)
        return [
            head_input(model.model, model.blocks, head, tensors, self._read(cache, batch), returned=self._returned)
            for cache in self.caches.values()
        ]

    def _read(self, cache: ActivationCache, batch: range) -> Tensor:
        """Return hidden states as blocks take them."""
        return cache.read(batch).movedim(0, self._axis)

    def _add_up(self, statistics: Iterable[InputStatistics], where: str) -> None:
        """Bring together what all processes found out."""
        for one in statistics:
            one.tokens = sum(self.processes.gather(one.tokens))
            for total in one.sums if one.tokens else ():
                self.processes.add_up(total)
        if self.skip:
            self.batches.settle(self.processes.gather(self.batches.counts), where)

    def _call(self, batch: range, layer: int) -> BlockCall:
        """Return how the model calls block `layer` on a batch."""
        tensors = self.batches.tensors(batch)
        return block_call(self.model.model, self.model.blocks, layer, tensors, returned=self._returned)

    def _forward(self, batch: range, layer: int, block: nn.Module, cache: ActivationCache) -> Tensor:
        """Return what leaves `block` of a batch."""
        return self._run(self._call(batch, layer), self._read(cache, batch), block)

    def _run(self, call: BlockCall, hidden: Tensor, block: nn.Module) -> Tensor:
        output = call(block, hidden)
        self._returned = len(output) if type(output) in (tuple, list) else 0
        states = output[0] if self._returned else output
        if not isinstance(states, Tensor):
            raise ArchitectureError(
                f"a {type(block).__name__} returns a {type(output).__name__}, not hidden states, so this model cannot "
                "be quantized block by block"
            )
        return states

    def _statistics(self, target: Target, group: Group) -> InputStatistics:
        """Return empty statistics of what a Linear receives.

        Experts that are modules of their own choose other tokens in the float model: nothing pairs them.
        """
        paired = self.paired and (target.expert is not None or not group.routed)
        return InputStatistics(target.shape[1], self.batches.device, cross=paired)
