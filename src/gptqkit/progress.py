"""How long work tells its caller where it is: a callback that receives `Progress` values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One step of long work.

    Attributes:
        stage: What is being done: "quantize", "learn", "tune", "evaluate", ...
        done: Steps finished so far, this one included.
        total: Steps in all.
        layer: Number of the block being worked on, where there is one.
        module: Name of the module just finished, where there is one.
        error: Its relative output error ||(W - Q) X|| / ||W X||.
        rounding_error: The same for plain rounding.
    """

    stage: str
    done: int
    total: int
    layer: int | None = None
    module: str | None = None
    error: float | None = None
    rounding_error: float | None = None


ProgressCallback = Callable[[Progress], None]


def silent(step: Progress) -> None:
    """Ignore progress: the library's default."""
