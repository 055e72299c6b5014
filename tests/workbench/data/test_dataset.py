"""How examples are divided, never through a user, and how pixels and rows are normalized."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data.dataset import split, split_by_user

IDS = st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=40).filter(lambda ids: len(set(ids)) > 1)


def test_what_is_known_of_data_is_known_without_torch_and_digits_without_pandas():
    code = (
        "import sys; from dp_microadam.workbench.data import catalogue; print('torch' in sys.modules); "
        "from dp_microadam.workbench import data; data.load('digits'); "
        "print([name for name in ('pandas', 'sklearn', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "[]"]


@examples(100)
@given(count=st.integers(2, 500), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
def test_every_example_is_in_exactly_one_part(count, fraction, seed):
    if not 0 < round(count * fraction) < count:
        with pytest.raises(InputError, match="at least one in each part"):
            split(count, fraction, seed)
        return
    rest, held_out = split(count, fraction, seed)
    assert len(held_out) == round(count * fraction)
    assert sorted([*rest.tolist(), *held_out.tolist()]) == list(range(count))
    assert torch.equal(split(count, fraction, seed)[1], held_out)


def test_a_number_of_examples_can_be_held_out_and_a_part_that_leaves_nothing_is_refused():
    rest, held_out = split(1_281_167, 0.1, 0, size=10_000)
    assert (len(rest), len(held_out)) == (1_271_167, 10_000)
    with pytest.raises(InputError, match="validation_size is 10; of 10 examples"):
        split(10, 0.1, 0, size=10)
    for fraction in (1.0, -0.5, float("nan")):
        with pytest.raises(InputError, match="validation_fraction"):
            split(10, fraction, 0)
    with pytest.raises(InputError, match="of 2 users it must leave at least one in each part"):
        split_by_user(np.array(["a", "a", "b", "a"]), 0.1, 0, size=2)


@examples(60)
@given(IDS, st.integers(1, 7), st.integers(0, 5))
def test_no_split_goes_through_a_user_and_none_loses_an_example(ids, size, seed):
    users = np.array(ids)
    size = min(size, len(set(ids)) - 1)
    rest, held_out = split_by_user(users, 0.1, seed, size=size)
    assert sorted([*rest.tolist(), *held_out.tolist()]) == list(range(len(ids)))
    assert set(users[rest.numpy()]).isdisjoint(users[held_out.numpy()])
    assert len(set(users[held_out.numpy()])) == size


@examples(20)
@given(IDS, st.data())
def test_which_users_are_held_out_does_not_depend_on_how_much_they_have(ids, draw):
    more = ids + draw.draw(st.lists(st.sampled_from(sorted(set(ids))), max_size=20))
    held_out = [set(np.array(each)[split_by_user(np.array(each), 0.5, 3)[1].numpy()]) for each in (ids, more)]
    assert held_out[0] == held_out[1]


def nothing_in(name, shape, mean, std):
    empty = (torch.empty(0, *shape), torch.empty(0, dtype=torch.int64))
    return data.LabelledData(name, 2, shape, mean, std, empty, empty, empty)


def test_normalization_takes_the_public_mean_off_and_divides():
    images = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[-0.5 / 0.25, 0.5 / 0.25]], [[0.1 / 0.5, 0.3 / 0.5]]]])
    prepared, _ = data.Preparation(nothing_in("two", (2, 1, 2), (0.5, 0.1), (0.25, 0.5)))((images, torch.tensor([1])))
    torch.testing.assert_close(prepared, expected)
    large = torch.full((2, 3, 8, 8), 100, dtype=torch.uint8)  # resized
    prepared, _ = data.Preparation(nothing_in("big", (3, 20, 20), (0.0,) * 3, (1.0,) * 3))((large, torch.tensor([0, 1])))
    torch.testing.assert_close(prepared, torch.full((2, 3, 20, 20), 100 / 255))


def test_rows_of_a_table_are_normalized_by_what_is_given_or_left_as_they_are():
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    given, _ = data.Preparation(nothing_in("table", (2,), (1.0, 2.0), (2.0, 4.0)))((rows, torch.tensor([0, 1])))
    torch.testing.assert_close(given, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    plain, _ = data.Preparation(nothing_in("table", (2,), (), ()))((rows, torch.tensor([0, 1])))
    torch.testing.assert_close(plain, torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert rows.tolist() == [[1.0, 2.0], [3.0, 6.0]]  # the data itself is not changed
