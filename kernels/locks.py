"""The locks by which the last of several blocks that share an output tile knows that it is the last.

A split product needs one int32 per tile, 0 before and after. Calls of one stream follow each other and share theirs;
calls that may run at the same time must not. A captured graph can be replayed beside anything, so every capture gets
locks that nothing else uses, cleared before it begins. All come from one array that is made with the first call on the
device; where it is used up, or too small, a call clears locks of its own, which takes a launch.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

LOCKS = 1024
"""Of one stream or capture: more than there are tiles where it pays to split them."""

USERS = 256


class Locks:
    """The locks of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._mutex = threading.Lock()
        self._free: list[Tensor] | None = None
        self._taken: dict[tuple[int, int], Tensor] = {}  # by stream and capture, 0 for none

    def take(self, count: int, stream: int) -> Tensor:
        """Return `count` locks or more for the next call on `stream`, int32; they hold 0 and must be left so."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        user = (stream, _capture_number(stream) if capturing else 0)
        with self._mutex:
            if self._free is None and not capturing:
                # In a thread of its own: a memory pool that this one opened, as torch.compile does, must not hold them.
                with ThreadPoolExecutor(1) as thread:
                    self._free = thread.submit(self._make).result()
            if user not in self._taken and self._free:
                self._taken[user] = self._free.pop()
            locks = self._taken.get(user)
        return self._cleared(count) if locks is None or count > LOCKS else locks

    def _make(self) -> list[Tensor]:
        array = self._cleared(USERS * LOCKS)
        if self.device.type == "cuda":  # its users run on other streams than the clearing
            torch.cuda.current_stream(self.device).synchronize()
        return list(array.view(USERS, LOCKS))

    def _cleared(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)


def _capture_number(stream: int) -> int:
    """Return the number that the driver gives the capture on `stream`; no two captures of a process have the same."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    inquire = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    code = inquire(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if code:
        raise RuntimeError(f"cuStreamGetCaptureInfo: CUDA driver error {code}")
    return number.value
