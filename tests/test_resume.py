"""Jobs that are stopped in every way, and go on."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import gptqkit
from gptqkit.errors import CheckpointError, DoesNotFitError, OutputExistsError, ResumeError
from gptqkit.export.work import WorkDirectory, work_path
from support.models import MODELS, build, windows

STOPPED = [
    ({"method": "rtn"}, "memory"),
    ({"method": "gptq", "desc_act": True}, "device"),
    ({"method": "gptaq", "static_groups": True, "lm_head": True}, "memory"),
    ({"method": "gptaq", "true_sequential": False}, "disk"),
]


def settings(**changes):
    return gptqkit.QuantizeConfig(**{"bits": 3, "group_size": 32, "sym": False, **changes})


def run(model, out, config, **options):
    tokens = windows(samples=5).input_ids
    return gptqkit.quantize(model, tokens, out, config, sequence_length=24, batch_size=2, **options)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Float models on disk by name."""
    folder = tmp_path_factory.mktemp("models")
    made = {}

    def store(name, **changes):
        key = (name, *changes.items())
        if key not in made:
            made[key] = folder / f"{name}-{len(made)}"
            build(name, **changes).save_pretrained(made[key])
        return made[key]

    return store


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", MODELS)
def test_a_model_read_block_by_block_is_quantized_like_one_in_memory(name, stored, tmp_path):
    config = settings(method="gptaq")
    streamed = run(stored(name), tmp_path / "out", config)
    whole = run(build(name), None, config)
    assert set(streamed.weights) == set(whole.weights)
    for key, weight in whole.weights.items():
        for part in ("codes", "scale", "zero", "group_index"):
            assert torch.equal(getattr(streamed.weights[key], part), getattr(weight, part))
    assert streamed.report.block_weights == whole.report.block_weights
    loaded, _ = gptqkit.load(tmp_path / "out", backend="torch")  # nothing is missing, nothing is left over
    assert loaded.config.num_hidden_layers == 2


@pytest.mark.parametrize(("change", "activations"), STOPPED)
def test_a_job_stopped_anywhere_ends_in_the_same_files(change, activations, stored, tmp_path):
    config = settings(**change)
    model = stored("mistral", num_hidden_layers=3)
    run(model, tmp_path / "whole", config)
    expected = contents(tmp_path / "whole")
    count = len(run(model, None, config).report.modules)

    def stopping(after):
        def progress(step):
            if step.done == after:
                raise Stop

        return progress

    for after in range(2, count + 1, 7):
        out = tmp_path / f"out-{after}"
        with pytest.raises(Stop):
            run(model, out, config, progress=stopping(after), activations=activations)
        assert work_path(out).exists() == (after > 7)  # seven modules per block
        for later in (min(after + 4, count), count):
            try:
                run(model, out, config, progress=stopping(later), activations=activations, resume=True)
            except Stop:
                continue
        if not out.exists():
            result = run(model, out, config, activations=activations, resume=True)
            assert len(result.report.modules) == count
        assert contents(out) == expected
        assert not work_path(out).exists()


def test_it_also_goes_on_with_a_model_in_memory_and_left_out_samples(tmp_path):
    def broken():
        model = build("mistral")
        model.get_input_embeddings().weight.data[95] = torch.nan
        return model

    tokens = windows(samples=5).input_ids.clamp_(max=94)
    tokens[3, 2] = 95
    config = settings(skip_nonfinite=True)
    options = {"sequence_length": 24, "batch_size": 2}
    gptqkit.quantize(broken(), tokens, tmp_path / "whole", config, **options)

    def progress(step):
        if step.done == 9:
            raise Stop

    with pytest.raises(Stop):
        gptqkit.quantize(broken(), tokens, tmp_path / "out", config, progress=progress, **options)
    result = gptqkit.quantize(broken(), tokens, tmp_path / "out", config, resume=True, **options)
    assert result.report.excluded_samples == 1
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_something_else_is_not_resumed_and_what_differs_is_named(stored, tmp_path):
    def progress(step):
        if step.done == 8:
            raise Stop

    with pytest.raises(Stop):
        run(stored("mistral"), tmp_path / "out", settings(), progress=progress)
    kept = contents(work_path(tmp_path / "out"))
    with pytest.raises(OutputExistsError, match="unfinished job for out; resume it"):
        run(stored("mistral"), tmp_path / "out", settings())
    with pytest.raises(ResumeError, match=r"config.bits was 3, now 4"):
        run(stored("mistral"), tmp_path / "out", settings(bits=4), resume=True)
    other = build("mistral")
    other.model.layers[1].mlp.up_proj.weight.data[3, 3] += 1
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ResumeError, match=r"model\.model\.safetensors was"):
        run(tmp_path / "other", tmp_path / "out", settings(), resume=True)
    tokens = windows(samples=5).input_ids.clone()
    tokens[4, 23] = 1
    with pytest.raises(ResumeError, match=r"calibration\.tokens was"):
        gptqkit.quantize(
            stored("mistral"), tokens, tmp_path / "out", settings(), sequence_length=24, batch_size=2, resume=True
        )
    assert contents(work_path(tmp_path / "out")) == kept
    run(stored("mistral"), tmp_path / "out", settings(), resume=True)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_halves_the_batch_for_good(error, monkeypatch):
    receive = gptqkit.quantizer.stream.BlockStream.receive
    sizes = []

    def small(self, layer, batch, *arguments):
        if not batch["input_ids"].is_meta:  # what the plan traces takes no memory
            sizes.append(len(batch["input_ids"]))
            if sizes[-1] > 2:
                raise error
        return receive(self, layer, batch, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("gptqkit.quantizer.stream.BlockStream.receive", small)
        tokens = windows().input_ids
        result = gptqkit.quantize(build("llama"), tokens, None, settings(), sequence_length=24, batch_size=5)
    assert result.report.batch_size == 2
    assert sizes[:4] == [5, 2, 2, 2]
    assert max(sizes[1:]) == 2
    # The first block sees each sample once whatever the batches are.
    by_two = gptqkit.quantize(build("llama"), tokens, None, settings(), sequence_length=24, batch_size=2)
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(result.weights[name].codes, by_two.weights[name].codes)


def test_out_of_memory_with_one_sample_is_said_and_what_is_finished_stays(stored, tmp_path, monkeypatch):
    run_block = gptqkit.quantizer.stream.BlockStream.run

    def small(self, layer, *arguments):
        if layer:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return run_block(self, layer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr("gptqkit.quantizer.stream.BlockStream.run", small)
        with pytest.raises(DoesNotFitError, match="Tried to allocate 2 GiB"):
            run(stored("mistral"), tmp_path / "out", settings())
    assert len(run(stored("mistral"), tmp_path / "out", settings(), resume=True).report.modules) == 14


def test_the_checkpoint_is_cut_into_files_of_the_size_asked_for(stored, tmp_path):
    run(stored("qwen2"), tmp_path / "one", settings())
    run(stored("qwen2"), tmp_path / "many", settings(), max_shard_bytes=10000)
    names = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == names
    one, many = (gptqkit.load(tmp_path / name, backend="torch")[0] for name in ("one", "many"))
    for (name, first), second in zip(one.state_dict().items(), many.state_dict().values(), strict=True):
        assert torch.equal(first, second), name


def test_a_cut_off_shard_of_the_model_is_named_and_nothing_is_lost(tmp_path):
    model = tmp_path / "model"
    build("mistral", num_hidden_layers=3).save_pretrained(model, max_shard_size="40KB")
    last = sorted(model.glob("*.safetensors"))[-1]
    whole = last.read_bytes()
    run(model, tmp_path / "whole", settings())

    def progress(step):
        if step.done == 8:  # while the job runs
            last.write_bytes(whole[: len(whole) // 2])

    with pytest.raises(CheckpointError, match=f"{last.name} is damaged, cut off"):
        run(model, tmp_path / "out", settings(), progress=progress)
    with pytest.raises(CheckpointError, match=f"{last.name} is damaged or cut off"):
        run(model, tmp_path / "out", settings(), resume=True)
    last.write_bytes(whole)
    run(model, tmp_path / "out", settings(), resume=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("left", [["lock"], ["lock", "job.json", "shards.json"], ["rank-0"]])
def test_what_a_kill_at_the_very_end_leaves_is_deleted_on_resuming(stored, tmp_path, left):
    out = tmp_path / "out"
    run(stored("mistral"), out, settings())
    folder = work_path(out)
    folder.mkdir()
    for name in left:
        (folder / name).write_text("{}")
    with pytest.raises(OutputExistsError, match="exists already"):
        run(stored("mistral"), out, settings(), resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("left", [[], ["job.json", "shards.json"]])
def test_what_a_living_process_is_about_to_delete_is_left_to_it(tmp_path, left):
    work = WorkDirectory(tmp_path / "out", {})
    (work.path / "job.json").unlink()
    for name in left:
        (work.path / name).write_text("{}")
    with pytest.raises(ResumeError, match="another process is at work"):
        WorkDirectory(tmp_path / "out", {}, resume=True)
    assert {path.name for path in work.path.iterdir()} == {"lock", *left}
    work.discard()


def command(model, out):
    script = (
        "import sys, gptqkit; sys.path.insert(0, sys.argv[1]); from test_resume import run, settings; "
        "run(sys.argv[2], sys.argv[3], settings(method='gptaq'), resume=True, activations='disk', "
        "max_shard_bytes=60000)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    arguments = [sys.executable, "-c", script, str(Path(__file__).parent), str(model), str(out)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_a_disk_that_runs_full_loses_nothing(stored, tmp_path):
    """Files beyond a size cannot be written, which hits the joining of all parts into one file."""
    resource = pytest.importorskip("resource")
    run(stored("mistral"), tmp_path / "whole", settings())
    expected = contents(tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(expected["model.safetensors"]) - 1, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run(stored("mistral"), tmp_path / "out", settings())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "out").exists()
    worked = []
    run(stored("mistral"), tmp_path / "out", settings(), resume=True, progress=worked.append)
    assert not worked  # every block had been kept
    assert contents(tmp_path / "out") == expected


def wait_until_at_work(process, out):
    """A process spends seconds on imports before it holds the work directory; then the killing begins."""
    lock = str(work_path(out) / "lock")
    while process.poll() is None:
        with suppress(OSError):
            if any(os.readlink(file) == lock for file in Path(f"/proc/{process.pid}/fd").iterdir()):
                return
        time.sleep(0.002)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see which files a process has opened")
def test_killed_at_random_moments_it_ends_in_the_same_files(stored, tmp_path):
    model = stored("mistral", num_hidden_layers=6)
    whole = command(model, tmp_path / "whole")
    wait_until_at_work(whole, tmp_path / "whole")
    began = time.perf_counter()
    assert whole.wait() == 0
    seconds = time.perf_counter() - began
    expected = contents(tmp_path / "whole")
    chance = random.Random(5)
    killed = jobs = 0
    while killed < 3:
        out = tmp_path / f"out-{jobs}"
        jobs += 1
        while not out.exists():
            process = command(model, out)
            if killed < 3:
                wait_until_at_work(process, out)
                time.sleep(chance.uniform(0.1, 0.6) * seconds)
                process.send_signal(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        if work_path(out).exists():  # killed in its very last steps: the next start cleans up
            command(model, out).wait()
        assert contents(out) == expected
    assert len(list(tmp_path.iterdir())) == jobs + 1  # no work directories
