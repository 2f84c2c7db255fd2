"""Everything that can be given as text: lists, chats, real files, and data sets of a Hub that is replaced."""

import copy
import csv
import inspect
import itertools
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from gptqkit.calibration.config import Calibration
from gptqkit.calibration.samples import load_documents, load_samples, load_text
from gptqkit.errors import CalibrationError, DatasetUnavailableError

CHAT = [{"role": "user", "content": "Where is the ship?"}, {"role": "assistant", "content": "In the harbour."}]
RENDERED = "<s>user: Where is the ship?</s><s>assistant: In the harbour.</s>"


@pytest.fixture
def chatting(tokenizer):
    chatting = copy.deepcopy(tokenizer)
    chatting.chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    return chatting


@pytest.fixture
def read(tokenizer):
    """The documents of a source as text: what is encoded comes back unaltered, since the tokens are bytes at worst."""

    def read(source, **options):
        found = load_documents(source, tokenizer, sequence_length=1 << 30, **options)
        return [tokenizer.decode(ids) for ids in found]

    return read


def draw(source, tokenizer, **options):
    return load_samples(Calibration(source, **options), tokenizer, sequence_length=8).input_ids


def write_all_kinds(folder, texts):
    """Write the same texts as .json, .jsonl, .csv and .parquet, together with a column of numbers."""
    records = [{"number": str(number), "text": text} for number, text in enumerate(texts)]
    (folder / "a.json").write_text(json.dumps(records))
    (folder / "b.jsonl").write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in records), encoding="utf-8")
    with (folder / "c.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["number", "text"])
        writer.writeheader()
        writer.writerows(records)
    datasets.Dataset.from_list(records).to_parquet(folder / "d.parquet")
    return [folder / name for name in ("a.json", "b.jsonl", "c.csv", "d.parquet")]


def test_text_keeps_its_line_ends(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    path.write_bytes("one\r\ntwo\rthree\n\f é".encode())
    for source in (path, str(path), [path]):
        assert tokenizer.decode(load_text(source, tokenizer)) == "one\r\ntwo\rthree\n\f é"


def test_every_kind_of_file_gives_the_same_documents(tmp_path, read):
    usual = csv.field_size_limit(4711)  # another program's
    texts = [
        "plain",
        'with "quotes", commas\r\nand lines',
        "\u2028é" * 70_000,  # longer than csv's own limit
        *("007", "1.0", "NA", "null", "nan", "true", "2020-01-01", '{"a": 1}'),  # no numbers, nothing missing, no dates
    ]
    files = write_all_kinds(tmp_path, texts)
    for file in files:
        assert read(file) == texts, file
        assert read(file, column="number") == [str(number) for number in range(len(texts))]
    assert read(tmp_path) == texts * 4
    assert read([files[2], files[0]]) == texts * 2
    assert csv.field_size_limit(usual) == 4711


def test_local_files_need_no_network_and_leave_nothing_behind(tmp_path):
    files = write_all_kinds(tmp_path, ["text"])
    save_file({"input_ids": torch.ones(1, 2, dtype=torch.int64)}, tmp_path / "f.safetensors")
    script = """
import socket, sys
from pathlib import Path
def refuse(*_): raise SystemExit("the network was asked")
socket.socket.connect = socket.getaddrinfo = refuse
from gptqkit.calibration.config import Calibration
assert not {"torch", "datasets", "transformers"} & set(sys.modules)
from gptqkit.calibration.samples import load_samples
for file in map(Path, sys.argv[1:]):
    load_samples(Calibration(file, samples=1), lambda text, **_: {"input_ids": [1, 2]}, sequence_length=2)
assert "datasets" not in sys.modules
"""
    home = tmp_path / "home"
    home.mkdir()
    environment = os.environ | dict.fromkeys(("HF_HOME", "HOME", "TMPDIR", "XDG_CACHE_HOME"), str(home))
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *files, tmp_path / "f.safetensors"]
    subprocess.run(command, env=environment, check=True, cwd=home)
    assert list(home.iterdir()) == []


def test_a_folder_is_read_in_order_with_subfolders_and_unknown_files_left_out(tmp_path, read):
    (tmp_path / "sub [1]*").mkdir()
    for name in ("b.txt", "a.TXT", "sub [1]*/c.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.TXT", "b.txt", "sub [1]*/c.txt"]


def test_json_of_plain_values(tmp_path):
    (tmp_path / "a.json").write_text("[[1, 2], [3]]")
    (tmp_path / "b.jsonl").write_text('[4]\n\n{"input_ids": [5, 6, 7]}\r\n')  # ragged
    assert load_text(tmp_path, None).tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_columns_are_found_by_name_or_named(tmp_path, read):
    path = tmp_path / "rows.jsonl"
    for record, expected in (
        ({"content": "c", "text": "t"}, "t"),
        ({"content": "c", "title": "x"}, "c"),
        ({"id": 3, "question": "q"}, "q"),
    ):
        path.write_text(json.dumps(record))
        assert read(path) == [expected]
    path.write_text('{"title": "x", "body": "y"}\n{"title": "z"}')
    assert read(path, column="title") == ["x", "z"]
    for column, message in (
        ("body", r"record 1 of .*rows\.jsonl has no column 'body'; its columns are 'title'"),
        (None, "and 2 others with text; name the column to read with column .--column.: 'title', 'body'"),
    ):
        with pytest.raises(CalibrationError, match=message):
            read(path, column=column)
    (tmp_path / "a.txt").write_text("plain")
    assert read(tmp_path, column="title") == ["plain", "x", "z"]
    with pytest.raises(CalibrationError, match=r"column is 'title', but .*a\.txt holds plain text"):
        read(tmp_path / "a.txt", column="title")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"x", r"a\.docx is or holds no file that can be read; such files end in \.txt"),
        ("a.txt", b"caf\xe9", "'utf-8' codec can't decode byte 0xe9 in position 3"),
        ("a.json", b"[" * 100_000, "recursion depth"),
        ("a.json", b'{"text": "x"}', "it must hold a list; if it has one record per line, name it .jsonl"),
        ("a.json", b"[[1, 1e3]]", r"document 0 of .*a\.json is \[1, 1000\.0\]; it must be text"),
        (
            "a.json",
            b"[[1], [9999999999999999999]]",
            r"document 1 of .*a\.json is \[9999999999999999999\]; .*whole numbers of 64",
        ),
        ("a.json", b"[" * 90 + b"]" * 90, r"document 0 of .*a\.json is \[+\.\.\.\]+; it must be text"),
        ("a.json", b"[" + b"9" * 5000 + b"]", r"a\.json cannot be read as \.json: Exceeds the limit"),
        ("a.jsonl", b'"text"\n"\\ud800"', r"document 1 of .*a\.jsonl holds half of a surrogate pair"),
        ("a.jsonl", b'"x"\n{', r"line 2 of .*a\.jsonl cannot be read"),
        ("a.csv", b'text\n"x', r"a\.csv cannot be read as \.csv"),
        ("a.txt", b"", "holds no token"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message) as caught:
        load_text(tmp_path / name, tokenizer)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["a.json", "b.jsonl", "c.csv", "d.parquet", "e.safetensors"])
def test_damaged_files_are_named(tmp_path, tokenizer, name):
    write_all_kinds(tmp_path, ["one ship", "two ships"])
    save_file({"input_ids": torch.ones(3, 4, dtype=torch.int64)}, tmp_path / "e.safetensors")
    path = tmp_path / name
    whole = path.read_bytes()
    changed = [whole[:size] for size in range(0, len(whole), 7)]
    changed += [whole[:place] + b"\xff\x00" + whole[place + 2 :] for place in range(0, len(whole), 7)]
    messages = []
    for data in changed:
        path.write_bytes(data)
        try:
            load_text(path, tokenizer)
        except CalibrationError as error:
            messages.append(str(error))
    assert len(messages) > len(changed) / 4
    assert all(str(path) in message for message in messages)


def test_a_small_file_that_unpacks_to_anything_is_refused(tmp_path, tokenizer, monkeypatch):
    """16 GiB in some kilobytes: the same text in every row, and that of one word."""
    texts = pyarrow.DictionaryArray.from_arrays([0] * (16 << 10), ["ship" * (1 << 18)])
    table = pyarrow.table({"text": texts, "number": range(16 << 10)})
    path = tmp_path / "bomb.parquet"
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr("gptqkit.calibration.records.MOST", 2 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CalibrationError, match=f"^document 2 of {path} brings its text to more than 2 Mi characters"):
        load_text(path, tokenizer)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert len(load_text(path, tokenizer, limit=10)) == 10


def test_missing_files_and_empty_folders(tmp_path, tokenizer):
    for source in (tmp_path / "none", "books/none.txt"):  # never asked of the Hub
        with pytest.raises(DatasetUnavailableError, match="there is no file or folder"):
            load_text(source, tokenizer)
    with pytest.raises(CalibrationError, match="is or holds no file that can be read"):
        load_text(tmp_path, tokenizer)
    with pytest.raises(CalibrationError, match="split is 'test', but only data sets with several splits"):
        load_text(tmp_path, tokenizer, split="test")


def test_ready_samples_from_files(tmp_path):
    ids = torch.arange(16).view(2, 8)
    save_file({"input_ids": ids}, tmp_path / "a.safetensors")
    save_file({"input_ids": ids + 16}, tmp_path / "b.safetensors")
    assert draw(tmp_path, None, samples=3, seed=9).flatten().tolist() == list(range(24))
    save_file({"input_ids": torch.arange(6).view(2, 3)}, tmp_path / "c.safetensors")
    samples = load_samples(Calibration(tmp_path, samples=9), None, sequence_length=99)
    assert samples.input_ids[-1, :3].tolist() == [3, 4, 5]
    assert samples.attention_mask.sum(1).tolist() == [8, 8, 8, 8, 3, 3]
    with pytest.raises(CalibrationError, match="samples of 8 tokens, and sequence_length is 16"):
        draw(tmp_path, None, samples=9, sequence_length=16)
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(CalibrationError, match=r"both text and ready samples .*\.safetensors files"):
        draw(tmp_path, None)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"ids": torch.zeros(1, 2, dtype=torch.int64)}, "it must hold one tensor, input_ids"),
        ({"input_ids": torch.zeros(1, 2).long(), "attention_mask": torch.ones(1, 2).bool()}, "nothing else"),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"input_ids \(samples, length\)"),
        ({"input_ids": torch.zeros(1, 2)}, r"a\.safetensors is tensor\(.*; it must be .*whole numbers"),
    ],
)
def test_safetensors_that_hold_something_else(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CalibrationError, match=message):
        draw(tmp_path / "a.safetensors", None)


def test_chats_go_through_the_template(tokenizer, chatting, tmp_path):
    expected = chatting.backend_tokenizer.encode(RENDERED, add_special_tokens=False).ids
    assert expected.count(chatting.bos_token_id) == 2
    # Messages need not have the same keys.
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": CHAT}) + '\n{"messages": [{"role": "a", "tool_calls": 1}]}'
    )
    assert load_text(tmp_path / "chats.jsonl", chatting)[: len(expected)].tolist() == expected
    dataset = datasets.Dataset.from_list([{"messages": CHAT}])
    dataset.to_parquet(tmp_path / "chats.parquet")
    for source in ([CHAT], tmp_path / "chats.parquet", dataset):
        assert load_text(source, chatting).tolist() == expected
    with pytest.raises(CalibrationError, match=r"the tokenizer has no chat template .*give texts, or the tokenizer"):
        load_text([CHAT], tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages | length / 0 }}", "division by zero"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "more than 0.5 seconds"),
        ("{{ messages[0].role * (5000000000 // 4) }}", "MemoryError"),
    ],
)
def test_templates_that_fail_are_one_line_that_names_the_row(chatting, tmp_path, monkeypatch, template, message):
    monkeypatch.setattr("gptqkit.calibration.chats.SECONDS", 0.5)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": CHAT[:1]}))
    chatting.chat_template = f"{{% if messages | length == 2 %}}fine{{% else %}}{template}{{% endif %}}"
    with pytest.raises(CalibrationError, match=rf"^document 1 of {path} does not fit the tokenizer's .*{message}"):
        load_text(path, chatting)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], r"^\[\] cannot be read; give a file, a folder"),
        ([{"rol": "user", "contnt": "hi"}], "'rol', 'contnt'. Messages of a chat have 'role' and 'content', or 'from'"),
        (
            [[{"role": "user", "text": "hi"}]],
            "document 0 of the list is a chat with a message of 'role', 'text'; it must",
        ),
        ([{"messages": [{"rol": "user"}]}], "its columns are 'rol', and messages of a chat have 'role' and 'content'"),
        (["text", 3.5], r"document 1 of the list is 3\.5"),
        ([[True, False]], "whole numbers"),
        (b"bytes", "b'bytes' cannot be read"),
        (torch.zeros(4), r"document 0 of the tensor is tensor\(\[0\."),
        (7, "7 cannot be read"),
        ([[10**5000]], "document 0 of the list is a list with a huge number; it must be"),
        ([[[[[1]]]]], r"document 0 of the list is \[\[\[\[1\]\]\]\]; it must be"),
        ([{"text": b"caf"}], r"document 0 of the list is \{'text': b'caf'\}; it must be text"),
        (np.array([[1.5]]), r"document 0 of the source is array\(\[\[1\.5\]\]\); it must be"),
        (np.array([1 << 63], dtype=np.uint64), "whole numbers of 64 bits"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "document 0 of the list is"),
        ([{"input_ids": [1, 2], "attention_mask": "11"}], "document 0 of the list is"),
    ],
)
def test_sources_of_no_known_kind(source, message):
    with pytest.raises(CalibrationError, match=message):
        load_text(source, None)


TEXTS = ["one ship", "two ships sailed", "three", "four ships in the harbour"]


def rows_of(samples):
    mask = torch.ones_like(samples.input_ids).bool() if samples.attention_mask is None else samples.attention_mask
    return [ids[kept].tolist() for ids, kept in zip(samples.input_ids, mask, strict=True)]


def test_what_a_tokenizer_returns_are_samples_without_their_padding(tokenizer, tmp_path):
    """As GPTQModel and AutoGPTQ take it: one encoding or many, in any container that is in use."""
    expected = [tokenizer(text)["input_ids"] for text in TEXTS]
    left = copy.deepcopy(tokenizer)
    left.padding_side = "left"
    encodings = [tokenizer(text) for text in TEXTS]
    tensors = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    dataset = datasets.Dataset.from_list([{**encoding, "text": 3} for encoding in encodings]).remove_columns("text")
    dataset.to_parquet(tmp_path / "a.parquet")
    padded = tokenizer(TEXTS, return_tensors="pt", padding=True)
    loader = torch.utils.data.DataLoader(dataset.with_format("torch"), batch_size=1)
    wide = torch.utils.data.DataLoader(
        encodings, batch_size=3, collate_fn=lambda rows: tokenizer.pad(rows, return_tensors="np")
    )
    for number, source in enumerate(
        [
            encodings,
            [dict(encoding) for encoding in encodings],
            tensors,
            [encoding["input_ids"] for encoding in tensors],  # (1, n)
            [encoding["input_ids"].numpy() for encoding in tensors],
            tokenizer(TEXTS),  # ragged
            padded,
            dict(padded),
            left(TEXTS, return_tensors="np", padding=True),
            [padded],
            dataset,
            dataset.to_iterable_dataset(),
            datasets.DatasetDict(train=dataset, test=dataset.select([0])),
            tmp_path / "a.parquet",
            loader,
            wide,
            (encoding for encoding in tensors),
        ]
    ):
        samples = load_samples(Calibration(source, seed=number), None, sequence_length=99)
        assert rows_of(samples) == expected, number
        assert samples.input_ids.shape[1] == max(map(len, expected))


def test_what_torch_collates_is_read_by_records():
    rows = [{"input_ids": [k, k + 1, k + 2], "attention_mask": [1, 1, k % 2]} for k in (1, 4, 7)]
    expected = [[1, 2, 3], [4, 5], [7, 8, 9]]
    named = [{"tokens": row["input_ids"], "attention_mask": row["attention_mask"]} for row in rows]
    for source, column in ((rows, None), (named, "tokens")):
        for given in (source, torch.utils.data.DataLoader(source, batch_size=2)):
            samples = load_samples(Calibration(given, column=column, samples=3), None, sequence_length=99)
            assert rows_of(samples) == expected
    plain = torch.utils.data.DataLoader([[1, 2, 3], [4, 5, 6]], batch_size=2)
    assert rows_of(load_samples(Calibration(plain, samples=2), None, sequence_length=3)) == [[1, 2, 3], [4, 5, 6]]
    numbered = torch.utils.data.Subset([{"input_ids": [1, 2]}, {"input_ids": [3, 4]}], [1, 0])  # has no __iter__
    assert rows_of(load_samples(Calibration(numbered, samples=2), None, sequence_length=2)) == [[3, 4], [1, 2]]
    ids = torch.arange(6).view(2, 3)
    nameless = torch.utils.data.TensorDataset(ids, torch.ones_like(ids))
    for source in (torch.utils.data.DataLoader(nameless, batch_size=2), [(ids, torch.ones_like(ids))]):
        with pytest.raises(CalibrationError, match=r"document 0 of the .* is several tensors"):
            load_samples(Calibration(source), None, sequence_length=3)


def test_a_loader_without_end_is_read_no_further_than_needed(tokenizer):
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ({"text": f"the ship {k} sailed"} for k in itertools.count())

    loader = torch.utils.data.DataLoader(Endless(), batch_size=2)
    assert draw(loader, tokenizer, samples=3).shape == (3, 8)


def test_texts_chats_and_ids_come_in_any_container(chatting, read):
    records = [{"text": text} for text in TEXTS]
    batches = torch.utils.data.DataLoader(TEXTS, batch_size=3)
    frame = pandas.DataFrame(records)
    for source in (
        TEXTS,
        tuple(TEXTS),
        records,
        {"text": TEXTS},
        np.array(TEXTS),
        batches,
        iter(TEXTS),
        [TEXTS],
        frame,
    ):
        assert read(source, limit=4) == TEXTS
    split = datasets.DatasetDict(
        train=datasets.Dataset.from_list(records), test=datasets.Dataset.from_list(records[:2])
    )
    assert read(split) == TEXTS[:2]
    assert read(split, split="train") == TEXTS
    with pytest.raises(CalibrationError, match="no split 'dev', but 'train', 'test'; name one with split"):
        read(split, split="dev")
    expected = chatting.backend_tokenizer.encode(RENDERED, add_special_tokens=False).ids
    shared = [{"from": "human", "value": CHAT[0]["content"]}, {"from": "gpt", "value": CHAT[1]["content"]}]
    shares = (shared, [{"id": "a", "conversations": shared}], {"conversations": [shared]})
    for source in (CHAT, [CHAT], [{"messages": CHAT}], {"messages": [CHAT]}, {"messages": CHAT}, *shares):
        assert load_text(source, chatting).tolist() == expected
    for source in (
        [1, 2, 3],
        [[1, 2], [3]],
        [np.array([1, 2]), [np.int64(3)]],
        np.array([1, 2, 3]),
        {"input_ids": [[1, 2], [3]]},
    ):
        assert load_text(source, None).tolist() == [1, 2, 3]


def test_names_of_files_in_a_list_are_files(tmp_path, read):
    (tmp_path / "a.txt").write_text("one ship")
    (tmp_path / "b.txt").write_text("two ships")
    assert read([str(tmp_path / "b.txt"), tmp_path / "a.txt"]) == ["two ships", "one ship"]
    with pytest.raises(DatasetUnavailableError, match=r"there is no file or folder .*none\.jsonl"):
        read([str(tmp_path / "a.txt"), str(tmp_path / "none.jsonl")])
    with pytest.raises(DatasetUnavailableError, match="folder wikitext2; where several sources are given, each must"):
        read([str(tmp_path / "a.txt"), pathlib.Path("wikitext2")])
    assert read(["I read a.txt", "and slept"]) == ["I read a.txt", "and slept"]


def test_a_part_of_a_text_is_read_and_encoded_no_further_than_needed(tokenizer):
    class Source:
        read = 0

        def __iter__(self):
            for number in range(10**9):
                self.read += 1
                yield f"{number} ships sailed out of the harbour."

    source = Source()
    whole = load_text(list(itertools.islice(source, 500)), tokenizer)
    source.read = 0
    assert load_text(source, tokenizer, limit=300).equal(whole[:300])
    assert source.read < 150
    with pytest.raises(CalibrationError, match="may have no end; say how much of it you need"):
        load_text(source, tokenizer)


def test_text_is_cut_before_it_is_encoded(tokenizer, monkeypatch):
    """One word of any size takes no more memory at once than a piece does."""
    given = []

    def counting(text, **options):
        given.append(text)
        return tokenizer(text, **options)

    monkeypatch.setattr("gptqkit.calibration.samples.PIECE", 1000)
    word, text = "ship" * 5000, "the ship sailed " * 1000
    for source in (word, text):
        del given[:]
        assert tokenizer.decode(load_text([source], counting)) == source
        assert "".join(given) == source
        assert max(map(len, given)) <= 1000
    assert all(piece.startswith(" ") for piece in given[1:])
    assert load_text([text], counting).equal(torch.tensor(tokenizer(text, verbose=False)["input_ids"]))
    del given[:]
    assert draw([word], counting, samples=1, concatenate=False).shape == (1, 8)
    assert len(load_documents([word], counting, sequence_length=8, limit=2)) == 2
    assert sum(map(len, given)) < 1000


class Hub:
    """Stands in for `datasets.load_dataset`: every set says its own name, and what is fetched is counted."""

    def __init__(self):
        self.fetched = 0

    def __call__(self, path, name=None, *, split, streaming):
        def rows():
            for number in range(2000):
                self.fetched += 1
                yield {"text": f"{number} {path} {name} {split}", "url": "x"}

        return datasets.IterableDataset.from_generator(rows) if streaming else datasets.Dataset.from_list(list(rows()))


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub)
    return hub


@pytest.mark.parametrize(
    ("source", "expected", "evaluation", "documents"),
    [
        ("wikitext2", "Salesforce/wikitext wikitext-2-raw-v1", "test", 2000),
        ("c4", "allenai/c4 en", "validation", 1100),  # streamed, and only the first 1100 are evaluated
        ("pile", "NeelNanda/pile-10k None", "train", 2000),
        ("some/set", "some/set None", "test", 2000),
        ("some/set:part", "some/set part", "test", 2000),
    ],
)
def test_sets_of_the_hub(hub, tokenizer, source, expected, evaluation, documents):
    text = "\n\n".join(f"{number} {expected} {evaluation}" for number in range(documents))
    assert tokenizer.decode(load_text(source, tokenizer)) == text
    assert tokenizer.decode(load_text(source, tokenizer, split="x")).startswith(f"0 {expected} x\n\n1 ")
    hub.fetched = 0
    calibration = Calibration(source, samples=8, concatenate=False)
    drawn = tokenizer.batch_decode(load_samples(calibration, tokenizer, sequence_length=64).input_ids)
    numbers = [int(text.split()[0]) for text in drawn]
    assert all(text.startswith(f"{number} {expected} train") for number, text in zip(numbers, drawn, strict=True))
    if source in ("wikitext2", "pile"):  # small, so that samples come from everywhere in them
        assert max(numbers) > 500
    else:
        assert hub.fetched < 100


def test_streams_are_read_no_further_than_needed(hub, tokenizer):
    assert draw("c4", tokenizer, samples=4).shape == (4, 8)
    assert hub.fetched < 50
    endless = datasets.IterableDataset.from_generator(lambda: ({"text": f"{n}"} for n in range(10**9)))
    assert draw(endless, tokenizer, samples=4).shape == (4, 8)
    assert len(load_documents(endless, tokenizer, sequence_length=8, limit=3)) == 3
    for load, options in ((load_text, {}), (load_documents, {"sequence_length": 8})):
        with pytest.raises(CalibrationError, match="the data set may have no end"):
            load(endless, tokenizer, **options)


def test_datasets_made_by_the_caller(tokenizer):
    dataset = datasets.Dataset.from_dict({"extra": [1, 2], "content": ["one ship", "two ships"]})
    assert tokenizer.decode(load_text(dataset, tokenizer)) == "one ship\n\ntwo ships"
    for source in (dataset, dataset.to_iterable_dataset()):
        with pytest.raises(CalibrationError, match="no column 'body'; its columns are 'extra', 'content'"):
            draw(source, tokenizer, column="body")
    ids = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4, 5]]})
    assert load_text(ids, None).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(CalibrationError, match="the data set gives 0 samples"):
        draw(datasets.Dataset.from_dict({"text": []}), tokenizer)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (ConnectionError("no route"), r"some/set \(train\) cannot be read: no route; check .*the network"),
        (datasets.exceptions.DatasetNotFoundError("gone"), "cannot be read: gone; check its name"),
        (ValueError("Bad split: x. Available: y"), "Available: y; check its name, its split"),
        (RuntimeError("Dataset scripts are no longer supported"), "scripts are no longer supported.*give a local file"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_sets_that_cannot_be_had(monkeypatch, tokenizer, raised, message, late):
    def rows():
        yield {"text": "one ship"}
        raise raised

    def load(*_, **__):
        if not late:
            raise raised
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DatasetUnavailableError, match=message) as caught:
        draw("some/set", tokenizer)
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize(("source", "meant"), [("wikitext-2", "wikitext2"), ("wikitxt2", "wikitext2"), ("c-4", "c4")])
def test_misspelt_shorthands(monkeypatch, tokenizer, source, meant):
    def load(*_, **__):
        raise FileNotFoundError("not on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DatasetUnavailableError, match=rf"{source} \(train\) .*on the Hub; did you mean {meant}\?"):
        draw(source, tokenizer)


def test_a_shorthand_that_cannot_be_had_was_not_misspelt(monkeypatch, tokenizer):
    def load(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DatasetUnavailableError, match=r"wikitext2 \(train\) cannot be read: no route; check its name"):
        draw("wikitext2", tokenizer)


def test_a_name_in_a_folder_that_exists_is_no_data_set(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(DatasetUnavailableError, match="there is no file or folder data/books"):
        load_text("data/books", None)
    assert hub.fetched == 0


@pytest.mark.parametrize("source", ["../some/set", "Call me Ishmael.", "x" * 5000 + " ", "a/b:c:d", "nul\0"])
def test_strings_that_are_neither_path_nor_data_set(hub, source):
    with pytest.raises(DatasetUnavailableError, match="no existing file or folder, and cannot be a data set"):
        load_text(source, None)
    assert hub.fetched == 0


def test_remote_code_cannot_be_asked_for():
    """`datasets` has no such option left, so that no call of ours could switch it on."""
    assert "trust_remote_code" not in inspect.signature(datasets.load_dataset).parameters
