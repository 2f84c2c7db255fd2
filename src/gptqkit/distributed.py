"""The processes of one job, under `torchrun` or `accelerate launch`: which samples and modules each of them takes.

Every process opens the same model and the same calibration tokens, streams its own share of the samples through every
block, and solves its share of the modules. All hold the solutions of a finished block, and rank 0 writes. Whole modules
and rows of modules are solved alike wherever they are solved; sums of statistics may differ in their last bits with the
number of processes, which turns a few codes, unless the sums are exact or of two terms.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .calibration.batches import out_of_memory
from .errors import AbandonedError, RankError

T = TypeVar("T")

_ENDLESS = timedelta(days=30)  # a process may solve for hours while others wait; torchrun ends those that are left
_NUMBERS = itertools.count()  # of process groups: what one leaves in the launcher's store is not for the next


@dataclass(frozen=True)
class Processes:
    """This process, which works on `device`, among those of its job, 0 ... size - 1.

    Collective methods must be called by all, in the same order.

    >>> Processes(1, 2, torch.device("cpu")).share(5, step=2)
    range(4, 5)
    """

    rank: int
    size: int
    device: torch.device

    def share(self, count: int, step: int = 1) -> range:
        """Return this process's part of 0 ... count - 1: contiguous, balanced, perhaps empty but for rank 0.

        Parts begin at multiples of `step`: the batch size, so that all together form the batches of one process.
        """
        units = -(-count // step)
        start, stop = (min(count, step * -(-units * number // self.size)) for number in (self.rank, self.rank + 1))
        return range(start, stop)

    def add_up(self, tensor: Tensor) -> None:
        """Add the tensors of all processes, in place; the same bits everywhere."""
        if self.size > 1:
            whole = tensor.contiguous()  # NCCL takes no others
            with _collective():
                dist.all_reduce(whole)
            if whole is not tensor:
                tensor.copy_(whole)

    def gather(self, value: T) -> list[T]:
        """Return the (picklable) values of all processes, in order."""
        values = [value] * self.size
        if self.size > 1:
            with _collective():
                dist.all_gather_object(values, value)
        return values

    def totals(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        """Return the sums of both numbers of some pairs, of all processes."""
        own = [sum(float(each) for each in column) for column in zip(*pairs, strict=True)] or [0.0, 0.0]
        first, second = (sum(column) for column in zip(*self.gather(own), strict=True))
        return first, second

    @contextmanager
    def trying(self) -> Iterator[Callable[[], bool]]:
        """Work for which memory may run out: that ends the work, not more.

        Gives what tells afterwards, asked by all, whether memory was enough in every process. It asks the others when
        the error is gone, and what it kept in memory.
        """
        enough = True
        try:
            yield lambda: all(self.gather(enough))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            enough = False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work without collectives inside that may fail in any process: then it fails in all.

        Raises:
            AbandonedError: It failed in another process; the first such process raises the exception itself.
        """
        problem = None
        try:
            yield
        except Exception as error:
            problem = error
        for rank, reason in enumerate(self.gather(None if problem is None else f"{type(problem).__name__}: {problem}")):
            if reason is not None:
                if problem is not None and rank == self.rank:
                    raise problem
                raise AbandonedError(f"rank {rank} of {self.size} failed ({reason})")


@contextmanager
def join(device: torch.device) -> Iterator[Processes]:
    """Join the processes that torch.distributed, or the launcher's RANK and WORLD_SIZE, know of; alone without them.

    A process group that exists is used and left alone. On GPUs each process takes that of its LOCAL_RANK.

    Raises:
        RankError: No contact with the others, or fewer GPUs than processes.
    """
    exists = dist.is_available() and dist.is_initialized()
    launched = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not exists and not launched:
        yield Processes(0, 1, device)
        return
    if device.type == "cuda":
        device = _own_gpu(torch.cuda.current_device() if exists else int(os.environ.get("LOCAL_RANK", "0")))
    if not exists:
        try:
            of_torch: Any = dist  # which exports both, without saying so
            found, rank, size = next(of_torch.rendezvous("env://", timeout=_ENDLESS))
            own = of_torch.PrefixStore(f"gptqkit-{next(_NUMBERS)}", found)
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=_ENDLESS, store=own, rank=rank, world_size=size)
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {os.environ['RANK']} got no contact with the others: {error}; start all with torchrun or "
                "accelerate launch, or unset RANK and WORLD_SIZE to work with one process"
            ) from error
    yield Processes(dist.get_rank(), dist.get_world_size(), device)
    if not exists:  # after an error, the launcher ends the others
        dist.destroy_process_group()


def _own_gpu(index: int) -> torch.device:
    if index >= torch.cuda.device_count():
        raise RankError(
            f"this is local rank {index} of a machine with {torch.cuda.device_count()} GPUs; start one process per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def _collective() -> Iterator[None]:
    """What goes wrong inside is another process that is gone."""
    try:
        yield
    except RuntimeError as error:  # all that torch.distributed raises; messages differ with backend and version
        raise AbandonedError(
            "another process of the job failed or was ended; what it, or the launcher, printed says why. Finished "
            "blocks are kept: resume the job, with any number of processes"
        ) from error
