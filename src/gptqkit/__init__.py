"""GPTQ and GPTAQ quantization of language models.

The public names load what they need when they are first used, so that `import gptqkit` and the command line start at
once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .integration import enter_quantizer
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .api import QuantizeResult as QuantizeResult
    from .api import quantize as quantize
    from .calibration.config import Calibration as Calibration
    from .comparing import Comparison as Comparison
    from .comparing import compare as compare
    from .comparing import comparison_svg as comparison_svg
    from .display import ProgressDisplay as ProgressDisplay
    from .errors import ArchitectureError as ArchitectureError
    from .errors import BackendError as BackendError
    from .errors import CalibrationError as CalibrationError
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import ConversionError as ConversionError
    from .errors import DatasetUnavailableError as DatasetUnavailableError
    from .errors import DoesNotFitError as DoesNotFitError
    from .errors import GptqkitError as GptqkitError
    from .errors import NonFiniteError as NonFiniteError
    from .errors import OutputExistsError as OutputExistsError
    from .errors import RankError as RankError
    from .errors import ResumeError as ResumeError
    from .errors import ShapeError as ShapeError
    from .errors import SingularHessianError as SingularHessianError
    from .errors import UploadError as UploadError
    from .evaluating import evaluate as evaluate
    from .evaluation.config import Evaluation as Evaluation
    from .evaluation.embeddings import EmbeddingScores as EmbeddingScores
    from .evaluation.perplexity import Scores as Scores
    from .export.checkpoint import Checkpoint as Checkpoint
    from .export.checkpoint import open_checkpoint as open_checkpoint
    from .export.convert import convert as convert
    from .export.difference import LayerDifference as LayerDifference
    from .export.difference import diff as diff
    from .export.doctor import Damage as Damage
    from .export.doctor import Diagnosis as Diagnosis
    from .export.doctor import doctor as doctor
    from .export.inspect import CheckpointSummary as CheckpointSummary
    from .export.inspect import inspect as inspect
    from .importance import imatrix as imatrix
    from .loading import load as load
    from .memory import MemoryEstimate as MemoryEstimate
    from .memory import plan as plan
    from .page import report_html as report_html
    from .page import report_svg as report_svg
    from .progress import Progress as Progress
    from .quantizer.config import ModuleOverride as ModuleOverride
    from .quantizer.config import QuantizeConfig as QuantizeConfig
    from .quantizer.quantized import QuantizedWeight as QuantizedWeight
    from .recommending import Choice as Choice
    from .recommending import recommend as recommend
    from .report import BlockReport as BlockReport
    from .report import ModuleReport as ModuleReport
    from .report import QuantizationReport as QuantizationReport
    from .report import TuningReport as TuningReport
    from .rotating import rotate as rotate
    from .run import Run as Run

_HOMES = {
    "api": "QuantizeResult quantize",
    "calibration.config": "Calibration",
    "comparing": "Comparison compare comparison_svg",
    "display": "ProgressDisplay",
    "errors": "ArchitectureError BackendError CalibrationError CheckpointError ConfigError ConversionError "
    "DatasetUnavailableError DoesNotFitError GptqkitError NonFiniteError OutputExistsError RankError ResumeError "
    "ShapeError SingularHessianError UploadError",
    "evaluating": "evaluate",
    "evaluation.config": "Evaluation",
    "evaluation.embeddings": "EmbeddingScores",
    "evaluation.perplexity": "Scores",
    "export.checkpoint": "Checkpoint open_checkpoint",
    "export.convert": "convert",
    "export.difference": "LayerDifference diff",
    "export.doctor": "Damage Diagnosis doctor",
    "export.inspect": "CheckpointSummary inspect",
    "importance": "imatrix",
    "loading": "load",
    "memory": "MemoryEstimate plan",
    "page": "report_html report_svg",
    "progress": "Progress",
    "quantizer.config": "ModuleOverride QuantizeConfig",
    "quantizer.quantized": "QuantizedWeight",
    "recommending": "Choice recommend",
    "report": "BlockReport ModuleReport QuantizationReport TuningReport",
    "rotating": "rotate",
    "run": "Run",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)


enter_quantizer()
