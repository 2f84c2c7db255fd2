"""Checkpoints in `from_pretrained` of transformers, as soon as gptqkit and transformers are both imported.

transformers keeps a table of quantizers by the method that config.json names. `import gptqkit` must not import
transformers, so it looks whether that table is there already, and otherwise puts a finder in front of those that find
modules, which enters our quantizer when the table is imported and is then gone. Nothing else of transformers changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_TABLE = "transformers.quantizers.auto"


class _Finder(MetaPathFinder):
    """Finds the table where Python's own finder does, and lets our quantizer be entered when it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None for every other module."""
        if fullname != _TABLE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_enter(module: ModuleType) -> None:
                execute(module)
                _enter(module)

            spec.loader.exec_module = execute_and_enter  # type: ignore[method-assign]
            sys.meta_path.remove(self)
        return spec


def enter_quantizer() -> None:
    """Let transformers load our checkpoints with our kernels, from now on or from its import on."""
    table = sys.modules.get(_TABLE)
    if table is not None:
        _enter(table)
    else:
        sys.meta_path.insert(0, _Finder())


def _enter(table: ModuleType) -> None:
    from .pretrained import GPTQConfig, make_quantizer

    table.AUTO_QUANTIZER_MAPPING["gptq"] = make_quantizer
    table.AUTO_QUANTIZATION_CONFIG_MAPPING["gptq"] = GPTQConfig
