"""The pipeline against slow references: whole forward passes with hooks, and sums over tokens in float64."""

import weakref
from functools import partialmethod

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

import gptqkit
from gptqkit import subsets
from gptqkit.assembly import differs
from gptqkit.calibration.samples import Samples
from gptqkit.errors import (
    ArchitectureError,
    CalibrationError,
    ConfigError,
    DatasetUnavailableError,
    NonFiniteError,
    OutputExistsError,
)
from gptqkit.streams import Streams
from support.jobs import contents
from support.models import build, overflowing, samples, save
from support.pipeline import float_matrix, outputs, quantize, share_that_differs, weights
from support.solvers import solve_gptaq, solve_gptq, solve_loaq, solve_rtn

SKIP = gptqkit.ModuleOverride(skip=True)


def inputs_of(model, name, tokens):
    """What one module receives in a plain forward pass, (tokens, in), padding removed."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    outputs(model, tokens)
    hook.remove()
    x = seen[0].flatten(0, -2).double()
    return x if tokens.attention_mask is None else x[tokens.attention_mask.flatten()]


def solve(weight, hessian, cross, config, drift=None):
    """The solver on moments that were summed in float64."""
    if config.method == "loaq":
        return solve_loaq(weight, hessian.float(), cross.float(), drift, config).weight
    if config.method == "gptaq":
        return solve_gptaq(weight, hessian.float(), cross.float(), config).weight
    return solve_gptq(weight, hessian.float(), config).weight


SUBSETS = [
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    ["self_attn.o_proj"],
    ["mlp.gate_proj", "mlp.up_proj"],
    ["mlp.down_proj"],
]
ADDED_TO = {"self_attn.o_proj": "", "mlp.down_proj": ".post_attention_layernorm"}


def test_the_fewer_tokens_calibrate_a_layer_the_more_it_is_damped(tmp_path):
    """Experts by the tokens that are routed to them, filled up to one per column."""
    report = quantize(build("mixtral"), tmp_path / "out", samples(16), grid="minmax", damp_percent=None).report
    for module in report.modules:
        tokens = module.tokens + module.prior_tokens
        assert module.damp_percent == pytest.approx(0.01 + min(1.0, module.shape[1] / tokens) ** 0.5)
    assert len({module.tokens for module in report.modules}) > 3


@pytest.mark.parametrize(
    ("method", "true_sequential", "padded"),
    [
        ("gptq", False, False),
        ("gptaq", True, False),
        ("loaq", True, True),
        pytest.param("gptq", True, True, marks=pytest.mark.slow),
        pytest.param("gptaq", False, True, marks=pytest.mark.slow),
    ],
)
def test_each_module_is_solved_on_the_inputs_of_the_quantized_model(method, true_sequential, padded, tmp_path):
    tokens, model, quantized = samples(padded=padded), *(build("llama", tie_word_embeddings=False) for _ in range(2))
    config = gptqkit.QuantizeConfig(group_size=32, sym=False, method=method)
    overrides = {r"layers\.1.*k_proj": SKIP, r"layers\.1.*q_proj": gptqkit.ModuleOverride(bits=3, group_size=-1)}
    chosen = {"method": method, "true_sequential": true_sequential, "overrides": overrides, "lm_head": True}
    chosen["refine_rounds"] = config.refine_rounds
    report = quantize(model, tmp_path / "out", tokens, **chosen).report
    reports = {each.name: each for each in report.modules}
    solved = weights(tmp_path / "out")
    stages = [[f"model.layers.{layer}.{name}" for name in names] for layer in range(2) for names in SUBSETS]
    if not true_sequential:
        stages = [[name for names in of_block for name in names] for of_block in (stages[:4], stages[4:])]
    stages = [[name for name in stage if name != "model.layers.1.self_attn.k_proj"] for stage in [*stages, ["lm_head"]]]
    assert list(reports) == [name for stage in stages for name in stage]
    sizes = {name: tensor.numel() for name, tensor in model.model.layers.named_parameters() if tensor.ndim == 2}
    assert report.block_weights == sum(sizes.values())  # of which one stays in floating point; lm_head is no block's
    assert report.quantized_weights == report.block_weights - sizes["1.self_attn.k_proj.weight"]
    for stage in stages:
        x, states = {name: inputs_of(quantized, name, tokens) for name in stage}, {}
        for name in stage:
            block, leaf = name[:14], name[15:]
            if leaf in ADDED_TO:
                states[name] = [inputs_of(each, block + ADDED_TO[leaf], tokens) for each in (model, quantized)]
        for name in stage:
            weight, found = model.get_submodule(name).weight.detach(), solved[name]
            hessian = x[name].T @ x[name] / len(x[name])
            cross = (inputs_of(model, name, tokens) - x[name]).T @ x[name] / len(x[name])
            drift = None
            if name in states:
                drift = ((states[name][0] - states[name][1]).T @ x[name] / len(x[name])).float()
            own = config
            if name == "model.layers.1.self_attn.q_proj":
                own = gptqkit.QuantizeConfig(bits=3, group_size=-1, sym=False, method=method)
            assert share_that_differs(solve(weight, hessian, cross, own, drift), found) < 0.01
            rounded = solve_rtn(weight, own.plain_rounding()).weight
            for each, reported in ((found, reports[name].error), (rounded, reports[name].rounding_error)):
                lost = x[name] @ (weight - each.dequantize()).T.double()
                assert reported == pytest.approx(float(lost.norm() / (x[name] @ weight.T.double()).norm()), rel=1e-3)
            assert reports[name].tokens == len(x[name])
        for name in stage:
            quantized.get_submodule(name).weight.data = solved[name].dequantize()


def test_plain_rounding_beside_any_method_is_what_rtn_comes_to(tmp_path):
    """Whatever grids are searched for; q, k and v of the first block see the same either way."""
    model = build("llama", num_hidden_layers=1)
    rounded = quantize(model, tmp_path / "rtn", bits=2, method="rtn").report.modules[:3]
    searched = quantize(model, tmp_path / "mse", bits=2, grid="mse").report.modules[:3]
    assert [each.rounding_error for each in searched] == [pytest.approx(each.error) for each in rounded]
    assert all(each.error < each.rounding_error for each in searched)


def test_what_refinement_leaves_of_the_loss_is_told(tmp_path):
    """The loss is the square of the error but for damping; q, k and v see the same either way."""
    model, settings = build("llama", num_hidden_layers=1), {"bits": 2, "damp_percent": 1e-6}
    plain, refined = (
        quantize(model, tmp_path / str(rounds), refine_rounds=rounds, **settings).report.modules[:3]
        for rounds in (0, 2)
    )
    for before, after in zip(plain, refined, strict=True):
        assert before.refined is None
        assert after.refined == pytest.approx((after.error / before.error) ** 2, abs=1e-3)
        assert after.refined < 0.98


STACKED = pytest.param("gpt_oss", "gptaq", False, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "method", "padded"), [("mixtral", "gptq", True), STACKED])
def test_every_expert_is_solved_on_the_tokens_routed_to_it(name, method, padded, tmp_path):
    """A loop over tokens in the model whose attention is quantized already; few are filled up with what all receive."""
    tokens, config = samples(padded=padded), gptqkit.QuantizeConfig(group_size=32, sym=False, method=method)
    source = save(build(name), tmp_path / "model")
    how = {"method": method, "refine_rounds": config.refine_rounds}
    result = quantize(tmp_path / "model", tmp_path / "out", tokens, **how)
    reports, solved = {each.name: each for each in result.report.modules}, weights(tmp_path / "out")
    quantized, original = build(name), build(name)
    for part in "qkvo":
        attention = f"model.layers.0.self_attn.{part}_proj"
        quantized.get_submodule(attention).weight.data = solved[attention].dequantize()
    seen = {}
    for key, model in (("x", quantized), ("float", original)):
        hook = model.model.layers[0].mlp.experts.register_forward_pre_hook(
            lambda _, given, key=key: seen.setdefault(key, given)
        )
        outputs(model, tokens)
        hook.remove()
    x, chosen, _ = seen["x"]
    counts = torch.ones(len(x), dtype=torch.bool) if not padded else tokens.attention_mask.flatten()
    rows = [[token for token in range(len(x)) if counts[token] and number in chosen[token]] for number in range(4)]
    stored = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if name == "mixtral" else {}
    path = "model.layers.0." + ("block_sparse_moe.experts" if stored else "mlp.experts")

    def intermediate(inputs, number, weight_of):
        experts, halves = original.model.layers[0].mlp.experts, []
        for part in ("gate_proj", "up_proj"):
            halves.append(inputs @ weight_of(f"{path}.{number}.{stored.get(part, part)}").T)
            if experts.has_bias:
                halves[-1] += experts.gate_up_proj_bias[number].detach().chunk(2)[part == "up_proj"]
        return experts._apply_gate(torch.cat(halves, -1))

    for part in ("gate_proj", "up_proj", "down_proj"):
        inputs, floats = ([each[chosen] for chosen in rows] for each in (x, seen["float"][0]))
        if part == "down_proj":
            inputs = [intermediate(each, n, lambda key: solved[key].dequantize()) for n, each in enumerate(inputs)]
            floats = [intermediate(each, n, lambda key: float_matrix(key, source)) for n, each in enumerate(floats)]
        inputs, floats = ([each.double() for each in stream] for stream in (inputs, floats))
        pool, pool_floats = torch.cat(inputs), torch.cat(floats)
        for number, (own, own_floats) in enumerate(zip(inputs, floats, strict=True)):
            key = f"{path}.{number}.{stored.get(part, part)}"
            report, weight = reports[f"model.layers.0.mlp.experts.{number}.{part}"], float_matrix(key, source)
            missing = max(0, weight.shape[1] - len(own))
            assert (report.tokens, report.prior_tokens, report.method) == (len(own), missing, method)
            hessian, cross = (
                (left.T @ own + missing * (whole.T @ pool) / len(pool)) / (len(own) + missing)
                for left, whole in ((own, pool), (own_floats - own, pool_floats - pool))
            )
            assert share_that_differs(solve(weight, hessian, cross, config), solved[key]) < 0.01
    assert any(report.prior_tokens for report in reports.values())


@pytest.mark.parametrize(("method", "together"), [("gptaq", False), pytest.param("gptq", True, marks=pytest.mark.slow)])
def test_statistics_beyond_the_budget_take_several_passes(method, together, tmp_path, monkeypatch):
    settings = {"method": method, "grid": "minmax", "true_sequential": not together, "two_sided": together}
    one = quantize(build("qwen3_moe", num_hidden_layers=1), tmp_path / "one", **settings).report.modules
    monkeypatch.setattr(subsets, "STATISTICS_BYTES", 1 if method == "gptq" else 64 * 64 * 16)
    make, live, most = Streams._statistics, weakref.WeakSet(), []

    def counted(*arguments):
        live.add(made := make(*arguments))
        most.append(len(live))
        return made

    monkeypatch.setattr(Streams, "_statistics", counted)
    several = quantize(build("qwen3_moe", num_hidden_layers=1), tmp_path / "several", **settings).report.modules
    assert max(most) == (5 if method == "gptaq" else 3)  # of one portion, and pools
    for first, second in zip(one, several, strict=True):
        assert (first.name, first.tokens, first.prior_tokens) == (second.name, second.tokens, second.prior_tokens)
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "several")
    assert max(share_that_differs(expected[name], found[name]) for name in expected) < 0.01


def test_places_of_hidden_states_repetitions_and_folders_give_the_same_files(tmp_path):
    """A loaded model goes through a folder, in whatever mode it is, and stays as it was; a bfloat16 one, too."""
    model = build("llama").bfloat16().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save(model, tmp_path / "model")
    steps = []
    settings = {"method": "gptaq", "grid": "minmax"}
    for place in ("device", "memory", "disk"):
        source = model if place == "disk" else tmp_path / "model"
        quantize(source, tmp_path / place, **settings, run={"activations": place}, progress=steps.append)
    files = [(tmp_path / place / "model.safetensors").read_bytes() for place in ("device", "memory", "disk")]
    assert files[0] == files[1] == files[2]
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    quantize(model.float(), tmp_path / "float32", **settings)  # on a CPU everything is computed in float32
    expected, found = weights(tmp_path / "float32"), weights(tmp_path / "disk")
    assert all(torch.equal(found[name].codes, expected[name].codes) for name in expected)
    assert [step.done for step in steps] == [*range(1, 15)] * 3
    assert {(step.stage, step.total, step.error < step.rounding_error) for step in steps} == {("quantize", 14, True)}
    assert len({step.module for step in steps}) == 14


def test_rounding_needs_no_calibration_and_reports_no_error(tmp_path):
    save(build("gpt2"), tmp_path / "model")
    config = gptqkit.QuantizeConfig(group_size=32, method="rtn")
    run = gptqkit.Run(device="cpu")
    report = gptqkit.quantize(tmp_path / "model", None, tmp_path / "without", config, run=run).report
    assert all(module.error is module.tokens is None for module in report.modules)
    found = weights(tmp_path / "without")
    for name, weight in weights(quantize(tmp_path / "model", tmp_path / "with", method="rtn", sym=True).path).items():
        assert torch.equal(weight.codes, found[name].codes)
        rounded = solve_rtn(build("gpt2").get_submodule(name).weight.T, config).weight
        assert torch.equal(rounded.codes, found[name].codes)


def test_calibration_comes_as_a_dictionary_too(tmp_path):
    settings, model = {"source": samples().input_ids.tolist(), "samples": 3, "sequence_length": 20}, build("llama")
    for out, given in (("dictionary", settings), ("record", gptqkit.Calibration(**settings))):
        gptqkit.quantize(model, given, tmp_path / out, {"quality": "fast", "group_size": 32}, run={"device": "cpu"})
    assert contents(tmp_path / "dictionary") == contents(tmp_path / "record")
    with pytest.raises(ConfigError, match="'sample' is not a setting of Calibration; did you mean samples"):
        gptqkit.quantize(model, {"source": "a.txt", "sample": 3}, tmp_path / "out")
    for progress in (True, gptqkit.ProgressDisplay):
        with pytest.raises(ConfigError, match=r"progress is .*; give a function, or ProgressDisplay\(\)"):
            gptqkit.quantize(model, settings, tmp_path / "out", progress=progress)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("mistral", 0), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("mistral", "mixtral"))],
)
def test_samples_with_non_finite_activations_stop_the_run_or_are_left_out(name, bad, tmp_path):
    model, ids, settings = overflowing(name), samples().input_ids.clamp(max=94), {"method": "gptaq", "grid": "minmax"}
    kept = Samples(torch.cat([ids[:bad], ids[bad + 1 :]]))
    ids[bad, 3] = 95
    with pytest.raises(NonFiniteError, match=f"layers.0.self_attn.q_proj, block 0, calibration sample {bad}"):
        quantize(model, tmp_path / "out", Samples(ids))
    report = quantize(model, tmp_path / "out", Samples(ids), skip_nonfinite=True, **settings).report
    assert (report.excluded_samples, report.tokens) == (1, 5 * 24)
    quantize(model, tmp_path / "without", kept, **settings)
    expected, found = weights(tmp_path / "without"), weights(tmp_path / "out")
    assert max(share_that_differs(expected[each], found[each]) for each in expected) < 0.1  # with the sample, over 0.24


def test_where_outputs_are_added_is_seen_in_a_sample_that_counts(tmp_path):
    """Also in the block in which the first one overflows."""
    ids, settings = samples().input_ids.clamp(max=94), {"method": "loaq", "grid": "minmax", "run": {"batch_size": 6}}
    ids[0, 2], found = 95, []
    for order in (ids, ids.roll(-1, 0)):
        quantize(overflowing("qwen2"), tmp_path / "out", Samples(order), skip_nonfinite=True, **settings)
        found.append(weights(tmp_path / "out"))
        settings["run"]["overwrite"] = True
    assert max(share_that_differs(found[0][each], found[1][each]) for each in found[0]) < 0.02


def test_a_block_counts_that_only_some_samples_leave_without_overflow(tmp_path, monkeypatch):
    """The inputs of its Linears are finite, what leaves it is not."""
    model, ids, plain = build("qwen2"), samples().input_ids.clamp(max=94), Qwen2DecoderLayer.forward
    model.get_input_embeddings().weight.data[95, 0], ids[0, 2] = 1e30, 95

    def forward(self, *given, **named):
        leaving = plain(self, *given, **named)
        return leaving.masked_fill(leaving.abs() > 1e29, torch.inf)

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", forward)
    assert quantize(model, tmp_path / "out", Samples(ids), skip_nonfinite=True).report.excluded_samples == 1


@pytest.mark.parametrize("shift", [0, 1, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3))])
def test_an_expert_that_gets_all_tokens_of_the_first_sample(shift, tmp_path):
    ids, model = samples(6, 24).input_ids.clone(), build("mixtral", num_experts_per_tok=1)
    ids[0] = ids[0, 0]
    router = model.model.layers[0].mlp.gate.weight
    assert len(router) == 4  # so that each of its experts is the one once
    router.data[:] = router.data.roll(shift, 0)
    found = quantize(model, tmp_path / "out", Samples(ids), method="loaq", grid="minmax").report
    assert not found.left_in_float


@pytest.mark.parametrize("two_sided", [False, True])
def test_an_embedding_that_is_stored_as_the_output_layer(two_sided, tmp_path):
    """Whose gradients `two_sided` asks for."""
    settings = {"two_sided": two_sided, "grid": "minmax"}
    tensors = save(build("llama", num_hidden_layers=1), tmp_path / "float")
    quantize(tmp_path / "float", tmp_path / "expected", **settings)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "float/model.safetensors", {"format": "pt"})
    quantize(tmp_path / "float", tmp_path / "out", **settings)
    expected, found = weights(tmp_path / "expected"), weights(tmp_path / "out")
    assert all(torch.equal(expected[each].codes, found[each].codes) for each in expected)


def test_blocks_may_write_into_what_enters_them(tmp_path, monkeypatch):
    def forward(self, hidden_states, apart, **others):
        others.pop("use_cache", None)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
        hidden_states = hidden_states + attended if apart else hidden_states.add_(attended)
        out = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + out if apart else hidden_states.add_(out)

    found = []
    for apart in (True, False):
        monkeypatch.setattr(Qwen2DecoderLayer, "forward", partialmethod(forward, apart=apart))
        quantize(build("qwen2"), tmp_path / str(apart), grid="minmax")
        found.append(weights(tmp_path / str(apart)))
    assert all(torch.equal(found[0][each].codes, found[1][each].codes) for each in found[0])


def test_an_encoder_may_see_one_token(tmp_path):
    assert not quantize(build("t5"), tmp_path / "out", samples(3, 2), grid="minmax").report.left_in_float


def test_leaving_out_stops_where_no_sample_is_left(tmp_path):
    model = build("mistral")
    model.model.layers[1].input_layernorm.weight.data[:] = 3e38
    with pytest.raises(NonFiniteError, match=r"none is left at the inputs of model.layers.1.self_attn.q_proj, block 1"):
        quantize(model, tmp_path / "out", skip_nonfinite=True)


IDS = samples().input_ids
WITHOUT_TOKENS = transformers.ResNetModel(transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]))
MISSPELT = {"lm_head": SKIP, "donw_proj": SKIP}
STRICT = {"strict": True}
THREE_BITS = {"bits": 3, "run": STRICT}
ROUTED, ODD, ODD_EXPERTS = (
    build("qwen2_moe"),
    build("mistral", intermediate_size=80),
    build("mixtral", intermediate_size=80),
)
REFUSED = [
    (OutputExistsError, "there exists", {"out": "there"}),
    (OutputExistsError, "something other than a quantized model", {"out": "there", "run": {"overwrite": True}}),
    (ConfigError, "llama is the source itself", {"out": "llama"}),
    (ConfigError, "llama is the source itself", {"out": "llama", "run": {"overwrite": True}}),
    (ConfigError, "llama/out and .*/llama lies in the other", {"out": "llama/out"}),
    (CalibrationError, "method .loaq. needs calibration text; give some .only method .rtn. by", {"source": None}),
    (
        CalibrationError,
        "^target_bits needs calibration text; give some",
        {"source": None, "method": "rtn", "target_bits": 3.5},
    ),
    (CalibrationError, "the model's vocabulary", {"source": IDS + 90}),
    (ConfigError, "sequence_length is 65, but the model has 64 positions", {"length": 65}),
    (ConfigError, "sequence_length is 65, but .* 64 positions", {"length": None, "source": IDS.new_ones(2, 65)}),
    (DatasetUnavailableError, "nowhere.txt", {"evaluate_on": "nowhere.txt"}),
    (CalibrationError, "the text has 20 tokens, less than one window of 24", {"evaluate_on": IDS[0, :20]}),
    (CalibrationError, r"token id 1\d\d .* the model's vocabulary", {"evaluate_on": IDS.flatten() + 90}),
    (ConfigError, "device is 'meta'", {"run": {"device": "meta"}}),
    (NotADirectoryError, "short.txt", {"out": "short.txt/out"}),
    (ArchitectureError, "model is a Linear", {"model": nn.Linear(32, 32)}),
    (ArchitectureError, "ResNetModel has no embedding of token ids", {"model": WITHOUT_TOKENS}),
    (ConfigError, r"'donw_proj' matches no Linear .* example model.layers.0.self_attn.q_proj", {"overrides": MISSPELT}),
    (ConfigError, r"'head' matches no Linear .* is with lm_head only", {"overrides": {"head": {"bits": 8}}}),
    (
        ConfigError,
        r"'gate\$' matches no Linear .* \(routers are not",
        {"model": ROUTED, "overrides": {"gate$": {"bits": 8}}},
    ),
    (
        ConfigError,
        "'down_proj' changes nothing: .* put it before them",
        {"overrides": {"_proj": {"bits": 8}, "down_proj": SKIP}},
    ),
    (ArchitectureError, "no module is left to quantize: the overrides skip them all", {"overrides": {"": SKIP}}),
    (ConfigError, "a type, which only GGUF knows", {"overrides": {"q_proj": {"type": "q4_0"}}}),
    (ConfigError, "lm_head shares its weight with an input embedding", {"lm_head": True}),
    (ConfigError, r"2 Linears with smaller groups.*0\.mlp\.down_proj \(32 of 96\)", {"group_size": 64, "run": STRICT}),
    (
        ConfigError,
        r"6 Linears stay in float.*gate_proj \(\(80, 64\) is its shape",
        {"model": ODD, **THREE_BITS},
    ),
    (ConfigError, r"experts\.0\.gate_proj \(\(80, 64\) is its", {"model": ODD_EXPERTS, **THREE_BITS}),
]


def attempt(progress, model="llama", source=IDS, length=24, out="out", run=None, evaluate_on=None, **settings):
    calibration = None if source is None else gptqkit.Calibration(source, sequence_length=length)
    config = gptqkit.QuantizeConfig(**{"group_size": 16, **settings})
    where = gptqkit.Run(**{"device": "cpu", **(run or {})})
    gptqkit.quantize(model, calibration, out, config, run=where, evaluate_on=evaluate_on, progress=progress)


@pytest.mark.parametrize(("error", "message", "given"), REFUSED)
def test_what_cannot_work_is_refused_before_any_work(error, message, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "inside").mkdir(parents=True)
    (tmp_path / "short.txt").write_text("Too short.")
    save(build("llama"), tmp_path / "llama")
    worked, before = [], sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=message):
        attempt(worked.append, **given)
    assert not worked
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("dtype", "much", "little"), [(torch.float32, 1e-3, 1e-6), (torch.float16, 0.1, 1e-3), (torch.bfloat16, 0.3, 1e-2)]
)
def test_outputs_that_differ_are_noticed(dtype, much, little):
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    assert differs(x * (1 + much), x, dtype)
    assert not differs(x * (1 + little), x, dtype)
    assert differs(x.index_fill(1, torch.tensor([3]), torch.nan), x, dtype)
