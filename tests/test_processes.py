"""Jobs of several processes, end to end. What each process does is in support.process_jobs."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import gptqkit
from gptqkit.export.work import work_path
from support import process_jobs
from support.models import windows
from support.process_jobs import CASES, MODELS


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read(folder, size, part):
    """What every rank wrote down."""
    return [json.loads((folder / str(size) / f"{part}-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def launched(root, tmp_path_factory):
    """Everything that needs processes, two launches at a time, and the same by one process."""
    folder = tmp_path_factory.mktemp("processes")
    known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in known}
    paths = [str(root / "src"), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def start(arguments, **more):
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def torchrun(size, *arguments):
        return start(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *arguments])

    def job(size, part):
        return [process_jobs.__file__, folder, size, part]

    def end(process):
        out, err = process.communicate(timeout=120)
        return SimpleNamespace(code=process.returncode, out=out, err=err)

    for name, make in MODELS.items():
        make().save_pretrained(folder / name)
    save_file({"input_ids": windows(samples=5).input_ids}, folder / "tokens.safetensors")
    options = "--bits 3 --group-size 32 --asym --lm-head --sequence-length 24 --batch-size 2 --device auto"
    calibration = ["--calibration", folder / "tokens.safetensors", *options.split()]
    command = ["quantize", folder / "mistral", folder / "command", *calibration]
    found = SimpleNamespace(folder=folder)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # No launcher that ends the others: as where another machine dies.
    two = [
        start(job(2, "killed"), RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]
    compared = torchrun(2, *job(2, "compare"))
    two[1].wait(timeout=120)
    began = time.monotonic()
    found.survivor, found.killed = end(two[0]), end(two[1])
    found.seconds = time.monotonic() - began
    found.kept_by_two = contents(work_path(folder / "resumed"))
    found.compared = {2: end(compared)}
    compared = torchrun(3, *job(3, "compare"))
    found.command = end(torchrun(2, "-m", "gptqkit", *command, "--evaluate-on", folder / "tokens.safetensors"))
    found.compared[3] = end(compared)
    found.kept_by_three = contents(work_path(folder / "resumed"))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for case in CASES:
        process_jobs.run(folder, case, folder / "1" / case)
    process_jobs.run(folder, "gptaq", folder / "resumed", resume=True)
    found.in_memory = process_jobs.run(folder, "in-memory", None).weights
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_checkpoint_is_that_of_one_process_to_the_byte(launched, size, case):
    assert launched.compared[size].code == (0 if size == 2 else 1), launched.compared[size].err
    found = contents(launched.folder / str(size) / case)
    expected = contents(launched.folder / "1" / case)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert not work_path(launched.folder / str(size) / case).exists()


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_result_and_rank_0_shows_progress(launched, size):
    first, *others = read(launched.folder, size, "compare")
    assert first["kept"]["left-out"][2] == 1
    for case in CASES:
        assert first["steps"][case] == first["kept"][case][1]
        for other in others:
            assert other["kept"][case] == first["kept"][case]
            assert other["steps"][case] == 0
    for rank in range(size):
        codes = torch.load(launched.folder / str(size) / f"codes-{rank}.pt")
        assert codes.keys() == launched.in_memory.keys()
        assert all(torch.equal(codes[name], weight.codes) for name, weight in launched.in_memory.items())


@pytest.mark.parametrize("size", [2, 3])
def test_other_arguments_on_one_rank_are_refused_by_one_error(launched, size):
    ranks = read(launched.folder, size, "compare")
    expected = {
        "other batch size": (0, "RankError", "different jobs: batch_size is 2 on rank 0, 3 on rank 1"),
        "no checkpoint": (0, "RankError", "different jobs: checkpoint is True on rank 0, False on rank 1"),
        "other folder": (1, "RankError", "rank 1 does not see"),
        "there": (0, "OutputExistsError", "exists already"),
    }
    for what, (speaker, kind, text) in expected.items():
        for rank, facts in enumerate(ranks):
            assert facts[what][0] == (kind if rank == speaker else "AbandonedError")
            assert text in facts[what][1]
    assert not list((launched.folder / str(size)).glob(".no*"))


def test_all_report_the_batch_size_of_the_rank_with_least_memory(launched):
    for size in (2, 3):
        assert [rank["batch size"] for rank in read(launched.folder, size, "compare")] == [1] * size


def test_a_killed_rank_stops_the_other_within_a_minute_and_what_is_finished_stays(launched):
    assert launched.killed.code == -signal.SIGKILL
    assert launched.survivor.code == 0, launched.survivor.err
    kind, text = json.loads((launched.folder / "2" / "killed-0.json").read_text())
    assert kind == "RankError"
    assert "rank 1 of 2 died" in text
    assert "resume the job, with any number of ranks" in text
    assert launched.seconds < 30
    assert "block-00000.json" in launched.kept_by_two
    assert "block-00001.json" not in launched.kept_by_two


def test_a_job_of_two_goes_on_as_three_and_ends_as_one_in_the_same_files(launched):
    assert "rank      : 2 (local_rank: 2)\n  exitcode  : -9" in launched.compared[3].err
    assert "block-00001.json" in launched.kept_by_three
    assert "block-00002.json" not in launched.kept_by_three
    assert contents(launched.folder / "resumed") == contents(launched.folder / "1" / "gptaq")
    assert not work_path(launched.folder / "resumed").exists()


def test_the_command_writes_and_prints_once(launched):
    assert launched.command.code == 0, launched.command.err
    assert launched.command.out.count("written to") == launched.command.out.count("perplexity on") == 1
    assert launched.command.err.count("quantize: lm_head, 22 of 22") == 1
    assert gptqkit.inspect(launched.folder / "command").bits == {3: 22}


def test_the_command_says_once_what_it_cannot_do(launched):
    for size in (2, 3):
        first, *others = [rank["command"] for rank in read(launched.folder, size, "compare")]
        assert first[:2] == [1, ""]
        assert re.fullmatch(r"gptqkit: error: .* exists already; .*\n", first[2])
        assert others == [[1, "", ""]] * (size - 1)
