"""Jobs that are killed at random moments, and on a full disk, compared byte for byte with one that was left alone.

    python benchmarks/crash.py [--kills N] [--seed N] [--json FILE]

Each job is a process of its own that quantizes the example model with `--resume`. It gets SIGKILL after a random time;
what is left is resumed until the checkpoint appears, which must equal the undisturbed one in every file; then the next
job begins, with other settings. The disk that something else fills while a job runs is a tmpfs (as root; left out
elsewhere).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptqkit.export.work import work_path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SETTINGS = (
    ["--bits", "4", "--method", "gptq", "--activations", "disk"],
    ["--bits", "3", "--method", "gptaq", "--asym"],
    ["--bits", "2", "--method", "gptq", "--desc-act", "--activations", "disk", "--no-true-sequential"],
    ["--bits", "8", "--method", "rtn", "--format", "gptq"],
)


def start(out: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    """A process that makes the checkpoint `out`, or goes on with it."""
    model, text = EXAMPLES / "models/gutenberg-llama-6m", EXAMPLES / "data/calibration.txt"
    command = [sys.executable, "-m", "gptqkit", "quantize", str(model), str(out), "--calibration", str(text)]
    command += ["--samples", "16", "--sequence-length", "256", "--resume", *settings]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wait_until_at_work(process: subprocess.Popen[bytes], out: Path) -> None:
    """Wait until a process holds the work directory of `out`: it spends seconds on imports before."""
    lock = str(work_path(out) / "lock")
    while process.poll() is None:
        with suppress(OSError):
            if any(os.readlink(file) == lock for file in Path(f"/proc/{process.pid}/fd").iterdir()):
                return
        time.sleep(0.002)


def finished_parts(out: Path) -> int:
    """How many parts of an unfinished job are on disk for good."""
    return len(list(work_path(out).glob("block-*.json"))) + (work_path(out) / "outside.json").exists()


def undisturbed(folder: Path) -> tuple[list[dict[str, bytes]], list[float]]:
    """The files that each job must end in, and the seconds from its first file to its last."""
    expected, seconds = [], []
    for number, settings in enumerate(SETTINGS):
        out = folder / f"whole-{number}"
        process = start(out, settings)
        wait_until_at_work(process, out)
        began = time.perf_counter()
        if process.wait():
            raise SystemExit(f"a job that nobody disturbed failed: {process.stderr and process.stderr.read()!r}")
        seconds.append(time.perf_counter() - began)
        expected.append(contents(out))
    return expected, seconds


def kill_and_resume(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kill jobs `kills` times in all, and compare what they end in."""
    expected, seconds = undisturbed(folder)
    found: Counter[int] = Counter()
    killed = jobs = 0
    while killed < kills:
        number = jobs % len(SETTINGS)
        out = folder / f"job-{jobs}"
        while not out.exists():
            process = start(out, SETTINGS[number])
            if killed < kills:
                wait_until_at_work(process, out)
                time.sleep(chance.uniform(0, 0.6 * seconds[number]))
                process.send_signal(signal.SIGKILL)
            status = process.wait()
            if status == -signal.SIGKILL:
                killed += 1
                found[finished_parts(out)] += 1
            elif status:
                raise SystemExit(
                    f"job {jobs} failed after {killed} kills: {process.stderr and process.stderr.read()!r}"
                )
        work = work_path(out)
        if work.exists():  # killed between its last two steps: the next start cleans up
            start(out, SETTINGS[number]).wait()
        if contents(out) != expected[number]:
            raise SystemExit(f"job {jobs} ended in other files than the undisturbed one")
        if work.exists():
            raise SystemExit(f"job {jobs} left {work}")
        jobs += 1
        print(f"{killed} kills, {jobs} jobs, all equal", flush=True)
        shutil.rmtree(out)
    return {"kills": killed, "jobs": jobs, "finished_parts_when_killed": dict(sorted(found.items()))}


def full_disk(folder: Path) -> dict[str, Any] | None:
    """Let the disk run full under a job, make room, resume, and compare."""
    whole, disk = folder / "whole", folder / "disk"
    if start(whole, SETTINGS[0]).wait():
        raise SystemExit("a job that nobody disturbed failed")
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        return None
    ballast = disk / "ballast"
    try:
        process = start(disk / "out", SETTINGS[0])
        while finished_parts(disk / "out") < 2 and process.poll() is None:
            time.sleep(0.002)
        with suppress(OSError), ballast.open("wb", buffering=0) as file:  # what a plan cannot foresee
            while True:
                file.write(bytes(4096))
        text = process.communicate()[1].decode()
        parts = finished_parts(disk / "out")
        if process.returncode != 1 or (disk / "out").exists():
            raise SystemExit(f"a full disk ended in status {process.returncode}: {text}")
        ballast.unlink()
        if start(disk / "out", SETTINGS[0]).wait() or contents(disk / "out") != contents(whole):
            raise SystemExit("after a full disk, the job ended in other files")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    return {"parts_kept": parts, "message": text.strip().splitlines()[-1].replace(str(folder), "")}


def main() -> None:
    """Run everything and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("crash.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {"seed": arguments.seed, "full_disk": full_disk(Path(folder))}
        print("full disk:", results["full_disk"], flush=True)
        results |= kill_and_resume(Path(folder), arguments.kills, random.Random(arguments.seed))
    arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
