"""The calibration samples on their way through the blocks: what enters each, and what its Linears receive."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .calibration.batches import Batches
from .calibration.cache import ActivationCache, Handed
from .calibration.capture import (
    BlockCall,
    Forward,
    block_call,
    capture_inputs,
    forwards_replaced,
    hand_on,
    routed_tokens,
    routing,
    trace_inputs,
    trace_sums,
    without_cache,
)
from .calibration.statistics import InputStatistics
from .distributed import Processes
from .errors import ArchitectureError
from .job import states_file
from .model import FloatModel
from .solving import Measured
from .stacks import Stack, added_behind, hidden_states, probe_stack
from .subsets import Group, Portion, group_subsets, portions
from .targets import Target, output_layer

ENCODED = {"hidden": "encoded", "float": "encoded-float"}
"""Names of the streams that end with an encoder, and are kept for its decoder."""
BESIDE = "-beside"


class Streams:
    """The hidden states of the quantized model and, for methods that pair them, of the float model.

    What stands outside the blocks of `model` is there. With `cross`, statistics pair both models, and with `drift` also
    what outputs are added to. With `skip`, samples with non-finite activations are left out.

    Attributes:
        stacks: How the blocks are called, in the order of their numbers.
        caches: "hidden" and "float": what enters the next block; of an encoder that is done, what left it (`ENCODED`).
        handed: By the same names, what the block before hands on beside, if it does.
    """

    def __init__(
        self,
        model: FloatModel,
        batches: Batches,
        processes: Processes,
        *,
        paired: bool,
        cross: bool,
        drift: bool = False,
        skip: bool,
    ) -> None:
        self.model, self.batches, self.processes = model, batches, processes
        self.paired, self.cross, self.drift, self.skip = paired, cross, drift, skip
        self.caches: dict[str, ActivationCache] = {}
        self.handed: dict[str, Handed] = {}
        self.stacks: list[Stack] = []
        self._again: set[str] = set()  # Linears that a block calls several times
        self._sums: dict[str, str] = {}  # of Linears whose outputs are added to what enters another module: this one

    def begin(self, folder: Path, saved: Mapping[str, Any] | None, dtype: torch.dtype, place: str) -> int:
        """Find out how all blocks are called, and take up what was saved last; return the block that comes next.

        Hidden states are kept in `place`, on disk in `folder`, where those that a job `saved` are, too.
        """
        self._folder, self._dtype, self._place = folder, dtype, place
        for number, blocks in enumerate(self.model.stacks):
            before = self._before(range(1), blocks.start, "hidden")
            self.stacks.append(probe_stack(self.model, blocks, self.batches, before, dtype))
            self.batches.added[number] = added_behind(self.model, self.stacks[-1], self.batches, number, before)
            self._check_padding()
        if saved is None:
            return 0
        layer = int(saved["layer"])
        for stream, files in sorted(saved["files"].items()):  # "hidden" before what is beside it
            room: ActivationCache | Handed
            if stream.endswith(BESIDE):
                whose = stream.removesuffix(BESIDE)
                room = self.handed[whose] = Handed(self.batches.mine, self.caches[whose])
            else:
                stack = self.stacks[0] if stream in ENCODED.values() else self._stack(layer)
                room = self.caches[stream] = self._cache(stack, self._file(stream, layer, again=True))
            for name, start, stop, _ in files:  # of whichever processes
                room.load(folder / name, range(start, stop))
        return layer

    def enter(self, layer: int) -> None:
        """Let embeddings into the caches where block `layer` is the first of a stack."""
        stack = self._stack(layer)
        self.batches.stack, self.batches.across = self.stacks.index(stack), stack.across
        if layer != stack.blocks.start:
            return
        fresh = ("hidden", "float") if self.paired else ("hidden",)
        self.caches |= {each: self._cache(stack, self._file(each, layer)) for each in fresh}
        self.handed = {each: Handed(self.batches.mine, self.caches[each]) for each in fresh if stack.handed is not None}
        for batch, call in self.batches.results(partial(self._call, layer=layer)):
            for each in fresh:
                self.caches[each].write(batch, call.hidden.movedim(stack.axis, 0).to(stack.dtype))

    @property
    def states(self) -> dict[str, ActivationCache | Handed]:
        """All that enters the next block, by name."""
        return {**self.caches, **{stream + BESIDE: each for stream, each in self.handed.items()}}

    def progress(self) -> dict[str, Any]:
        """Return what the next process must know, as plain values for JSON.

        From here on, all go on like the process that has least memory, so that a resumed job does the same.
        """
        self.batches.size = min(self.processes.gather(self.batches.size))
        excluded = (~self.batches.counts).nonzero().flatten().tolist()
        return {"excluded": excluded, "batch_size": self.batches.size}

    def trace(self, layer: int, targets: list[Target]) -> list[Group]:
        """Find the order of the Linears of a block, and which of them share an input, by running one sample."""
        found: list[tuple[list[str], bool, bool]] = []
        sums: dict[str, str] = {}
        one = self._first(layer) if targets else None
        if one is not None:  # the other processes learn it from this one
            block, hidden = self.model.blocks[layer], self._read("hidden", one, layer)
            modules = {target.inner: block.get_submodule(target.inner) for target in targets}
            traced = trace_inputs(modules, partial(self._run, self._call(one, layer), hidden, block))
            tokens = math.prod(self._stack(layer).shape[:-1])
            for names, received in traced:
                counts = [each.shape[:-1].numel() for each in received]
                part = any(count != tokens and self.batches.stack_of(count, 1) is None for count in counts)
                found.append((names, part, len(counts) > 1))
            if self.drift:
                experts = {target.inner for target in targets if target.expert is not None}
                alone = [names[0] for names, part, several in found if len(names) == 1 and not (part or several)]
                writing = {name: modules[name] for name in alone if name not in experts}
                sums = trace_sums(block, writing, partial(self._run, self._call(one, layer), hidden, block))
        found, self._sums = next((each for each in self.processes.gather((found, sums)) if each[0]), ([], {}))
        self._again = {name for names, _, several in found if several for name in names}
        return group_subsets(targets, [(names, part) for names, part, _ in found])

    def _first(self, layer: int) -> range | None:
        """Return the first sample that counts and, where others are left out, that block `layer` keeps finite.

        None in all processes but the one that has it. Where the block keeps none finite, it is the first that counts.
        """
        mine = [range(each, each + 1) for each in self.batches.mine if self.batches.counts[each]]
        sound = next((one for one in mine if not self.skip or self._stays_finite(layer, one)), None)
        found = self.processes.gather((sound, mine[0] if mine else None))
        first = next(one for order in zip(*found, strict=True) for one in order if one is not None)
        return first if first in mine else None

    def _stays_finite(self, layer: int, one: range) -> bool:
        leaving = self.through(one, layer, self.model.blocks[layer], self.caches["hidden"].read(one))
        return bool(self.of_tokens(leaving, one).isfinite().all())

    def collect(self, layer: int, groups: Iterable[Group], twin: nn.Module | None = None) -> Iterator[list[Measured]]:
        """Yield what all subsets of some groups receive, portion by portion (see `portions`): all samples run for each.

        Every list is emptied before the next. `twin` is the block with its float weights, needed where statistics pair
        both models.
        """
        pools: dict[Group, InputStatistics] = {}
        for portion in portions(groups, cross=self.cross):
            measured = self._collect(layer, portion, pools, twin if self.cross else None)
            yield measured
            measured.clear()  # not in memory beside the next

    def _collect(
        self, layer: int, portion: Portion, pools: dict[Group, InputStatistics], twin: nn.Module | None
    ) -> list[Measured]:
        """Run all samples once; the first portion of a group also sums up in `pools` what all its experts receive."""
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
        paired = {name for name, statistics in into.items() if statistics.paired}
        for _, captured in self.batches.results(partial(self._counted, layer, leaders, paired, twin)):
            for name, calls in captured.items():
                for rows in calls:
                    into[name].update(*rows)
        self._add_up(dict.fromkeys(into.values()), f"{measured[0].targets[0].name}, block {layer}")
        for group, subset in portion:
            if group in fresh:
                pools[group].absorb(into[subset[0].inner])
        return measured

    def collect_head(self, head: Target) -> Measured:
        """Run all samples once, and sum up what the output layer receives."""
        statistics = InputStatistics(head.shape[1], self.batches.device, cross=self.cross)
        self.batches.stack, self.batches.across = len(self.stacks) - 1, False
        for _, rows in self.batches.results(partial(self._head_rows, head)):
            statistics.update(*rows)
        self._add_up([statistics], head.name)
        return Measured([head], statistics)

    def advance(self, stream: str, layer: int, block: nn.Module, *, resumable: bool = True) -> None:
        """Let the hidden states of "hidden" or "float" through `block`, the stream's own of number `layer`.

        Where an encoder ends with it, they are kept. Of a job that nothing resumes, the file of what entered goes. With
        `skip`, samples that overflow at the end of the block are left out at once: what is learned sees only that.
        """
        name, stack = self._leaving(stream, layer), self._stack(layer)
        after = self.caches[stream].successor(self._file(name, layer + 1))
        for batch, states in self.batches.results(partial(self._forward, layer=layer, block=block, stream=stream)):
            leaving = states.movedim(stack.axis, 0)
            after.write(batch, leaving)
            if self.skip:
                finite = self.of_tokens(leaving, batch).isfinite().flatten(1).all(1)
                self.batches.counts[batch.start : batch.stop] &= finite.cpu()
        if self.skip:
            self.batches.settle(self.processes.gather(self.batches.counts), f"what follows block {layer}")
        before = self.caches.pop(stream).file
        self.caches[name] = after
        if before is not None and not resumable:
            before.unlink()
        if layer + 1 == stack.blocks.stop:
            self.handed.pop(stream, None)

    def block(self, layer: int) -> Any:
        """Bring the weights of one block for a while."""
        return self.model.block(layer, self.batches.device, self._dtype)

    def head(self) -> Any:
        """Bring the weights of an output layer that has its own for a while."""
        return self.model.head(self.batches.device, self._dtype)

    def room(self, layer: int) -> ActivationCache:
        """Return room for what leaves block `layer`, one of the last stack, of this process's samples."""
        return self._cache(self.stacks[-1], self._file("behind", layer))

    def through(self, batch: range, layer: int, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return what leaves `block`, of number `layer`, of a batch where `hidden` enters it, both samples first."""
        axis = self._stack(layer).axis
        return self._run(self._call(batch, layer), hidden.movedim(0, axis), block).movedim(axis, 0)

    def predict(self, batch: range, hidden: Tensor) -> Tensor:
        """Return the logits of a batch where `hidden`, samples first, leaves the last block."""
        model, stack = self.model.model, self.stacks[-1]
        leaving = hand_on(stack.returned, leaving=hidden.movedim(0, stack.axis))
        before = [*self._before(batch, len(self.model.blocks), "hidden")[:-1], leaving]
        with forwards_replaced(self.model.blocks, before):
            logits: Tensor = model(**self.batches.tensors(batch), **without_cache(model)).logits
        return logits

    def distance(self, layer: int, batch: range, metric: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return how far block `layer` takes a batch from where it is in the float model, which is a block ahead.

        Both are sums over the tokens that count: of xT M x, x the difference, and the same of the float model's states.
        `metric` is M, (width, width); None for the identity.
        """
        with torch.no_grad():
            entered = self.caches["hidden"].read(batch)
            expected = self.caches[self._leaving("float", layer)].read(batch).float()
            left_out = ~self.batches.mask(batch, self.batches.stack).any(1)
            entered = entered.masked_fill(left_out.view(-1, *[1] * (entered.dim() - 1)), 0)  # it may hold NaN
        states = self.through(batch, layer, self.model.blocks[layer], entered)
        lost, whole = (self.of_tokens(each, batch) for each in (states.float() - expected, expected))
        if metric is None:
            return lost.square().sum(), whole.square().sum()
        return ((lost @ metric) * lost).sum(), ((whole @ metric) * whole).sum()

    def of_tokens(self, states: Tensor, batch: range) -> Tensor:
        """Return hidden states, samples first, with 0 for padding and samples left out."""
        mask = self.batches.mask(batch, self.batches.stack)
        if states.shape[-2] == mask.shape[1] + self.batches.added[self.batches.stack]:
            apart = ~self.batches.of_states(batch, states.shape[-2])
        else:  # not a state per token
            apart = ~mask.any(1, keepdim=True)
        return states.masked_fill(apart.view(len(batch), *[1] * (states.dim() - 3), -1, 1), 0)

    def first_sample(self, layer: int) -> Callable[[nn.Module], Tensor] | None:
        """Return what runs block `layer`, or another in its place, on the first sample that counts (see `_first`).

        It returns hidden states, samples first, with 0 for padding. None in all processes but one.
        """
        one = self._first(layer)
        if one is None:
            return None
        call, hidden, axis = self._call(one, layer), self._read("hidden", one, layer), self._stack(layer).axis
        return lambda block: self.of_tokens(self._run(call, hidden, block).movedim(axis, 0), one)

    def _counted(
        self,
        layer: int,
        leaders: Mapping[str, tuple[Target, bool]],
        paired: Collection[str],
        twin: nn.Module | None,
        batch: range,
    ) -> dict[str, list[list[Tensor]]]:
        """Return the rows that count of what `leaders` receive of a batch, call by call, of those `paired` in both."""
        captured = self._capture(batch, layer, [target for target, _ in leaders.values()], twin)
        found: dict[str, list[list[Tensor]]] = {}
        for name in list(captured):
            (target, routed), (calls, tokens) = leaders[name], captured.pop(name)
            how: dict[str, Any] = {"routed": routed, "skip": self.skip}
            wanted = [streams if name in paired else streams[:1] for streams in calls]
            where = f"{target.name}, block {layer}"
            found[name] = [self.batches.counted(batch, streams, tokens, where, **how) for streams in wanted]
        return found

    def _capture(
        self, batch: range, layer: int, leaders: Sequence[Target], twin: nn.Module | None
    ) -> dict[str, tuple[list[tuple[Tensor, ...]], Tensor | None]]:
        """Return what each of `leaders` receives of a batch, in both models where there is a twin, and of which tokens.

        Call by call. In the float model tokens go to the experts that they go to in the quantized one.
        """
        routes = None
        seen: list[dict[str, list[Tensor]]] = []
        for block, stream in ((self.model.blocks[layer], "hidden"), (twin, "float")):
            if block is None:
                continue
            hidden = self._read(stream, batch, layer)
            names = [name for target in leaders for name in (target.inner, self._sums.get(target.inner)) if name]
            modules = {name: block.get_submodule(name) for name in names}
            experts = {target.experts: block.get_submodule(target.experts) for target in leaders if target.experts}
            with routing(experts, impose=routes) as taken:
                run = partial(self._call(batch, layer, stream), block, hidden)
                seen.append({"": [hidden], **capture_inputs(modules, run, self._again)})
            routes = taken
        captured: dict[str, tuple[list[tuple[Tensor, ...]], Tensor | None]] = {}
        for target in leaders:
            none = torch.empty(0, target.shape[1], dtype=self._dtype, device=self.batches.device)
            tokens = None
            if routes and target.experts is not None and target.expert is not None:
                tokens = routed_tokens(routes[target.experts][0], target.expert)[0]
            calls = list(zip(*(each.get(target.inner, [none]) for each in seen), strict=True))
            if target.inner in self._sums and twin is not None:
                quantized, plain = (each[self._sums[target.inner]][0] for each in seen)
                calls = [(*calls[0], plain - quantized)]
            captured[target.inner] = calls, tokens
        return captured

    def _head_rows(self, head: Target, batch: range) -> list[Tensor]:
        """Return the rows that count of what the output layer receives of a batch, in both models if paired."""
        model, layer = self.model.model, {"head": output_layer(self.model.model) or nn.Module()}
        tensors, found = self.batches.tensors(batch), []
        for stream in ("hidden", "float")[: 1 + self.cross]:
            with forwards_replaced(self.model.blocks, self._before(batch, len(self.model.blocks), stream)):
                found += capture_inputs(layer, lambda: model(**tensors, **without_cache(model)))["head"]
        return self.batches.counted(batch, found, None, head.name, routed=False, skip=self.skip)

    def _check_padding(self) -> None:
        """Refuse padding in the stack probed last where its hidden states are not one for each token."""
        number = len(self.stacks) - 1
        part, added = self.batches.parts[number], self.batches.added[number]
        tokens, states = part.input_ids.shape[1], self.stacks[-1].shape[-2]  # before them there may be other axes
        if part.attention_mask is not None and states != tokens + added:
            raise ArchitectureError(
                f"{type(self.model.model).__name__} makes {states} hidden states of {tokens} tokens, so padding cannot "
                "be told apart in its blocks; calibrate on whole samples (concatenate=True)"
            )

    def _file(self, stream: str, layer: int, *, again: bool = False) -> Path:
        return states_file(self._folder, stream, layer, self.processes.rank, again=again)

    def _cache(self, stack: Stack, file: Path) -> ActivationCache:
        return ActivationCache(self.batches.mine, stack.shape, stack.dtype, self.batches.device, self._place, file)

    def _stack(self, layer: int) -> Stack:
        """Return the stack of a block; the last one where all are done."""
        return next((stack for stack in self.stacks if layer in stack.blocks), self.stacks[-1])

    def _leaving(self, stream: str, layer: int) -> str:
        """Return what a stream is called behind block `layer`."""
        stack = self._stack(layer)
        return ENCODED[stream] if layer + 1 == stack.blocks.stop and stack is not self.stacks[-1] else stream

    def _read(self, stream: str, batch: range, layer: int) -> Tensor:
        """Return hidden states as block `layer` takes them."""
        return self.caches[stream].read(batch).movedim(0, self._stack(layer).axis)

    def _add_up(self, statistics: Iterable[InputStatistics], where: str) -> None:
        """Bring together what all processes found out."""
        for one in statistics:
            one.tokens = sum(self.processes.gather(one.tokens))
            for total in one.sums if one.tokens else ():
                self.processes.add_up(total)
        if self.skip:
            self.batches.settle(self.processes.gather(self.batches.counts), where)

    def _call(self, batch: range, layer: int, stream: str = "hidden") -> BlockCall:
        """Return how the model calls block `layer` on a batch, a decoder's with what left the encoder in a stream."""
        before, tensors = self._before(batch, layer, stream), self.batches.tensors(batch)
        return block_call(self.model.model, self.model.blocks, tensors, before)

    def _before(self, batch: range, layer: int, stream: str) -> list[Forward]:
        """Return what the blocks before block `layer` are to do, so that it is called as in a whole forward pass."""
        before: list[Forward] = []
        for stack in self.stacks:
            passed = stack.blocks[: max(0, layer - stack.blocks.start)]
            own = [hand_on(stack.returned)] * len(passed)
            kept = self.caches.get(stream if stack is self.stacks[-1] else ENCODED[stream])
            if passed == stack.blocks and kept is not None:
                own[-1] = hand_on(stack.returned, leaving=kept.read(batch).movedim(0, stack.axis))
            elif own and stack.beside is not None:
                own[0] = hand_on(stack.returned, beside=stack.beside)
            elif own and stream in self.handed:
                values, written = self.handed[stream].read(batch)
                own[-1] = hand_on(stack.returned, beside=_giving(values, written))
            before += own
        return before

    def _forward(self, batch: range, layer: int, block: nn.Module, stream: str) -> Tensor:
        """Return what leaves `block` of a batch."""
        call, stack = self._call(batch, layer, stream), self._stack(layer)
        before = {name: dict(each) for name, each in call.mappings.items()}
        output = call(block, self._read(stream, batch, layer))
        if stack.handed is not None:
            known = self.handed[stream].read(batch)[1] if layer > stack.blocks.start else {}
            written = {
                name: known.get(name, {})
                | {key: value for key, value in each.items() if value is not before[name].get(key)}
                for name, each in call.mappings.items()
            }
            self.handed[stream].write(
                batch, ([output[place] if place in stack.handed else None for place in range(stack.returned)], written)
            )
        return hidden_states(output, block)

    def _run(self, call: BlockCall, hidden: Tensor, block: nn.Module) -> Tensor:
        return hidden_states(call(block, hidden), block)

    def _statistics(self, target: Target, group: Group) -> InputStatistics:
        """Return empty statistics of what a Linear receives.

        Experts that are modules of their own choose other tokens in the float model: nothing pairs them.
        """
        paired = self.cross and (target.expert is not None or not group.routed)
        drift = target.shape[0] if paired and target.inner in self._sums else 0
        return InputStatistics(target.shape[1], self.batches.device, cross=paired, drift=drift)


def _giving(values: Sequence[Any], written: Mapping[str, Mapping[Any, Any]]) -> Forward:
    """Return what returns some values as a block did, and writes what blocks wrote."""

    def forward(*_: Any, **named: Any) -> Sequence[Any]:
        for name, each in written.items():
            named[name].update(each)
        return values

    return forward
