"""What flows from one block of a model to the next: the hidden states of all calibration samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import CheckpointError, ShapeError

Place = Literal["device", "memory", "disk"]
PLACES: tuple[Place, ...] = get_args(Place)
_SLICE = 64 << 20


class HiddenStates:
    """Hidden states of a range of samples, (samples, *shape), on the device, in RAM or in a file.

    A file holds the states of all samples, one after the other as raw numbers, whichever process wrote them; a process
    reads and writes its own range only. Nothing of it stays in memory.

    Args:
        samples: Numbers of the samples that are held here.
        shape: Shape of one sample's states, such as (length, width).
        dtype: Of the states.
        device: Where the states are wanted.
        place: "device", "memory" or "disk".
        file: The file, for "disk".
    """

    def __init__(
        self,
        samples: range,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        place: Place,
        file: Path | None = None,
    ) -> None:
        self.samples, self.shape, self.dtype, self.device, self.place = samples, shape, dtype, device, place
        self.file = file if place == "disk" else None
        self._held: Tensor | None = None
        if self.file is None:
            where = device if place == "device" else torch.device("cpu")
            self._held = torch.empty(len(samples), *shape, dtype=dtype, device=where)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read(self, samples: range) -> Tensor:
        """The states of some samples on the device, (samples, *shape): a copy of its own unless they live there.

        Raises:
            CheckpointError: The file is shorter than it was.
        """
        if self._held is not None:
            return self._held[self._local(samples)].to(self.device)
        return self._from_file(samples).to(self.device)

    def write(self, samples: range, states: Tensor) -> None:
        """Put the states of some samples in the place of what is there.

        Raises:
            ShapeError: Another dtype, or another shape per sample.
        """
        if states.dtype != self.dtype or states.shape != (len(samples), *self.shape):
            raise ShapeError(
                f"hidden states are {states.dtype} {tuple(states.shape)}; those of {len(samples)} samples that entered "
                f"the first block were {self.dtype} {(len(samples), *self.shape)}"
            )
        if self._held is not None:
            self._held[self._local(samples)] = states.to(self._held.device)
        elif self.file is not None:
            with _opened(self.file, os.O_WRONLY | os.O_CREAT) as descriptor:
                _write(descriptor, states.cpu(), samples.start * self.sample_bytes)

    def successor(self, file: Path | None) -> HiddenStates:
        """Where to write the states that leave a block: `file` on disk, so that these stay; otherwise right here."""
        if self.place != "disk":
            return self
        return HiddenStates(self.samples, self.shape, self.dtype, self.device, self.place, file)

    def save(self, file: Path) -> None:
        """Bring the states into `file` for good. A file that they live in is only synced."""
        with _opened(file, os.O_WRONLY | os.O_CREAT) as descriptor:
            if self._held is not None:
                for samples in self._slices():
                    _write(descriptor, self._held[self._local(samples)].cpu(), samples.start * self.sample_bytes)
            os.fsync(descriptor)

    def load(self, file: Path) -> None:
        """Take the states that `save` wrote.

        Raises:
            CheckpointError: The file is too short.
        """
        if self._held is not None:
            self.file = file
            for samples in self._slices():
                self._held[self._local(samples)] = self._from_file(samples).to(self._held.device)
            self.file = None

    def _slices(self) -> Iterator[range]:
        """The samples in ranges of few bytes, so that little is ever there twice."""
        count = max(1, _SLICE // max(1, self.sample_bytes))
        for start in range(self.samples.start, self.samples.stop, count):
            yield range(start, min(start + count, self.samples.stop))

    def _local(self, samples: range) -> slice:
        return slice(samples.start - self.samples.start, samples.stop - self.samples.start)

    def _from_file(self, samples: range) -> Tensor:
        if self.file is None:
            raise ValueError("these states have no file")
        states = torch.empty(len(samples), *self.shape, dtype=self.dtype)
        view = _bytes(states)
        offset = samples.start * self.sample_bytes
        with _opened(self.file, os.O_RDONLY) as descriptor:
            while view:
                count = os.preadv(descriptor, [view], offset)
                if not count:
                    raise CheckpointError(f"{self.file} is cut off; delete the unfinished job and start it anew")
                view, offset = view[count:], offset + count
        return states


class _opened:  # noqa: N801 - reads as a statement
    """A file descriptor that closes itself."""

    def __init__(self, file: Path, flags: int) -> None:
        self._file = file
        self._descriptor = os.open(file, flags, 0o644)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._file)  # a full disk, say, does not tell of which file


def _write(descriptor: int, states: Tensor, offset: int) -> None:
    view = _bytes(states.contiguous())
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _bytes(states: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; a view without elements could not be cast."""
    return states.view(torch.uint8).numpy().data.cast("B") if states.numel() else memoryview(b"")
