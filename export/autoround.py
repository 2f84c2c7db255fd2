"""auto-round's own quantization config, put as GPTQ's or AWQ's: its tensors are laid out as theirs.

config.json says "quant_method": "auto-round", and in "packing_format" how layers are packed (auto-round 0.16,
`auto_round/inference/backend.py`); before 0.5 it said "intel/auto-round", and in "backend" the layout and the kernel,
as in "auto_round:gptq:exllamav2". "extra_config" holds settings of single modules, by full name or by regular
expressions that are searched in names; a module's own name comes first. Only weights of integers are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

PACKING = "packing_format"

_METHODS = ("auto-round", "intel/auto-round")
_LAYOUTS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_gptq": "gptq",
    "gptq": "gptq",
}
_KERNEL = re.compile(r":(exllamav2|triton|cuda|gemm)$")
_SETTINGS = ("bits", "group_size", "sym")
_RUNTIME = ("rotation_config", "spinquant_config", "static_kv_dtype", "static_attention_dtype")


def plain_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a quantization config of auto-round's in the terms of GPTQ or AWQ, and any other as it is.

    `PACKING` stays in it, so that it is known whose files these are. `where` is its file, for messages.

    Raises:
        CheckpointError: A layout that is not read here, or activations that are quantized or rotated.
    """
    if values.get("quant_method") not in _METHODS:
        return dict(values)
    packing = values.get(PACKING) or values.get("backend")
    layout, kind = _LAYOUTS.get(_KERNEL.sub("", str(packing))), values.get("data_type") or "int"
    if layout is None or kind != "int":
        raise CheckpointError(
            f"{where}: auto-round packed {kind!r} as {packing!r}; of its layouts {', '.join(_LAYOUTS)} are read here, "
            "with integers. Let auto-round save it in one of these"
        )
    width, online = values.get("act_bits") or 16, [key for key in _RUNTIME if values.get(key)]
    if online or not isinstance(width, int) or width < 16:
        raise CheckpointError(
            f"{where}: {online[0] if online else f'act_bits {width!r}'} asks for work on activations; models are read "
            "here of which weights alone are quantized"
        )
    extra = values.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(each, dict) for each in extra.values()):
        raise CheckpointError(f"{where}: extra_config must map names of modules to objects")
    plain = {key: values[key] for key in _SETTINGS if key in values}
    names = {"version": "gemm"} if layout == "awq" else {"checkpoint_format": layout, "desc_act": False}
    return {
        "quant_method": "awq" if layout == "awq" else "gptq",
        **plain,
        **names,
        **({"dynamic": _dynamic(extra)} if extra else {}),
        "meta": {"quantizer": [f"auto_round:{values.get('autoround_version', '?')}"]},
        PACKING: packing,
    }


def _dynamic(extra: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return settings of single modules as GPTQModel writes them; what a config leaves out is as it is for all."""
    dynamic: dict[str, dict[str, Any]] = {}
    for key in sorted(extra, key=lambda key: not _is_name(key)):
        pattern = f"^{re.escape(key)}$" if _is_name(key) else f".*?(?:{key})"
        bits = extra[key].get("bits")
        if isinstance(bits, int) and bits >= 16:
            dynamic[f"-:{pattern}"] = {}
        elif extra[key]:
            dynamic[f"+:{pattern}"] = {name: extra[key][name] for name in _SETTINGS if extra[key].get(name) is not None}
    return dynamic


def _is_name(key: str) -> bool:
    return re.fullmatch(r"[\w.-]+", key) is not None
