"""Texts to be classified, as they come from files and standard input."""

import io
import re
import sys
from pathlib import Path

import pytest

from dp_microadam import InputError
from dp_microadam.workbench.data.raw_texts import STANDARD_INPUT, texts_in


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", 'id,body\n1,"one, two\nlines"\n2,three\n', [("row 1", "one, two\nlines"), ("row 2", "three")]),
        ("a.jsonl", '{"body": "one"}\n\n{"body": "two", "id": 3}\n', [("row 1", "one"), ("row 2", "two")]),
        ("a.txt", "\ufeffone, two\n\n  three\n", [("line 1", "one, two"), ("line 3", "  three")]),
        ("letters", "one\n", [("line 1", "one")]),
    ],
)
def test_texts_are_a_column_of_a_table_or_the_lines_of_a_file(tmp_path, name, content, expected):
    file = tmp_path / name
    file.write_text(content, "utf-8")
    assert list(texts_in(file, "body")) == [(f"{file} {place}", text) for place, text in expected]


@pytest.mark.parametrize("stdin", [io.StringIO("one\n\ntwo"), io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\n\ntwo"))])
def test_standard_input_has_a_text_in_each_line(monkeypatch, stdin):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(texts_in(STANDARD_INPUT, "body")) == [("- line 1", "one"), ("- line 3", "two")]


def test_a_bad_byte_on_standard_input_is_named_by_its_line(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), encoding="utf-8"))
    with pytest.raises(InputError, match="line 2: the text is not valid UTF-8"):
        list(texts_in(STANDARD_INPUT, "body"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", b"id,text\n1,one\n", "has no column 'body'"),
        ("a.csv", b"id,body\n1,\n", "line 2: the text is empty"),
        ("a.csv", b"id,body\n1,one,two\n", "line 2: there are 3 columns"),
        ("a.jsonl", b'{"body": 3}\n', "line 1: column 'body' holds no text"),
        ("a.txt", b"one\n\xff\xfe\n", "line 2: the text is not valid UTF-8"),
    ],
)
def test_what_is_no_text_is_refused_with_file_and_line(tmp_path, name, content, sentence):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(sentence)) as refused:
        list(texts_in(file, "body"))
    assert str(file) in str(refused.value)
    with pytest.raises(InputError, match="cannot be read"):
        list(texts_in(Path(tmp_path, "missing.txt"), "body"))
