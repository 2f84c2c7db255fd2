"""What waits between one block of a model and the next: hidden states of all samples, and what comes with them."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..errors import ArchitectureError, CheckpointError, ShapeError
from .batches import pieces

_SLICE = 64 << 20


class ActivationCache:
    """Hidden states of a range of samples, (samples, *shape), wanted on `device` and kept in a `place`.

    That is "device", "memory" or "disk", whose file is made at its full size, so that a full disk shows at once.
    """

    def __init__(
        self,
        samples: range,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        place: str,
        file: Path | None = None,
    ) -> None:
        self.samples, self.shape, self.dtype, self.device, self.place = samples, shape, dtype, device, place
        self.file = file if place == "disk" else None
        self._sample_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self.file is None:
            where = device if place == "device" else torch.device("cpu")
            self._states = torch.empty(len(samples), *shape, dtype=dtype, device=where)
            return
        size = len(samples) * self._sample_bytes
        with _naming(self.file), self.file.open("wb") as stream:
            if size:
                os.posix_fallocate(stream.fileno(), 0, size)
        self._states = self._mapped(self.file, len(samples), shared=True)

    def read(self, samples: range) -> Tensor:
        """Return the states of some samples on the device, (samples, *shape)."""
        return self._states[self._local(samples)].to(self.device)

    def write(self, samples: range, states: Tensor) -> None:
        """Put the states of some samples in the place of what is there; ShapeError for another dtype or shape."""
        if states.dtype != self.dtype or states.shape != (len(samples), *self.shape):
            raise ShapeError(
                f"hidden states are {states.dtype} {tuple(states.shape)}; those of {len(samples)} samples that entered "
                f"the first block were {self.dtype} {(len(samples), *self.shape)}"
            )
        self._states[self._local(samples)] = states.to(self._states.device)

    def successor(self, file: Path) -> ActivationCache:
        """Return where to write what leaves a block: `file` on disk, so that these stay; otherwise right here."""
        if self.file is None:
            return self
        return ActivationCache(self.samples, self.shape, self.dtype, self.device, self.place, file)

    def save(self, file: Path) -> None:
        """Bring the states into `file` for good; a file that they live in is only synced."""
        with _naming(file), file.open("r+b" if file == self.file else "wb") as stream:
            for samples in self._slices() if file != self.file else ():
                part = self._states[self._local(samples)].cpu().contiguous()
                stream.write(part.view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(stream.fileno())

    def load(self, file: Path, samples: range) -> None:
        """Take what `save` wrote of those samples that are held here; `samples` are all that are in the file."""
        size = len(samples) * self._sample_bytes
        if not file.exists() or file.stat().st_size != size:
            raise CheckpointError(f"{file} is not {size} bytes long; delete the unfinished job and start it again")
        stored = self._mapped(file, len(samples), shared=False)
        for part in self._slices():
            common = range(max(part.start, samples.start), min(part.stop, samples.stop))
            if common:
                there = slice(common.start - samples.start, common.stop - samples.start)
                self.write(common, stored[there])

    def _slices(self) -> Iterator[range]:
        """Return the samples in ranges of few bytes, so that little is ever there twice."""
        return pieces(self.samples, max(1, _SLICE // max(1, self._sample_bytes)))

    def _local(self, samples: range) -> slice:
        return slice(samples.start - self.samples.start, samples.stop - self.samples.start)

    def _mapped(self, file: Path, samples: int, *, shared: bool) -> Tensor:
        if not samples * self._sample_bytes:
            return torch.empty(samples, *self.shape, dtype=self.dtype)
        count = samples * torch.Size(self.shape).numel()
        return torch.from_file(str(file), shared=shared, size=count, dtype=self.dtype).view(samples, *self.shape)


class Handed:
    """What a block hands on beside hidden states, of a range of samples: tuples and dictionaries of tensors, in RAM.

    It is saved as often as the hidden states `like`.
    """

    def __init__(self, samples: range, like: ActivationCache) -> None:
        self.samples, self.device, self.file = samples, like.device, like.file
        self._of: dict[int, Any] = {}

    def read(self, samples: range) -> Any:
        """Return what was written of some samples, on the device."""

        def join(*parts: Any) -> Any:
            return torch.cat(parts).to(self.device) if isinstance(parts[0], Tensor) else parts[0]

        return tree_map(join, *(self._of[sample] for sample in samples))

    def write(self, samples: range, given: Any) -> None:
        """Take what a block hands on of some samples; ArchitectureError for a tensor whose first axis is not theirs."""

        def part(place: int, each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            if each.shape[:1] == (1,):  # the same for all, as T5's position bias
                each = each.expand(len(samples), *each.shape[1:])
            if each.shape[:1] != (len(samples),):
                raise ArchitectureError(
                    f"blocks hand on {tuple(each.shape)} of {len(samples)} samples beside hidden states, not sample by "
                    "sample, so this model cannot be quantized block by block"
                )
            return each[place : place + 1].to("cpu", copy=True)

        self._of |= {sample: tree_map(partial(part, place), given) for place, sample in enumerate(samples)}

    def as_now(self) -> Handed:
        """Return the same, which stays as it is when others are written here."""
        kept = copy.copy(self)
        kept._of = dict(self._of)
        return kept

    def save(self, file: Path) -> None:
        """Write it into `file` for good."""
        with _naming(file), file.open("wb") as stream:
            torch.save(self._of, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def load(self, file: Path, samples: range) -> None:
        """Take what `save` wrote of those samples that are held here; `samples` are all that are in the file."""
        stored = torch.load(file, weights_only=True)
        self._of |= {sample: stored[sample] for sample in samples if sample in self.samples}


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Name the file in errors that do not, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
