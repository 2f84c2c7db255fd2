"""The model card of a quantized checkpoint: README.md, for people and for the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..units import counted
from .checkpoint import REPORT
from .files import check_file
from .inspect import CheckpointSummary, inspect
from .modules import CHOSEN
from .readers import TRANSFORMERS
from .shards import read_json, some

HEAT_MAP = "heatmap.svg"
"""The picture that a card shows where it stands beside it: errors against plain rounding."""

LONGEST_MATTER = 1 << 16  # characters of front matter that are parsed

_INHERITED = ("license", "license_name", "license_link", "language")

_LOADING = """\
## Loading

```python
import gptqkit

model, tokenizer = gptqkit.load("path/to/this/directory")
```"""

_GGUF = "\n\n`model.gguf` holds all that llama.cpp needs: `llama-cli -m model.gguf`."

_MULTIPLIED = """

With transformers, which multiplies the weights out (and needs `gguf` for it):

```python
from transformers import {model}, AutoTokenizer

model = {model}.from_pretrained("path/to/this/directory", gguf_file="model.gguf")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```"""

_POOLING = "\n\nThe model returns hidden states of tokens; pool them as `1_Pooling/config.json` says."

_OWN_CODE = """

A config names Python code that comes with it, which runs only if asked for:
`gptqkit.load(..., trust_remote_code=True)`."""

_TRANSFORMERS = """

With transformers, where the import of gptqkit comes first{otherwise}:

```python
import gptqkit
from transformers import {model}, AutoTokenizer

model = {model}.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```"""

_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-text-to-text": "AutoModelForImageTextToText",
}
"""What transformers calls models by what they are for; AutoModel, if they are not here."""

# What transformers needs to load a family of formats without gptqkit.
_PACKAGES = {
    "gptq": "`optimum` and `gptqmodel`",
    "awq": "`gptqmodel`",
    "compressed-tensors": "`compressed-tensors`",
}


def write_card(directory: Path, source: Path) -> None:
    """Write README.md of a finished checkpoint from the report and the files in its directory.

    Front matter, settings, what stayed in floating point, perplexity, errors, and how to load it. What the report does
    not say is left out, but for "config", the settings, which must be there.

    License and language are those of the README.md in `source`: the folder of the float model, or of the same
    checkpoint before. CheckpointError where the checkpoint is damaged.
    """
    report, summary, pipeline = read_json(directory / REPORT), inspect(directory), pipeline_tag(directory)
    model, config = report.get("model"), report["config"]
    bits = max(summary.bits, key=lambda bits: summary.bits[bits])  # of most layers, where they were chosen
    kind = f"{config.get('type') or f'{bits}-bit'} {_family(config).upper()}"
    sections = [
        _front_matter(model, [_family(config), "gptqkit", f"{bits}-bit"], pipeline, _inherited(source / "README.md")),
        f"# {str(model).rsplit('/', 1)[-1]}, {kind}" if model else f"# {kind} checkpoint",
        _settings(report, config, summary),
        _floats(summary, report.get("left_in_float") or {}),
        _perplexity(report.get("perplexity") or []),
        _errors(report.get("modules") or [], picture=(directory / HEAT_MAP).exists()),
        _loading(summary, _family(config), pipeline, own_code=_own_code(directory)),
    ]
    card = "\n\n".join(section for section in sections if section) + "\n"
    (directory / "README.md").write_text(card, encoding="utf-8", newline="\n")


def pipeline_tag(directory: Path) -> str:
    """Return what the model in a finished directory is for, as the Hub calls it.

    Only models that generate text have a generation_config.json, only those of sentence-transformers a modules.json.
    """
    if (directory / "modules.json").exists():
        return "sentence-similarity"
    if not (directory / "generation_config.json").exists():
        return "feature-extraction"
    config = read_json(directory / "config.json")
    if "vision_config" in config:
        return "image-text-to-text"
    return "text2text-generation" if config.get("is_encoder_decoder") is True else "text-generation"


def _own_code(directory: Path) -> bool:
    """Whether the model's config or the tokenizer's names code that comes with it."""
    files = [directory / name for name in ("config.json", "tokenizer_config.json")]
    return any("auto_map" in read_json(file) for file in files if file.exists())


def _family(config: Mapping[str, Any]) -> str:
    """Return what versions of a format have in common: "gptq" of "gptq_v2"."""
    return str(config["format"]).partition("_")[0]


def _inherited(readme: Path) -> dict[str, Any]:
    """Return what the front matter of a model card says of license and language, as far as it is readable text."""
    if not readme.is_file():
        return {}
    with check_file(readme).open(encoding="utf-8-sig", errors="replace") as file:
        matter = re.match(r"---[ \t]*\n(.*?)\n---\s", file.read(LONGEST_MATTER), re.DOTALL)
    try:
        values = yaml.load(matter[1], yaml.BaseLoader) if matter else None  # BaseLoader: Norwegian is "no", not False
    except (yaml.YAMLError, RecursionError):
        return {}
    found = {key: values.get(key) for key in _INHERITED} if isinstance(values, dict) else {}
    return {key: value for key, value in found.items() if value and all(map(_is_text, _listed(value)))}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value)


def _front_matter(model: object, tags: Sequence[str], pipeline: str, inherited: Mapping[str, Any]) -> str:
    """Return YAML that the Hub reads; with a base model only where the name is one of the Hub's."""
    values: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": pipeline, **inherited, "tags": tags}
    if isinstance(model, str) and model.count("/") == 1 and all(model.split("/")):
        values |= {"base_model": model, "base_model_relation": "quantized"}
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}---"


def _settings(report: Mapping[str, Any], config: Mapping[str, Any], summary: CheckpointSummary) -> str:
    size, samples, version = config["group_size"], report.get("samples"), (report.get("versions") or {}).get("gptqkit")
    own = ["target_bits", "target_size", "quality", "method"]
    own += ["desc_act", "act_group_aware", "static_groups", "damp_percent"]
    chosen = any(config.get(name) is not None for name in own[:2])
    widths = {f"modules of {bits} bits": count for bits, count in summary.bits.items()} if chosen else {}
    overrides = (config.get("overrides") or {}).items()
    shown = {pattern: own for pattern, own in overrides if not (chosen and CHOSEN.fullmatch(pattern))}
    asked = not chosen and (size or -1) in summary.group_sizes
    sizes = [size or -1] if asked else summary.group_sizes  # what was asked for, or is
    rows = {
        "bits": None if chosen else config["bits"],
        **widths,
        "bits per weight, scales and indices included": f"{summary.bits_per_weight:.4g}",
        "group size": ", ".join("one group per row" if each == -1 else str(each) for each in sizes),
        "symmetric": config["sym"],
        "format": config["format"],
        "type": config.get("type"),
        **{name: config.get(name) for name in own},
        **{f"override of `{pattern}`": _override(changes) for pattern, changes in shown.items()},
        "calibration": f"{counted(samples, 'sample')} of {report.get('sequence_length')} tokens" if samples else None,
        "seed": report.get("seed"),
        "quantizer": version and f"gptqkit {version}",
    }
    known = [(name, value) for name, value in rows.items() if value is not None]
    return "## Settings\n\n" + _table(("setting", "value"), known)


def _override(changes: Mapping[str, Any]) -> str:
    if changes.get("skip"):
        return "floating point"
    size = changes.get("group_size")
    rows = {"type": changes.get("type"), "bits": changes.get("bits")}
    rows["group size"] = "one group per row" if size == -1 else size
    return ", ".join(f"{name} {value}" for name, value in rows.items() if value is not None)


def _floats(summary: CheckpointSummary, reasons: Mapping[str, str]) -> str:
    """Return which modules of the blocks are not quantized; those that could not be, with their reasons."""
    names = summary.float_modules
    if not names:
        return ""
    text = f"## Left in floating point\n\n{counted(len(names), 'module')} of the blocks: "
    text += f"{some(f'`{name}`' for name in names)}."
    why = dict.fromkeys(map(str, reasons.values()))
    return text + (f" {len(reasons)} of all modules could not be quantized ({some(why)})." if reasons else "")


def _perplexity(measured: Sequence[Mapping[str, Any]]) -> str:
    if not measured:
        return ""
    rows = []
    for row in measured:
        value = "not finite" if row["perplexity"] is None else f"{row['perplexity']:.3f}"
        rows.append((row["dataset"], row["sequence_length"], row["tokens"], value))
    note = "Measured on these files through their quantized kernels, windows without overlap."
    titles = ("data set", "sequence length", "tokens", "perplexity")
    return f"## Perplexity\n\n{note}\n\n" + _table(titles, rows)


def _errors(modules: Sequence[Mapping[str, Any]], *, picture: bool) -> str:
    """Return the mean and the largest error, and a picture; quantization_report.json has all of them."""
    known = [module for module in modules if module.get("error") is not None]
    if not known:
        return ""
    mean, rounding = (sum(float(module[key]) for module in known) / len(known) for key in ("error", "rounding_error"))
    worst = max(known, key=lambda module: float(module["error"]))
    text = (
        "## Errors\n\nRelative output error ||(W - Q)X|| / ||WX|| on the calibration data: "
        f"{mean:.5f} on average over {counted(len(known), 'module')} (plain rounding: {rounding:.5f}), at most "
        f"{worst['error']:.5f}, in `{worst['name']}`. Every module is in `quantization_report.json`."
    )
    flagged = [f"`{module['name']}`" for module in known if module.get("worse_than_rounding")]
    text += f" Worse than plain rounding: {some(flagged)}." if flagged else ""
    return text + (f"\n\n![Errors of modules and blocks against plain rounding]({HEAT_MAP})" if picture else "")


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _loading(summary: CheckpointSummary, family: str, pipeline: str, *, own_code: bool) -> str:
    """Return how to load it, and which programs can."""
    readers = [reader.name for reader in summary.readers if reader.loads]
    text = _LOADING + _POOLING * (pipeline == "sentence-similarity") + _GGUF * (family == "gguf") + _OWN_CODE * own_code
    kind, alone = _CLASSES.get(pipeline, "AutoModel"), TRANSFORMERS in readers
    if family == "gguf" and alone:
        text += _MULTIPLIED.format(model=kind)
    elif family != "gguf" and not own_code:
        without = f" (without it, transformers needs {_PACKAGES[family]})" if alone and family in _PACKAGES else ""
        text += _TRANSFORMERS.format(model=kind, otherwise=without)
    return f"{text}\n\nLoaded by: {', '.join(readers)}. `gptqkit inspect` says why others cannot load it."
