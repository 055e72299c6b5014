"""Folders of image files: what is found, how it is decoded, and what happens to files that cannot be."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.training.evaluation import batches
from dp_microadam.workbench import data
from dp_microadam.workbench.data.images import ImageFolder, read_folder


def write(root, sizes=((60, 40), (40, 60), (50, 50)), classes=("ant", "bee"), test="val", suffix=".png"):
    """Images whose colour tells their class and number; PNG keeps it exactly."""
    for part, repeats in (("train", 4), (test, 1)):
        for label, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(repeats * len(sizes)):
                pixels = np.zeros((*sizes[number % len(sizes)][::-1], 3), np.uint8)
                pixels[..., 0], pixels[..., 1] = 40 * (label + 1), number
                Image.fromarray(pixels).save(folder / f"{number:03d}{suffix}")
    return root


def test_images_are_found_with_their_class_and_held_out_with_a_public_seed(tmp_path):
    loaded = data.load("image-folder", str(write(tmp_path)), validation_size=4, image_size=32)
    assert (loaded.num_classes, loaded.example_shape) == (2, (3, 32, 32))
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [20, 4, 6]
    seen = set()
    for part in (loaded.train, loaded.validation):
        for index in range(len(part)):
            image, label = part[index]
            assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)
            assert (image[0] == 40 * (label + 1)).all()
            seen.add((label, int(image[1, 0, 0])))
    assert seen == {(label, number) for label in (0, 1) for number in range(12)}
    again = data.load("image-folder", str(tmp_path), validation_size=4, image_size=32)
    assert [again.validation.path(i) for i in range(4)] == [loaded.validation.path(i) for i in range(4)]
    other = data.load("image-folder", str(tmp_path), validation_size=4, image_size=32, split_seed=1)
    assert [other.validation.path(i) for i in range(4)] != [loaded.validation.path(i) for i in range(4)]


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (100, 100), (600, 500)])
def test_evaluation_resizes_the_shorter_side_to_256_and_takes_the_centre_of_224(tmp_path, size):
    # Brightness tells the place, so the centre shows which part was taken and at which scale.
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * (rows + 0.5) / height, 255 * (columns + 0.5) / width, 0 * rows], axis=2).round().astype(np.uint8)
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(pixels).save(tmp_path / part / name / "one.png")
    image, _ = read_folder(tmp_path, 224, None).test[0]
    assert image.shape == (3, 224, 224)
    scale = 256 / min(size)
    for channel, length in ((0, height), (1, width)):
        shown = image[channel].double().mean(1 - channel)
        first = (length * scale - 224) / 2
        expected = 255 * (first + torch.arange(224) + 0.5) / (length * scale)
        assert (shown - expected).abs().max() < 1.6


def test_training_shows_random_parts_and_several_of_one_image_if_asked(tmp_path):
    folder = data.load("image-folder", str(write(tmp_path)), image_size=16).train
    one, label = folder.random_crops()[0]
    assert one.shape == (3, 16, 16)
    several, same = folder.random_crops(3)[0]
    assert several.shape == (3, 3, 16, 16)
    assert label == same
    assert (several[:, 0] == 40 * (label + 1)).all()


def test_random_parts_differ_and_follow_torch(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (80, 90, 3), dtype=np.uint8)
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(2):
                Image.fromarray(noise).save(tmp_path / part / name / f"{number}.png")
    crops = data.load("image-folder", str(tmp_path), image_size=16, validation_size=1).train.random_crops()
    torch.manual_seed(3)
    first = crops[0][0]
    assert not torch.equal(crops[0][0], first)
    torch.manual_seed(3)
    assert torch.equal(crops[0][0], first)


@pytest.mark.parametrize("suffix", [".jpg", ".JPEG", ".png", ".webp"])
def test_files_are_told_by_their_ending_whatever_its_case(tmp_path, suffix):
    loaded = data.load("image-folder", str(write(tmp_path, suffix=suffix)), image_size=8)
    assert len(loaded.test) == 6


def test_grey_and_transparent_images_become_three_channels(tmp_path):
    write(tmp_path)
    Image.fromarray(np.full((30, 30), 7, np.uint8)).save(tmp_path / "val" / "ant" / "000.png")
    Image.fromarray(np.full((30, 30, 4), 0, np.uint8)).save(tmp_path / "val" / "ant" / "001.png")
    test = data.load("image-folder", str(tmp_path), image_size=8).test
    assert (test[0][0] == 7).all()
    assert (test[1][0] == 255).all()


def test_x_rays_are_scaled_by_the_bit_depth_of_the_recipe(tmp_path):
    write(tmp_path)
    Image.fromarray(np.full((30, 30), 2048, np.uint16)).save(tmp_path / "val" / "ant" / "000.png")
    assert (data.load("image-folder", str(tmp_path), image_size=8, bit_depth=12).test[0][0] == 128).all()
    with pytest.raises(InputError, match="bit_depth is 8"):
        data.load("image-folder", str(tmp_path), bit_depth=8)


def test_a_folder_called_test_serves_as_val(tmp_path):
    assert len(data.load("image-folder", str(write(tmp_path, test="test")), image_size=8).test) == 6


def test_files_that_are_no_images_by_their_names_are_passed_over_and_counted(tmp_path):
    write(tmp_path)
    for name in (".DS_Store", "Thumbs.db", "notes.txt", "more.txt", "._000.png", "jane-doe", "jane-roe", ".jane-doe"):
        (tmp_path / "train" / "ant" / name).write_bytes(b"x")
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    loaded = data.load("image-folder", str(tmp_path))
    assert (len(loaded.train) + len(loaded.validation), len(loaded.test)) == (24, 6)
    assert loaded.classes == ("ant", "bee")
    (note,) = loaded.notes
    assert note.startswith("passed over 9 files that are no images by their names: ")
    for kind in ("2 *.txt", "2 hidden", "2 without an ending"):
        assert kind in note
    assert "jane" not in note


def plain(root, users=10):
    """Images in class folders alone; the name tells whose each is."""
    write(root / "parts")
    for number, file in enumerate(sorted((root / "parts" / "train").rglob("*.png"))):
        folder = root / "plain" / file.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        file.rename(folder / f"p{number % users}-{number}.png")
    return root / "plain"


def test_a_stray_file_beside_class_folders_is_counted_and_a_table_is_the_owners_own(tmp_path):
    folder = plain(tmp_path)
    (folder / "notes.txt").write_text("x")
    (folder / "who.csv").write_text("x")
    notes = data.load("image-folder", str(folder)).notes
    assert [note for note in notes if "passed" in note] == ["passed over 1 file that is no image by its name: 1 *.txt"]


def test_a_folder_of_classes_alone_is_split_with_public_seeds(tmp_path):
    folder = str(plain(tmp_path))
    loaded = data.load("image-folder", folder, image_size=8)
    parts = [{part.path(i) for i in range(len(part))} for part in (loaded.train, loaded.validation, loaded.test)]
    assert [len(part) for part in parts] == [17, 2, 5]
    assert len(set().union(*parts)) == 24
    other = data.load("image-folder", folder, image_size=8, split_seed=1)
    assert [other.test.path(i) for i in range(5)] == [loaded.test.path(i) for i in range(5)]
    assert loaded.classes == ("ant", "bee")


def test_no_split_of_a_folder_of_classes_goes_through_a_user(tmp_path):
    loaded = data.load("image-folder", str(plain(tmp_path)), image_size=8, user_pattern=r"(p\d+)-\d+\.png")
    users = [set(ids) for ids in (loaded.train_users, loaded.validation_users, loaded.test_users)]
    assert [len(ids) for ids in users] == [7, 1, 2]
    assert not users[0] & users[1] | users[0] & users[2] | users[1] & users[2]
    for part, ids in ((loaded.train, loaded.train_users), (loaded.test, loaded.test_users)):
        assert [part.path(i).name.partition("-")[0] for i in range(len(part))] == list(ids)


def test_a_class_may_be_called_train(tmp_path):
    folder = plain(tmp_path)
    (folder / "bee").rename(folder / "train")
    assert data.load("image-folder", str(folder), image_size=8).classes == ("ant", "train")


def test_a_fraction_of_0_holds_nothing_out(tmp_path):
    loaded = data.load("image-folder", str(write(tmp_path)), image_size=8, validation_fraction=0)
    assert (len(loaded.train), len(loaded.validation)) == (24, 0)


def test_all_problems_of_a_folder_are_listed_at_once(tmp_path):
    write(tmp_path)
    (tmp_path / "train" / "stray.png").write_bytes(b"x")
    (tmp_path / "train" / "ant" / "scan.dcm").write_bytes(b"x")
    (tmp_path / "val" / "bee" / "inner").mkdir()
    (tmp_path / "val" / "cat").mkdir()
    with pytest.raises(InputError) as refusal:
        data.load("image-folder", str(tmp_path))
    first, *listed = str(refusal.value).splitlines()
    assert first == f"{tmp_path} has 4 problems to remove:"
    for name, line in zip(("stray.png", "cat", "scan.dcm", "inner"), listed, strict=True):
        assert name in line


def wrong_folders():
    def without(part):
        return lambda root: os.rename(root / part, root / f"{part}-gone")

    def foreign(root):
        (root / "train" / "ant" / "scan.DCM").write_text("x")

    def new_class(root):
        (root / "val" / "cat").mkdir()

    def empty(root):
        for path in (root / "val").rglob("*.png"):
            path.unlink()

    return [
        (without("train"), "lacks the folder train"),
        (without("val"), "lacks the folder val"),
        (foreign, "scan.DCM is in a format that is not read"),
        (new_class, "cat is a class that .*train does not have"),
        (empty, "val holds no images"),
    ]


@pytest.mark.parametrize(("break_it", "message"), wrong_folders())
def test_a_folder_that_is_not_in_order_is_refused_by_name(tmp_path, break_it, message):
    break_it(write(tmp_path))
    with pytest.raises(InputError, match=message):
        data.load("image-folder", str(tmp_path))


def test_imagenet_has_a_thousand_classes_unless_one_says_it_is_ones_own(tmp_path):
    with pytest.raises(InputError, match="has 2 class folders, not the 1000 of the published data"):
        data.load("imagenet", str(write(tmp_path)))
    assert data.load("imagenet", str(tmp_path), verify=False, validation_size=2).num_classes == 2


@pytest.mark.parametrize("content", [b"", b"no image at all", None])
def test_a_damaged_image_is_named_but_not_if_it_is_private(tmp_path, content):
    loaded = data.load("image-folder", str(write(tmp_path)), image_size=8, validation_size=2)
    for part, error in ((loaded.train, PrivacyError), (loaded.validation, InputError), (loaded.test, InputError)):
        path = part.path(0)
        path.write_bytes(path.read_bytes()[:60] if content is None else content)
        with pytest.raises(error) as refusal:
            part[0]
        assert (path.name in str(refusal.value)) == (part is not loaded.train)
        with pytest.raises(error):
            part.random_crops()[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_of_the_test_part_is_one_sentence_even_from_a_worker(tmp_path, workers):
    test = data.load("image-folder", str(write(tmp_path)), image_size=8).test
    test.path(3).write_bytes(b"damaged")
    with pytest.raises(InputError) as refusal:
        list(batches(test, 2, workers))
    assert "\n" not in str(refusal.value)
    assert str(test.path(3)) in str(refusal.value)


def test_a_large_folder_is_kept_compactly():
    names = np.array([f"n{n % 1000:08d}/n{n:08d}_{n}.JPEG".encode() for n in range(1000)])
    folder = ImageFolder(os.curdir, names, np.zeros(1000, np.int64), 8)
    assert names.nbytes / len(names) < 64
    assert len(folder.part(torch.arange(10))) == 10
