"""The model card of a quantized checkpoint: README.md, for people and for the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .shards import read_json

_WORST = 5


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
    """Return README.md: front matter, settings, measured perplexity, errors per layer, how to load the checkpoint.

    Args:
        report: The quantization report, as written to quantization_report.json. Keys that are missing are left out, but
            for "config", the settings, which must be there.
        pipeline: What the model is for; see `pipeline_tag`.
    """
    model, config = report.get("model"), report["config"]
    kind = f"{config['bits']}-bit {_family(config).upper()}"
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
    """What versions of a format have in common: "gptq" of "gptq_v2"."""
    return str(config["format"]).partition("_")[0]


def _front_matter(model: object, config: Mapping[str, Any], pipeline: str) -> str:
    """YAML that the Hub reads; a base model only where the name is one of the Hub's."""
    lines = ["---", "library_name: transformers", f"pipeline_tag: {pipeline}", "tags:"]
    lines += [f"- {_family(config)}", "- gptqkit", f"- {config['bits']}-bit"]
    if isinstance(model, str) and model.count("/") == 1 and all(model.split("/")):
        lines += [f"base_model: {model}", "base_model_relation: quantized"]
    return "\n".join([*lines, "---"])


def _settings(report: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    size, version = config["group_size"], (report.get("versions") or {}).get("gptqkit")
    rows = [
        ("bits", config["bits"]),
        ("group size", "one group per row" if size is None else size),
        ("symmetric", config["sym"]),
        ("format", config["format"]),
        ("method", config.get("method")),
        ("desc_act", config.get("desc_act")),
        ("act_group_aware", config.get("act_group_aware")),
        ("static_groups", config.get("static_groups")),
        ("damp_percent", config.get("damp_percent")),
        ("calibration", _calibration(report)),
        ("seed", report.get("seed")),
        ("quantizer", version and f"gptqkit {version}"),
    ]
    body = [f"| {name} | {value} |" for name, value in rows if value not in (None, "")]
    return "\n".join(["## Settings", "", "| setting | value |", "|---|---|", *body])


def _calibration(report: Mapping[str, Any]) -> str | None:
    if not report.get("samples"):
        return None
    return f"{report['samples']} samples of {report.get('sequence_length')} tokens"


def _perplexity(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    body = []
    for row in rows:
        value = "not finite" if row["perplexity"] is None else f"{row['perplexity']:.3f}"
        body.append(f"| {row['dataset']} | {row['sequence_length']} | {row['tokens']} | {value} |")
    head = ["| data set | sequence length | tokens | perplexity |", "|---|---|---|---|"]
    note = "Measured on these files through their quantized kernels, windows without overlap."
    return "\n".join(["## Perplexity", "", note, "", *head, *body])


def _errors(modules: Sequence[Mapping[str, Any]]) -> str:
    """Mean error by block, and the worst modules; quantization_report.json has them all."""
    known = [module for module in modules if module.get("error") is not None]
    if not known:
        return ""
    blocks: dict[Any, list[Mapping[str, Any]]] = {}
    for module in known:
        blocks.setdefault(module.get("layer"), []).append(module)
    body = []
    for layer, members in blocks.items():
        worst = max(members, key=_error)
        label = "outside the layers" if layer is None else layer
        mean = sum(map(_error, members)) / len(members)
        body.append(f"| {label} | {len(members)} | {mean:.5f} | {worst['error']:.5f} | {_inner(worst)} |")
    flagged = [module["name"] for module in known if module.get("worse_than_rounding")]
    lines = [
        "## Errors",
        "",
        "Relative output error ||(W - Q)X|| / ||WX|| on the calibration data, by layer; every module is in "
        "`quantization_report.json`.",
        "",
        "| layer | modules | mean | worst | worst module |",
        "|---|---|---|---|---|",
        *body,
    ]
    if flagged:
        shown = ", ".join(f"`{name}`" for name in flagged[:_WORST])
        more = f" and {len(flagged) - _WORST} more" if len(flagged) > _WORST else ""
        lines += ["", f"Worse than plain rounding: {shown}{more}."]
    return "\n".join(lines)


def _error(module: Mapping[str, Any]) -> float:
    return float(module["error"])


def _inner(module: Mapping[str, Any]) -> str:
    """The module's name inside its layer."""
    name = str(module["name"])
    _, number, inner = name.partition(f".{module.get('layer')}.")
    return f"`{inner if number else name}`"


def _loading(config: Mapping[str, Any], pipeline: str) -> str:
    """How to load it; with transformers only where that was tried: language models in GPTQ's formats."""
    lines = [
        "## Loading",
        "",
        "```python",
        "import gptqkit",
        "",
        'model, tokenizer = gptqkit.load("path/to/this/directory")',
        "```",
    ]
    if pipeline == "sentence-similarity":
        lines += ["", "The model returns hidden states of tokens; pool them as `1_Pooling/config.json` says."]
    if pipeline != "text-generation" or _family(config) != "gptq":
        return "\n".join(lines)
    lines += [
        "",
        "With transformers (which needs `optimum` and `gptqmodel` for it):",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/directory")',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")',
        "```",
    ]
    if config["format"] == "gptq" and not config["sym"]:
        lines += [
            "",
            "GPTQModel, and with it transformers, refuses asymmetric version 1 checkpoints of other programs; "
            "`gptqkit convert` makes version 2 of it without loss.",
        ]
    return "\n".join(lines)
