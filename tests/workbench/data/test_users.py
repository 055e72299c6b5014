"""Whose each example is: in tables and image folders, and that no split goes through a user."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data.dataset import split
from dp_microadam.workbench.data.users import split_by_user

IDS = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40).filter(lambda ids: len(set(ids)) > 1)


@examples(60)
@given(IDS, st.integers(1, 7), st.integers(0, 5))
def test_no_split_goes_through_a_user_and_none_loses_an_example(ids, size, seed):
    users = np.array(ids)
    count = len(set(ids))
    size = min(size, count - 1)
    rest, held_out = split_by_user(users, 0.1, seed, size=size)
    assert sorted([*rest.tolist(), *held_out.tolist()]) == list(range(len(ids)))
    assert set(users[rest.numpy()]).isdisjoint(users[held_out.numpy()])
    assert len(set(users[held_out.numpy()])) == size


@examples(20)
@given(st.integers(2, 40), st.integers(0, 5))
def test_users_with_one_example_each_are_divided_like_examples(count, seed):
    users = np.array([f"{(7 * n) % 41:02d}" for n in range(count)])  # all different, not in the order of their names
    for of_users, of_examples in zip(split_by_user(users, 0.3, seed), split(count, 0.3, seed), strict=True):
        assert of_users.tolist() == of_examples.tolist()


@examples(20)
@given(IDS, st.data())
def test_which_users_are_held_out_does_not_depend_on_how_much_they_have(ids, draw):
    more = ids + draw.draw(st.lists(st.sampled_from(sorted(set(ids))), max_size=20))
    held_out = [set(np.array(each)[split_by_user(np.array(each), 0.5, 3)[1].numpy()]) for each in (ids, more)]
    assert held_out[0] == held_out[1]


def test_a_part_without_users_is_refused_by_the_number_of_users():
    with pytest.raises(InputError, match="of 2 users it must leave at least one in each part"):
        split_by_user(np.array(["a", "a", "b", "a"]), 0.1, 0, size=2)


ROWS = [(f"p{n % 13}", n, ("ill", "well")[n % 2]) for n in range(60)]
"""Users of different sizes, whose rows do not lie together."""


def csv(rows=ROWS, header="patient,age,outcome"):
    return header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)


def load_table(place, **options):
    return data.load("table", str(place), label="outcome", classes=["ill", "well"], user_column="patient", **options)


@pytest.fixture(params=["csv", "npz"])
def table(request, tmp_path):
    """One file of 13 users, as text or arrays."""
    place = tmp_path / f"all.{request.param}"
    if request.param == "csv":
        place.write_text(csv())
    else:
        users, ages, outcomes = zip(*ROWS, strict=True)
        numbers = np.array([int(user[1:]) for user in users])
        np.savez(place, inputs=np.array(ages, np.float32)[:, None], outcome=outcomes, patient=numbers)
    return place


def test_a_tables_users_are_no_input_and_each_is_in_one_part(table):
    loaded = load_table(table, validation_fraction=0.3)
    assert loaded.example_shape == (1,)
    parts = {}
    for part in ("train", "validation", "test"):
        (inputs, _), users = getattr(loaded, part), getattr(loaded, f"{part}_users")
        assert [int(age) % 13 for age in inputs[:, 0]] == [int(user.removeprefix("p")) for user in users]
        parts[part] = set(users)
    assert [len(users) for users in parts.values()] == [7, 3, 3]  # of 13: a fifth, then 0.3 of the rest
    assert len(set.union(*parts.values())) == 13


def test_a_test_file_may_lack_the_column_of_users(tmp_path):
    (tmp_path / "train.csv").write_text(csv())
    (tmp_path / "test.csv").write_text(csv([row[1:] for row in ROWS], "age,outcome"))
    loaded = load_table(tmp_path)
    assert (len(set(loaded.train_users)), loaded.test_users) == (12, None)


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (csv(), csv(), "examples of the same user in the training part and in the test part"),
        (csv(header="person,age,outcome"), None, "must have one column 'patient' and others; data_options.user_column"),
        (csv(header="patient,patient,outcome"), None, "the same name for columns 1 and 2"),
        (csv([*ROWS, ("", 3, "ill")]), None, "in column 'patient' that names no user; .*dp-microadam data check RECIPE"),
        (csv([*ROWS, (" ", 3, "ill")]), None, "names no user"),
        (csv([*ROWS, ("NaN", 3, "ill")]), None, "names no user"),
        (csv([*ROWS, ("p1", "old", "ill")]), None, "a cell in column 'age' that is not a finite number"),
    ],
)
def test_users_of_a_table_that_cannot_be_used_are_one_sentence(tmp_path, train, test, message):
    (tmp_path / "train.csv").write_text(train)
    (tmp_path / "test.csv").write_text(csv([("q", 1, "ill")]) if test is None else test)
    with pytest.raises(InputError, match=message) as refusal:
        load_table(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("column", ["outcome", "", 3])
def test_a_column_of_users_that_is_none_is_refused(tmp_path, column):
    (tmp_path / "all.csv").write_text(csv())
    with pytest.raises(InputError, match=r"data_options\.user_column is"):
        data.load("table", str(tmp_path / "all.csv"), label="outcome", classes=["ill", "well"], user_column=column)


@pytest.mark.parametrize("users", [np.arange(59), np.ones((60, 2)), np.ones(60, bool), np.full(60, np.nan)])
def test_users_of_an_npz_file_that_cannot_be_used_are_one_sentence(tmp_path, users):
    np.savez(tmp_path / "all.npz", inputs=np.ones((60, 2), np.float32), outcome=["ill"] * 60, patient=users)
    with pytest.raises(InputError, match=r"one name or number per label|names no user"):
        load_table(tmp_path / "all.npz")


def test_an_npz_file_without_users_is_refused(tmp_path):
    np.savez(tmp_path / "all.npz", inputs=np.ones((60, 2), np.float32), outcome=["ill"] * 60)
    with pytest.raises(InputError, match=r"must hold 3 arrays: .* the users, called 'patient' \(data_options.user_column\)"):
        load_table(tmp_path / "all.npz")


@pytest.fixture
def folder(tmp_path):
    """Images of nine patients, each in both classes; another two in the test part."""
    for part, patients in (("train", range(9)), ("val", (20, 21))):
        for name in ("ant", "bee"):
            (tmp_path / part / name).mkdir(parents=True)
            for patient in patients:
                for number in range(patient % 3 + 1):
                    Image.new("RGB", (4, 4)).save(tmp_path / part / name / f"p{patient}_{number}.png")
    return tmp_path


def files(folder):
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.png"))]


def patient(file):
    return file.rpartition("/")[2].partition("_")[0]


def table_of(folder, rows):
    (folder / "users.csv").write_text("user,file\n" + "".join(f"{user},{file}\n" for file, user in rows))


@pytest.mark.parametrize("options", [{"user_table": "users.csv"}, {"user_pattern": r"(p\d+)_\d+\.png"}])
def test_images_have_the_users_of_their_table_or_names_and_each_is_in_one_part(folder, options):
    table_of(folder, [(file, patient(file)) for file in files(folder)])
    loaded = data.load("image-folder", str(folder), image_size=4, validation_size=3, **options)
    parts = []
    for part, users in (
        (loaded.train, loaded.train_users),
        (loaded.validation, loaded.validation_users),
        (loaded.test, loaded.test_users),
    ):
        assert [patient(part.path(index).name) for index in range(len(part))] == users.tolist()
        parts.append(set(users))
    assert [len(users) for users in parts] == [6, 3, 2]
    assert len(set.union(*parts)) == 11


def test_a_table_of_users_may_leave_out_the_test_part(folder):
    table_of(folder, [(file, patient(file)) for file in files(folder) if file.startswith("train")])
    assert data.load("image-folder", str(folder), image_size=4, user_table="users.csv").test_users is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user_table": "users.csv", "user_pattern": "(.*)"}, "it must have one of them"),
        ({"user_table": "nobody.csv"}, "nobody.csv cannot be read: No such file"),
        ({"user_table": 3}, "data_options.user_table is 3; it must be a string"),
        ({"user_pattern": ""}, "data_options.user_pattern is ''; it must be a string"),
        ({"user_pattern": "(p"}, "it must be a regular expression"),
        ({"user_pattern": "p.*"}, "with 0 groups; it must have one group"),
        ({"user_pattern": "(p)(.*)"}, "with 2 groups; it must have one group"),
        ({"user_pattern": r"(p\d)_.*"}, "val has images without a user by user_pattern|same user"),
        ({"user_pattern": r"(p\d+)"}, "train has images without a user by user_pattern"),
        ({"user_pattern": r"p\d+_(\d)\.png"}, "examples of the same user in the training part and in the test part"),
        ({"user_table": "partly.csv"}, "train has images without a user by .*partly.csv; .* data check RECIPE"),
        ({"user_table": "twice.csv"}, "twice.csv has lines that cannot be used; find them with dp-microadam data check RECIPE"),
        ({"user_table": "names.csv"}, "must have one column 'file' and one column 'user'"),
        ({"user_table": "bytes.csv"}, "is not a CSV file in UTF-8"),
    ],
)
def test_users_of_images_that_cannot_be_used_are_one_sentence_that_names_no_image(folder, options, message):
    table_of(folder, [(file, patient(file)) for file in files(folder)])
    text = (folder / "users.csv").read_text()
    (folder / "partly.csv").write_text(text.replace("p3,train/bee/p3_0.png\n", ""))
    (folder / "twice.csv").write_text(text + "p4,train/bee/p3_0.png\n")
    (folder / "names.csv").write_text(text.replace("user,file", "patient,file"))
    (folder / "bytes.csv").write_bytes(b"\xff" + text.encode())
    if "p\\d)_" in options.get("user_pattern", ""):  # one more that the pattern knows, so that the others are missing
        Image.new("RGB", (4, 4)).save(folder / "val" / "ant" / "p9_0.png")
    with pytest.raises(InputError, match=message) as refusal:
        data.load("image-folder", str(folder), image_size=4, **options)
    assert "\n" not in str(refusal.value)
    assert "_0.png" not in str(refusal.value)
