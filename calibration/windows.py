"""Text of any source, cut into windows of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CalibrationError, ConfigError, ShapeError
from .encoding import Tokenizer, check_ids, encode, special_tokens
from .rows import FixedWindows, Row, Rows
from .sources import Source, open_source

SEPARATOR = "\n\n"
"""Stands between two texts that are concatenated, as in the papers' evaluations."""

POOL = 4
"""How many times as much of a long source is encoded as is needed, so that the seed has a choice."""

LARGE = 64
"""Characters per token needed above which a local source counts as long; text has 1 to 6 characters per token."""

STRETCH = 16
"""Characters per token of a window in one stretch of a long text: a few windows."""

_BATCH_ROWS = 64


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Samples of one length.

    Attributes:
        input_ids: (samples, length) int64.
        attention_mask: (samples, length) bool, False for padding, which is always on the right; None: no padding.

    Raises:
        ShapeError: Other shapes or dtypes.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        ids, mask = self.input_ids, self.attention_mask
        if ids.ndim != 2 or ids.dtype != torch.int64:
            raise ShapeError(f"input_ids is {ids.dtype} {tuple(ids.shape)}; it must be torch.int64 (samples, length)")
        if mask is not None and (mask.shape != ids.shape or mask.dtype != torch.bool):
            raise ShapeError(
                f"attention_mask is {mask.dtype} {tuple(mask.shape)}; input_ids need torch.bool {tuple(ids.shape)}"
            )

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding left out."""
        return self.input_ids.numel() if self.attention_mask is None else int(self.attention_mask.sum())


def load_windows(
    source: Source,
    tokenizer: Tokenizer | None,
    *,
    samples: int | None,
    sequence_length: int,
    seed: int = 0,
    column: str | None = None,
    split: str | None = None,
    concatenate: bool = True,
    vocab_size: int | None = None,
) -> TokenWindows:
    r"""`samples` windows of `sequence_length` tokens, the same ones for the same source and seed.

    Concatenated, the rows are encoded one by one without special tokens and joined in their own order (texts with a
    blank line between them); the joined tokens are cut into windows side by side, and a permutation drawn from the seed
    picks `samples` of them, spread over the whole source. With `concatenate` off a permutation of the rows is drawn
    instead, and each row is one sample: cut off at `sequence_length`, or padded on the right and masked. Rows that are
    empty or blank are left out in both cases.

    Not all of a source far larger than needed is encoded. A data set that is streamed from the Hub (c4, and every set
    without a shorthand) or is an IterableDataset is read from its first row on, until there are 4 times as many tokens
    (or rows) as asked for, and the choice is among these. Local text of more than 64 characters per token asked for is
    divided into stretches of at least 16 * sequence_length characters, which are encoded in an order drawn from the
    seed until there are 4 times as many tokens as asked for.

    Ready windows (a 2-D tensor, or a .safetensors file with the tensor `input_ids`) are taken as they are, from the
    first on: `samples` is an upper limit, and the seed has no effect.

    Args:
        source: Text, chats or token ids; see `open_source` for all kinds.
        tokenizer: The model's tokenizer; None where the source is token ids.
        samples: How many windows; None for all, in their own order.
        sequence_length: Tokens per window.
        seed: Of the choice.
        column: Where records have columns, the one to read; None finds it.
        split: The split of a data set on the Hub; None for "train".
        concatenate: Join rows and cut them (True), or one row per sample (False).
        vocab_size: Rows of the model's embedding, against which every id is checked; None checks for negative ids only.

    Raises:
        ConfigError: `samples` or `sequence_length` is not positive, or `seed` is out of range.
        CalibrationError: Too little text, or text or tokens that cannot be used.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.

    >>> windows = load_windows([[1, 2, 3, 4, 5], [6, 7, 8]], None, samples=None, sequence_length=4)
    >>> windows.input_ids.tolist()
    [[1, 2, 3, 4], [5, 6, 7, 8]]
    >>> windows = load_windows([[1, 2, 3, 4, 5], [6, 7]], None, samples=None, sequence_length=4, concatenate=False)
    >>> windows.input_ids.tolist(), windows.attention_mask.int().tolist()
    ([[1, 2, 3, 4], [6, 7, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]])
    """
    for setting, value in (("samples", samples), ("sequence_length", sequence_length)):
        if value is not None and value < 1:
            raise ConfigError(f"{setting} is {value}; it must be positive")
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {seed}; it must lie between 0 and 2^63 - 1")
    opened = open_source(source, column=column, split=split)
    if isinstance(opened, FixedWindows):
        windows = TokenWindows(_limit(opened, samples, sequence_length))
        check_ids(windows.input_ids, vocab_size, opened.name)
        return windows
    if opened.streamed and samples is None:
        raise CalibrationError(f"{opened.name} is streamed and may have no end; say how many samples you need")
    generator = torch.Generator().manual_seed(seed)
    if concatenate:
        ids = _cut(opened, tokenizer, samples, sequence_length, generator)
        check_ids(ids, vocab_size, opened.name)
        return TokenWindows(ids)
    rows = _choose_rows(opened, tokenizer, samples, sequence_length, generator)
    check_ids(torch.cat(rows), vocab_size, opened.name)
    return _pad(rows, sequence_length, _padding_id(tokenizer, vocab_size))


def load_tokens(
    source: Source,
    tokenizer: Tokenizer | None,
    *,
    column: str | None = None,
    split: str | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    r"""All tokens of a source, (tokens,) int64, for evaluation.

    A text file is encoded as one string without special tokens. Several texts, or the rows of a data set (blank ones
    too), are first joined by a blank line into one string, as the papers do for WikiText-2; of c4 only the first 1100
    rows of the validation split are used, as in the GPTQ paper's code. Token ids and chats are joined as they are.

    Args:
        source: Text, chats or token ids; see `open_source` for all kinds.
        tokenizer: The model's tokenizer; None where the source is token ids.
        column: Where records have columns, the one to read; None finds it.
        split: The split of a data set on the Hub; None for "test" (c4: "validation", pile: "train").
        vocab_size: Rows of the model's embedding, against which every id is checked; None checks for negative ids only.

    Raises:
        CalibrationError: There is no token, or text or tokens that cannot be used.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.
    """
    opened = open_source(source, column=column, split=split, evaluation=True)
    if isinstance(opened, FixedWindows):
        tokens = opened.input_ids.flatten()
    else:
        if opened.streamed:
            raise CalibrationError(
                f"{opened.name} is streamed and may have no end; take a part of it (IterableDataset.take) into a list"
            )
        rows = list(opened.rows)
        texts = [row for row in rows if isinstance(row, str)]
        if len(texts) == len(rows):
            rows = [SEPARATOR.join(texts)]
        tokens = torch.cat([torch.empty(0, dtype=torch.int64), *encode(rows, tokenizer, opened.name)])
    if not len(tokens):
        raise CalibrationError(f"{opened.name} holds no token; give a source that is not empty")
    check_ids(tokens, vocab_size, opened.name)
    return tokens


def load_texts(
    source: Source,
    tokenizer: Tokenizer | None,
    *,
    sequence_length: int,
    limit: int | None = None,
    column: str | None = None,
    split: str | None = None,
    vocab_size: int | None = None,
) -> list[Tensor]:
    """The rows of a source as texts of their own, (tokens,) int64 each, for the evaluation of encoders.

    Text gets the special tokens of the tokenizer around it, without which an encoder was never trained. A row that is
    too long is cut into texts of `sequence_length` tokens, and a rest that fills none is left out; so are rows that are
    empty or blank. Token ids and chats are taken without further tokens.

    Args:
        source: Text, chats or token ids; see `open_source` for all kinds.
        tokenizer: The model's tokenizer; None where the source is token ids.
        sequence_length: Tokens per text, at most, special ones included.
        limit: Take only the first texts; None for all.
        column: Where records have columns, the one to read; None finds it.
        split: The split of a data set on the Hub; None for "test" (c4: "validation", pile: "train").
        vocab_size: Rows of the model's embedding, against which every id is checked; None checks for negative ids only.

    Raises:
        ConfigError: `sequence_length` leaves no room for text, or `limit` is not positive.
        CalibrationError: There is no token, or text or tokens that cannot be used.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.

    >>> [text.tolist() for text in load_texts([[1, 2, 3, 4, 5], [6, 7]], None, sequence_length=4)]
    [[1, 2, 3, 4], [6, 7]]
    """
    if sequence_length < 1 or (limit is not None and limit < 1):
        raise ConfigError(f"sequence_length is {sequence_length} and the limit of texts {limit}; they must be positive")
    opened = open_source(source, column=column, split=split, evaluation=True)
    if isinstance(opened, Rows) and opened.streamed and limit is None:
        raise CalibrationError(f"{opened.name} is streamed and may have no end; say how many texts you need")
    rows: Iterable[Row] = opened.rows if isinstance(opened, Rows) else list(opened.input_ids)
    texts: list[Tensor] = []
    for batch in _batches(_filled(rows)):
        for row, ids in zip(batch, encode(batch, tokenizer, opened.name), strict=True):
            before, after = special_tokens(tokenizer) if isinstance(row, str) else (ids[:0], ids[:0])
            room = sequence_length - len(before) - len(after)
            if room < 1:
                raise ConfigError(f"sequence_length is {sequence_length}, and special tokens take it all; give more")
            parts = [part for part in torch.split(ids, room) if len(part) == min(room, len(ids)) > 0]
            texts += [torch.cat([before, part, after]) for part in parts]
        if limit is not None and len(texts) >= limit:
            break
    if not texts:
        raise _nothing_left(opened.name)
    check_ids(torch.cat(texts), vocab_size, opened.name)
    return texts[:limit]


def _limit(opened: FixedWindows, samples: int | None, sequence_length: int) -> Tensor:
    count, length = opened.input_ids.shape
    if not count:
        raise CalibrationError(f"{opened.name} holds no windows, shape {(count, length)}; at least one is needed")
    if length != sequence_length:
        raise CalibrationError(
            f"the windows of {opened.name} have {length} tokens, and sequence_length is {sequence_length}; ready "
            f"windows are never cut or joined: use sequence_length {length}"
        )
    return opened.input_ids[:samples]


def _cut(
    opened: Rows, tokenizer: Tokenizer | None, samples: int | None, length: int, generator: torch.Generator
) -> Tensor:
    """The chosen windows of the joined rows, (samples, length) int64."""
    rows: Iterable[Row] = _filled(opened.rows)
    enough = None
    if samples is not None:
        if opened.streamed:
            enough = POOL * samples * length
        else:
            rows = list(rows)
            if sum(_characters(row) for row in rows) > LARGE * samples * length:
                rows = _scatter(rows, STRETCH * length, generator)
                enough = POOL * samples * length
    tokens = _join(rows, tokenizer, opened.name, enough)
    available = len(tokens) // length
    if available < (samples or 1):
        wanted = f"{samples or 1} windows of {length} tokens need {(samples or 1) * length}"
        raise CalibrationError(
            f"{opened.name} holds {len(tokens)} tokens, enough for {available} windows, and {wanted}; "
            "give more text, or ask for fewer or shorter windows"
        )
    windows = tokens[: available * length].view(available, length)
    return windows if samples is None else windows[torch.randperm(available, generator=generator)[:samples]]


def _join(rows: Iterable[Row], tokenizer: Tokenizer | None, name: str, enough: int | None) -> Tensor:
    """The tokens of all rows in a row, (tokens,) int64; reading stops once there are `enough`."""
    parts: list[Tensor] = []
    count = 0
    for batch in _batches(_separated(rows)):
        parts += encode(batch, tokenizer, name)
        count += sum(len(part) for part in parts[-len(batch) :])
        if enough is not None and count >= enough:
            break
    if not parts:
        raise _nothing_left(name)
    return torch.cat(parts)


def _separated(rows: Iterable[Row]) -> Iterator[Row]:
    for number, row in enumerate(rows):
        yield SEPARATOR + row if number and isinstance(row, str) else row


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, _BATCH_ROWS)):
        yield batch


def _filled(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows that are not empty or blank."""
    return (row for row in rows if (row.strip() if isinstance(row, str) else len(row)))


def _scatter(rows: list[Row], size: int, generator: torch.Generator) -> Iterator[Row]:
    """The same rows, divided into stretches of at least `size` characters, which come in random order."""
    stretches = list(_stretches(rows, size))
    for index in torch.randperm(len(stretches), generator=generator).tolist():
        yield from stretches[index]


def _stretches(rows: list[Row], size: int) -> Iterator[list[Row]]:
    """Neighbouring rows of at least `size` characters together (the last may have fewer); longer texts are divided."""
    stretch: list[Row] = []
    held = 0
    for row in rows:
        for piece in _pieces(row, size):
            stretch.append(piece)
            held += _characters(piece)
            if held >= size:
                yield stretch
                stretch, held = [], 0
    if stretch:
        yield stretch


def _pieces(row: Row, size: int) -> Iterator[Row]:
    """The row in parts of `size` to `2 * size` characters, divided at line ends where there are any."""
    if not isinstance(row, str):
        yield row
        return
    start = 0
    while len(row) - start > 2 * size:
        end = row.find("\n", start + size, start + 2 * size) + 1 or start + size
        yield row[start:end]
        start = end
    yield row[start:]


def _characters(row: Row) -> int:
    """How much there is to encode: nothing where the row is token ids already."""
    if isinstance(row, str):
        return len(row)
    if isinstance(row, Tensor):
        return 0
    return sum(len(str(message.get("content"))) for message in row)


def _choose_rows(
    opened: Rows, tokenizer: Tokenizer | None, samples: int | None, length: int, generator: torch.Generator
) -> list[Tensor]:
    """The tokens of the chosen rows, cut off at `length`; none is empty."""
    limit = POOL * samples if samples is not None and opened.streamed else None
    rows = list(itertools.islice(_filled(opened.rows), limit))
    if samples is not None:
        rows = [rows[index] for index in torch.randperm(len(rows), generator=generator).tolist()]
    chosen: list[Tensor] = []
    for batch in _batches(rows):
        chosen += [ids[:length] for ids in encode(batch, tokenizer, opened.name) if len(ids)]
        if samples is not None and len(chosen) >= samples:
            return chosen[:samples]
    if not chosen:
        raise _nothing_left(opened.name)
    if samples is not None:
        raise CalibrationError(
            f"{opened.name} holds {len(chosen)} rows that are not blank, and {samples} samples of one row each were "
            "asked for; give more rows, ask for fewer samples, or concatenate"
        )
    return chosen


def _pad(rows: list[Tensor], length: int, padding_id: int) -> TokenWindows:
    input_ids = torch.full((len(rows), length), padding_id, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, ids in enumerate(rows):
        input_ids[index, : len(ids)] = ids
        mask[index, : len(ids)] = True
    return TokenWindows(input_ids, None if bool(mask.all()) else mask)


def _padding_id(tokenizer: Tokenizer | None, vocab_size: int | None) -> int:
    """The tokenizer's padding or end token, or 0 where it has none that the model knows; masked out in any case."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int) and (vocab_size is None or token < vocab_size):
            return token
    return 0


def _nothing_left(name: str) -> CalibrationError:
    return CalibrationError(f"nothing is left of {name}: every row is empty or blank; give a source with text")
