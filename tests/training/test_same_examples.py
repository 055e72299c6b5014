"""Examples that are said to be held out are, and several processes have the same examples in the same order."""

import logging
import os
import random
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import date
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from dp_microadam import InputError
from dp_microadam.training import same_examples as module
from dp_microadam.training.same_examples import data_digest, refuse_repeats, refuse_shared_users, share_examples
from dp_microadam.workbench.data.images import ImageFolder


class Keeping(Dataset):
    """Keeps what it is given, and has as many examples as it is told."""

    def __init__(self, count, **attributes):
        self.count = count
        self.__dict__.update(attributes)

    def __len__(self):
        return self.count


class Stream(IterableDataset):
    """Reads from what it is given, in a way of its own."""

    def __init__(self, source):
        self.source = source

    def __iter__(self):
        return iter(self.source)


X, Y = torch.rand(10, 3), torch.zeros(10)
DATA = TensorDataset(X, Y)
ARRAY = np.arange(30.0).reshape(10, 3)
NAMES = [f"{number:03}.png" for number in range(20)]
OTHER = [NAMES[1], NAMES[0], *NAMES[2:]]


RECORDS = [{"text": f"sentence {number}", "label": number % 2} for number in range(10)]
MASK = torch.ones(6)


def row_views(tensor):
    return [{"x": row, "mask": MASK} for row in tensor]


def folder(transform):
    """As the same folder of images, read once for training and once for evaluation."""
    return Keeping(20, samples=[(name, 0) for name in NAMES], transform=transform)


SHARED = {
    "a part of the whole": (Subset(DATA, [3]), DATA),
    "tensors and a part of their Dataset": ((X, Y), Subset(DATA, [3])),
    "a row of a tensor": ((X, Y), (X[5:6], Y[5:6])),
    "parts of parts": (Subset(Subset(DATA, [4, 5, 6]), [1]), Subset(Subset(DATA, [0, 5]), [1])),
    "two Datasets of one tensor": (DATA, TensorDataset(X)),
    "some columns of a row": (X[2:4, :2], X[3:, 1:]),
    "the same thing": (DATA, DATA),
    "dicts": ({"x": X}, {"other": X[9:]}),
    "views of one tensor in Datasets of one's own": (Keeping(8, images=X[:8]), Keeping(4, pictures=X[6:])),
    "views of one array": (Keeping(8, images=ARRAY[:8]), Keeping(4, images=ARRAY[6:])),
    "an array and a tensor of its memory": (Keeping(8, images=ARRAY[:8]), (torch.from_numpy(ARRAY)[7:],)),
    "columns of a transposed matrix": (X.t()[:2], X.t()[1:]),
    "a Dataset inside": (Keeping(3, inner=Subset(DATA, [1, 2, 3])), Keeping(2, inner=Subset(DATA, [3, 4]))),
    "a part of a ConcatDataset": (ConcatDataset([folder(None), DATA]), Subset(DATA, [2])),
    "a StackDataset": (StackDataset(Keeping(10, names=NAMES[:10]), DATA), Subset(DATA, [9])),
    "one folder read with two transforms": (Subset(folder(str), [1, 2]), Subset(folder(repr), [2, 3])),
    "a copy of the whole": (TensorDataset(torch.arange(30).view(10, 3)), TensorDataset(torch.arange(30).view(10, 3))),
    "slices of a list of dicts": (RECORDS, RECORDS[:4]),
    "slices of a list of dicts in Datasets": (Keeping(6, rows=RECORDS[:6]), Keeping(5, rows=RECORDS[5:])),
    "rows of one tensor as dicts": (row_views(X), row_views(X[:4])),
    "rows of one tensor as pairs": (list(zip(X, Y, strict=True)), [(X[3], 0)]),
    "some examples of a Dataset inside": (Keeping(4, inner=DATA), DATA),
    "a stream of a Dataset": (Stream(Keeping(4, inner=DATA)), DATA),
    "a stream of a list": (Stream(RECORDS), Keeping(10, rows=RECORDS)),
    "a stream of a tensor": (Stream(X), (X, Y)),
    "the same ids": (Keeping(2, example_ids=["a", "b"]), Keeping(2, example_ids=["c", "b"])),
    "the same ids in Subsets": (Subset(Keeping(2, example_ids=["a", "b"]), [1]), Keeping(2, example_ids=["c", "b"])),
    "the same ids in copies": (Keeping(1, example_ids=["a"], x=X.clone()), Keeping(1, example_ids=("a",), x=X.clone())),
}

APART = {
    "disjoint parts": (Subset(DATA, [3]), Subset(DATA, [4])),
    "parts of parts": (Subset(Subset(DATA, [4, 5, 6]), [0]), Subset(Subset(DATA, [0, 5]), [1])),
    "every other row": (X[::2], X[1::2]),
    "first and last rows": ((X[:5], Y[:5]), (X[5:], Y[5:])),
    "other memory": ((X, Y), (X.clone(), Y.clone())),
    "disjoint parts of two Datasets of one tensor": (Subset(TensorDataset(X), [0]), Subset(TensorDataset(X), [1])),
    "nothing": (X[:0], X),
    "halves of a transposed matrix": (X.t()[:1], X.t()[1:]),
    "halves of a tensor in Datasets of one's own": (Keeping(5, images=X[:5]), Keeping(5, images=X[5:])),
    "weights of classes that both hold": (Keeping(5, x=X[:5], weights=Y), Keeping(4, x=X[6:], weights=Y)),
    "Datasets of which each has some of what both hold": (Keeping(4, inner=DATA), Keeping(5, inner=DATA)),
    "a stream of a Dataset that is trained on in part": (Stream(DATA), Subset(DATA, [1, 2])),
    "Datasets without attributes": (Keeping(20), Keeping(20)),
    "one folder read with two transforms, in parts": (Subset(folder(str), [1, 2]), Subset(folder(repr), [3])),
    "halves of a list": (Keeping(5, rows=RECORDS[:5]), Keeping(5, rows=RECORDS[5:])),
    "rows of halves as dicts with one mask": (row_views(X[:5]), row_views(X[5:])),
    "the same short texts": (Keeping(3, texts=["yes", "no", "maybe"]), Keeping(2, texts=["no", "never"])),
    "other ids": (Keeping(2, example_ids=["a", "b"], x=X), Keeping(2, example_ids=["c", "d"], x=X)),
    "ids that only count up": (Keeping(5, example_ids=range(5), x=X[:5]), Keeping(3, example_ids=range(3), x=X[5:8])),
    "parts of a Dataset inside": (Keeping(2, inner=Subset(DATA, [1, 2])), Keeping(2, inner=Subset(DATA, [3, 4]))),
}


@pytest.mark.parametrize(("cases", "case"), [(cases, case) for cases in ("SHARED", "APART") for case in globals()[cases]])
def test_shared_examples_are_noticed_and_examples_apart_allowed(cases, case):
    one, other = globals()[cases][case]
    assert share_examples(one, other) == share_examples(other, one) == (cases == "SHARED")


@given(st.data())
@examples(80)
def test_any_two_slices_share_examples_exactly_if_they_overlap(data):
    count = data.draw(st.integers(2, 30))
    bounds = [sorted(data.draw(st.lists(st.integers(0, count), min_size=2, max_size=2, unique=True))) for _ in range(2)]
    (start, stop), (other_start, other_stop) = bounds
    overlapping = max(start, other_start) < min(stop, other_stop)
    for values in (torch.rand(count, 2), np.arange(2.0 * count).reshape(count, 2)):
        one, other = (Keeping(stop - start, rows=values[start:stop]) for start, stop in bounds)
        assert share_examples(one, other) == overlapping
        assert share_examples(Keeping(len(one), inner=one), Subset(other, range(len(other)))) == overlapping


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (Subset(DATA, [0, 1, 1]), "the indices of a Subset"),
        (Subset(Subset(DATA, [3, 4, 3]), [0, 2]), "the indices of a Subset"),
        (ConcatDataset([DATA, Subset(DATA, [3])]), "concatenated datasets share examples"),
        (Keeping(3, example_ids=["a", "b", "a"]), "example_ids repeat"),
        ((torch.zeros(1, 3).expand(10, 3), Y), "a tensor is expanded"),
    ],
)
def test_training_data_that_visibly_repeats_an_example_is_refused(data, where):
    with pytest.raises(InputError, match=rf"the same example several times \(.*{where}"):
        refuse_repeats(data)
    refuse_repeats(DATA)
    refuse_repeats(ConcatDataset([Subset(DATA, [1, 2]), Subset(DATA, [3])]))


@pytest.mark.parametrize(
    ("users", "held_out", "shared"),
    [
        ([1, 2, 2], [3, 4], False),
        (np.array([1, 2]), ["2"], True),
        (torch.tensor([1, 2]), np.array(["3", "1"]), True),
        (["ann", "bob"], ["bob"], True),
        (["ann"], None, False),
        (None, ["ann"], False),
    ],
)
def test_a_user_in_training_and_held_out_data_is_refused_where_both_have_ids(users, held_out, shared):
    with pytest.raises(InputError, match="in the training data and in the held-out data") if shared else nullcontext():
        refuse_shared_users(users, held_out)


HOLDERS = {
    "a list": lambda names: Keeping(20, names=names),
    "a tuple": lambda names: Keeping(20, names=tuple(names)),
    "bytes": lambda names: Keeping(20, names=[name.encode() for name in names]),
    "paths": lambda names: Keeping(20, names=[Path("/data", name) for name in names]),
    "pairs": lambda names: Keeping(20, samples=[(name, 0) for name in names]),
    "dicts": lambda names: Keeping(20, rows=[{"file": name, "label": 0} for name in names]),
    "a dict's order": lambda names: Keeping(20, rows=dict.fromkeys(names, 0)),
    "an array of text": lambda names: Keeping(20, names=np.array(names)),
    "an array of objects": lambda names: Keeping(20, names=np.array(names, dtype=object)),
    "a table": lambda names: Keeping(20, table=pandas.DataFrame({"file": names, "label": 0})),
    "tensors": lambda names: TensorDataset(torch.tensor([[float(name[:3]), 1.0] for name in names])),
    "tensors in a list": lambda names: Keeping(20, rows=[torch.tensor([float(name[:3]), 1.0]) for name in names]),
    "numbers": lambda names: Keeping(20, targets=[float(name[:3]) for name in names]),
    "dates": lambda names: Keeping(20, days=[date(2020, 1, 1 + int(name[:3])) for name in names]),
    "a Subset": lambda names: Subset(Keeping(20, names=NAMES), [int(name[:3]) for name in names]),
    "a Dataset inside": lambda names: Keeping(20, inner=Keeping(20, names=names)),
    "a Dataset in a list inside": lambda names: Keeping(20, parts=[Keeping(20, names=names)]),
    "a ConcatDataset": lambda names: ConcatDataset([Keeping(10, names=names[:10]), Keeping(10, names=names[10:])]),
    "a StackDataset": lambda names: StackDataset(Keeping(20, names=names), TensorDataset(torch.zeros(20, 2))),
    "ids": lambda names: Keeping(20, example_ids=names),
    "ids of a Subset": lambda names: Subset(Keeping(20, example_ids=names), range(10)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_two_examples_that_change_places_show_wherever_their_names_are_kept(holder):
    make = HOLDERS[holder]
    assert data_digest(make(NAMES)) == data_digest(make([*map("".join, NAMES)]))
    assert data_digest(make(NAMES)) != data_digest(make(OTHER))


def digests():
    return [data_digest(make(NAMES)) for make in HOLDERS.values()]


def test_digests_are_the_same_in_another_process():
    """Hashes of text are seeded differently there."""
    script = "from test_same_examples import digests; print(digests())"
    folders = os.pathsep.join([*sys.path, *map(str, Path(__file__).parents[:2])])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": folders}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == f"{digests()}\n"


def test_what_differs_between_processes_with_the_same_data_does_not_count():
    def made(rank):
        return Keeping(
            20,
            names=NAMES,
            lock=threading.Lock(),
            condition=threading.Condition(),
            log=logging.getLogger(f"rank {rank}"),
            chance=random.Random(rank),
            generator=np.random.default_rng(rank),
            torch_generator=torch.Generator().manual_seed(rank),
            transform=torch.nn.Dropout(0.1 * rank),
            target_transform=lambda label: label + rank,
            device=torch.device("cuda", rank),
            file=open(os.devnull),
        )

    one, other = made(0), made(1)
    assert data_digest(one) == data_digest(other)
    one.file.close(), other.file.close()


def test_ids_override_everything_else():
    one, other = Keeping(20, names=NAMES, example_ids=range(20)), Keeping(20, names=OTHER, example_ids=list(range(20)))
    assert data_digest(one) == data_digest(other)
    assert data_digest(one) != data_digest(Keeping(20, names=NAMES, example_ids=[1, 0, *range(2, 20)]))


UNSEEN = {
    "nothing": {},
    "a path": {"path": "data.h5"},
    "positions": {"rows": list(range(20)), "path": "data.h5"},
    "classes of the examples": {"labels": np.arange(20) % 3, "path": "data.h5"},
    "names of classes": {"classes": ["cat", "dog"], "label_of": ["cat", "dog"] * 10},
    "a set": {"names": set(NAMES)},
    "an object that cannot be looked into": {"source": object()},
    "functions": {"loaders": [lambda: 0] * 20},
    "a network": {"encoder": torch.nn.Linear(20, 20)},
    "a Dataset of the same kind": {"inner": Keeping(20)},
}


@pytest.mark.parametrize("case", UNSEEN)
def test_an_order_that_cannot_be_seen_is_refused(case):
    with pytest.raises(InputError, match=r"Keeping has no attribute that distinguishes its examples.*give it example_ids"):
        data_digest(Keeping(20, **UNSEEN[case]))
    with pytest.raises(InputError, match="example_ids"):
        data_digest(ConcatDataset([Keeping(20, names=NAMES), Keeping(20, **UNSEEN[case])]))
    data_digest(Keeping(20, **UNSEEN[case], example_ids=NAMES))


def test_a_text_that_is_cut_into_examples_is_seen():
    text = torch.randint(50, (2_001,))
    assert data_digest(Keeping(20, tokens=text)) != data_digest(Keeping(20, tokens=text.flip(0)))


@pytest.mark.parametrize("ids", [NAMES[:5], "names", [0.5] * 20])
def test_ids_must_be_one_name_or_number_for_each_example(ids):
    with pytest.raises(InputError, match="it must be a sequence of names or integers, one for each of 20 examples"):
        data_digest(Keeping(20, example_ids=ids))


def test_two_rows_of_an_array_that_change_places_show_and_large_arrays_are_compared_all_over(monkeypatch):
    images = torch.rand(50_000, 3)
    order = torch.arange(50_000)
    order[[40_001, 40_002]] = order[[40_002, 40_001]]
    assert data_digest((images,)) != data_digest((images[order],))
    monkeypatch.setattr(module, "_WHOLE", 1000)
    assert data_digest((images,)) == data_digest((images.clone(),))
    assert data_digest((images,)) != data_digest((images[torch.randperm(50_000)],))


def test_images_are_the_same_wherever_their_folder_stands():
    files, labels = np.array([b"cat/1.jpg", b"dog/1.jpg"]), np.array([0, 1])
    one, other = (ImageFolder(Path(root, "train"), files, labels, 32) for root in ("/here", "/there"))
    assert data_digest(one) == data_digest(other)
    assert data_digest(one) != data_digest(ImageFolder(Path("/here/train"), files[::-1], labels[::-1], 32))


class Column(list):
    def column(self, number):
        return self

    to_pylist = list.copy


class Fingerprinted:
    """As Hugging Face's ``datasets``: a table that cannot be looked into from here, rows of it, and a fingerprint."""

    def __init__(self, count, fingerprint, table=None, rows=None):
        self._fingerprint, self._data, self._count = fingerprint, table or object(), count
        self._indices = None if rows is None else Column(rows)

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        raise AssertionError("no example is read")


def test_selections_of_one_table_are_told_apart_by_their_rows():
    table = object()
    whole, some, others = (
        Fingerprinted(count, name, table, rows)
        for count, name, rows in ((9, "whole", None), (2, "some", [3, 7]), (2, "others", [0, 4]))
    )
    assert share_examples(whole, some)
    assert not share_examples(some, others)
    assert share_examples(some, Fingerprinted(2, "some"))
    table = list(range(9))
    assert share_examples(Fingerprinted(9, "whole", table), Stream(Fingerprinted(2, "some", table, [3, 7])))
    assert not share_examples(Fingerprinted(2, "some", table, [3, 7]), Stream(Fingerprinted(9, "whole", table)))


def test_a_fingerprint_counts_as_the_data():
    assert data_digest(Fingerprinted(20, "one")) == data_digest(Fingerprinted(20, "one"))
    assert data_digest(Fingerprinted(20, "one")) != data_digest(Fingerprinted(20, "two"))
