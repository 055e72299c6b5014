"""Tables and texts: what files hold, whose each example is, and that nothing of their values is told."""

import io
import json
import os
import random
import re
import sys
from pathlib import Path

import pytest
import torch

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.command_line.cli import main
from dp_microadam.workbench.data.catalogue import known
from dp_microadam.workbench.data.raw import STANDARD_INPUT, RawRows, texts_in
from dp_microadam.workbench.data.sources import check
from dp_microadam.workbench.recipes import load_recipe
from dp_microadam.workbench.recipes.assemble import load_data

CSV = "age,outcome,height\n" + "".join(f"{20 + n},{('ill', 'well')[n % 2]},{1.5 + n / 100}\n" for n in range(20))
PARTS = ("train", "validation", "test")


def load(place, **options):
    return data.load("table", str(place), **{"label": "outcome", "classes": ["ill", "well"], **options})


def write(folder, train=CSV, test=CSV):
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text(test)
    return folder


def test_a_table_is_read_by_the_names_of_its_columns_with_its_classes_in_the_order_given(tmp_path):
    turned = "height,outcome,age\n" + "".join(",".join(line.split(",")[::-1]) + "\n" for line in CSV.splitlines()[1:])
    loaded = load(write(tmp_path, test=turned), validation_fraction=0.25)
    assert (loaded.num_classes, loaded.example_shape, loaded.mean, loaded.std) == (2, (2,), (), ())
    assert [len(part[1]) for part in (loaded.train, loaded.validation, loaded.test)] == [15, 5, 20]
    inputs, labels = loaded.test
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(inputs, torch.tensor([[20.0 + n, 1.5 + n / 100] for n in range(20)]))
    assert labels.tolist() == [0, 1] * 10
    assert load(tmp_path, classes=["well", "ill"]).test[1].tolist() == [1, 0] * 10
    ((_, row),) = RawRows(columns=loaded.raw.columns).read(_one_row(tmp_path))
    assert row.tolist() == [[33.0, 2.0]]


def _one_row(folder):
    (folder / "new.csv").write_text("more,height,age\n7,2,33\n")
    return folder / "new.csv"


def test_classes_may_be_a_number_and_quotes_and_a_byte_order_mark_are_understood(tmp_path):
    text = '\ufeff"x","out,come"\n' + "".join(f'"{n}",{n % 3}\n' for n in range(30))
    (tmp_path / "all.csv").write_text(text, encoding="utf-8")
    loaded = data.load("table", str(tmp_path / "all.csv"), label="out,come", classes=3)
    assert [len(getattr(loaded, part)[1]) for part in PARTS] == [22, 2, 6]  # a fifth is the test part
    for part in PARTS:
        inputs, labels = getattr(loaded, part)
        assert torch.equal(inputs[:, 0] % 3, labels.float())


def test_constants_and_classes_are_public_and_must_be_given(tmp_path):
    loaded = load(write(tmp_path), mean=[30, 1.6], std=[5, 0.1])
    assert (loaded.mean, loaded.std) == ((30.0, 1.6), (5.0, 0.1))
    for wrong in ({"mean": [1.0]}, {"std": [1.0, 0.0]}, {"mean": ["a", "b"]}, {"std": 3}):
        with pytest.raises(InputError, match=f"data_options.{next(iter(wrong))} "):
            load(tmp_path, **wrong)
    for classes in (None, 1, 0, "ill", ["ill"], ["ill", "ill"], [0, 1], True):
        with pytest.raises(InputError, match=r"data_options.classes is .*; it must be"):
            load(tmp_path, classes=classes)


SECRET = "4711"
WRONG_TABLES = [
    ("", "no column 'outcome'; data_options.label must name one of its columns"),
    ("a,b\n1,2\n", "no column 'outcome'"),
    ("outcome\nill\n", "no columns besides 'outcome'"),
    ("a,outcome\n", "holds no examples"),
    (f"a,outcome\n1,{SECRET}\n", "an invalid label; by data_options.classes it must be one of ill, well"),
    (f"a,outcome\nx{SECRET},ill\n", "a cell in column 'a' that is not a finite number"),
    (f"a,outcome\n1,ill\n{SECRET}\n", "a row that does not have 2 cells"),
    ("a,outcome\nnan,ill\n", "a cell in column 'a' that is not a finite number"),
    ("a,outcome\n,ill\n", "a cell in column 'a' that is empty"),
    ("a,a,outcome\n1,2,ill\n", "the same name for columns 1 and 2"),
    (f"1,{SECRET},{SECRET},ill\n2,3,4,well\n", "the same name for columns 2 and 3; the first line must"),
    (f"{SECRET},ill\n2,well\n", "no column 'outcome'"),
    ("a;outcome\n1;ill\n", "separated by semicolons or tabs; they must be separated by commas"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TABLES)
def test_a_wrong_table_is_refused_by_name_without_telling_its_values(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as refusal:
        load(write(tmp_path, train=text, test="a,outcome\n1,ill\n"))
    assert "train.csv" in str(refusal.value)
    assert SECRET not in str(refusal.value).replace(str(tmp_path), "")
    assert "\n" not in str(refusal.value)


def test_places_that_are_no_table_are_refused(tmp_path):
    with pytest.raises(InputError, match="data_folder is not given"):
        data.load("table", classes=2)
    with pytest.raises(InputError, match=r"must hold train.csv and test.csv; or name a single file"):
        load(tmp_path)
    (tmp_path / "all.txt").write_text(CSV)
    with pytest.raises(InputError, match=r"must be a .csv file"):
        load(tmp_path / "all.txt")
    with pytest.raises(InputError, match=r"test.csv has a column 'a' that is not declared"):
        load(write(tmp_path, test="a,outcome\n1,ill\n"))
    with pytest.raises(InputError, match="data set table does not take colour; it takes"):
        load(tmp_path, colour=1)


ROWS = [(f"p{n % 13}", n, ("ill", "well")[n % 2]) for n in range(60)]
"""Users of different sizes, whose rows do not lie together."""


def csv(rows=ROWS, header="patient,age,outcome"):
    return header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


def test_a_tables_users_are_no_input_and_each_is_in_one_part(tmp_path):
    place = tmp_path / "all.csv"
    place.write_text(csv())
    loaded = load(place, user_column="patient", validation_fraction=0.3)
    assert loaded.example_shape == (1,)
    found = []
    for part in PARTS:
        (inputs, _), users = getattr(loaded, part), getattr(loaded, f"{part}_users")
        assert [int(age) % 13 for age in inputs[:, 0]] == [int(user.removeprefix("p")) for user in users]
        found.append(set(users))
    assert [len(users) for users in found] == [7, 3, 3]  # of 13: a fifth, then 0.3 of the rest
    assert len(set.union(*found)) == 13


def test_a_test_file_may_lack_the_column_of_users(tmp_path):
    loaded = load(write(tmp_path, csv(), csv([row[1:] for row in ROWS], "age,outcome")), user_column="patient")
    assert (len(set(loaded.train_users)), loaded.test_users) == (12, None)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (csv(), csv(), "examples of the same user in the training part and in the test part"),
        (csv(header="person,age,outcome"), None, "no column 'patient'; data_options.user_column"),
        (csv(header="patient,patient,outcome"), None, "the same name for columns 1 and 2"),
        (csv([*ROWS, ("", 3, "ill")]), None, "in column 'patient' that names no user; .*dp-microadam data check RECIPE"),
        (csv([*ROWS, (" ", 3, "ill")]), None, "names no user"),
        (csv([*ROWS, ("NaN", 3, "ill")]), None, "names no user"),
    ],
)
def test_users_of_a_table_that_cannot_be_used_are_one_sentence(tmp_path, train, test, message):
    with pytest.raises(InputError, match=message) as refusal:
        load(write(tmp_path, train, csv([("q", 1, "ill")]) if test is None else test), user_column="patient")
    assert "\n" not in str(refusal.value)
    for column in ("outcome", "", 3):
        with pytest.raises(InputError, match=r"data_options\.(label|user_column) is"):
            load(tmp_path, user_column=column)


def person(draw, columns):
    """A line as in adult.data. Who learned long or had gains has a high income."""
    education = ("Preschool", "1st-4th", "5th-6th", "9th", "10th", "12th", "HS-grad", "Some-college", "Assoc-voc", "Bachelors")
    cells = {}
    for name in known("adult").header[:-1]:
        declared = columns[name]
        if declared["kind"] == "category":
            cells[name] = "?" if "missing" in declared and draw.random() < 0.05 else draw.choice(declared["values"])
    cells["age"], cells["education-num"] = draw.randint(17, 90), draw.randint(1, 10)
    cells["education"], cells["fnlwgt"] = education[cells["education-num"] - 1], draw.randint(12_285, 1_484_705)
    cells["capital-gain"], cells["capital-loss"] = draw.choice([0] * 9 + [99_999]), draw.choice([0] * 20 + [1902])
    cells["hours-per-week"] = draw.randint(1, 99)
    earns = cells["education-num"] > 6 or cells["capital-gain"] > 0
    return ", ".join(str(cells[name]) for name in known("adult").header[:-1]) + (", >50K" if earns else ", <=50K")


@pytest.fixture
def adult(tmp_path):
    """adult.data and adult.test with their quirks: no header, spaces, ?, a remark, full stops, an empty last line."""
    draw, columns = random.Random(0), load_recipe("adult").columns
    people = [person(draw, columns) for _ in range(1500)]
    (tmp_path / "adult.data").write_text("\n".join(people[:1000]) + "\n\n")
    (tmp_path / "adult.test").write_text("|1x3 Cross validator\n" + "".join(f"{line}.\n" for line in people[1000:]) + "\n")
    return tmp_path


def test_one_command_trains_on_adult_as_it_comes_and_predicts_rows_like_it(adult, capsys):
    assert main(["train", "adult", "--set", f"data_folder={adult}"]) == 2
    assert "is not the published adult.data of adult" in capsys.readouterr().err
    settings = [f"data_folder={adult}", "verify_data=false", "epsilon=100", "batch_size=500", "steps=60"]
    settings += ["learning_rate=0.02", "method=dp-adam"]
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", "adult", *overrides, "--quiet", "--json", "--run-dir", str(adult / "run")]) == 0
    assert json.loads(capsys.readouterr().out)["test_accuracy"] > 0.75  # where naming one class gets at most 0.6
    assert "kinds, ranges and values of the columns" in (adult / "run" / "privacy.txt").read_text()
    # Deployed without the training files: rows of text, encoded by the declaration that the export carries.
    assert main(["export", str(adult / "run"), "--output", str(adult / "model")]) == 0
    rows = (adult / "adult.test").read_text().splitlines()[1:21]
    (adult / "new.csv").write_text("\n".join(rows))
    (adult / "adult.data").unlink()
    capsys.readouterr()
    assert main(["predict", str(adult / "model"), str(adult / "new.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(line["class"] == row.rpartition(", ")[2].rstrip(".") for line, row in zip(found, rows, strict=True)) >= 12


REAL = os.environ.get("DP_MICROADAM_DATA", "")


@pytest.mark.skipif(not os.path.isdir(f"{REAL}/adult"), reason="the real Adult data are not in $DP_MICROADAM_DATA/adult")
def test_the_recipe_declares_all_values_of_the_real_files(capsys):
    loaded = load_data(load_recipe("adult"))
    assert [len(getattr(loaded, part)[1]) for part in PARTS] == [29_305, 3_256, 16_281]
    assert loaded.example_shape == (91,)
    assert main(["data", "check", "adult", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["problems"]) == ("verified", [])


def lengths(texts):
    return torch.tensor([[len(one)] for one in texts])


def load_texts(place, **options):
    return data.load("text-table", str(place), **{"encode": lengths, "classes": ["ham", "spam"], **options})


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
    for name in ("a.csv", "a.jsonl"):
        seen = []
        loaded = load_texts(
            tmp_path / name, encode=lambda texts, seen=seen: seen.extend(texts) or lengths(texts), validation_size=1
        )
        labels = [int(label) for part in PARTS for label in getattr(loaded, part)[1]]
        assert sorted(zip(seen, labels, strict=True)) == sorted((one, int(label == "spam")) for one, label in rows)


def test_a_part_of_the_examples_can_be_taken_and_only_it_is_encoded(tmp_path):
    for name, count in (("train", 40), ("test", 20)):
        lines = "".join(f'{{"text": "{"w" * (n + 1)}", "label": {n % 2}}}\n' for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    seen = []
    sizes = {"validation_size": 4, "train_size": 10, "test_size": 5}
    found = load_texts(tmp_path, encode=lambda texts: seen.extend(texts) or lengths(texts), classes=2, **sizes)
    whole = load_texts(tmp_path, classes=2, validation_size=4)
    assert ([len(getattr(found, part)[1]) for part in PARTS], len(seen)) == ([10, 4, 5], 19)
    assert torch.equal(found.train[0], whole.train[0][:10])
    assert torch.equal(found.validation[0], whole.validation[0])
    assert len(set(found.test[0][:, 0].tolist())) == 5
    for sizes, message in (
        ({"train_size": 37, "validation_size": 4}, "train_size is 37; of 40 examples, 36 are not held out"),
        ({"test_size": 21}, "test_size is 21; there are 20 test examples"),
    ):
        with pytest.raises(InputError, match=message):
            load_texts(tmp_path, classes=2, **sizes)


BAD_CSV = (
    b"text,label,who\nfine,ham,a\n"
    b"  ,ham,a\n"  # 3
    b"secret word,eggs,a\n"  # 4
    b"caf\xe9,spam,b\n"  # 5
    b'"over\ntwo lines",spam,\n'  # 6, 7
    b"too,many,columns,here\n"  # 8
    b'"open" quote,ham,a\nlast,spam,b\n'  # 9
)
BAD_JSON = (
    b'{"text": "fine", "label": "ham", "who": "a"}\n{"text": "", "label": "ham", "who": "a"}\n'  # 2
    b'{"text": 3, "label": "ham", "who": "a"}\n'  # 3
    b'{"text": "secret word", "label": "eggs", "who": "a"}\n'  # 4
    b'{"text": "caf\xe9", "label": "ham", "who": "a"}\n'  # 5
    b'[1]\n{"text": "a", "label": "ham", "who": NaN}\n{"text": "cut of'  # 6, 7, 8
)


@pytest.mark.parametrize(
    ("name", "content", "lines"), [("a.csv", BAD_CSV, [3, 4, 5, 6, 8, 9]), ("a.jsonl", BAD_JSON, [2, 3, 4, 5, 6, 7, 8])]
)
def test_every_bad_line_is_listed_for_the_owner_and_none_is_told_in_training(tmp_path, name, content, lines):
    (tmp_path / name).write_bytes(content)
    options = {"user_column": "who", "classes": ["ham", "spam"]}
    problems = check("text-table", str(tmp_path / name), **options).problems
    assert sorted(int(line) for problem in problems for line in re.findall(r"line (\d+)", problem)) == lines
    for words in ("is empty", "is an invalid label", "not valid UTF-8", "names no user"):
        assert sum(words in problem for problem in problems) == 1
    with pytest.raises(InputError, match=r"\(dp-microadam data check RECIPE says where\)") as refused:
        load_texts(tmp_path / name, **options)
    assert not re.search(r"eggs|line \d", str(refused.value))


def test_a_user_is_one_however_a_number_is_written(tmp_path):
    lines = [f'{{"text": "a", "who": {user}}}' for user in ("3", "3.0", '"3"', '" 3"', *range(4, 10))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = load_texts(tmp_path / "a.jsonl", labelled=False, user_column="who")
    users = [str(user) for part in PARTS for user in getattr(found, f"{part}_users")]
    assert sorted(users) == ["3"] * 4 + [str(number) for number in range(4, 10)]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", 'id,body\n1,"one, two\nlines"\n2,three\n', [("row 1", "one, two\nlines"), ("row 2", "three")]),
        ("a.jsonl", '{"body": "one"}\n\n{"body": "two", "id": 3}\n', [("row 1", "one"), ("row 2", "two")]),
        ("a.txt", "\ufeffone, two\n\n  three\n", [("line 1", "one, two"), ("line 3", "  three")]),
        ("letters", "one\n", [("line 1", "one")]),
    ],
)
def test_texts_to_classify_are_a_column_of_a_table_or_the_lines_of_a_file(tmp_path, name, content, expected):
    file = tmp_path / name
    file.write_text(content, "utf-8")
    assert list(texts_in(file, "body")) == [(f"{file} {place}", text) for place, text in expected]


@pytest.mark.parametrize("stdin", [io.StringIO("one\n\ntwo"), io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\n\ntwo"))])
def test_standard_input_has_a_text_in_each_line(monkeypatch, stdin):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert list(texts_in(STANDARD_INPUT, "body")) == [("- line 1", "one"), ("- line 3", "two")]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.csv", b"id,text\n1,one\n", "has no column 'body'"),
        ("a.csv", b"id,body\n1,\n", "line 2: the row is empty"),
        ("a.csv", b"id,body\n1,one,two\n", "line 2: the row does not have 2 cells"),
        ("a.jsonl", b'{"body": 3}\n', "line 1: the row is no text"),
        ("a.txt", b"one\n\xff\xfe\n", "line 2: the row is not valid UTF-8"),
    ],
)
def test_what_is_no_text_is_refused_with_file_and_line(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=re.escape(sentence)) as refused:
        list(texts_in(tmp_path / name, "body"))
    assert str(tmp_path / name) in str(refused.value)
    with pytest.raises(InputError, match="cannot be read"):
        list(texts_in(Path(tmp_path, "missing.txt"), "body"))
