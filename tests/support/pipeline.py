"""Small models quantized on the CPU, and what transformers makes of a checkpoint without our loader."""

import json
import re
import shutil

import torch
import transformers
from safetensors.torch import save_file

import gptqkit
from support.models import samples


def calibration(tokens):
    """The source of these samples; of padded ones, documents that are padded to the same length."""
    if tokens.attention_mask is None:
        return gptqkit.Calibration(tokens.input_ids)
    rows = zip(tokens.input_ids, tokens.attention_mask, strict=True)
    documents = [ids[mask].tolist() for ids, mask in rows]
    return gptqkit.Calibration(
        documents, samples=len(documents), sequence_length=tokens.input_ids.shape[1], concatenate=False
    )


def quantize(model, out, tokens=None, *, run=None, progress=lambda _: None, **settings):
    """Quantize a model or a folder at small sizes; `settings` are those of the config."""
    usual = {"quality": "fast", "damp_percent": 0.01, "group_size": 32, "sym": False, "refine_rounds": 0}
    config = gptqkit.QuantizeConfig(**usual | settings)
    run = gptqkit.Run(**{"device": "cpu", "batch_size": 3, **(run or {})})
    source = calibration(samples() if tokens is None else tokens)
    return gptqkit.quantize(model, source, out, config, run=run, progress=progress)


def weights(path):
    """Every quantized weight of a checkpoint by its stored name."""
    checkpoint = gptqkit.open_checkpoint(path)
    return {name: checkpoint.weight(name) for name in checkpoint.layers}


def outputs(model, tokens=None):
    """Logits, or the last hidden states of an encoder; of padded samples those of tokens."""
    tokens = samples() if tokens is None else tokens
    more = {} if tokens.attention_mask is None else {"attention_mask": tokens.attention_mask}
    if model.config.is_encoder_decoder:
        more["decoder_input_ids"] = tokens.input_ids.flip(1).to(model.device)
    with torch.no_grad():
        found = model(input_ids=tokens.input_ids.to(model.device), **more)
    states = found.logits if "logits" in found else found.last_hidden_state
    return states if tokens.attention_mask is None else states[tokens.attention_mask]


def assert_close(found, expected, rtol=1e-5):
    """Equal up to the order of sums."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= rtol * float(expected.abs().max())


def share_that_differs(one, other):
    """Of codes; sums in another order differ in the last bit, which can tip a rare one, and later ones with it."""
    return float((one.codes != other.codes).float().mean())


def dequantized(path, source, folder):
    """The float model of a folder as transformers loads it, in float32, with a checkpoint's dequantized weights.

    path: the checkpoint. source: the float model. folder: an empty one to work in.
    """
    checkpoint = gptqkit.open_checkpoint(path)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.other_names}
    config = json.loads((source / "config.json").read_text())
    for name in checkpoint.layers:
        dense = checkpoint.weight(name).dequantize()
        tensors[f"{name}.weight"] = dense.T if config["model_type"] in ("gpt2", "openai-gpt") else dense
        if (bias := checkpoint.bias(name)) is not None:
            tensors[f"{name}.bias"] = bias
    if config["model_type"] in ("gpt_oss", "llama4_text"):
        tensors = _stacked(tensors, config["num_local_experts"])
    folder.mkdir()
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    shutil.copyfile(source / "config.json", folder / "config.json")
    kind = getattr(transformers, config["architectures"][0])
    model, found = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(found[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def float_matrix(name, source):
    """The float weight, (out, in), that a checkpoint's name stands for in the files of its source."""
    if f"{name}.weight" in source:
        weight = source[f"{name}.weight"]
        return weight.T if any(each.endswith("c_attn.weight") for each in source) else weight
    path, number, part = name.rsplit(".", 2)  # gpt_oss and Llama 4 stack their experts, (in, out)
    stack = source[f"{path}.{'down' if part == 'down_proj' else 'gate_up'}_proj"][int(number)].T
    half = len(stack) // 2
    return {"gate_proj": stack[:half], "up_proj": stack[half:], "down_proj": stack}[part]


def _stacked(tensors, experts):
    """gpt_oss or Llama 4 as its files are: experts in one tensor, (in, out), both halves in one."""
    stacked = {name: each for name, each in tensors.items() if not re.search(r"\.experts\.\d", name)}
    for name in tensors.keys() - stacked.keys():
        path, _, part, end = name.rsplit(".", 3)
        parts = [part] if part == "down_proj" else ["gate_proj", "up_proj"]
        each = [torch.stack([tensors[f"{path}.{n}.{own}.{end}"].float() for n in range(experts)]) for own in parts]
        both = torch.cat(each, 1)
        stack = f"{path}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
        stacked[f"{stack}_bias" if end == "bias" else stack] = both if end == "bias" else both.mT
    return stacked
