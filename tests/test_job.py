"""Jobs that are stopped in any way go on to the same files; nothing else is touched, and nothing is left behind."""

import copy
import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import gptqkit
from gptqkit import identity, job
from gptqkit.calibration import batches
from gptqkit.display import quantization_summary
from gptqkit.distributed import Processes
from gptqkit.errors import ArchitectureError, CheckpointError, DoesNotFitError, OutputExistsError, ResumeError
from gptqkit.export import shards, staging
from gptqkit.job import work_path
from gptqkit.report import QuantizationReport
from support.jobs import (
    CASES,
    before_blocks,
    contents,
    die,
    file_operations,
    processes,
    quantize,
    too_little_memory,
)
from support.models import build, overflowing, samples

pytestmark = pytest.mark.usefixtures("one_thread")


class Stop(Exception):
    pass


def at(step, act, stage="quantize"):
    """A progress callback that acts when so many modules are done."""

    def progress(now):
        if (now.stage, now.done) == (stage, step):
            act()

    return progress


def stop(kind=Stop):
    raise kind


# Stopped jobs

FAST = ("disk", "learned", "two stacks")  # hidden states on disk, of one stack and of two, of one model and of both


@pytest.mark.parametrize(
    ("case", "save_seconds"),
    [
        *((case, 0) for case in FAST),
        ("gptaq", 3600),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [*((each, 0) for each in CASES if each not in FAST), ("experts", 3600)]
        ),
    ],
    ids=str,
)
def test_a_job_stopped_anywhere_ends_in_the_same_files(
    job_models, undisturbed, case, save_seconds, tmp_path, monkeypatch
):
    """With hidden states saved after every block, and never: then finished blocks run again."""
    monkeypatch.setattr(job, "SAVE_SECONDS", save_seconds)
    out, (report, expected) = tmp_path / "out", undisturbed(case)
    block = sum(module.layer == 0 for module in report.modules)
    for step, kind in ((block, Stop), (block + 2, KeyboardInterrupt), (2 * block - 1, Stop), (2 * block, Stop)):
        with pytest.raises(kind):
            quantize(job_models, case, out, progress=at(step, partial(stop, kind)), resume=True)
        assert list(tmp_path.iterdir()) == ([work_path(out)] if step > block else [])  # nothing but finished blocks
    steps = []
    result = quantize(job_models, case, out, resume=True, progress=steps.append)
    assert [step.done for step in steps if step.stage == "quantize"] == list(range(block + 1, len(report.modules) + 1))
    assert [module.name for module in result.report.modules] == [module.name for module in report.modules]
    assert list(tmp_path.iterdir()) == [out]
    assert contents(out) == expected


def test_a_finished_job_is_not_measured_later_and_says_so(job_models, tmp_path, caplog):
    text = samples(4).input_ids.clamp_(max=94).flatten()
    for given, row in ((None, []), (text.tolist(), []), (text, ["Tensor"])):
        out = tmp_path / "_".join(["out", *row])
        found = quantize(job_models, "rtn", out, evaluate_on=given, resume=True).report
        assert [each["dataset"] for each in found.perplexity] == row
        assert (f"{out} is not measured on list, being finished" in caplog.text) == (given is not None and not row)
        caplog.clear()
    quantize(job_models, "rtn", out, evaluate_on=text, resume=True)
    assert "not measured" not in caplog.text


def test_a_loaded_model_goes_on_after_its_last_block_and_counts_samples_left_out(tmp_path):
    text = samples(1).input_ids.clamp_(max=94).flatten()
    quantize(overflowing("qwen2"), "padded", tmp_path / "whole", evaluate_on=text)
    with pytest.raises(Stop):
        quantize(overflowing("qwen2"), "padded", tmp_path / "out", evaluate_on=text, progress=at(1, stop, "evaluate"))
    steps = []
    result = quantize(
        overflowing("qwen2"), "padded", tmp_path / "out", evaluate_on=text, resume=True, progress=steps.append
    )
    assert {step.stage for step in steps} == {"evaluate"}  # every block had been kept
    assert result.report.excluded_samples == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def killed_while_saving(models, case, out):
    """Do a job in a process that dies while safetensors writes the part of its second block."""
    saved = []

    def save(tensors, path, metadata):
        saved.append(path)
        if len(saved) == 2:
            tensors, this = {**tensors, "large": torch.zeros(1 << 25)}, os.getpid()
            before = set(os.listdir(path.parent))
            if os.fork() == 0:
                os.closerange(3, 1 << 16)  # it outlives the job by a moment, and must not hold its lock
                while set(os.listdir(path.parent)) <= before:
                    pass
                os.kill(this, signal.SIGKILL)
                os._exit(0)
        save_file(tensors, path, metadata=metadata)

    shards.save_file = save
    quantize(models, case, out)


def test_a_job_killed_while_a_file_is_written_ends_in_the_same_files(job_models, undisturbed, tmp_path):
    """Until it is whole, safetensors calls a file something of its own."""
    out = tmp_path / "job" / "out"
    out.parent.mkdir()
    [ended] = processes(killed_while_saving, job_models, "gptq", out, log=tmp_path / "log")
    assert ended.code == -signal.SIGKILL
    assert (work_path(out) / "block-00000.json").exists()
    quantize(job_models, "gptq", out, resume=True)
    assert list(out.parent.iterdir()) == [out]
    assert contents(out) == undisturbed("gptq")[1]


def killable(models, case, out, moment, log):
    """Do a job in a process that dies before one of its operations on files; say which there were."""
    job.SAVE_SECONDS, seen = 0, []

    def act(*operation):
        seen.append(operation)
        if len(seen) == moment:
            die()

    file_operations(act)
    quantize(models, case, out)
    log.write_text(json.dumps(seen))


@pytest.mark.parametrize(
    ("case", "every"),
    [
        ("disk", 40),
        *(pytest.param(case, 1, marks=pytest.mark.slow) for case in ("gptaq", "disk", "experts", "rtn")),
        pytest.param("two stacks", 5, marks=pytest.mark.slow),
    ],
)
def test_a_job_killed_at_any_operation_on_files_ends_in_the_same_files(job_models, undisturbed, case, every, tmp_path):
    expected, log = undisturbed(case)[1], tmp_path / "log"
    [ended] = processes(killable, job_models, case, tmp_path / "out", 0, log, log=tmp_path / "say")
    assert ended.code == 0, ended.text
    assert contents(tmp_path / "out") == expected
    operations = json.loads(log.read_text())
    appears = operations.index(["os.rename", "checkpoint"]) + 1
    for moment in sorted({*range(2, len(operations) + 1, every), appears, appears + 1, len(operations)}):
        out = tmp_path / str(moment) / "out"
        out.parent.mkdir()
        [ended] = processes(killable, job_models, case, out, moment, log, log=tmp_path / "say")
        assert ended.code == -9, ended.text
        assert out.exists() == (moment > appears)
        quantize(job_models, case, out, resume=True)
        assert [path.name for path in out.parent.iterdir()] == ["out"]
        assert contents(out) == expected, operations[moment - 1]


@pytest.fixture
def disk(tmp_path):
    """A disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize(
    ("step", "left", "kept"),
    [(3, 0, 0), (10, 0, 1), (21, 3 << 14, 3)],
    ids=["first block", "second block", "joining"],
)
def test_a_disk_that_runs_full_loses_no_finished_block(job_models, undisturbed, disk, step, left, kept):
    def fill():
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while shutil.disk_usage(disk).free > left:
                file.write(bytes(4096))

    with pytest.raises(OSError, match="No space left on device"):
        quantize(job_models, "disk", disk / "out", progress=at(step, fill))
    (disk / "ballast").unlink()
    assert len(list(work_path(disk / "out").glob("block-*.json"))) == kept
    steps = []
    quantize(job_models, "disk", disk / "out", resume=True, progress=lambda now: steps.append(now.done))
    assert len(steps) == 21 - 7 * kept
    assert contents(disk / "out") == undisturbed("disk")[1]
    assert list(disk.iterdir()) == [disk / "out"]


def little_memory_in_blocks(patch):
    before_blocks(patch, too_little_memory(2))


def little_memory_for_what_linears_received(patch):
    """As where the rows that count are copied, or looked through for NaN."""
    broken = batches._broken
    patch.setattr(batches, "_broken", lambda rows: too_little_memory(2 * 24)(None, len(rows)) or broken(rows))


@pytest.mark.parametrize(
    "lessen", [little_memory_in_blocks, pytest.param(little_memory_for_what_linears_received, marks=pytest.mark.slow)]
)
def test_out_of_memory_halves_the_batch_for_good(job_models, tmp_path, monkeypatch, lessen):
    with monkeypatch.context() as patch:
        lessen(patch)
        small = quantize(job_models, "gptq", tmp_path / "small", batch_size=4)
    assert small.report.batch_size == 2
    quantize(job_models, "gptq", tmp_path / "two", batch_size=2)  # the same batches from the start
    with monkeypatch.context() as patch:
        lessen(patch)
        with pytest.raises(Stop):
            quantize(job_models, "gptq", tmp_path / "resumed", batch_size=4, progress=at(9, stop))
    resumed = quantize(job_models, "gptq", tmp_path / "resumed", batch_size=4, resume=True)  # with memory again
    assert resumed.report.batch_size == 2
    small, two, again = (contents(tmp_path / name)["model.safetensors"] for name in ("small", "two", "resumed"))
    assert small == two == again


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (4, ["batch_size stays 1, with which the job was begun, instead of 4"]),
        pytest.param(None, [], marks=pytest.mark.slow),
    ],
)
def test_a_job_never_goes_on_with_larger_batches(job_models, tmp_path, caplog, asked, said):
    with pytest.raises(Stop):
        quantize(job_models, "gptq", tmp_path / "out", batch_size=1, progress=at(9, stop))
    caplog.clear()
    report = quantize(job_models, "gptq", tmp_path / "out", batch_size=asked, resume=True).report
    assert report.batch_size == 1
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == said
    quantize(job_models, "gptq", tmp_path / "whole", batch_size=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "case", ["disk", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "disk")]
)
def test_a_job_goes_on_with_smaller_batches_where_its_own_do_not_fit(
    job_models, undisturbed, tmp_path, case, caplog, monkeypatch
):
    """Its finished blocks stay; of the others the last digits may differ."""
    monkeypatch.setattr(job, "SAVE_SECONDS", 0)
    out, (whole, _) = tmp_path / "out", undisturbed(case)
    block = sum(module.layer == 0 for module in whole.modules)
    with pytest.raises(Stop):
        quantize(job_models, case, out, progress=at(block + 1, stop))
    kept = {name: data for name, data in contents(work_path(out)).items() if name.startswith("block-00000.")}
    steps = []

    def note(step):
        if step.stage == "quantize":
            steps.append(step.done)
            assert kept.items() <= contents(work_path(out)).items()

    report = quantize(job_models, case, out, batch_size=1, resume=True, progress=note).report
    assert steps == list(range(block + 1, len(whole.modules) + 1))
    assert report.batch_size == 1
    assert "last digits may differ: batch_size was 2, now 1" in caplog.text
    errors = [[module.error for module in each.modules if module.error is not None] for each in (report, whole)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    assert [module.bits for module in report.modules] == [module.bits for module in whole.modules]


def test_out_of_memory_with_one_sample_is_said_and_what_is_finished_stays(
    job_models, undisturbed, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        less = partial(before_blocks, patch, too_little_memory(0))
        with pytest.raises(DoesNotFitError, match=r"out of memory.*Tried to allocate 2 GiB.*--activations disk"):
            quantize(job_models, "gptq", tmp_path / "out", progress=at(9, less))
    quantize(job_models, "gptq", tmp_path / "out", resume=True)
    assert contents(tmp_path / "out")["model.safetensors"] == undisturbed("gptq")[1]["model.safetensors"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, partial(OSError, errno.ENOSPC, "No space left on device")])
def test_a_job_that_is_stopped_while_it_is_taken_up_lets_go_of_it(job_models, tmp_path, monkeypatch, error):
    """As in a notebook, whose process goes on and tries again."""

    def fail(*_):
        raise error()

    with monkeypatch.context() as patch:
        patch.setattr(job.Job, "_write_json", fail)
        with pytest.raises((KeyboardInterrupt, OSError)):
            quantize(job_models, "rtn", tmp_path / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(Stop):
        quantize(job_models, "rtn", tmp_path / "out", progress=at(8, stop))
    with monkeypatch.context() as patch:
        patch.setattr(job, "digest", fail)
        with pytest.raises((KeyboardInterrupt, OSError)):
            quantize(job_models, "rtn", tmp_path / "out", resume=True)
    quantize(job_models, "rtn", tmp_path / "out", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_where_nothing_can_be_locked_that_is_said(job_models, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(job.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Function not implemented: nothing can be locked there; choose an output on an"):
        quantize(job_models, "rtn", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_job_stays_where_it_began_whatever_becomes_of_the_working_directory(
    job_models, undisturbed, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    leave = at(9, partial(os.chdir, tmp_path / "elsewhere"))
    quantize(Path(os.path.relpath(job_models)), "gptq", Path("out"), progress=leave)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert contents(tmp_path / "out") == undisturbed("gptq")[1]


@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_a_checkpoint_is_as_readable_as_other_files(job_models, tmp_path, mask):
    before = os.umask(mask)
    try:
        quantize(job_models, "rtn", tmp_path / "out")
    finally:
        os.umask(before)
    for file in (tmp_path / "out").iterdir():
        assert file.stat().st_mode & 0o777 == 0o666 & ~mask, file.name


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("learned", torch.bfloat16),
        pytest.param("gptaq", torch.float64, marks=pytest.mark.slow),
        pytest.param("learned", torch.float64, marks=pytest.mark.slow),
        pytest.param("gptaq", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_default_dtype_changes_nothing(job_models, undisturbed, tmp_path, case, dtype):
    torch.set_default_dtype(dtype)
    try:
        quantize(job_models, case, tmp_path / "out")
    finally:
        torch.set_default_dtype(torch.float32)
    assert contents(tmp_path / "out") == undisturbed(case)[1]


def test_a_loaded_model_stays_as_it_was(tmp_path):
    model = build("mistral").train()
    model.model.norm.weight.requires_grad_(False)
    model.config.dtype = torch.float32  # as of models that were loaded
    before = copy.deepcopy(model)
    quantize(model, "gptq", tmp_path / "out")
    assert vars(model.config) == vars(before.config)
    assert vars(model.generation_config) == vars(before.generation_config)
    for (name, module), same in zip(model.named_modules(), before.modules(), strict=True):
        assert (type(module), module.training, vars(module).keys()) == (type(same), True, vars(same).keys()), name
    for parameter, same in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(parameter, same)
        assert (parameter.requires_grad, parameter.grad) == (same.requires_grad, None)


def test_a_temporary_folder_too_small_for_a_loaded_model_is_named(tmp_path, monkeypatch):
    model = build("mistral")

    def refuse(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", refuse)
    with pytest.raises(OSError, match=r"gptqkit-\w+ does not take the model .*No space left.*; set TMPDIR to a folder"):
        quantize(model, "rtn", tmp_path / "out")


@pytest.mark.parametrize("change", ["adapter", "fewer blocks", "shared", "meta"])
def test_a_loaded_model_that_its_files_do_not_describe_is_refused_in_its_own_terms(change, tmp_path):
    model = build("mistral")
    layers = model.model.layers
    said = (
        r"what transformers saves of the loaded MistralForCausalLM lacks model\.layers\.\d\.[^;]*; give a plain float"
    )
    if change == "adapter":  # a Linear inside another module, as peft has it
        layers[0].mlp.up_proj = nn.ModuleDict({"base_layer": layers[0].mlp.up_proj})
    elif change == "fewer blocks":
        model.model.layers = layers[:1]
    elif change == "shared":
        layers[1].mlp.up_proj.weight, said = layers[0].mlp.up_proj.weight, "cannot save the loaded .* shared tensors"
    else:
        model, said = model.to("meta"), "cannot save the loaded MistralForCausalLM: .* meta"
    with pytest.raises(ArchitectureError, match=said):
        quantize(model, "rtn", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Refused jobs


def test_another_job_is_refused_by_name_and_an_unfinished_one_is_not_started_again(
    job_models, tmp_path, monkeypatch, caplog
):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize(job_models, "gptq", out, progress=at(8, stop))
    kept = contents(work_path(out))
    with pytest.raises(OutputExistsError, match="unfinished job for out; resume it"):
        quantize(job_models, "gptq", out)
    other = build("mistral", num_hidden_layers=3)
    other.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1
    ids = samples(4).input_ids.clamp_(max=94)
    ids[3, 23] -= 1
    for changes, said in (
        ({"settings": {"bits": 4}}, "config.bits was 3, now 4"),
        ({"settings": {"format": "gptq"}}, "config.format was 'gptq_v2', now 'gptq'"),
        ({"calibration": gptqkit.Calibration(ids, sequence_length=24)}, "calibration text, .* gives other tokens"),
        ({"models": other}, r"is another one: model\.safetensors has other contents"),
    ):
        with pytest.raises(ResumeError, match=said):
            quantize(**{"models": job_models, "case": "gptq", "out": out, "resume": True, **changes})
    assert contents(work_path(out)) == kept
    monkeypatch.setattr(identity, "__version__", "0.0")
    with caplog.at_level(logging.WARNING, logger="gptqkit"):
        quantize(job_models, "gptq", out, resume=True)
    said = r"otherwise than it was begun, so last digits may differ: gptqkit was '[\d.]+', now '0\.0'"
    assert re.search(said, caplog.text)


def test_two_processes_are_not_at_work_on_one_job(job_models, undisturbed, tmp_path):
    out = tmp_path / "out"
    begun = work_path(out) / "job.json"

    def try_to_join():
        for path in (begun, begun.with_name("job.json.tmp")):  # and when the first is just about to delete all
            begun.rename(path)
            with pytest.raises(ResumeError, match="another process is at work"):
                quantize(job_models, "gptq", out, resume=True)
            path.rename(begun)

    quantize(job_models, "gptq", out, progress=at(9, try_to_join))
    assert contents(out) == undisturbed("gptq")[1]


FIXED = {"[qkv]_proj|mlp": {"bits": 4}}
CHOSEN = {"target_bits": 3.6, "method": "rtn", "overrides": FIXED}


def test_chosen_bits_outlive_a_job_that_stops_before_its_first_block(job_models, tmp_path):
    out, steps, settings = tmp_path / "out", [], CHOSEN

    def stop_after_choosing(_):
        if (work_path(out) / "chosen.json").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(job_models, "gptq", out, settings=settings, progress=stop_after_choosing)
    kept = (work_path(out) / "chosen.json").read_bytes()
    assert not list(work_path(out).glob("block-*"))

    def note(step):
        steps.append(step)
        assert (work_path(out) / "chosen.json").read_bytes() == kept

    quantize(job_models, "gptq", out, settings=settings, resume=True, progress=note)
    assert "choose bits" not in {step.stage for step in steps}
    assert not work_path(out).exists()


def test_bits_are_chosen_once(job_models, tmp_path):
    """A resumed job keeps its choice, unless other overrides are asked for: then it is another job."""
    steps, settings = [], CHOSEN
    whole = quantize(job_models, "gptq", tmp_path / "whole", settings=settings)
    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize(job_models, "gptq", out, settings=settings, progress=at(10, stop))
    with pytest.raises(ResumeError, match=r"config\.overrides\.o_proj was None"):
        quantize(
            job_models, "gptq", out, settings={**settings, "overrides": {**FIXED, "o_proj": {"bits": 8}}}, resume=True
        )
    with pytest.raises(OutputExistsError, match="unfinished job"):
        quantize(job_models, "gptq", out, settings=settings, progress=steps.append)
    assert not steps  # the refusals come before any work
    chosen = work_path(out) / "chosen.json"
    kept = chosen.read_bytes()
    chosen.unlink()
    with pytest.raises(ResumeError, match=r"damaged: \S*chosen\.json"):
        quantize(job_models, "gptq", out, settings=settings, resume=True)
    chosen.write_bytes(kept)
    quantize(job_models, "gptq", out, settings=settings, resume=True, progress=steps.append)
    assert {step.stage for step in steps if step.layer is not None} == {"quantize"}
    assert whole.report.config.overrides.keys() > FIXED.keys()
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, lambda ids: pandas.DataFrame({"input_ids": ids.tolist()})])
def test_sources_that_do_not_compare_as_a_whole_are_reported_by_name(job_models, tmp_path, kind):
    source = kind(samples(4).input_ids)
    given = gptqkit.Calibration(source, samples=4, sequence_length=24)
    for resume in (False, True):
        result = quantize(job_models, "gptq", tmp_path / "out", calibration=given, resume=resume)
        assert result.was_finished == resume
    expected = {"source": type(source).__name__, "samples": 4, "sequence_length": 24}
    assert result.report.calibration == expected


def test_a_finished_job_is_not_resumed_but_reported(job_models, undisturbed, tmp_path, caplog):
    out, steps = tmp_path / "out", []
    first = quantize(job_models, "gptq", out).report.to_dict()
    assert (first["samples"], first["calibration"]) == (4, {"source": "Tensor", "sequence_length": 24})  # not 128
    with caplog.at_level(logging.INFO, "gptqkit"):
        again, more = (
            quantize(job_models, "gptq", out, resume=True, overwrite=over, progress=steps.append)
            for over in (False, True)
        )
    assert again.was_finished
    assert more.was_finished  # --resume loses nothing, also beside --overwrite
    assert f"{out} was finished before" in caplog.text
    assert not steps
    again = again.report.to_dict()
    for report in (first, again):
        for part in (report, *report["modules"]):
            del part["seconds"]
    assert again == first
    assert contents(out) == undisturbed("gptq")[1]
    assert "seconds" not in quantization_summary(QuantizationReport.from_dict(again), gptqkit.inspect(out))
    with pytest.raises(OutputExistsError, match=r"another job: config\.bits was 3, now 4"):
        quantize(job_models, "gptq", out, resume=True, settings={"bits": 4})
    other = quantize(job_models, "gptq", tmp_path / "other", settings={"bits": 4})
    other = quantize(job_models, "gptq", other.path, resume=True, overwrite=True)
    assert (other.was_finished, other.report.config.bits) == (False, 3)
    assert contents(other.path) == contents(out)
    shutil.rmtree(other.path)
    with pytest.raises(OutputExistsError, match=r"another job: .*calibration\.seed was 0, now 7"):
        quantize(job_models, "gptq", out, resume=True, calibration={"source": samples(4).input_ids, "seed": 7})
    with pytest.raises(
        OutputExistsError, match=r"calibration\.source was 'Tensor', now 'a\.txt', .*samples was 128, now 7"
    ):
        quantize(job_models, "gptq", out, resume=True, calibration={"source": tmp_path / "a.txt", "samples": 7})
    with pytest.raises(OutputExistsError, match=r"calibration\.source was 'Tensor', now 'a\.txt, b\.txt'"):
        quantize(job_models, "gptq", out, resume=True, calibration={"source": [tmp_path / "a.txt", tmp_path / "b.txt"]})
    shutil.copytree(job_models, tmp_path / "others")
    for file in (tmp_path / "others").glob("*/model.safetensors"):
        save_file({name: 1.5 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(OutputExistsError, match=r"another job: model\.safetensors has other contents"):
        quantize(tmp_path / "others", "gptq", out, resume=True)
    shutil.rmtree(tmp_path / "others")
    (out / "quantization_report.json").write_text('{"config": {}}')
    with pytest.raises(CheckpointError, match=r"quantization_report\.json is damaged"):
        quantize(job_models, "gptq", out, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (KeyboardInterrupt, "resume the job (resume=True, --resume)"),
        (OSError, "resume the job (resume=True, --resume)"),
        (Stop, "resume the job (resume=True, --resume)"),
        (DoesNotFitError, "resume the job (resume=True, --resume)"),
        (ArchitectureError, "resumed, the job would fail again"),
        (CheckpointError, "resumed, the job would fail again"),
    ],
)
def test_resuming_is_advised_where_it_can_help(job_models, tmp_path, caplog, error, advice):
    with pytest.raises(error):
        quantize(job_models, "rtn", tmp_path / "out", progress=at(8, partial(stop, error)))
    assert f"what is finished (1 block) is kept in {work_path(tmp_path / 'out')}; {advice}" in caplog.text


def test_whatever_is_damaged_is_never_resumed_from(job_models, undisturbed, tmp_path, monkeypatch):
    """One bit of any file that a resume reads, or the file itself: refused by name, until the job is started anew."""
    monkeypatch.setattr(job, "SAVE_SECONDS", 0)
    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize(job_models, "gptaq", out, progress=at(17, stop))
    files = [path for path in work_path(out).iterdir() if path.name != "lock"]
    assert {path.suffix for path in files} == {".json", ".bin", ".safetensors"}
    for file in files:
        whole = file.read_bytes()
        for place in (len(whole) // 2, len(whole) - 1):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            file.write_bytes(flipped)
            with pytest.raises(ResumeError, match=rf"unfinished job is damaged: \S*{file.name}; .*--overwrite"):
                quantize(job_models, "gptaq", out, resume=True)
        if file.name not in ("job.json", "states.json"):
            file.unlink()
            with pytest.raises(ResumeError, match=f"damaged: \\S*{file.name};"):
                quantize(job_models, "gptaq", out, resume=True)
        file.write_bytes(whole)
    quantize(job_models, "gptaq", out, overwrite=True)
    assert contents(out) == undisturbed("gptaq")[1]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("lost", ["block-00000.json", "block-00001.json", "block-00002.json"])
def test_a_lost_record_is_noticed_also_where_all_blocks_are_done(job_models, tmp_path, lost):
    """The job has one for the output layer, too, so that there are as many as blocks."""
    out, text = tmp_path / "out", samples(4).input_ids.flatten().tolist()
    with pytest.raises(Stop):
        quantize(job_models, "rtn", out, evaluate_on=text, progress=at(1, stop, "evaluate"))
    assert (work_path(out) / "head.json").exists()
    (work_path(out) / lost).unlink()
    with pytest.raises(ResumeError, match=f"damaged: \\S*{lost};"):
        quantize(job_models, "rtn", out, evaluate_on=text, resume=True)


def contend(folder, rounds):
    """Open and discard the same job again and again; die where another process holds it, too."""
    held, alone = folder / "held", Processes(0, 1, torch.device("cpu"))
    for _ in range(rounds):
        with suppress(ResumeError), job.Job(folder / "out", {}, alone, resume=True, overwrite=False) as mine:
            os.close(os.open(held, os.O_CREAT | os.O_EXCL))
            held.unlink()
            mine.check_shared()
            raise ResumeError


@pytest.mark.parametrize("rounds", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_lock_is_never_held_twice(tmp_path, rounds):
    ended = processes(contend, tmp_path, rounds, size=4, log=tmp_path / "log")
    assert [each.code for each in ended] == [0] * 4, [each.text for each in ended]
    assert not work_path(tmp_path / "out").exists()


def test_what_no_job_wrote_is_never_deleted(job_models, tmp_path):
    folder = work_path(tmp_path / "out")
    for name in ("thesis.txt", "checkpoints", "block-00000.json.bak"):
        folder.mkdir()
        (folder / name).touch()
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ResumeError, match=f"holds {name}, which no job wrote; move that away"):
                quantize(job_models, "rtn", tmp_path / "out", **options)
        assert [path.name for path in folder.iterdir()] == [name]
        shutil.rmtree(folder)
    folder.touch()
    with pytest.raises(ResumeError, match="is no folder"):
        quantize(job_models, "rtn", tmp_path / "out")
    folder.unlink()


def test_starting_beside_a_live_job_never_advises_to_delete_it(job_models, tmp_path):
    out = tmp_path / "out"

    def start():
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(ResumeError, match=r"another process is at work in .*; wait for it, or stop it$"):
                quantize(job_models, "rtn", out, **options)

    quantize(job_models, "rtn", out, progress=at(9, start))


def test_a_target_that_exists_is_never_harmed(job_models, undisturbed, tmp_path):
    out = tmp_path / "out"
    quantize(job_models, "rtn", out)
    old = contents(out)
    steps = []
    with pytest.raises(OutputExistsError, match="exists already"):
        quantize(job_models, "gptq", out, progress=steps.append)
    assert not steps
    with pytest.raises(Stop):
        quantize(job_models, "gptq", out, overwrite=True, progress=at(21, stop))
    assert contents(out) == old  # until the new one is complete
    quantize(job_models, "gptq", out, overwrite=True, resume=True)
    assert contents(out) == undisturbed("gptq")[1]
    late = tmp_path / "late"
    made = late / "made"
    with pytest.raises(OutputExistsError, match="exists already"):  # somebody else makes it while the job runs
        quantize(job_models, "gptq", late, progress=at(21, lambda: made.mkdir(parents=True)))
    assert list(late.rglob("*")) == [made]
    made.rmdir()  # an empty folder is no obstacle
    quantize(job_models, "gptq", late, resume=True, progress=steps.append)
    assert not steps  # every block had been kept
    assert contents(late) == undisturbed("gptq")[1]


def test_a_job_that_ends_while_it_deletes_what_it_replaced_is_finished(job_models, tmp_path, monkeypatch):
    out = tmp_path / "out"
    quantize(job_models, "rtn", out)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "shutil", SimpleNamespace(rmtree=lambda _: stop(KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            quantize(job_models, "gptq", out, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 3
    quantize(job_models, "gptq", out, resume=True)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("case", ["gptq", "disk"])
def test_a_job_that_a_power_cut_ends_has_synced_all_that_counts(job_models, tmp_path, monkeypatch, case):
    monkeypatch.setattr(job, "SAVE_SECONDS", 0)
    sync, synced, listed = os.fsync, {}, {}

    def record(descriptor):
        sync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_mtime_ns
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            listed[found.st_ino] = set(os.listdir(descriptor))

    monkeypatch.setattr(os, "fsync", record)
    with pytest.raises(KeyboardInterrupt):
        quantize(
            job_models, case, tmp_path / "out", progress=at(15, partial(stop, KeyboardInterrupt))
        )  # two blocks count
    folder = work_path(tmp_path / "out")
    states = (folder / "states.json").read_text()
    counts = [path for path in folder.iterdir() if path.suffix in (".json", ".safetensors") or path.name in states]
    assert {path.suffix for path in counts} == {".json", ".bin", ".safetensors"}
    for path in counts:
        assert synced.get(path.stat().st_ino) == path.stat().st_mtime_ns, path.name
    assert listed.get(folder.stat().st_ino, set()) >= {path.name for path in counts if path.suffix == ".json"}
    assert folder.name in listed.get(tmp_path.stat().st_ino, set())
