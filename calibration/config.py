"""What to calibrate on. Nothing heavy is imported here, so that the command line can show its help at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from ..errors import ConfigError
from ..settings import check_positive, check_seed, check_types, settings_of

_NUMBERS = ("samples", "sequence_length", "seed", "concatenate")


@dataclass(frozen=True)
class Calibration:
    """Where calibration text comes from, and which samples are drawn from it.

    Every field but `source` is an option of the command line, whose help is the text below.

    Attributes:
        source: A string is a shorthand (wikitext2, c4, pile), else an existing file or folder, else the id of a data
            set on the Hub (organisation/name or organisation/name:configuration). A Path is a file or folder; a list of
            paths, or of strings that end as data files do, several. A data set is a `datasets.Dataset`, an
            `IterableDataset`, or a dictionary of them, of which `split` is taken. Anything else is gone through item by
            item, be it a list, an array, a DataLoader or a generator, which is read no further than needed. An item is
            text, a chat (a list of messages), token ids, a record with one of these in a column, or a batch of such.
            Token ids in two dimensions, or with an attention_mask, are ready samples, as tokenizers make them.
        samples: Number of samples; of ready ones, at most that many, from the first on.
        sequence_length: Tokens per sample; by default 2048, or the model's maximum if that is less. Ready samples have
            that of the longest, to which the others are padded. Of an encoder-decoder, the encoder gets the first half
            of each sample, and the decoder goes on with the second.
        seed: Seed of the random choice of samples.
        concatenate: Join all documents and cut samples from them, instead of making one padded sample per document.
        column: Column that holds the text, in structured files and data sets; by default found by its name.
        split: Split of a data set that has several; by default "train".

    Raises:
        ConfigError: `samples` or `sequence_length` is not positive, or `seed` is out of range.
    """

    source: Any = field(repr=False)  # perhaps a book
    _: KW_ONLY
    samples: int = 128
    sequence_length: int | None = None
    seed: int = 0
    concatenate: bool = True
    column: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "samples", "sequence_length")
        check_seed(self.seed)


def calibration_of(given: Any) -> Calibration:
    """Return a `Calibration` as it is, or made of a dictionary of its fields, or of a source, with the defaults."""
    if isinstance(given, Mapping) and "source" in given:
        return settings_of(Calibration, given)
    if isinstance(given, Mapping) and any(isinstance(given.get(name), int) for name in _NUMBERS):  # and no texts
        settings_of(Calibration, {"source": None, **given})
        raise ConfigError(f"the calibration has {', '.join(map(str, given))}, but no source; give its text as source")
    return given if isinstance(given, Calibration) else Calibration(given)
