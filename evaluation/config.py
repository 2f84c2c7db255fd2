"""How to evaluate. Nothing heavy is imported here, so that the command line can show its help at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ConfigError
from ..kernels.backends import BACKENDS

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Every setting of an evaluation.

    Every field is an option of the command line, whose help is the text below.

    Attributes:
        sequence_length: Tokens per window; by default 2048, or the model's maximum if that is less. Longer documents of
            an encoder's data set are cut.
        stride: Tokens from the start of a window to the start of the next; by default windows do not overlap. Not for
            encoders.
        max_windows: Use only the first windows.
        batch_size: Windows per forward pass.
        device: "cpu", "cuda", "cuda:1" or so, for models given by path or id; "auto" takes a GPU if there is one.
        backend: What runs the quantized layers; anything but "auto" fails where it cannot serve one of them.
        dtype: Of activations; "auto": the checkpoint's, but float32 for float16 on a CPU.
        column: Text column of structured files and data sets; by default found by its name.
        split: Split of a Hub data set; by default "test".
        trust_remote_code: Run the Python code that a float model brings along.

    Raises:
        ConfigError: A value that cannot be.
    """

    sequence_length: int | None = None
    stride: int | None = None
    max_windows: int | None = None
    batch_size: int = 8
    device: str = "auto"
    backend: str = field(default="auto", metadata={"choices": ("auto", *BACKENDS)})
    dtype: str = field(default="auto", metadata={"choices": DTYPES})
    column: str | None = None
    split: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name in ("sequence_length", "stride", "max_windows", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be positive")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
