"""How rows become windows; the sources are lists and tensors here."""

import copy
import logging

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from gptqkit.calibration import TokenWindows, load_texts, load_tokens, load_windows
from gptqkit.errors import CalibrationError, ConfigError, ShapeError

WORDS = [
    "the",
    "ship",
    "sailed",
    "out",
    "of",
    "harbour",
    "and",
    "nobody",
    "on",
    "shore",
    "knew",
    "when",
    "would",
    "return",
]


def story(sentences, seed=0):
    """Text without repetition: every sentence carries its number."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for number in range(sentences):
        order = torch.randperm(len(WORDS), generator=generator).tolist()
        lines.append(f"{number}: " + " ".join(WORDS[i] for i in order) + ".\n")
    return "".join(lines)


def encode(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def as_set(windows):
    return {tuple(row) for row in windows.input_ids.tolist()}


def test_windows_are_slices_of_the_whole_text(tokenizer):
    ids = encode(tokenizer, story(60))
    windows = load_windows([story(60)], tokenizer, samples=10, sequence_length=32)
    slices = {tuple(ids[start : start + 32]) for start in range(0, len(ids) - 31, 32)}
    assert windows.input_ids.shape == (10, 32)
    assert windows.attention_mask is None
    assert windows.tokens == 320
    assert len(as_set(windows)) == 10
    assert as_set(windows) <= slices


def test_all_windows_come_in_order(tokenizer):
    ids = encode(tokenizer, story(20))
    windows = load_windows([story(20)], tokenizer, samples=None, sequence_length=32)
    assert windows.input_ids.flatten().tolist() == ids[: len(ids) // 32 * 32]


def test_the_seed_decides(tokenizer):
    text = [story(60)]
    first, again, other = (
        load_windows(text, tokenizer, samples=10, sequence_length=32, seed=seed).input_ids for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_texts_are_joined_in_order_by_blank_lines_and_blank_ones_left_out(tokenizer):
    windows = load_windows(["one ship", " \n", "", "two ships"], tokenizer, samples=None, sequence_length=1)
    assert windows.input_ids.flatten().tolist() == encode(tokenizer, "one ship") + encode(tokenizer, "\n\ntwo ships")


def test_long_text_is_not_encoded_whole_yet_spread_out(tokenizer, monkeypatch):
    text = story(3000)
    encoded = []
    original = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, texts, **kw: encoded.extend(texts) or original(self, texts, **kw)
    )
    windows = load_windows([text], tokenizer, samples=16, sequence_length=16)
    assert windows.input_ids.shape == (16, 16)
    assert sum(map(len, encoded)) < len(text) / 4
    positions = [text.index(piece.removeprefix("\n\n")) for piece in encoded]  # also: pieces of the text, unaltered
    assert min(positions) < len(text) / 4
    assert max(positions) > len(text) * 3 / 4
    again = load_windows([text], tokenizer, samples=16, sequence_length=16)
    assert torch.equal(again.input_ids, windows.input_ids)


def test_long_text_without_line_ends_and_with_many_rows(tokenizer):
    rows = ["a" * 40_000, *(f"row {number}" for number in range(5000))]
    windows = load_windows(rows, tokenizer, samples=4, sequence_length=16)
    assert windows.input_ids.shape == (4, 16)


def test_long_text_that_packs_many_characters_into_a_token_still_yields_its_windows():
    class Coarse:
        """One token per 40 characters, where English has one per 4."""

        def __call__(self, texts, **_):
            return {"input_ids": [[7] * (len(text) // 40) for text in texts]}

    windows = load_windows(["b" * 40 * 16 * 8], Coarse(), samples=4, sequence_length=16)
    assert windows.input_ids.shape == (4, 16)


def test_long_text_is_divided_without_loss():
    rows = [story(3000) + "x" * 5000, "the end"]
    text = "".join(rows)
    encoded = []

    class Empty:
        """Never gives enough, so that everything is asked for."""

        def __call__(self, texts, **_):
            encoded.extend(piece.removeprefix("\n\n") for piece in texts)
            return {"input_ids": [[] for _ in texts]}

    with pytest.raises(CalibrationError, match="holds 0 tokens"):
        load_windows(rows, Empty(), samples=1, sequence_length=16)
    assert "".join(sorted(encoded, key=text.index)) == text


def test_no_special_tokens_are_added(tokenizer):
    eager = copy.deepcopy(tokenizer)
    eager.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert eager("one ship")["input_ids"][0] == 1
    assert load_tokens(["one ship"], eager).tolist() == encode(tokenizer, "one ship")


def test_texts_for_encoders_carry_special_tokens_and_are_cut(tokenizer):
    framed = copy.deepcopy(tokenizer)
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    short, long = encode(tokenizer, "one ship"), encode(tokenizer, story(3))
    room = len(long) // 2 - 1  # two full texts and a rest
    texts = load_texts(["one ship", " ", story(3)], framed, sequence_length=room + 2)
    pieces = [short, long[:room], long[room : 2 * room]]
    assert [text.tolist() for text in texts] == [[1, *piece, 2] for piece in pieces]
    assert len(load_texts(["one ship", story(3)], framed, sequence_length=room + 2, limit=2)) == 2
    assert load_texts([short, long[:5]], framed, sequence_length=room)[1].tolist() == long[:5]
    ready = torch.arange(12).view(3, 4)
    assert torch.equal(torch.stack(load_texts(ready, None, sequence_length=4)), ready)


def test_texts_that_cannot_be_used_are_refused(tokenizer):
    framed = copy.deepcopy(tokenizer)
    framed.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    with pytest.raises(ConfigError, match="special tokens take it all"):
        load_texts(["one ship"], framed, sequence_length=1)
    with pytest.raises(ConfigError, match="limit of texts 0"):
        load_texts(["one ship"], framed, sequence_length=8, limit=0)
    with pytest.raises(CalibrationError, match="nothing is left"):
        load_texts([" ", ""], tokenizer, sequence_length=8)
    with pytest.raises(CalibrationError, match="vocabulary"):
        load_texts([[1, 2, 9]], None, sequence_length=8, vocab_size=9)


def test_long_text_does_not_warn(tokenizer, caplog):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.deprecation_warnings.clear()  # it warns only once
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        load_windows([story(100)], tokenizer, samples=2, sequence_length=16)
        assert len(load_tokens([story(100)], tokenizer)) > tokenizer.model_max_length
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert caplog.records == []


def test_rows_as_samples_are_cut_off_or_padded_and_masked(tokenizer):
    texts = ["one ship", story(3), "  ", "a long way from the harbour"]
    windows = load_windows(texts, tokenizer, samples=3, sequence_length=8, concatenate=False)
    assert windows.attention_mask is not None
    held = {tuple(ids[mask].tolist()) for ids, mask in zip(windows.input_ids, windows.attention_mask, strict=True)}
    assert held == {tuple(encode(tokenizer, text)[:8]) for text in texts if text.strip()}
    assert (windows.input_ids[~windows.attention_mask] == tokenizer.pad_token_id).all()
    assert (windows.attention_mask.int().diff(dim=1) <= 0).all()  # padding is on the right only
    assert windows.tokens == sum(len(ids) for ids in held)


def test_rows_that_fill_their_windows_need_no_mask(tokenizer):
    windows = load_windows([story(2), story(3)], tokenizer, samples=2, sequence_length=8, concatenate=False)
    assert windows.attention_mask is None


def test_rows_as_samples_follow_the_seed():
    rows = [[number] for number in range(100)]
    draws = [
        load_windows(rows, None, samples=10, sequence_length=2, seed=seed, concatenate=False).input_ids[:, 0].tolist()
        for seed in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) == 10
    assert max(draws[0]) > 50


@pytest.mark.parametrize(("pad", "eos", "expected"), [(3, 2, 3), (None, 2, 2), (None, None, 0), (9, 2, 2), (9, 9, 0)])
def test_padding_is_a_token_that_the_model_knows(pad, eos, expected):
    class Tokenizer:
        pad_token_id = pad
        eos_token_id = eos

    windows = load_windows([[5]], Tokenizer(), samples=1, sequence_length=2, concatenate=False, vocab_size=9)
    assert windows.input_ids.tolist() == [[5, expected]]


def test_one_dimensional_tensor_is_cut():
    windows = load_windows(torch.arange(10, dtype=torch.int32), None, samples=None, sequence_length=4)
    assert windows.input_ids.dtype == torch.int64
    assert windows.input_ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ready_windows_are_taken_from_the_first_on():
    ids = torch.arange(24).view(6, 4)
    assert torch.equal(load_windows(ids, None, samples=4, sequence_length=4, seed=5).input_ids, ids[:4])
    assert torch.equal(load_windows(ids, None, samples=100, sequence_length=4).input_ids, ids)
    with pytest.raises(CalibrationError, match=r"have 4 tokens, and sequence_length is 8.*use sequence_length 4"):
        load_windows(ids, None, samples=4, sequence_length=8)
    with pytest.raises(CalibrationError, match=r"no windows, shape \(0, 4\)"):
        load_windows(ids[:0], None, samples=4, sequence_length=4)


def test_too_short_says_how_many_tokens_there_were(tokenizer):
    count = len(encode(tokenizer, story(4)))
    with pytest.raises(CalibrationError, match=f"{count} tokens, enough for {count // 16} windows.*50 windows of 16"):
        load_windows([story(4)], tokenizer, samples=50, sequence_length=16)
    with pytest.raises(CalibrationError, match="3 tokens, enough for 0 windows, and 1 windows of 16"):
        load_windows([[1, 2, 3]], None, samples=None, sequence_length=16)
    with pytest.raises(CalibrationError, match="2 rows that are not blank, and 3 samples"):
        load_windows([[1], [2], []], None, samples=3, sequence_length=4, concatenate=False)


@pytest.mark.parametrize("concatenate", [True, False])
def test_nothing_left(tokenizer, concatenate):
    with pytest.raises(CalibrationError, match="nothing is left of the list: every row is empty or blank"):
        load_windows(["", " \n"], tokenizer, samples=1, sequence_length=4, concatenate=concatenate)


@pytest.mark.parametrize(
    ("source", "options", "first"),
    [
        ([[1, 2, 90, 91]], {}, 90),
        ([[1, 2, 90, 91]], {"concatenate": False}, 90),
        (torch.tensor([[1, 2, 3, 4], [5, 70, 90, 6]]), {}, 70),
        ([[1, -1, 90, 2]], {}, -1),
    ],
)
def test_ids_outside_the_vocabulary(source, options, first):
    with pytest.raises(CalibrationError, match=rf"token id {first} .*0 \.\.\. 63"):
        load_windows(source, None, samples=None, sequence_length=4, vocab_size=64, **options)


def test_negative_ids_without_a_vocabulary():
    with pytest.raises(CalibrationError, match=r"token id -7 .*must not be negative"):
        load_tokens(torch.tensor([1, -7]), None)


def test_text_from_the_wrong_tokenizer_is_noticed(tokenizer):
    with pytest.raises(CalibrationError, match=r"0 \.\.\. 99"):
        load_tokens(["one ship"], tokenizer, vocab_size=100)


@pytest.mark.parametrize("settings", [{"samples": 0, "sequence_length": 4}, {"samples": 1, "sequence_length": 0}])
def test_settings_that_cannot_be(settings):
    with pytest.raises(ConfigError, match="is 0; it must be positive"):
        load_windows([[1]], None, **settings)


def test_text_needs_a_tokenizer():
    with pytest.raises(CalibrationError, match="the list holds text, and there is no tokenizer"):
        load_windows(["text"], None, samples=1, sequence_length=4)


def test_tokens_for_evaluation_are_one_string(tokenizer):
    texts = ["one ship \n", "", "two ships"]
    assert load_tokens(texts, tokenizer).tolist() == encode(tokenizer, "one ship \n\n\n\n\ntwo ships")
    assert load_tokens([[1, 2], [3]], None).tolist() == [1, 2, 3]
    assert load_tokens(torch.tensor([[1, 2], [3, 4]]), None).tolist() == [1, 2, 3, 4]
    with pytest.raises(CalibrationError, match="holds no token"):
        load_tokens([""], tokenizer)


def test_windows_of_the_wrong_shape():
    with pytest.raises(ShapeError, match=r"must be torch.int64"):
        TokenWindows(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"need torch.bool \(2, 3\)"):
        TokenWindows(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3))
