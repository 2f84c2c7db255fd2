"""What errors behind blocks weigh: against the divergence of predictions that such errors cause."""

import copy
import itertools
import logging
import weakref
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptqkit import Run, load
from gptqkit.calibration.capture import hand_on
from gptqkit.calibration.samples import Samples
from gptqkit.calibration.statistics import mirror
from gptqkit.distributed import Processes
from gptqkit.fisher import SAMPLES, _Sum, measure_fisher, pull_back
from gptqkit.model import FloatModel
from gptqkit.progress import silent
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.targets import find_blocks, find_targets
from gptqkit.tuning import tune
from gptqkit.walking import FloatWalk, own_batches
from support.models import build, overflowing, samples
from support.pipeline import assert_close, outputs, quantize

WIDTH = 64
NORMS = ("model.norm.weight", "transformer.ln_f.weight", "decoder.final_layer_norm.weight")


def uneven(name, **changes):
    """A model whose predictions depend much on some channels, and little on others."""
    model = build(name, **changes)
    with torch.no_grad():
        for owner, parameter in model.named_parameters():
            if owner in NORMS:
                parameter.copy_(torch.linspace(0.05, 3, WIDTH).sqrt())
    return model


def measured(model, folder, tokens, progress=silent, **how):
    model.save_pretrained(folder / "float")
    (folder / "work").mkdir()
    source, alone = FloatModel(folder / "float"), Processes(0, 1, torch.device("cpu"))
    run = Run(**{"device": "cpu", "batch_size": 3, **how})
    batches = own_batches(source, tokens, alone, run)
    return measure_fisher(source, batches, alone, run, folder / "out", folder / "work", progress)


def measure(*arguments, **named):
    return measured(*arguments, **named).metric


def divergence(model, disturb, along, tokens):
    """The mean divergence of predictions, per token, where `disturb` lets small errors along some directions in."""
    mask = torch.ones_like(tokens.input_ids, dtype=torch.bool)
    mask = mask if tokens.attention_mask is None else tokens.attention_mask
    named = {"input_ids": tokens.input_ids, "attention_mask": mask.long()}
    generator = torch.Generator().manual_seed(2)

    def disturbed(states):
        error = torch.randn(states.shape, generator=generator, dtype=states.dtype) @ along @ along.T
        error *= mask.view(*states.shape[:-1], 1) if states.shape[:-1].numel() == mask.numel() else 1
        return states + 1e-3 * error

    with torch.no_grad():
        expected = model(**named).logits.log_softmax(-1)
        hook = disturb(disturbed)
        found = sum(
            (expected.exp() * (expected - model(**named).logits.log_softmax(-1))).sum(-1)[mask].mean() for _ in range(4)
        )
        hook.remove()
    return float(found) / 4


def outputs_of(module, disturbed):
    """Let a function change what a module returns, a tensor or a tuple that begins with one."""

    def hook(_module, _arguments, output):
        return (disturbed(output[0]), *output[1:]) if isinstance(output, tuple) else disturbed(output)

    return module.register_forward_hook(hook)


def gates_of(experts, number, disturbed):
    """Let a function change what the gate_proj of one expert returns, while each runs once per forward pass."""
    calls = itertools.count()

    def hook(_module, given):
        return (disturbed(given[0]),) if next(calls) % experts.num_experts == number else None

    return experts.act_fn.register_forward_pre_hook(hook)


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("llama", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", True),
                ("gpt2", False),
                ("gpt2", True),
                ("qwen3", False),
                ("qwen3", True),
                ("gemma4", True),
            )
        ),
    ],
)
def test_errors_weigh_what_they_change_of_predictions(tmp_path, name, padded):
    model = uneven(name)
    tokens = samples(SAMPLES, 48)
    if padded:
        mask = torch.arange(48)[None] < torch.randint(20, 49, (SAMPLES, 1), generator=torch.Generator().manual_seed(3))
        tokens = Samples(torch.where(mask, tokens.input_ids, 0), mask)
    fisher = measure(model, tmp_path, tokens).double()
    assert_close(fisher, fisher.T)
    assert float(fisher.diagonal().mean()) == pytest.approx(1)
    values, directions = torch.linalg.eigh(fisher)
    assert values[-16:].sum() > 3 * values[:16].sum()  # or there would be nothing to see
    axes = torch.eye(WIDTH, dtype=torch.float64)
    model = copy.deepcopy(model).double().eval()
    blocks = [partial(outputs_of, block) for block in find_blocks(model)[0].values()]
    whole = [divergence(model, block, axes, tokens) for block in blocks]
    for along in (directions[:, -16:], directions[:, 24:40], directions[:, :16], axes[:, :16], axes[:, -16:]):
        parts = [divergence(model, block, along, tokens) for block in blocks]
        found = sum(part / all_of_it for part, all_of_it in zip(parts, whole, strict=True)) / len(blocks)
        expected = float((along.T @ fisher @ along).trace()) / WIDTH
        assert found == pytest.approx(expected, rel=0.25)


def test_of_an_encoder_decoder_it_is_the_decoder(tmp_path):
    """As if the decoder stood alone, before what the encoder makes of the first halves."""
    model = uneven("t5", num_layers=2, num_decoder_layers=1)
    tokens = samples(SAMPLES, 48)
    fisher = measure(model, tmp_path, tokens).double()
    first, second = tokens.input_ids[:, :24], tokens.input_ids[:, 23:].clone()
    second[:, 0] = model.generation_config.decoder_start_token_id
    model = copy.deepcopy(model).double().eval()
    block = model.decoder.block[0]
    with torch.no_grad():
        expected = model(input_ids=first, decoder_input_ids=second).logits.log_softmax(-1)

    def changed(along):
        def disturbed(_module, _arguments, output):
            error = torch.randn(output[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
            return (output[0] + 1e-3 * error @ along @ along.T, *output[1:])

        hook = block.register_forward_hook(disturbed)
        with torch.no_grad():
            found = model(input_ids=first, decoder_input_ids=second).logits.log_softmax(-1)
        hook.remove()
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    axes = torch.eye(WIDTH, dtype=torch.float64)
    for along in (axes[:, :16], axes[:, -16:]):
        part = float((along.T @ fisher @ along).trace()) / WIDTH
        assert changed(along) / changed(axes) == pytest.approx(part, rel=0.25)


LINEARS = [
    ("llama", "self_attn.v_proj", False),
    ("gpt2", "attn.c_proj", True),
    ("mixtral", "mlp.experts.2.gate_proj", False),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", "self_attn.v_proj", True),
            ("llama", "mlp.down_proj", False),
            ("llama", "mlp.down_proj", True),
            ("gpt2", "attn.c_proj", False),
            ("gemma4", "self_attn.o_proj", False),
            ("gemma4", "self_attn.o_proj", True),
            ("mixtral", "mlp.experts.2.gate_proj", True),
        )
    ),
]


@pytest.mark.parametrize(("name", "inner", "padded"), LINEARS)
def test_errors_of_linears_weigh_what_they_change_of_predictions(tmp_path, name, inner, padded):
    """Against the divergence that errors along the directions that matter most and least cause, in the whole model."""
    experts = name == "mixtral"  # of one block: no other router may take another way
    model, tokens = uneven(name, **{"num_hidden_layers": 1} if experts else {}), samples(SAMPLES, 48)
    if padded:
        mask = torch.arange(48)[None] < torch.randint(20, 49, (SAMPLES, 1), generator=torch.Generator().manual_seed(3))
        tokens = Samples(torch.where(mask, tokens.input_ids, 0), mask)
    fisher = measured(model, tmp_path, tokens)
    source, alone = FloatModel(tmp_path / "float"), Processes(0, 1, torch.device("cpu"))
    (target,) = (
        each for each in find_targets(source.model, QuantizeConfig(group_size=32))[0][0] if each.inner == inner
    )
    with FloatWalk(source, tokens, alone, Run(device="cpu"), tmp_path / "out").streams() as streams:
        streams.enter(0)
        with streams.block(0):
            found = pull_back(streams, 0, [target], fisher)[target.name].double()
    assert_close(found, found.T)
    assert float(found.diagonal().mean()) == pytest.approx(1)
    model = copy.deepcopy(model).double().eval()
    if experts:
        model.set_experts_implementation("eager")  # others multiply no float64
        disturb = partial(gates_of, model.get_submodule(target.name.partition(".2.")[0]), 2)
    else:
        disturb = partial(outputs_of, model.get_submodule(target.name))
    size = len(found)
    values, directions = torch.linalg.eigh(found)
    quarter, axes = size // 4, torch.eye(size, dtype=torch.float64)
    assert values[-quarter:].sum() > 1.5 * values[:quarter].sum()  # or there would be nothing to see
    whole = divergence(model, disturb, axes, tokens)
    for along in (directions[:, -quarter:], directions[:, :quarter], axes[:, :quarter], axes[:, -quarter:]):
        expected = float((along.T @ found @ along).trace()) / size
        assert divergence(model, disturb, along, tokens) / whole == pytest.approx(expected, rel=0.25)


def test_sums_of_samples_take_no_second_matrix():
    """Nor does what tells how much of them is chance: sum of Var(mean) over sum of mean^2, beside the diagonal."""
    count, width = 5, 600
    drawn = torch.randn(count, 40, width, generator=torch.Generator().manual_seed(0)) + 0.5
    found, sizes = _Sum(torch.zeros(width, width)), [0]

    place = found.total.data_ptr()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != place:
                sizes.append(result.untyped_storage().nbytes())
            return result

    with Sizes():
        for rows in drawn.unbind():
            found.add(rows.clone())
    own = torch.einsum("nti,ntj->nij", drawn.double(), drawn.double())
    assert_close(mirror(found.total).double(), own.sum(0))
    beside = ~torch.eye(width, dtype=torch.bool)
    mean, variance = own.mean(0)[beside], own.var(0)[beside] / count
    assert found.share() == pytest.approx(1 - float(variance.sum() / mean.square().sum()), rel=1e-4)
    assert max(sizes) < found.total.nbytes / 2


@pytest.mark.parametrize("at_once", [1, 3])
def test_what_is_drawn_depends_on_the_sample_alone(tmp_path, at_once, monkeypatch):
    """Not on how many are looked at together, nor on which process does."""
    model, tokens = uneven("qwen2"), samples(7)
    expected = measured(model, tmp_path, tokens)
    monkeypatch.setattr("gptqkit.fisher.AT_ONCE", at_once)
    (tmp_path / "again").mkdir()
    found = measured(model, tmp_path / "again", tokens)
    assert_close(found.metric, expected.metric, rtol=0.05)  # the mean of parts, each on its own scale
    for layer, states in expected.behind.items():
        assert_close(found.behind[layer].read(range(7)), states.read(range(7)), rtol=2**-6)


def test_batches_and_places_change_nothing_and_nothing_is_left(tmp_path):
    model, tokens = uneven("qwen2"), samples(20)
    found = []
    for how in ({}, {"batch_size": 1}, {"activations": "disk"}):
        steps = []
        folder = tmp_path / str(len(found))
        folder.mkdir()
        found.append(measure(model, folder, tokens, steps.append, **how))
        assert [(step.stage, step.done, step.total) for step in steps] == [("measure", part, 3) for part in (1, 2, 3)]
        assert {entry.name for entry in folder.iterdir()} == {"float", "work"}
        assert (
            len([*(folder / "work").iterdir()]) == (how.get("activations") == "disk") * model.config.num_hidden_layers
        )
    assert_close(found[1], found[0], rtol=1e-4)
    assert torch.equal(found[2], found[0])


def test_a_sample_with_nan_counts_for_nothing(tmp_path):
    model, tokens = overflowing("qwen2"), samples(6)  # at token 95
    clean = tokens.input_ids.clamp(max=94)
    results = []
    for filler in (3, 7):
        ids = clean.clone()
        ids[2], ids[2, 5] = filler, 95
        (tmp_path / str(filler)).mkdir()
        results.append(measure(model, tmp_path / str(filler), Samples(ids)))
    assert torch.isfinite(results[0]).all()
    assert torch.equal(*results)


def test_what_predicts_nothing_or_does_not_fit_is_not_known(tmp_path, monkeypatch, caplog):
    for name in ("bert", "qwen2"):
        (tmp_path / name).mkdir()
    assert measured(build("bert"), tmp_path / "bert", samples()) is None
    model = build("qwen2")

    def too_large(*_arguments, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    def at_the_end(*arguments, **named):
        return too_large if "leaving" in named else hand_on(*arguments, **named)

    monkeypatch.setattr("gptqkit.streams.hand_on", at_the_end)
    with caplog.at_level(logging.WARNING):
        assert measured(model, tmp_path / "qwen2", samples()) is None
    assert "do not fit into memory" in caplog.text


@pytest.mark.parametrize("held", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_no_more_of_what_outputs_of_experts_weigh_is_known_at_once_than_the_limit(tmp_path, held, monkeypatch):
    """Also where the statistics of all their inputs are known together; those that are solved together need two."""
    side, alive, most = 4 * 96 * 96, weakref.WeakSet(), []

    def counted(*arguments, **named):
        found = pull_back(*arguments, **named)
        alive.update(found.values())
        most.append(sum(each.nbytes for each in alive))
        return found

    monkeypatch.setattr("gptqkit.fisher.pull_back", counted)
    monkeypatch.setattr("gptqkit.fisher.STATISTICS_BYTES", held * side)
    quantize(uneven("mixtral", num_hidden_layers=1), tmp_path / "out", samples(8), grid="minmax", two_sided=True)
    assert len(most) > 8 / held
    assert max(most) <= held * side


def test_gradients_are_gone_when_scales_are_tuned(tmp_path, monkeypatch):
    """They take as much as the model, of which tuning has two in memory."""
    alive, left = weakref.WeakSet(), []

    def counted(*arguments):
        found = measure_fisher(*arguments)
        alive.update(found.behind.values())
        return found

    def looked(*arguments, **named):
        left.append(len(alive))
        return tune(*arguments, **named)

    monkeypatch.setattr("gptqkit.pipeline.measure_fisher", counted)
    monkeypatch.setattr("gptqkit.pipeline.tune", looked)
    quantize(build("llama"), tmp_path / "out", grid="minmax", two_sided=True, tune_epochs=1)
    assert left == [0]


@pytest.mark.parametrize(
    ("name", "settings", "limit"),
    [
        ("llama", {}, None),
        pytest.param("llama", {}, 1, marks=pytest.mark.slow),  # byte: each Linear by itself
        pytest.param("mixtral", {"overrides": {"self_attn": {"skip": True}}}, None, marks=pytest.mark.slow),
    ],
)
def test_predictions_of_the_checkpoint_come_nearer_to_the_float_model(tmp_path, name, settings, limit, monkeypatch):
    """With rows whose errors move onto one another, than without; also where only experts are quantized."""
    if limit is not None:
        monkeypatch.setattr("gptqkit.fisher.STATISTICS_BYTES", limit)
    model, tokens, found = uneven(name, num_hidden_layers=1), samples(SAMPLES, 48), []
    expected = outputs(model, samples(8, 48)).log_softmax(-1)
    for two_sided in (False, True):
        out = tmp_path / str(two_sided)
        quantize(model, out, tokens, bits=2, method="qep", two_sided=two_sided, **settings)
        logits = outputs(load(out)[0], samples(8, 48)).log_softmax(-1)
        found.append(float((expected.exp() * (expected - logits)).sum(-1).mean()))
    assert found[1] < 0.97 * found[0]
