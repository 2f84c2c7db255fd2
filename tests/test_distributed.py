"""Jobs of several processes write the files of one, go on with any number, and end with one clear error."""

import itertools
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import gptqkit
from gptqkit import assembly, job
from gptqkit.api import explained_memory
from gptqkit.calibration.samples import Samples
from gptqkit.distributed import Processes, join
from gptqkit.errors import AbandonedError, DoesNotFitError, GptqkitError, RankError
from gptqkit.job import work_path
from gptqkit.kernels.linear import QuantLinear
from gptqkit.model import FloatModel
from gptqkit.progress import silent
from gptqkit.sensitivity import sensitivities
from gptqkit.walking import FloatWalk
from support.jobs import CASES, before_blocks, contents, die, processes, quantize, too_little_memory
from support.models import build, samples
from support.pipeline import quantize as small

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def facts(models, case, out, name="facts", **changes):
    """Do a job; write down what this process learned, or the error that it ended with."""
    steps = []
    try:
        report = quantize(models, case, out, progress=lambda now: steps.append(now.done), **changes).report
        found = {"modules": [module.name for module in report.modules], "steps": len(steps)}
        found |= {"excluded": report.excluded_samples, "batch_size": report.batch_size}
    except GptqkitError as error:
        found = {"error": type(error).__name__, "message": str(error)}
    out.with_name(f"{name}.{os.environ['RANK']}.json").write_text(json.dumps(found))


def learned(folder, ranks, name="facts"):
    return [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in ranks]


def joined_twice(port):
    """Join as under torchrun, whose store outlives a process group; rank 0 comes late to the second one."""
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(port))
    for number in range(2):
        time.sleep(2 * number if os.environ["RANK"] == "0" else 0)
        with join(CPU) as joined:
            assert joined.gather(joined.rank) == [0, 1]


def test_a_script_may_do_several_jobs_under_torchrun(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for ended in processes(joined_twice, store.port, size=2, log=tmp_path / "log"):
        assert ended.code == 0, ended.text


def of_a_loaded_model(out):
    small(build("qwen2"), out, samples(4), method="gptq", run={"batch_size": 2})


def test_several_processes_quantize_a_loaded_model(tmp_path):
    for ended in processes(of_a_loaded_model, tmp_path / "out", size=2, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    of_a_loaded_model(tmp_path / "alone")
    assert contents(tmp_path / "out")["model.safetensors"] == contents(tmp_path / "alone")["model.safetensors"]


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("experts", 2),
        *(pytest.param(case, 2, marks=pytest.mark.slow) for case in CASES if case not in ("experts", "learned")),
        *(pytest.param(case, 3, marks=pytest.mark.slow) for case in CASES if case != "learned"),
    ],
)
def test_several_processes_write_the_files_of_one(job_models, undisturbed, case, size, tmp_path):
    """Of three, one has no samples: sums of two terms are equal in any order."""
    out, (report, expected) = tmp_path / "out", undisturbed(case)
    for ended in processes(facts, job_models, case, out, size=size, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    found, reports = contents(out), []
    for files in (found, expected := dict(expected)):  # errors are sums over rows, which the processes divide
        report_file = files.pop("quantization_report.json")
        reports.append(json.loads(report_file, parse_float=lambda digits: f"{float(digits):.12g}"))
    assert found == expected
    assert reports[0] == reports[1]
    assert not work_path(out).exists()
    everywhere = {"modules": [module.name for module in report.modules], "batch_size": report.batch_size}
    everywhere["excluded"] = report.excluded_samples
    first, *others = learned(tmp_path, range(size))
    assert first == {**everywhere, "steps": len(report.modules)}  # rank 0 reports progress
    assert others == [{**everywhere, "steps": 0}] * (size - 1)


def lost(models, ids, out):
    """Write down what every way of keeping every part loses."""
    config = gptqkit.QuantizeConfig(quality="fast", group_size=32, target_bits=4.0, skip_nonfinite=True)
    run = gptqkit.Run(device="cpu", batch_size=2)
    with join(CPU) as joined:
        walk = FloatWalk(FloatModel(models / "broken"), Samples(ids), joined, run, out)
        found, *_ = sensitivities(walk, config, silent)
    if joined.rank == 0:
        out.write_text(json.dumps({name: [each.loss for each in found[name]] for name in found}))


@pytest.mark.parametrize(
    ("count", "bad"), [*(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 2), (8, 5))), (3, 0)]
)
def test_losses_are_those_of_samples_that_count_whichever_process_has_them(job_models, count, bad, tmp_path):
    """The first process leaves out all of its samples, and the second perhaps one; or both have few."""
    ids = samples(count).input_ids.clamp_(max=94)
    some = ids.clone()
    some[:bad, 3] = 95
    lost(job_models, ids[bad:], tmp_path / "alone.json")
    for ended in processes(lost, job_models, some, tmp_path / "both.json", size=2, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    alone, both = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "both"))
    for name, expected in alone.items():
        assert max(expected) > 0
        assert both[name] == pytest.approx(expected, rel=1e-4), name


def built_wrongly(models, ids, out):
    """Do a job in which layers are built with other scales than those that were written."""
    plain = assembly.install

    def install(model, *given, **how):
        plain(model, *given, **how)
        for module in model.model.modules():
            if isinstance(module, QuantLinear):
                module.scale.mul_(2)

    pytest.MonkeyPatch().setattr(assembly, "install", install)
    facts(models, "padded", out, calibration=gptqkit.Calibration(ids, sequence_length=24))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_written_runs_on_a_sample_that_counts_whichever_process_has_one(job_models, rank, tmp_path):
    """The other process leaves out all of its samples, which are two."""
    ids = samples(4).input_ids.clamp_(max=94)
    ids[2 - 2 * rank : 4 - 2 * rank, 3] = 95
    for ended in processes(built_wrongly, job_models, ids, tmp_path / "out", size=2, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    found = learned(tmp_path, range(2))
    assert found[rank]["error"] == "CheckpointError"
    assert found[1 - rank]["error"] == "AbandonedError"
    assert all("block 0 computes something else" in each["message"] for each in found)


def cut_short(models, out, rank, layer, end):
    """Do a job of which one process ends in a block."""
    job.SAVE_SECONDS = 0

    def act(now, _):
        if (now, int(os.environ["RANK"])) == (layer, rank):
            end()

    before_blocks(pytest.MonkeyPatch(), act)
    facts(models, "gptaq", out, resume=True)


def fail():
    raise BaseException("something unheard of")  # any Exception of a model is explained


def test_a_process_that_dies_or_fails_ends_all_and_any_number_goes_on(job_models, undisturbed, tmp_path):
    out = tmp_path / "out"
    survivor, killed = processes(cut_short, job_models, out, 1, 1, die, size=2, log=tmp_path / "log")
    assert (survivor.code, killed.code) == (0, -9), survivor.text
    assert [path.name for path in sorted(work_path(out).glob("block-*.json"))] == ["block-00000.json"]
    first, failed, third = processes(cut_short, job_models, out, 1, 2, fail, size=3, log=tmp_path / "log")
    assert (first.code, failed.code, third.code) == (0, 1, 0)
    assert failed.text.endswith("BaseException: something unheard of\n")
    assert len(list(work_path(out).glob("block-*.json"))) == 2
    for found in learned(tmp_path, (0, 2)):
        assert found["error"] == "AbandonedError"
        assert re.search("another process.* failed.* resume the job, with any number of processes", found["message"])
    quantize(job_models, "gptaq", out, resume=True)
    assert contents(out) == undisturbed("gptaq")[1]
    assert not work_path(out).exists()


def misled(models, out):
    """Do jobs that are not the same in both processes, in a process group that is there and stays."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    facts(models, "gptq", out, "batch", batch_size=2 + rank)
    facts(models, "gptq", out.with_name(f"out-{rank}"), "folder")
    if rank:  # memory for a single sample
        before_blocks(pytest.MonkeyPatch(), too_little_memory(1))
    facts(models, "gptq", out, "memory")
    facts(models, "gptq", out, "there")
    dist.barrier()
    dist.destroy_process_group()


def test_processes_of_different_jobs_are_refused_and_all_follow_the_one_with_least_memory(job_models, tmp_path):
    for ended in processes(misled, job_models, tmp_path / "out", size=2, log=tmp_path / "log"):
        assert ended.code == 0, ended.text
    for name, speaker, kind, text in (
        ("batch", 0, "RankError", "different jobs: batch_size is 2 on rank 0, 3 on rank 1"),
        ("folder", 1, "RankError", "rank 1 does not see"),
        ("there", 0, "OutputExistsError", "exists already"),
    ):
        found = learned(tmp_path, (0, 1), name)
        assert found[speaker]["error"] == kind
        assert found[1 - speaker]["error"] == "AbandonedError"  # it leaves the complaint to the other
        assert all(text in each["message"] for each in found)
    assert [each["batch_size"] for each in learned(tmp_path, (0, 1), "memory")] == [1, 1]
    assert list(tmp_path.glob(".out*")) == []


@pytest.mark.slow
def test_the_command_under_torchrun_prints_once(job_models, root, tmp_path):
    save_file({"input_ids": samples(4).input_ids}, tmp_path / "tokens.safetensors")
    given = [str(job_models / "mistral"), str(tmp_path / "out"), "--calibration", str(tmp_path / "tokens.safetensors")]
    settings = ["--bits=3", "--group-size=32", "--asym", "--lm-head", "--sequence-length=24", "--batch-size=2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gptqkit"]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}

    def command():
        run = [*launcher, "quantize", *given, *settings]
        return subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120, check=False)

    done, refused = command(), command()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    assert done.stderr.count("quantize: lm_head, 22 of 22") == 1
    assert gptqkit.inspect(tmp_path / "out").bits == {3: 22}
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert len(re.findall("gptqkit: error: .* exists already", refused.stderr)) == 1


# One process, and what does not need the others


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_shares_are_a_balanced_partition_that_keeps_batches_whole(size):
    for count, step in itertools.product([0, 1, 5, 32, 33, 128], [1, 4, 32]):
        shares = [Processes(rank, size, CPU).share(count, step) for rank in range(size)]
        assert [index for share in shares for index in share] == list(range(count))
        assert all(share.start % step == 0 for share in shares if share)
        units = [-(-len(share) // step) for share in shares]
        assert max(units) - min(units) <= 1
        assert len(shares[0]) > 0 or count == 0  # rank 0 runs what was written


def test_memory_that_another_process_lacks_is_told_by_that_one():
    why = "rank 0 of 2 failed (RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory)"
    with pytest.raises(AbandonedError, match="rank 0 of 2"), explained_memory():
        raise AbandonedError(why)
    with pytest.raises(DoesNotFitError, match="out of memory"), explained_memory():
        raise RuntimeError("can't allocate memory")


def test_one_process_needs_no_group(monkeypatch):
    for launched in (False, True):
        if launched:
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", "1")
        with join(CPU) as alone:
            assert (alone.rank, alone.size, alone.gather("x"), alone.share(3)) == (0, 1, ["x"], range(3))
            assert not dist.is_initialized()


def test_a_launcher_that_does_not_say_where_to_meet_and_too_few_gpus(monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match=r"rank 1 got no contact.*MASTER_ADDR.*torchrun"), join(CPU):
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RankError, match="local rank 1 of a machine with 1 GPUs"), join(torch.device("cuda")):
        pass
