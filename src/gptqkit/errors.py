"""Every error that gptqkit raises on purpose.

GptqkitError
├── ConfigError (ValueError)             a setting, or a combination of settings, that cannot be
├── CalibrationError (ValueError)        text or tokens that cannot be used
├── DatasetUnavailableError (OSError)    a data set or model that could not be fetched or found
├── UploadError (OSError)                a finished checkpoint that the Hub did not take
├── ArchitectureError (TypeError)        a model whose blocks or modules cannot be quantized as asked
├── ShapeError (ValueError)              tensors whose shapes or ranges do not fit together
├── NonFiniteError (ArithmeticError)     NaN or infinity in activations or weights
├── SingularHessianError (ArithmeticError)   not positive definite at the largest damping allowed
├── CheckpointError (ValueError)         files that are damaged, contradictory or of an unknown format
├── ConversionError (ValueError)         a checkpoint that the target format cannot hold
├── OutputExistsError (FileExistsError)  the target of a write is there already
├── ResumeError (ValueError)             an unfinished job that is another one, or in use
├── DoesNotFitError (MemoryError)        a run that needs more memory or disk than there is
├── BackendError (RuntimeError)          a kernel backend that cannot serve a layer
└── RankError (RuntimeError)             several processes of which one died, failed or does not fit the others
    └── AbandonedError                   another process failed, and reports why
"""

LONGEST = 2000  # characters of a message


class GptqkitError(Exception):
    """Base of every error that gptqkit raises on purpose."""

    def __str__(self) -> str:
        """Return the message; what it quotes from a file may be of any length, so its middle may be left out."""
        text = super().__str__()
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"


class ConfigError(GptqkitError, ValueError):
    """A setting, or a combination of settings, that cannot be."""


class CalibrationError(GptqkitError, ValueError):
    """Text or tokens that cannot be used."""


class DatasetUnavailableError(GptqkitError, OSError):
    """A data set or a model that could not be fetched or found."""


class UploadError(GptqkitError, OSError):
    """A finished checkpoint that the Hub did not take."""


class ArchitectureError(GptqkitError, TypeError):
    """A model whose blocks or modules cannot be quantized as asked."""


class ShapeError(GptqkitError, ValueError):
    """Tensors whose shapes or ranges do not fit together."""


class NonFiniteError(GptqkitError, ArithmeticError):
    """NaN or infinity in activations or weights."""


class SingularHessianError(GptqkitError, ArithmeticError):
    """A Hessian that is not positive definite at the largest damping allowed."""


class CheckpointError(GptqkitError, ValueError):
    """Checkpoint files that are damaged, contradictory or of an unknown format."""


class ConversionError(GptqkitError, ValueError):
    """A checkpoint that the target format cannot hold."""


class OutputExistsError(GptqkitError, FileExistsError):
    """The target of a write is there already."""


class ResumeError(GptqkitError, ValueError):
    """An unfinished job that is another one than was asked to go on, or that another process works on."""


class DoesNotFitError(GptqkitError, MemoryError):
    """A run that needs more memory or disk than there is."""


class BackendError(GptqkitError, RuntimeError):
    """A kernel backend that cannot serve a layer."""


class RankError(GptqkitError, RuntimeError):
    """Several processes of which one died, failed or does not fit the others."""


class AbandonedError(RankError):
    """Another process failed, so that this one stops too; that one reports why."""
