"""Data sets of the Hub, with `datasets.load_dataset` replaced: nothing here touches the network."""

import inspect

import datasets
import pytest
import torch

from gptqkit.calibration import load_tokens, load_windows
from gptqkit.errors import CalibrationError, DatasetUnavailableError

ROWS = [f"row number {number} of the set" for number in range(400)]


class Hub:
    """Answers like `datasets.load_dataset`, remembers how it was asked, and counts the rows that were fetched."""

    def __init__(self):
        self.calls = []
        self.fetched = 0

    def __call__(self, path, name=None, *, split, streaming):
        self.calls.append((path, name, split, streaming))

        def rows():
            for text in ROWS:
                self.fetched += 1
                yield {"text": text, "url": "x"}

        return datasets.IterableDataset.from_generator(rows) if streaming else datasets.Dataset.from_list(list(rows()))


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub)
    return hub


def test_shorthands_for_calibration(hub, tokenizer):
    for source in ("wikitext2", "c4", "pile", "some/set", "some/set:part"):
        load_windows(source, tokenizer, samples=2, sequence_length=8)
    load_windows("some/set", tokenizer, samples=2, sequence_length=8, split="other")
    assert hub.calls == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "train", False),
        ("allenai/c4", "en", "train", True),
        ("NeelNanda/pile-10k", None, "train", False),
        ("some/set", None, "train", True),
        ("some/set", "part", "train", True),
        ("some/set", None, "other", True),
    ]


def test_shorthands_for_evaluation(hub, tokenizer):
    for source in ("wikitext2", "c4", "pile", "some/set"):
        tokens = load_tokens(source, tokenizer)
        assert tokens.tolist() == tokenizer("\n\n".join(ROWS), add_special_tokens=False, verbose=False)["input_ids"]
    assert hub.calls == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "test", False),
        ("allenai/c4", "en", "validation", True),
        ("NeelNanda/pile-10k", None, "train", False),
        ("some/set", None, "test", False),
    ]


def test_c4_is_evaluated_on_its_first_rows(tokenizer, monkeypatch):
    endless = datasets.IterableDataset.from_generator(lambda: ({"text": f"{n}"} for n in range(10**9)))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: endless)
    expected = "\n\n".join(str(n) for n in range(1100))
    assert tokenizer.decode(load_tokens("c4", tokenizer)) == expected


@pytest.mark.parametrize("concatenate", [True, False])
def test_streams_are_read_no_further_than_needed(hub, tokenizer, concatenate):
    options = {"samples": 4, "sequence_length": 8, "concatenate": concatenate}
    first, again, other = (load_windows("c4", tokenizer, **options, seed=seed).input_ids for seed in (0, 0, 1))
    assert first.shape == (4, 8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 3 * 16 <= hub.fetched < 3 * 100 < len(ROWS)


def test_streams_need_a_number_of_samples(hub, tokenizer):
    with pytest.raises(CalibrationError, match="streamed and may have no end; say how many samples"):
        load_windows("c4", tokenizer, samples=None, sequence_length=8)
    assert hub.fetched == 0
    assert load_windows("wikitext2", tokenizer, samples=None, sequence_length=8).tokens > 2000


def test_datasets_made_by_the_caller(tokenizer):
    dataset = datasets.Dataset.from_dict({"extra": [1, 2], "content": ["one ship", "two ships"]})
    joined = tokenizer("one ship\n\ntwo ships", add_special_tokens=False)["input_ids"]
    assert load_tokens(dataset, tokenizer).tolist() == joined
    with pytest.raises(CalibrationError, match="no column 'body'; its columns are 'extra', 'content'"):
        load_tokens(dataset, tokenizer, column="body")
    stream = dataset.to_iterable_dataset()
    assert load_windows(stream, tokenizer, samples=1, sequence_length=2).input_ids.shape == (1, 2)
    with pytest.raises(CalibrationError, match="no column 'body'; its columns are 'extra', 'content'"):
        load_windows(stream, tokenizer, samples=1, sequence_length=2, column="body")
    with pytest.raises(CalibrationError, match="streamed"):
        load_tokens(stream, tokenizer)
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4, 5]]})
    assert load_tokens(ids, None).tolist() == [1, 2, 3, 4, 5]


def test_empty_dataset(tokenizer):
    with pytest.raises(CalibrationError, match="nothing is left of the data set"):
        load_windows(datasets.Dataset.from_dict({"text": []}), tokenizer, samples=1, sequence_length=2)


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (ConnectionError("no route"), DatasetUnavailableError, "'some/set' could not be fetched: no route .*network"),
        (datasets.exceptions.DatasetNotFoundError("gone"), DatasetUnavailableError, "could not be fetched: gone"),
        (datasets.exceptions.DatasetGenerationError("bad"), DatasetUnavailableError, "could not be fetched: bad"),
        (ValueError("Bad split: x. Available: y"), CalibrationError, "cannot give split 'train'.*Available: y"),
        (RuntimeError("Dataset scripts are no longer supported"), CalibrationError, "without executing code"),
    ],
)
def test_sets_that_cannot_be_had(monkeypatch, tokenizer, raised, expected, message):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(expected, match=message) as caught:
        load_windows("some/set", tokenizer, samples=1, sequence_length=4)
    assert caught.value.__cause__ is raised


def test_a_stream_that_breaks_off(monkeypatch, tokenizer):
    def rows():
        yield {"text": "one ship"}
        raise ConnectionError("server went away")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows))
    with pytest.raises(DatasetUnavailableError, match="server went away"):
        load_windows("c4", tokenizer, samples=9, sequence_length=9)


@pytest.mark.parametrize("source", ["../some/set", "a/b/c", "Call me Ishmael.", "x" * 5000 + " ", "a/b:c:d", "nul\0"])
def test_strings_that_are_neither_path_nor_data_set(hub, source):
    with pytest.raises(DatasetUnavailableError, match="no existing file or folder, and cannot be a data set"):
        load_tokens(source, None)
    assert hub.calls == []


def test_remote_code_cannot_be_asked_for():
    """`datasets` has no such option left, so that no call of ours could switch it on."""
    assert "trust_remote_code" not in inspect.signature(datasets.load_dataset).parameters
