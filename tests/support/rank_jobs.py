"""What the ranks of the tests do, and a program that runs jobs of several ranks after importing torch only once.

As a program: `rank_jobs.py FOLDER` runs every job of JOBS and writes FOLDER/outcomes.json: per job and rank the exit
status, the seconds it took and what went to stderr. `rank_jobs.py FOLDER work` is one rank, started by a launcher.
"""

import dataclasses
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from gptqkit.calibration.hessian import InputStatistics
from gptqkit.errors import RankError
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.heartbeat import Patience
from gptqkit.quantizer.ranks import Ranks
from gptqkit.quantizer.sharing import Solved, solve_shared
from gptqkit.quantizer.solver import output_power, solve_gptaq, solve_gptq, solve_rtn

BATCH = 4
SAMPLES = 22
LENGTH = 40
COLUMNS = 96
STAGES = {"one": [(100, COLUMNS)], "many": [(64, COLUMNS), (33, COLUMNS), (96, COLUMNS), (64, COLUMNS)]}
SOLVERS = {
    "rtn": QuantizeConfig(bits=3, group_size=16, sym=False, method="rtn", mse=True),
    "gptq": QuantizeConfig(bits=4, group_size=32, desc_act=True),
    "gptaq": QuantizeConfig(bits=2, group_size=None, sym=False, method="gptaq", float64=True),
}
KINDS = ("integer", "real", "few")


def inputs(kind):
    """x and x~, (samples, length, columns): small integers, or real numbers; in "few" less than one batch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, COLUMNS, generator=generator)
    x_float = x + 0.2 * torch.randn(SAMPLES, LENGTH, COLUMNS, generator=generator)
    if kind == "integer":
        return (4 * x).round(), (4 * x_float).round()
    return (x[:3], x_float[:3]) if kind == "few" else (x, x_float)


def summed(ranks, kind):
    """The statistics of one kind of inputs, this rank's share of the samples taken in batches, summed over ranks."""
    x, x_float = inputs(kind)
    statistics = InputStatistics(COLUMNS, ranks.device, cross=True)
    share = ranks.share(len(x), BATCH)
    for start in range(share.start, share.stop, BATCH):
        batch = slice(start, min(start + BATCH, share.stop))
        statistics.update(x[batch].flatten(0, 1), x_float[batch].flatten(0, 1))
    untouched = InputStatistics(8, ranks.device)
    ranks.add_up(statistics, untouched)
    assert untouched.tokens == 0
    return statistics


def solved(ranks, statistics, stage, method):
    """Every module of a stage, solved by all ranks together; `sums` are powers of the errors."""
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(shape, generator=generator) for shape in STAGES[stage]]
    hessian, cross = statistics.hessian(), statistics.cross()
    config = SOLVERS[method]

    def solve(module, rows):
        weight = weights[module][rows]
        if method == "rtn":
            solution = solve_rtn(weight, config, hessian)
        elif method == "gptq":
            solution = solve_gptq(weight, hessian, config)
        else:
            solution = solve_gptaq(weight, hessian, cross, config)
        powers = (output_power(weight, hessian), output_power(weight - solution.weight.dequantize(), hessian))
        return Solved(solution=solution, sums=powers)

    return list(solve_shared(ranks, STAGES[stage], solve))


def everything(ranks):
    """All that is to be the same for any number of ranks, in plain values and tensors."""
    statistics = {kind: summed(ranks, kind) for kind in KINDS}
    results = {
        f"{stage} {method}": [dataclasses.asdict(one) for one in solved(ranks, statistics["integer"], stage, method)]
        for stage in STAGES
        for method in SOLVERS
    }
    return {
        "statistics": {kind: (one.tokens, one.hessian(), one.cross()) for kind, one in statistics.items()},
        "solved": results,
        "gathered": ranks.gather(ranks.rank),
        "size": ranks.size,
    }


def work(folder):
    with Ranks.join("cpu") as ranks:
        torch.save(everything(ranks), folder / f"rank{ranks.rank}.pt")


def inside_a_group(_):
    """Twice, in a process group that exists and stays."""
    dist.init_process_group("gloo")
    for _ in range(2):
        with Ranks.join("cpu") as ranks:
            assert ranks.gather(ranks.rank) == list(range(ranks.size))
    dist.barrier()
    dist.destroy_process_group()


IMPATIENT = Patience(beat=0.2, silence=5.0, grace=0.5, joining=60.0)
HASTY = dataclasses.replace(IMPATIENT, joining=3.0)


def killed(_):
    with Ranks.join("cpu", patience=IMPATIENT) as ranks:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if ranks.rank == 2:
            time.sleep(60)  # as in a long solve
        ranks.barrier()


def killed_first(_):
    """Rank 0 holds the store of the job."""
    with Ranks.join("cpu", patience=IMPATIENT) as ranks:
        if ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def failed(_):
    with Ranks.join("cpu", patience=IMPATIENT) as ranks:
        if ranks.rank == 1:
            raise ValueError("a matrix that\ncannot be solved")
        if ranks.rank == 2:
            time.sleep(60)
        ranks.barrier()


def frozen(_):
    """The last rank leaves its connections open and does nothing any more; rank 0 is blocked in C++."""
    with Ranks.join("cpu", patience=IMPATIENT) as ranks:
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        ranks.barrier()


def patient(_):
    """One rank is busy for longer than the silence, and nobody minds."""
    with Ranks.join("cpu", patience=IMPATIENT) as ranks:
        if ranks.rank == 1:
            time.sleep(6)
        ranks.barrier()


def absent(_):
    if os.environ["RANK"] == "1":
        return
    with Ranks.join("cpu", patience=HASTY):
        pass


def absent_from_a_group(_):
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        time.sleep(60)
    with Ranks.join("cpu", patience=HASTY):
        pass


def abandoned(_):
    """The last two ranks fail in work that is done together."""
    with Ranks.join("cpu", patience=IMPATIENT) as ranks:
        with ranks.together():
            pass
        with ranks.together():
            if ranks.rank:
                raise RankError(f"no file on rank {ranks.rank}")


def terminated(_):
    """As a launcher does it: one rank gets SIGTERM."""
    with Ranks.join("cpu", patience=IMPATIENT) as ranks:
        if ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        ranks.barrier()


JOBS = {
    "work": (work, 3),
    "inside_a_group": (inside_a_group, 2),
    "killed": (killed, 3),
    "killed_first": (killed_first, 2),
    "failed": (failed, 3),
    "frozen": (frozen, 2),
    "patient": (patient, 2),
    "absent": (absent, 2),
    "absent_from_a_group": (absent_from_a_group, 2),
    "abandoned": (abandoned, 3),
    "terminated": (terminated, 2),
}


def run_rank(job, folder):
    """Run one rank as the command line would: errors of gptqkit in one line, status 1."""
    try:
        job(folder)
    except RankError as error:
        sys.stderr.write(f"gptqkit: error: {error}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 2
    return 0


def start_rank(job, folder, rank, size, port):
    """Fork a process that is one rank; its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    file = os.open(folder / f"stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.exit(run_rank(job, folder))


def run_jobs(folder):
    """Run all jobs at the same time.

    Per job and rank: exit status (minus the signal where killed; None where it had to be ended), seconds, stderr.
    """
    outcomes = {name: [None] * size for name, (_, size) in JOBS.items()}
    running = {}
    began = time.monotonic()
    for name, (job, size) in JOBS.items():
        (folder / name).mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(size):
            running[start_rank(job, folder / name, rank, size, port)] = (name, rank)
    endless = {("frozen", 1), ("absent_from_a_group", 1)}
    while set(running.values()) - endless and time.monotonic() - began < 90:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            name, rank = running.pop(pid)
            seconds = time.monotonic() - began
            outcomes[name][rank] = {"code": os.waitstatus_to_exitcode(status), "seconds": seconds}
        else:
            time.sleep(0.02)
    for pid, (name, rank) in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        outcomes[name][rank] = {"code": None, "seconds": time.monotonic() - began}
    for name, ranks in outcomes.items():
        for rank, outcome in enumerate(ranks):
            outcome["stderr"] = (folder / name / f"stderr{rank}").read_text()
    return outcomes


def main(folder, *role):
    torch.set_num_threads(1)
    if role:
        return run_rank(work, folder)
    (folder / "outcomes.json").write_text(json.dumps(run_jobs(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
