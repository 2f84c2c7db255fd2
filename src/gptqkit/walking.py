"""The samples on their way through the float model, where nothing is quantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def float_streams(
    model: FloatModel, samples: Samples, processes: Processes, run: Run, out: Path, *, skip: bool = False
) -> Iterator[Streams]:
    """Give what runs the samples, while all but the blocks is there.

    Hidden states are kept in memory, or where `run` says; on disk beside `out`, which is what is to be written, and
    only for now, since nothing resumes this. With `skip`, samples with non-finite activations are left out.
    """
    batches = own_batches(model, samples, processes, run)
    dtype = torch.float32 if processes.device.type == "cpu" else model.dtype  # as the pipeline
    streams = Streams(model, batches, processes, paired=False, cross=False, skip=skip)
    place = "memory" if run.activations == "auto" else run.activations
    with scratch(out) as folder, model.outside(processes.device, dtype):
        streams.begin(folder, None, dtype, place)
        yield streams


def float_blocks(
    model: FloatModel, samples: Samples, processes: Processes, run: Run, out: Path, *, skip: bool = False
) -> Iterator[tuple[int, Streams]]:
    """Yield the number of every block while it is there, with what runs the samples, and let them through it.

    Arguments are those of `float_streams`.
    """
    with float_streams(model, samples, processes, run, out, skip=skip) as streams:
        for layer, block in enumerate(model.blocks):
            streams.enter(layer)
            with streams.block(layer):
                yield layer, streams
                streams.advance("hidden", layer, block, resumable=False)
