"""Texts in CSV files and JSON lines."""

import json

import numpy as np
import pytest
import torch

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data import text
from dp_microadam.workbench.data.contents import Reading

READING = Reading("text-table")
SPAM = text.Columns(classes=("ham", "spam"))


def lengths(texts):
    return torch.tensor([[len(one)] for one in texts])


def test_csv_and_json_lines_hold_the_same_texts(tmp_path):
    rows = [
        ("a, b", "ham"),
        ('she said "no"', "spam"),
        ("two\nlines", "ham"),
        ("ünïcode ✓ 漢字", "spam"),
        ("x" * 200_000, "ham"),
    ]
    quoted = [(one.replace('"', '""'), label) for one, label in rows]
    (tmp_path / "a.csv").write_text("\ufefftext,label\n" + "".join(f'"{one}",{label}\n' for one, label in quoted), "utf-8")
    lines = [json.dumps({"text": one, "label": label, "more": 1}) for one, label in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n", "utf-8")
    found = []
    for name in ("a.csv", "a.jsonl"):
        train, test = text.read(tmp_path / name, READING, SPAM)
        assert len(test.texts) == 1
        found.append(sorted(zip(train.texts + test.texts, [*train.labels, *test.labels], strict=True)))
    assert found[0] == found[1] == sorted((one, int(label == "spam")) for one, label in rows)


def test_texts_are_divided_by_user_and_become_tokens(tmp_path):
    rows = "".join(f'{{"words": "{"w" * (n + 1)}", "y": {n % 3}, "who": {n % 7}}}\n' for n in range(70))
    (tmp_path / "all.jsonl").write_text(rows)
    options = {"text": "words", "label": "y", "classes": 3, "user_column": "who"}
    found = data.load("text-table", str(tmp_path / "all.jsonl"), encode=lengths, validation_size=2, **options)
    parts = [set(found.train_users), set(found.validation_users), set(found.test_users)]
    assert set.union(*parts) == {str(n) for n in range(7)}
    assert [len(part) for part in parts] == [4, 2, 1]
    inputs, labels = found.train
    assert found.num_classes == 3
    assert found.tokens
    numbers = inputs[:, 0] - 1
    assert torch.equal(labels, numbers % 3)
    assert (found.train_users == np.array([str(n) for n in (numbers % 7).tolist()])).all()


def test_a_part_of_the_texts_can_be_taken_and_only_it_is_encoded(tmp_path):
    for name, count in (("train", 40), ("test", 20)):
        lines = "".join(f'{{"text": "{"w" * (n + 1)}", "label": {n % 2}}}\n' for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    seen = []

    def counted(texts):
        seen.extend(texts)
        return lengths(texts)

    sizes = {"validation_size": 4, "train_size": 10, "test_size": 5}
    found = data.load("text-table", str(tmp_path), encode=counted, classes=2, **sizes)
    whole = data.load("text-table", str(tmp_path), encode=lengths, classes=2, validation_size=4)
    assert [len(part[1]) for part in (found.train, found.validation, found.test)] == [10, 4, 5]
    assert len(seen) == 19
    assert torch.equal(found.train[0], whole.train[0][:10])
    assert torch.equal(found.validation[0], whole.validation[0])
    assert torch.equal(found.train[1], (found.train[0][:, 0] - 1) % 2)
    assert len(set(found.test[0][:, 0].tolist())) == 5
    for sizes, message in (
        ({"train_size": 37, "validation_size": 4}, "train_size is 37; of 40 examples, 36 are not held out"),
        ({"test_size": 21}, "test_size is 21; there are 20 test examples"),
    ):
        with pytest.raises(InputError, match=message):
            data.load("text-table", str(tmp_path), encode=lengths, classes=2, **sizes)


def test_a_language_model_needs_no_labels(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "{"a" * n}"}}\n' for n in range(1, 11)))
    found = data.load("text-table", str(tmp_path / "t.jsonl"), encode=lengths, labelled=False)
    assert found.num_classes == 1
    with pytest.raises(InputError, match="classes is None"):
        data.load("text-table", str(tmp_path / "t.jsonl"), encode=lengths)


BAD_CSV = (
    b"text,label,who\n"
    b"fine,ham,a\n"  # 2
    b"  ,ham,a\n"  # 3
    b"secret word,eggs,a\n"  # 4
    b"caf\xe9,spam,b\n"  # 5
    b'"over\ntwo lines",spam,\n'  # 6, 7
    b"too,many,columns,here\n"  # 8
    b'"open" quote,ham,a\n'  # 9
    b"last,spam,b\n"
)
BAD_JSON = (
    b'{"text": "fine", "label": "ham", "who": "a"}\n'
    b'{"text": "", "label": "ham", "who": "a"}\n'  # 2
    b'{"text": 3, "label": "ham", "who": "a"}\n'  # 3
    b'{"text": "secret word", "label": "eggs", "who": "a"}\n'  # 4
    b'{"text": "caf\xe9", "label": "ham", "who": "a"}\n'  # 5
    b"[1]\n"  # 6
    b'{"text": "cut of'  # 7
)


@pytest.mark.parametrize(
    ("name", "content", "lines"), [("a.csv", BAD_CSV, [3, 4, 5, 6, 8, 9]), ("a.jsonl", BAD_JSON, [2, 3, 4, 5, 6, 7])]
)
def test_every_bad_line_is_listed_for_the_owner_and_none_is_told_in_training(tmp_path, name, content, lines):
    (tmp_path / name).write_bytes(content)
    columns = text.Columns(user="who", classes=("ham", "spam"))
    problems = list(text.problems(tmp_path / name, READING, columns))
    assert [int(problem.partition(", line ")[2].partition(":")[0]) for problem in problems] == lines
    for words in ("is empty", "'eggs' is not among", "not valid UTF-8"):
        assert sum(words in problem for problem in problems) == 1
    with pytest.raises(InputError, match="find them with dp-microadam data check") as refused:
        text.read(tmp_path / name, READING, columns)
    assert "eggs" not in str(refused.value)
    assert "line 3" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text,label\n", "holds no texts"),
        ("words,label\na,ham\n", "has no column 'text'"),
        ("text,text\na,ham\n", "two columns of the same name"),
        ("text,label\na,ham\n", "has no column 'who'"),
    ],
)
def test_files_without_what_is_needed_are_one_sentence(tmp_path, content, words):
    (tmp_path / "a.csv").write_text(content)
    columns = text.Columns(user="who" if "who" in words else None, classes=("ham", "spam"))
    with pytest.raises(InputError, match=words):
        text.read(tmp_path / "a.csv", READING, columns)
    assert [words in problem for problem in text.problems(tmp_path / "a.csv", READING, columns)] == [True]


def test_nobody_writes_in_both_parts(tmp_path):
    for part in ("train", "test"):
        (tmp_path / f"{part}.csv").write_text("text,label,who\na,ham,anna\nb,spam,ben\n")
    columns = text.Columns(user="who", classes=("ham", "spam"))
    with pytest.raises(InputError, match="same user in the training part and in the test part"):
        text.read(tmp_path, READING, columns)
    assert len(list(text.problems(tmp_path, READING, columns))) == 1


def test_a_user_is_one_however_a_number_is_written_and_nan_is_nobody(tmp_path):
    lines = [f'{{"text": "a", "who": {user}}}' for user in ("3", "3.0", '"3"', *range(4, 10))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    columns = text.Columns(label=None, user="who")
    users = [str(user) for part in text.read(tmp_path / "a.jsonl", READING, columns) for user in part.users]
    assert sorted(users) == ["3", "3", *map(str, range(3, 10))]
    for nobody in ("NaN", '"nan"', "null", '" "'):
        (tmp_path / "a.jsonl").write_text("\n".join([*lines, f'{{"text": "e", "who": {nobody}}}']))
        with pytest.raises(InputError, match="lines that cannot be used"):
            text.read(tmp_path / "a.jsonl", READING, columns)
