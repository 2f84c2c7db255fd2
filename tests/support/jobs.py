"""Jobs for the tests of resuming and of several processes, and real processes that run them.

Processes are forked from a server that imports torch once, so that each costs only its own work.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer

import gptqkit
from gptqkit.progress import silent
from support.models import build, overflowing, samples

MODELS = {
    "mistral": lambda: build("mistral", num_hidden_layers=3),
    "mixtral": lambda: build("mixtral"),
    "broken": partial(overflowing, "qwen2"),
    "t5": lambda: build("t5", num_layers=1),
}
CASES = {  # model, settings, how it is run
    "gptq": ("mistral", {"desc_act": True}, {}),
    "gptaq": (
        "mistral",
        {"method": "gptaq", "lm_head": True, "grid": "mse", "refine_rounds": 1},
        {"activations": "device"},
    ),
    "disk": ("mistral", {"method": "loaq", "true_sequential": False}, {"activations": "disk"}),
    "experts": ("mixtral", {"method": "gptaq", "format": "gptq"}, {"shard_size": 60000}),
    "learned": ("mistral", {"learn_iterations": 2, "two_sided": True}, {"activations": "disk"}),
    "padded": ("broken", {"skip_nonfinite": True}, {}),
    "rtn": ("mistral", {"method": "rtn", "lm_head": True}, {}),
    "two stacks": ("t5", {"method": "gptaq", "desc_act": True}, {"activations": "disk"}),
}


def quantize(models, case, out, *, progress=silent, settings=None, calibration=None, evaluate_on=None, **changes):
    """Do the job of a case on the models in a folder, in two batches of two samples."""
    model, own, how = CASES[case]
    if calibration is None:
        ids = samples(4).input_ids.clamp_(max=94)
        if case == "padded":  # texts of several lengths, one with the token that makes NaN
            ids[2, 2] = 95
            texts = [row[: 24 - 5 * number].tolist() for number, row in enumerate(ids)]
            calibration = gptqkit.Calibration(texts, samples=4, sequence_length=24, concatenate=False)
        else:
            calibration = None if case == "rtn" else gptqkit.Calibration(ids, sequence_length=24)
    usual = {"quality": "fast", "bits": 3, "group_size": 32, "sym": False, "grid": "minmax", "refine_rounds": 0}
    config = gptqkit.QuantizeConfig(**usual | own | (settings or {}))
    return gptqkit.quantize(
        models / model if isinstance(models, Path) else models,
        calibration,
        out,
        config,
        run=gptqkit.Run(**{"batch_size": 2, **how, **changes}),
        evaluate_on=evaluate_on,
        progress=progress,
    )


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def before_blocks(patch, act):
    """Call `act` with the number of a Mistral block, and of its samples, before every forward pass of one."""
    forward = MistralDecoderLayer.forward

    def run(self, hidden_states, *arguments, **named):
        act(self.self_attn.layer_idx, len(hidden_states))
        return forward(self, hidden_states, *arguments, **named)

    patch.setattr(MistralDecoderLayer, "forward", run)


def too_little_memory(largest):
    """What to do `before_blocks` of a GPU that holds so many samples."""

    def act(_, count):
        if count > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    return act


def file_operations(act):
    """Call `act` with the name of every operation on files of work directories that Python knows of, before it."""
    names = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "shutil.copyfile", "shutil.rmtree"}

    def hook(event, arguments):
        if event in names and ".gptqkit-work" in str(arguments[0]):
            act(event, Path(arguments[0]).name)

    sys.addaudithook(hook)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def processes(function, *arguments, size=1, log):
    """Call a function in new processes; of several, each knows its rank as a launcher would tell it.

    What they say goes to LOG-RANK. Returns the exit code (minus the signal where killed, None where it had to be ended
    after a minute) and the text of each.
    """
    serve()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    logs = [log.with_name(f"{log.name}-{rank}") for rank in range(size)]
    running = [
        context.Process(target=_process, args=(rank, size, port, logs[rank], function, arguments))
        for rank in range(size)
    ]
    for process in running:
        process.start()
    deadline = time.monotonic() + 60
    ended = []
    for process, file in zip(running, logs, strict=True):
        process.join(max(0, deadline - time.monotonic()))
        code = process.exitcode
        process.kill()
        process.join()
        ended.append(SimpleNamespace(code=code, text=file.read_text()))
    return ended


@cache
def serve():
    """Start the process that the others are forked from: one thread, torch imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(
            "MALLOC_MMAP_THRESHOLD_", "65536"
        )  # what is freed goes back to the system, so memory can be measured
        forkserver.set_forkserver_preload([__name__])
        forkserver.ensure_running()


def _process(rank, size, port, log, function, arguments):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if size > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(*arguments)
