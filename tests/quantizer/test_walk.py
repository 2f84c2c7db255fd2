import dataclasses

import pytest
import torch
import transformers
from torch import nn

from gptqkit.calibration.windows import TokenWindows
from gptqkit.errors import ArchitectureError, ConfigError, NonFiniteError
from gptqkit.quantizer.config import ModuleOverride, QuantizeConfig
from gptqkit.quantizer.modules import find_blocks, find_targets, is_matrix, matrix
from gptqkit.quantizer.solver import solve_gptaq, solve_gptq
from gptqkit.quantizer.stream import BlockStream
from gptqkit.quantizer.walk import quantize_blocks
from support.models import MODELS, SIZE, build, windows

CPU = torch.device("cpu")
# Modules of the first block in the order in which they run; those in one tuple share an input.
STAGES = {
    "llama": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "phi3": [("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)],
    "opt": [("q_proj", "k_proj", "v_proj"), ("out_proj",), ("fc1",), ("fc2",)],
    "gpt2": [("c_attn",), ("c_proj",), ("c_fc",), ("c_proj",)],
    "gpt_neox": [("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",)],
    "falcon": [("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",)],
}
for name in ("mistral", "qwen2", "qwen3", "gemma2", "gemma3"):
    STAGES[name] = STAGES["llama"]


def settings(**changes):
    return QuantizeConfig(**{"bits": 4, "group_size": 32, "sym": False, **changes})


def inputs_of(model, name, tokens):
    """What one module receives in a plain forward pass, (tokens, in), padding removed."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        mask = {} if tokens.attention_mask is None else {"attention_mask": tokens.attention_mask}
        model(tokens.input_ids, **mask)
    hook.remove()
    x = seen[0].reshape(-1, seen[0].shape[-1])
    return x if tokens.attention_mask is None else x[tokens.attention_mask.flatten()]


@pytest.mark.parametrize("name", MODELS)
def test_stages_are_what_the_block_does(name):
    model = build(name)
    prefix, blocks = find_blocks(model)
    stream = BlockStream(model, blocks)
    batch = {"input_ids": windows().input_ids}
    targets = find_targets(blocks[0], f"{prefix}.0", settings())
    with torch.no_grad():
        groups = stream.trace(0, batch, stream.embed(batch), targets)
    found = [tuple(inner.rpartition(".")[2] for inner in stage) for group in groups for stage in group.stages]
    if name == "falcon":  # attention and MLP run in parallel, from two layer norms
        assert sorted(found) == sorted(STAGES[name])
    else:
        assert found == STAGES[name]
    assert len(blocks) == 2
    assert model.get_submodule(prefix) is blocks


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_block_by_block_equals_the_whole_forward_pass(name, padded):
    """Also with hidden states that the model did not compute in this pass, and different masks in different blocks."""
    model = build(name)
    tokens = windows(padded=padded)
    batch = {"input_ids": tokens.input_ids}
    if tokens.attention_mask is not None:
        batch["attention_mask"] = tokens.attention_mask
    seen = []
    _, blocks = find_blocks(model)
    stream = BlockStream(model, blocks)
    with torch.no_grad():
        hooks = [
            block.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
            for block in blocks
        ]
        model(**batch)
        for hook in hooks:
            hook.remove()
        hidden = stream.embed(batch)
        for layer, expected in enumerate(list(seen)):
            hidden = stream.run(layer, batch, hidden)
            assert torch.equal(hidden, expected)


def test_blocks_of_several_kinds_and_blocks_that_return_lists():
    several = {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_dt_rank": 32}
    jamba = transformers.JambaConfig(
        **SIZE, **several, intermediate_size=96, num_key_value_heads=2, num_experts=1, num_experts_per_tok=1
    )
    gpt = transformers.OpenAIGPTConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64)
    skip = {r"mamba\.(x|dt)_proj": ModuleOverride(skip=True)}
    for architecture, overrides, count in ((jamba, skip, 12), (gpt, {}, 8)):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(architecture).eval()
        result = quantize_blocks(model, windows(), settings(method="gptaq", overrides=overrides), device=CPU)
        assert len(result.weights) == count


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_quantized_better_than_by_rounding(name, method):
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = quantize_blocks(model, windows(), settings(method=method), device=CPU, batch_size=4)
    _, blocks = find_blocks(model)
    matrices = [module for module in blocks.modules() if is_matrix(module)]
    assert len(result.weights) == len(result.reports) == len(matrices)
    assert sum(report.error for report in result.reports) < sum(report.rounding_error for report in result.reports)
    assert result.tokens == 6 * 24
    for key, value in model.state_dict().items():  # the model itself is left as it was
        assert torch.equal(value, before[key])
    for name_, weight in result.weights.items():
        assert weight.dequantize().shape == matrix(model.get_submodule(name_)).shape


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("true_sequential", [True, False])
@pytest.mark.parametrize("method", ["gptq", "gptaq"])
def test_each_module_is_solved_on_the_inputs_of_the_quantized_model(method, true_sequential, padded):
    """An independent walk: replace weights in a copy of the model one stage after the other, whole forward passes."""
    model = build("llama")
    tokens = windows(padded=padded)
    config = settings(method=method, true_sequential=true_sequential)
    result = quantize_blocks(model, tokens, config, device=CPU, batch_size=2)
    quantized = build("llama")
    stages = [
        [f"model.layers.{layer}.{name}" for name in names]
        for layer in range(2)
        for names in (
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        )
    ]
    if not true_sequential:
        stages = [[name for stage in half for name in stage] for half in (stages[:4], stages[4:])]
    for stage in stages:
        x = {name: inputs_of(quantized, name, tokens) for name in stage}
        for name in stage:
            weight = model.get_submodule(name).weight.detach()
            hessian = x[name].T @ x[name] / len(x[name])
            if method == "gptaq":
                cross = (inputs_of(model, name, tokens) - x[name]).T @ x[name] / len(x[name])
                expected = solve_gptaq(weight, hessian, cross, config).weight
            else:
                expected = solve_gptq(weight, hessian, config).weight
            # Sums in another order differ in the last bit, which can tip a rare code.
            assert (expected.codes != result.weights[name].codes).float().mean() < 0.01
        for name in stage:
            quantized.get_submodule(name).weight.data = result.weights[name].dequantize()


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
def test_batch_size_and_padding_do_not_matter(method):
    """Samples padded to one length give the statistics of the same samples run one by one."""
    model = build("qwen2")
    tokens = windows(padded=True)
    one, three, all_of_them = (
        quantize_blocks(model, tokens, settings(method=method), device=CPU, batch_size=size) for size in (1, 3, 6)
    )
    assert one.tokens == int(tokens.attention_mask.sum())
    for other in (three, all_of_them):
        for name in ("q_proj", "k_proj", "v_proj"):  # later modules drift apart as single codes tip
            first, second = (result.weights[f"model.layers.0.self_attn.{name}"].codes for result in (one, other))
            assert (first != second).float().mean() < 0.01
        for first, second in zip(one.reports, other.reports, strict=True):
            assert first.error == pytest.approx(second.error, rel=0.1)
            assert first.rounding_error == pytest.approx(second.rounding_error, rel=0.01)


def test_errors_are_those_of_the_outputs():
    model = build("mistral")
    result = quantize_blocks(model, windows(), settings(true_sequential=False), device=CPU)
    for name in ("q_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{name}"
        x, weight = inputs_of(model, name, windows()), model.get_submodule(name).weight.detach()
        expected = (x @ (weight - result.weights[name].dequantize()).T).norm() / (x @ weight.T).norm()
        report = next(report for report in result.reports if report.name == name)
        assert report.error == pytest.approx(float(expected), rel=1e-3)


def test_rounding_needs_no_calibration_and_reports_no_error():
    model = build("gpt2")
    result = quantize_blocks(model, None, settings(method="rtn"), device=CPU)
    assert len(result.weights) == 8
    assert all(report.error is None for report in result.reports)
    with_tokens = quantize_blocks(model, windows(), settings(method="rtn"), device=CPU)
    for name, weight in result.weights.items():
        assert torch.equal(weight.codes, with_tokens.weights[name].codes)
    assert all(report.error == report.rounding_error for report in with_tokens.reports)


def test_overrides_choose_bits_groups_and_what_stays():
    config = settings(
        overrides={
            r"layers\.0\.": ModuleOverride(bits=8, group_size=-1),
            r"down_proj": ModuleOverride(skip=True),
        }
    )
    result = quantize_blocks(build("llama"), windows(), config, device=CPU)
    assert len(result.weights) == 13
    assert result.weights["model.layers.0.mlp.down_proj"].group_size == 96
    assert {weight.bits for name, weight in result.weights.items() if ".0." in name} == {8}
    assert "model.layers.1.mlp.down_proj" not in result.weights
    assert result.block_weights - result.quantized_weights == 64 * 96


def test_an_override_that_matches_nothing_is_a_mistake():
    config = settings(overrides={"lm_head": ModuleOverride(skip=True), "donw_proj": ModuleOverride(bits=8)})
    with pytest.raises(ConfigError, match=r"'donw_proj' matches no Linear .* model.layers.0.self_attn.q_proj"):
        quantize_blocks(build("llama"), windows(), config, device=CPU)


@pytest.mark.parametrize("method", ["gptq", "gptaq"])
def test_the_output_layer_on_request(method):
    model = build("mistral")
    result = quantize_blocks(model, windows(), settings(lm_head=True, method=method), device=CPU)
    assert result.weights["lm_head"].codes.shape == (96, 64)
    assert result.reports[-1].layer is None
    assert result.reports[-1].error < result.reports[-1].rounding_error
    with pytest.raises(ConfigError, match="shares its weight with the input embedding"):
        quantize_blocks(build("llama"), windows(), settings(lm_head=True), device=CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 80}, r"model.layers.0.mlp.gate_proj is \(80, 64\)"),
        ({"intermediate_size": 160, "group_size": 64}, "model.layers.0.mlp.down_proj has 160 input features"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name_before_any_work(changes, message):
    group_size = changes.pop("group_size", 16)
    model = build("mistral", **changes)
    worked = []
    with pytest.raises(ConfigError, match=message):
        quantize_blocks(model, windows(), settings(group_size=group_size), device=CPU, progress=worked.append)
    assert not worked


def test_non_finite_activations_stop_the_run_or_are_left_out():
    model = build("mistral")
    tokens = windows()
    tokens.input_ids[4, 3] = 95
    model.get_input_embeddings().weight.data[95] = torch.nan
    for other in (0, 1, 2, 3, 5):
        tokens.input_ids[other].clamp_(max=94)
    with pytest.raises(NonFiniteError, match=r"layers.0.self_attn.q_proj, block 0, calibration sample 4"):
        quantize_blocks(model, tokens, settings(), device=CPU, batch_size=2)
    left_out = quantize_blocks(model, tokens, settings(skip_nonfinite=True, method="gptaq"), device=CPU, batch_size=2)
    assert left_out.excluded_samples == 1
    assert left_out.tokens == 5 * 24
    kept = TokenWindows(tokens.input_ids[[0, 1, 2, 3, 5]])
    without = quantize_blocks(model, kept, settings(method="gptaq"), device=CPU, batch_size=2)
    for name, weight in without.weights.items():
        assert (weight.codes != left_out.weights[name].codes).float().mean() < 0.02


def test_leaving_out_stops_where_no_sample_is_left():
    model = build("mistral")
    model.model.layers[1].input_layernorm.weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"none is left at the inputs of model.layers.1.self_attn.q_proj, block 1"):
        quantize_blocks(model, windows(), settings(skip_nonfinite=True), device=CPU, batch_size=4)


def test_batches_hold_at_least_one_sample():
    with pytest.raises(ConfigError, match="batch_size is 0"):
        quantize_blocks(build("mistral"), windows(), settings(), device=CPU, batch_size=0)


def test_a_forward_that_somebody_put_on_a_block_stays():
    model = build("llama")
    block = model.model.layers[0]
    calls = []

    def counting(*arguments, **named):
        calls.append(1)
        return type(block).forward(block, *arguments, **named)

    block.forward = counting
    quantize_blocks(model, windows(), settings(), device=CPU)
    assert calls
    assert block.forward is counting


def test_modules_that_never_run_are_named():
    model = build("mistral")
    model.model.layers[1].mlp.spare = nn.Linear(64, 64)
    with pytest.raises(ArchitectureError, match=r"model.layers.1.mlp.spare: not called"):
        quantize_blocks(model, windows(), settings(), device=CPU)
    with pytest.raises(ArchitectureError, match="no list of repeated blocks"):
        quantize_blocks(nn.Sequential(nn.Linear(32, 32)), windows(), settings(), device=CPU)


def test_half_precision_models_are_walked_in_float32_on_the_cpu():
    model = build("llama").to(torch.bfloat16)
    result = quantize_blocks(model, windows(), settings(method="gptaq"), device=CPU)
    reference = quantize_blocks(
        build("llama").to(torch.bfloat16).float(), windows(), settings(method="gptaq"), device=CPU
    )
    for name, weight in result.weights.items():
        assert torch.equal(weight.codes, reference.weights[name].codes)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_progress_names_every_module_once():
    steps = []
    result = quantize_blocks(build("opt"), windows(), settings(), device=CPU, progress=steps.append)
    assert [step.module for step in steps] == [report.name for report in result.reports]
    assert [step.done for step in steps] == list(range(1, 13))
    assert {step.total for step in steps} == {12}
    assert all(dataclasses.asdict(step)["error"] is not None for step in steps)
