"""The model card tells what a reader needs and nothing that was not measured."""

import pytest

from gptqkit.export.card import model_card, pipeline_tag
from gptqkit.quantizer.config import QuantizeConfig

CONFIG = QuantizeConfig(bits=3, group_size=-1, sym=False, method="gptaq", format="gptq").to_dict()
MODULES = [
    {"name": "model.layers.0.q_proj", "error": 0.1, "rounding_error": 0.2, "worse_than_rounding": False},
    {"name": "model.layers.0.down_proj", "error": 0.3, "rounding_error": 0.25, "worse_than_rounding": True},
    {"name": "model.layers.1.q_proj", "error": None, "rounding_error": None},
    {"name": "lm_head", "error": 0.05, "rounding_error": 0.15, "worse_than_rounding": False},
]


def test_whole_card():
    report = {
        "model": "org/small",
        "config": CONFIG,
        "samples": 8,
        "sequence_length": 64,
        "seed": 0,
        "versions": {"gptqkit": "1.2", "torch": "2.0"},
        "modules": MODULES,
        "perplexity": [{"dataset": "books", "sequence_length": 64, "perplexity": 9.87654, "tokens": 630}],
    }
    lines = model_card(report).splitlines()
    end = lines.index("---", 1)
    assert lines[0] == "---"
    assert {"- gptq", "- 3-bit", "base_model: org/small", "base_model_relation: quantized"} <= set(lines[1:end])
    for line in (
        "# small, 3-bit GPTQ",
        "| bits | 3 |",
        "| group size | one group per row |",
        "| symmetric | False |",
        "| method | gptaq |",
        "| calibration | 8 samples of 64 tokens |",
        "| seed | 0 |",
        "| quantizer | gptqkit 1.2 |",
        "| books | 64 | 630 | 9.877 |",
        'model, tokenizer = gptqkit.load("path/to/this/directory")',
    ):
        assert line in lines
    assert any("asymmetric version 1" in line for line in lines)
    [errors] = [line for line in lines if "Relative output error" in line]
    assert "0.15000 on average over 3 modules (plain rounding: 0.20000)" in errors
    assert "at most 0.30000, in `model.layers.0.down_proj`" in errors
    assert errors.endswith("Worse than plain rounding: `model.layers.0.down_proj`.")


def test_what_transformers_needs_for_other_formats():
    for name, packages in (("awq", "`gptqmodel`"), ("compressed-tensors", "`compressed-tensors`")):
        card = model_card({"config": {**CONFIG, "format": name}})
        assert f"which needs {packages} for it" in card
        assert f"- {name}\n" in card
    assert "AutoModel" not in model_card({"config": {**CONFIG, "format": "marlin"}})


def test_what_is_not_known_is_left_out():
    card = model_card({"model": "local-model", "config": {**CONFIG, "sym": True}})
    assert not any(text in card for text in ("base_model", "## Perplexity", "## Errors", "None", "asymmetric"))


@pytest.mark.parametrize(
    ("files", "config", "tag"),
    [
        ("generation_config.json", "{}", "text-generation"),
        ("", "{}", "feature-extraction"),
        ("modules.json generation_config.json", "{}", "sentence-similarity"),
        ("generation_config.json", '{"vision_config": {}}', "image-text-to-text"),
        ("generation_config.json", '{"is_encoder_decoder": true}', "text2text-generation"),
    ],
)
def test_what_a_model_is_for_is_seen_from_its_files(files, config, tag, tmp_path):
    for name in files.split():
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text(config)
    assert pipeline_tag(tmp_path) == tag
    card = model_card({"config": CONFIG}, tag)
    assert f"pipeline_tag: {tag}" in card.splitlines()
    assert ("AutoModelForCausalLM" in card) == (tag == "text-generation")
    assert card.count("```") == (4 if tag == "text-generation" else 2)
