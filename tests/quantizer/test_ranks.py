"""Several processes: sums, shares, and the death of one. What the processes do is in support.rank_jobs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptqkit.errors import RankError
from gptqkit.quantizer.heartbeat import Patience
from gptqkit.quantizer.ranks import Ranks, share_of
from support import rank_jobs

PROGRAM = Path(rank_jobs.__file__)


@pytest.fixture(scope="module")
def folders(root, tmp_path_factory):
    """The folder that `support.rank_jobs` wrote its jobs into, and that of its work as two ranks under torchrun."""
    paths = [str(root / "src"), str(root / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    folders = [tmp_path_factory.mktemp(name) for name in ("jobs", "torchrun")]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    running = [
        subprocess.Popen([sys.executable, *start, PROGRAM, folder, *role], env=environment, stderr=subprocess.PIPE)
        for start, folder, role in (([], folders[0], []), (launcher, folders[1], ["work"]))
    ]
    for process in running:
        complaint = process.communicate(timeout=300)[1]
        assert process.returncode == 0, complaint.decode()
    return folders


@pytest.fixture(scope="module")
def jobs(folders):
    """Outcomes of all jobs: lists of ranks, each with code, seconds and stderr."""
    outcomes = json.loads((folders[0] / "outcomes.json").read_text())
    return SimpleNamespace(**{name: [SimpleNamespace(**rank) for rank in of_job] for name, of_job in outcomes.items()})


@pytest.fixture(scope="module")
def worked(folders, jobs):
    """What every rank found: of 3 processes, and of 2 under torchrun."""
    assert [rank.code for rank in jobs.work] == [0, 0, 0], jobs.work
    files = {3: folders[0] / "work", 2: folders[1]}
    return {
        size: [torch.load(path / f"rank{rank}.pt", weights_only=False) for rank in range(size)]
        for size, path in files.items()
    }


@pytest.fixture(scope="module")
def single():
    return rank_jobs.everything(Ranks.alone())


def same(one, other):
    """Whether nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hold_the_same_bits(worked, size):
    assert [rank["size"] for rank in worked[size]] == [size] * size
    assert worked[size][0]["gathered"] == list(range(size))
    for rank in worked[size][1:]:
        assert same(rank, worked[size][0])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", rank_jobs.KINDS)
def test_sums_over_ranks_equal_one_product_in_double_precision(worked, size, kind):
    tokens, hessian, cross = worked[size][0]["statistics"][kind]
    x, x_float = (stream.flatten(0, 1).double() for stream in rank_jobs.inputs(kind))
    assert tokens == len(x)
    exact, exact_cross = x.T @ x / len(x), (x_float - x).T @ x / len(x)
    if kind == "integer":
        assert torch.equal(hessian, exact.float())
        assert torch.equal(cross, exact_cross.float())
    else:
        assert float((hessian - exact).norm() / exact.norm()) < 3e-7
        assert float((cross - exact_cross).norm() / exact_cross.norm()) < 1e-6


@pytest.mark.parametrize("size", [2, 3])
def test_double_precision_sums_do_not_depend_on_the_number_of_ranks(worked, single, size):
    assert same(worked[size][0]["statistics"]["real"], single["statistics"]["real"])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", rank_jobs.SOLVERS)
@pytest.mark.parametrize("stage", rank_jobs.STAGES)
def test_modules_solved_together_equal_those_of_one_process(worked, single, size, stage, method):
    """With equal statistics: whole modules ("many") bit for bit, cut ones ("one") but for the order of the sums."""
    shared, alone = worked[size][0]["solved"][f"{stage} {method}"], single["solved"][f"{stage} {method}"]
    assert [module["solution"]["weight"]["codes"].shape for module in shared] == rank_jobs.STAGES[stage]
    for ours, theirs in zip(shared, alone, strict=True):
        assert same(ours["solution"]["weight"], theirs["solution"]["weight"])
        assert ours["sums"] == pytest.approx(theirs["sums"], rel=1e-6)
        if method != "rtn":
            assert ours["solution"]["loss"] == pytest.approx(theirs["solution"]["loss"], rel=1e-6)
        for fact in ("damp", "damp_escalations", "dead_columns"):
            assert ours["solution"][fact] == theirs["solution"][fact]
    if stage == "many":
        assert same(shared, alone)


def test_a_process_group_that_exists_is_used_twice_and_left_alone(jobs):
    assert [(rank.code, rank.stderr) for rank in jobs.inside_a_group] == [(0, "")] * 2


def test_a_killed_rank_stops_the_others(jobs):
    """One waits in a collective, one does something that cannot be interrupted."""
    waiting, killed, busy = jobs.killed
    assert killed.code == -9
    assert (waiting.code, busy.code) == (1, 1)
    for rank in (waiting, busy):
        assert rank.stderr.startswith("gptqkit: error: rank 1 of 3 died")
        assert rank.stderr.count("\n") == 1
        assert "resume" in rank.stderr


def test_the_death_of_rank_0_stops_the_others(jobs):
    """The store of the job dies with it; torch complains first."""
    assert [rank.code for rank in jobs.killed_first] == [-9, 1]
    assert jobs.killed_first[1].stderr.splitlines()[-1].startswith("gptqkit: error: rank 0, or the launcher")


def test_a_rank_that_fails_stops_the_others_and_says_why(jobs):
    waiting, failed, busy = jobs.failed
    assert "ValueError: a matrix that\ncannot be solved" in failed.stderr
    assert (waiting.code, failed.code, busy.code) == (1, 2, 1)
    for rank in (waiting, busy):
        expected = "gptqkit: error: rank 1 of 3 failed (ValueError: a matrix that cannot be solved); all ranks stop."
        assert rank.stderr.startswith(expected)


def test_a_rank_without_signs_of_life_stops_the_others(jobs):
    blocked, frozen = jobs.frozen
    assert frozen.code is None
    assert blocked.code == 1
    assert "rank 1 of 2 has shown no sign of life for 5 seconds" in blocked.stderr


def test_death_is_noticed_within_a_minute():
    patience = Patience()
    assert patience.silence + patience.grace + 2 * patience.beat < 60


def test_ranks_may_wait_longer_than_the_silence(jobs):
    assert [(rank.code, rank.stderr) for rank in jobs.patient] == [(0, "")] * 2


def test_ranks_that_do_not_come(jobs):
    assert "rank 0 of 2 got no contact with the others" in jobs.absent[0].stderr
    assert "rank 1 of 2 did not join within 3 seconds" in jobs.absent_from_a_group[0].stderr


def test_work_that_fails_on_some_ranks_fails_on_all(jobs):
    assert [rank.code for rank in jobs.abandoned] == [1, 1, 1]
    assert jobs.abandoned[1].stderr == "gptqkit: error: no file on rank 1\n"
    for rank in (0, 2):
        assert "rank 1 of 3 failed (RankError: no file on rank 1)" in jobs.abandoned[rank].stderr


def test_sigterm_is_an_error_like_others(jobs):
    terminated, other = jobs.terminated
    assert "stopped by SIGTERM" in terminated.stderr
    assert other.stderr.startswith("gptqkit: error: rank 0 of 2 failed (RankError: stopped by SIGTERM")
    assert (terminated.code, other.code) == (1, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 32, 33, 128])
@pytest.mark.parametrize("step", [1, 4, 32])
def test_shares_are_a_balanced_partition_that_keeps_batches_whole(size, count, step):
    shares = [share_of(rank, size, count, step) for rank in range(size)]
    assert [index for share in shares for index in share] == list(range(count))
    assert all(share.start % step == 0 for share in shares if share)
    units = [-(-len(share) // step) for share in shares]
    assert max(units) - min(units) <= 1


def test_one_process_needs_no_distributed_torch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with Ranks.join("cpu") as ranks:
        assert (ranks.rank, ranks.size, ranks.gather("x")) == (0, 1, ["x"])
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with Ranks.join("cpu") as ranks:
        assert ranks.size == 1
        ranks.barrier()


def test_a_launcher_that_does_not_say_where_to_meet(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match=r"rank 0 of 2 got no contact.*MASTER_ADDR.*torchrun"), Ranks.join("cpu"):
        pass


def test_every_rank_takes_its_own_gpu(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with Ranks.join("cuda") as ranks:
        assert ranks.device == torch.device("cuda", 1)
    assert chosen == [1]
    with pytest.raises(RankError, match="each takes its own GPU; give 'cuda'"), Ranks.join("cuda:0"):
        pass
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RankError, match="local rank 1 of a machine with 1 GPUs"), Ranks.join("cuda"):
        pass
