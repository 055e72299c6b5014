"""Examples that are said to be held out are."""

from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from dp_microadam.errors import InputError
from dp_microadam.training.held_out import refuse_shared_users, share_examples
from dp_microadam.workbench.data.arrays import Arrays, MappedRows
from dp_microadam.workbench.data.images import ImageFolder


class Keeping(Dataset):
    """Keeps what it is given; has as many examples as the first of it has entries, unless told."""

    def __init__(self, count=None, **attributes):
        self.__dict__.update(attributes)
        self.count = len(next(iter(attributes.values()))) if count is None else count

    def __len__(self):
        return self.count


@dataclass
class Record:
    file: str
    label: int


class Label(Enum):
    CAT = 0
    DOG = 1


X, Y = torch.zeros(10, 3), torch.zeros(10)
DATA = TensorDataset(X, Y)
ARRAY = np.zeros((10, 3))
RECORDS = [{"text": f"sentence {number}", "label": number % 2} for number in range(10)]
NAMES = [f"{number:03}.png" for number in range(10)]
PATHS = [Path("/data", name) for name in NAMES]
TOKENS = torch.arange(2_000)
CLASSES = ["cat", "dog", "bird"]
SHARED_MASK = torch.ones(6)


def kept(**attributes):
    return Keeping(**attributes)


def row_views(tensor):
    return [{"x": row, "mask": SHARED_MASK} for row in tensor]


SHARED = {
    "a part of the whole": (Subset(DATA, [3]), DATA),
    "the whole and a part": (DATA, Subset(DATA, [3])),
    "tensors and a part of their Dataset": ((X, Y), Subset(DATA, [3])),
    "a row of a tensor": ((X, Y), (X[5:6], Y[5:6])),
    "parts of parts": (Subset(Subset(DATA, [4, 5, 6]), [1]), Subset(Subset(DATA, [0, 5]), [1])),
    "two Datasets of one tensor": (DATA, TensorDataset(X)),
    "some columns of a row": (X[2:4, :2], X[3:, 1:]),
    "the same thing": (DATA, DATA),
    "dicts": ({"x": X}, {"other": X[9:]}),
    "views of one tensor in Datasets of one's own": (kept(images=X[:8]), kept(pictures=X[6:])),
    "views of one array": (kept(images=ARRAY[:8]), kept(images=ARRAY[6:])),
    "an array and a tensor of its memory": (kept(images=ARRAY[:8]), (torch.from_numpy(ARRAY)[7:],)),
    "views in dicts inside": (kept(columns={"x": X[:8]}, count=8), kept(columns={"x": X[6:]}, count=4)),
    "columns of a transposed matrix": (X.t()[:2], X.t()[1:]),
    "views of a text that is cut into examples": (kept(count=12, text=TOKENS[:1200]), kept(count=8, text=TOKENS[1100:])),
    "slices of a list of dicts": (RECORDS, RECORDS[:4]),
    "slices of a list of dicts in Datasets": (kept(rows=RECORDS[:6]), kept(rows=RECORDS[5:])),
    "slices of a list of dicts, one in a Subset": (Subset(kept(rows=RECORDS), [1, 2]), kept(rows=RECORDS[2:4])),
    "the same records in another order": (kept(rows=RECORDS), kept(rows=RECORDS[::-1][:3])),
    "one list, overlapping positions": (kept(rows=[1, 2, 3], all=RECORDS), kept(rows=[3, 4], all=RECORDS)),
    "one list of texts": (kept(rows=[1, 2, 3], texts=[str(n) for n in range(9)]),) * 2,
    "rows of one tensor as dicts": (row_views(X), row_views(X[:4])),
    "the same files": (kept(files=PATHS), kept(files=list(map(str, PATHS[3:5])))),
    "the same files with labels": (kept(samples=[(name, 0) for name in map(str, PATHS)]), kept(samples=[(str(PATHS[0]), 0)])),
    "the same files with other labels": (kept(samples=[(path, 0) for path in PATHS]), kept(samples=[(PATHS[0], 1)])),
    "the same files in records": (kept(rows=[Record(str(path), 0) for path in PATHS]), kept(rows=[{"f": PATHS[9]}])),
    "the same names in the same folder": (kept(files=NAMES, root="/data"), kept(files=NAMES[:2], root="/data")),
    "the same files in an array": (kept(files=np.array(NAMES)), kept(files=np.array(NAMES[4:6]))),
    "the same files in a table": (
        kept(table=pandas.DataFrame({"file": NAMES, "label": 0})),
        kept(table=pandas.DataFrame({"file": NAMES[2:4], "label": 1})),
    ),
    "files that occur twice": (kept(files=PATHS + PATHS), kept(files=PATHS[:1])),
    "frames of a film": (
        kept(frames=[("/film.mp4", number) for number in range(9)]),
        kept(frames=[("/film.mp4", number) for number in range(8, 20)]),
    ),
    "a Dataset inside": (kept(inner=Subset(DATA, [1, 2, 3])), kept(inner=Subset(DATA, [3, 4]))),
    "a Dataset inside, of which some are taken": (DATA, kept(count=3, inner=DATA)),
    "a part of a ConcatDataset": (ConcatDataset([kept(rows=RECORDS[:5]), DATA]), Subset(DATA, [2])),
    "a StackDataset": (StackDataset(kept(rows=RECORDS), DATA), kept(rows=RECORDS[:1])),
    "the same ids": (kept(example_ids=["a", "b"]), kept(example_ids=["c", "b"])),
    "the same ids in Subsets": (Subset(kept(example_ids=["a", "b"]), [1]), kept(example_ids=["c", "b"])),
    "the same ids in copies": (kept(example_ids=["a"], x=X.clone()[:1]), kept(example_ids=("a",), x=X.clone()[:1])),
    "two Datasets of one file": (kept(count=9, path="train.h5"), kept(count=9, path="train.h5")),
    "dicts by name": (kept(rows=dict(zip(NAMES, RECORDS, strict=True))), kept(rows=dict(zip("ab", RECORDS[:2], strict=True)))),
}


def encode(text):
    return [ord(letter) for letter in text]


TOKENIZER, VOCABULARY, WEIGHTS = encode, {"cat": 0, "dog": 1}, torch.rand(10)

APART = {
    "disjoint parts": (Subset(DATA, [3]), Subset(DATA, [4])),
    "parts of parts": (Subset(Subset(DATA, [4, 5, 6]), [0]), Subset(Subset(DATA, [0, 5]), [1])),
    "every other row": (X[::2], X[1::2]),
    "first and last rows": ((X[:5], Y[:5]), (X[5:], Y[5:])),
    "other memory": ((X, Y), (X.clone(), Y.clone())),
    "disjoint parts of two Datasets of one tensor": (Subset(TensorDataset(X), [0]), Subset(TensorDataset(X), [1])),
    "nothing": (X[:0], X),
    "halves of a transposed matrix": (X.t()[:1], X.t()[1:]),
    "halves of a tensor in Datasets of one's own": (kept(images=X[:5]), kept(images=X[5:])),
    "halves of a list": (kept(rows=RECORDS[:5]), kept(rows=RECORDS[5:])),
    "halves of a list by position": (kept(rows=[0, 1, 2], all=RECORDS), kept(rows=[3, 4], all=RECORDS)),
    "halves of a text": (kept(count=12, text=TOKENS[:1200]), kept(count=8, text=TOKENS[1200:])),
    "rows of halves as dicts with one mask": (row_views(X[:5]), row_views(X[5:])),
    "a tokenizer, a vocabulary, names of classes, weights and a folder": (
        kept(rows=RECORDS[:5], encode=TOKENIZER, words=VOCABULARY, classes=CLASSES, weights=WEIGHTS, root="/data"),
        kept(rows=RECORDS[5:8], encode=TOKENIZER, words=VOCABULARY, classes=CLASSES, weights=WEIGHTS, root="/data"),
    ),
    "classes by name": (kept(x=X[:5], y=["cat", "dog", "bird", "cat", "dog"]), kept(x=X[5:8], y=["dog", "cat", "bird"])),
    "classes by number": (kept(x=X[:5], y=[0, 1, 2, 3, 4]), kept(x=X[5:8], y=[0, 1, 2])),
    "classes by object": (kept(x=X[:4], y=[Label.CAT, Label.DOG] * 2), kept(x=X[4:6], y=[Label.CAT, Label.DOG])),
    "pairs of small numbers": (kept(y=[(1, 2), (3, 4), (5, 6)]), kept(y=[(1, 2), (7, 8)])),
    "other files of one folder": (kept(files=NAMES[:5], root="/data"), kept(files=NAMES[5:], root="/data")),
    "files of the same names in other folders": (kept(files=NAMES, root="/data/train"), kept(files=NAMES, root="/data/test")),
    "other frames of a film": (
        kept(frames=[("/film.mp4", number) for number in range(9)]),
        kept(frames=[("/film.mp4", number) for number in range(9, 20)]),
    ),
    "one background for all": (
        kept(rows=[(f"/a/{name}", "/background.png") for name in NAMES]),
        kept(rows=[(f"/b/{name}", "/background.png") for name in NAMES]),
    ),
    "the same short texts": (kept(texts=["yes", "no", "maybe"]), kept(texts=["no", "never"])),
    "other ids": (kept(example_ids=["a", "b"]), kept(example_ids=["c", "d"])),
    "ids that only count up": (kept(example_ids=range(5), x=X[:5]), kept(example_ids=range(3), x=X[5:8])),
    "two files": (kept(count=9, path="train.h5"), kept(count=9, path="test.h5")),
    "a Dataset of noise that both mix in": (
        kept(images=X[:5], noise=TensorDataset(torch.rand(7, 3))),
        kept(images=X[5:8], noise=TensorDataset(torch.rand(7, 3))),
    ),
    "parts of a Dataset inside": (kept(inner=Subset(DATA, [1, 2])), kept(inner=Subset(DATA, [3, 4]))),
    "images of two folders": tuple(
        ImageFolder(Path("/data"), np.array([f"{part}/{name}/1.jpg".encode() for name in ("cat", "dog")]), np.array([0, 1]), 8)
        for part in ("train", "val")
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_shared_examples_are_noticed(case):
    one, other = SHARED[case]
    assert share_examples(one, other)
    assert share_examples(other, one)


@pytest.mark.parametrize("case", APART)
def test_examples_apart_are_allowed(case):
    one, other = APART[case]
    assert not share_examples(one, other)
    assert not share_examples(other, one)


NOISE = TensorDataset(torch.rand(7, 3))


def test_a_dataset_that_both_draw_from_besides_is_no_example():
    one, other = kept(images=X[:5], noise=NOISE), kept(images=X[5:8], noise=NOISE)
    assert not share_examples(one, other)


def test_the_same_files_are_known_by_another_way_to_their_folder(tmp_path):
    folder, link = tmp_path / "images", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    for name in NAMES:
        (folder / name).touch()
    assert share_examples(kept(files=NAMES, root=str(folder), mode="train"), kept(files=NAMES[:2], root=link, mode="eval"))
    assert share_examples(kept(files=NAMES, root=str(folder)), kept(files=[folder / NAMES[3]]))
    assert not share_examples(kept(files=NAMES[:5], root=str(folder)), kept(files=[link / NAMES[7]]))


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="only Linux tells what is mapped")
def test_two_maps_of_one_file_are_the_same_examples(tmp_path):
    np.save(tmp_path / "images.npy", np.arange(60_000).reshape(10_000, 6))
    first, second = (np.load(tmp_path / "images.npy", mmap_mode="r") for _ in range(2))
    assert share_examples(kept(images=first[:8_000]), kept(images=second[7_999:]))
    assert not share_examples(kept(images=first[:8_000]), kept(images=second[8_000:]))
    labels = np.arange(10_000) % 10
    one, other = (MappedRows(Arrays([array], labels.copy()), np.arange(9)) for array in (first, second))
    assert share_examples(one, other)
    assert not share_examples(one, MappedRows(Arrays([second], labels.copy()), np.arange(9, 20)))


@given(st.data())
@examples(80)
def test_any_two_slices_share_examples_exactly_if_they_overlap(data):
    count = data.draw(st.integers(2, 30))
    bounds = [sorted(data.draw(st.lists(st.integers(0, count), min_size=2, max_size=2, unique=True))) for _ in range(2)]
    (start, stop), (other_start, other_stop) = bounds
    overlapping = max(start, other_start) < min(stop, other_stop)
    tensor, array, records = torch.zeros(count, 2), np.zeros((count, 2)), [{"n": number} for number in range(count)]
    files = [f"/data/{number}.png" for number in range(count)]
    for values in (tensor, array, records, files, np.array(files), np.array(records)):
        one, other = kept(rows=values[start:stop]), kept(rows=values[other_start:other_stop])
        assert share_examples(one, other) == overlapping
        assert share_examples(Keeping(inner=one), Subset(other, range(len(other)))) == overlapping


@pytest.mark.parametrize(
    ("users", "held_out", "shared"),
    [
        ([1, 2, 2], [3, 4], False),
        ([1, 2, 2], [3, 2], True),
        (np.array([1, 2]), ["2"], True),
        (torch.tensor([1, 2]), np.array(["3", "1"]), True),
        (["ann", "bob"], ["eve"], False),
        (["ann", "bob"], ["bob"], True),
        (["ann"], None, False),
        (None, ["ann"], False),
    ],
)
def test_a_user_in_training_and_held_out_data_is_refused_where_both_have_ids(users, held_out, shared):
    with pytest.raises(InputError, match="in the training data and in the held-out data") if shared else nullcontext():
        refuse_shared_users(users, held_out)
