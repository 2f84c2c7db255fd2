"""The model card tells what a reader needs and nothing that was not measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptqkit.export.card import model_card, pipeline_tag
from gptqkit.quantizer.config import QuantizeConfig

QUANTIZATION: dict[str, Any] = {
    "bits": 3,
    "group_size": -1,
    "sym": False,
    "checkpoint_format": "gptq",
    "meta": {"quantizer": ["gptqkit:1.2"], "gptqkit": QuantizeConfig(bits=3, sym=False, method="gptaq").to_dict()},
}

MODULES = [
    {"name": "model.layers.0.q_proj", "layer": 0, "error": 0.1, "worse_than_rounding": False},
    {"name": "model.layers.0.down_proj", "layer": 0, "error": 0.3, "worse_than_rounding": True},
    {"name": "model.layers.1.q_proj", "layer": 1, "error": None},
    {"name": "lm_head", "layer": None, "error": 0.05},
]


def test_whole_card() -> None:
    report = {
        "model": "org/small",
        "samples": 8,
        "sequence_length": 64,
        "seed": 0,
        "modules": MODULES,
        "perplexity": [{"dataset": "books", "sequence_length": 64, "perplexity": 9.87654, "tokens": 630}],
    }
    lines = model_card(report, QUANTIZATION).splitlines()
    end = lines.index("---", 1)
    assert lines[0] == "---"
    assert {"- gptq", "- 3-bit", "base_model: org/small", "base_model_relation: quantized"} <= set(lines[1:end])
    for line in (
        "# small, 3-bit GPTQ",
        "| group size | one group per row |",
        "| method | gptaq |",
        "| calibration | 8 samples of 64 tokens |",
        "| seed | 0 |",
        "| books | 64 | 630 | 9.877 |",
        "| 0 | 2 | 0.20000 | 0.30000 | `down_proj` |",
        "| outside the layers | 1 | 0.05000 | 0.05000 | `lm_head` |",
        "Worse than plain rounding: `model.layers.0.down_proj`.",
        'model, tokenizer = gptqkit.load("path/to/this/directory")',
    ):
        assert line in lines
    assert any("asymmetric version 1" in line for line in lines)


def test_what_is_not_known_is_left_out() -> None:
    card = model_card({"model": "local-model"}, {**QUANTIZATION, "meta": None, "sym": True})
    assert "base_model" not in card
    assert "## Perplexity" not in card
    assert "## Errors" not in card
    assert "None" not in card
    assert "asymmetric" not in card


@pytest.mark.parametrize(
    ("files", "tag"),
    [
        (["generation_config.json"], "text-generation"),
        ([], "feature-extraction"),
        (["modules.json"], "sentence-similarity"),
        (["modules.json", "generation_config.json"], "sentence-similarity"),
        (["generation_config.json", "vision"], "image-text-to-text"),
    ],
)
def test_what_a_model_is_for_is_seen_from_its_files(files: list[str], tag: str, tmp_path: Path) -> None:
    config = {"vision_config": {}} if "vision" in files else {}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in files:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    assert pipeline_tag(tmp_path) == tag
    card = model_card({}, QUANTIZATION, tag)
    assert f"pipeline_tag: {tag}" in card.splitlines()
    assert ("AutoModelForCausalLM" in card) == (tag == "text-generation")
    assert card.count("```") == (4 if tag == "text-generation" else 2)
