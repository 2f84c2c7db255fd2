"""Calibration samples in batches on the device, and which of them count."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ArchitectureError, NonFiniteError
from ..units import counted
from .halves import model_inputs
from .samples import Samples

_LOG = logging.getLogger("gptqkit")
_Result = TypeVar("_Result")

ASIDE = 8


class Batches:
    """The samples that this process works on, batch by batch; a batch is named by the range of its samples.

    Attributes:
        parts: What each stack of the model gets of the samples (see `halves`).
        stack: Number of the stack whose blocks are at work.
        across: Whether its modules receive (length, samples, ...): tokens of neighbouring samples, one after another;
            where the shape of what a module receives says otherwise, that counts.
        added: How many hidden states each stack adds behind the tokens of every sample, as padding of its own.
        mine: The samples of this process.
        size: Samples per batch, at most; it is halved where memory runs out.
        counts: (samples,) bool, False for samples left out.
    """

    def __init__(
        self, samples: Samples, parts: Sequence[Samples], mine: range, size: int, device: torch.device
    ) -> None:
        self.samples, self.parts, self.mine, self.size, self.device = samples, parts, mine, size, device
        self.stack, self.across, self.added = 0, False, [0] * len(parts)
        self.counts = torch.ones(len(samples.input_ids), dtype=torch.bool)

    def results(self, work: Callable[[range], _Result]) -> Iterator[tuple[range, _Result]]:
        """Yield every batch with what `work(batch)` returns; one for which memory runs out comes again in halves."""
        start = self.mine.start
        while start < self.mine.stop:
            batch = range(start, min(start + self.size, self.mine.stop))
            try:
                yield batch, work(batch)
                start = batch.stop
                continue
            except RuntimeError as error:
                if len(batch) == 1 or not out_of_memory(error):
                    raise
                self.size = len(batch) // 2
                _LOG.warning("out of memory with %s; going on with %d", counted(len(batch), "sample"), self.size)
            if self.device.type == "cuda":  # when the error is gone, and what it kept
                torch.cuda.empty_cache()

    def tensors(self, batch: range) -> dict[str, Tensor]:
        """Return what a model is called with."""
        return model_inputs(self.parts, slice(batch.start, batch.stop), self.device)

    def stack_of(self, rows: int, samples: int) -> int | None:
        """Return the stack whose tokens so many rows of so many samples are; None where they are only some tokens.

        A decoder's modules receive its own tokens, or those of the encoder: these are fewer.
        """
        each = {stack: self._length(stack) for stack in range(self.stack, -1, -1)}
        known = (
            stack
            for stack, length in each.items()
            if rows in (samples * length, samples * (length + self.added[stack]))
        )
        return next(known, None)

    def split(self) -> tuple[range, range]:
        """Return the samples of this process to learn from, and one in `ASIDE` that is kept aside to choose by.

        These are the last ones; a single sample is both.
        """
        counted = self.counts[self.mine.start : self.mine.stop].nonzero()
        mine = self.mine[: int(counted.max()) + 1] if len(counted) else self.mine  # the last one counts
        aside = mine[len(mine) - max(1, len(mine) // ASIDE) :] if mine else mine
        return mine[: len(mine) - len(aside)] or mine, aside

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        mask = self.samples.attention_mask
        per_sample = self.samples.input_ids.shape[1] if mask is None else mask.sum(1)
        return int((self.counts * per_sample).sum())

    def counted(
        self, batch: range, streams: Sequence[Tensor], tokens: Tensor | None, where: str, *, routed: bool, skip: bool
    ) -> list[Tensor]:
        """Return the rows of what a module receives that count: no padding, no samples left out.

        `streams` is what it receives, (..., in), then perhaps the same in the float model, and how far apart both are
        in what its outputs are added to. `tokens` says which of the batch's tokens each row is, where that is known and
        not simply all of them in order; `routed`, that these are some tokens only, as experts receive them. With
        `skip`, samples with NaN or infinity do not count any more.

        Raises:
            NonFiniteError: NaN or infinity in a sample that counts, unless `skip`.
            ArchitectureError: Padding, and inputs whose rows are not the tokens of the batch.
        """
        flat = [stream.reshape(-1, stream.shape[-1]) for stream in streams]
        count = len(flat[0])
        stack = None if routed or tokens is not None else self.stack_of(count, len(batch))
        if stack is not None:
            mask = self.of_states(batch, count // len(batch), stack)
            tokens = torch.arange(count, device=mask.device)
        elif tokens is not None or routed:
            mask = self.of_states(batch, self._length(self.stack) + self.added[self.stack])
        else:  # no tokens, such as PEGASUS-X's global ones: padding of the model's own has no part in them
            mask = self.of_states(batch, self._length(self.stack))
        if tokens is None:
            if not bool(mask.all()):
                raise ArchitectureError(
                    f"{where} receives {count} rows for {mask.numel()} tokens, so padding and samples left out cannot "
                    "be told apart; calibrate on whole samples (concatenate=True)"
                )
            return flat
        broken = torch.stack([_broken(stream) for stream in flat]).any(0)
        across = self._across(streams[0], mask)
        inner = len(mask) if across else mask.shape[1]
        place = (tokens % inner, tokens // inner) if across else (tokens // inner, tokens % inner)
        bad = torch.unique(place[0][broken & mask[place]]).cpu()
        if len(bad):
            if not skip:
                raise NonFiniteError(
                    f"NaN or infinity in the inputs of {where}, calibration sample {batch.start + int(bad[0])}; check "
                    "the model in this dtype, or set skip_nonfinite=True to leave such samples out"
                )
            self.counts[batch.start + bad] = False
            mask = mask & self.counts[batch.start : batch.stop, None].to(self.device)
        if bool(mask.all()):
            return flat
        keep = mask[place]
        return [stream[keep] for stream in flat]

    def _across(self, stream: Tensor, mask: Tensor) -> bool:
        """Return which axis of what a module receives is that of samples; Longformer's attention turns them."""
        samples, length = mask.shape
        known = {torch.Size([samples, length]): False, torch.Size([length, samples]): True}
        return self.across if samples == length else known.get(stream.shape[:-1], self.across)

    def settle(self, counts: Sequence[Tensor], where: str) -> None:
        """Leave out what any process left out, by the `counts` of all; `where` is the module, for messages."""
        self.counts = torch.stack(list(counts)).all(0)
        if not self.counts.any():
            raise NonFiniteError(
                f"NaN or infinity in every calibration sample: none is left at the inputs of {where}; check the model "
                "in this dtype"
            )

    def _length(self, stack: int) -> int:
        return self.parts[stack].input_ids.shape[1]

    def mask(self, batch: range, stack: int) -> Tensor:
        """Return (samples, length) bool, on the device: tokens that are neither padding nor in an excluded sample."""
        rows = slice(batch.start, batch.stop)
        counts = self.counts[rows, None].expand(-1, self._length(stack))
        mask = self.parts[stack].attention_mask
        return (counts if mask is None else counts & mask[rows]).to(self.device)

    def of_states(self, batch: range, length: int, stack: int | None = None) -> Tensor:
        """Return the mask of so many hidden states of each sample, of the stack at work if none is given.

        Those that the model adds behind the tokens do not count.
        """
        mask = self.mask(batch, self.stack if stack is None else stack)
        return functional.pad(mask, (0, length - mask.shape[1]))


def _broken(rows: Tensor) -> Tensor:
    """Return which rows hold NaN or infinity, (rows,) bool; only those are looked at whose sum does or overflows."""
    broken = ~rows.sum(-1).isfinite()
    suspects = broken.nonzero().flatten()
    broken[suspects] = ~rows[suspects].isfinite().all(-1)
    return broken


def shuffled(samples: range, size: int, generator: torch.Generator) -> Iterator[range]:
    """Yield the samples in batches of neighbours, which are none in the text, in an order drawn from `generator`."""
    starts = range(0, len(samples), size)
    for number in torch.randperm(len(starts), generator=generator).tolist():
        yield samples[starts[number] : starts[number] + size]


def pieces(samples: range, size: int) -> Iterator[range]:
    """Yield the samples in batches, in order."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def in_pieces(work: Callable[[int], _Result], size: int) -> tuple[_Result, int]:
    """Return what `work(size)` does, and the size, halved as often as memory ran out."""
    while True:
        try:
            return work(size), size
        except RuntimeError as error:
            if size == 1 or not out_of_memory(error):
                raise
        size //= 2
        torch.cuda.empty_cache()  # cuBLAS, of which every thread has its own, and others allocate by themselves


def out_of_memory(error: BaseException) -> bool:
    """Whether torch found too little memory: its own error, CUDA's, of CUDA's libraries, or for a CPU."""
    on_gpu = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
    on_cpu = ("can't allocate memory", "Cannot allocate memory", "failed to map segment")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in on_gpu + on_cpu)
