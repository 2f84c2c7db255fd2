"""What a run would need, found out before it starts: from the model's config and the headers of its files."""

from __future__ import annotations

import dataclasses
import logging
import socket
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from .architecture import open_empty
from .budget import Plan, make_plan
from .calibration.activations import PLACES, Place
from .evaluating import check_length, default_length
from .loading import choose_device
from .machine import look
from .pace import measure_pace
from .quantizer.config import QuantizeConfig
from .quantizer.ranks import Ranks
from .sizes import measure, shapes_of
from .source import StoredModel
from .units import size_text
from .workload import Workload

_LOG = logging.getLogger("gptqkit")


def plan(
    model: str | Path,
    out: str | Path | None = None,
    config: QuantizeConfig | None = None,
    *,
    samples: int = 128,
    sequence_length: int | None = None,
    batch_size: int | None = None,
    activations: Literal["auto"] | Place = "auto",
    activation_memory: int | None = None,
    device: str | torch.device = "auto",
    evaluate_on: str | Path | None = None,
    timed: bool = True,
    trust_remote_code: bool = False,
) -> Plan:
    """What `quantize` with the same arguments needs, what there is, and how long it takes.

    No weights are read, except those of one block where `timed`.

    Args:
        model: Hub id or folder of a float model.
        out: Where the checkpoint would go; its disk is looked at.
        config: All settings of the quantization; None for the defaults.
        samples: Calibration windows; with method "rtn" none are assumed.
        sequence_length: Tokens per window; None for 2048 or the model's maximum, whichever is less.
        batch_size: Windows per forward pass; None for as many as fit, 8 at most.
        activations: Where hidden states are kept between blocks: "device", "memory" or "disk"; "auto" chooses.
        activation_memory: Bytes of RAM that "auto" may give to hidden states; None for half of what is free.
        device: "auto" takes a GPU where there is one.
        evaluate_on: Text that the checkpoint would be evaluated on; it is not read.
        timed: Run and solve one block, to estimate the time; only where the run fits, and for a model in a folder.
        trust_remote_code: Let transformers run code that comes with the model.

    Returns:
        The plan; its `check()` raises where something is missing.

    Raises:
        GptqkitError: A model or settings that do not fit; see `errors`.
    """
    config = config or QuantizeConfig()
    place = choose_device(device)
    shapes = shapes_of(open_empty(model, trust_remote_code=trust_remote_code))
    length = default_length(shapes) if sequence_length is None else sequence_length
    check_length(shapes, length)
    workload = Workload(
        config=config,
        sequence_length=length,
        device=place,
        samples=0 if config.method == "rtn" else samples,
        batch_size=batch_size,
        activations=activations,
        activation_memory=activation_memory,
        evaluate_on=evaluate_on,
    )
    made = make_plan(partial(measure, shapes), workload, look(place, Path.cwd() if out is None else Path(out).parent))
    if not timed or not made.fits or not Path(model).is_dir():
        return made
    _LOG.info("reading, running and solving one block, to estimate the time")
    pace = measure_pace(StoredModel(model, trust_remote_code=trust_remote_code), made.workload)
    return dataclasses.replace(made, seconds=pace.total(made.sizes, made.workload))


def plan_run(
    model: PreTrainedModel,
    workload: Workload,
    ranks: Ranks,
    out: Path | None,
    *,
    already: int = 0,
    fit_check: bool = True,
) -> Plan:
    """The plan that all ranks of a run follow: that of the rank with the least room.

    Args:
        model: The model, wherever its weights are.
        workload: What is asked for.
        ranks: The processes.
        out: The checkpoint to be.
        already: Bytes on disk that the run has taken before.
        fit_check: See `Plan.check`.

    Raises:
        DoesNotFitError: Something is missing, on any rank.
    """
    hosts = ranks.gather(socket.gethostname())
    folder = Path.cwd() if out is None else out.absolute().parent
    with ranks.together():
        machine = look(ranks.device, folder, processes=hosts.count(socket.gethostname()))
        if machine.disk is not None:
            machine = dataclasses.replace(machine, disk=machine.disk + already)
        asked = dataclasses.replace(workload, processes=ranks.size)
        made = make_plan(partial(measure, shapes_of(model).eval()), asked, machine)
    chosen = min(ranks.gather(made), key=_room)
    with ranks.together():
        chosen.check(fit_check=fit_check)
    if ranks.rank == 0:
        _LOG.info("planned: %s", _in_short(chosen))
    return chosen


def _in_short(plan: Plan) -> str:
    """A plan in one line."""
    needs = [
        f"{size_text(need.total)} of {name}"
        + ("" if need.available is None else f" ({size_text(need.available)} there)")
        for name, need in plan.needs.items()
    ]
    if plan.workload.samples:
        needs += [f"batches of {plan.workload.batch_size}", f"hidden states: {plan.workload.activations}"]
    return ", ".join(needs)


def _room(plan: Plan) -> tuple[bool, int, int, int]:
    """Less for a plan that was made with less room."""
    chosen = plan.workload
    return plan.fits, chosen.batch_size or 0, -("auto", *PLACES).index(chosen.activations), chosen.statistics_bytes
