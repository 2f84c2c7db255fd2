"""Shows that llama.cpp decodes and runs the GGUF files that we write: a table, and 1 if it is not so.

    python tests/clients/compare_gguf.py --work FOLDER

Weights must be equal in every bit. llama.cpp rounds activations to 8 bits, so perplexities agree to PERPLEXITY_BOUND
only; the control, a file whose queries and keys are rotated as transformers does it, must not.

Settings of other architectures are compared on small random models that stay in floating point but for one Linear:
log-probabilities must be close to ours, and far from those of the same weights without the setting.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from agreement import logits, of_tokens, perplexity
from compare import GOOD, LENGTH, MODEL, WINDOWS, execute, python_of, table, versions, write_one, write_tokens
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import gptqkit

PERPLEXITY_BOUND = 5e-3
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_M", "Q3_K_M", "Q2_K")
CONVERTED = {"from-w3-g64-asym": "--bits 3 --group-size 64 --asym --format gptq_v2"}
STEMS = {"attn_output": "self_attn.o_proj"}
STEMS |= {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
STEMS |= {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
HEADS = {"attn_q": 4, "attn_k": 2}
CONTROL = "control: rows of queries and keys in halves"

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4}
LONGROPE |= {"short_factor": [1 + each / 20 for each in range(16)], "long_factor": [1 + each for each in range(16)]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LENGTH // 2}
GEMMA = {"num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": 32}
MIXED, FULL = ["full_attention", "sliding_attention", "sliding_attention"] * 2, ["full_attention"] * 6
# What is of its own in a config, by the class and a name, and what it is compared with.
SETTINGS = {
    ("Phi3", "longrope, short factors"): {"rope_parameters": LONGROPE, "original_max_position_embeddings": LENGTH},
    ("Phi3", "longrope, long factors"): {"rope_parameters": LONGROPE, "original_max_position_embeddings": LENGTH // 2},
    ("Llama", "longrope"): {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": LENGTH // 2}},
    ("Qwen2", "yarn, attention_factor"): {"rope_parameters": {**YARN, "attention_factor": 2.0}},
    ("Gemma2", "layer_types"): {"layer_types": MIXED},
    ("Gemma3Text", "final_logit_softcapping"): {"final_logit_softcapping": 1.0},
    ("Gemma3Text", "layer_types"): {"layer_types": MIXED},
    ("Gemma3Text", "no windows, yarn, attention_factor"): {
        "layer_types": FULL,
        "rope_parameters": {"full_attention": {**YARN, "attention_factor": 2.0}, "sliding_attention": None},
    },
    ("Gemma3Text", "rope_theta of windows"): {"rope_local_base_freq": 100.0},
}
WITHOUT = {"Qwen2": {"rope_parameters": YARN}}  # where it is not the default
SETTING_BOUND, SETTING_FACTOR = 0.05, 10  # of mean distances of log-probabilities: to ours, and without the setting
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
    rows += settings_rows(work, calibration, tokens)
    sys.stdout.write(versions("llama", ("llama-cpp-python", "gguf")) + "\n\n")
    sys.stdout.write(table(("client", "checkpoint", "loads", "agreement", "verdict"), rows))
    wrong = sum(row[-1] != GOOD for row in rows)
    sys.stdout.write(f"\n{len(rows)} rows, {wrong} wrong\n")
    return 1 if wrong else 0


def settings_rows(work: Path, calibration: Path, tokens: Path) -> list[tuple[str, ...]]:
    """One row for each of the settings of other architectures."""
    folders, answers = {}, work / "answers" / "llama-settings"
    for kind, name in SETTINGS:
        folder = work / "settings" / kind / name.replace(" ", "-")
        if not folder.exists():
            small(kind, SETTINGS[kind, name]).save_pretrained(folder)
            AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
        flags = r"--type Q8_0 --skip layers\.(?!0\.mlp\.down)"
        folders[kind, name] = write_one(work, calibration, folder, f"gguf-{kind}-{folder.name}", flags)
    files = [f"{folder.name}={folder}/model.gguf" for folder in folders.values()]
    command = [python_of("llama"), "tests/clients/llama_client.py", *files, "--tokens", str(tokens)]
    execute([*command, "--out", str(answers)], {}, work / "logs" / "llama-settings.log")
    rows, input_ids = [], load_file(tokens)["input_ids"]
    for (kind, name), folder in folders.items():
        found = load_file(answers / f"{folder.name}.safetensors")["logprobs"]
        with torch.inference_mode():
            without = small(kind, WITHOUT.get(kind, {}))(input_ids).logits
        distances = [
            float((found - of_tokens(each, input_ids)).abs().mean())
            for each in (logits(folder / "model.gguf", input_ids, torch.float32), without)
        ]
        good = distances[0] < min(SETTING_BOUND, distances[1] / SETTING_FACTOR)
        text = "mean distance of log-probabilities {:.1e}, without it {:.1e}".format(*distances)
        rows.append(("llama.cpp", f"{kind}, {name}", "yes", text, GOOD if good else "DISAGREES"))
    return rows


def small(kind: str, settings: dict[str, object]) -> torch.nn.Module:
    """A model with the same random weights whatever its settings are."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4 * LENGTH}
    sizes |= {"vocab_size": len(AutoTokenizer.from_pretrained(MODEL)), "pad_token_id": 0, "sliding_window": None}
    own = {**(GEMMA if "Gemma" in kind else {}), **settings}
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**{**sizes, **own})).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.15)
    return model


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
