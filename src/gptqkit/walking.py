"""The samples on their way through the float model, where nothing is quantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from .calibration.batches import Batches
from .calibration.halves import parts_of
from .calibration.samples import Samples
from .distributed import Processes
from .export.staging import scratch
from .model import FloatModel
from .run import LARGEST_BATCH, Run
from .streams import Streams


def own_batches(model: FloatModel, samples: Samples, processes: Processes, run: Run) -> Batches:
    """Return the samples of this process."""
    size = run.batch_size or LARGEST_BATCH
    mine = processes.share(len(samples.input_ids), size)
    return Batches(samples, parts_of(samples, model.model), mine, size, processes.device)


@dataclass(frozen=True, eq=False)
class FloatWalk:
    """The samples that are to go through the float model, in these processes, as `run` says.

    Hidden states are kept in memory, or where `run` says; on disk beside `out`, which is what is to be written, and
    only for now, since nothing resumes this. With `skip`, samples with non-finite activations are left out.
    """

    model: FloatModel
    samples: Samples
    processes: Processes
    run: Run
    out: Path

    @contextmanager
    def streams(self, *, skip: bool = False) -> Iterator[Streams]:
        """Give what runs the samples, while all but the blocks is there."""
        model, device, place = self.model, self.processes.device, self.run.activations
        batches = own_batches(model, self.samples, self.processes, self.run)
        dtype = torch.float32 if device.type == "cpu" else model.dtype  # as the pipeline
        streams = Streams(model, batches, self.processes, paired=False, cross=False, skip=skip)
        with scratch(self.out) as folder, model.outside(device, dtype):
            streams.begin(folder, None, dtype, "memory" if place == "auto" else place)
            yield streams

    def blocks(self, *, skip: bool = False) -> Iterator[tuple[int, Streams]]:
        """Yield the number of every block while it is there, with what runs the samples, and let them through it."""
        with self.streams(skip=skip) as streams:
            for layer, block in enumerate(self.model.blocks):
                streams.enter(layer)
                with streams.block(layer):
                    yield layer, streams
                    streams.advance("hidden", layer, block, resumable=False)
