"""Tables: CSV and npz, what they hold, and that nothing of their values is told."""

import numpy as np
import pytest
import torch

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data.arrays import MappedRows

CSV = "age,outcome,height\n" + "".join(f"{20 + n},{('ill', 'well')[n % 2]},{1.5 + n / 100}\n" for n in range(20))


def load(place, **options):
    return data.load("table", str(place), **{"label": "outcome", "classes": ["ill", "well"], **options})


def write(folder, train=CSV, test=CSV):
    (folder / "train.csv").write_text(train)
    (folder / "test.csv").write_text(test)
    return folder


def test_a_table_is_read_with_its_classes_in_the_order_given(tmp_path):
    loaded = load(write(tmp_path), validation_fraction=0.25)
    assert (loaded.num_classes, loaded.example_shape, loaded.mean, loaded.std) == (2, (2,), (), ())
    assert [len(part[1]) for part in (loaded.train, loaded.validation, loaded.test)] == [15, 5, 20]
    inputs, labels = loaded.test
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(inputs, torch.tensor([[20.0 + n, 1.5 + n / 100] for n in range(20)]))
    assert labels.tolist() == [0, 1] * 10
    assert load(tmp_path, classes=["well", "ill"]).test[1].tolist() == [1, 0] * 10


def test_classes_may_be_a_number_and_labels_whole_numbers(tmp_path):
    (tmp_path / "all.csv").write_text("x,label\n" + "".join(f"{n},{n % 3}\n" for n in range(30)))
    loaded = data.load("table", str(tmp_path / "all.csv"), classes=3)
    assert [len(part[1]) for part in (loaded.train, loaded.validation, loaded.test)] == [22, 2, 6]  # a fifth is the test part
    for inputs, labels in (loaded.train, loaded.validation, loaded.test):
        assert torch.equal(inputs[:, 0] % 3, labels.float())


def test_quotes_and_a_byte_order_mark_are_understood(tmp_path):
    text = '\ufeff"x","out,come"\n"1","a"\n2,b\n3,"a"\n4,b\n5,a\n'
    (tmp_path / "all.csv").write_text(text, encoding="utf-8")
    loaded = data.load("table", str(tmp_path / "all.csv"), label="out,come", classes=["a", "b"], validation_fraction=0.5)
    found = sorted(
        (float(x), int(y)) for part in (loaded.train, loaded.validation, loaded.test) for x, y in zip(*part, strict=True)
    )
    assert found == [(1.0, 0), (2.0, 1), (3.0, 0), (4.0, 1), (5.0, 0)]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16])
def test_an_npz_file_gives_what_was_saved(tmp_path, compressed, kind):
    save = np.savez_compressed if compressed else np.savez
    inputs = np.arange(60).reshape(20, 3).astype(kind)
    for part in ("train", "test"):
        save(tmp_path / f"{part}.npz", features=inputs, label=np.arange(20) % 4)
    loaded = data.load("table", str(tmp_path), classes=4)
    np.testing.assert_array_equal(loaded.test[0].numpy(), inputs.astype(np.float32))
    assert loaded.test[1].tolist() == [n % 4 for n in range(20)]


def test_images_in_an_npz_file_are_images(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (10, 3, 8, 8), dtype=np.uint8)
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", images=images, label=np.arange(10) % 2)
    loaded = data.load("table", str(tmp_path), classes=2, mean=[0.5] * 3, std=[0.25] * 3)
    assert loaded.images
    np.testing.assert_array_equal(loaded.test[0].numpy(), images)


def test_an_npz_file_above_the_limit_is_mapped_where_it_lies_and_gives_the_same(tmp_path):
    inputs = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}.npz", features=inputs, label=np.arange(50) % 2)
    read = data.load("table", str(tmp_path), classes=2)
    mapped = data.load("table", str(tmp_path), classes=2, memory_gib=1000 / 2**30)
    assert isinstance(mapped.train, MappedRows)
    for there, here in ((mapped.train, read.train), (mapped.validation, read.validation), (mapped.test, read.test)):
        assert [there[i][1].item() for i in range(len(there))] == here[1].tolist()
        assert torch.equal(torch.stack([there[i][0] for i in range(len(there))]), here[0])


def test_what_cannot_be_mapped_above_the_limit_is_refused_with_what_to_do(tmp_path):
    write(tmp_path)
    with pytest.raises(InputError, match="text cannot be memory-mapped; save it as npz"):
        load(tmp_path, memory_gib=10 / 2**30)
    np.savez_compressed(tmp_path / "all.npz", x=np.zeros((50, 7), np.float32), label=np.zeros(50))
    with pytest.raises(InputError, match="unpack it, or raise data_memory_gib"):
        data.load("table", str(tmp_path / "all.npz"), classes=2, memory_gib=1000 / 2**30)


def test_constants_to_normalize_by_are_given_never_computed(tmp_path):
    loaded = load(write(tmp_path), mean=[30, 1.6], std=[5, 0.1])
    assert (loaded.mean, loaded.std) == ((30.0, 1.6), (5.0, 0.1))
    for wrong in ({"mean": [1.0]}, {"std": [1.0, 0.0]}, {"mean": ["a", "b"]}, {"std": 3}):
        with pytest.raises(InputError, match=f"data_options.{next(iter(wrong))} "):
            load(tmp_path, **wrong)


@pytest.mark.parametrize("classes", [None, 1, 0, "ill", ["ill"], ["ill", "ill"], [0, 1], True])
def test_the_classes_are_public_and_must_be_given(tmp_path, classes):
    with pytest.raises(InputError, match=r"data_options.classes is .*; it must be"):
        load(write(tmp_path), classes=classes)


SECRET = "4711"
WRONG_TABLES = [
    ("", "one column 'outcome' and others"),
    ("a,b\n1,2\n", "one column 'outcome' and others"),
    ("outcome\nill\n", "one column 'outcome' and others"),
    ("a,outcome\n", "holds no examples"),
    (f"a,outcome\n1,{SECRET}\n", "a label that is not among classes"),
    (f"a,outcome\nx{SECRET},ill\n", "a cell in column 'a' that is not a finite number"),
    (f"a,outcome\n1,ill\n{SECRET}\n", "a row that does not have 2 cells"),
    ("a,outcome\nnan,ill\n", "a cell in column 'a' that is not a finite number"),
    ("a,outcome\n,ill\n", "a cell in column 'a' that is empty"),
    ("a,outcome\ninf,ill\n", "a cell in column 'a' that is not a finite number"),
    ("a,a,outcome\n1,2,ill\n", "the same name for columns 1 and 2"),
    (f"1,{SECRET},{SECRET},ill\n2,3,4,well\n", "the same name for columns 2 and 3; the first line must"),
    (f"{SECRET},ill\n2,well\n", "one column 'outcome' and others"),
    ("a;outcome\n1;ill\n", "separated by semicolons or tabs; they must be separated by commas"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_TABLES)
def test_a_wrong_table_is_refused_by_name_without_telling_its_values(tmp_path, text, message):
    with pytest.raises(InputError, match=message) as refusal:
        load(write(tmp_path, train=text))
    assert "train.csv" in str(refusal.value)
    assert SECRET not in str(refusal.value).replace(str(tmp_path), "")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("label", [4711, -1, 0.5])
def test_a_label_outside_the_number_of_classes_is_refused_without_telling_it(tmp_path, label):
    np.savez(tmp_path / "all.npz", x=np.zeros((20, 2)), label=np.full(20, label))
    with pytest.raises(InputError, match="with classes = 3 labels must be 0 to 2") as refusal:
        data.load("table", str(tmp_path / "all.npz"), classes=3)
    assert "4711" not in str(refusal.value)


@pytest.mark.parametrize(
    "arrays",
    [
        {"label": np.zeros(5)},
        {"x": np.zeros((5, 2)), "label": np.zeros(4)},
        {"x": np.zeros(5), "label": np.zeros(5)},
        {"x": np.zeros((5, 2)), "y": np.zeros((5, 2)), "label": np.zeros(5)},
        {"x": np.array([["a", "b"]] * 5), "label": np.zeros(5)},
        {"x": np.zeros((5, 3, 8, 8)), "label": np.zeros(5)},
        {"x": np.array([[object()]] * 5), "label": np.zeros(5)},
    ],
)
def test_a_wrong_npz_file_is_refused_by_name(tmp_path, arrays):
    np.savez(tmp_path / "all.npz", allow_pickle=True, **arrays)
    with pytest.raises(InputError, match=r"all.npz (must|holds|is not)"):
        data.load("table", str(tmp_path / "all.npz"), classes=2)


def test_a_damaged_npz_file_is_refused_by_name(tmp_path):
    path = tmp_path / "all.npz"
    np.savez(path, x=np.zeros((50, 7)), label=np.zeros(50))
    whole = path.read_bytes()
    for content in (whole[:-100], whole[:200], b"", b"text", whole[:300] + b"\xff" * 50 + whole[350:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"all.npz"):
            data.load("table", str(path), classes=2)


def test_places_that_are_no_table_are_refused(tmp_path):
    with pytest.raises(InputError, match="data_folder is not given"):
        data.load("table", classes=2)
    with pytest.raises(InputError, match=r"must hold train.csv and test.csv"):
        load(tmp_path)
    (tmp_path / "all.txt").write_text(CSV)
    with pytest.raises(InputError, match=r"must be a .csv or .npz file"):
        load(tmp_path / "all.txt")
    with pytest.raises(InputError, match="training and test data of different shapes"):
        load(write(tmp_path, test="a,outcome\n1,ill\n"))
    with pytest.raises(InputError, match="data set table does not take colour; it takes"):
        load(tmp_path, colour=1)
