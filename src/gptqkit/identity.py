"""What makes two jobs the same: only the same may go on, and all processes of a job must do the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from .calibration.samples import Samples
from .distributed import Processes
from .errors import RankError
from .export.shards import some
from .model import FloatModel
from .quantizer.config import QuantizeConfig
from .version import __version__

_DIGEST = re.compile("[0-9a-f]{64}")


def identity_of(
    model: FloatModel, config: QuantizeConfig, samples: Samples | None, batch_size: int | None, device: torch.device
) -> dict[str, Any]:
    """Return all that decides the result of a job, as plain values for JSON.

    Batches decide last digits only, but all processes must take the same.
    """
    calibration: dict[str, Any] = {}
    if samples is not None:
        digest = hashlib.sha256(samples.input_ids.numpy().tobytes())
        if samples.attention_mask is not None:
            digest.update(samples.attention_mask.numpy().tobytes())
        count, length = samples.input_ids.shape
        calibration = {"samples": count, "length": length, "tokens": digest.hexdigest()}
    return {
        "model": model.identity(),
        "config": config.to_dict(),
        "calibration": calibration,
        "batch_size": batch_size,
        "device": device.type,
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that take part."""
    return {"gptqkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def check_agreement(processes: Processes, identity: Mapping[str, Any]) -> None:
    """Raise RankError where processes were started for different jobs, naming what differs."""
    jobs = processes.gather({**identity, "versions": versions()})
    with processes.together():
        for rank, job in enumerate(jobs):
            different = differences(jobs[0], job, form=f"{{}} is {{!r}} on rank 0, {{!r}} on rank {rank}")
            if different:
                raise RankError(
                    f"the processes were started for different jobs: {some(different)}; start all with the same "
                    "arguments, files and versions"
                )


def differences(before: Any, now: Any, where: str = "", form: str = "{} was {!r}, now {!r}") -> list[str]:
    """Return what differs between two trees of plain values: `form` of its name and the two values.

    >>> differences({"bits": 4, "model": {"size": 1}}, {"bits": 3, "model": {"size": 1}})
    ['bits was 4, now 3']
    >>> differences({"overrides": {"q": 8, "k": 4}}, {"overrides": {"k": 4, "q": 8}})  # the first that matches counts
    ["order of overrides was 'q', now 'k'"]
    >>> differences({"model": {"config.json": "ab" * 32}}, {"model": {"config.json": "cd" * 32}})
    ['config.json has other contents']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        found = [
            text
            for key in dict.fromkeys([*before, *now])
            for text in differences(before.get(key), now.get(key), f"{where}.{key}" if where else str(key), form)
        ]
        moved = [form.format(f"order of {where}", *pair) for pair in zip(before, now, strict=False) if len({*pair}) > 1]
        return found or moved[:1]
    if before == now:
        return []
    if any(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (before, now)):
        if where == "calibration.tokens":
            return ["the calibration text, or the tokenizer, gives other tokens"]
        return [f"{where.removeprefix('model.')} has other contents"]
    return [form.format(where, before, now)]
