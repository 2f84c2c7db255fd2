"""How a job is run. Nothing heavy is imported here, so that the command line can show its help at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import ConfigError
from .settings import check_positive, check_types

LARGEST_BATCH = 8  # samples per forward pass, unless told otherwise
PLACES = ("auto", "device", "memory", "disk")  # the fastest first


@dataclass(frozen=True, kw_only=True)
class Run:
    """Where and how a job is run.

    Every field is an option of the command line, whose help is the text below.

    Attributes:
        device: "cpu", "cuda" or, for example, "cuda:1"; "auto" takes a GPU if there is one.
        batch_size: Samples per forward pass, by default 8; halved when memory runs out. Like the number of threads, it
            changes the order of sums, and so perhaps a few codes.
        activations: Where to keep hidden states between blocks: "device" is the GPU, "memory" is RAM; "auto" takes the
            fastest place where they fit.
        overwrite: Replace the output folder if it is a quantized checkpoint, and an unfinished job for it. With
            `resume` an unfinished job goes on instead, and a checkpoint of the same model and settings stays.
        resume: Continue the unfinished job for the same output folder, if there is one; with the same `batch_size` the
            result is the same to the bit. A smaller one may be given where memory ran out, a larger one is not used.
            What is finished is left as it is.
        strict: Refuse a model with Linears that do not fit the format or the group size, instead of leaving them in
            floating point or taking smaller groups.
        shard_size: Largest size of the checkpoint's files, in bytes or such as "8GiB"; a single tensor may be larger.
        revision: Branch, tag or commit of a model on the Hub; by default the main branch.
        trust_remote_code: Run the Python code that comes with a float model.
        push_to_hub: Repository on the Hub, such as user/name, to upload the finished checkpoint to; it is made if it is
            not there.
        private: Make that repository a private one, where it is new.

    Raises:
        ConfigError: A value that cannot be.
    """

    device: str = "auto"
    batch_size: int | None = None
    activations: str = field(default="auto", metadata={"choices": PLACES})
    overwrite: bool = False
    resume: bool = False
    strict: bool = False
    shard_size: int | str = field(default=4 << 30, metadata={"size": True})
    revision: str | None = None
    trust_remote_code: bool = False
    push_to_hub: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "batch_size")
        if self.private and self.push_to_hub is None:
            raise ConfigError("private applies to a repository that is created; give push_to_hub, too")
        name = self.push_to_hub
        if name is not None and not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)):
            raise ConfigError(f"push_to_hub is {name!r}; give a repository's name, such as user/name")
