"""The checkpoint formats: what each can hold, and the functions that write and read it.

A new format is one file of this folder, with a `Format`, and one entry of `FORMATS`. Nothing here imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

FORMATS = {
    "gptq": "export.gptq.V1",
    "gptq_v2": "export.gptq.V2",
}
"""Every format by name, with the place of its `Format` in this package."""
