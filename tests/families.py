"""Tiny, randomly initialised models of every family that transformers has, and what becomes of each.

    python tests/families.py [--only NAME ...] [--json FILE] [--markdown FILE]

Each is made from its own configuration class, with small sizes, written to a folder, quantized with the defaults from
token ids, loaded and run. The results:

    ok       the loaded model computes what the float model does with the checkpoint's weights in it
    refused  one line said why, before any work
    FAILED   anything else; the exit code is then 1

Families that cannot be made this small, or not be run on token ids by transformers itself, are left out and counted.
"""

import argparse
import contextlib
import inspect
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

import gptqkit
from gptqkit.assembly import stored_module
from gptqkit.model import FloatModel

KINDS = {
    "language model": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "composite": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
SIZES = {
    1: "n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts mamba_n_groups n_groups "
    "mamba_ngroups",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads n_kv_heads num_experts_per_tok num_experts_per_token moe_topk "
    "moe_top_k top_k_experts top_k linear_num_key_heads num_hidden_groups moe_k",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts linear_num_value_heads index_n_heads",
    8: "patch_size mamba_n_heads mamba_num_heads rotary_dim",
    16: "head_dim kv_channels attention_head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim d_head "
    "swa_head_dim swa_v_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim d_kv "
    "index_head_dim",
    32: "moe_intermediate_size expert_intermediate_size q_lora_rank kv_lora_rank o_lora_rank moe_ffn_hidden_size "
    "expert_ffn_hidden_size sliding_window window_size local_attention image_size",
    64: "hidden_size d_model n_embd embed_dim dim emb_dim hidden_dim embedding_size word_embed_proj_dim "
    "attention_hidden_size projection_dim out_hidden_size text_hidden_size lru_width encoder_hidden_size d_embed",
    128: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "shared_intermediate_size max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length "
    "moe_shared_expert_intermediate_size shared_expert_intermediate_size mlp_hidden_size dense_intermediate_size "
    "intermediate_size_mlp",
    384: "vocab_size vocab_size_per_layer_input entity_vocab_size",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
THIRDS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
FOUR = {"num_hidden_layers": 4}  # the last two are given what the others made
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED_KEYS = {**FOUR, **ALTERNATING, "num_kv_shared_layers": 2}
SHARED_INDEXERS = {**FOUR, "index_topk": 8, "indexer_types": ["full", "full", "shared", "shared"]}
OTHERS = {  # what the sizes above do not make consistent
    "bailing_hybrid": {"head_dim": 16, "n_group": 1, "num_experts": 4},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "topk_method": "greedy"}},
    "deepseek_v2": {"topk_method": "greedy"},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": THIRDS["rope_parameters"] | {"mrope_section": [3, 3, 2]}}},
    "esm": {"vocab_size": 384, "pad_token_id": 1, "mask_token_id": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 8},
    "gemma3n_text": {**SHARED_KEYS, "intermediate_size": [128] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**SHARED_KEYS, "global_head_dim": 32},
    "glm46v": {"text_config": THIRDS},
    "glm4v": {"text_config": THIRDS},
    "glm4v_moe": {"text_config": {"rope_parameters": THIRDS["rope_parameters"] | {"mrope_section": [1, 1, 2]}}},
    "glm_moe_dsa": {
        **SHARED_INDEXERS,
        "layer_types": ["indexed_attention"] * 4,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
    "glm_ocr": {"text_config": THIRDS},
    "glmga": {"text_config": THIRDS},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_vl": {"text_config": {"head_dim": 16}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "paddleocr_vl": {"text_config": THIRDS},
    "qwen2_5_omni_thinker": {"text_config": THIRDS},
    "qwen2_5_vl": {"text_config": THIRDS},
    "qwen2_vl": {"text_config": THIRDS},
    "qwen4_exp": INDEXER,
    "qwen4_exp_text": INDEXER,
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "xlnet": {"d_inner": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "hybrid_layer_ids": [1],
        "layers_block_type": ["linear_attention", "hybrid"],
        "mamba_headdim": 16,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zaya": {"num_experts_per_tok": 1},
}
MROPE = ("mrope_section", [2, 3, 3])


def merged(values, others):
    """Return values with others over them, inside dicts too."""
    both = values.keys() & others.keys()
    inner = {name: merged(values[name], others[name]) for name in both if isinstance(values[name], dict)}
    return values | others | inner


def shrink(config):
    """Return the small values of a configuration, as arguments of its class."""
    values = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            values[name] = shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            if name in SIZE_OF:
                values[name] = SIZE_OF[name]
            elif name.endswith(("token_id", "token_index")) and value >= 384:
                values[name] = 300
        elif isinstance(value, dict) and MROPE[0] in value:
            values[name] = {**value, MROPE[0]: MROPE[1]}
    if values.get("kv_lora_rank") and "num_attention_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    layers = values.get("num_hidden_layers")
    for name, value in vars(config).items():
        if not layers or not isinstance(value, (list, tuple)) or len(value) <= layers:
            continue
        if name in SIZE_OF:
            values[name] = [SIZE_OF[name]] * layers
        elif "layer" in name + str(value[0]):
            kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else list(value)
            values[name] = (kinds * layers)[:layers]
    return values


def put(config, values):
    """Set values of a configuration that is there already, and of those inside it."""
    for name, value in values.items():
        inner = getattr(config, name, None)
        if isinstance(inner, transformers.PretrainedConfig):
            put(inner, value)
        else:
            setattr(config, name, value)
    return config


def configs(cls, family):
    """Yield small configurations for a class, made in several ways: families want one or another."""
    default = cls.config_class()
    values = merged(shrink(default), OTHERS.get(family, {}))
    with contextlib.suppress(Exception):
        yield type(default)(**values)
    absent = {name: SIZE_OF[name] for name, value in vars(default).items() if value is None and name in SIZE_OF}
    with contextlib.suppress(Exception):
        yield type(default)(**(absent | values))
    yield put(default, values)


def build(kind, family, folder):
    """Write a random model of a family to a folder; return it and the tensors that it is called with."""
    mapping = modeling_auto.MODEL_MAPPING_NAMES if kind == "encoder" else KINDS[kind]
    names = mapping[family]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    ids = torch.randint(3, 200, (4, 32), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids} if kind == "encoder" else {"input_ids": ids, "use_cache": False}
    two = "decoder_input_ids" in inspect.signature(cls.forward).parameters
    if two:
        inputs["decoder_input_ids"] = ids.flip(1)
    problem = None
    for config in configs(cls, family):
        if two and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = 2
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in cls(config).parameters())
            if size > 30e6:
                raise ValueError(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = cls(config).eval()
            with torch.no_grad():
                model(**inputs)
            model.save_pretrained(folder)
            again = cls.from_pretrained(folder).eval()  # transformers cannot read all that it writes
            with torch.no_grad():
                torch.testing.assert_close(again(**inputs)[0], model(**inputs)[0])
        except Exception as error:
            problem = problem or error
        else:
            return model, inputs
    raise problem


def put_quantized(model, source, out, modules):
    """Give the float model the weights that the checkpoint holds."""
    source, checkpoint = FloatModel(source), gptqkit.open_checkpoint(out)
    for name in modules:
        weight = checkpoint.weight(stored_module(source, name)).dequantize()
        experts, _, rest = name.rpartition(".experts.")
        try:
            place = model.get_submodule(name)
        except AttributeError:  # stacked
            number, matrix = rest.split(".")
            owner = model.get_submodule(f"{experts}.experts")
            half = matrix in ("gate_proj", "up_proj") and hasattr(owner, "gate_up_proj")
            stack = getattr(owner, "gate_up_proj" if half else matrix).data[int(number)]
            stack = stack.T if getattr(owner, "is_transposed", True) else stack  # Llama 4 does not say
            rows = slice(None)
            if half:
                rows = slice(0, len(weight)) if matrix == "gate_proj" else slice(len(weight), None)
            stack[rows] = weight
        else:
            place.weight.data.copy_(weight.T if isinstance(place, Conv1D) else weight)


def outcome(kind, family, folder, settings=None):
    """Make, quantize, load and run one, by default without options; return what became of it as plain values."""
    source, out = folder / "float", folder / "out"
    try:
        model, inputs = build(kind, family, source)
    except Exception as error:
        return {"result": "left out", "why": f"{type(error).__name__}: {error}"}
    steps = []
    try:
        calibration = gptqkit.Calibration(inputs["input_ids"], sequence_length=32)
        report = gptqkit.quantize(source, calibration, out, settings, progress=steps.append).report
        quantized, _ = gptqkit.load(out)
        with torch.no_grad():
            before, found = (each(**inputs)[0].float() for each in (model.float(), quantized.float()))
            put_quantized(model, source, out, [module.name for module in report.modules])
            expected = model(**inputs)[0].float()
    except gptqkit.GptqkitError as error:
        late = steps or "\n" in str(error)
        return {"result": "FAILED" if late else "refused", "why": f"{type(error).__name__}: {error}"}
    except Exception as error:
        return {"result": "FAILED", "why": f"raw {type(error).__name__}: {error}"}
    off = float((found - expected).norm() / expected.norm())
    return {
        "result": "ok" if off < 1e-4 else "FAILED",
        "linears": len(report.modules),
        "left": len(report.left_in_float),
        "share": round(report.quantized_weights / report.block_weights, 3),
        "distance": round(float((found - before).norm() / before.norm()), 3),
        "off": round(off, 7),
    }


def _work(kind, family, pipe):
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.alarm(300)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        sys.stdout = sys.stderr = null
        pipe.send(outcome(kind, family, Path(folder)))


def apart(kind, family):
    """Return the outcome of one family, found in a process of its own."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_work, args=(kind, family, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        process.join()
        found = {"result": "FAILED", "why": f"the process ended with {process.exitcode}"}
    process.join()
    return {"family": family, "kind": kind, **found}


def markdown(rows):
    """Return the rows as a table."""
    lines = ["| family | kind | result | share of blocks | distance of outputs | why |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row["result"] != "left out":
            numbers = f"{row.get('share', '')} | {row.get('distance', '')}"
            why = " ".join(row.get("why", "").split()).replace("|", "\\|")
            lines.append(f"| {row['family']} | {row['kind']} | {row['result']} | {numbers} | {why[:200]} |")
    counts = Counter(row["result"] for row in rows)
    return "\n".join([*lines, "", ", ".join(f"{count} {result}" for result, count in counts.items())])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    gptqkit.quantize, gptqkit.load  # noqa: B018 - imported once, before the processes
    rows = []
    for kind, mapping in KINDS.items():
        for family in mapping:
            apart_from = "language model" if kind == "encoder-decoder" else None  # the decoder by itself
            seen = any(row["family"] == family and row["kind"] != apart_from for row in rows)
            if seen or (arguments.only and family not in arguments.only) or arguments.kind not in (None, kind):
                continue
            rows.append(apart(kind, family))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    table = markdown(rows)
    print(table.splitlines()[-1])
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    return any(row["result"] == "FAILED" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
