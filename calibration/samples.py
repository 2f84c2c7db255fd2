"""Documents -> samples: what goes through the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import CalibrationError, ConfigError
from ..units import counted
from .chats import Chat
from .config import Calibration
from .records import Document, is_ready
from .sources import Documents, open_source

_Item = TypeVar("_Item")

SEPARATOR = "\n\n"  # between two texts that are joined, as in the papers' evaluations
LARGE = 64  # characters per token needed above which a local source counts as long; text has 1 to 6 per token
STRETCH = 16  # characters per token of a sample in one stretch of a long source: a few samples
PIECE = 4 << 20  # characters encoded at once: a tokenizer takes 200 bytes for each, and ends the process without
POOL = 4  # how many times as much of a long source is encoded as is needed, so that the seed has a choice


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one length.

    Attributes:
        input_ids: (samples, length) int64.
        attention_mask: (samples, length) bool, False for padding, which is always on the right; None: no padding.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None


def load_samples(
    calibration: Calibration, tokenizer: Any, *, sequence_length: int, vocab_size: int | None = None
) -> Samples:
    """Draw samples from a source, the same ones for the same source and seed.

    Concatenated, the documents are encoded one by one without special tokens and joined in their own order (texts with
    a blank line between them), and the joined tokens are cut into samples side by side. With `concatenate` off each
    document is one sample: cut off at `sequence_length`, or padded on the right and masked. Blank documents are left
    out. Of all samples, a permutation drawn from the seed picks those asked for.

    Of a source far larger than needed only 4 times as much as asked for is encoded. A data set that is streamed from
    the Hub (c4, and every set without a shorthand) or is an IterableDataset is read from its first document on. Other
    sources of more than 64 characters per token come in an order drawn from the seed: text in stretches of
    16 * sequence_length characters, chats one by one.

    Ready samples (token ids in two dimensions, or with an attention_mask, or .safetensors files with the tensor
    `input_ids`) are taken as they are, from the first on, whatever the seed, and padded to the longest of them.

    What is longer than 4 Mi characters is encoded in pieces, cut before a space.

    `tokenizer`, one of transformers, may be None where the source is token ids. Every id is checked against the model's
    `vocab_size`; None checks for negative ids only.

    Raises:
        CalibrationError: Too little text, or text or tokens that cannot be used.
        DatasetUnavailableError: A file does not exist, or the Hub cannot be reached.

    >>> documents = [[1, 2, 3, 4, 5], [6, 7, 8]]
    >>> load_samples(Calibration(documents, samples=2), None, sequence_length=4).input_ids.tolist()
    [[1, 2, 3, 4], [5, 6, 7, 8]]
    >>> load_samples(Calibration(documents, samples=2, concatenate=False), None, sequence_length=4).input_ids.tolist()
    [[1, 2, 3, 4], [6, 7, 8, 0]]
    """
    opened = open_source(calibration.source, column=calibration.column, split=calibration.split, evaluation=False)
    first = next(_filled(opened.items), None)
    if first is not None:
        opened = replace(opened, items=itertools.chain([first], opened.items))
    if is_ready(first):
        rows = (_encode(document, tokenizer, opened.name) for document in opened.items)
        chosen = list(itertools.islice((ids for ids in rows if len(ids)), calibration.samples))
        longest = max(map(len, chosen), default=0)
        if calibration.sequence_length not in (None, longest) and chosen:
            raise CalibrationError(
                f"{opened.name} holds ready samples of {longest} tokens, and sequence_length is "
                f"{calibration.sequence_length}; they are never cut or joined: use sequence_length {longest}"
            )
        sequence_length = longest
    else:
        draw = _join if calibration.concatenate else _pick
        chosen = draw(opened, calibration, tokenizer, sequence_length)
        if len(chosen) < calibration.samples:
            fewer = f", samples={len(chosen)} (--samples {len(chosen)})," if chosen else ""
            found = counted(len(chosen), "sample")
            raise CalibrationError(
                f"{opened.name} gives {found} of {counted(sequence_length, 'token')}, and samples is "
                f"{calibration.samples}; give more text{fewer} or a smaller sequence_length (--sequence-length)"
            )
    _check(chosen, vocab_size, opened.name)
    candidates = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    known = (token for token in candidates if isinstance(token, int) and (vocab_size is None or token < vocab_size))
    input_ids = torch.full((len(chosen), sequence_length), next(known, 0))
    mask = torch.zeros(len(chosen), sequence_length, dtype=torch.bool)
    for index, ids in enumerate(chosen):
        input_ids[index, : len(ids)] = ids
        mask[index, : len(ids)] = True
    return Samples(input_ids, None if bool(mask.all()) else mask)


def load_text(
    source: Any,
    tokenizer: Any,
    *,
    limit: int | None = None,
    column: str | None = None,
    split: str | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Return all tokens of a source, or the first `limit`, (tokens,) int64, for perplexity.

    Texts, blank ones too, are joined by a blank line into one string and encoded without special tokens, as the papers
    do for WikiText-2; of c4 only the first 1100 documents of the validation split are used, as in the GPTQ paper's
    code. Token ids and chats are joined as they are. With a `limit` no more is read and encoded than that needs.

    `source` and `column` are those of `Calibration`, `tokenizer`, `vocab_size` and errors those of `load_samples`;
    without `split` the test split is taken (c4: "validation", pile: "train").
    """
    opened = open_source(source, column=column, split=split, evaluation=True, partial=limit is not None)
    if opened.endless and limit is None:
        raise CalibrationError(
            f"{opened.name} may have no end; say how much of it you need, or take a part into a list"
        )
    found: list[Tensor] = []
    for piece in _pieces(opened.items, limit):
        found.append(_encode(piece, tokenizer, opened.name))
        if limit is not None and sum(map(len, found)) >= limit:
            break
    return _check(found, vocab_size, opened.name)[:limit]


def load_documents(
    source: Any,
    tokenizer: Any,
    *,
    sequence_length: int,
    limit: int | None = None,
    column: str | None = None,
    split: str | None = None,
    vocab_size: int | None = None,
) -> list[Tensor]:
    """Return the documents of a source one by one, (tokens,) int64 each, for encoders.

    Text gets the special tokens of the tokenizer around it, without which an encoder was never trained. What is longer
    than `sequence_length`, special tokens included, is cut into several documents of that length, and a rest that fills
    none is left out; so are blank documents. Token ids and chats are taken without further tokens. With a `limit` only
    the first documents are returned. The other arguments, and errors, are those of `load_text`; ConfigError where
    `sequence_length` leaves no room for text.

    >>> [ids.tolist() for ids in load_documents([[1, 2, 3, 4, 5], [6, 7]], None, sequence_length=4)]
    [[1, 2, 3, 4], [6, 7]]
    """
    opened = open_source(source, column=column, split=split, evaluation=True, partial=limit is not None)
    if opened.endless and limit is None:
        raise CalibrationError(f"{opened.name} may have no end; say how many documents you need")
    found: list[Tensor] = []
    for document in _filled(opened.items):
        needed = None if limit is None else sequence_length * (limit - len(found))
        ids = _encode(document, tokenizer, opened.name, needed)
        before, after = _special_tokens(tokenizer) if isinstance(document, str) else (ids[:0], ids[:0])
        room = sequence_length - len(before) - len(after)
        if room < 1:
            raise ConfigError(f"sequence_length is {sequence_length}, which leaves no room for text; give more")
        parts = [part for part in torch.split(ids, room) if len(part) == min(room, len(ids)) > 0]
        found += [torch.cat([before, part, after]) for part in parts]
        if limit is not None and len(found) >= limit:
            break
    _check(found, vocab_size, opened.name)
    return found[:limit]


def _join(opened: Documents, calibration: Calibration, tokenizer: Any, length: int) -> list[Tensor]:
    """Return samples drawn from the joined documents; fewer than asked for where there is too little text."""
    samples = calibration.samples
    generator = torch.Generator().manual_seed(calibration.seed)
    documents: Iterable[Document] = _filled(opened.items)
    long = opened.endless
    if not long:
        documents = list(documents)
        characters = sum(0 if isinstance(document, Tensor) else len(str(document)) for document in documents)
        long = characters > LARGE * samples * length
        if long:
            documents = _shuffle(_stretches(documents, STRETCH * length), generator)
    separated = (
        SEPARATOR + document if number and isinstance(document, str) else document
        for number, document in enumerate(documents)
    )
    pool = _cut((_encode(document, tokenizer, opened.name) for document in separated), length)
    return _shuffle(list(itertools.islice(pool, POOL * samples if long else None)), generator)[:samples]


def _stretches(documents: list[Document], size: int) -> list[Document]:
    """Return the same text joined and divided into stretches of `size` characters; other documents as they are."""
    texts = [document for document in documents if isinstance(document, str)]
    if len(texts) < len(documents):
        return documents
    text = SEPARATOR.join(texts)
    return [text[start : start + size] for start in range(0, len(text), size)]


def _pick(opened: Documents, calibration: Calibration, tokenizer: Any, length: int) -> list[Tensor]:
    """Return documents drawn as samples, cut off at `length`; fewer than asked for where there are too few."""
    samples = calibration.samples
    documents = list(itertools.islice(_filled(opened.items), POOL * samples if opened.endless else None))
    drawn = _shuffle(documents, torch.Generator().manual_seed(calibration.seed))
    encoded = (_encode(document, tokenizer, opened.name, length)[:length] for document in drawn)
    return list(itertools.islice((ids for ids in encoded if len(ids)), samples))


def _shuffle(items: list[_Item], generator: torch.Generator) -> list[_Item]:
    return [items[index] for index in torch.randperm(len(items), generator=generator).tolist()]


def _cut(documents: Iterable[Tensor], length: int) -> Iterator[Tensor]:
    """Yield samples side by side from the joined documents; a rest that fills none is left out."""
    rest = torch.empty(0, dtype=torch.int64)
    for ids in documents:
        joined = torch.cat([rest, ids])
        whole = len(joined) // length * length
        yield from joined[:whole].view(-1, length)
        rest = joined[whole:]


def _filled(documents: Iterable[Document]) -> Iterator[Document]:
    """Return the documents that are not empty or blank."""
    return (document for document in documents if (document.strip() if isinstance(document, str) else len(document)))


def _encode(document: Document, tokenizer: Any, name: str, limit: int | None = None) -> Tensor:
    """Return the token ids of a document, (tokens,), or at least the first `limit`.

    No special tokens are added; a chat template writes its own.
    """
    if isinstance(document, Tensor):
        return document.flatten()
    if tokenizer is None:
        raise CalibrationError(f"{name} holds text, and there is no tokenizer; give one, or give token ids")
    text = document.render(tokenizer) if isinstance(document, Chat) else document
    ids: list[int] = []
    for piece in _pieces([text], limit):
        try:
            # verbose=False: no warning that text is longer than the model's context, since it is cut later.
            ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"{name} does not fit the tokenizer: {error}") from error
        if limit is not None and len(ids) > limit:
            break
    return torch.tensor(ids, dtype=torch.int64)


def _pieces(documents: Iterable[Document], limit: int | None) -> Iterator[Document]:
    """Yield texts joined by a blank line and cut into pieces, before a space if there is one; others as they are.

    The first piece nearly always has `limit` tokens.
    """
    size = PIECE if limit is None else min(PIECE, STRETCH * limit)
    text: str | None = None
    for document in documents:
        if not isinstance(document, str):
            if text is not None:
                yield text
            text = None
            yield document
            continue
        if text is None:
            text = document
        else:
            text += SEPARATOR
            text += document
        while len(text) > size:
            end = text.rfind(" ", 1, size)
            end = size if end < 0 else end
            yield text[:end]
            text = text[end:]
    if text is not None:
        yield text


def _special_tokens(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return the ids that the tokenizer puts before and after a text, such as those of [CLS] and [SEP]."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    start = next(place for place in range(len(whole) + 1) if whole[place : place + len(bare)] == bare)
    return torch.tensor(whole[:start], dtype=torch.int64), torch.tensor(whole[start + len(bare) :], dtype=torch.int64)


def _check(parts: Iterable[Tensor], vocab_size: int | None, name: str) -> Tensor:
    """Return the parts joined; there must be an id, and every id must be one that the model knows."""
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
    if not len(ids):
        raise CalibrationError(f"{name} holds no token; give a source that is not empty")
    outside = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if bool(outside.any()):
        position = int(outside.to(torch.uint8).argmax())
        allowed = "not be negative" if vocab_size is None else f"lie in 0 ... {vocab_size - 1}, the model's vocabulary"
        raise CalibrationError(
            f"token id {int(ids[position])} (token {position} of those taken from {name}) is out of range: ids must "
            f"{allowed}; use the tokenizer that belongs to the model"
        )
    return ids
