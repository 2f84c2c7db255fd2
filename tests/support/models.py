"""Tiny, randomly initialised models of many architectures, and tokens for them."""

import torch
import transformers

from gptqkit.calibration.windows import TokenWindows
from gptqkit.quantizer.modules import find_blocks, is_matrix

SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZE, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}

MODELS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED, attention_bias=True, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=8),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED),
    "gemma2": lambda: transformers.Gemma2Config(**GROUPED, sliding_window=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GROUPED, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**GROUPED, pad_token_id=0),
    "opt": lambda: transformers.OPTConfig(**SIZE, ffn_dim=96, word_embed_proj_dim=64),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZE, intermediate_size=96),
    "falcon": lambda: transformers.FalconConfig(**SIZE, new_decoder_architecture=True, num_kv_heads=2, bias=True),
}


def build(name, **changes):
    torch.manual_seed(0)
    config = MODELS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # random initial weights are tiny; make the blocks matter
        for module in find_blocks(model)[1].modules():
            if is_matrix(module):
                module.weight.mul_(5)
    return model


def windows(samples=6, length=24, vocabulary=96, padded=False):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocabulary, (samples, length), generator=generator)
    if not padded:
        return TokenWindows(ids)
    mask = torch.arange(length)[None] < torch.tensor([length, length - 5, 9, length, 3, 14])[:samples, None]
    return TokenWindows(torch.where(mask, ids, 0), mask)
