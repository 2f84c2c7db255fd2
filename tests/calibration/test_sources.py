"""Lists, chats and local files, real ones in a temporary folder."""

import copy
import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from gptqkit.calibration import load_tokens, load_windows
from gptqkit.calibration.rows import Rows
from gptqkit.calibration.sources import open_source
from gptqkit.errors import CalibrationError, DatasetUnavailableError

CHAT = [{"role": "user", "content": "Where is the ship?"}, {"role": "assistant", "content": "In the harbour."}]
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"


def read(source, **options):
    opened = open_source(source, **options)
    assert isinstance(opened, Rows)
    assert not opened.streamed
    return list(opened.rows)


@pytest.fixture
def chat_tokenizer(tokenizer):
    chat_tokenizer = copy.deepcopy(tokenizer)
    chat_tokenizer.chat_template = TEMPLATE
    return chat_tokenizer


def test_text_keeps_its_line_ends(tmp_path, tokenizer):
    path = tmp_path / "book.txt"
    path.write_bytes("one\r\ntwo\rthree\n\f é".encode())
    assert read(path) == read(str(path)) == ["one\r\ntwo\rthree\n\f é"]
    assert tokenizer.decode(load_tokens(path, tokenizer)) == "one\r\ntwo\rthree\n\f é"


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    csv_limit = csv.field_size_limit()
    texts = ["plain", 'with "quotes", commas\r\nand lines', "\u2028é" * 70_000]  # longer than csv's own limit
    records = [{"number": str(i), "text": text} for i, text in enumerate(texts)]
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records), encoding="utf-8")
    quoted = ['"' + text.replace('"', '""') + '"' for text in texts]
    csv_text = "number,text\r\n" + "".join(f"{i},{text}\r\n" for i, text in enumerate(quoted))
    (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbf" + csv_text.encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    for ending in ("a.json", "b.jsonl", "c.csv", "d.parquet"):
        assert read(tmp_path / ending) == texts, ending
    assert csv.field_size_limit() == csv_limit
    assert read(tmp_path) == texts * 4
    assert read([tmp_path / "c.csv", tmp_path / "a.json"]) == texts * 2
    assert read(tmp_path / "c.csv", column="number") == ["0", "1", "2"]
    assert read(tmp_path / "d.parquet", column="number") == ["0", "1", "2"]


def test_a_folder_is_read_in_order_with_subfolders_and_unknown_files_left_out(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.TXT", "sub/c.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.TXT", "b.txt", "sub/c.txt"]


def test_json_of_plain_values(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([None, "one", "two"]))
    (tmp_path / "b.jsonl").write_text('"one"\n\n[1, 2]\n')
    assert read(tmp_path / "a.json") == ["", "one", "two"]
    text, ids = read(tmp_path / "b.jsonl")
    assert text == "one"
    assert ids.tolist() == [1, 2]


def test_columns_are_found_in_order_of_preference(tmp_path):
    path = tmp_path / "rows.jsonl"
    for record, expected in (
        ({"content": "c", "text": "t"}, "t"),
        ({"content": "c", "title": "x"}, "c"),
        ({"messages": CHAT, "title": "x"}, CHAT),
        ({"id": 3, "question": "q"}, "q"),
    ):
        path.write_text(json.dumps(record))
        assert read(path) == [expected]


def test_missing_columns_list_the_columns_there_are(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"title": "x", "body": "y"}\n{"title": "z"}')
    with pytest.raises(CalibrationError, match="no column 'text'; its columns are 'title', 'body'"):
        read(path, column="text")
    with pytest.raises(CalibrationError, match=r"2 columns of text .*'title', 'body': name one with column"):
        read(path)
    with pytest.raises(CalibrationError, match=r"row 1 of .* has no column 'body'; its columns are 'title'"):
        read(path, column="body")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"x", r"ends in '\.docx'; files that can be read end in \.txt"),
        ("a", b"x", "ends in 'nothing'"),
        ("a.txt", b"caf\xe9", "not UTF-8 .byte 3"),
        ("a.json", b"[1,", "is not JSON"),
        ("a.json", b'{"text": "x"}', "a JSON dict; it must hold a list"),
        ("a.jsonl", b'"x"\n{', "line 2 of .* is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n3', "row 1 of .* is of type int; row 0 is an object"),
        ("a.jsonl", b"3", "row 0 of .* is of type int; a row must be text"),
        ("a.csv", b'text\n"x', r"no readable \.csv file"),
        ("a.parquet", b"PAR1 no", r"no readable \.parquet file"),
        ("a.safetensors", b"12", r"no readable \.safetensors file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read(tmp_path / name)


def test_missing_files_and_empty_folders(tmp_path):
    with pytest.raises(DatasetUnavailableError, match="there is no file or folder"):
        read(tmp_path / "none")
    with pytest.raises(DatasetUnavailableError, match="there is no file or folder"):
        read("books/none.txt")  # never asked of the Hub
    with pytest.raises(CalibrationError, match="has no file that ends in one of"):
        read(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    assert read(tmp_path) == []


def test_ready_windows_from_files(tmp_path):
    ids = torch.arange(12).view(3, 4)
    save_file({"input_ids": ids}, tmp_path / "a.safetensors")
    save_file({"input_ids": ids + 12}, tmp_path / "b.safetensors")
    assert torch.equal(load_windows(tmp_path / "a.safetensors", None, samples=8, sequence_length=4).input_ids, ids)
    both = load_windows(tmp_path, None, samples=5, sequence_length=4).input_ids
    assert both.flatten().tolist() == list(range(20))
    save_file({"input_ids": torch.arange(6).view(2, 3)}, tmp_path / "c.safetensors")
    with pytest.raises(CalibrationError, match=r"have 3 tokens, those in .* 4"):
        open_source(tmp_path)
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(CalibrationError, match=r"a\.safetensors holds ready windows, .*d\.txt does not"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"ids": torch.zeros(1, 2, dtype=torch.int64)}, "holds ids; it must hold exactly one tensor, input_ids"),
        (
            {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "attention_mask": torch.ones(1, 2, dtype=torch.bool)},
            "holds attention_mask, input_ids",
        ),
        ({"input_ids": torch.zeros(4, dtype=torch.int64)}, r"shape \(4,\); it must be \(samples, length\)"),
        ({"input_ids": torch.zeros(1, 2)}, r"torch\.float32; token ids must be whole numbers"),
    ],
)
def test_safetensors_that_hold_something_else(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(CalibrationError, match=message):
        open_source(tmp_path / "a.safetensors")


def test_chats_go_through_the_template(chat_tokenizer, tmp_path):
    rendered = "<s>user: Where is the ship?</s><s>assistant: In the harbour.</s>"
    expected = chat_tokenizer.backend_tokenizer.encode(rendered, add_special_tokens=False).ids
    assert expected.count(chat_tokenizer.bos_token_id) == 2
    assert load_tokens([CHAT], chat_tokenizer).tolist() == expected
    windows = load_windows([CHAT, CHAT], chat_tokenizer, samples=None, sequence_length=1)
    assert windows.input_ids.flatten().tolist() == expected * 2
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    assert load_tokens(tmp_path / "chats.jsonl", chat_tokenizer).tolist() == expected


def test_chats_that_cannot_be_rendered(tokenizer, chat_tokenizer):
    with pytest.raises(CalibrationError, match=r"the tokenizer has no chat template; set tokenizer.chat_template"):
        load_tokens([CHAT], tokenizer)
    with pytest.raises(CalibrationError, match="the keys 'from', 'value'; it needs 'role'"):
        load_tokens([[{"from": "human", "value": "x"}]], chat_tokenizer)
    chat_tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CalibrationError, match="does not fit the tokenizer's chat template: roles must alternate"):
        load_tokens([CHAT], chat_tokenizer)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "the list is empty"),
        ([1, 2], "a list of lists"),
        (CHAT, "a single message; a chat is a list of messages"),
        ([["a", 1]], "row 0 of the list is a list of int and str"),
        (["text", 3.5], "row 1 of the list is of type float"),
        (3, "a source of type int cannot be read"),
        (b"bytes", "a source of type bytes"),
        (torch.zeros(4), r"torch\.float32; token ids must be whole numbers"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"shape \(1, 2, 3\); token ids must be"),
    ],
)
def test_sources_of_no_known_kind(source, message):
    with pytest.raises(CalibrationError, match=message):
        open_source(source)


def test_paths_and_texts_do_not_mix(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for source in ([tmp_path / "a.txt", "text"], ["text", tmp_path / "a.txt"]):
        with pytest.raises(CalibrationError, match="paths and other things"):
            open_source(source)


def test_only_hub_sets_have_splits(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(CalibrationError, match="split is 'test', but only data sets of the Hub"):
        open_source(tmp_path / "a.txt", split="test")
