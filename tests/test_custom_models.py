"""Models that are not transformers' own, whose blocks do what the pipeline may not know of."""

import itertools
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers.models.mistral.modeling_mistral import MistralMLP

import gptqkit
from gptqkit import assembly
from gptqkit.errors import ArchitectureError, CheckpointError, ConfigError
from gptqkit.kernels.linear import QuantLinear
from support.models import GROUPED, build, samples, save
from support.pipeline import assert_close, outputs, quantize, weights

SKIP = gptqkit.ModuleOverride(skip=True)


class CustomConfig(transformers.MistralConfig):
    model_type = "custom"


class CustomForCausalLM(transformers.MistralForCausalLM):
    """A model that is not transformers' own; `config.change` says what is different in its blocks."""

    config_class = CustomConfig

    def __init__(self, config):
        super().__init__(config)
        for block in self.model.layers:
            block.mlp = CHANGES[config.change](config)


class WithSpare(MistralMLP):
    def __init__(self, config):
        super().__init__(config)
        self.spare = nn.Linear(64, 64)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class OfSameForward(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class WithOwnLinears(MistralMLP):
    def __init__(self, config):
        super().__init__(config)
        self.up_proj = Doubling(64, 96, bias=False)
        self.down_proj = OfSameForward(96, 64, bias=False)


class WritesOver(MistralMLP):
    def forward(self, x):
        inner = torch.sigmoid(self.gate_proj(x))
        inner *= self.up_proj(x)  # which sigmoid needs to run backwards
        return self.down_proj(inner)


class LooksAtClasses(MistralMLP):
    def forward(self, x):
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner if isinstance(self.gate_proj, nn.Linear) else 2 * inner)


class Wavers(MistralMLP):
    """The first tokens come out quite different at every other call, as where they lie between two experts."""

    calls, tokens = itertools.count(), 3

    def forward(self, x):
        out = super().forward(x)
        out[:, : self.tokens] *= 50 * (next(self.calls) % 2)
        return out


class NeedsParameter(MistralMLP):
    def forward(self, x):
        return super().forward(x) * self.up_proj.get_parameter("weight").mean()


class LooksAtWeight(MistralMLP):
    def forward(self, x):
        return super().forward(x.to(self.up_proj.weight.dtype)) * self.up_proj.weight.mean()


class ListOfExperts(nn.Module):
    def __init__(self, _):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"w1": nn.Linear(64, 96), "w2": nn.Linear(96, 64)}) for _ in range(4)
        )

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        chosen = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero()[:, 0]
            if len(tokens):
                out[tokens] = expert["w2"](expert["w1"](flat[tokens]).relu())
        return out.view_as(hidden_states)


CHANGES = {
    each.__name__: each
    for each in (WithSpare, WithOwnLinears, WritesOver, LooksAtClasses, Wavers, NeedsParameter, LooksAtWeight)
}
CHANGES["ListOfExperts"] = ListOfExperts
transformers.AutoConfig.register("custom", CustomConfig)
transformers.AutoModelForCausalLM.register(CustomConfig, CustomForCausalLM)


def custom(change):
    torch.manual_seed(0)
    model = CustomForCausalLM(CustomConfig(**GROUPED, change=change.__name__)).eval()
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.1)
    return model


def assert_loaded_as(model, path):
    """What is loaded computes what the model computes with the dequantized weights."""
    loaded, _ = gptqkit.load(path, device="cpu", backend="torch")
    for name, weight in weights(path).items():
        model.get_submodule(name).weight.data = weight.dequantize()
    assert_close(outputs(loaded), outputs(model))


def test_experts_in_a_list_of_modules(tmp_path):
    """Their inputs have no pairs in the float model, so that gptaq falls back to gptq; few tokens may reach one."""
    model = custom(ListOfExperts)
    modules = {each.name: each for each in quantize(model, tmp_path / "out", method="gptaq").report.modules}
    assert not any(name.endswith("mlp.gate") for name in modules)
    experts = [f"model.layers.0.mlp.experts.{number}.w1" for number in range(4)]
    assert {each.method for name, each in modules.items() if "experts" in name} == {"gptq"}
    assert modules["model.layers.0.self_attn.q_proj"].method == "gptaq"
    assert sum(modules[name].tokens for name in experts) == 6 * 24
    assert_loaded_as(model, tmp_path / "out")
    with pytest.raises(ArchitectureError, match=r"experts.0.w1, block 0 receives \d+ rows .* padding .* whole samples"):
        quantize(custom(ListOfExperts), tmp_path / "padded", samples(padded=True))


def test_modules_that_are_never_called_are_named(tmp_path):
    spare = {f"model.layers.{layer}.mlp.spare" for layer in range(2)}
    model = custom(WithSpare)
    report = quantize(model, tmp_path / "out", grid="minmax").report
    assert report.left_in_float == dict.fromkeys(spare, "no forward pass calls it")
    assert len(report.modules) == 14
    assert_loaded_as(model, tmp_path / "out")
    assert not quantize(model, tmp_path / "skipped", method="rtn", overrides={"spare": SKIP}).report.left_in_float
    steps = []
    with pytest.raises(ZeroDivisionError):  # in the second block
        quantize(model, tmp_path / "resumed", progress=lambda step: 1 / (8 - step.done))
    quantize(model, tmp_path / "resumed", run={"resume": True}, progress=steps.append)
    assert [(step.done, step.total) for step in steps] == [(done, 14) for done in range(8, 15)]
    with pytest.raises(ConfigError, match=r"1 Linear stays in floating point: model\.layers\.0\.mlp\.spare"):
        quantize(model, tmp_path / "strict", run={"strict": True})


def test_a_resumed_job_knows_what_it_left(tmp_path):
    model, seen = custom(WithSpare), []

    def stop(progress):
        seen.append(progress.module)
        if len(seen) == 10:  # in the second block
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(model, tmp_path / "resumed", progress=stop)
    resumed = quantize(model, tmp_path / "resumed", run={"resume": True}).report
    whole = quantize(model, tmp_path / "whole").report
    assert resumed.left_in_float == whole.left_in_float
    assert [each.error for each in resumed.modules] == [each.error for each in whole.modules]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("resumed", "whole"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_linears_with_a_forward_pass_of_their_own_stay_in_floating_point_and_are_reported(tmp_path):
    model = custom(WithOwnLinears)
    report = quantize(model, tmp_path / "out").report
    reason = "it computes something other than a Linear does"
    assert report.left_in_float == {f"model.layers.{layer}.mlp.up_proj": reason for layer in range(2)}
    assert len(report.modules) == 12
    assert_loaded_as(model, tmp_path / "out")


def test_weights_of_quantized_layers_can_be_looked_at(tmp_path):
    model = custom(LooksAtWeight)
    quantize(model, tmp_path / "out")
    assert_loaded_as(model, tmp_path / "out")
    for backend in ("torch", "cpu"):
        loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", backend=backend)
        assert_close(outputs(loaded), outputs(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (LooksAtClasses, r"block 0 computes something else .* first in mlp\.down_proj; leave what is at fault"),
        (NeedsParameter, r"block 0 cannot run on its quantized layers \(AttributeError: .*weight"),
    ],
)
def test_a_block_that_does_not_run_as_it_was_written_does_not_count(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        quantize(custom(change), tmp_path / "out")
    with pytest.raises(CheckpointError, match=message):  # without calibration, too
        gptqkit.quantize(custom(change), None, tmp_path / "out", gptqkit.QuantizeConfig(method="rtn", group_size=32))
    assert not list(tmp_path.iterdir())


def test_a_few_tokens_may_come_out_quite_different(tmp_path, monkeypatch):
    """As where kernels round in another way and a router takes another expert; neither most of them nor a Linear."""
    judged, plain = [], assembly.differs

    def differs(*given):
        judged.append(plain(*given))
        return judged[-1]

    monkeypatch.setattr(assembly, "differs", differs)
    quantize(custom(Wavers), tmp_path / "few", quality="fast")
    assert True in judged
    monkeypatch.setattr(Wavers, "tokens", 20)
    with pytest.raises(CheckpointError, match=r"block 0 computes something else"):
        quantize(custom(Wavers), tmp_path / "most", quality="fast")


def test_an_expert_that_runs_otherwise_is_named_however_few_tokens_reach_it(tmp_path, monkeypatch):
    plain = assembly.install

    def install(model, *given, **how):
        plain(model, *given, **how)
        expert = model.model.get_submodule("model.layers.1.mlp.experts.2.w2")
        if isinstance(expert, QuantLinear):
            expert.scale.mul_(2)

    monkeypatch.setattr(assembly, "install", install)
    monkeypatch.setattr(assembly, "most_differ", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"block 1 .* first in mlp\.experts\.2\.w2; leave"):
        quantize(custom(ListOfExperts), tmp_path / "out", quality="fast")


def test_what_does_not_run_backwards_needs_the_quality_fast(tmp_path):
    for name, settings in {"sides": {"two_sided": True}, "tuned": {"method": "rtn", "tune_epochs": 1}}.items():
        with pytest.raises(ArchitectureError, match=r"does not run backwards .* choose the quality fast"):
            quantize(custom(WritesOver), tmp_path / name, **settings)
    quantize(custom(WritesOver), tmp_path / "fast", quality="fast")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The place of transformers' copies of code that comes with models."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
def test_a_tokenizer_that_brings_its_code_is_written_and_read_where_it_is_trusted(example_model, tmp_path):
    model, out, text = tmp_path / "model", tmp_path / "out", ["Call me Ishmael. " * 50]
    save(build("llama", vocab_size=4096), model)
    shutil.copy(example_model / "tokenizer.json", model)
    (model / "own.py").write_text("import transformers\nclass Own(transformers.PreTrainedTokenizerFast):\n    pass\n")
    places = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(places))
    trusting, how = {"trust_remote_code": True}, {"sequence_length": 16, "max_windows": 2}
    calibration = {"source": text, "samples": 2, "sequence_length": 16}
    gptqkit.quantize(model, calibration, out, {"quality": "fast", "group_size": 32}, run=trusting)
    for tokenizer in (None, model):
        with pytest.raises(ArchitectureError, match="trust_remote_code"):
            gptqkit.evaluate(out, text, how, tokenizer=tokenizer)
        assert gptqkit.evaluate(out, text, {**how, **trusting}, tokenizer=tokenizer).windows == 2
    assert type(gptqkit.load(out, **trusting)[1]).__name__ == "Own"
    assert "gptqkit.load(..., trust_remote_code=True)" in (out / "README.md").read_text()


@pytest.mark.usefixtures("own_cache")
def test_code_of_a_model_runs_only_where_it_is_trusted(tmp_path):
    model = tmp_path / "model"
    save(build("mistral"), model)
    (model / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "import transformers\n"
        "class Config(transformers.MistralConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(transformers.MistralForCausalLM):\n    config_class = Config\n"
    )
    config = json.loads((model / "config.json").read_text())
    own = {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    places = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.OwnForCausalLM"}
    (model / "config.json").write_text(json.dumps({**config, **own, "auto_map": places}))
    with pytest.raises(ArchitectureError):
        quantize(model, tmp_path / "out")
    with pytest.raises(ArchitectureError, match="--trust-remote-code"):
        gptqkit.recommend(model, "1GB", "gptqkit")
    with pytest.raises(ArchitectureError, match="OwnForCausalLM cannot be rotated; that is known of"):
        gptqkit.rotate(model, tmp_path / "out")  # which has no such option
    assert not (tmp_path / "ran").exists()
    trusting = {"trust_remote_code": True}
    assert " --trust-remote-code " in gptqkit.recommend(model, "1GB", "gptqkit", **trusting)[0].command
    config, text = {"quality": "fast", "bits": 2, "group_size": 32, "tune_epochs": 2}, samples().input_ids
    report = gptqkit.quantize(model, text, tmp_path / "out", config, run=trusting, evaluate_on=text).report
    assert report.tuning.divergence < report.tuning.divergence_before  # so they were loaded
    assert (tmp_path / "ran").exists()
    assert (tmp_path / "out" / "code.py").exists()
    (tmp_path / "ran").unlink()
    for load in (gptqkit.load, lambda path: gptqkit.evaluate(path, text)):
        with pytest.raises(ArchitectureError, match=r"trust_remote_code \(--trust-remote-code\) runs the code"):
            load(tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    found = gptqkit.evaluate(tmp_path / "out", text, {**trusting, "sequence_length": text.shape[1]})
    assert found.perplexity == report.perplexity[0]["perplexity"]
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu", trust_remote_code=True)
    loaded.save_pretrained(tmp_path / "copy")
    assert gptqkit.diff(tmp_path / "out", tmp_path / "copy") == []
    (tmp_path / "ran").unlink()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "gptqkit.load(..., trust_remote_code=True)" in card
    assert "\nLoaded by: gptqkit. " in card
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    known = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "out" / "config.json").write_text(json.dumps({**stored, **known, "auto_map": places}))
    gptqkit.load(tmp_path / "out", device="cpu")
    assert not (tmp_path / "ran").exists()
    assert gptqkit.inspect(tmp_path / "out").reader("transformers").loads
