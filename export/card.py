"""The model card of a quantized checkpoint: README.md, for people and for the Hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .shards import read_json, some

_LOADING = """\
## Loading

```python
import gptqkit

model, tokenizer = gptqkit.load("path/to/this/directory")
```"""

_POOLING = "\n\nThe model returns hidden states of tokens; pool them as `1_Pooling/config.json` says."

_TRANSFORMERS = """

With transformers (which needs `optimum` and `gptqmodel` for it):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```"""

_ASYMMETRIC = """

GPTQModel, and with it transformers, refuses asymmetric version 1 checkpoints of other programs; `gptqkit convert` makes
version 2 of it without loss."""


def pipeline_tag(directory: Path) -> str:
    """Return what the model in a finished directory is for, as the Hub calls it.

    Only models that generate text have a generation_config.json, only those of sentence-transformers a modules.json.
    """
    if (directory / "modules.json").exists():
        return "sentence-similarity"
    if not (directory / "generation_config.json").exists():
        return "feature-extraction"
    return "image-text-to-text" if "vision_config" in read_json(directory / "config.json") else "text-generation"


def model_card(report: Mapping[str, Any], pipeline: str = "text-generation") -> str:
    """Return README.md: front matter, settings, measured perplexity and errors, how to load the checkpoint.

    Args:
        report: The quantization report, as written to quantization_report.json. Keys that are missing are left out, but
            for "config", the settings, which must be there.
        pipeline: What the model is for; see `pipeline_tag`.
    """
    model, config = report.get("model"), report["config"]
    kind = f"{config.get('type') or str(config['bits']) + '-bit'} {_family(config).upper()}"
    sections = [
        _front_matter(model, config, pipeline),
        f"# {str(model).rsplit('/', 1)[-1]}, {kind}" if model else f"# {kind} checkpoint",
        _settings(report, config),
        _perplexity(report.get("perplexity") or []),
        _errors(report.get("modules") or []),
        _loading(config, pipeline),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _family(config: Mapping[str, Any]) -> str:
    """Return what versions of a format have in common: "gptq" of "gptq_v2"."""
    return str(config["format"]).partition("_")[0]


def _front_matter(model: object, config: Mapping[str, Any], pipeline: str) -> str:
    """Return YAML that the Hub reads; with a base model only where the name is one of the Hub's."""
    lines = ["---", "library_name: transformers", f"pipeline_tag: {pipeline}", "tags:"]
    lines += [f"- {_family(config)}", "- gptqkit", f"- {config['bits']}-bit"]
    if isinstance(model, str) and model.count("/") == 1 and all(model.split("/")):
        lines += [f"base_model: {model}", "base_model_relation: quantized"]
    return "\n".join([*lines, "---"])


def _settings(report: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    size, samples, version = config["group_size"], report.get("samples"), (report.get("versions") or {}).get("gptqkit")
    own = ("method", "desc_act", "act_group_aware", "static_groups", "damp_percent")
    rows = {
        "bits": config["bits"],
        "group size": "one group per row" if size is None else size,
        "symmetric": config["sym"],
        "format": config["format"],
        "type": config.get("type"),
        **{name: config.get(name) for name in own},
        "calibration": f"{samples} samples of {report.get('sequence_length')} tokens" if samples else None,
        "seed": report.get("seed"),
        "quantizer": version and f"gptqkit {version}",
    }
    known = [(name, value) for name, value in rows.items() if value is not None]
    return "## Settings\n\n" + _table(("setting", "value"), known)


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


def _errors(modules: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean and the largest error; quantization_report.json has all of them."""
    known = [module for module in modules if module.get("error") is not None]
    if not known:
        return ""
    mean, rounding = (sum(float(module[key]) for module in known) / len(known) for key in ("error", "rounding_error"))
    worst = max(known, key=lambda module: float(module["error"]))
    text = (
        "## Errors\n\nRelative output error ||(W - Q)X|| / ||WX|| on the calibration data: "
        f"{mean:.5f} on average over {len(known)} modules (plain rounding: {rounding:.5f}), at most "
        f"{worst['error']:.5f}, in `{worst['name']}`. Every module is in `quantization_report.json`."
    )
    flagged = [f"`{module['name']}`" for module in known if module.get("worse_than_rounding")]
    return text + (f" Worse than plain rounding: {some(flagged)}." if flagged else "")


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _loading(config: Mapping[str, Any], pipeline: str) -> str:
    """Return how to load it; with transformers only where that was tried: language models in GPTQ's formats."""
    if pipeline == "sentence-similarity":
        return _LOADING + _POOLING
    if _family(config) == "gguf":
        return _LOADING + "\n\n`model.gguf` holds all that llama.cpp needs: `llama-cli -m model.gguf`."
    if pipeline != "text-generation" or _family(config) != "gptq":
        return _LOADING
    asymmetric = config["format"] == "gptq" and not config["sym"]
    return _LOADING + _TRANSFORMERS + _ASYMMETRIC * asymmetric
