"""What each process of tests/test_processes.py does: `process_jobs.py FOLDER SIZE PART`.

FOLDER holds the models of MODELS. Checkpoints go to FOLDER/SIZE/CASE, what every rank learned to
FOLDER/SIZE/PART-RANK.json. "killed" ends in the death of the last rank, and so does "compare" with three.
"""

import json
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch

import gptqkit
from gptqkit.cli import main
from gptqkit.errors import GptqkitError
from gptqkit.job import Job
from gptqkit.quantizer.stream import BlockStream
from support.models import build, windows

MODELS = {
    "llama": lambda: build("llama"),
    "mistral": lambda: build("mistral", num_hidden_layers=3),
    "broken": lambda: broken(),
}
CASES = {
    "gptq": ("llama", {"desc_act": True}, {}),
    "gptaq": ("mistral", {"method": "gptaq", "lm_head": True}, {"activations": "disk"}),
    "at-once": ("mistral", {"method": "gptaq", "true_sequential": False}, {"activations": "device"}),
    "left-out": ("broken", {"skip_nonfinite": True}, {}),
    "few": ("mistral", {"method": "gptaq", "lm_head": True}, {"batch_size": 4}),
    "rtn": ("mistral", {"method": "rtn", "lm_head": True}, {}),
    "skipped": (
        "mistral",
        {"overrides": {r"layers\.[01]\.": gptqkit.ModuleOverride(skip=True)}},
        {"activations": "disk"},
    ),
    "in-memory": ("llama", {"static_groups": True, "desc_act": True}, {}),
}


def broken():
    """A model that makes NaN of the token 95."""
    model = build("qwen2")
    model.get_input_embeddings().weight.data[95] = torch.nan
    return model


def run(folder, case, out, progress=None, **changes):
    """Quantize as the case says; one batch of "few", three of all others."""
    model, settings, options = CASES[case]
    ids = windows(samples=3 if case == "few" else 5).input_ids.clamp_(max=94)
    calibration = ids
    if case == "left-out":  # texts of several lengths, padded; one with the token
        ids[3, 2] = 95
        calibration = [row[: 24 - 5 * number].tolist() for number, row in enumerate(ids)]
    config = gptqkit.QuantizeConfig(**{"bits": 3, "group_size": 32, "sym": False, **settings})
    options = {
        "samples": len(ids),
        "sequence_length": 24,
        "batch_size": 2,
        "concatenate": case != "left-out",
        **options,
        **changes,
    }
    source = MODELS[model]() if case == "in-memory" else folder / model
    return gptqkit.quantize(source, calibration, out, config, progress=progress or (lambda _: None), **options)


def refused(*arguments, **options):
    """The error that a job ends with."""
    try:
        run(*arguments, **options)
    except GptqkitError as error:
        return [type(error).__name__, str(error)]
    return None


def die_after(layer):
    """Let this process end at once when all but the record of a block is written."""
    keep = Job.keep

    def last(self, step):
        if step.layer == layer:
            os.kill(os.getpid(), signal.SIGKILL)
        keep(self, step)

    Job.keep = last


def compare(folder, size, rank):
    """Every case; then what must be refused, too little memory on one rank, and a command that cannot be done."""
    facts = {"steps": {}, "kept": {}}
    for case in CASES:
        steps = []
        result = run(folder, case, folder / str(size) / case, lambda step, steps=steps: steps.append(step.done))
        facts["steps"][case] = len(steps)
        facts["kept"][case] = [result.path is not None, len(result.weights), result.report.excluded_samples]
    weights = run(folder, "in-memory", None).weights
    torch.save({name: weight.codes for name, weight in weights.items()}, folder / str(size) / f"codes-{rank}.pt")
    facts["other batch size"] = refused(folder, "gptq", folder / str(size) / "no", batch_size=2 + rank)
    facts["no checkpoint"] = refused(folder, "gptq", None if rank else folder / str(size) / "no")
    facts["other folder"] = refused(folder, "gptq", folder / str(size) / f"no-{rank}")
    facts["there"] = refused(folder, "gptq", folder / str(size) / "gptq")
    receive = BlockStream.run

    def small(self, layer, batch, *arguments):
        if len(batch["input_ids"]) > 1:
            raise torch.OutOfMemoryError("too little")
        return receive(self, layer, batch, *arguments)

    if rank == 1:
        BlockStream.run = small
    facts["batch size"] = run(folder, "gptq", None).report.batch_size
    BlockStream.run = receive
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        arguments = ["quantize", str(folder / "llama"), str(folder / str(size) / "gptq"), "--method", "rtn"]
        facts["command"] = [main(arguments), out.getvalue(), err.getvalue()]
    return facts


def work(folder, size, part):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    (folder / size).mkdir(exist_ok=True)
    if part == "compare":
        (folder / size / f"compare-{rank}.json").write_text(json.dumps(compare(folder, int(size), rank)))
    if part == "killed" or size == "3":  # the last rank dies, in a later block of the resumed job
        if rank == int(size) - 1:
            die_after(int(size) - 1)
        outcome = refused(folder, "gptaq", folder / "resumed", resume=True)
        (folder / size / f"killed-{rank}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    work(Path(sys.argv[1]), *sys.argv[2:])
