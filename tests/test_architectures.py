"""Mixtures of experts, composite models and encoders, from files on disk to a checkpoint that runs."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import gptqkit
from gptqkit.calibration.windows import TokenWindows
from gptqkit.errors import NonFiniteError
from gptqkit.export.names import StoredNames
from gptqkit.export.reader import open_checkpoint
from gptqkit.quantizer.solver import solve_gptaq, solve_gptq
from gptqkit.quantizer.walk import quantize_blocks
from support.models import MIXTURES, OTHERS, build, windows

CPU = torch.device("cpu")


def settings(**changes):
    return gptqkit.QuantizeConfig(**{"bits": 4, "group_size": 32, "sym": False, **changes})


def outputs(model, tokens):
    mask = {} if tokens.attention_mask is None else {"attention_mask": tokens.attention_mask}
    with torch.no_grad():
        found = model(input_ids=tokens.input_ids, **mask)
    return found.logits if "logits" in found else found.last_hidden_state


def put(model, name, weight, names):
    """Dequantized weights in the place in the model that a stored matrix belongs to."""
    part = names.find(f"{name}.weight")
    parameter = model.get_parameter(part.parameter).data
    matrix = parameter if part.expert is None else parameter[part.expert]
    if part.expert is not None and model.get_submodule(part.parameter.rpartition(".")[0]).is_transposed:
        matrix = matrix.T
    rows = slice(None) if part.rows is None else part.rows
    matrix[rows] = weight.dequantize()


def stored_names(folder):
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    return found


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
@pytest.mark.parametrize("name", [*MIXTURES, *OTHERS])
def test_from_disk_to_a_checkpoint_that_runs(name, method, tmp_path):
    build(name).save_pretrained(tmp_path / "model")
    tokens = windows(samples=8)
    config = settings(method=method)
    result = gptqkit.quantize(
        tmp_path / "model", tokens.input_ids, tmp_path / "out", config, sequence_length=24, batch_size=3
    )
    whole = gptqkit.quantize(
        build(name), tokens.input_ids, tmp_path / "memory", config, sequence_length=24, batch_size=3
    )
    for module, weight in whole.weights.items():
        assert torch.equal(weight.codes, result.weights[module].codes)
    modules = result.report.modules
    assert sum(module.error for module in modules) < sum(module.rounding_error for module in modules)
    assert {module.method for module in modules} == {method}
    experts = [module for module in modules if ".experts." in module.name]
    for module in experts:
        assert module.prior_tokens == max(0, module.shape[1] - module.tokens)
    assert bool(experts) == (name in MIXTURES)
    assert any(module.prior_tokens for module in experts) == (name in MIXTURES)

    before, after = stored_names(tmp_path / "model"), stored_names(tmp_path / "out")
    replaced = {f"{module}.{key}" for module in result.weights for key in ("qweight", "qzeros", "scales", "g_idx")}
    lost = before - after
    if name == "gpt_oss":  # stacked in its files, one matrix per expert in ours
        lost = {key for key in lost if ".experts." not in key}
    assert lost <= {f"{module}.weight" for module in result.weights}
    if name != "gpt_oss":
        assert after - before == replaced

    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend="torch")
    expected = build(name)
    names = StoredNames(expected, before)
    for module, weight in result.weights.items():
        put(expected, module, weight, names)
    if name in MIXTURES:
        expected.config._experts_implementation = "eager"
    assert type(loaded) is type(expected)
    theirs = outputs(expected, tokens)
    assert torch.allclose(outputs(loaded, tokens), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert float((theirs - outputs(build(name), tokens)).norm() / theirs.norm()) < 0.5
    if name != "bert":
        scores = gptqkit.evaluate(tmp_path / "out", tokens.input_ids, sequence_length=24, device="cpu")
        assert scores.perplexity > 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", ["gptq", "gptaq"])
def test_every_expert_is_solved_on_the_tokens_routed_to_it(method, padded):
    """An independent loop over tokens, in the model whose attention is quantized already, with the rule for few."""
    tokens = windows(padded=padded)
    config = settings(method=method)
    result = quantize_blocks(build("mixtral"), tokens, config, device=CPU, batch_size=2)
    quantized, original = build("mixtral"), build("mixtral")
    names = StoredNames(quantized)
    for name, weight in result.weights.items():
        if name.startswith("model.layers.0.self_attn"):
            put(quantized, name, weight, names)
    seen = {}
    for key, model in (("x", quantized), ("float", original)):
        experts = model.model.layers[0].mlp.experts
        hook = experts.register_forward_pre_hook(lambda _, given, key=key: seen.setdefault(key, given))
        outputs(model, tokens)
        hook.remove()
    x, chosen, _ = seen["x"]
    x_float = seen["float"][0]
    counted = torch.ones(len(x), dtype=torch.bool) if not padded else tokens.attention_mask.flatten()
    inputs = {expert: [] for expert in range(4)}
    for token in range(len(x)):
        for expert in set(chosen[token].tolist()):
            if counted[token]:
                inputs[expert].append(token)
    every = [token for routed in inputs.values() for token in routed]

    def moment(rows, left):
        return x[rows].double().T @ left[rows].double()

    pool = moment(every, x) / len(every)
    pool_cross = (x_float - x)[every].double().T @ x[every].double() / len(every)
    for expert, rows in inputs.items():
        report = next(one for one in result.reports if one.name == f"model.layers.0.mlp.experts.{expert}.gate_up_proj")
        assert report.tokens == len(rows)
        missing = max(0, 64 - len(rows))
        assert report.prior_tokens == missing
        total = len(rows) + missing
        hessian = ((moment(rows, x) + missing * pool) / total).float()
        weight = original.model.layers[0].mlp.experts.gate_up_proj[expert].detach()
        if method == "gptaq":
            cross = (x_float - x)[rows].double().T @ x[rows].double()
            expected = solve_gptaq(weight, hessian, ((cross + missing * pool_cross) / total).float(), config).weight
        else:
            expected = solve_gptq(weight, hessian, config).weight
        assert (expected.codes != result.weights[report.name].codes).float().mean() < 0.01


def test_statistics_beyond_the_budget_take_several_passes_with_the_same_result():
    for method in ("gptq", "gptaq"):
        one = quantize_blocks(build("qwen3_moe"), windows(), settings(method=method), device=CPU)
        size = 64 * 64 * 8 * (2 if method == "gptaq" else 1)
        many = quantize_blocks(
            build("qwen3_moe"), windows(), settings(method=method), device=CPU, statistics_bytes=size
        )
        for name, weight in one.weights.items():
            assert torch.equal(weight.codes, many.weights[name].codes)
            assert torch.equal(weight.scale, many.weights[name].scale)


def test_without_true_sequential_no_module_sees_a_quantized_one_of_its_block():
    config = settings(true_sequential=False)
    one = quantize_blocks(build("mixtral"), windows(), config, device=CPU)
    several = quantize_blocks(build("mixtral"), windows(), config, device=CPU, statistics_bytes=1)
    for name, weight in one.weights.items():
        assert torch.equal(weight.codes, several.weights[name].codes)


def test_broken_samples_are_left_out_of_experts_too():
    model = build("mixtral")
    model.get_input_embeddings().weight.data[95] = torch.nan
    tokens = windows().input_ids.clamp(max=94)
    tokens[4, 3] = 95
    with pytest.raises(NonFiniteError, match="sample 4"):
        quantize_blocks(model, TokenWindows(tokens), settings(), device=CPU, batch_size=2)
    config = settings(skip_nonfinite=True)
    left_out = quantize_blocks(model, TokenWindows(tokens), config, device=CPU, batch_size=2)
    without = quantize_blocks(model, TokenWindows(tokens[[0, 1, 2, 3, 5]]), config, device=CPU, batch_size=2)
    assert left_out.excluded_samples == 1
    for name, weight in without.weights.items():
        assert (weight.codes != left_out.weights[name].codes).float().mean() < 0.02


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_an_override_skips_stay_in_floating_point(name, tmp_path):
    skip = {r"layers\.0\.mlp\.experts\.[02]\.": gptqkit.ModuleOverride(skip=True)}
    build(name).save_pretrained(tmp_path / "model")
    config = settings(overrides=skip)
    result = gptqkit.quantize(tmp_path / "model", windows().input_ids, tmp_path / "out", config, sequence_length=24)
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend="torch")
    expected = build(name)
    names = StoredNames(expected)
    for module, weight in result.weights.items():
        put(expected, module, weight, names)
    expected.config._experts_implementation = "eager"
    theirs = outputs(expected, windows())
    assert torch.allclose(outputs(loaded, windows()), theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_nothing_of_the_source_is_lost(tmp_path):
    """Tensors that transformers drops, such as those of a multi-token predictor, and files of processors."""
    model = tmp_path / "model"
    build("deepseek_v3").save_pretrained(model)
    extra = {"model.layers.3.eh_proj.weight": torch.randn(64, 128), "model.layers.3.enorm.weight": torch.randn(64)}
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, **extra}, model / "model.safetensors", metadata={"format": "pt"})
    (model / "preprocessor_config.json").write_text('{"size": 16}')
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (model / "modeling.py").write_text("raise SystemExit")
    gptqkit.quantize(model, windows().input_ids, tmp_path / "out", settings(), sequence_length=24)
    checkpoint = open_checkpoint(tmp_path / "out")
    for name, tensor in extra.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
    meta = json.loads((tmp_path / "out" / "quantize_config.json").read_text())["meta"]
    assert sorted(meta["carried_tensors"]) == sorted(extra)
    assert (tmp_path / "out" / "preprocessor_config.json").exists()
    assert (tmp_path / "out" / "1_Pooling" / "config.json").exists()
    assert not (tmp_path / "out" / "modeling.py").exists()
    gptqkit.load(tmp_path / "out", device="cpu")
