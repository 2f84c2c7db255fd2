"""Checkpoints in `from_pretrained` of transformers, as soon as gptqkit and transformers are both imported.

transformers keeps a table of quantizers by the method that config.json names. `import gptqkit` must not import
transformers, so where that table is not there already, a finder stands in front of those that find modules, and enters
our quantizer once the table was executed. Nothing else of transformers changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TABLE = "transformers.quantizers.auto"


class _Finder(MetaPathFinder):
    """Finds the table where others do, and lets our quantizer be entered after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None for every other module."""
        if fullname != _TABLE:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_enter(module: ModuleType) -> None:
                execute(module)
                _enter(module)

            spec.loader.exec_module = execute_and_enter  # type: ignore[method-assign]
        return spec


def enter_quantizer() -> None:
    """Let transformers load quantized checkpoints with our kernels, from now on or from its import on."""
    table = sys.modules.get(_TABLE)
    if table is not None:
        _enter(table)
    else:
        sys.meta_path.insert(0, _Finder())


def _enter(table: ModuleType) -> None:
    from .pretrained import CONFIGS, quantizer_maker

    for method, config in CONFIGS.items():
        table.AUTO_QUANTIZER_MAPPING[method] = quantizer_maker(table.AUTO_QUANTIZER_MAPPING[method])
        table.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config
