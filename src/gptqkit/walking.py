"""The samples on their way through the float model, where nothing is quantized: to choose bits, or for a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from .calibration.batches import Batches
from .calibration.halves import parts_of
from .calibration.samples import Samples
from .distributed import Processes
from .export.staging import remove_leftovers, scratch
from .job import Scratch
from .model import FloatModel
from .run import LARGEST_BATCH, Run
from .streams import Streams


def float_blocks(
    model: FloatModel,
    samples: Samples,
    processes: Processes,
    run: Run,
    out: Path,
    *,
    skip: bool = False,
) -> Iterator[tuple[int, Streams]]:
    """Yield the number of every block while it is there, with what runs the samples, and let them through it.

    Hidden states are kept in memory, or where `run` says; on disk beside `out`, which is what is to be written, and
    only for now, since nothing resumes this. With `skip`, samples with non-finite activations are left out.
    """
    size = run.batch_size or LARGEST_BATCH
    mine = processes.share(len(samples.input_ids), size)
    batches = Batches(samples, parts_of(samples, model.model), mine, size, processes.device)
    dtype = torch.float32 if processes.device.type == "cpu" else model.dtype  # as the pipeline
    streams = Streams(model, batches, processes, paired=False, cross=False, skip=skip)
    place = "memory" if run.activations == "auto" else run.activations
    if processes.rank == 0:
        remove_leftovers(out)
    processes.gather(None)  # before any of them makes a new one
    with scratch(out) as folder, model.outside(processes.device, dtype):
        streams.begin(Scratch(folder, processes), dtype, place)
        for layer, block in enumerate(model.blocks):
            streams.enter(layer)
            with model.block(layer, processes.device, dtype):
                yield layer, streams
                streams.advance("hidden", layer, block, resumable=False)
