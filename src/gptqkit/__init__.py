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
    from .api import QuantizeResult, quantize
    from .calibration.config import Calibration
    from .evaluating import evaluate
    from .evaluation.compare import Scores
    from .evaluation.config import Evaluation
    from .evaluation.embeddings import EmbeddingScores
    from .export.checkpoint import Checkpoint, open_checkpoint
    from .export.convert import convert
    from .export.inspect import CheckpointSummary, inspect
    from .loading import load
    from .memory import MemoryEstimate, plan
    from .quantizer.config import ModuleOverride, QuantizeConfig
    from .quantizer.quantized import QuantizedWeight
    from .report import ModuleReport, QuantizationReport
    from .run import Run

_HOMES = {
    "Calibration": "calibration.config",
    "Checkpoint": "export.checkpoint",
    "CheckpointSummary": "export.inspect",
    "EmbeddingScores": "evaluation.embeddings",
    "Evaluation": "evaluation.config",
    "MemoryEstimate": "memory",
    "ModuleOverride": "quantizer.config",
    "ModuleReport": "report",
    "QuantizationReport": "report",
    "QuantizeConfig": "quantizer.config",
    "QuantizeResult": "api",
    "QuantizedWeight": "quantizer.quantized",
    "Run": "run",
    "Scores": "evaluation.compare",
    "convert": "export.convert",
    "evaluate": "evaluating",
    "inspect": "export.inspect",
    "load": "loading",
    "open_checkpoint": "export.checkpoint",
    "plan": "memory",
    "quantize": "api",
}

__all__ = [
    "ArchitectureError",
    "BackendError",
    "Calibration",
    "CalibrationError",
    "Checkpoint",
    "CheckpointError",
    "CheckpointSummary",
    "ConfigError",
    "ConversionError",
    "DatasetUnavailableError",
    "DoesNotFitError",
    "EmbeddingScores",
    "Evaluation",
    "GptqkitError",
    "MemoryEstimate",
    "ModuleOverride",
    "ModuleReport",
    "NonFiniteError",
    "OutputExistsError",
    "Progress",
    "QuantizationReport",
    "QuantizeConfig",
    "QuantizeResult",
    "QuantizedWeight",
    "Run",
    "Scores",
    "ShapeError",
    "SingularHessianError",
    "__version__",
    "convert",
    "evaluate",
    "inspect",
    "load",
    "open_checkpoint",
    "plan",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
