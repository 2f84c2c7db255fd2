"""Signs of life between the processes of one job: whoever dies, hangs or fails stops all the others."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from ..errors import RankError

_ADVICE = "; all ranks stop. Finished blocks are kept: resume the job, with any number of ranks"


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the ranks of a job wait for each other, in seconds.

    Attributes:
        beat: From one sign of life to the next.
        silence: Without a sign of life for so long, a rank counts as dead.
        grace: From learning of a failure until a process that has not raised it by itself is ended.
        joining: For all ranks to appear.
    """

    beat: float = 2.0
    silence: float = 40.0
    grace: float = 5.0
    joining: float = 300.0


class Heartbeat:
    """Beats for this rank and listens to all others, on threads of its own, from `start` to `stop`.

    Each rank counts its beats in the job's store. Ages are measured on the listener's own clock, from the moment when a
    count was last seen to change, so clocks of machines need not agree. A process blocked in C++ (a collective, a
    solve) cannot be made to raise: where it has not stopped by itself within the grace, one line goes to stderr and the
    process ends with status 1, as abruptly as by a kill.

    Args:
        store: The job's torch.distributed.Store, for this object alone.
        rank: Of this process.
        size: Number of ranks.
        patience: The times.
    """

    def __init__(self, store: Any, rank: int, size: int, patience: Patience) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._patience = patience
        self._beats = dict.fromkeys(range(size), 0)
        self._changed = dict.fromkeys(range(size), 0.0)
        self._answered = time.monotonic()
        self._failure: str | None = None
        self._stopped = threading.Event()
        self._wake = threading.Event()  # set when stopped or failed
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat, self._guard)]

    def start(self) -> None:
        """Begin to beat, and wait until every rank does.

        Raises:
            RankError: Some rank did not come.
        """
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + self._patience.joining
        while missing := [rank for rank, count in self._beats.items() if count == 0]:
            self.check()
            if time.monotonic() > deadline:
                raise RankError(
                    f"{_ranks(missing)} of {self._size} did not join within {self._patience.joining:g} seconds; look "
                    "at the output of that process, and whether it can reach MASTER_ADDR"
                )
            self._wake.wait(self._patience.beat / 20)

    def stop(self) -> None:
        """End the threads: this rank neither beats nor listens any more. May be called again."""
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(self._patience.grace)
        if self._failure is not None and self._rank == 0:
            time.sleep(2 * self._patience.beat)  # this process may hold the store that others learn the reason from

    def check(self) -> None:
        """Nothing, as long as all is well.

        Raises:
            RankError: A rank is known to have died or failed.
        """
        if self._failure is not None:
            raise RankError(self._failure)

    def announce(self, error: BaseException) -> None:
        """Tell all others that this rank fails, and why, unless a failure is known already."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._fail(f"rank {self._rank} of {self._size} failed ({text})")

    def broken(self) -> RankError:
        """The error to raise for a connection that broke, as soon as it is known whose, or that nobody can tell.

        A rank that was killed does not beat any more, which shows within a few beats.
        """
        since = time.monotonic()
        if not self._wake.wait(5 * self._patience.beat):
            rank, changed = min(self._changed.items(), key=lambda item: item[1])
            died = changed < since + 2 * self._patience.beat
            self._fail(f"{f'rank {rank} of {self._size}' if died else 'some rank'} died: the connection to it broke")
        return RankError(self._failure)

    def _fail(self, what: str, advice: str = _ADVICE) -> None:
        if self._failure is None:
            self._failure = what + advice
        self._wake.set()

    def _beat(self) -> None:
        try:
            while not self._stopped.is_set() and self._failure is None:
                self._round()
                joined = all(self._beats.values())
                self._wake.wait(self._patience.beat if joined else self._patience.beat / 20)
            if self._failure is not None and not self._store.check(["failure"]):
                self._store.set("failure", self._failure)
        except RuntimeError:  # torch.distributed's errors are RuntimeErrors
            self._fail("rank 0, or the launcher on its machine, died: the job's store is gone")

    def _round(self) -> None:
        """Beat once, read everybody's beats and failures."""
        self._store.add(f"beats/{self._rank}", 1)
        for rank, before in self._beats.items():
            count = self._store.add(f"beats/{rank}", 0)
            if count != before:
                self._beats[rank] = count
                self._changed[rank] = time.monotonic()
        now = self._answered = time.monotonic()
        if self._store.check(["failure"]):
            self._fail(self._store.get("failure").decode(), advice="")
        for rank, count in self._beats.items():
            silence = now - self._changed[rank]
            if count and silence > self._patience.silence:
                self._fail(f"rank {rank} of {self._size} has shown no sign of life for {silence:.0f} seconds")

    def _guard(self) -> None:
        """End the process where the store does not answer, or where the main thread does not stop by itself."""
        while not self._wake.wait(self._patience.beat):
            if self._stopped.is_set():
                return
            if time.monotonic() - self._answered > self._patience.silence:
                self._fail("rank 0, or the launcher on its machine, is silent: the job's store does not answer")
        if not self._stopped.wait(self._patience.grace):
            sys.stderr.write(f"gptqkit: error: {self._failure}\n")
            sys.stderr.flush()
            os._exit(1)


def _ranks(ranks: list[int]) -> str:
    """`ranks` in words."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
