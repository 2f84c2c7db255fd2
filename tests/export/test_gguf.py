"""GGUF files as other programs read them: the `gguf` package, and transformers with `gguf_file`."""

import copy
import json
import re
import shutil

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGUFReader, GGUFWriter, Keys, LlamaFileType, TokenType
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import gptqkit
from gptqkit.architecture import open_config
from gptqkit.errors import ArchitectureError, CheckpointError, ConfigError, ConversionError
from gptqkit.export.gguf_model import metadata
from gptqkit.export.gguf_tokenizer import tokenizer_metadata
from support.gguf_files import NARROW, QWEN2, VOCAB, WIDE, build, save, sentence_pieces, tensors, tokenizer, tokens
from support.pipeline import assert_close, quantize


def field(file, key):
    return GGUFReader(file).fields[key].contents()


def decoded(model, name):
    """A weight of a loaded model, in float32."""
    module = model.get_submodule(name)
    return module.dequantize(torch.float32) if hasattr(module, "dequantize") else module.weight


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("Q3_K_M", "Q5_1")]


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q2_K", *SLOW])
def test_transformers_reads_the_file_as_we_read_the_folder(tmp_path, kind):
    save(build(), tmp_path / "float")
    more = {"learn_iterations": 3} if kind == "Q2_K" else {}  # moves codes, and leaves two-level scales alone
    settings = {"type": kind, "method": "rtn", "group_size": 128, "sym": True, **more}
    result = quantize(tmp_path / "float", tmp_path / "out", tokens(2), **settings)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    ours, own = gptqkit.load(tmp_path / "out", device="cpu", dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    alone, words = gptqkit.load(tmp_path / "out" / "model.gguf", device="cpu", dtype="float32")
    ids = tokens().input_ids
    with torch.no_grad():
        expected = theirs(ids).logits
        for model in (ours, alone):
            assert torch.allclose(model(ids).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    for text in ("the lazy dog's 12  \u00e9t\u00e9\n", "<s>it</s>"):
        assert words(text)["input_ids"] == own(text)["input_ids"]
    types = {name: kind for name, (_, kind) in tensors(tmp_path / "out" / "model.gguf").items()}
    for module in result.report.modules:
        stem = {"v_proj": "attn_v", "down_proj": "ffn_down"}.get(module.name.rpartition(".")[2])
        if stem:
            expected = {"Q4_K_M": "Q6_K" if module.layer else "Q4_K", "Q3_K_M": None, "Q2_K": "Q3_K", "Q5_1": "Q5_1"}[
                kind
            ]
            assert expected in (types[f"blk.{module.layer}.{stem}.weight"], None)
    assert types["output.weight"] == "Q6_K"
    assert types["output_norm.weight"] == "F32"
    assert field(tmp_path / "out" / "model.gguf", "general.architecture") == "llama"


MODELS = {
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True, "head_dim": 128},  # transformers reads no other size of heads
    "Gemma2": {"query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 32},
    "Gemma3Text": {"query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 8, "sliding_window_pattern": 6},
    "Phi3": {"pad_token_id": 0, "sliding_window": None, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Llama": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    },
}


OTHER = ("Qwen2", "Gemma2", "Mixtral")  # which have fast rows in the test of files alone


@pytest.mark.parametrize("kind", [pytest.param(each, marks=[pytest.mark.slow] * (each in OTHER)) for each in MODELS])
def test_architectures(tmp_path, kind):
    """Ours is read back to the bit by us, and to the same logits by transformers, where that knows the architecture."""
    model = build(kind, **{**NARROW, **MODELS[kind]})
    save(model, tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2, 16), type="Q8_0", method="rtn", group_size=128, sym=True)
    ours, _ = gptqkit.load(tmp_path / "out", device="cpu", dtype="float32")
    ids = tokens().input_ids[:1, :16]
    with torch.no_grad():
        found, before = ours(ids).logits, model(ids).logits
        assert 0 < (found - before).norm() / before.norm() < 0.05
        if kind not in ("Llama", "Mixtral", "Phi3"):
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
            assert torch.allclose(theirs(ids).logits, found, rtol=0, atol=1e-5 * float(found.abs().max()))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5000.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 5000.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1 + each / 9 for each in range(8)], "long_factor": [1 + each / 2 for each in range(8)]}
HALF = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}
ROUTED = {"num_experts_per_tok": 3}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.5}
HEADS = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FULL = {"layer_types": ["full_attention"] * 2}
PHI = {"pad_token_id": 0, "vocab_size": 32064}  # transformers reads no other


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 32}}),
        pytest.param("Llama", {"rope_parameters": LINEAR}, marks=pytest.mark.slow),
        pytest.param("Qwen2", {"rope_parameters": YARN}, marks=pytest.mark.slow),
        pytest.param("Qwen3", {"head_dim": 32}, marks=pytest.mark.slow),
        ("Qwen3Moe", {"head_dim": 32, **ROUTED, "num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}),
        ("Mixtral", {**ROUTED, "num_local_experts": 4}),
        ("Phi3", {**PHI, "rope_parameters": HALF}),
        pytest.param("Gemma2", {**HEADS, **CAPS}, marks=pytest.mark.slow),
        ("Gemma3Text", {**HEADS, "num_hidden_layers": 6, "rope_parameters": {"full_attention": LINEAR}}),
        ("Qwen2", {"rope_parameters": {**YARN, "attention_factor": 2.0}}),
        pytest.param(
            "Qwen2", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.3}}, marks=pytest.mark.slow
        ),
        ("Llama", {"rope_parameters": LONGROPE}),
        pytest.param(
            "Llama",
            {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64, "attention_factor": 2.0}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Phi3",
            {**PHI, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
            marks=pytest.mark.slow,
        ),
        ("Gemma2", {**HEADS, **CAPS, **MIXED}),
        pytest.param(
            "Gemma3Text",
            {**HEADS, **MIXED, "rope_local_base_freq": 50.0, "final_logit_softcapping": 0.5},
            marks=pytest.mark.slow,
        ),
        ("Gemma3Text", {**HEADS, **FULL, "rope_parameters": {"full_attention": {**YARN, "attention_factor": 2.0}}}),
    ],
    ids=[
        *("llama3", "linear", "yarn", "Qwen3", "Qwen3Moe", "Mixtral", "Phi3", "Gemma2", "Gemma3", "yarn-attention"),
        *("yarn-mscale", "longrope", "longrope-short", "longrope-Phi3", "Gemma2-mixed", "Gemma3-mixed", "Gemma3-full"),
    ],
)
def test_the_file_alone_computes_what_the_folder_does(tmp_path, kind, settings):
    save(build(kind, **{**NARROW, **settings}), tmp_path / "float")
    out = tmp_path / "out"
    quantize(tmp_path / "float", out, tokens(2, 16), type="Q8_0", method="rtn", group_size=128, sym=True)
    ids = tokens(1, 60).input_ids
    folder, alone = (gptqkit.load(path, device="cpu", dtype="float32")[0] for path in (out, out / "model.gguf"))
    with torch.no_grad():
        assert_close(alone(ids).logits, folder(ids).logits)
        named = {reader.name for reader in gptqkit.inspect(out).readers if reader.loads}
        assert "llama.cpp" in named
        if "rope_parameters" in settings:  # which transformers leaves out, if it reads the file at all
            assert "transformers" not in named
            if kind in ("Llama", "Qwen2") or settings["rope_parameters"] is HALF:
                theirs = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf")
                assert float((theirs(ids).logits - folder(ids).logits).abs().max()) > 0.1


def header(file, name, blocks, **settings):
    """A file with hardly more than settings, as llama.cpp's converter calls them, and tensors of rotary positions."""
    writer = GGUFWriter(file, name)
    writer.add_block_count(blocks)
    writer.add_key_length(settings.pop("key_length", 16))
    factors = settings.pop("factors", {})
    for key, value in settings.items():
        getattr(writer, f"add_{key}")(value)
    for block in range(blocks):
        writer.add_tensor(f"blk.{block}.attn_norm.weight", np.zeros(8, np.float32))
    for each, values in factors.items():
        writer.add_tensor(f"{each}.weight", np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(("name", "blocks", "width", "scalar"), [("gemma2", 46, 4608, 144), ("gemma3", 62, 5376, 168)])
def test_queries_of_the_largest_gemmas_are_scaled_as_their_configs_say(tmp_path, name, blocks, width, scalar):
    own = {"embedding_length": width, "head_count": 32, "key_length": 128}
    config = open_config(header(tmp_path / "model.gguf", name, blocks, **own)).to_dict()
    assert config["query_pre_attn_scalar"] == scalar
    metadata({**config, "sliding_window": 8})
    with pytest.raises(ArchitectureError, match=f"query_pre_attn_scalar is 128; llama.cpp takes {scalar}"):
        metadata({**config, "query_pre_attn_scalar": 128})


@pytest.mark.parametrize(
    ("said", "full"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"sliding_window": 8}, [5]),
        ({"sliding_window": 8, "sliding_window_pattern": 3}, [2, 5]),
        ({"sliding_window": 8, "sliding_window_pattern": 0}, []),
        ({"sliding_window": 8, "sliding_window_pattern": [True, False, True, True, True, True, False]}, [1, 6]),
    ],
)
def test_layers_with_a_window_are_those_that_llama_cpp_takes(tmp_path, said, full):
    config = open_config(header(tmp_path / "model.gguf", "gemma3", 7, **said))
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"] == full
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern is \[True\] for 7 layers"):
        open_config(header(tmp_path / "other.gguf", "gemma3", 7, sliding_window=8, sliding_window_pattern=[True]))


def test_factors_of_phi3_are_read_as_llama_cpp_takes_them(tmp_path):
    own = {"context_length": 64, "rope_scaling_orig_ctx_len": 16, "rope_scaling_attn_factors": 1.25}
    own |= {"embedding_length": 64, "head_count": 4}
    both = {"rope_factors_long": [4.0] * 8, "rope_factors_short": [2.0] * 8}
    config = open_config(header(tmp_path / "model.gguf", "phi3", 1, factors=both, **own))
    for length, factor in ((16, 2.0), (17, 4.0)):
        frequencies, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=length)
        assert scale == 1.25
        assert float(frequencies[0]) == 1 / factor
    both["rope_factors_long"] = [4.0]
    with pytest.raises(CheckpointError, match="tensors of rotary frequencies do not have 8 values"):
        open_config(header(tmp_path / "short.gguf", "phi3", 1, factors=both, **own))
    del both["rope_factors_short"]
    with pytest.raises(CheckpointError, match=r"holds rope_factors_long\.weight only"):
        open_config(header(tmp_path / "other.gguf", "phi3", 1, factors=both, **own))


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_routers_and_vectors_are_in_float32(tmp_path, kind):
    save(build(kind, **{**NARROW, **MODELS[kind]}).bfloat16(), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2, 16), type="Q8_0", method="rtn", group_size=128, sym=True)
    types = {name: kind for name, (_, kind) in tensors(tmp_path / "out" / "model.gguf").items()}
    assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_gemma_are_one_more_in_the_file_whatever_their_dtype(tmp_path, dtype):
    model = build("Gemma2", **{**NARROW, **MODELS["Gemma2"]}).to(dtype)
    save(model, tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2, 16), type="Q8_0", method="rtn", group_size=128, sym=True)
    (found, kind), norm = tensors(tmp_path / "out" / "model.gguf")["blk.0.attn_norm.weight"], model.model.layers[0]
    assert kind == "F32"
    assert torch.equal(found, norm.input_layernorm.weight.data.float() + 1)
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", dtype="float32")
    torch.testing.assert_close(loaded.model.layers[0].input_layernorm.weight, found - 1, rtol=0, atol=0)


def test_a_quantized_output_layer_is_none_that_the_embedding_stands_for(tmp_path):
    save(build(num_hidden_layers=1), tmp_path / "float")
    types = []
    for head in (False, True):
        out = tmp_path / str(head)
        quantize(tmp_path / "float", out, type="Q4_K_M", method="rtn", group_size=128, sym=True, lm_head=head)
        types.append({name: kind for name, (_, kind) in tensors(out / "model.gguf").items()})
        assert not gptqkit.inspect(out / "model.gguf").sym  # whose first layer, of Q6_K, is symmetric
    assert types[0] == types[1]
    assert (types[1]["token_embd.weight"], types[1]["output.weight"]) == ("Q4_K", "Q6_K")


def test_inspect_decodes_nothing_and_names_the_writer(tmp_path, monkeypatch):
    model = build(**{**NARROW, "num_hidden_layers": 1})
    save(model, tmp_path / "float")
    out = tmp_path / "out"
    quantize(tmp_path / "float", out, tokens(2), type="Q8_0", method="rtn", group_size=128, sym=True)
    for file in (out / "config.json", out / "quantize_config.json"):
        file.write_text(re.sub('"gptqkit:.*"', '"gptqkit:0.0.1"', file.read_text()))
    monkeypatch.setattr("gptqkit.export.gguf_file.decode", None)
    summary = gptqkit.inspect(out)
    assert summary.other_parameters == sum(each.numel() for each in model.parameters()) - summary.quantized_weights
    assert summary.writer == "gptqkit:0.0.1"


def test_conversion_is_exact_and_goes_back(tmp_path):
    save(build(**NARROW), tmp_path / "float")
    settings = {"bits": 4, "group_size": 32, "sym": True, "method": "rtn", "format": "gptq_v2"}
    quantize(tmp_path / "float", tmp_path / "gptq", tokens(), **settings)
    gptqkit.convert(tmp_path / "gptq", tmp_path / "gguf", format="gguf")
    gptqkit.convert(tmp_path / "gguf", tmp_path / "back", format="gptq_v2")
    before, after = (gptqkit.open_checkpoint(tmp_path / name) for name in ("gptq", "back"))
    assert before.layers == after.layers
    for name in before.layers:
        for part in ("codes", "scale", "offset"):
            assert torch.equal(getattr(before.weight(name), part), getattr(after.weight(name), part))
    found = tensors(tmp_path / "gguf" / "model.gguf")
    assert found["blk.1.ffn_up.weight"][1] == "Q4_0"
    assert found["token_embd.weight"][1] == "F32"
    wanted = before.weight("model.layers.1.mlp.up_proj").dequantize()
    assert torch.equal(found["blk.1.ffn_up.weight"][0], wanted)
    query = before.weight("model.layers.0.self_attn.q_proj").dequantize()
    stored = found["blk.0.attn_q.weight"][0]
    assert not torch.equal(stored, query)  # as transformers rotates it: llama.cpp would load that without a word
    pairs = [head * 16 + half * 8 + row for head in range(4) for row in range(8) for half in range(2)]
    assert torch.equal(stored, query[pairs])
    summary = gptqkit.inspect(tmp_path / "gguf")
    assert (summary.format, summary.bits, summary.quantized_layers) == ("gguf", {4: 14}, 14)
    assert summary.packed_bytes == summary.quantized_weights * 18 // 32
    size = (tmp_path / "gguf" / "model.gguf").stat().st_size
    assert 0 < size - summary.packed_bytes - summary.other_bytes < 20000  # metadata
    assert [reader.name for reader in summary.readers if reader.loads] == ["gptqkit", "transformers", "llama.cpp"]
    assert "GGUF" in (tmp_path / "gguf" / "README.md").read_text()


def test_chosen_bits_convert_too(tmp_path):
    save(build(**{**NARROW, "num_hidden_layers": 1}), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "gptq", tokens(2), method="rtn", sym=True, target_bits=5.5)
    gptqkit.convert(tmp_path / "gptq", tmp_path / "gguf", format="gguf")
    before, after = (gptqkit.open_checkpoint(tmp_path / name) for name in ("gptq", "gguf"))
    assert len({spec.bits for spec in before.layers.values()}) > 1
    for name in before.layers:
        assert torch.equal(before.weight(name).dequantize(), after.weight(name).dequantize())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_columns_that_fill_no_block_stay_in_float(tmp_path, kind):
    model = build(**{**NARROW, "intermediate_size": 80})
    save(model, tmp_path / "float")
    report = quantize(tmp_path / "float", tmp_path / "out", tokens(2), type=kind, group_size=128, sym=True).report
    odd = [f"model.layers.{block}.mlp.down_proj" for block in range(2)]
    assert list(report.left_in_float) == odd
    assert all("80 columns" in why for why in report.left_in_float.values())
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", dtype="float32")
    for name in odd:
        assert torch.equal(decoded(loaded, name), model.get_submodule(name).weight)


def test_what_gptq_cannot_hold_does_not_go_back(tmp_path):
    save(build(num_hidden_layers=1), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="q4_k", method="rtn", group_size=128, sym=True)
    with pytest.raises(ConversionError, match="no integer zero point"):
        gptqkit.convert(tmp_path / "out", tmp_path / "gptq", format="gptq_v2")
    model, _ = gptqkit.load(tmp_path / "out", device="cpu")
    with pytest.raises(ConfigError, match="copy that"):
        model.save_pretrained(tmp_path / "again")
    quantize(tmp_path / "float", tmp_path / "wide", tokens(2), type="q6_k", method="rtn", group_size=128, sym=True)
    with pytest.raises(ConversionError, match="awq holds no 6-bit codes; quantize the float model again"):
        gptqkit.convert(tmp_path / "wide", tmp_path / "awq", format="awq")


LLAMA3_ROPE = {**LLAMA3, "original_max_position_embeddings": 32}
LOCAL = {"full_attention": {"rope_type": "default"}, "sliding_attention": {**LINEAR}}
STRETCHED = {"full_attention": {**YARN, "attention_factor": 2.0}}


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("Qwen2", {"use_sliding_window": True}, "use_sliding_window is True; llama.cpp runs qwen2 with False only"),
        ("Qwen3Moe", {"norm_topk_prob": False}, "norm_topk_prob is False; llama.cpp runs qwen3_moe with True only"),
        ("Qwen3Moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ("Gemma2", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8; llama.cpp takes 16"),
        ("Gemma2", FULL, "layer_types are all full_attention; llama.cpp runs gemma2 with windows only"),
        ("Gemma3Text", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8; llama.cpp takes 16"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("Gemma3Text", {"rope_parameters": LOCAL}, "rope_type of sliding attention is 'linear'; llama.cpp takes 'def"),
        ("Gemma3Text", {"rope_parameters": STRETCHED}, "attention_factor is of full attention only; llama.cpp takes"),
        ("Qwen2", {"rope_parameters": LLAMA3_ROPE}, "llama.cpp has no rotary positions of the type 'llama3' in qwen2"),
        ("Qwen2", {"rope_parameters": LONGROPE}, "llama.cpp has no rotary positions of the type 'longrope' in qwen2"),
    ],
)
def test_settings_that_llama_cpp_does_not_have_are_refused_by_name(kind, changed, message):
    fine = {"norm_topk_prob": True} if kind == "Qwen3Moe" else {"query_pre_attn_scalar": NARROW["head_dim"]}
    config = {**getattr(transformers, f"{kind}Config")(**NARROW).to_dict(), **fine}
    assert [value for key, value in metadata(config).items() if key.endswith(".block_count")] == [2]
    with pytest.raises(ArchitectureError, match=message):
        metadata({**config, **changed})


PHI3 = {"model_type": "phi3", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
PHI3 |= {"num_attention_heads": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "hidden_act": "silu"}


def test_settings_of_rotary_positions_where_older_files_have_them():
    older = metadata({**PHI3, "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    newer = metadata({**PHI3, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})
    assert older == newer
    assert older["phi3.rope.dimension_count"] == 8
    llama = {**PHI3, "model_type": "llama"}
    assert (
        metadata({**llama, "rope_scaling": {"type": "yarn", "factor": 4.0}})[
            "llama.rope.scaling.original_context_length"
        ]
        == 64
    )
    with pytest.raises(ArchitectureError, match=r"lacks settings that GGUF needs \('factor'\)"):
        metadata({**llama, "rope_scaling": {"type": "yarn"}})
    with pytest.raises(ArchitectureError, match=r"partial_rotary_factor is 0\.5; llama\.cpp runs llama with 1 only"):
        metadata({**llama, "partial_rotary_factor": 0.5})


OLDER = {"rope_theta": 2e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "rope_scaling": None}


@pytest.mark.parametrize(
    ("said", "theta", "factor"),
    [
        ({}, 2e6, None),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 2e6, 8.0),
        ({"rope_theta": None, "rope_local_base_freq": None, "sliding_window_pattern": None}, 1e6, None),
        ({"sliding_window_pattern": 3, "rope_local_base_freq": 5e3}, 2e6, None),
    ],
)
def test_gemma3_where_older_files_have_its_settings(said, theta, factor):
    """As transformers reads such a file, in which what is not said is the class's default."""
    said = {key: value for key, value in {**OLDER, **said}.items() if value is not None}
    older = {**NARROW, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, **said}
    config = transformers.Gemma3TextConfig(**older)
    found = metadata({**older, "model_type": "gemma3_text", "rms_norm_eps": config.rms_norm_eps})
    assert found == metadata(config.to_dict())
    assert found["gemma3.rope.freq_base"] == config.rope_parameters["full_attention"]["rope_theta"] == theta
    assert found.get("gemma3.rope.scaling.factor") == factor
    assert found["gemma3.attention.sliding_window"] == 8
    assert found["gemma3.rope.freq_base_swa"] == config.rope_parameters["sliding_attention"]["rope_theta"]


def test_settings_that_files_of_other_programs_leave_out():
    said = {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    said |= {**NARROW, "model_type": "mixtral"}
    assert metadata(said) == metadata(transformers.MixtralConfig(**said).to_dict())
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    with pytest.raises(ArchitectureError, match="lacks settings that GGUF needs"):
        metadata({**PHI3, "model_type": "llama", "rope_scaling": rope})


@pytest.mark.parametrize("pattern", [None, QWEN2])
def test_the_tokenizer_is_in_the_file(tmp_path, pattern):
    save(build(**{**NARROW, "num_hidden_layers": 1}), tmp_path / "float", pattern)
    quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="Q8_0", method="rtn", group_size=128, sym=True)
    file = tmp_path / "out" / "model.gguf"
    own = tokenizer(pattern)
    assert field(file, "tokenizer.ggml.pre") == ("qwen2" if pattern else "gpt-2")
    listed = field(file, "tokenizer.ggml.tokens")
    assert [listed[number] for number in range(len(own))] == own.convert_ids_to_tokens(list(range(len(own))))
    assert len(listed) == VOCAB
    kinds = field(file, "tokenizer.ggml.token_type")
    assert (kinds[0], kinds[5], kinds[-1]) == (3, 1, 5)  # control, normal, unused
    assert field(file, "tokenizer.ggml.bos_token_id") == 0


def test_sentence_pieces_are_read_as_the_same_tokenizer(tmp_path):
    own = sentence_pieces()
    save(build(**{**NARROW, "num_hidden_layers": 1}), tmp_path / "float", own)
    quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="Q8_0", method="rtn", group_size=128, sym=True)
    file = tmp_path / "out" / "model.gguf"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in ("the lazy dog", "quick brown foxes, 1234", "it's  true"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == own(text)["input_ids"]
    assert field(file, "tokenizer.ggml.add_space_prefix") is True
    kinds = field(file, "tokenizer.ggml.token_type")
    assert kinds[:4] == [2, 3, 3, 6]  # unknown, control, byte
    assert kinds[260] == 1


def test_models_and_tokenizers_that_are_not_written_are_refused_before_any_work(tmp_path):
    save(build("StableLm", **NARROW), tmp_path / "phi")
    with pytest.raises(
        ArchitectureError, match="models of the type 'stablelm' are not written as GGUF here; llama, mistral"
    ):
        quantize(tmp_path / "phi", tmp_path / "out", tokens(), type="Q4_0", group_size=128, sym=True)
    save(build(**NARROW, hidden_act="gelu"), tmp_path / "gelu")
    with pytest.raises(ArchitectureError, match=r"hidden_act is 'gelu'; llama\.cpp runs llama with 'silu' only"):
        quantize(tmp_path / "gelu", tmp_path / "out", tokens(), type="Q4_0", group_size=128, sym=True)
    save(build(**NARROW, rope_parameters=YARN | {"beta_fast": 16.0}), tmp_path / "yarn")
    with pytest.raises(ArchitectureError, match=r"beta_fast of yarn is 16\.0; llama\.cpp takes 32"):
        quantize(tmp_path / "yarn", tmp_path / "out", tokens(), type="Q4_0", group_size=128, sym=True)
    save(build(**NARROW), tmp_path / "words", r"\w+")
    with pytest.raises(ConversionError, match=r"BPE with the pre-tokenizer Split\+ByteLevel.* is not written as GGUF"):
        quantize(tmp_path / "words", tmp_path / "out", tokens(), type="Q4_0", group_size=128, sym=True)
    for file in (tmp_path / "words").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConversionError, match="there is no tokenizer"):
        quantize(tmp_path / "words", tmp_path / "out", tokens(), type="Q4_0", group_size=128, sym=True)
    save(build(**NARROW), tmp_path / "float")
    with pytest.raises(ConfigError, match="needs a type, such as Q4_K_M"):
        quantize(tmp_path / "float", tmp_path / "out", tokens(), format="gguf")
    assert not (tmp_path / "out").exists()


def test_report_and_card_of_what_was_gguf_name_no_type(tmp_path):
    """And the card of what was converted to GGUF names the groups that are there."""
    save(build(), tmp_path / "float")
    quantize(
        tmp_path / "float",
        tmp_path / "gguf",
        None,
        type="q4_0",
        method="rtn",
        group_size=128,
        sym=True,
        overrides={"o_proj": {"type": "q8_0"}},
    )
    gptqkit.convert(tmp_path / "gguf", tmp_path / "ct", format="compressed-tensors")
    config = gptqkit.QuantizeConfig.from_dict(
        json.loads((tmp_path / "ct/quantization_report.json").read_text())["config"]
    )
    assert (config.format, config.type, config.bits, config.group_size) == ("compressed-tensors", None, 4, 32)
    assert (config.overrides["o_proj"].type, config.overrides["o_proj"].bits) == (None, 8)
    assert "q4_0" not in (tmp_path / "ct/README.md").read_text().lower()
    quantize(tmp_path / "float", tmp_path / "gptq", None, method="rtn", group_size=64, sym=True)
    gptqkit.convert(tmp_path / "gptq", tmp_path / "again", format="gguf")
    assert "| group size | 32 |" in (tmp_path / "again/README.md").read_text()


def test_an_importance_matrix_is_the_sum_of_squares_of_inputs(tmp_path):
    model = build("Mixtral", **NARROW, num_local_experts=4).bfloat16()
    save(model, tmp_path / "float")
    calibration = {"source": tokens().input_ids, "samples": 6}
    gptqkit.imatrix(tmp_path / "float", calibration, tmp_path / "imatrix.gguf", run={"device": "cpu"})
    seen = {}

    def record(name):
        return lambda _, inputs: seen.setdefault(name, []).append(inputs[0].detach().reshape(-1, 64))

    for name in ("self_attn.v_proj", "post_attention_layernorm"):
        model.get_submodule(f"model.layers.1.{name}").register_forward_pre_hook(record(name))
    with torch.no_grad():
        model.float()(tokens().input_ids)  # in which a CPU computes
    found = {each.name: each.data for each in GGUFReader(tmp_path / "imatrix.gguf").tensors}
    rows = torch.cat(seen["self_attn.v_proj"])
    assert found["blk.1.attn_v.weight.in_sum2"].shape == (1, 64)
    assert np.allclose(found["blk.1.attn_v.weight.in_sum2"][0], rows.square().sum(0), rtol=1e-4)
    assert found["blk.1.attn_v.weight.counts"].tolist() == [[len(rows)]]
    assert found["blk.1.ffn_down_exps.weight.in_sum2"].shape == (4, 96)
    assert found["blk.1.ffn_gate_exps.weight.counts"].sum() == 2 * len(rows)
    assert field(tmp_path / "imatrix.gguf", "general.type") == "imatrix"
    assert field(tmp_path / "imatrix.gguf", "imatrix.chunk_count") == 6
    with pytest.raises(gptqkit.OutputExistsError):
        gptqkit.imatrix(tmp_path / "float", calibration, tmp_path / "imatrix.gguf")
    with pytest.raises(gptqkit.OutputExistsError):  # nor is a folder taken for a file to overwrite
        gptqkit.imatrix("nowhere", calibration, tmp_path / "float", run={"overwrite": True})
    (tmp_path / "text.txt").write_text("mine")
    with pytest.raises(gptqkit.OutputExistsError, match=r"text\.txt is no GGUF file, so it is not overwritten"):
        gptqkit.imatrix("nowhere", calibration, tmp_path / "text.txt", run={"overwrite": True})
    fewer, again = {"source": tokens(3).input_ids, "samples": 3}, {"device": "cpu", "overwrite": True}
    gptqkit.imatrix(tmp_path / "float", fewer, tmp_path / "imatrix.gguf", run=again)
    assert field(tmp_path / "imatrix.gguf", "imatrix.chunk_count") == 3
    with pytest.raises(ConfigError, match=r"there is no folder .*missing; make it"):
        gptqkit.imatrix("nowhere", calibration, tmp_path / "missing" / "imatrix.gguf")
    for name, value in (("resume", True), ("push_to_hub", "user/name")):
        with pytest.raises(ConfigError, match=f"{name} is of checkpoints"):
            gptqkit.imatrix("nowhere", calibration, tmp_path / "new.gguf", run={name: value})


def test_what_fits_into_no_gguf_file_is_left_out_of_an_importance_matrix_and_named(tmp_path, caplog):
    save(build(**{**NARROW, "intermediate_size": 80}), tmp_path / "float")
    calibration, out = {"source": tokens().input_ids, "samples": 6}, tmp_path / "imatrix.gguf"
    with pytest.raises(ConfigError, match=r"2 Linears stay in floating point: model\.layers\.0\.mlp\.down_proj"):
        gptqkit.imatrix(tmp_path / "float", calibration, out, run={"device": "cpu", "strict": True})
    assert not out.exists()
    gptqkit.imatrix(tmp_path / "float", calibration, out, run={"device": "cpu"})
    assert "2 Linears stay in floating point: model.layers.0.mlp.down_proj" in caplog.text
    names = {each.name.partition(".weight")[0] for each in GGUFReader(out).tensors}
    assert {"blk.0.ffn_up", "blk.1.attn_v"} < names
    assert not any("ffn_down" in name for name in names)


def test_llama3_frequencies_are_those_of_transformers(tmp_path):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model = build(**{**NARROW, "num_hidden_layers": 1}, rope_parameters=rope)
    save(model, tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="Q8_0", method="rtn", group_size=128, sym=True)
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    found = tensors(tmp_path / "out" / "model.gguf")["rope_freqs.weight"][0]
    assert torch.allclose(plain / found, model.model.rotary_emb.inv_freq, rtol=1e-5)


@pytest.mark.parametrize("said", [{}, {"factor": 2.0}, {"attention_factor": 1.5}], ids=str)
def test_longrope_is_written_as_transformers_computes_it(tmp_path, said):
    """As Phi-3's files have it: beside the settings, or among them, the length that short factors are for."""
    rope = {**LONGROPE, **said}
    original = rope.pop("original_max_position_embeddings")
    settings = {**NARROW, "pad_token_id": 0, "rope_parameters": rope, "original_max_position_embeddings": original}
    config = transformers.Phi3Config(**copy.deepcopy(settings))
    _, scale = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
    kind = rope.pop("rope_type")
    older = {**PHI3, "rope_scaling": {**rope, "type": kind}, "original_max_position_embeddings": original}
    for found in (metadata(config.to_dict()), metadata({**older, "rope_theta": 5000.0})):
        assert found[Keys.Rope.SCALING_ATTN_FACTOR.format(arch="phi3")] == pytest.approx(scale)
        assert found[Keys.Rope.SCALING_ORIG_CTX_LEN.format(arch="phi3")] == original
        assert found[Keys.Rope.SCALING_TYPE.format(arch="phi3")] == "longrope"
    save(build(**{**NARROW, "num_hidden_layers": 1}, rope_parameters=LONGROPE), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="Q8_0", method="rtn", group_size=128, sym=True)
    found = tensors(tmp_path / "out" / "model.gguf")
    for length in ("long", "short"):
        written, kind = found[f"rope_factors_{length}.weight"]
        assert kind == "F32"
        assert torch.equal(written, torch.tensor(LONGROPE[f"{length}_factor"]))


def test_the_folder_is_checked_like_any_other(tmp_path):
    save(build(**{**NARROW, "num_hidden_layers": 1}), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="Q4_0", method="rtn", group_size=128, sym=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(CheckpointError, match=r"96"):
        gptqkit.load(tmp_path / "other", device="cpu")
    scores = gptqkit.evaluate(tmp_path / "out" / "model.gguf", tokens().input_ids, {"sequence_length": 24})
    assert (
        scores.perplexity == gptqkit.evaluate(tmp_path / "out", tokens().input_ids, {"sequence_length": 24}).perplexity
    )


def test_experts_beyond_ten_stand_in_their_order(tmp_path):
    settings = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    model = build("Qwen3Moe", **{**NARROW, "num_hidden_layers": 1, **settings})
    save(model, tmp_path / "float")
    out = tmp_path / "out"
    quantize(tmp_path / "float", out, tokens(2, 16), type="Q8_0", method="rtn", group_size=128, sym=True)
    stacked = tensors(out / "model.gguf")["blk.0.ffn_down_exps.weight"][0]
    for number, found in enumerate(stacked):
        expected = model.model.layers[0].mlp.experts.down_proj[number].detach()
        assert float((found - expected).norm() / expected.norm()) < 0.02, number


@pytest.mark.parametrize("change", [{"type": "q4_0"}, {"type": "q8_0"}, {"skip": True}])
def test_experts_of_different_types_are_refused_before_any_work(tmp_path, change):
    save(build("Mixtral", **{**WIDE, "num_hidden_layers": 1, "num_local_experts": 2}), tmp_path / "float")
    settings = {"type": "q4_k", "method": "rtn", "group_size": 128, "sym": True}
    overrides, steps = {r"experts\.1\.up_proj": change}, []
    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp\.experts: the up_proj of all experts are one tensor in GGUF"
    ):
        quantize(
            tmp_path / "float", tmp_path / "out", tokens(2, 16), overrides=overrides, progress=steps.append, **settings
        )
    assert not steps


def test_checkpoints_with_experts_of_several_widths_are_not_converted(tmp_path):
    save(build("Mixtral", **{**WIDE, "num_hidden_layers": 1, "num_local_experts": 2}), tmp_path / "float")
    settings = {"method": "rtn", "group_size": 32, "sym": True, "overrides": {r"experts\.1\.up_proj": {"bits": 8}}}
    quantize(tmp_path / "float", tmp_path / "gptq", tokens(2, 16), bits=4, **settings)
    with pytest.raises(ConversionError, match=r"experts\.0\.\w+ and others that GGUF stacks differ in shape or type"):
        gptqkit.convert(tmp_path / "gptq", tmp_path / "gguf", format="gguf")


def test_a_gguf_file_that_reads_back_differently_is_refused(tmp_path, monkeypatch):
    save(build(**{**NARROW, "num_hidden_layers": 1}), tmp_path / "float")
    write, count = GGUFWriter.write_tensor_data, []

    def other(self, tensor, *rest, **named):
        count.append(tensor)
        if len(count) == 4:
            tensor = tensor.copy()
            tensor.reshape(-1)[-1] ^= 1
        return write(self, tensor, *rest, **named)

    monkeypatch.setattr(GGUFWriter, "write_tensor_data", other)
    with pytest.raises(CheckpointError, match="reads back differently"):
        quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="Q8_0", method="rtn", group_size=128, sym=True)


def test_what_llama_cpp_is_told_of_context_file_and_tokens(tmp_path):
    save(build("Mistral", **{**WIDE, "num_hidden_layers": 1, "sliding_window": 32}), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "out", tokens(2), type="Q4_K_M", method="rtn", group_size=128, sym=True)
    file = tmp_path / "out" / "model.gguf"
    assert field(file, "llama.context_length") == 32
    assert field(file, "general.file_type") == LlamaFileType.MOSTLY_Q4_K_M
    assert field(file, "tokenizer.ggml.add_bos_token") is False  # this tokenizer adds none


def altered(own, **parts):
    """A tokenizer with other parts."""
    own = copy.deepcopy(own)
    for name, part in parts.items():
        setattr(own.backend_tokenizer, name, part)
    return own


def test_what_a_tokenizer_puts_around_text_is_told():
    around = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    before = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    for processor, ends in ((around, (True, True)), (before, (True, False)), (None, (False, False))):
        own = tokenizer() if processor is None else altered(tokenizer(), post_processor=processor)
        values = tokenizer_metadata(own, VOCAB)
        assert tuple(values[f"tokenizer.ggml.add_{key}_token"] for key in ("bos", "eos")) == ends
        assert "tokenizer.chat_template" not in values
    own.chat_template = "{{ messages }}"
    assert tokenizer_metadata(own, VOCAB)["tokenizer.chat_template"] == "{{ messages }}"
    own.chat_template = None


def test_a_space_before_the_text_is_told_as_the_tokenizer_has_it():
    """Of SentencePiece's: by a normalizer, or as pre-tokenizer that does not split."""
    mark, words = tokenizers.normalizers.Replace(" ", "\u2581"), tokenizers.pre_tokenizers.Metaspace
    both = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("\u2581"), mark])
    for normalizer, pre_tokenizer in (
        (mark, None),
        (both, None),
        (None, words(prepend_scheme="never", split=False)),
        (None, words(prepend_scheme="first", split=False)),
    ):
        own = altered(sentence_pieces(), normalizer=normalizer, pre_tokenizer=pre_tokenizer)
        tokens = own.tokenize("the dog")
        assert tokenizer_metadata(own, VOCAB)["tokenizer.ggml.add_space_prefix"] == tokens[0].startswith("\u2581")


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": tokenizers.normalizers.Lowercase()},
        {"pre_tokenizer": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": tokenizers.pre_tokenizers.Whitespace()},
    ],
    ids=str,
)
def test_tokenizers_that_llama_cpp_would_read_otherwise_are_refused(parts):
    assert tokenizer_metadata(altered(tokenizer(), normalizer=tokenizers.normalizers.NFC()), VOCAB)
    with pytest.raises(ConversionError, match="is not written as GGUF here"):
        tokenizer_metadata(altered(tokenizer(), **parts), VOCAB)
    without_bytes = altered(sentence_pieces())
    without_bytes.backend_tokenizer.model.byte_fallback = False
    with pytest.raises(ConversionError, match="is not written as GGUF here"):
        tokenizer_metadata(without_bytes, VOCAB)
    with pytest.raises(ConversionError, match=r"the tokenizer has a token \d+, but the model only 200 embeddings"):
        tokenizer_metadata(tokenizer(), 200)


def test_what_is_merged_first_scores_highest():
    own = sentence_pieces()
    values = tokenizer_metadata(own, VOCAB)
    merges = json.loads(own.backend_tokenizer.to_str())["model"]["merges"]
    scores = [values["tokenizer.ggml.scores"][own.convert_tokens_to_ids("".join(pair))] for pair in merges]
    assert len(scores) > 10
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1]


def test_added_tokens_are_told_apart():
    """As the gguf package numbers kinds of tokens: a special one is not shown, a word of the user's is."""
    own = copy.deepcopy(tokenizer())
    own.add_tokens(["harbour-master"])
    own.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    values = tokenizer_metadata(own, VOCAB)
    kinds = [
        values["tokenizer.ggml.token_type"][own.convert_tokens_to_ids(each)] for each in ("harbour-master", "<turn>")
    ]
    assert kinds == [TokenType.USER_DEFINED, TokenType.CONTROL]
