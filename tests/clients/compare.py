"""Shows that other programs load what we write, and that we load what they write: a table, and 1 if it is not so.

    python tests/clients/compare.py --work FOLDER [--text FILE] [--clients gptqmodel transformers vllm]

Run by the project's Python in the repository's root, after `tests/clients/environments`. Every checkpoint of ours is
written by the command line. What is compared:

- the weights that a client decodes equal ours in every bit (both rounded once to float16);
- logits with float32 activations agree to FLOAT32_BOUND: only the order of summation may differ;
- logits and log-probabilities of a client's own float16 arithmetic lie no further from our float32 ones than
  HALF_FACTOR times our own float16 arithmetic does; kernels in bfloat16 get eight times that (three bits fewer);
- perplexities agree to PERPLEXITY_BOUND.

A control compares two different checkpoints by the same rules, which must not agree.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from gptqkit.export.reader import open_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

import gptqkit

MODEL = "examples/models/gutenberg-llama-6m"
SAMPLES, LENGTH = 8, 256

# Logits reach 18, where neighbouring float32 numbers are 2e-6 apart; one code changed by one moves them by about 1e-2.
FLOAT32_BOUND = 1e-4
HALF_FACTOR = 2.0
BFLOAT16_FACTOR = 8 * HALF_FACTOR
PERPLEXITY_BOUND = 1e-3

OURS = {
    "w4-g128-sym-v1": "--bits 4 --group-size 128 --sym --format gptq",
    "w4-g128-sym-v2": "--bits 4 --group-size 128 --sym --format gptq_v2",
    "w4-g64-sym-v2": "--bits 4 --group-size 64 --sym --format gptq_v2",
    "w4-g32-sym-v1": "--bits 4 --group-size 32 --sym --format gptq",
    "w4-row-sym-v1": "--bits 4 --group-size -1 --sym --format gptq",
    "w4-g128-sym-skip-v1": "--bits 4 --group-size 128 --sym --format gptq --skip down_proj$",
    "w4-g64-sym-static-v1": "--bits 4 --group-size 64 --sym --format gptq --desc-act --static-groups",
    "w4-g64-sym-act-order-v1": "--bits 4 --group-size 64 --sym --format gptq --desc-act",
    "w4-g128-asym-v1": "--bits 4 --group-size 128 --asym --format gptq",
    "w4-g128-asym-v2": "--bits 4 --group-size 128 --asym --format gptq_v2",
    "w4-g64-asym-act-order-v2": "--bits 4 --group-size 64 --asym --format gptq_v2 --desc-act",
    "w8-g128-sym-v1": "--bits 8 --group-size 128 --sym --format gptq",
    "w8-g32-asym-v2": "--bits 8 --group-size 32 --asym --format gptq_v2",
    "w3-g128-sym-v1": "--bits 3 --group-size 128 --sym --format gptq",
    "w3-g64-asym-v2": "--bits 3 --group-size 64 --asym --format gptq_v2",
    "w2-g64-sym-v1": "--bits 2 --group-size 64 --sym --format gptq",
    "w2-g64-asym-v2": "--bits 2 --group-size 64 --asym --format gptq_v2",
}


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program that reads checkpoints.

    Attributes:
        environment: Its folder under .clients.
        script: Its script beside this one.
        variables: Environment variables that it needs.
        refusals: What it refuses and how: a regular expression for checkpoints, then one for its message.
    """

    environment: str
    script: str
    variables: Mapping[str, str]
    refusals: Mapping[str, str]


GPTQMODEL_VARIABLES = {
    "TORCHDYNAMO_DISABLE": "1",  # it would compile its dequantization: minutes of C++ for the same numbers
    "GPTQMODEL_CPU_WORKERS": "2",  # with OMP_NUM_THREADS=1 it counts too few for its own thread pool
}
CLIENTS = {
    "gptqmodel": Client(
        environment="gptqmodel",
        script="gptqmodel_client.py",
        variables=GPTQMODEL_VARIABLES,
        refusals={"-asym-.*v1": r"sym=False model with format=.*only supported if produced by gptqmodel"},
    ),
    "transformers": Client(
        environment="gptqmodel", script="transformers_client.py", variables=GPTQMODEL_VARIABLES, refusals={}
    ),
    "vllm": Client(
        environment="vllm",
        script="vllm_client.py",
        variables={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # another process would hide the messages
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
        refusals={
            "^w[23]-|-asym-": r"Unsupported quantization config: bits=\d, sym=",
            "-act-order-": r"desc_act=True\) is no longer supported",
            "^w8-": r"Marlin does not support weight_bits = uint8b128",  # on GPUs it serves 8 bits
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What we read from a checkpoint: weights rounded to float16, logits in float32 and in float16 arithmetic."""

    weights: dict[str, Tensor]
    logits: Tensor
    logits_float16: Tensor


@dataclass
class Agreement:
    """Differences found so far, as text, and whether all lie within their bounds."""

    findings: list[str] = field(default_factory=list)
    holds: bool = True

    def note(self, what: str, value: float, bound: float) -> None:
        within = value <= bound
        self.holds &= within
        self.findings.append(f"{what} {value:.1e}" + ("" if within else f" (more than {bound:.1e})"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, answers and logs")
    parser.add_argument("--text", type=Path, default=Path("examples/data/heldout.txt"))
    parser.add_argument("--calibration", type=Path, default=Path("examples/data/calibration.txt"))
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    arguments = parser.parse_args()
    work = arguments.work
    torch.manual_seed(0)
    calibration = write_tokens(arguments.calibration, work / "calibration.safetensors")
    tokens = write_tokens(arguments.text, work / "tokens.safetensors")
    input_ids = load_file(tokens)["input_ids"]

    ours = write_ours(work, calibration)
    theirs = write_theirs(work, calibration) if "gptqmodel" in arguments.clients else []
    rows = []
    readings = {}
    for name in arguments.clients:
        answers = run_client(name, ours, tokens, work)
        for path in ours:
            if path.name not in readings:
                readings[path.name] = read(path, input_ids)
            rows.append((name, f"ours {path.name}", *judge(name, path.name, answers, readings[path.name], input_ids)))
        if name == "gptqmodel":
            other = judge_control(answers, readings, input_ids)
            rows.append((name, "control: v2 asym against sym", *other))
    if theirs:
        answers = run_client("gptqmodel", theirs, tokens, work, folder="gptqmodel-own")
        for path in theirs:
            found = judge("gptqmodel", "", answers, read(path, input_ids), input_ids, answer=path.name)
            rows.append(("gptqkit", f"GPTQModel's {path.name}", *found))
    sys.stdout.write(table(("client", "checkpoint", "loads", "agreement", "verdict"), rows))
    wrong = [row for row in rows if row[-1] != "as it should be"]
    sys.stdout.write(f"\n{len(rows)} rows, {len(wrong)} wrong\n")
    return 1 if wrong else 0


def write_tokens(text: Path, target: Path) -> Path:
    """Windows of token ids from the start of a text file, as a safetensors file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    start = text.read_bytes()[: 16 * SAMPLES * LENGTH].decode(errors="ignore")
    ids = AutoTokenizer.from_pretrained(MODEL)(start, add_special_tokens=False, verbose=False)["input_ids"]
    windows = torch.tensor(ids[: SAMPLES * LENGTH]).view(SAMPLES, LENGTH)
    save_file({"input_ids": windows}, target)
    return target


def write_ours(work: Path, calibration: Path) -> list[Path]:
    """Our checkpoints, each written by the command line (again only where it is missing)."""
    paths = []
    for name, flags in OURS.items():
        path = work / "ours" / name
        if not path.exists():
            command = [sys.executable, "-m", "gptqkit", "quantize", MODEL, str(path), *flags.split()]
            command += ["--method", "gptq", "--calibration", str(calibration), "--samples", str(SAMPLES)]
            command += ["--sequence-length", str(LENGTH), "--seed", "0", "--device", "cpu"]
            execute(command, {}, work / "logs" / f"write-{name}.log")
        paths.append(path)
    return paths


def write_theirs(work: Path, calibration: Path) -> list[Path]:
    """The checkpoints that GPTQModel's solver writes from the same tokens."""
    folder = work / "gptqmodel"
    script = ["tests/clients/gptqmodel_write.py", MODEL, "--tokens", str(calibration), "--out", str(folder)]
    execute([python_of("gptqmodel"), *script], GPTQMODEL_VARIABLES, work / "logs" / "gptqmodel-write.log")
    return sorted(path for path in folder.iterdir() if path.is_dir())


def run_client(name: str, paths: list[Path], tokens: Path, work: Path, folder: str | None = None) -> Path:
    """The folder with the client's answers to all checkpoints."""
    client, folder = CLIENTS[name], folder or name
    answers = work / "answers" / folder
    answers.mkdir(parents=True, exist_ok=True)
    for old in answers.iterdir():
        old.unlink()
    command = [python_of(client.environment), f"tests/clients/{client.script}", *map(str, paths)]
    command += ["--tokens", str(tokens), "--out", str(answers)]
    execute(command, client.variables, work / "logs" / f"{folder}.log")
    return answers


def python_of(environment: str) -> str:
    return f".clients/{environment}/bin/python"


def execute(command: list[str], variables: Mapping[str, str], log: Path) -> None:
    """Run a command with its output in a log; where it fails, say so with the end of the log and stop."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"{log.stem}\n")
    with log.open("w") as file:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
        code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)} ended with {code}:\n{end}")


def read(path: Path, input_ids: Tensor) -> Reading:
    """Our own reading of a checkpoint."""
    checkpoint = open_checkpoint(path)
    weights = {name: checkpoint.quantized_weight(name).dequantize(torch.float16) for name in checkpoint.layers}
    return Reading(
        weights=weights,
        logits=logits(path, input_ids, torch.float32),
        logits_float16=logits(path, input_ids, torch.float16),
    )


def logits(path: Path, input_ids: Tensor, dtype: torch.dtype) -> Tensor:
    model, _ = gptqkit.load(path, device="cpu", backend="torch", dtype=dtype)
    with torch.inference_mode():
        return model(input_ids).logits.float()


def judge(
    client: str, name: str, answers: Path, reading: Reading, input_ids: Tensor, answer: str | None = None
) -> tuple[str, str, str]:
    """Whether the client loaded the checkpoint, what was found, and the verdict."""
    answer = answer or name
    expected = [message for which, message in CLIENTS[client].refusals.items() if re.search(which, name)]
    refusal = answers / f"{answer}.json"
    if refusal.exists():
        message = " ".join(json.loads(refusal.read_text())["refused"].split())
        known = any(re.search(pattern, message) for pattern in expected)
        return "refused", shortened(message), "as it should be" if known else "UNEXPECTED REFUSAL"
    agreement = compare(load_file(answers / f"{answer}.safetensors"), reading, input_ids)
    text = "; ".join(agreement.findings)
    if not agreement.holds:
        return "yes", text, "DISAGREES"
    return "yes", text, "as it should be" if not expected else "LOADS, THOUGH A REFUSAL WAS EXPECTED"


def judge_control(answers: Path, readings: Mapping[str, Reading], input_ids: Tensor) -> tuple[str, str, str]:
    """GPTQModel's answer to one checkpoint against our reading of another: the rules must tell them apart."""
    answer = load_file(answers / "w4-g128-asym-v2.safetensors")
    agreement = compare(answer, readings["w4-g128-sym-v2"], input_ids)
    return "yes", "; ".join(agreement.findings), "NOT TOLD APART" if agreement.holds else "as it should be"


def compare(answer: Mapping[str, Tensor], reading: Reading, input_ids: Tensor) -> Agreement:
    """How far a client's answer is from our reading."""
    agreement = Agreement()
    theirs = {key.removeprefix("weight."): value for key, value in answer.items() if key.startswith("weight.")}
    if theirs:
        same = sum(name in theirs and torch.equal(theirs[name], weight) for name, weight in reading.weights.items())
        agreement.holds &= same == len(reading.weights) == len(theirs)
        agreement.findings.append(f"{same} of {len(reading.weights)} weights equal")
    ours = of_tokens(reading.logits, input_ids)
    half = distance(reading.logits_float16, reading.logits)
    for key, factor in (("logits_float16", HALF_FACTOR), ("logits_default", BFLOAT16_FACTOR)):
        if key in answer:
            agreement.note(key.replace("_", " "), distance(answer[key], reading.logits), factor * half)
    if "logits" in answer:
        agreement.note("logits float32", distance(answer["logits"], reading.logits), FLOAT32_BOUND)
    if "logprobs" in answer:
        bound = HALF_FACTOR * distance(of_tokens(reading.logits_float16, input_ids), ours)
        agreement.note("logprobs float16", distance(answer["logprobs"], ours), bound)
    chosen = next(key for key in ("logprobs", "logits_default", "logits_float16") if key in answer)
    logprobs = answer[chosen] if chosen == "logprobs" else of_tokens(answer[chosen], input_ids)
    relative = (perplexity(logprobs) / perplexity(ours) - 1).abs().item()
    agreement.note(f"perplexity ({perplexity(ours):.3f})", relative, PERPLEXITY_BOUND)
    return agreement


def distance(left: Tensor, right: Tensor) -> float:
    return (left.float() - right.float()).abs().max().item()


def of_tokens(values: Tensor, input_ids: Tensor) -> Tensor:
    """The log-probability of every token after the first, (windows, length - 1), from the logits."""
    return values[:, :-1].float().log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


def perplexity(logprobs: Tensor) -> Tensor:
    return logprobs.double().mean().neg().exp()


def shortened(message: str) -> str:
    """The part of a message that says why, without pydantic's frame around it."""
    message = re.sub(r"^ValidationError: .*?Value error, ", "ValueError: ", message)
    return re.sub(r" \[type=value_error, .*", "", message)[:220]


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
