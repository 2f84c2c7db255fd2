"""How sensitive every part of a model is: one pass over its blocks, solved in several ways and put back."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from .errors import ConfigError, ShapeError
from .export.formats import find_format, find_snap
from .export.modules import CHOSEN, experts_of
from .progress import Progress, ProgressCallback
from .quantizer.allocation import Candidate, allocate_bits
from .quantizer.config import BITS, ModuleOverride, QuantizeConfig
from .quantizer.gptq import solve_gptq
from .solving import naming
from .streams import Streams
from .targets import Target, find_head, find_targets, matrix, tell_misfits
from .units import counted, size_text
from .walking import FloatWalk

_LOG = logging.getLogger("gptqkit")
SAMPLES = 4  # on which a block shows what an error inside it does to its output
ROWS = 1024  # of a Linear, evenly spaced, that show what a candidate loses beside others
SMALLEST_GROUP = 32
_Way: TypeAlias = tuple[int, int | None]  # bits, and columns per group
PLAIN: Mapping[str, Any] = {"grid": "mse", "refine_rounds": 0, "two_sided": False, "learn_iterations": 0}
"""How candidates are solved: better ways choose alike."""


@torch.no_grad()
def with_chosen_bits(walk: FloatWalk, config: QuantizeConfig, progress: ProgressCallback) -> QuantizeConfig:
    """Return the settings with an override for every module that gets other bits or groups, or stays in float.

    Linears that share an input, such as q, k and v, and all experts of a layer are kept in the same way, as servers
    need it: in 2, 3, 4 or 8 bits, in groups as asked for or, with fewer than 8 bits, of half the size and so on down to
    32 columns, or in floating point. The loss of a candidate is tr(E Hd ET) of GPTQ's solution, times what such an
    error in this part does to the output of its block, measured for one candidate; outputs count relative to their own
    size, and losses of blocks add up.

    `progress` is called once per block.

    Raises:
        ConfigError: A format with one setting for all modules, a target that cannot be reached, or, with `strict`,
            Linears that do not fit.
    """
    parts, members, whole = sensitivities(walk, config, progress)
    free = [target for group in members.values() for target in group]
    chosen = allocate_bits(parts, _budget(whole, free, parts, config))
    if walk.processes.rank == 0:
        counts = Counter[str]()
        for name in sorted(chosen, key=lambda each: (chosen[each].bits or math.inf, -(chosen[each].group_size or 0))):
            counts[_name(chosen[name])] += len(members[name])
        _LOG.info("chosen: %s", ", ".join(f"{counted(count, 'module')} {kept}" for kept, count in counts.items()))
    overrides = {
        _pattern(target): _override(candidate)
        for name, candidate in chosen.items()
        for target in members[name]
        if (candidate.bits, candidate.group_size) != (target.config.bits, target.config.group_size)
    }
    return dataclasses.replace(config, overrides={**config.overrides, **overrides})


def with_chosen_before(config: QuantizeConfig, before: QuantizeConfig) -> QuantizeConfig:
    """Return the settings with the overrides that `with_chosen_bits` added to those of `before`, by their patterns."""
    chosen = {pattern: own for pattern, own in before.overrides.items() if CHOSEN.fullmatch(pattern)}
    return dataclasses.replace(config, overrides={**config.overrides, **chosen, **config.overrides})


def sensitivities(
    walk: FloatWalk, config: QuantizeConfig, progress: ProgressCallback
) -> tuple[dict[str, list[Candidate]], dict[str, list[Target]], int]:
    """Return, by the name of its first Linear, every part's candidates, and its Linears; and bytes as asked for.

    Arguments and errors are those of `with_chosen_bits`.
    """
    targets, left = find_targets(walk.model.model, config)
    tell_misfits(targets, left, config, strict=walk.run.strict, log=False)
    head, (whole, itemsizes) = find_head(walk.model.model, config), walk.model.stored_bytes()
    every = [each for own in [*targets, [head] if head else []] for each in own]
    floats = {each.name: each.weights * itemsizes.get(f"{each.name}.weight", 0) for each in every}
    whole += sum(each.packed_bytes - floats[each.name] for each in every)
    free = _free(targets, config)
    if config.chooses_bits:  # a target that is out of reach shows before any work
        budget, stored = check_reachable(whole, targets, config), 8 * sum(floats[each.name] for each in free)
        if config.target_size is not None and not config.overrides and 0 < stored <= budget:
            asked = size_text(int(config.target_size))
            raise ConfigError(f"target_size is {asked}, in which everything fits in floating point; give less")
    parts: dict[str, list[Candidate]] = {}
    members: dict[str, list[Target]] = {}
    for layer, streams in walk.blocks(skip=config.skip_nonfinite):
        for own, lost in _alike(_measured(layer, targets[layer], streams, config)):
            stored = 8 * sum(floats[each.name] for each in own)
            plain = Candidate(bits=None, group_size=None, size=stored, loss=0.0)
            parts[own[0].name], members[own[0].name] = [*_candidates(own, lost, config), plain], own
        if walk.processes.rank == 0:
            progress(Progress(stage="choose bits", done=layer + 1, total=len(targets), layer=layer))
    called = {each.name for own in members.values() for each in own}
    never = [each for each in free if each.name not in called]  # so they stay as they are
    return parts, members, whole + sum(floats[each.name] - each.packed_bytes for each in never)


def check_reachable(whole: int, targets: Sequence[list[Target]], config: QuantizeConfig) -> float:
    """Return the bits that may be given to Linears; ConfigError where the smallest widths take more.

    The checkpoint has `whole` bytes where all have the bits asked for.
    """
    free = _free(targets, config)
    lossless = {each.name: _candidates([each], dict.fromkeys(_ways([each]), 0.0), config) for each in free}
    return _budget(whole, free, lossless, config)


def _free(targets: Sequence[list[Target]], config: QuantizeConfig) -> list[Target]:
    """Return the Linears whose bits are chosen."""
    return [each for own in targets for each in own if config.override_of(each.name) is None]


def _name(candidate: Candidate) -> str:
    if candidate.bits is None:
        return "in floating point"
    groups = "" if candidate.group_size is None else f" in groups of {candidate.group_size}"
    return f"of {candidate.bits} bits{groups}"


def _pattern(target: Target) -> str:
    """Return what matches a Linear, or the same one of all experts of its layer, which are kept alike."""
    if target.expert is None:
        return f"^{re.escape(target.name)}$"
    path, _, leaf = target.name.rsplit(".", 2)
    return rf"^{re.escape(path)}\.\d+\.{re.escape(leaf)}$"


def _override(candidate: Candidate) -> ModuleOverride:
    if candidate.bits is None:
        return ModuleOverride(skip=True)
    return ModuleOverride(bits=candidate.bits, group_size=candidate.group_size or -1)


def _budget(
    whole: int, free: Sequence[Target], parts: Mapping[str, Sequence[Candidate]], config: QuantizeConfig
) -> float:
    """Return the bits that the parts may take: by the average, or what the size leaves when all else has its place."""
    least = sum(min(candidate.size for candidate in candidates) for candidates in parts.values())
    if config.target_size is None:
        average, count = cast(float, config.target_bits), sum(each.weights for each in free)
        if least > average * count:
            least = math.ceil(1000 * least / count) / 1000
            raise ConfigError(f"target_bits is {average}, but the smallest widths make {least} on average; give more")
        return average * count
    others = 8 * whole - sum(_size(each, config) for each in free)
    size = int(config.target_size)
    if others + least > 8 * size:
        asked, smallest = size_text(size), size_text(math.ceil((others + least) / 8))
        raise ConfigError(f"target_size is {asked}, but the smallest widths make {smallest}; allow for more")
    return 8 * size - others


def _measured(
    layer: int, targets: list[Target], streams: Streams, config: QuantizeConfig
) -> Iterator[tuple[list[Target], dict[_Way, float]]]:
    """Yield the parts of a block whose bits are not given, with what they lose in every way that they can be kept."""
    block = streams.model.blocks[layer]
    for group in streams.trace(layer, [target for target in targets if config.override_of(target.name) is None]):
        members = [target for subset in group.subsets for target in subset]
        ways = _ways(members)
        probe = min(ways, key=lambda way: (abs(way[0] - config.bits), way[0]))
        lost, rounded = dict.fromkeys(ways, 0.0), dict[str, Tensor]()
        for portion in streams.collect(layer, [group]):
            for one in portion:
                for size in dict.fromkeys(size for _, size in ways):
                    moments = one.moments()  # with the factor for groups of this size
                    for target in one.targets:
                        weight = matrix(block.get_submodule(target.inner)).detach().float()
                        for way in [way for way in ways if way[1] == size]:
                            settings = dataclasses.replace(_kept(target, *way).config, **PLAIN)
                            snap, step = find_snap(settings), -(-len(weight) // ROWS)
                            with naming(target.name):
                                solution = solve_gptq(weight[::step], moments, settings, snap)
                                lost[way] += 0.0 if solution.loss is None else step * float(solution.loss.sum())
                                if way == probe:
                                    whole = solution if step == 1 else solve_gptq(weight, moments, settings, snap)
                                    rounded[target.inner] = whole.weight.dequantize()
        effect = _effect(layer, rounded, streams)
        scale = effect / lost[probe] if lost[probe] else 0.0
        yield members, {way: scale * loss for way, loss in lost.items()}


def _alike(parts: Iterable[tuple[list[Target], dict[_Way, float]]]) -> list[tuple[list[Target], dict[_Way, float]]]:
    """Return parts of a block, all experts of a layer as one if they can be alike: vLLM makes one layer of them."""
    found: dict[str, tuple[list[Target], dict[_Way, float]]] = {}
    for members, lost in parts:
        name = experts_of(members[0].name) or members[0].name
        before, sums = found.get(name, ([], dict.fromkeys(lost, 0.0)))
        shared = {way: sums[way] + loss for way, loss in lost.items() if way in sums}
        if shared:
            found[name] = [*before, *members], shared
        else:
            found[members[0].name] = members, lost
    return list(found.values())


def _candidates(members: Sequence[Target], lost: Mapping[_Way, float], config: QuantizeConfig) -> list[Candidate]:
    """Return the ways of keeping a part quantized."""
    return [
        Candidate(
            bits=bits,
            group_size=size,
            size=sum(_size(_kept(each, bits, size), config) for each in members),
            loss=loss,
        )
        for (bits, size), loss in lost.items()
    ]


def _ways(members: Sequence[Target]) -> list[_Way]:
    """Return the bits and group sizes that all Linears of a part can have, the group size asked for first."""
    asked = size = members[0].config.group_size
    sizes = [asked]
    while size is not None and size % 2 == 0 and size // 2 >= SMALLEST_GROUP:
        size //= 2
        sizes.append(size)
    ways = [(bits, each) for each in sizes for bits in BITS if bits < max(BITS) or each == asked]
    return [way for way in ways if all(_holds(_kept(target, *way)) for target in members)]


def _kept(target: Target, bits: int, group_size: int | None) -> Target:
    return dataclasses.replace(target, config=dataclasses.replace(target.config, bits=bits, group_size=group_size))


def _holds(target: Target) -> bool:
    try:
        find_format(target.config.format).check(target.spec)
    except (ConfigError, ShapeError):
        return False
    return True


def _size(target: Target, config: QuantizeConfig) -> float:
    """Return the bits that a Linear takes: in the file, or for an average codes, scales and zero points."""
    if config.target_size is not None:
        return 8 * find_format(config.format).nbytes(target.spec)
    (rows, columns), bits = target.shape, target.config.bits
    return rows * (columns * bits + (16 + bits) * (columns // (target.config.group_size or columns)))


def _effect(layer: int, rounded: Mapping[str, Tensor], streams: Streams) -> float:
    """Return the squared distance of the block's output with some of its weights rounded, relative to its size.

    Of the first samples of all that count, and that leave the block finite, whichever process has them.
    """
    block, batches, expected, kept = streams.model.blocks[layer], streams.batches, dict[int, Tensor](), {}

    def leaving(sample: int) -> Tensor:
        one = range(sample, sample + 1)
        states = streams.through(one, layer, block, streams.caches["hidden"].read(one))
        return streams.of_tokens(states, one).double()

    for sample in batches.mine:
        if batches.counts[sample] and len(expected) < SAMPLES:
            states = leaving(sample)
            if bool(states.isfinite().all()):
                expected[sample] = states
    for name, values in rounded.items():
        place = matrix(block.get_submodule(name))
        kept[name] = place.clone()
        place.copy_(values)
    found = {sample: leaving(sample).nan_to_num(0, 0, 0) for sample in expected}  # what overflows is lost altogether
    for name, values in kept.items():
        matrix(block.get_submodule(name)).copy_(values)
    own = [
        (float((found[each] - states).square().sum()), float(states.square().sum()))
        for each, states in expected.items()
    ]
    pairs = [pair for each in streams.processes.gather(own) for pair in each][:SAMPLES]
    return sum(lost for lost, _ in pairs) / max(1e-30, sum(size for _, size in pairs))
