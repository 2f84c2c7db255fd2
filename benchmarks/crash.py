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

from gptqkit.job import work_path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SETTINGS = (
    ["--bits", "4", "--method", "gptq", "--activations", "disk"],
    ["--bits", "2", "--asym", "--learn-iterations", "5"],
    ["--bits", "3", "--method", "gptaq", "--asym"],
    ["--bits", "2", "--method", "gptq", "--desc-act", "--activations", "disk", "--no-true-sequential"],
    ["--bits", "8", "--method", "rtn", "--format", "gptq"],
)


class Run:
    """A process that makes the checkpoint `out`, or goes on with it."""

    def __init__(self, out: Path, settings: list[str]) -> None:
        model, text = EXAMPLES / "models/gutenberg-llama-6m", EXAMPLES / "data/calibration.txt"
        command = [sys.executable, "-m", "gptqkit", "quantize", str(model), str(out), "--calibration", str(text)]
        command += ["--samples", "16", "--sequence-length", "256", "--resume", *settings]
        self.out = out
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def wait_until_at_work(self) -> None:
        """Wait until the process holds the work directory: it spends seconds on imports before."""
        lock = str(work_path(self.out) / "lock")
        while self.process.poll() is None:
            with suppress(OSError):
                if any(os.readlink(file) == lock for file in Path(f"/proc/{self.process.pid}/fd").iterdir()):
                    return
            time.sleep(0.002)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the last line of messages."""
        messages = self.process.communicate()[1].strip().splitlines()
        return self.process.returncode, messages[-1] if messages else ""


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finished_blocks(out: Path) -> int:
    """Return how many blocks of an unfinished job are on disk for good."""
    return len(list(work_path(out).glob("block-*.json")))


def check(right: bool, complaint: str) -> None:
    """End the program where something is wrong."""
    if not right:
        raise SystemExit(complaint)


def undisturbed(out: Path, settings: list[str]) -> tuple[dict[str, bytes], float]:
    """Return the files that a job must end in, and the seconds from its first file to its last."""
    run = Run(out, settings)
    run.wait_until_at_work()
    began = time.perf_counter()
    code, message = run.end()
    check(code == 0, f"a job that nobody disturbed failed: {message}")
    return contents(out), time.perf_counter() - began


def kill_and_resume(folder: Path, kills: int, chance: random.Random) -> dict[str, Any]:
    """Kill jobs `kills` times in all, and compare what they end in."""
    whole = [undisturbed(folder / f"whole-{number}", settings) for number, settings in enumerate(SETTINGS)]
    found: Counter[int] = Counter()
    killed = jobs = 0
    while killed < kills:
        settings, (expected, seconds) = SETTINGS[jobs % len(SETTINGS)], whole[jobs % len(SETTINGS)]
        out = folder / f"job-{jobs}"
        while not out.exists():
            run = Run(out, settings)
            if killed < kills:
                run.wait_until_at_work()
                time.sleep(chance.uniform(0, 0.6 * seconds))
                run.process.send_signal(signal.SIGKILL)
            code, message = run.end()
            check(code in (0, -signal.SIGKILL), f"job {jobs} failed after {killed} kills: {message}")
            if code:
                killed += 1
                found[finished_blocks(out)] += 1
        if work_path(out).exists():  # killed between its last two steps: the next start cleans up
            Run(out, settings).end()
        check(contents(out) == expected, f"job {jobs} ended in other files than the undisturbed one")
        check(not work_path(out).exists(), f"job {jobs} left {work_path(out)}")
        jobs += 1
        print(f"{killed} kills, {jobs} jobs, all equal", flush=True)
        shutil.rmtree(out)
    return {"kills": killed, "jobs": jobs, "finished_blocks_when_killed": dict(sorted(found.items()))}


def full_disk(folder: Path) -> dict[str, Any] | None:
    """Let the disk run full under a job, make room, resume, and compare; None where no small disk can be mounted."""
    expected, _ = undisturbed(folder / "whole", SETTINGS[0])
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        return None
    out, ballast = disk / "out", disk / "ballast"
    try:
        run = Run(out, SETTINGS[0])
        while finished_blocks(out) < 2 and run.process.poll() is None:
            time.sleep(0.002)
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        code, message = run.end()
        kept = finished_blocks(out)
        check(code == 1 and not out.exists(), f"a full disk ended in status {code}: {message}")
        ballast.unlink()
        code, complaint = Run(out, SETTINGS[0]).end()
        check(code == 0 and contents(out) == expected, f"after a full disk, the job ended otherwise: {complaint}")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    return {"blocks_kept": kept, "message": message.replace(str(folder), "")}


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
