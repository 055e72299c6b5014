"""idx files: what is right is read to the byte, and whatever is wrong is refused with the name of its file."""

import gzip
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data.arrays import MappedRows
from dp_microadam.workbench.data.catalogue import IDX_FILES
from dp_microadam.workbench.data.contents import Reading
from dp_microadam.workbench.data.idx import read_folder, read_idx

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = IDX_FILES
ANY = Reading("made up")


def as_idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()


def made_up(train=20, test=6):
    """Pixels that differ everywhere, and all ten labels."""
    random = np.random.default_rng(0)
    return {
        TRAIN_IMAGES: random.integers(0, 256, (train, 28, 28), dtype=np.uint8),
        TRAIN_LABELS: np.arange(train, dtype=np.uint8) % 10,
        TEST_IMAGES: random.integers(0, 256, (test, 28, 28), dtype=np.uint8),
        TEST_LABELS: np.arange(test, dtype=np.uint8) % 10,
    }


def write(folder, arrays, *, compressed=False, dotted=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        shown = name.replace("-idx", ".idx") if dotted else name
        if compressed:
            (folder / f"{shown}.gz").write_bytes(gzip.compress(as_idx(array)))
        else:
            (folder / shown).write_bytes(as_idx(array))
    return folder


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_what_was_written_is_read_to_the_byte(tmp_path, compressed, dotted):
    arrays = made_up()
    train, test = read_folder(write(tmp_path, arrays, compressed=compressed, dotted=dotted), ANY)
    train_images, train_labels = train.part()
    test_images, test_labels = test.part()
    assert train_images.dtype == test_images.dtype == torch.uint8
    assert train_labels.dtype == test_labels.dtype == torch.int64
    assert train_images.shape == (20, 1, 28, 28)
    np.testing.assert_array_equal(train_images[:, 0].numpy(), arrays[TRAIN_IMAGES])
    np.testing.assert_array_equal(train_labels.numpy(), arrays[TRAIN_LABELS])
    np.testing.assert_array_equal(test_images[:, 0].numpy(), arrays[TEST_IMAGES])
    np.testing.assert_array_equal(test_labels.numpy(), arrays[TEST_LABELS])


@pytest.mark.parametrize("missing", IDX_FILES)
def test_a_missing_file_is_named(tmp_path, missing):
    folder = write(tmp_path, made_up())
    (folder / missing).unlink()
    with pytest.raises(InputError, match=f"lacks {missing}"):
        read_folder(folder, ANY)


@pytest.mark.parametrize("compressed", [False, True])
@examples(60)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path, compressed, cut):
    whole = as_idx(made_up()[TRAIN_IMAGES][:3])
    whole = gzip.compress(whole) if compressed else whole
    path = tmp_path / f"{TRAIN_IMAGES}{'.gz' if compressed else ''}"
    path.write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(InputError) as refusal:
        read_idx(path, ANY, dimensions=3)
    assert TRAIN_IMAGES in str(refusal.value)
    assert "\n" not in str(refusal.value)


@examples(100)
@given(position=st.integers(0, 2**31), change=st.integers(1, 255))
def test_a_compressed_file_with_one_changed_byte_is_refused_or_unharmed(tmp_path, position, change):
    array = made_up()[TRAIN_IMAGES][:3]
    damaged = bytearray(gzip.compress(as_idx(array), mtime=0))
    damaged[position % len(damaged)] ^= change
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(damaged)
    try:
        read = read_idx(path, ANY, dimensions=3)
    except InputError:
        return
    np.testing.assert_array_equal(read, array)


def test_bytes_after_the_last_element_are_refused(tmp_path):
    path = tmp_path / TRAIN_LABELS
    path.write_bytes(as_idx(np.arange(5)) + b"\0")
    with pytest.raises(InputError, match="has 6 bytes of data where its header announces 5"):
        read_idx(path, ANY, dimensions=1)


@pytest.mark.parametrize("start", ["00 00 08 01", "00 00 0d 03", "01 00 08 03", "1f 8b 08 00"])
def test_another_magic_number_is_refused(tmp_path, start):
    path = tmp_path / TRAIN_IMAGES
    path.write_bytes(bytes.fromhex(start) + as_idx(made_up()[TRAIN_IMAGES])[4:])
    with pytest.raises(InputError, match=f"starts with the bytes {start}; .* starts with 00 00 08 03"):
        read_idx(path, ANY, dimensions=3)


def test_a_header_that_announces_more_than_memory_is_refused(tmp_path):
    path = tmp_path / TRAIN_IMAGES
    path.write_bytes(bytes((0, 0, 8, 3)) + b"\xff" * 12 + b"\0" * 100)
    with pytest.raises(InputError, match="has 100 bytes of data"):
        read_idx(path, ANY, dimensions=3)


WRONG_ARRAYS = [
    (TRAIN_LABELS, np.full(20, 10), "holds an invalid label; labels must be 0 to 9"),
    (TEST_LABELS, np.zeros(5), "holds 5 labels for the 6 images"),
    (TRAIN_IMAGES, np.zeros((20, 32, 32)), "holds images of 32×32 pixels"),
    (TRAIN_IMAGES, np.zeros((0, 28, 28)), "holds 20 labels for the 0 images"),
]


@pytest.mark.parametrize(("name", "array", "message"), WRONG_ARRAYS)
def test_contents_that_do_not_fit_are_refused(tmp_path, name, array, message):
    with pytest.raises(InputError, match=message) as refusal:
        read_folder(write(tmp_path, {**made_up(), name: array}), ANY)
    assert name in str(refusal.value)


def test_a_data_set_without_images_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no images"):
        read_folder(write(tmp_path, made_up(train=0)), ANY)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    folder = tmp_path / TRAIN_IMAGES
    folder.mkdir()
    with pytest.raises(InputError, match="directory"):
        read_idx(folder, ANY, dimensions=3)


def test_a_data_set_is_loaded_from_a_folder_and_divided(tmp_path):
    arrays = made_up()
    loaded = data.load("mnist", str(write(tmp_path, arrays)), validation_fraction=0.25, split_seed=3, verify=False)
    assert [len(part) for part in (loaded.train[0], loaded.validation[0], loaded.test[0])] == [15, 5, 6]
    # Labels are the index modulo ten and pixels differ everywhere: each image must have kept its label.
    by_content = {image.tobytes(): label for image, label in zip(arrays[TRAIN_IMAGES], arrays[TRAIN_LABELS], strict=True)}
    for images, labels in (loaded.train, loaded.validation):
        for image, label in zip(images, labels, strict=True):
            assert by_content.pop(image.numpy().tobytes()) == label
    assert not by_content
    np.testing.assert_array_equal(loaded.test[1].numpy(), arrays[TEST_LABELS])


def test_the_environment_variable_names_a_folder_with_one_subfolder_per_data_set(tmp_path, monkeypatch):
    write(tmp_path / "fashion-mnist", made_up(), compressed=True)
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path))
    loaded = data.load("fashion-mnist", verify=False)
    assert (loaded.name, loaded.mean, loaded.std) == ("fashion-mnist", (0.2860,), (0.3530,))
    assert len(loaded.test[0]) == 6


def test_what_debian_installs_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv("DP_MICROADAM_DATA", raising=False)
    monkeypatch.setattr("dp_microadam.workbench.data.places._DEBIAN_FOLDER", tmp_path)
    write(tmp_path / "fashion-mnist", made_up(), compressed=True)
    assert len(data.load("fashion-mnist", verify=False).test[0]) == 6


def test_a_usual_folder_without_files_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("dp_microadam.workbench.data.places._DEBIAN_FOLDER", tmp_path / "system")
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    write(tmp_path / "system" / "mnist", made_up())
    assert len(data.load("mnist", verify=False).test[0]) == 6


def test_without_the_files_the_message_says_where_to_put_which(tmp_path, monkeypatch):
    monkeypatch.setattr("dp_microadam.workbench.data.places._DEBIAN_FOLDER", tmp_path / "none")
    monkeypatch.setenv("DP_MICROADAM_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    for name in ("mnist", "fashion-mnist"):
        with pytest.raises(InputError) as refusal:
            data.load(name, None)
        wanted = (
            f"dp-microadam data get {name}",
            str(tmp_path / name),
            str(tmp_path / "home" / "dp-microadam" / name),
            "data_folder",
        )
        for part in (*(f"{file}.gz" for file in IDX_FILES), *wanted):
            assert part in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(InputError, match="which does not exist"):
        data.load("mnist", str(tmp_path / "missing"))


@pytest.mark.parametrize("compressed", [False, True])
def test_files_that_are_not_the_published_ones_are_refused_by_name(tmp_path, compressed):
    folder = write(tmp_path, made_up(), compressed=compressed)
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte(.gz)? is not the published .* of mnist .*verify_data=false"):
        data.load("mnist", str(folder))


def test_a_file_above_the_limit_is_memory_mapped_and_gives_the_same_examples(tmp_path):
    folder = str(write(tmp_path, made_up()))
    read = data.load("mnist", folder, verify=False)
    mapped = data.load("mnist", folder, verify=False, memory_gib=1000 / 2**30)
    assert isinstance(mapped.train, MappedRows)
    for there, here in ((mapped.train, read.train), (mapped.validation, read.validation), (mapped.test, read.test)):
        assert len(there) == len(here[1])
        for index, (image, label) in enumerate(zip(*here, strict=True)):
            assert torch.equal(there[index][0], image)
            assert there[index][1] == label


def test_compressed_data_above_the_limit_is_refused_with_what_to_do(tmp_path):
    folder = write(tmp_path, made_up(), compressed=True)
    with pytest.raises(InputError, match=r"data_memory_gib = .*; unpack it, or raise data_memory_gib"):
        data.load("mnist", str(folder), verify=False, memory_gib=1000 / 2**30)
