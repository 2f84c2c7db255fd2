"""GPTQ and GPTAQ quantization of language models.

The public names load what they need when they are first used, so that `import gptqkit` and the command line start at
once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import (
    ArchitectureError,
    BackendError,
    CalibrationError,
    CheckpointError,
    ConfigError,
    ConversionError,
    DatasetUnavailableError,
    DoesNotFitError,
    GptqkitError,
    NonFiniteError,
    OutputExistsError,
    ShapeError,
    SingularHessianError,
)
from .progress import Progress
from .version import __version__

if TYPE_CHECKING:
    from .budget import Plan
    from .evaluating import evaluate
    from .evaluation.embeddings import EmbeddingScores
    from .evaluation.scores import Scores
    from .export.convert import convert
    from .export.inspect import CheckpointSummary, inspect
    from .loading import load
    from .planning import plan
    from .quantizer.config import ModuleOverride, QuantizeConfig
    from .quantizer.quantized import QuantizedWeight
    from .quantizer.report import ModuleReport, QuantizationReport
    from .quantizing import QuantizeResult, quantize

_HOMES = {
    "CheckpointSummary": "export.inspect",
    "EmbeddingScores": "evaluation.embeddings",
    "ModuleOverride": "quantizer.config",
    "ModuleReport": "quantizer.report",
    "Plan": "budget",
    "QuantizationReport": "quantizer.report",
    "QuantizeConfig": "quantizer.config",
    "QuantizeResult": "quantizing",
    "QuantizedWeight": "quantizer.quantized",
    "Scores": "evaluation.scores",
    "convert": "export.convert",
    "evaluate": "evaluating",
    "inspect": "export.inspect",
    "load": "loading",
    "plan": "planning",
    "quantize": "quantizing",
}

__all__ = [
    "ArchitectureError",
    "BackendError",
    "CalibrationError",
    "CheckpointError",
    "CheckpointSummary",
    "ConfigError",
    "ConversionError",
    "DatasetUnavailableError",
    "DoesNotFitError",
    "EmbeddingScores",
    "GptqkitError",
    "ModuleOverride",
    "ModuleReport",
    "NonFiniteError",
    "OutputExistsError",
    "Plan",
    "Progress",
    "QuantizationReport",
    "QuantizeConfig",
    "QuantizeResult",
    "QuantizedWeight",
    "Scores",
    "ShapeError",
    "SingularHessianError",
    "__version__",
    "convert",
    "evaluate",
    "inspect",
    "load",
    "plan",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
