"""How to evaluate. Nothing heavy is imported here, so that the command line can show its help at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..kernels.backends import BACKENDS
from ..settings import check_positive, check_types

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Every setting of an evaluation.

    Every field is an option of the command line, whose help is the text below. A loaded model runs where and as it is.

    Attributes:
        sequence_length: Tokens per window; by default 2048, or the model's maximum if that is less. An
            encoder's documents are cut to that length. The encoder of an encoder-decoder gets the first half of each
            window, and the second half is predicted.
        stride: Tokens from the start of one window to the start of the next; by default windows do not overlap. Not
            for encoders.
        max_windows: Use only so many windows, from the start of the text, of which no more is read; by default all.
        batch_size: Windows per forward pass; halved when memory runs out.
        device: "cpu", "cuda" or, for example, "cuda:1"; "auto" takes a GPU if there is one.
        backend: What runs the quantized layers; it is an error if one that is named cannot run all of them.
        dtype: Type of the activations; "auto" is the checkpoint's own, but float32 instead of float16 on a CPU.
        column: Column that holds the text, in structured files and data sets; by default found by its name.
        split: Split of a data set that has several; by default "test".
        revision: Branch, tag or commit of a model on the Hub; by default the main branch. Not of the reference.
        trust_remote_code: Run the Python code that comes with a model.

    Raises:
        ConfigError: A value that cannot be.
    """

    sequence_length: int | None = None
    stride: int | None = None
    max_windows: int | None = None
    batch_size: int = 8
    device: str = "auto"
    backend: str = field(default="auto", metadata={"choices": ("auto", *BACKENDS)})
    dtype: str | Any = field(default="auto", metadata={"choices": DTYPES})
    column: str | None = None
    split: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))  # which may be torch's own
        check_types(self)
        check_positive(self, "sequence_length", "stride", "max_windows", "batch_size")
