"""The model card tells what a reader needs and nothing that was not measured."""

import re
import time

import pytest
import torch
import transformers
import yaml

import gptqkit
from gptqkit.export.card import pipeline_tag, write_card
from gptqkit.export.convert import convert
from gptqkit.export.inspect import inspect
from gptqkit.quantizer.config import ModuleOverride
from support.models import build, samples

OVERRIDES = {r"(k|v)_proj$": ModuleOverride(bits=8, group_size=-1), r"0\.mlp": ModuleOverride(skip=True)}
OVERRIDES["o_proj"] = ModuleOverride(type="q6_k")
MODULES = [
    {"name": "model.layers.0.q_proj", "error": 0.1, "rounding_error": 0.2, "worse_than_rounding": False},
    {"name": "model.layers.0.down_proj", "error": 0.3, "rounding_error": 0.25, "worse_than_rounding": True},
    {"name": "model.layers.1.q_proj", "error": None, "rounding_error": None},
    {"name": "lm_head", "error": 0.05, "rounding_error": 0.15, "worse_than_rounding": False},
]
REPORT = {
    "model": "org/small",
    "samples": 8,
    "sequence_length": 64,
    "seed": 0,
    "versions": {"gptqkit": "1.2", "torch": "2.0"},
    "left_in_float": {"model.layers.0.odd": "it is odd"},
    "modules": MODULES,
    "perplexity": [{"dataset": "books", "sequence_length": 64, "perplexity": 9.87654, "tokens": 630}],
}
LICENSED = "---\nlicense: other\nlicense_name: deepseek\nlanguage:\n- en\n- no\nbase_model: org/older\n---\n# Small\n"


def front_matter(card):
    return yaml.load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1], yaml.BaseLoader)


def test_whole_card(material, tmp_path):
    made = material(bits=3, group_size=32, sym=False, method="gptaq", overrides=OVERRIDES, format="gptq")
    made.report = REPORT
    made.other_tensors |= {f"model.layers.1.self_attn.{name}_proj.weight": torch.ones(64, 64) for name in "kvo"}
    out = made.write(tmp_path / "out", generation_config={})
    (tmp_path / "README.md").write_text(LICENSED)
    (out / "heatmap.svg").touch()
    write_card(out, tmp_path)
    card = (out / "README.md").read_text()
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "deepseek",
        "language": ["en", "no"],
        "tags": ["gptq", "gptqkit", "3-bit"],
        "base_model": "org/small",
        "base_model_relation": "quantized",
    }
    for line in (
        "# small, 3-bit GPTQ",
        "| bits | 3 |",
        "| group size | 32 |",
        "| symmetric | False |",
        "| method | gptaq |",
        r"| override of `(k\|v)_proj$` | bits 8, group size one group per row |",
        r"| override of `0\.mlp` | floating point |",
        "| override of `o_proj` | type q6_k |",
        "| calibration | 8 samples of 64 tokens |",
        "| seed | 0 |",
        "| quantizer | gptqkit 1.2 |",
        "| books | 64 | 630 | 9.877 |",
        "![Errors of modules and blocks against plain rounding](heatmap.svg)",
        'model, tokenizer = gptqkit.load("path/to/this/directory")',
    ):
        assert line in card.splitlines()
    [floats] = re.findall(r"^\d+ modules of the blocks: .*", card, re.MULTILINE)
    names = [f"`{name}`" for name in inspect(out).float_modules]
    assert floats.startswith(f"4 modules of the blocks: {', '.join(names)}. 1 ")
    assert floats.endswith(" could not be quantized (it is odd).")
    [errors] = re.findall("^Relative output error.*", card, re.MULTILINE)
    assert "0.15000 on average over 3 modules (plain rounding: 0.20000)" in errors
    assert "at most 0.30000, in `model.layers.0.down_proj`" in errors
    assert errors.endswith("Worse than plain rounding: `model.layers.0.down_proj`.")


@pytest.mark.parametrize(("name", "packages"), [("awq", "`gptqmodel`"), ("compressed-tensors", "`compressed-tensors`")])
def test_what_transformers_needs_for_other_formats(material, tmp_path, name, packages):
    convert(material(format="gptq_v2").write(tmp_path / "v2"), tmp_path / "out", format=name)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"the import of gptqkit comes first (without it, transformers needs {packages}):" in card
    assert "import gptqkit\nfrom transformers import AutoModel, " in card  # which is no language model
    assert f"- {name}\n" in card


@pytest.mark.parametrize("sym", [True, False])
def test_the_programs_are_those_that_inspect_names_also_after_converting(material, tmp_path, sym):
    out = material(sym=sym, format="gptq_v2").write(tmp_path / "out", generation_config={})
    (out / "README.md").write_text(LICENSED)
    convert(out, tmp_path / "v1", format="gptq")
    found = {}
    for path in (out, tmp_path / "v1"):
        write_card(out, out)
        card = (path / "README.md").read_text()
        readers = [reader.name for reader in inspect(path).readers if reader.loads]
        found[path.name] = readers
        assert f"\nLoaded by: {', '.join(readers)}. " in card
        assert "AutoModelForCausalLM" in card
        assert ("without it, transformers needs" in card) == ("transformers" in readers)
        assert front_matter(card)["license_name"] == "deepseek"
    assert found["out"] != found["v1"]


def test_bits_that_were_chosen_are_those_of_most_layers(material, tmp_path):
    made = material(target_bits=3.5, overrides={"0.*q_proj": ModuleOverride(bits=4), "": ModuleOverride(bits=3)})
    card = (made.write(tmp_path / "out") / "README.md").read_text()
    assert inspect(tmp_path / "out").bits == {3: 3, 4: 1}
    assert ", 3-bit GPTQ\n" in card
    assert front_matter(card)["tags"][-1] == "3-bit"
    assert "| target_bits | 3.5 |" in card
    assert "| modules of 3 bits | 3 |\n| modules of 4 bits | 1 |\n| bits per weight, scales and indices" in card
    assert "| bits |" not in card


def test_a_choice_of_bits_has_no_row_for_every_module(material, tmp_path):
    chosen = {rf"^model\.layers\.0\.self_attn\.{name}_proj$": ModuleOverride(bits=8) for name in "qk"}
    overrides = {"mlp": ModuleOverride(bits=2), **chosen}
    card = (material(target_size="1MB", overrides=overrides).write(tmp_path / "out") / "README.md").read_text()
    assert "| override of `mlp` | bits 2 |" in card
    assert "self_attn" not in card.partition("## Loading")[0]


def test_a_file_for_llama_cpp_is_loaded_as_the_card_says(example_model, tmp_path):
    build("llama", vocab_size=4096).save_pretrained(tmp_path / "float")
    how = {"method": "rtn", "type": "Q4_0"}
    gptqkit.quantize(tmp_path / "float", None, tmp_path / "out", how, tokenizer=example_model)
    card = (tmp_path / "out" / "README.md").read_text()
    line = 'AutoModelForCausalLM.from_pretrained("path/to/this/directory", gguf_file="model.gguf")'
    assert line in card
    known = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM}  # in vars() only once somebody has used it
    found = eval(line.replace("path/to/this/directory", str(tmp_path / "out")), known)
    ours, _ = gptqkit.load(tmp_path / "out", device="cpu")
    ids = samples().input_ids.clamp(max=94)
    with torch.no_grad():
        assert torch.allclose(found(ids).logits, ours(ids).logits, atol=1e-4)


def test_what_is_not_known_is_left_out(material, tmp_path):
    made = material()
    made.report = {"model": "local-model"}
    card = (made.write(tmp_path / "out") / "README.md").read_text()
    words = (
        "base_model",
        "license",
        "language",
        "## Perplexity",
        "## Errors",
        "## Left",
        "override",
        "None",
        "heatmap",
    )
    assert not any(text in card for text in words)


@pytest.mark.parametrize(
    "matter",
    [
        "",
        "---\nlicense: [[mit]]\nlanguage: {en: de}\n---\n",
        '---\nlicense: ""\nlanguage: ["\\e[2J"]\n---\n',
        "---\nlicense: [mit\n---\n",
        "---\n- license: mit\n---\n",
        "---\nlicense: mit\n",
        "---\nlicense: " + "[" * 20000 + "\n---\n",
        "---\na: " + "x" * 70000 + "\nlicense: mit\n---\n",
    ],
)
def test_front_matter_that_is_none_says_nothing(material, tmp_path, matter):
    out = material().write(tmp_path / "out")
    (out / "README.md").write_text(matter)
    write_card(out, out)
    card = front_matter((out / "README.md").read_text())
    assert not {"license", "language"} & card.keys()


def test_front_matter_that_never_ends_takes_no_time(material, tmp_path):
    out = material().write(tmp_path / "out")
    (out / "README.md").write_text("---" + "\n" * 60000)
    begin = time.process_time()
    write_card(out, out)
    assert time.process_time() - begin < 1


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
