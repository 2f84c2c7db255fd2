"""Every architecture from disk to an evaluated checkpoint: solved = stored = loaded = evaluated."""

import dataclasses
import json
import math
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

import gptqkit
from gptqkit.quantizer import gptq
from support.models import MIXTURES, MODELS, OTHERS, build, samples, save
from support.pipeline import assert_close, dequantized, outputs, quantize

# All bits, grids and formats, spread over the architectures beside methods, orders and dtypes of the files.
GRIDS = [
    {"bits": bits, "sym": sym, "format": layout}
    for bits, sym, layout in product((2, 3, 4, 8), (True, False), ("gptq", "gptq_v2"))
]
ORDERS = [
    {},
    {"desc_act": True},
    {"desc_act": True, "static_groups": True},
    {"act_group_aware": False, "true_sequential": False},
    {"group_size": -1},
]
METHODS = ("gptaq", "gptq", "rtn")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = {
    name: ({**GRIDS[number % 16], **ORDERS[number % 5], "method": METHODS[number % 3]}, DTYPES[number // 3 % 3])
    for number, name in enumerate([*MODELS, *MIXTURES, *OTHERS])
}


@pytest.fixture
def solved(monkeypatch):
    """What solvers return, by the bytes of the weight that they were given."""
    found = {}
    for name in ("RTN", "GPTQ", "GPTAQ"):
        method = getattr(gptq, name)

        def solve(weight, *rest, method=method):
            solution = method.solve(weight, *rest)
            found[weight.numpy().tobytes()] = solution.weight
            return solution

        monkeypatch.setattr(gptq, name, dataclasses.replace(method, solve=solve))
    return found


def float_matrix(name, source):
    """The float weight, (out, in), that a checkpoint's name stands for in the files of its source."""
    if f"{name}.weight" in source:
        weight = source[f"{name}.weight"]
        return weight.T if any(each.endswith("c_attn.weight") for each in source) else weight
    path, number, part = name.rsplit(".", 2)  # gpt_oss stacks its experts, (in, out)
    stack = source[f"{path}.{'down' if part == 'down_proj' else 'gate_up'}_proj"][int(number)].T
    return {"gate_proj": stack[::2], "up_proj": stack[1::2], "down_proj": stack}[part]


@pytest.mark.parametrize("name", CASES)
def test_from_disk_to_an_evaluated_checkpoint(name, solved, tmp_path):
    settings, dtype = CASES[name]
    tokens = samples(padded=name in ("mistral", "gpt_neox", "qwen3_moe", "bert"))
    source = save(build(name).to(dtype), tmp_path / "model")
    result = quantize(tmp_path / "model", tmp_path / "out", tokens, **settings)
    modules, checkpoint = result.report.modules, gptqkit.open_checkpoint(tmp_path / "out")

    assert len(modules) == len(checkpoint.layers) == len(solved)
    for layer in checkpoint.layers:
        expected = solved[float_matrix(layer, source).float().contiguous().numpy().tobytes()]
        for part in ("codes", "scale", "offset", "group_index"):
            assert torch.equal(getattr(checkpoint.weight(layer), part), getattr(expected, part)), (layer, part)
    replaced = {f"{layer}.{key}" for layer in checkpoint.layers for key in ("qweight", "qzeros", "scales", "g_idx")}
    others = source.keys() - {f"{layer}.weight" for layer in checkpoint.layers}
    if name == "gpt_oss":
        others = {each for each in others if ".experts." not in each}
        others |= {f"{layer}.bias" for layer in checkpoint.layers if ".experts." in layer}
    assert set(checkpoint.tensors.where) == replaced | others
    for each in others & source.keys():
        assert torch.equal(checkpoint.tensor(each), source[each])

    assert {module.method for module in modules} == {settings["method"]}
    errors, rounded = (sum(getattr(module, key) for module in modules) for key in ("error", "rounding_error"))
    assert errors == rounded if settings["method"] == "rtn" else errors < rounded
    assert {module.name for module in modules if module.prior_tokens} <= {
        module.name for module in modules if ".experts." in module.name and module.tokens < module.shape[1]
    }

    theirs = dequantized(tmp_path / "out", tmp_path / "model", tmp_path / "dense")
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend="torch", dtype="float32")
    assert type(loaded) is type(theirs)
    expected = outputs(theirs, tokens)
    assert_close(outputs(loaded, tokens), expected)
    ids = samples().input_ids
    how = gptqkit.Evaluation(sequence_length=24, device="cpu", dtype="float32")
    scores = gptqkit.evaluate(tmp_path / "out", ids, how, reference=tmp_path / "model")
    if name == "bert":
        assert 0.5 < scores.lowest_cosine <= scores.cosine < 1
        return
    losses = torch.nn.functional.cross_entropy(outputs(theirs)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert scores.perplexity == pytest.approx(math.exp(losses), rel=1e-5)
    assert scores.kl_divergence > 0


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_an_override_leaves_in_floating_point(name, tmp_path):
    save(build(name), tmp_path / "model")
    overrides = {
        r"layers\.0\.mlp\.experts\.[02]\.": gptqkit.ModuleOverride(skip=True),
        r"layers\.1\.mlp\.experts\.\d\.down_proj": gptqkit.ModuleOverride(skip=True),
        r"experts\.3\.": gptqkit.ModuleOverride(bits=8, group_size=16),
    }
    report = quantize(tmp_path / "model", tmp_path / "out", overrides=overrides).report
    assert len(report.modules) == 2 * 4 + 2 * 3 + 4 * 2
    assert {module.bits for module in report.modules if "experts.3" in module.name} == {8}
    theirs = dequantized(tmp_path / "out", tmp_path / "model", tmp_path / "dense")
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend="torch")
    assert_close(outputs(loaded), outputs(theirs))


def test_nothing_of_the_source_is_lost(tmp_path):
    """Tensors that transformers drops, such as those of a multi-token predictor, and files of processors."""
    model = tmp_path / "model"
    extra = {"model.layers.3.eh_proj.weight": torch.randn(64, 128), "model.layers.3.enorm.weight": torch.randn(64)}
    tensors = save(build("deepseek_v3"), model)
    save_file({**tensors, **extra}, model / "model.safetensors", metadata={"format": "pt"})
    (model / "preprocessor_config.json").write_text('{"size": 16}')
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (model / "modeling.py").write_text("raise SystemExit")
    quantize(model, tmp_path / "out", method="rtn")
    for name, tensor in extra.items():
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], tensor)
    meta = json.loads((tmp_path / "out" / "quantize_config.json").read_text())["meta"]
    assert sorted(meta["passthrough_tensors"]) == sorted(extra)
    assert (tmp_path / "out" / "preprocessor_config.json").exists()
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    assert not (tmp_path / "out" / "modeling.py").exists()
    gptqkit.load(tmp_path / "out", device="cpu")
