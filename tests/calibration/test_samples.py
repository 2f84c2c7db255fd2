"""How documents become samples; the sources are lists and tensors here."""

import copy
import logging

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from gptqkit.calibration.config import Calibration, calibration_of
from gptqkit.calibration.samples import load_documents, load_samples, load_text
from gptqkit.errors import CalibrationError, ConfigError


def draw(source, tokenizer, samples, length, vocab_size=None, **options):
    calibration = Calibration(source, samples=samples, **options)
    return load_samples(calibration, tokenizer, sequence_length=length, vocab_size=vocab_size)


def story(sentences):
    """Text in which no piece comes twice."""
    return "".join(f"{number}: the ship {number * 7919} sailed out of harbour.\n" for number in range(sentences))


def encode(tokenizer, text):
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def cut(tokenizer, texts, length):
    """All samples that the joined texts hold, in their own order: a plain reading of the definition."""
    ids = []
    for text in texts:
        if text.strip():
            ids += encode(tokenizer, "\n\n" + text if ids else text)
    return [tuple(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)]


def rows(samples):
    return [tuple(row) for row in samples.input_ids.tolist()]


@pytest.fixture
def framed(tokenizer):
    """A tokenizer that puts <s> (1) before and </s> (2) after a text unless it is told not to."""
    framed = copy.deepcopy(tokenizer)
    framed.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert framed("ship")["input_ids"] == [1, *encode(tokenizer, "ship"), 2]
    return framed


@pytest.mark.parametrize("length", [1, 16, 33])
def test_samples_are_cut_from_the_joined_documents(framed, length):
    texts = ["one ship", " \n", story(5), "", "two ships", story(9)]
    available = cut(framed, texts, length)
    everything = draw(texts, framed, len(available), length)
    assert sorted(rows(everything)) == sorted(available)
    assert everything.attention_mask is None
    half = rows(draw(texts, framed, len(available) // 2, length))
    assert set(half) <= set(available)
    assert len(half) == len(available) // 2


@pytest.mark.parametrize("concatenate", [True, False])
def test_the_seed_decides_which_samples_are_drawn(concatenate):
    source = [[number, number] for number in range(100)]
    first, again, other = (rows(draw(source, None, 10, 2, seed=seed, concatenate=concatenate)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == len(set(other)) == 10
    assert max(first) > (50, 50)  # from the whole source


def test_one_document_per_sample_is_cut_off_or_padded_and_masked(tokenizer):
    texts = ["one ship", story(3), "  ", "a long way from the harbour"]
    samples = draw(texts, tokenizer, 3, 8, concatenate=False)
    mask = samples.attention_mask
    held = {tuple(ids[kept].tolist()) for ids, kept in zip(samples.input_ids, mask, strict=True)}
    assert held == {tuple(encode(tokenizer, text)[:8]) for text in texts if text.strip()}
    assert (samples.input_ids[~mask] == tokenizer.pad_token_id).all()
    assert (mask.int().diff(dim=1) <= 0).all()  # padding is on the right only
    assert int(samples.attention_mask.sum()) == sum(map(len, held))
    assert draw([story(2), story(3)], tokenizer, 2, 8, concatenate=False).attention_mask is None  # nothing is padded


@pytest.mark.parametrize(("pad", "eos", "expected"), [(3, 2, 3), (None, 2, 2), (None, None, 0), (9, 2, 2), (9, 9, 0)])
def test_padding_is_a_token_that_the_model_knows(pad, eos, expected):
    class Tokenizer:
        pad_token_id = pad
        eos_token_id = eos

    assert rows(draw([[5]], Tokenizer(), 1, 2, concatenate=False, vocab_size=9)) == [(5, expected)]


class Counting:
    """A tokenizer of one token per `size` characters, which keeps what it was given."""

    def __init__(self, size):
        self.size = size
        self.given = []

    def __call__(self, text, **_):
        self.given.append(text.removeprefix("\n\n"))
        return {"input_ids": [ord(letter) for letter in text[:: self.size]]}

    def apply_chat_template(self, chat, **_):
        return chat[0]["content"]


def test_of_long_text_only_a_part_is_encoded_and_it_comes_from_everywhere():
    texts = [story(1000), "", *(f"{number} is the number of a short text." for number in range(2000))]
    whole = "\n\n".join(text for text in texts if text)
    first, again, other = (rows(draw(texts, Counting(4), 16, 16, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    english, coarse = Counting(4), Counting(200)
    draw(texts, english, 16, 16)
    places = [whole.index(piece) for piece in english.given]
    assert sum(map(len, english.given)) < len(whole) / 4
    assert min(places) < len(whole) / 4 < len(whole) * 3 / 4 < max(places)
    with pytest.raises(CalibrationError, match=r"gives \d+ samples of 16 tokens"):  # for which it tried all of it
        draw(texts, coarse, 100, 16)
    assert all(piece in whole for piece in coarse.given)
    assert sum(map(len, coarse.given)) == len(whole)
    chats = [[{"role": "user", "content": f"{number} " * 500}] for number in range(50)]
    assert len(rows(draw(chats, Counting(4), 5, 16))) == 5


def test_ready_samples_are_taken_from_the_first_on():
    ids = torch.arange(24, dtype=torch.int32).view(6, 4)
    assert torch.equal(draw(ids, None, 4, 4, seed=5).input_ids, ids[:4].long())
    assert torch.equal(draw(ids, None, 100, 4, concatenate=False).input_ids, ids.long())
    with pytest.raises(CalibrationError, match=r"samples of 4 tokens, and sequence_length is 8.*use sequence_length 4"):
        draw(ids, None, 4, 8, sequence_length=8)
    assert torch.equal(draw(ids, None, 4, 8).input_ids, ids[:4].long())
    with pytest.raises(CalibrationError, match=r"the tensor gives 0 samples .*; give more text or a smaller"):
        draw(ids[:0], None, 4, 4)


def test_too_little_text_says_how_many_samples_there_are(tokenizer):
    count = len(cut(tokenizer, [story(4)], 16))
    with pytest.raises(CalibrationError, match=f"the list gives {count} samples of 16 tokens, and samples is 50"):
        draw([story(4)], tokenizer, 50, 16)
    with pytest.raises(
        CalibrationError,
        match=r"gives 2 samples of 4 tokens, and samples is 3; give more text, samples=2 \(--samples 2\)",
    ):
        draw([[1], [2], []], None, 3, 4, concatenate=False)


@pytest.mark.parametrize("concatenate", [True, False])
@pytest.mark.parametrize("source", [[[1, 2, 90, 91]], [[90, -1, 3, 2]], torch.tensor([[1, 2, 3, 4], [5, 90, 70, 6]])])
def test_ids_outside_the_vocabulary_are_refused(source, concatenate):
    with pytest.raises(CalibrationError, match=r"token id 90 .*0 \.\.\. 63"):
        draw(source, None, len(source), 4, vocab_size=64, concatenate=concatenate)


def test_tokens_and_text_that_nobody_can_use(tokenizer):
    with pytest.raises(CalibrationError, match=r"token id -7 .*must not be negative"):
        load_text(torch.tensor([1, -7]), None)
    with pytest.raises(CalibrationError, match=r"0 \.\.\. 99.*use the tokenizer that belongs to the model"):
        load_text(["one ship"], tokenizer, vocab_size=100)
    with pytest.raises(CalibrationError, match="vocabulary"):
        load_documents([[1, 2, 9]], None, sequence_length=8, vocab_size=9)
    with pytest.raises(CalibrationError, match="the list holds text, and there is no tokenizer"):
        draw(["text"], None, 1, 4)
    with pytest.raises(CalibrationError, match="document 0 of the list holds half of a surrogate pair"):
        load_text(["half a surrogate pair: \ud800"], tokenizer)
    with pytest.raises(CalibrationError, match="the list holds no token"):
        load_text([""], tokenizer)


def test_text_for_perplexity_is_one_string(framed):
    texts = ["one ship \n", "", "two ships"]
    assert load_text(texts, framed).tolist() == encode(framed, "one ship \n\n\n\n\ntwo ships")
    assert load_text([[1, 2], [3]], None).tolist() == [1, 2, 3]
    assert load_text(torch.tensor([[1, 2], [3, 4]]), None).tolist() == [1, 2, 3, 4]


def test_documents_for_encoders_carry_special_tokens_and_are_cut(framed):
    short, long = encode(framed, "one ship"), encode(framed, story(3))
    room = len(long) // 2 - 1  # two full documents and a rest
    found = load_documents(["one ship", " ", story(3)], framed, sequence_length=room + 2)
    assert [ids.tolist() for ids in found] == [[1, *ids, 2] for ids in (short, long[:room], long[room : 2 * room])]
    assert len(load_documents(["one ship", story(3)], framed, sequence_length=room + 2, limit=2)) == 2
    assert load_documents([short, long[:5]], framed, sequence_length=room)[1].tolist() == long[:5]
    ready = torch.arange(12).view(3, 4)
    assert torch.equal(torch.stack(load_documents(ready, None, sequence_length=4)), ready)
    with pytest.raises(ConfigError, match="sequence_length is 2, which leaves no room for text"):
        load_documents(["one ship"], framed, sequence_length=2)


def test_long_text_does_not_warn(tokenizer, caplog):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.deprecation_warnings.clear()  # it warns only once
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        draw([story(100)], tokenizer, 2, 512)
        assert len(load_text([story(100)], tokenizer)) > tokenizer.model_max_length
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples is 0; it must be positive"),
        ({"sequence_length": -1}, "sequence_length is -1; it must be positive"),
        ({"seed": -1}, "seed is -1; it must lie between 0 and 2"),
        ({"seed": 1 << 63}, "it must lie between"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Calibration("text.txt", **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": 2}, "the calibration has samples, but no source; give its text as source"),
        ({"sorce": "a.txt", "samples": 2}, "'sorce' is not a setting of Calibration; did you mean source"),
    ],
)
def test_settings_of_calibration_without_text_are_no_record_of_a_text(given, message):
    with pytest.raises(ConfigError, match=message):
        calibration_of(given)


def test_the_seed_has_a_choice_of_a_source_without_end():
    def drawn(seed):
        calibration = Calibration(([n, n] for n in range(10_000)), samples=10, seed=seed)
        return {tuple(row) for row in load_samples(calibration, None, sequence_length=2).input_ids.tolist()}

    first, other = drawn(1), drawn(2)
    assert first != other
    assert max(first | other) < (40, 40)
