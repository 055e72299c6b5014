"""Examples that are said to be held out are."""

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from dp_microadam.training.held_out import share_examples

X, Y = torch.zeros(10, 3), torch.zeros(10)
DATA = TensorDataset(X, Y)

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
}

APART = {
    "disjoint parts": (Subset(DATA, [3]), Subset(DATA, [4])),
    "parts of parts": (Subset(Subset(DATA, [4, 5, 6]), [0]), Subset(Subset(DATA, [0, 5]), [1])),
    "every other row": (X[::2], X[1::2]),
    "first and last rows": ((X[:5], Y[:5]), (X[5:], Y[5:])),
    "other memory": ((X, Y), (X.clone(), Y.clone())),
    "disjoint parts of two Datasets of one tensor": (Subset(TensorDataset(X), [0]), Subset(TensorDataset(X), [1])),
    "nothing": (X[:0], X),
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
