"""Shows that llama.cpp decodes and runs the GGUF files that we write: a table, and 1 if it is not so.

    python tests/clients/compare_gguf.py --work FOLDER

Weights must be equal in every bit. llama.cpp rounds activations to 8 bits, so perplexities agree to PERPLEXITY_BOUND
only; the control, a file whose queries and keys are rotated as transformers does it, must not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from agreement import logits, of_tokens, perplexity
from compare import GOOD, MODEL, WINDOWS, execute, python_of, table, versions, write_one, write_tokens
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

import gptqkit

PERPLEXITY_BOUND = 5e-3
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q3_K_M", "Q2_K")
CONVERTED = {"from-w3-g64-asym": "--bits 3 --group-size 64 --asym --format gptq_v2"}
STEMS = {"attn_output": "self_attn.o_proj"}
STEMS |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
STEMS |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
HEADS = {"attn_q": 4, "attn_k": 2}
CONTROL = "control: rows of queries and keys in halves"
TEXT = "Hello world, it's 1234!\n\n  x"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, answers and logs")
    work = parser.parse_args().work
    calibration = write_tokens(Path("examples/data/calibration.txt"), 8, work / "calibration.safetensors")
    tokens = write_tokens(Path("examples/data/heldout.txt"), WINDOWS, work / "tokens.safetensors")
    folders = {kind: write_one(work, calibration, MODEL, f"gguf-{kind}", f"--type {kind}") for kind in TYPES}
    for name, flags in CONVERTED.items():
        source = write_one(work, calibration, MODEL, f"gguf-{name}", flags)
        folders[name] = work / f"gguf-{name}"
        gptqkit.convert(source, folders[name], format="gguf", overwrite=True)
    with patch("gptqkit.export.gguf.in_pairs", lambda rows, _: rows), patch("gptqkit.export.gguf._check"):
        gptqkit.convert(source, work / "gguf-control", format="gguf", overwrite=True)
    files = [f"{name}={folder}/model.gguf" for name, folder in {**folders, "control": work / "gguf-control"}.items()]
    answers, client = work / "answers" / "llama", "tests/clients/llama_client.py"
    command = [python_of("llama"), client, *files, "--tokens", str(tokens), "--out", str(answers)]
    execute(command, {}, work / "logs" / "llama.log")
    rows = []
    for name, folder in folders.items():
        answer = load_file(answers / f"{name}.safetensors")
        rows.append(("llama.cpp", f"ours, {name}", "yes", *judge(folder, answer, load_file(tokens)["input_ids"])))
    answer = load_file(answers / "control.safetensors")
    text, verdict = judge(folders[name], answer, load_file(tokens)["input_ids"])
    rows.append(("llama.cpp", CONTROL, "yes", text, "NOT TOLD APART" if verdict == GOOD else GOOD))
    sys.stdout.write(versions("llama", ("llama-cpp-python", "gguf")) + "\n\n")
    sys.stdout.write(table(("client", "checkpoint", "loads", "agreement", "verdict"), rows))
    wrong = sum(row[-1] != GOOD for row in rows)
    sys.stdout.write(f"\n{len(rows)} rows, {wrong} wrong\n")
    return 1 if wrong else 0


def judge(folder: Path, answer: dict[str, Tensor], input_ids: Tensor) -> tuple[str, str]:
    """What was found, and the verdict."""
    checkpoint = gptqkit.open_checkpoint(folder)
    equal = 0
    for key, weight in answer.items():
        parts = key.split(".")
        if "blk" in parts:
            block, stem = parts[2:4]
            ours = checkpoint.weight(f"model.layers.{block}.{STEMS[stem]}").dequantize()
            if stem in HEADS:  # row 2i of a head is i of its first half, row 2i + 1 of its second
                ours = ours.view(HEADS[stem], 2, -1, ours.shape[1]).transpose(1, 2).reshape(ours.shape)
            equal += torch.equal(ours, weight)
    ours = of_tokens(logits(folder, input_ids, torch.float32), input_ids)
    relative = abs(float(perplexity(answer["logprobs"]) / perplexity(ours)) - 1)
    same_tokens = answer["tokens"].tolist() == AutoTokenizer.from_pretrained(MODEL)(TEXT)["input_ids"]
    text = f"{equal} of {len(checkpoint.layers)} weights equal; perplexity {relative:.1e}"
    text += "" if same_tokens else "; other tokens"
    return text, GOOD if equal == len(
        checkpoint.layers
    ) and relative < PERPLEXITY_BOUND and same_tokens else "DISAGREES"


if __name__ == "__main__":
    raise SystemExit(main())
