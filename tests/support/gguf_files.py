"""Small models with a tokenizer that GGUF can hold, and what the `gguf` package reads of a file."""

import json
from functools import cache

import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGUFReader, dequantize

from gptqkit.calibration.samples import Samples

VOCAB = 320
TEXT = ["the quick brown fox jumps over the lazy dog, 1234 times; it's true that the dog was lazy \u00e9t\u00e9"] * 4
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
NARROW = {**WIDE, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
QWEN2 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"""
    r"""\s*[\r\n]+|\s+(?!\S)|\s+"""
)


@cache
def tokenizer(pattern=None):
    """A byte-level BPE tokenizer, whose words are GPT-2's or those of a regular expression."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = pattern and tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, bytes_]) if pattern else bytes_
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB - 10, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@cache
def sentence_pieces():
    """A tokenizer as SentencePiece makes them, with a token for every byte."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    backend.train_from_iterator(TEXT, trainer)
    learnt = json.loads(backend.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
    vocab = {name: number for number, name in enumerate(names)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    model = tokenizers.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = tokenizers.decoders.Metaspace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def build(kind="Llama", **settings):
    """A model with random weights, some of them large."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**WIDE, **settings})
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.05 * (1 + torch.rand_like(parameter).gt(0.99) * 4)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in name:
            parameter.data += 1
    return model


def save(model, folder, words=None):
    """The folder of a model with a tokenizer: this one, or that of a regular expression for words."""
    model.save_pretrained(folder)
    (tokenizer(words) if words is None or isinstance(words, str) else words).save_pretrained(folder)
    return folder


def tokens(count=6, length=24):
    return Samples(torch.randint(0, VOCAB - 12, (count, length), generator=torch.Generator().manual_seed(1)))


def tensors(file):
    """Every tensor of a file as the `gguf` package decodes it, and the name of its type."""
    found = {}
    for each in GGUFReader(file).tensors:
        found[each.name] = torch.from_numpy(np.array(dequantize(each.data, each.tensor_type))), each.tensor_type.name
    return found
