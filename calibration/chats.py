"""Chats, and the text that a model's template makes of them: the template is a program of the checkpoint's author."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CalibrationError

SECONDS = 10.0  # for one chat, which takes milliseconds
ROOM = 1 << 30  # memory for one chat


@dataclass(frozen=True, eq=False)
class Chat:
    """The messages of one chat, and where it stands, for error messages."""

    messages: Sequence[Mapping[str, Any]]
    where: str

    def __len__(self) -> int:
        return len(self.messages)

    def render(self, tokenizer: Any) -> str:
        """Return what the tokenizer's template makes of the chat; CalibrationError where it fails, however it does."""
        try:
            with _limits():
                return str(tokenizer.apply_chat_template(list(self.messages), tokenize=False))
        except Exception as error:  # a program that we do not know may raise anything
            if getattr(tokenizer, "chat_template", "its own way") is None:
                raise CalibrationError(
                    f"{self.where} is a chat, and the tokenizer has no chat template (chat_template is not set); give "
                    "texts, or the tokenizer of a model that has one (--tokenizer)"
                ) from error
            reason = str(error) or type(error).__name__
            raise CalibrationError(f"{self.where} does not fit the tokenizer's chat template: {reason}") from error


@contextmanager
def _limits() -> Iterator[None]:
    """Raise TimeoutError or MemoryError in what takes too long or too much, where the system allows to tell."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it takes more than {SECONDS:g} seconds")

    timed = threading.current_thread() is threading.main_thread()
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with suppress(OSError):  # no /proc
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            if before[0] == resource.RLIM_INFINITY or taken + ROOM < before[0]:
                resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
        if timed:
            handler = signal.signal(signal.SIGALRM, late)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
        yield
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
