"""A dozen of the families that `make families` tries: each has something that the pipeline must cope with."""

import copy

import pytest
import torch
from safetensors.torch import load_file

import families
import gptqkit
import random_settings
from support.models import samples
from support.pipeline import quantize, share_that_differs, weights
from support.solvers import solve_gptaq

OK = {  # and how many Linears stay in floating point
    "bamba": 0,  # state spaces and attention
    "deberta-v2": 0,  # blocks that return tuples and share positions
    "deepseek_v2": 0,  # latent attention, experts
    "falcon_h1": 0,  # both in one block
    "gemma3n_text": 12,  # several versions of the hidden states; odd shapes; keys and values written for later blocks
    "gemma4_unified_text": 0,
    "glm_moe_dsa": 2,  # choices of tokens handed from block to block
    "inkling2_text": 1,  # stored names that do not end in .weight
    "lfm2_moe": 0,  # blocks of two kinds
    "longt5": 0,  # both stacks; position biases handed from block to block
    "mamba2": 0,
    "marian": 0,  # both stacks; positions that are in no file
    "qwen3_5": 2,  # linear attention, with two Linears of odd shapes
    "recurrent_gemma": 0,
    "whisper": 8,  # a decoder by itself: nothing calls its attention to an encoder
    "zamba2": 0,  # blocks that share weights
}
SLOW = (
    "bamba",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_unified_text",
    "glm_moe_dsa",
    "inkling2_text",
    "lfm2_moe",
    "longt5",
    "mamba2",
    "marian",
    "recurrent_gemma",
    "zamba2",
)
"""`make families` tries them, too."""
REFUSED = {
    "musicgen": "has no embedding of token ids",
    "reformer": "returns a ReformerOutput, not hidden states",
}
RECEIVED = [  # and whether samples are padded
    ("t5", True),  # both stacks, position biases handed on, keys and values of what left the encoder
    ("xlnet", True),  # samples in the second axis of hidden states
    pytest.param("zaya", True, marks=pytest.mark.slow),  # states of routers handed from block to block
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("bart", False),
            ("fsmt", True),
            ("gemma4_text", True),
            ("glm_moe_dsa", False),
            ("pegasus_x", False),
            ("t5gemma2", True),
        )
    ),
]


def kind_of(family):
    return next(kind for kind in ("encoder-decoder", *families.KINDS) if family in families.KINDS[kind])


def tried(family, folder):
    return families.outcome(
        kind_of(family),
        family,
        folder,
        {"grid": "minmax", "learn_iterations": 1, "refine_rounds": 0, "two_sided": True},
    )


def inputs_of(model, names, tokens):
    """What modules receive, (rows, in), as the samples go one by one and whole, without padding, through the model."""
    seen, cut = {name: [] for name in names}, 0

    def keep(given, rows):
        rows.append(given[:, :cut] if given.shape[1:2] == (512,) else given)  # to which PEGASUS-X's encoder pads

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, rows=rows: keep(given[0], rows))
        for name, rows in seen.items()
    ]
    masks = tokens.input_ids > -1 if tokens.attention_mask is None else tokens.attention_mask
    for ids, mask in zip(tokens.input_ids, masks, strict=True):
        text = ids[mask][None]
        named = {"input_ids": text}
        if model.config.is_encoder_decoder:
            cut = max(1, text.shape[1] // 2)
            start = torch.tensor([[model.config.decoder_start_token_id]])
            named = {"input_ids": text[:, :cut], "decoder_input_ids": torch.cat([start, text[:, cut:]], 1)}
        with torch.no_grad():
            model(**named, use_cache=False) if model.config.is_encoder_decoder else model(**named)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat([each.flatten(0, -2) for each in rows]).double() for name, rows in seen.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "padded"), RECEIVED)
def test_every_linear_is_solved_on_what_it_receives_in_the_quantized_model(family, padded, tmp_path):
    """And beside what it receives in the float model; stacked experts, which are no modules there, are only put in."""
    model, _ = families.build(kind_of(family), family, tmp_path / "float")
    quantized, tokens = copy.deepcopy(model), samples(padded=padded)
    report = quantize(tmp_path / "float", tmp_path / "out", tokens, method="gptaq", bits=3).report
    linears = dict(model.named_modules())
    floats = inputs_of(model, [each.name for each in report.modules if each.name in linears], tokens)
    stored, stacked = weights(tmp_path / "out"), set()
    for module in report.modules:
        if module.name in linears:
            x = inputs_of(quantized, [module.name], tokens)[module.name]
            weight = linears[module.name].weight.detach()
            found = stored[module.name.replace(".text_model.", ".")]  # which the files of t5gemma2 leave out
            assert module.tokens == len(x)
            hessian, cross = (part.T @ x / len(x) for part in (x, floats[module.name] - x))
            settings = {"bits": 3, "group_size": found.group_size, "sym": False, "method": "gptaq", "refine_rounds": 0}
            config = gptqkit.QuantizeConfig(**settings)
            expected = solve_gptaq(weight, hessian.float(), cross.float(), config).weight
            assert share_that_differs(expected, found) < 0.02, module.name
            lost = x @ (weight - found.dequantize()).T.double()
            assert module.error == pytest.approx(float(lost.norm() / (x @ weight.T.double()).norm()), rel=1e-3)
            quantized.get_submodule(module.name).weight.data = found.dequantize()
        elif module.layer not in stacked:  # all of a layer at once
            stacked.add(module.layer)
            names = [each.name for each in report.modules if each.layer == module.layer and each.name not in linears]
            families.put_quantized(quantized, tmp_path / "float", tmp_path / "out", names)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in OK])
def test_what_is_loaded_computes_what_the_float_model_does_with_its_weights(family, tmp_path):
    found = tried(family, tmp_path)
    assert found["result"] == "ok", found
    assert found["left"] == OK[family]
    assert found["distance"] < 0.7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (15, *range(18, 50)))])
def test_random_settings(number, tmp_path):
    found = random_settings.outcome(number, tmp_path)
    assert found["result"] in ("ok", "refused")[: 1 if number < 18 else 2], found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_done_is_refused_before_any_work(family, tmp_path):
    found = tried(family, tmp_path)
    assert found["result"] == "refused", found
    assert REFUSED[family] in found["why"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_resuming_a_model_with_hidden_states_of_another_form_and_others_beside_them(tmp_path):
    _, inputs = families.build("language model", "gemma3n_text", tmp_path / "float")
    calibration, run = gptqkit.Calibration(inputs["input_ids"], sequence_length=32), {"activations": "disk"}
    pairs = {"method": "qep", "grid": "minmax", "refine_rounds": 0}

    def stop(progress):
        if progress.layer == 3:  # which is given the keys and values of another
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gptqkit.quantize(tmp_path / "float", calibration, tmp_path / "resumed", pairs, run=run, progress=stop)
    steps = []
    run["resume"] = True
    gptqkit.quantize(tmp_path / "float", calibration, tmp_path / "resumed", pairs, run=run, progress=steps.append)
    assert {step.layer for step in steps} == {3}
    gptqkit.quantize(tmp_path / "float", calibration, tmp_path / "whole", pairs)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("resumed", "whole"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.filterwarnings("ignore")
def test_padding_is_told_apart_in_hidden_states_of_another_form(tmp_path):
    """Gemma3n's blocks take several versions of every token's."""
    _, inputs = families.build("language model", "gemma3n_text", tmp_path / "float")
    texts = [row[: 32 - 5 * number].tolist() for number, row in enumerate(inputs["input_ids"])]
    calibration = gptqkit.Calibration(texts, samples=4, sequence_length=32, concatenate=False)
    settings = {"method": "gptq", "grid": "minmax", "refine_rounds": 0}
    report = gptqkit.quantize(tmp_path / "float", calibration, tmp_path / "out", settings).report
    assert report.tokens == sum(map(len, texts)) < 4 * 32
    assert all(module.error is not None for module in report.modules)
