"""The counters by which the last of several blocks knows that it is the last.

A split product needs one int32 per output tile, 0 before and after. Calls of one stream follow each other and share
them; calls that may run at the same time must not. A captured graph can be replayed beside anything, on any stream, so
every capture gets counters that nothing else uses. They are cleared before it begins: clearing is not recorded, and no
memory of the graph's own pool is held. Counters of streams come from the same arenas: torch.compile warms its graphs up
in eager calls whose memory must all be given back.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

# Counters of one stream or capture, unless it needs more: 4096 x 64 outputs at a time.
SET = 1 << 12

# Counters kept ready for captures, 1 MB. Eager calls refill them; a capture that finds none left records its clearing.
READY = 1 << 18


class Tickets:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._by_stream: dict[int, Tensor] = {}
        self._by_capture: dict[int, tuple[int, Tensor]] = {}  # by stream: the latest capture and its counters
        self._arenas: list[Tensor] = []  # graphs hold pointers into all of them
        self._taken = READY
        if not self._capturing():
            with self._lock:
                self._refill()

    def take(self, count: int, stream: int) -> Tensor:
        """At least `count` counters, int32, for the next call on `stream`; they hold 0 and must be left so."""
        if self._capturing():
            return self._take_captured(count, stream)
        tickets = self._by_stream.get(stream)
        if tickets is not None and tickets.numel() >= count and self._taken <= READY // 2:
            return tickets
        with self._lock:
            if self._taken > READY // 2:
                self._refill()
            if tickets is None or tickets.numel() < count:
                ready = self._take_ready(count)
                tickets = self._by_stream[stream] = self._zeros(count) if ready is None else ready
        return tickets

    def _take_captured(self, count: int, stream: int) -> Tensor:
        """Counters of the capture that is going on: shared by its calls on this stream, which follow each other."""
        with self._lock:
            capture = _capture_id(stream)
            known, tickets = self._by_capture.get(stream, (None, None))
            if tickets is not None and known == capture and tickets.numel() >= count:
                return tickets
            tickets = self._take_ready(count)
            if tickets is None:
                return self._zeros(count)
            self._by_capture[stream] = (capture, tickets)
            return tickets

    def _take_ready(self, count: int) -> Tensor | None:
        """The next counters of the latest arena, or None where it has too few."""
        end = self._taken + max(count, SET)
        if end > READY:
            return None
        tickets = self._arenas[-1][self._taken : end]
        self._taken = end
        return tickets

    def _refill(self) -> None:
        # In a thread of its own: a memory pool that this one has opened, as torch.compile does, must not hold them.
        with ThreadPoolExecutor(1) as thread:
            self._arenas.append(thread.submit(self._cleared).result())
        self._taken = 0

    def _cleared(self) -> Tensor:
        arena = self._zeros(READY)
        if self.device.type == "cuda":  # its users run on other streams than the clearing
            torch.cuda.current_stream(self.device).synchronize()
        return arena

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _capture_id(stream: int) -> int:
    """The number that the driver gives the capture on `stream`; no two captures of a process have the same."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = _driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if code:
        raise RuntimeError(f"cuStreamGetCaptureInfo: CUDA driver error {code}")
    return number.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
