"""Whatever decides which examples a Dataset has, and their order, shows in its digest, and nothing else does."""

import copy
import logging
import os
import random
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from thoroughness import examples
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from dp_microadam import InputError
from dp_microadam.training import data_digest as module
from dp_microadam.training.data_digest import content_digest, data_digest
from dp_microadam.workbench.data.images import ImageFolder


class Keeping(Dataset):
    """Keeps what it is given, and has as many examples as it is told."""

    def __init__(self, count, **attributes):
        self.count = count
        self.__dict__.update(attributes)

    def __len__(self):
        return self.count


class Slotted(Dataset):
    __slots__ = ("__names",)

    def __init__(self, names):
        self.__names = names

    def __len__(self):
        return len(self.__names)


@dataclass
class Record:
    file: str
    label: int


class Node:
    """An object of no known kind."""

    def __init__(self, name, parent=None):
        self.name, self.parent = name, parent


NAMES = [f"{number:03}.png" for number in range(20)]
OTHER = [NAMES[1], NAMES[0], *NAMES[2:]]

HOLDERS = {
    "list": lambda names: Keeping(20, names=names),
    "tuple": lambda names: Keeping(20, names=tuple(names)),
    "deque": lambda names: Keeping(20, names=deque(names)),
    "bytes": lambda names: Keeping(20, names=[name.encode() for name in names]),
    "paths": lambda names: Keeping(20, names=[Path("/data", name) for name in names]),
    "pairs": lambda names: Keeping(20, samples=[(name, 0) for name in names]),
    "dicts": lambda names: Keeping(20, rows=[{"file": name, "label": 0} for name in names]),
    "dataclasses": lambda names: Keeping(20, rows=[Record(name, 0) for name in names]),
    "objects": lambda names: Keeping(20, rows=[Node(name) for name in names]),
    "lists in lists": lambda names: Keeping(20, rows=[[[name]] for name in names]),
    "a dict's order": lambda names: Keeping(20, rows=dict.fromkeys(names, 0)),
    "a list in a dict": lambda names: Keeping(20, columns={"file": names, "label": [0] * 20}),
    "a list in an object": lambda names: Keeping(20, index=Node(names)),
    "an array of text": lambda names: Keeping(20, names=np.array(names)),
    "an array of objects": lambda names: Keeping(20, names=np.array(names, dtype=object)),
    "a table": lambda names: Keeping(20, table=pandas.DataFrame({"file": names, "label": 0})),
    "slots": Slotted,
    "tensors": lambda names: TensorDataset(torch.tensor([[float(name[:3]), 1.0] for name in names])),
    "tensors in a list": lambda names: Keeping(20, rows=[torch.tensor([float(name[:3]), 1.0]) for name in names]),
    "numbers": lambda names: Keeping(20, targets=[float(name[:3]) for name in names]),
    "a Subset": lambda names: Subset(Keeping(20, names=NAMES), [int(name[:3]) for name in names]),
    "a Subset of a Subset": lambda names: Subset(Subset(Keeping(20, names=names), range(20)), range(19)),
    "a Dataset inside": lambda names: Keeping(20, inner=Keeping(20, names=names)),
    "a Dataset in a list inside": lambda names: Keeping(20, parts=[Keeping(20, names=names)]),
    "a ConcatDataset": lambda names: ConcatDataset([Keeping(10, names=names[:10]), Keeping(10, names=names[10:])]),
    "a StackDataset": lambda names: StackDataset(Keeping(20, names=names), TensorDataset(torch.zeros(20, 2))),
    "positions of a larger list": lambda names: Keeping(
        20, names=NAMES + [f"more {name}" for name in NAMES], rows=[int(name[:3]) for name in names]
    ),
    "ids": lambda names: Keeping(20, example_ids=names),
    "ids of a Subset": lambda names: Subset(Keeping(20, example_ids=names), range(10)),
    "a plain list": lambda names: list(names),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_two_examples_that_change_places_show_wherever_their_names_are_kept(holder):
    make = HOLDERS[holder]
    assert data_digest(make(NAMES)) == data_digest(make([*map("".join, NAMES)]))
    assert data_digest(make(NAMES)) != data_digest(make(OTHER))


atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.dates()
values = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(values, min_size=2, max_size=8), st.randoms(use_true_random=False))
@examples(150)
def test_any_permutation_of_a_list_changes_the_digest(entries, chance):
    mixed = list(entries)
    chance.shuffle(mixed)
    assume([repr(entry) for entry in mixed] != [repr(entry) for entry in entries])
    assert content_digest(Keeping(len(entries), rows=mixed)) != content_digest(Keeping(len(entries), rows=entries))


@given(values)
@examples(150)
def test_equal_content_in_separate_objects_gives_equal_digests(value):
    assert content_digest(Keeping(3, value=value)) == content_digest(Keeping(3, value=copy.deepcopy(value)))


@given(values, values)
@examples(150)
def test_different_content_gives_different_digests(one, other):
    assume(repr(one) != repr(other))
    assert content_digest(Keeping(3, value=one)) != content_digest(Keeping(3, value=other))


@given(st.sets(st.text(min_size=1), min_size=2, max_size=10))
@examples(50)
def test_the_order_of_a_set_does_not_count(names):
    grown = set()
    for name in sorted(names, reverse=True):
        grown.add(name)
    assert content_digest(Keeping(3, names=names)) == content_digest(Keeping(3, names=grown))


IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = {folders!r}
from test_data_digest import kept
from dp_microadam.training.data_digest import data_digest
print(data_digest(kept()))
"""


def kept():
    """One of everything."""
    everything = {name: make(NAMES) for name, make in HOLDERS.items() if name != "a plain list"}
    return Keeping(20, names=NAMES, classes={"cat", "dog", "bird", "fish"}, day=date(2020, 2, 2), **everything)


@pytest.mark.slow
def test_digests_are_the_same_in_processes_whose_hashes_are_seeded_differently():
    script = IN_ANOTHER_PROCESS.format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert found == [data_digest(kept())] * 2


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


def test_ids_must_be_one_name_or_number_for_each_example():
    for ids, sentence in ((NAMES[:5], "5 entries for 20"), ("names", "is a str"), ([0.5] * 20, "contains a float")):
        with pytest.raises(InputError, match=sentence):
            data_digest(Keeping(20, example_ids=ids))


def test_objects_that_hold_each_other_have_a_digest():
    def ring(name):
        first = Node(name)
        first.parent = Node("second", first)
        return Keeping(20, names=NAMES, node=first)

    assert data_digest(ring("a")) == data_digest(ring("a")) != data_digest(ring("b"))


def test_arrays_too_large_to_be_hashed_are_compared_by_rows_from_all_over(monkeypatch):
    images = torch.randint(256, (50_000, 3), dtype=torch.uint8)
    monkeypatch.setattr(module, "_WHOLE", 1000)
    assert data_digest((images,)) == data_digest((images.clone(),))
    assert data_digest((images,)) != data_digest((images[torch.randperm(50_000)],))


def test_two_rows_of_an_array_that_change_places_show():
    images = torch.rand(50_000, 3)
    order = torch.arange(50_000)
    order[[40_001, 40_002]] = order[[40_002, 40_001]]
    assert data_digest((images,)) != data_digest((images[order],))


def test_images_are_the_same_wherever_their_folder_stands():
    files, labels = np.array([b"cat/1.jpg", b"dog/1.jpg"]), np.array([0, 1])
    one, other = (ImageFolder(Path(root, "train"), files, labels, 32) for root in ("/here", "/there"))
    assert data_digest(one) == data_digest(other)
    assert data_digest(one) != data_digest(ImageFolder(Path("/here/train"), files[::-1], labels[::-1], 32))


class Fingerprinted(Keeping):
    """As Hugging Face's ``datasets``: an Arrow table that cannot be looked into from here, and a fingerprint."""

    def __init__(self, count, fingerprint):
        super().__init__(count, _fingerprint=fingerprint, _indices=None)
        self._data = Node("table")
        self._data.table = object()


def test_a_fingerprint_counts_as_the_data():
    assert data_digest(Fingerprinted(20, "one")) == data_digest(Fingerprinted(20, "one"))
    assert data_digest(Fingerprinted(20, "one")) != data_digest(Fingerprinted(20, "two"))
