"""Write a mixture of experts that predicts what a dense Llama does, to measure mixtures where no trained one is small.

    python benchmarks/mixture.py FOLDER [--model LLAMA] [--experts N]
    python benchmarks/steps.py --model FOLDER ...

Every expert of a block is the Llama's MLP, and a router with random weights sends every token to two of them, whose
shares add up to 1 (sparse upcycling, arXiv 2212.05055, before it is trained further). So every expert is calibrated on
tokens of its own, and is quantized differently.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

LLAMA = Path(__file__).resolve().parents[1] / "examples/models/gutenberg-llama-6m"


def make_mixture(path: str | Path, out: Path, experts: int) -> float:
    """Write the mixture, and return the largest distance between its logits and the Llama's."""
    llama = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    both = MixtralConfig().to_dict().keys() - {"model_type", "architectures"}
    settings = {name: value for name, value in llama.config.to_dict().items() if name in both}
    model = MixtralForCausalLM(MixtralConfig(**settings, num_local_experts=experts, num_experts_per_tok=2))
    dense, generator = llama.state_dict(), torch.Generator().manual_seed(0)
    tensors = {name: tensor for name, tensor in dense.items() if ".mlp." not in name}
    for number in range(settings["num_hidden_layers"]):
        block = f"model.layers.{number}.mlp"
        gate, up, down = (dense[f"{block}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        tensors[f"{block}.experts.gate_up_proj"] = torch.cat([gate, up]).repeat(experts, 1, 1)
        tensors[f"{block}.experts.down_proj"] = down.repeat(experts, 1, 1)
        router = torch.randn(experts, settings["hidden_size"], generator=generator)
        tensors[f"{block}.gate.weight"] = 2 * router / settings["hidden_size"] ** 0.5
    model.load_state_dict(tensors)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(path).save_pretrained(out)
    tokens = torch.arange(256)[None]
    with torch.no_grad():
        return float((model(tokens).logits - llama(tokens).logits).abs().max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=LLAMA)
    parser.add_argument("--experts", type=int, default=4)
    given = parser.parse_args()
    print(f"logits differ by at most {make_mixture(given.model, given.folder, given.experts):.1e}")
