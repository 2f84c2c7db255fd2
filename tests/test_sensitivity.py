"""Bits go where they matter, within the size asked for; what shares an input has the same."""

import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from gptqkit import QuantizeConfig, Run, imatrix, inspect, load, plan
from gptqkit.calibration.samples import Samples
from gptqkit.distributed import Processes
from gptqkit.errors import ConfigError, DoesNotFitError, NonFiniteError, OutputExistsError
from gptqkit.model import FloatModel
from gptqkit.progress import silent
from gptqkit.sensitivity import sensitivities
from gptqkit.walking import FloatWalk
from support.models import build, overflowing, samples, save
from support.pipeline import assert_close, outputs, quantize, weights


def loud(name="qwen2"):
    """A model whose second block has weights that hardly do anything."""
    model = build(name)
    for name, parameter in model.model.layers[1].named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(1e-3)
    return model


def average(model, out):
    """The bits per weight of a checkpoint's Linears, those in floating point with the others."""
    found = weights(out)
    linears = {name: module.weight for name, module in model.named_modules() if name.endswith("_proj")}
    stored = sum(8 * weight.nbytes for name, weight in linears.items() if name not in found)
    stored += sum(
        weight.codes.numel() * (weight.bits + (16 + weight.bits) / weight.group_size) for weight in found.values()
    )
    return stored / sum(weight.numel() for weight in linears.values()), linears.keys() - found.keys()


SLOWER = [pytest.param(target, marks=pytest.mark.slow) for target in (2.9, 4.9)]


@pytest.mark.parametrize("target", [3.6, *SLOWER])
def test_bits_go_where_they_matter(tmp_path, target):
    model = loud()
    quantize(model, tmp_path / "out", samples(8), method="rtn", target_bits=target)
    bits, left = average(model, tmp_path / "out")
    assert not left
    assert target - 0.5 < bits <= target
    found = weights(tmp_path / "out")
    mean = [sum(weight.bits for name, weight in found.items() if f"layers.{block}." in name) / 7 for block in range(2)]
    assert mean[0] > mean[1]
    for inputs in ("[qkv]_proj", "(gate|up)_proj"):
        for block in range(2):
            kinds = {
                weight.bits for name, weight in found.items() if re.search(rf"layers\.{block}\..*\.{inputs}$", name)
            }
            assert len(kinds) == 1


def test_a_block_counts_no_more_for_being_louder(tmp_path):
    """What both blocks add outweighs what enters them, so the second one's output is a hundred times as large."""
    model = build("qwen2")
    for block, factor in zip(model.model.layers, (100, 10000), strict=True):
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight.data.mul_(factor)
    modules = quantize(model, tmp_path / "out", samples(8), method="rtn", target_bits=3.6).report.modules
    mean = [sum(module.bits for module in modules if module.layer == block) / 7 for block in range(2)]
    assert mean[1] <= mean[0]


@pytest.fixture
def entered(monkeypatch):
    """All hidden states that enter blocks, each with the number of the block."""
    forward, found = Qwen2DecoderLayer.forward, []

    def record(self, hidden_states, *arguments, **named):
        found.append((self.self_attn.layer_idx, hidden_states.detach().clone()))
        return forward(self, hidden_states, *arguments, **named)

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", record)
    return found


def test_bits_are_chosen_in_the_float_model(tmp_path, entered):
    class Chosen(Exception):
        pass

    def stop(step):
        if step.stage == "quantize":
            raise Chosen

    model, tokens = build("qwen2"), samples(5)
    with torch.no_grad():
        model(tokens.input_ids)
    expected = dict(entered)[1]
    entered.clear()
    with pytest.raises(Chosen):
        quantize(model, tmp_path / "out", tokens, bits=2, target_bits=3.6, progress=stop, run={"batch_size": 5})
    entering = [states for block, states in entered if block == 1]
    assert len(entering) > 4
    for states in entering:  # those of all samples, or of one
        start = int((expected - states[:1]).flatten(1).norm(dim=1).argmin())
        assert_close(states, expected[start : start + len(states)])


def test_no_more_samples_go_through_a_block_at_once_than_asked_for(tmp_path, entered):
    """While bits are chosen, and an importance matrix is made."""
    quantize(build("qwen2"), tmp_path / "out", samples(3), method="rtn", target_bits=3.6, run={"batch_size": 2})
    assert {len(states) for _, states in entered} == {1, 2}
    entered.clear()
    imatrix(build("qwen2"), samples(3).input_ids, tmp_path / "imatrix.gguf", run={"device": "cpu", "batch_size": 2})
    assert {len(states) for _, states in entered} == {1, 2}


def test_smaller_groups_are_choices_too(tmp_path):
    """Of the Linears that groups of 64 fit; those of 8 bits keep the size that was asked for."""
    kept = {}
    for target in (3.9, 9.0):
        settings = {"method": "rtn", "group_size": 64, "target_bits": target}
        quantize(build("qwen2", num_hidden_layers=1), tmp_path / str(target), **settings)
        found = [weight for weight in weights(tmp_path / str(target)).values() if weight.in_features == 64]
        kept[target] = {(weight.bits, weight.group_size) for weight in found}
    assert {size for _, size in kept[3.9]} == {32, 64}
    assert {size for bits, size in kept[9.0] if bits == 8} == {64}


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_floating_point_is_a_choice_too(tmp_path, dtype):
    model = loud().to(dtype)
    quantize(model, tmp_path / "out", method="rtn", target_bits=12.0)
    found, left = average(model, tmp_path / "out")
    assert 10 < found <= 12
    assert sum("layers.0." in name for name in left) > sum("layers.1." in name for name in left)


def test_overrides_of_all_leave_nothing_to_choose(tmp_path):
    quantize(loud(), tmp_path / "out", method="rtn", target_bits=12.0, overrides={"proj": {"bits": 8}})
    assert {weight.bits for weight in weights(tmp_path / "out").values()} == {8}


@pytest.mark.parametrize(
    ("name", "dtype", "format_"),
    [
        pytest.param("qwen2", torch.float32, "gptq_v2", marks=pytest.mark.slow),
        pytest.param("qwen2", torch.float32, "compressed-tensors", marks=pytest.mark.slow),
        ("llama", torch.float16, "gptq_v2"),  # its output layer is the embedding
    ],
)
def test_a_size_is_kept_and_used(tmp_path, name, dtype, format_):
    model, settings = loud(name).to(dtype), {"method": "rtn", "format": format_, "overrides": {"q_proj": {"bits": 8}}}

    def size(out, **more):
        quantize(model, tmp_path / out, samples(4), **settings, **more)
        tensors = [load_file(file) for file in (tmp_path / out).glob("*.safetensors")]
        return sum(tensor.nbytes for each in tensors for tensor in each.values())

    wide, narrow = size("wide", bits=8), size("narrow", bits=2)
    target = (wide + narrow) // 2
    found = size("out", target_size=target)
    assert target - 0.1 * (wide - narrow) < found <= target
    again = quantize(model, tmp_path / "out", samples(4), **settings, target_size=target, run={"resume": True})
    assert again.report.config.target_size == target
    steps = []
    with pytest.raises(ConfigError, match=r"target_size is 1.00 KiB, but the smallest widths make \d+"):
        size("small", target_size=1024, progress=steps.append)
    assert not steps


def with_more(folder):
    """Tensors that no module of the model has are copied."""
    tensors = save(build("qwen2", num_hidden_layers=1).half(), folder)
    save_file({**tensors, "extra.weight": torch.zeros(200, 300).half()}, folder / "model.safetensors", {"format": "pt"})


def wider_than_said(folder):
    """What stays in floating point is copied from the files, whatever dtype config.json names."""
    save(build("qwen2", num_hidden_layers=1).half(), folder)
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def never_called(folder):
    """A decoder alone does not look at an encoder."""
    config = transformers.BartConfig(
        d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, vocab_size=96, is_decoder=True
    )
    torch.manual_seed(0)
    save(transformers.BartForCausalLM(config).half(), folder)


def stacked(folder):
    save(build("gpt_oss", num_hidden_layers=1).half(), folder)


@pytest.mark.parametrize(
    "make",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (with_more, wider_than_said)), never_called, stacked],
)
def test_a_size_counts_what_is_copied(make, tmp_path):
    make(tmp_path / "float")

    def size(out, **more):
        quantize(tmp_path / "float", tmp_path / out, samples(4), method="rtn", **more)
        return sum(tensor.nbytes for tensor in load_file(tmp_path / out / "model.safetensors").values())

    wide, narrow = size("wide", bits=8), size("narrow", bits=2)
    target = (wide + narrow) // 2
    assert target - 0.15 * (wide - narrow) < size("out", target_size=target) <= target


def test_a_size_that_is_not_kept_is_named(tmp_path, caplog):
    """What overrides choose is taken as quantized, whether or not it is called."""
    never_called(tmp_path / "float")
    settings = {"method": "rtn", "overrides": {"encoder_attn": {"bits": 2}}}
    quantize(tmp_path / "float", tmp_path / "out", samples(4), **settings, target_size=190_000)
    assert re.search(r"the checkpoint's tensors take .* KiB, and target_size is .* KiB", caplog.text)


def test_chosen_bits_lose_less_than_the_same_for_all(tmp_path):
    model = loud()
    with torch.no_grad():
        expected = outputs(model)
    uniform = 3 + 19 / 32
    lost = []
    for name, settings in (("uniform", {}), ("chosen", {"target_bits": uniform})):
        quantize(model, tmp_path / name, samples(16), bits=3, **settings)
        lost.append(float((outputs(load(tmp_path / name, device="cpu")[0]) - expected).norm()))
    assert lost[1] < 0.8 * lost[0]


def test_overrides_stand_and_a_finished_job_is_known_again(tmp_path):
    model, settings = loud(), {"method": "rtn", "target_bits": 3.3, "overrides": {"o_proj": {"bits": 8}}}
    report = quantize(model, tmp_path / "out", samples(4), **settings).report
    assert {module.bits for module in report.modules if "o_proj" in module.name} == {8}
    assert inspect(tmp_path / "out").bits.keys() >= {8}
    again = quantize(model, tmp_path / "out", samples(4), **settings, run={"resume": True}).report
    assert again.config == report.config
    for overrides in ({}, {"o_proj": {"bits": 4}}, {"o_proj": {"bits": 8}, "down_proj": {"skip": True}}):
        with pytest.raises(OutputExistsError, match=r"another job: config\.overrides"):
            quantize(model, tmp_path / "out", samples(4), **{**settings, "overrides": overrides}, run={"resume": True})


def test_experts_of_a_layer_are_chosen_by_one_pattern_and_overrides_come_before_it(tmp_path):
    settings = {"method": "rtn", "target_bits": 4.0, "overrides": {r"experts\.1\.": {"bits": 8}}}
    report = quantize(build("qwen3_moe"), tmp_path / "out", samples(4), **settings).report
    patterns = [each for each in report.config.overrides if "experts" in each]
    assert patterns[0] == r"experts\.1\."
    assert 1 < len(patterns) <= 1 + 2 * 3  # two layers of four experts, each of three Linears
    found = {module.name: module.bits for module in report.modules if ".experts." in module.name}
    assert {bits for name, bits in found.items() if ".1." in name.partition("experts")[2]} == {8}
    others = {name: bits for name, bits in found.items() if ".1." not in name.partition("experts")[2]}
    kept = {name.partition(".experts")[0]: set() for name in others}  # vLLM makes one layer of all experts
    for name, bits in others.items():
        kept[name.partition(".experts")[0]].add(bits)
    assert [len(each) for each in kept.values()] == [1, 1]
    assert inspect(tmp_path / "out").bits[8] >= 6


def test_what_cannot_be_chosen(tmp_path):
    for value in (0, 2, 16, 20, float("nan")):
        with pytest.raises(ConfigError, match=f"^target_bits is {value}; give more than 2 and less than 16 bits"):
            QuantizeConfig(target_bits=value)
    with pytest.raises(ConfigError, match=r"target_bits is 2\.4, but the smallest widths make 2\.563 on average; give"):
        quantize(build("qwen2"), tmp_path / "out", samples(8), target_bits=2.4, progress=lambda _: pytest.fail("began"))
    least = quantize(build("qwen2"), tmp_path / "least", samples(4), method="rtn", target_bits=2.563).report.modules
    assert {module.bits for module in least} == {2}
    with pytest.raises(ConfigError, match="leave one out"):
        QuantizeConfig(target_bits=3.5, target_size=1 << 30)
    with pytest.raises(ConfigError, match=r"1\.00 GiB, in which everything fits in floating point; give less"):
        quantize(
            build("qwen2"), tmp_path / "out", samples(8), target_size=1 << 30, progress=lambda _: pytest.fail("began")
        )
    with pytest.raises(ConfigError, match="one setting"):
        quantize(build("qwen2"), tmp_path / "out", bits=4, format="awq", target_bits=3.5)
    build("qwen2").save_pretrained(tmp_path / "float")
    with pytest.raises(ConfigError, match="one setting"):
        plan(tmp_path / "float", config={"format": "awq", "target_bits": 3.5})
    for target in ({"target_bits": 2.01}, {"target_size": 1000}):
        with pytest.raises(ConfigError, match="but the smallest widths make"):
            plan(tmp_path / "float", config=target)


def test_it_does_not_matter_where_a_sample_is_left_out(tmp_path):
    model, chosen = overflowing("qwen2", num_hidden_layers=1), []
    settings = {"bits": 3, "method": "rtn", "target_bits": 4.2, "skip_nonfinite": True}
    for bad in (7, 0, 2):  # the last, and among those on which a block shows what errors do to its output
        ids = samples(7).input_ids.clamp_(max=94)
        ids = torch.cat([ids[:bad], ids.new_full((1, 24), 95), ids[bad:]])
        report = quantize(model, tmp_path / str(bad), Samples(ids), **settings).report
        chosen.append({module.name: module.bits for module in report.modules})
    assert len(set(chosen[0].values())) > 1
    assert chosen[0] == chosen[1] == chosen[2]


@pytest.mark.parametrize("bad", [pytest.param([1], marks=pytest.mark.slow), [0, 1, 2, 3]])
def test_a_sample_that_overflows_where_a_block_ends_shows_nothing(tmp_path, monkeypatch, bad):
    """Errors inside that block are measured on others."""
    model, forward = build("qwen2"), Qwen2DecoderLayer.forward
    model.get_input_embeddings().weight.data[:, 0].clamp_(-1, 1)
    model.save_pretrained(tmp_path / "plain")
    model.get_input_embeddings().weight.data[95, 0] = 100
    model.save_pretrained(tmp_path / "model")

    def run(self, hidden_states, *arguments, **named):
        leaving = forward(self, hidden_states, *arguments, **named)
        return leaving.masked_fill(hidden_states[..., :1].abs() > 50, torch.inf)

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", run)
    ids, losses = samples(64).input_ids.clamp_(max=94), []
    ids[bad, 3] = 95
    good = torch.cat([ids[: bad[0]], ids[bad[-1] + 1 :]])
    config = QuantizeConfig(quality="fast", group_size=32, target_bits=4.0, skip_nonfinite=True)
    for folder, tokens in (("plain", good), ("model", ids)):
        alone, how, out = Processes(0, 1, torch.device("cpu")), Run(device="cpu"), tmp_path / "out"
        walk = FloatWalk(FloatModel(tmp_path / folder), Samples(tokens), alone, how, out)
        found = sensitivities(walk, config, silent)[0]
        losses.append({name: [candidate.loss for candidate in found[name]] for name in found})
    for name, expected in losses[0].items():  # where it ends, its Linears have seen those samples
        assert losses[1][name] == pytest.approx(expected, rel=0.5 if "layers.0" in name else 1e-5), name


def test_padding_does_not_change_what_is_measured(tmp_path):
    """Behind the tokens of a causal model it changes nothing that they see."""
    build("qwen2").save_pretrained(tmp_path / "model")
    tokens, config = samples(8).input_ids, QuantizeConfig(quality="fast", group_size=32, target_bits=4.0)
    mask = torch.arange(60).expand(8, -1) < 24
    losses = []
    for given in (Samples(tokens), Samples(torch.where(mask, tokens.repeat(1, 3)[:, :60], 7), mask)):
        alone, run, out = Processes(0, 1, torch.device("cpu")), Run(device="cpu"), tmp_path / "out"
        found = sensitivities(FloatWalk(FloatModel(tmp_path / "model"), given, alone, run, out), config, silent)[0]
        losses.append({name: [candidate.loss for candidate in found[name]] for name in found})
    for name, expected in losses[0].items():  # where it ends, its Linears have seen those samples
        assert losses[1][name] == pytest.approx(expected, rel=0.5 if "layers.0" in name else 1e-5), name


def test_what_cannot_be_solved_meanwhile_is_named(tmp_path):
    model = build("qwen2")
    model.model.layers[1].post_attention_layernorm.weight.data[0] = 1e25  # the square is no float32
    with pytest.raises(NonFiniteError, match=r"^model\.layers\.1\.mlp\.gate_proj: "):
        quantize(model, tmp_path / "out", target_bits=3.5)


def test_memory_that_runs_out_meanwhile_is_explained(tmp_path, monkeypatch):
    def solve(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr("gptqkit.sensitivity.solve_gptq", solve)
    with pytest.raises(DoesNotFitError, match="use --activations disk"):
        quantize(build("qwen2"), tmp_path / "out", target_bits=3.5)
