import json

import pytest
import torch
from safetensors.torch import save_file

import gptqkit
from gptqkit.calibration.windows import TokenWindows
from gptqkit.errors import ArchitectureError, CalibrationError, ConfigError, GptqkitError, OutputExistsError
from gptqkit.export.gptq import to_tensors
from gptqkit.export.reader import open_checkpoint
from gptqkit.loading import load_float
from gptqkit.quantizer.modules import Target
from gptqkit.quantizer.walk import quantize_blocks
from support.models import MODELS, build, windows


@pytest.fixture
def text_file(small_text, tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(small_text, encoding="utf-8", newline="")
    return path


def config(**changes):
    return gptqkit.QuantizeConfig(**{"bits": 4, "group_size": 32, "sym": False, **changes})


def with_solved_weights(model, result):
    """`model` with the solver's own weights in place of the float ones."""
    for name, weight in result.weights.items():
        Target(name, model.get_submodule(name), result.report.config, f"{name}.weight").replace_weight(
            weight.dequantize()
        )
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_is_what_was_solved_for_every_architecture(name, padded, tmp_path):
    """From the model through the files and back: logits equal to the bit, tied embeddings, biases, Conv1D included."""
    tokens = windows(padded=padded)
    settings = {"config": config(method="gptaq"), "samples": 6, "sequence_length": 24}
    gptqkit.quantize(build(name), tokens.input_ids, tmp_path / "out", **settings)
    loaded, tokenizer = gptqkit.load(tmp_path / "out", backend="torch")
    assert tokenizer is None
    expected = with_solved_weights(build(name), gptqkit.quantize(build(name), tokens.input_ids, **settings))
    with torch.no_grad():
        assert torch.equal(loaded(tokens.input_ids).logits, expected(tokens.input_ids).logits)


@pytest.mark.parametrize(
    "order", [{}, {"desc_act": True}, {"desc_act": True, "static_groups": True}, {"group_size": -1}]
)
@pytest.mark.parametrize(
    ("bits", "sym", "format_"),
    [(2, False, "gptq_v2"), (3, False, "gptq_v2"), (3, True, "gptq"), (4, False, "gptq"), (8, True, "gptq_v2")],
)
def test_codes_scales_and_zeros_reach_the_file_untouched(bits, sym, format_, order, tmp_path):
    settings = config(bits=bits, sym=sym, format=format_, **order)
    model = build("mistral", num_hidden_layers=1)
    tokens = windows().input_ids[:2]
    result = gptqkit.quantize(model, tokens, tmp_path / "out", settings, sequence_length=24)
    solved = quantize_blocks(model, TokenWindows(tokens), settings, device=torch.device("cpu")).weights
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.desc_act == (order == {"desc_act": True})
    assert set(result.weights) == set(solved)
    for name, weight in solved.items():
        stored = checkpoint.quantized_weight(name)
        for part in ("codes", "scale", "zero", "group_index"):
            assert torch.equal(getattr(stored, part), getattr(weight, part)), (name, part)
        for part, tensor in to_tensors(weight, format_).items():
            assert torch.equal(checkpoint.layer(name)[part], tensor)
        if format_ == "gptq":
            assert int(weight.zero.min()) >= 1


def test_example_model_from_text_to_perplexity(tmp_path, example_model, text_file):
    """The whole main job on the real model: the reloaded checkpoint measures exactly what the solver's weights do."""
    steps = []
    result = gptqkit.quantize(
        example_model,
        text_file,
        tmp_path / "out",
        config(bits=3, group_size=128),
        samples=4,
        sequence_length=128,
        evaluate_on=text_file,
        progress=steps.append,
    )
    assert result.path == tmp_path / "out"
    assert {step.stage for step in steps} >= {"quantize", "evaluate"}
    assert all(not module.worse_than_rounding for module in result.report.modules)
    measure = {"sequence_length": 128, "max_windows": 4}
    reloaded = gptqkit.evaluate(tmp_path / "out", text_file, reference=example_model, backend="torch", **measure)
    model, tokenizer = load_float(example_model, device="cpu", dtype="float32")
    solved = gptqkit.evaluate(with_solved_weights(model, result), text_file, tokenizer=tokenizer, **measure)
    assert reloaded.perplexity == solved.perplexity
    assert reloaded.kl_divergence > 0
    report = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    measured = dict(result.report.to_dict()["perplexity"][0])
    assert measured.pop("seconds") > 0  # times stay out of the files: equal jobs write equal files
    assert report["perplexity"] == [measured]
    assert report["perplexity"][0]["dataset"] == text_file.name
    assert report["perplexity"][0]["perplexity"] > 1
    assert sorted(module["name"] for module in report["modules"]) == sorted(result.weights)
    published = "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".json", ".md"))
    assert str(tmp_path) not in published
    assert str(example_model.parent) not in published


def test_the_same_seed_gives_the_same_files(tmp_path, example_model, text_file):
    for name in ("one", "two"):
        gptqkit.quantize(
            example_model,
            text_file,
            tmp_path / name,
            config(method="rtn", group_size=128),
            samples=2,
            sequence_length=64,
        )
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_ready_windows_are_used_as_they_are(tmp_path):
    save_file({"input_ids": windows().input_ids}, tmp_path / "windows.safetensors")
    model = build("mistral")
    from_file = gptqkit.quantize(model, tmp_path / "windows.safetensors", None, config(), sequence_length=24)
    from_tensor = gptqkit.quantize(model, windows().input_ids, None, config(), sequence_length=24)
    assert from_file.path is None
    assert from_file.report.samples == 6
    for name, weight in from_file.weights.items():
        assert torch.equal(weight.codes, from_tensor.weights[name].codes)


def test_an_untied_output_layer_is_quantized_and_loaded(tmp_path):
    model = build("mistral")
    result = gptqkit.quantize(model, windows().input_ids, tmp_path / "out", config(lm_head=True), sequence_length=24)
    loaded, _ = gptqkit.load(tmp_path / "out", backend="torch")
    expected = with_solved_weights(build("mistral"), result)
    with torch.no_grad():
        assert torch.equal(loaded(windows().input_ids).logits, expected(windows().input_ids).logits)


def test_overrides_reach_the_files(tmp_path):
    overrides = {
        "layers.0.": gptqkit.ModuleOverride(bits=8, group_size=-1),
        "down_proj": gptqkit.ModuleOverride(skip=True),
    }
    result = gptqkit.quantize(
        build("mistral"), windows().input_ids, tmp_path / "out", config(overrides=overrides), sequence_length=24
    )
    loaded, _ = gptqkit.load(tmp_path / "out", backend="torch")
    expected = with_solved_weights(build("mistral"), result)
    with torch.no_grad():
        assert torch.equal(loaded(windows().input_ids).logits, expected(windows().input_ids).logits)
    assert {spec.bits for spec in open_checkpoint(tmp_path / "out").layers.values()} == {4, 8}


def test_what_cannot_work_is_refused_before_any_work(tmp_path):
    (tmp_path / "out").mkdir()
    worked = []
    with pytest.raises(OutputExistsError, match="exists"):
        gptqkit.quantize(build("llama"), windows().input_ids, tmp_path / "out", config(), progress=worked.append)
    with pytest.raises(CalibrationError, match="needs calibration text"):
        gptqkit.quantize(build("llama"), None, None, config())
    with pytest.raises(CalibrationError, match="give `out`"):
        gptqkit.quantize(build("llama"), windows().input_ids, None, config(), evaluate_on="x.txt")
    with pytest.raises(CalibrationError, match="vocabulary"):
        gptqkit.quantize(build("llama"), windows().input_ids + 90, None, config(), sequence_length=24)
    with pytest.raises(ArchitectureError, match="model is a Linear"):
        gptqkit.quantize(torch.nn.Linear(32, 32), windows().input_ids, None, config())
    with pytest.raises(ConfigError, match="group_size 48"):
        gptqkit.quantize(
            build("llama"), windows().input_ids, None, config(group_size=48), sequence_length=24, progress=worked.append
        )
    assert not worked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"evaluate_on": "nowhere.txt"}, "nowhere.txt"),
        ({"evaluate_on": "short.txt"}, "less than one window"),
        ({"out": "short.txt/out"}, "is no directory"),
        ({"sequence_length": 513}, "the model has 512 positions"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"seed": 1 << 70}, "seed is"),
        ({"device": "meta"}, "device is 'meta'"),
    ],
)
def test_no_work_is_lost_to_what_can_be_known_before(options, message, tmp_path, example_model, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("Too short.")
    worked = []
    given = {"out": "out", "samples": 2, "sequence_length": 64, "progress": worked.append, **options}
    with pytest.raises((GptqkitError, NotADirectoryError), match=message):
        gptqkit.quantize(example_model, text_file, config=config(), **given)
    assert not worked
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_a_float_model_is_never_overwritten(tmp_path):
    build("llama").save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OutputExistsError, match="something else than a quantized model"):
        gptqkit.quantize(tmp_path, None, tmp_path, config(method="rtn"), overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_model_in_training_mode_comes_back_as_it_was():
    model = build("llama").train()
    gptqkit.quantize(model, windows().input_ids, None, config(), sequence_length=24)
    assert model.training
