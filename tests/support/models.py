"""Tiny, randomly initialised models of many architectures, and tokens for them."""

import torch
import transformers
from safetensors.torch import load_file

from gptqkit.calibration.samples import Samples
from gptqkit.targets import is_matrix

SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
GROUPED = {**SIZE, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"num_experts_per_tok": 2}
EXPERTS = {**ROUTED, "moe_intermediate_size": 32}


def without(settings, key):
    return {name: value for name, value in settings.items() if name != key}


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


def gemma4():
    """Two blocks make keys and values, and two others take them."""
    return transformers.Gemma4TextConfig(
        **{**GROUPED, "num_hidden_layers": 4},
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        global_head_dim=32,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=96,
    )


MIXTURES = {
    "mixtral": lambda: transformers.MixtralConfig(**GROUPED, **ROUTED, num_local_experts=4),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **without(GROUPED, "head_dim"), **EXPERTS, num_experts=4, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, num_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**without(GROUPED, "head_dim"), "num_key_value_heads": 4, "num_hidden_layers": 3},
        **EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=32,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_group=2,
        topk_group=1,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **GROUPED,
        **ROUTED,
        num_local_experts=4,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **GROUPED, **ROUTED, intermediate_size_mlp=96, num_local_experts=4, pad_token_id=0
    ),
}


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def llava():
    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=32),
        text_config=transformers.LlamaConfig(**GROUPED),
        image_token_index=95,
    )


HANDING_ON = {"gemma4": gemma4}  # more than hidden states, from block to block
OTHERS = {
    "llava": llava,
    "bert": lambda: transformers.BertConfig(**SIZE, intermediate_size=96),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, state_size=16, time_step_rank=32
    ),
}
START = {"decoder_start_token_id": 0}


def t5gemma():
    """An encoder that is wider than its decoder."""
    common = {**without(GROUPED, "hidden_size"), "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 2}
    encoder, decoder = (transformers.T5GemmaModuleConfig(**common, hidden_size=width) for width in (96, 64))
    return transformers.T5GemmaConfig(encoder=encoder, decoder=decoder, vocab_size=96)


def t5gemma2():
    """One attention for both: a decoder's keys and values are called with its own tokens, then with the encoder's."""
    stack = {**GROUPED, "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 2}
    vision = {**VISION, "num_hidden_layers": 1}
    encoder = transformers.T5Gemma2EncoderConfig(text_config=stack, vision_config=vision, mm_tokens_per_image=4)
    return transformers.T5Gemma2Config(encoder=encoder, decoder=transformers.T5Gemma2DecoderConfig(**stack))


TWO_STACKS = {
    "t5": lambda: transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, initializer_factor=0.5, **START
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=96,
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        **START,
    ),
    "t5gemma": t5gemma,
    "t5gemma2": t5gemma2,
}
CLASSES = {
    "llava": transformers.LlavaForConditionalGeneration,
    "bert": transformers.BertModel,
    "t5": transformers.T5ForConditionalGeneration,
    "bart": transformers.BartForConditionalGeneration,
    "t5gemma": transformers.T5GemmaForConditionalGeneration,
    "t5gemma2": transformers.T5Gemma2ForConditionalGeneration,
}


def build(name, **changes):
    torch.manual_seed(0)
    config = {**MODELS, **MIXTURES, **OTHERS, **HANDING_ON, **TWO_STACKS}[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    if "num_hidden_layers" in changes and getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    kind = CLASSES.get(name)
    model = (transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)).eval()
    with torch.no_grad():  # random initial weights are tiny; make the blocks matter, and biases and routers differ
        for path, parameter in model.named_parameters():
            if ".experts." in path and parameter.ndim > 1 and not path.endswith(".weight"):
                parameter.mul_(5)  # of all experts
        for path, module in model.named_modules():
            if path.endswith("relative_attention_bias"):
                module.weight.normal_()
            if is_matrix(module) and module is not model.get_output_embeddings():
                module.weight.mul_(5)
            for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if key.endswith("bias") and (name in MIXTURES or name == "bart"):
                    tensor.normal_(std=0.1)
                if key == "weight" and type(module).__name__.endswith("Router"):
                    tensor.normal_(std=0.3)
    return model


def overflowing(name, **changes):
    """A model in which token 95, and no other, overflows: it alone has a first channel, which is multiplied."""
    model = build(name, **changes)
    embedding = model.get_input_embeddings().weight.data
    embedding[:, 0] = 0
    embedding[95] = torch.eye(64)[0]
    model.model.layers[0].input_layernorm.weight.data[0] = 3e38
    return model


def save(model, path):
    """Write a float model as its architecture's files are named, in one file."""
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


def samples(count=6, length=24, vocabulary=96, padded=False):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocabulary, (count, length), generator=generator)
    if not padded:
        return Samples(ids)
    mask = torch.arange(length)[None] < torch.tensor([length, length - 5, 9, length, 3, 14])[:count, None]
    return Samples(torch.where(mask, ids, 0), mask)
