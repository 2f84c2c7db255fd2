"""The counters by which the last of several blocks knows that it is the last.

A split product needs one int32 per output tile, 0 before and after. Calls of one stream follow each other and share
them; calls that may run at the same time must not. A captured graph can be replayed beside anything, on any stream,
so every captured call gets counters that nothing else uses, cleared before the capture began: no clearing is recorded.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# 4 MB of counters for captured calls: some thousand of them. A later capture records its own clearing instead.
CAPTURED = 1 << 20

# Enough for N = 2^22 outputs; a set grows where a call needs more.
SMALLEST_SET = 1 << 16


class Tickets:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        """Clear the counters of captured calls at once, and wait for it, as a replay may run on another stream."""
        self._lock = threading.Lock()
        self._by_stream: dict[int, Tensor] = {}
        capturing = _capturing(device)
        self._captured = torch.zeros(0 if capturing else CAPTURED, dtype=torch.int32, device=device)
        self._taken = 0
        if device.type == "cuda" and not capturing:
            torch.cuda.current_stream(device).synchronize()

    def take(self, count: int, stream: int) -> Tensor:
        """At least `count` counters, int32, that a call on `stream` may use; they hold 0 and must be left so."""
        device = self._captured.device
        if _capturing(device):
            return self._take_captured(count)
        tickets = self._by_stream.get(stream)
        if tickets is None or tickets.numel() < count:
            tickets = torch.zeros(max(count, SMALLEST_SET), dtype=torch.int32, device=device)
            with self._lock:
                self._by_stream[stream] = tickets
        return tickets

    def _take_captured(self, count: int) -> Tensor:
        with self._lock:
            start, end = self._taken, self._taken + count
            if end <= self._captured.numel():
                self._taken = end
                return self._captured[start:end]
        return torch.zeros(count, dtype=torch.int32, device=self._captured.device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
