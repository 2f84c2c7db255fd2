"""The processes of one job: which samples each of them takes, sums over all of them, and results handed round.

Under `torchrun` or `accelerate launch`, on one machine or several, every rank opens the same model and the same
calibration tokens, streams its own share of the samples through every block, and solves its share of the modules
(`sharing.py`); all ranks hold the quantized weights of a finished block, and rank 0 writes. The work directory must lie
on a file system that all machines share.

What is exact, compared with one process:
- Batches, where `share` was told the batch size: every batch is one that a single process would run, so on equal
  hardware its activations are the same bits.
- Sums of statistics are the same bits on every rank. Kept in float64, they are sums of float32 products, nearly always
  added without rounding, so that H rounded to float32 is the same for any number of ranks but for a last bit in some
  10^8; it is the same with certainty where inputs are small integers. Kept in float32, their last bits depend on the
  number of ranks, which turns a few codes and with them the rest of their rows: the proxy loss changes by about 1e-4 in
  either direction (measured on 1000 x 512 weights).
- Whole modules solved on another rank are the same bits. Rows of a module depend on no other rows, but a matrix product
  of fewer rows may add in another order, which a code on the edge between two shows; on CPUs it was not seen to (a test
  compares every order and method), on GPUs it was not tried.
- Ranks on hardware of different kinds agree in nothing but the formulas.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..calibration.statistics import InputStatistics
from ..errors import AbandonedError, RankError
from .heartbeat import Heartbeat, Patience

T = TypeVar("T")

_ENDLESS = timedelta(days=30)  # a rank may solve for hours while others wait in a collective; the heartbeat ends them


class Ranks:
    """One process among those of its job; use `alone` or `join`.

    Collectives must be called by all ranks in the same order.

    Attributes:
        rank: Of this process, 0 ... size - 1.
        size: Number of processes.
        device: Where this process works.

    >>> Ranks.alone().share(5)
    range(0, 5)
    """

    def __init__(self, rank: int, size: int, device: torch.device, heartbeat: Heartbeat | None = None) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._heartbeat = heartbeat
        self._groups: dict[str, Any] = {}  # by type of device
        self._known: Exception | None = None  # what `together` raised here

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> Ranks:
        """The only process: nothing is exchanged."""
        return cls(0, 1, torch.device(device))

    @classmethod
    @contextmanager
    def join(cls, device: torch.device | str, *, patience: Patience | None = None) -> Iterator[Ranks]:
        """This process among those that torch.distributed, or the launcher's RANK and WORLD_SIZE, know of.

        A process group that exists is used and left alone; else one is made, with SIGTERM, by which launchers stop the
        ranks that are left, turned into a RankError, and taken down at the end. Everything goes over groups of our own:
        gloo for objects and tensors on CPUs, nccl for tensors on GPUs. An exception in the context stops all ranks.

        Args:
            device: "cpu", or "cuda": then each rank takes the GPU of its LOCAL_RANK (or torch's current one, where the
                process group existed).
            patience: How long to wait for others.

        Raises:
            RankError: No contact with the others; fewer GPUs than ranks; later, in any collective: a rank failed.
        """
        device = torch.device(device)
        exists = dist.is_available() and dist.is_initialized()
        launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if device.type == "cuda" and (exists or launched):
            local = torch.cuda.current_device() if exists else int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
            device = _own_gpu(device, local)
        size = dist.get_world_size() if exists else int(os.environ["WORLD_SIZE"]) if launched else 1
        if size == 1:
            yield cls.alone(device)
            return
        patience = patience or Patience()
        with _sigterm_raises(not exists), _process_group(not exists, patience):
            rank = dist.get_rank()
            heartbeat = Heartbeat(_own_store(rank), rank, size, patience)
            ranks = cls(rank, size, device, heartbeat)
            problem: Exception | None = None
            try:
                try:
                    heartbeat.start()
                    ranks._open_groups()
                    try:
                        yield ranks
                    except Exception as error:
                        if error is not ranks._known:
                            raise
                        _ignore_sigterm()
                        problem = error
                    ranks.barrier()  # until all are done, all are watched
                    heartbeat.stop()
                    ranks.barrier()  # nobody asks the store any more
                except BaseException as error:
                    _ignore_sigterm()  # the launcher ends all where one has ended, but this one has its own reason
                    heartbeat.announce(error)
                    raise
                finally:
                    ranks._close_groups()
            finally:
                heartbeat.stop()
            if problem is not None:
                raise problem

    def share(self, count: int, step: int = 1) -> range:
        """The part of 0 ... count - 1 that is this rank's: contiguous, balanced, perhaps empty.

        Args:
            count: Number of samples (or rows).
            step: Shares begin at multiples of it: the batch size, so that all ranks together form the same batches as
                one process.
        """
        return share_of(self.rank, self.size, count, step)

    def add_up(self, *statistics: InputStatistics) -> None:
        """Add the sums and token counts of all ranks, in place; the same bits on every rank.

        What no rank saw a token of is not sent.
        """
        if self.size == 1:
            return
        tokens = torch.tensor([one.tokens for one in statistics], dtype=torch.int64)
        self._add(tokens)
        for one, count in zip(statistics, tokens.tolist(), strict=True):
            one.tokens = count
            for matrix in one.sums if count else ():
                self._add(matrix)

    def gather(self, value: T) -> list[T]:
        """The (small, picklable) values of all ranks, in order."""
        values = [value] * self.size
        if self.size > 1:
            with self._collective():
                dist.all_gather_object(values, value, group=self._groups["cpu"])
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work without collectives inside that may fail on any rank: then it fails on all.

        Raises:
            AbandonedError: It failed on another rank; the first such rank raises the exception itself.
        """
        problem = None
        try:
            yield
        except Exception as error:
            problem = error
        reasons = self.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
        for rank, reason in enumerate(reasons):
            if reason is not None:
                first = problem if rank == self.rank else None
                self._known = first or AbandonedError(f"rank {rank} of {self.size} failed ({reason})")
                raise self._known

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` on all ranks with what it holds on `source`; contiguous uint8 goes over every backend."""
        if self.size > 1:
            with self._collective():
                group = self._groups[tensor.device.type]
                dist.broadcast(tensor, group_src=source, group=group)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def _add(self, tensor: Tensor) -> None:
        with self._collective():
            dist.all_reduce(tensor, group=self._groups[tensor.device.type])

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """What goes wrong inside is a rank that is gone."""
        if self._heartbeat is None:
            raise RankError("one process alone has nobody to talk to")
        self._heartbeat.check()
        try:
            yield
        except RankError:  # by SIGTERM
            raise
        except RuntimeError as error:  # all that torch.distributed raises; messages differ with backend and version
            raise self._heartbeat.broken() from error

    def _open_groups(self) -> None:
        """Make groups for our collectives alone."""
        with self._collective():
            self._groups["cpu"] = dist.new_group(backend="gloo", timeout=_ENDLESS)
            if self.device.type == "cuda":
                self._groups["cuda"] = dist.new_group(backend="nccl", timeout=_ENDLESS)

    def _close_groups(self) -> None:
        """Take them down; still watched, because nccl may hang where a rank is gone."""
        while self._groups:
            dist.destroy_process_group(self._groups.popitem()[1])


def share_of(rank: int, size: int, count: int, step: int) -> range:
    """The part of 0 ... count - 1 that falls to `rank`; see `Ranks.share`."""
    units = -(-count // step)
    start, stop = (min(count, step * (units * number // size)) for number in (rank, rank + 1))
    return range(start, stop)


def launched_rank() -> int:
    """The rank that a launcher gave to this process; 0 without one."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 0


def _own_gpu(device: torch.device, index: int) -> torch.device:
    """The GPU of this rank, made the current one; other devices as they are."""
    if device.type != "cuda":
        return device
    if device.index is not None and device.index != index:
        raise RankError(f"the device is {device}, but with several processes each takes its own GPU; give 'cuda'")
    if index >= torch.cuda.device_count():
        raise RankError(
            f"this is local rank {index} of a machine with {torch.cuda.device_count()} GPUs; start one process per GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def _process_group(ours: bool, patience: Patience) -> Iterator[None]:
    """Torch's process group, made and taken down where it is `ours`."""
    if not ours:
        yield
        return
    timeout = timedelta(seconds=patience.joining)
    try:
        distributed: Any = dist
        launcher, rank, size = next(distributed.rendezvous("env://", timeout=timeout))
        store = _own_keys(
            "processes", launcher, rank
        )  # a launcher's store outlives process groups: their keys are stale
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} got no contact with the others: {error}; start "
            "all with torchrun or accelerate launch, or unset RANK and WORLD_SIZE to work with one process"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _own_store(rank: int) -> Any:
    """The job's key-value store, over a connection and with keys that nobody else uses."""
    c10d: Any = dist.distributed_c10d
    return _own_keys("heartbeat", c10d._get_default_store().clone(), rank)


def _own_keys(purpose: str, store: Any, rank: int) -> Any:
    """`store` with keys that no earlier call used; every rank calls it equally often."""
    c10d: Any = dist.distributed_c10d
    session = store.add(f"gptqkit/{purpose}/{rank}", 1)
    return c10d.PrefixStore(f"gptqkit/{purpose}/{session}", store)


@contextmanager
def _sigterm_raises(ours: bool) -> Iterator[None]:
    """Inside, SIGTERM raises a RankError, unless the process is not `ours` or handles the signal in its own way."""
    main = threading.current_thread() is threading.main_thread()
    if not ours or not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    _ignore_sigterm()
    raise RankError(
        "stopped by SIGTERM, with which launchers end all ranks when one has failed; resume the job, with any number "
        "of ranks"
    )


def _ignore_sigterm() -> None:
    """Where SIGTERM would raise our error, it does nothing from now on."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is _stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
