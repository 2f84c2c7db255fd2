"""Modes of torch that a caller may be in, and that must not reach what is computed here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_plain_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function run outside inference mode and autocast, with tensors made on the CPU unless it says where."""

    @wraps(function)
    def plain(*arguments: P.args, **named: P.kwargs) -> R:
        with ExitStack() as modes:
            if torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(False))
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    modes.enter_context(torch.autocast(kind, enabled=False))
            if torch.get_default_device().type != "cpu":
                modes.enter_context(torch.device("cpu"))
            return function(*arguments, **named)

    return plain
