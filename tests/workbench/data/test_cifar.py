"""CIFAR in each of its published forms: what is right is read to the byte, and whatever is wrong is refused by name."""

import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench import data
from dp_microadam.workbench.data import cifar
from dp_microadam.workbench.data.arrays import MappedRows
from dp_microadam.workbench.data.catalogue import known
from dp_microadam.workbench.data.contents import Reading

ANY = Reading("made up")
FILES = {"cifar10": [f"data_batch_{n}" for n in range(1, 6)] + ["test_batch"], "cifar100": ["train", "test"]}
FOLDERS = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "python"): "cifar-100-python",
}
FORMS = [
    (name, version, archived)
    for name in ("cifar10", "cifar100")
    for version in ("binary", "python")
    for archived in (False, True)
]


def made_up(name, per_file=4):
    """For each file: images that differ everywhere, and labels (CIFAR-100: coarse and fine)."""
    random = np.random.default_rng(0)
    batches = {}
    for file in FILES[name]:
        images = random.integers(0, 256, (per_file, 3, 32, 32), dtype=np.uint8)
        if name == "cifar10":
            labels = {"labels": random.integers(0, 10, per_file)}
        else:
            labels = {"coarse_labels": random.integers(0, 20, per_file), "fine_labels": random.integers(0, 100, per_file)}
        batches[file] = (images, labels)
    return batches


def encoded(images, labels, version, protocol=2):
    """A batch as the publisher writes it."""
    if version == "python":
        lists = {key: [int(label) for label in values] for key, values in labels.items()}
        return pickle.dumps({"data": images.reshape(len(images), -1), "batch_label": "a batch", **lists}, protocol)
    columns = [np.asarray(values, dtype=np.uint8)[:, None] for values in labels.values()]
    return np.concatenate([*columns, images.reshape(len(images), -1)], axis=1).tobytes()


def write(place, name, version, *, archived=False, batches=None):
    place.mkdir(parents=True, exist_ok=True)
    folder, ending = FOLDERS[name, version], ".bin" if version == "binary" else ""
    contents = {f"{file}{ending}": encoded(*batch, version) for file, batch in (batches or made_up(name)).items()}
    if archived:
        with tarfile.open(place / f"{name.replace('cifar', 'cifar-')}-{version}.tar.gz", "w:gz") as archive:
            for file, content in {"readme.html": b"about", **contents}.items():
                member = tarfile.TarInfo(f"{folder}/{file}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    else:
        (place / folder).mkdir()
        for file, content in contents.items():
            (place / folder / file).write_bytes(content)
    return place


@pytest.mark.parametrize(("name", "version", "archived"), FORMS)
def test_what_was_written_is_read_to_the_byte(tmp_path, name, version, archived):
    batches = made_up(name)
    train, test = cifar.read(name, write(tmp_path, name, version, archived=archived, batches=batches), ANY)
    key = "labels" if name == "cifar10" else "fine_labels"
    *train_files, test_file = FILES[name]
    images, labels = train.part()
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    np.testing.assert_array_equal(images.numpy(), np.concatenate([batches[file][0] for file in train_files]))
    np.testing.assert_array_equal(labels.numpy(), np.concatenate([batches[file][1][key] for file in train_files]))
    images, labels = test.part()
    np.testing.assert_array_equal(images.numpy(), batches[test_file][0])
    np.testing.assert_array_equal(labels.numpy(), batches[test_file][1][key])


@pytest.mark.parametrize("version", ["binary", "python"])
def test_coarse_labels_of_cifar100(tmp_path, version):
    batches = made_up("cifar100")
    place = write(tmp_path, "cifar100", version, batches=batches)
    loaded = data.load("cifar100", str(place), verify=False, labels="coarse", validation_fraction=0.25)
    assert loaded.num_classes == 20
    found = sorted([*loaded.train[1].tolist(), *loaded.validation[1].tolist()])
    assert found == sorted(batches["train"][1]["coarse_labels"].tolist())
    with pytest.raises(InputError, match=r"labels is 'rough'; it must be one of 'coarse', 'fine'"):
        data.load("cifar100", str(place), verify=False, labels="rough")


def test_files_may_lie_in_the_folder_itself_and_archives_may_be_named(tmp_path):
    place = write(tmp_path / "a", "cifar10", "binary")
    assert len(data.load("cifar10", str(place / "cifar-10-batches-bin"), verify=False).test[1]) == 4
    archive = write(tmp_path / "b", "cifar10", "python", archived=True) / "cifar-10-python.tar.gz"
    assert len(data.load("cifar10", str(archive), verify=False).test[1]) == 4
    other = tmp_path / "other.tar.gz"
    archive.rename(other)
    with pytest.raises(InputError, match=r"other.tar.gz is not an archive of cifar10; it must be called cifar-10-binary"):
        data.load("cifar10", str(other), verify=False)


def test_the_split_holds_a_tenth_out_and_keeps_labels_with_their_images(tmp_path):
    batches = made_up("cifar10", per_file=20)
    loaded = data.load("cifar10", str(write(tmp_path, "cifar10", "binary", batches=batches)), verify=False)
    assert [len(part[1]) for part in (loaded.train, loaded.validation, loaded.test)] == [90, 10, 20]
    assert (loaded.mean, loaded.std) == ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    by_content = {
        image.tobytes(): label
        for file in FILES["cifar10"][:-1]
        for image, label in zip(batches[file][0], batches[file][1]["labels"], strict=True)
    }
    for images, labels in (loaded.train, loaded.validation):
        for image, label in zip(images, labels, strict=True):
            assert by_content.pop(image.numpy().tobytes()) == label
    assert not by_content


@pytest.mark.parametrize("version", ["binary", "python"])
def test_a_file_above_the_limit_is_mapped_or_refused_and_gives_the_same_examples(tmp_path, version):
    place = str(write(tmp_path, "cifar10", version))
    read = data.load("cifar10", place, verify=False)
    mapped = data.load("cifar10", place, verify=False, memory_gib=1000 / 2**30)
    if version == "python":  # a pickle has to be read
        assert torch.equal(mapped.train[0], read.train[0])
        return
    assert isinstance(mapped.train, MappedRows)
    for index, (image, label) in enumerate(zip(*read.train, strict=True)):
        assert torch.equal(mapped.train[index][0], image)
        assert mapped.train[index][1] == label


def test_an_archive_above_the_limit_is_refused_with_what_to_do(tmp_path):
    place = write(tmp_path, "cifar10", "binary", archived=True)
    with pytest.raises(InputError, match="unpack it, or raise data_memory_gib"):
        data.load("cifar10", str(place), verify=False, memory_gib=1000 / 2**30)


@pytest.mark.parametrize(("name", "version", "archived"), FORMS)
def test_files_that_are_not_the_published_ones_are_refused_by_name_before_they_are_opened(tmp_path, name, version, archived):
    place = write(tmp_path, name, version, archived=archived)
    with pytest.raises(InputError, match=rf"is not the published .* of {name} .*verify_data=false") as refusal:
        data.load(name, str(place))
    assert ("tar.gz" in str(refusal.value)) == archived
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("version", ["binary", "python"])
def test_a_missing_file_is_named(tmp_path, version):
    place = write(tmp_path, "cifar10", version)
    ending = ".bin" if version == "binary" else ""
    (place / FOLDERS["cifar10", version] / f"data_batch_3{ending}").unlink()
    with pytest.raises(InputError, match=f"lacks data_batch_3{ending}; it must hold"):
        cifar.read("cifar10", place, ANY)


def test_an_archive_without_a_file_is_refused(tmp_path):
    batches = made_up("cifar10")
    del batches["data_batch_2"]
    place = write(tmp_path, "cifar10", "binary", archived=True, batches=batches)
    with pytest.raises(InputError, match=r"cifar-10-binary.tar.gz lacks cifar-10-batches-bin/data_batch_2.bin"):
        cifar.read("cifar10", place, ANY)


def test_an_empty_folder_is_refused_with_what_it_must_hold(tmp_path):
    with pytest.raises(InputError, match=r"must hold cifar-100-binary.tar.gz or cifar-100-python.tar.gz"):
        data.load("cifar100", str(tmp_path))


@pytest.mark.parametrize(("name", "version", "archived"), FORMS)
@examples(15)
@given(cut=st.floats(0.001, 0.999))
def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path, name, version, archived, cut):
    place = tmp_path / "whole"
    if not place.exists():
        write(place, name, version, archived=archived)
    (path,) = [p for p in place.rglob("*") if p.is_file() and (archived or p.stem in ("test", "test_batch"))]
    whole = path.read_bytes()
    # A cut between two records leaves a shorter file of the same form: only the digest can tell.
    length = int(cut * len(whole))
    if version == "binary" and not archived and length % (3073 if name == "cifar10" else 3074) == 0:
        return
    if archived and len(whole) - length <= 8:
        return
    path.write_bytes(whole[:length])
    try:
        with pytest.raises(InputError) as refusal:
            cifar.read(name, place, ANY)
    finally:
        path.write_bytes(whole)
    assert path.name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_pickle_cannot_run_code(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    place = write(tmp_path / "data", "cifar10", "python")
    victim = place / "cifar-10-batches-py" / "data_batch_1"
    victim.write_bytes(pickle.dumps({"data": Attack(), "labels": []}))
    with pytest.raises(InputError, match=r"data_batch_1 refers to posix.mkdir, which is not data; it was not run"):
        cifar.read("cifar10", place, ANY)
    assert not (tmp_path / "harm").exists()
    victim.write_bytes(pickle.dumps({"data": getattr, "labels": []}))
    with pytest.raises(InputError, match=r"refers to builtins.getattr"):
        cifar.read("cifar10", place, ANY)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_pickles_of_every_protocol_of_the_time_are_read(tmp_path, protocol):
    batches = made_up("cifar10")
    place = write(tmp_path, "cifar10", "python", batches=batches)
    for file, batch in batches.items():
        (place / "cifar-10-batches-py" / file).write_bytes(encoded(*batch, "python", protocol))
    train, _ = cifar.read("cifar10", place, ANY)
    np.testing.assert_array_equal(train.inputs[0], batches["data_batch_1"][0])


WRONG_BATCHES = [
    ({"data": np.zeros((2, 5), np.uint8), "labels": [0, 1]}, "3072 bytes per image"),
    ({"data": np.zeros((2, 3072), np.float32), "labels": [0, 1]}, "3072 bytes per image"),
    ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "labels, one whole number per image"),
    ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, "x"]}, "labels, one whole number per image"),
    ({"data": np.zeros((2, 3072), np.uint8)}, "labels, one whole number per image"),
    ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, "an invalid label; labels must be 0 to 9"),
    ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, -1]}, "an invalid label; labels must be 0 to 9"),
    ([1, 2], "3072 bytes per image"),
]


@pytest.mark.parametrize(("batch", "message"), WRONG_BATCHES)
def test_a_pickle_of_something_else_is_refused_by_name(tmp_path, batch, message):
    place = write(tmp_path, "cifar10", "python")
    (place / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(InputError, match=message) as refusal:
        cifar.read("cifar10", place, ANY)
    assert "data_batch_2" in str(refusal.value)


def test_an_empty_file_is_refused_by_name(tmp_path):
    place = write(tmp_path, "cifar100", "binary")
    (place / "cifar-100-binary" / "test.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"test.bin holds no images"):
        cifar.read("cifar100", place, ANY)


def test_a_label_out_of_range_is_refused_without_telling_it(tmp_path):
    batches = made_up("cifar10")
    batches["data_batch_4"][1]["labels"][2] = 77
    with pytest.raises(InputError, match=r"data_batch_4.bin holds an invalid label") as refusal:
        cifar.read("cifar10", write(tmp_path, "cifar10", "binary", batches=batches), ANY)
    assert "77" not in str(refusal.value)


REAL = os.environ.get("DP_MICROADAM_DATA", "")


@pytest.mark.skipif(not os.path.isdir(f"{REAL}/cifar10"), reason="the real CIFAR-10 is not in $DP_MICROADAM_DATA/cifar10")
def test_the_real_cifar10_is_what_was_published():
    loaded = data.load("cifar10", f"{REAL}/cifar10")
    assert [len(part[1]) for part in (loaded.train, loaded.validation, loaded.test)] == [45_000, 5_000, 10_000]
    labels = torch.cat([loaded.train[1], loaded.validation[1]])
    assert torch.bincount(labels).tolist() == [5_000] * 10
    assert torch.bincount(loaded.test[1]).tolist() == [1_000] * 10
    pixels = torch.cat([loaded.train[0], loaded.validation[0]]).double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(known("cifar10").mean, abs=1e-3)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(known("cifar10").std, abs=1e-3)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_sets_of_28_by_28_pixels_are_what_was_published(name):
    if not os.path.isdir(f"{REAL}/{name}"):
        pytest.skip(f"the real {name} is not in $DP_MICROADAM_DATA/{name}")
    loaded = data.load(name, f"{REAL}/{name}")
    assert [len(part[1]) for part in (loaded.train, loaded.validation, loaded.test)] == [54_000, 6_000, 10_000]
    pixels = torch.cat([loaded.train[0], loaded.validation[0]]).double() / 255
    assert float(pixels.mean()) == pytest.approx(known(name).mean[0], abs=1e-3)
    assert float(pixels.std()) == pytest.approx(known(name).std[0], abs=1e-3)
