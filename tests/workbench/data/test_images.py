"""Image files: how each is read, what is found in folders, whose each image is, and what happens to damaged ones."""

import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.workbench import data
from dp_microadam.workbench.data.images import ImageFolder
from dp_microadam.workbench.data.raw import decoded

PARTS = ("train", "validation", "test")


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


def load(folder, **options):
    return data.load("image-folder", str(folder), **{"image_size": 8, **options})


def paths(part):
    return [part.path(index) for index in range(len(part))]


def test_images_are_found_with_their_class_and_held_out_with_a_public_seed(tmp_path):
    loaded = load(write(tmp_path), validation_size=4, image_size=32)
    assert (loaded.num_classes, loaded.example_shape, loaded.classes) == (2, (3, 32, 32), ("ant", "bee"))
    assert [len(getattr(loaded, part)) for part in PARTS] == [20, 4, 6]
    seen = set()
    for part in (loaded.train, loaded.validation):
        for index in range(len(part)):
            image, label = part[index]
            assert (image.shape, image.dtype) == ((3, 32, 32), torch.uint8)
            assert (image[0] == 40 * (label + 1)).all()
            seen.add((label, int(image[1, 0, 0])))
    assert seen == {(label, number) for label in (0, 1) for number in range(12)}
    assert paths(load(tmp_path, validation_size=4).validation) == paths(loaded.validation)
    assert paths(load(tmp_path, validation_size=4, split_seed=1).validation) != paths(loaded.validation)
    nothing = load(tmp_path, validation_fraction=0)
    assert (len(nothing.train), len(nothing.validation)) == (24, 0)


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (100, 100), (600, 500)])
def test_evaluation_resizes_the_shorter_side_to_256_and_takes_the_centre_of_224(tmp_path, size):
    # Brightness tells the place, so the centre shows which part was taken and at which scale.
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * (rows + 0.5) / height, 255 * (columns + 0.5) / width, 0 * rows], axis=2).round().astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    image, _ = ImageFolder(tmp_path, np.array([b"one.png"]), np.zeros(1, np.int64), 224)[0]
    assert image.shape == (3, 224, 224)
    scale = 256 / min(size)
    for channel, length in ((0, height), (1, width)):
        shown = image[channel].double().mean(1 - channel)
        expected = 255 * ((length * scale - 224) / 2 + torch.arange(224) + 0.5) / (length * scale)
        assert (shown - expected).abs().max() < 1.6


def test_training_shows_random_parts_that_follow_torch_and_several_of_one_image_if_asked(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (80, 90, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "one.png")
    folder = ImageFolder(tmp_path, np.array([b"one.png"]), np.ones(1, np.int64), 16)
    torch.manual_seed(3)
    first, label = folder.random_crops()[0]
    assert (first.shape, label) == ((3, 16, 16), 1)
    assert not torch.equal(folder.random_crops()[0][0], first)
    torch.manual_seed(3)
    assert torch.equal(folder.random_crops()[0][0], first)
    assert folder.random_crops(3)[0][0].shape == (3, 3, 16, 16)


@pytest.mark.parametrize(("suffix", "test"), [(".jpg", "test"), (".JPEG", "val"), (".webp", "val")])
def test_files_are_told_by_their_ending_whatever_its_case_and_the_test_part_by_its_name(tmp_path, suffix, test):
    assert len(load(write(tmp_path, suffix=suffix, test=test)).test) == 6


def test_files_without_an_image_extension_are_skipped_and_counted(tmp_path):
    write(tmp_path)
    for name in (".DS_Store", "Thumbs.db", "notes.txt", "more.txt", "._000.png", "jane-doe", "jane-roe", ".jane-doe"):
        (tmp_path / "train" / "ant" / name).write_bytes(b"x")
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    loaded = load(tmp_path)
    assert (len(loaded.train) + len(loaded.validation), len(loaded.test)) == (24, 6)
    assert loaded.classes == ("ant", "bee")
    assert loaded.notes == ("skipped 9 files without an image extension",)


def plain(root, users=10):
    """Images in class folders alone; the name tells whose each is."""
    write(root / "parts")
    for number, file in enumerate(sorted((root / "parts" / "train").rglob("*.png"))):
        folder = root / "plain" / file.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        file.rename(folder / f"p{number % users}-{number}.png")
    return root / "plain"


def test_a_folder_of_classes_alone_is_split_with_public_seeds(tmp_path):
    folder = plain(tmp_path)
    (folder / "notes.txt").write_text("x")
    loaded = load(folder)
    parts = [set(paths(getattr(loaded, part))) for part in PARTS]
    assert [len(part) for part in parts] == [17, 2, 5]
    assert len(set().union(*parts)) == 24
    assert paths(load(folder, split_seed=1).test) == paths(loaded.test)
    assert "skipped 1 file " in loaded.notes[0]


def test_all_problems_of_a_folder_are_listed_at_once(tmp_path):
    write(tmp_path)
    (tmp_path / "train" / "stray.png").write_bytes(b"x")
    (tmp_path / "train" / "ant" / "scan.dcm").write_bytes(b"x")
    (tmp_path / "val" / "bee" / "inner").mkdir()
    (tmp_path / "val" / "cat").mkdir()
    with pytest.raises(InputError) as refusal:
        load(tmp_path)
    first, *listed = str(refusal.value).splitlines()
    assert first == "the data have 4 problems to remove:"
    for name, line in zip(("stray.png", "cat", "scan.dcm", "inner"), listed, strict=True):
        assert name in line


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda root: os.rename(root / "train", root / "gone"), "lacks the folder train"),
        (lambda root: os.rename(root / "val", root / "gone"), "lacks the folder val"),
        (lambda root: (root / "train" / "ant" / "scan.DCM").write_text("x"), "scan.DCM is in a format that is not read"),
        (lambda root: [shutil.rmtree(root / part / "bee") for part in ("train", "val")], "has a single class folder, ant"),
        (lambda root: (root / "val" / "cat").mkdir(), "cat is a class that .*train does not have"),
        (lambda root: [path.unlink() for path in (root / "val").rglob("*.png")], "val holds no images"),
    ],
)
def test_a_folder_that_is_not_in_order_is_refused_by_name(tmp_path, break_it, message):
    break_it(write(tmp_path))
    with pytest.raises(InputError, match=message):
        load(tmp_path)


def test_imagenet_has_a_thousand_classes_unless_one_says_it_is_ones_own(tmp_path):
    with pytest.raises(InputError, match="has 2 class folders, not the 1000 of the published data"):
        data.load("imagenet", str(write(tmp_path)))
    assert data.load("imagenet", str(tmp_path), verify=False, validation_size=2).num_classes == 2


@pytest.mark.parametrize("content", [b"no image at all", None])
def test_a_damaged_image_is_named_but_not_if_it_is_private(tmp_path, content):
    loaded = load(write(tmp_path), validation_size=2)
    for part, error in ((loaded.train, PrivacyError), (loaded.validation, InputError), (loaded.test, InputError)):
        path = part.path(0)
        path.write_bytes(path.read_bytes()[:60] if content is None else content)
        with pytest.raises(error) as refusal:
            part[0]
        assert (path.name in str(refusal.value)) == (part is not loaded.train)
        with pytest.raises(error):
            part.random_crops()[0]


@pytest.fixture
def patients(tmp_path):
    """Images of nine patients, each in both classes; another two in the test part."""
    for part, numbers in (("train", range(9)), ("val", (20, 21))):
        for name in ("ant", "bee"):
            (tmp_path / part / name).mkdir(parents=True)
            for patient in numbers:
                for number in range(patient % 3 + 1):
                    Image.new("RGB", (4, 4)).save(tmp_path / part / name / f"p{patient}_{number}.png")
    return tmp_path


def table_of(folder, only=""):
    files = (path for path in sorted(folder.rglob("*.png")) if str(path.relative_to(folder)).startswith(only))
    rows = "".join(f"{file.name.partition('_')[0]},{file.relative_to(folder)}\n" for file in files)
    (folder / "users.csv").write_text("user,file\n" + rows)


@pytest.mark.parametrize("options", [{"user_table": "users.csv"}, {"user_pattern": r"(p\d+)_\d+\.png"}])
def test_images_have_the_users_of_their_table_or_names_and_each_is_in_one_part(patients, options):
    table_of(patients)
    loaded = load(patients, validation_size=3, **options)
    found = []
    for part in PARTS:
        users = getattr(loaded, f"{part}_users")
        assert [path.name.partition("_")[0] for path in paths(getattr(loaded, part))] == users.tolist()
        found.append(set(users))
    assert [len(users) for users in found] == [6, 3, 2]
    assert len(set.union(*found)) == 11


def test_a_table_of_users_may_leave_out_the_test_part(patients):
    table_of(patients, only="train")
    assert load(patients, user_table="users.csv").test_users is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"user_table": "users.csv", "user_pattern": "(.*)"}, "it must have one of them"),
        ({"user_table": "nobody.csv"}, "nobody.csv cannot be read: No such file"),
        ({"user_table": 3}, "data_options.user_table is 3; it must be a string"),
        ({"user_pattern": ""}, "data_options.user_pattern is ''; it must be a string"),
        ({"user_pattern": "(p"}, "it must be a regular expression"),
        ({"user_pattern": "p.*"}, "with 0 groups; it must have one group"),
        ({"user_pattern": "(p)(.*)"}, "with 2 groups; it must have one group"),
        ({"user_pattern": r"(p\d+)"}, "has an image without a user by user_pattern"),
        ({"user_pattern": r"p\d+_(\d)\.png"}, "examples of the same user in the training part and in the test part"),
        ({"user_table": "partly.csv"}, "has an image without a user by .*partly.csv; .* data check RECIPE"),
        ({"user_table": "twice.csv"}, "twice.csv has a row that gives a file another user than before"),
        ({"user_table": "names.csv"}, "must have one column 'file' and one column 'user'"),
        ({"user_table": "bytes.csv"}, "bytes.csv has a row that is not valid UTF-8"),
    ],
)
def test_users_of_images_that_cannot_be_used_are_one_sentence_that_names_no_image(patients, options, message):
    table_of(patients)
    text = (patients / "users.csv").read_text()
    (patients / "partly.csv").write_text(text.replace("p3,train/bee/p3_0.png\n", ""))
    (patients / "twice.csv").write_text(text + "p4,train/bee/p3_0.png\n")
    (patients / "names.csv").write_text(text.replace("user,file", "patient,file"))
    (patients / "bytes.csv").write_bytes(text.encode() + b"p4,\xff")
    with pytest.raises(InputError, match=message) as refusal:
        load(patients, **options)
    assert "\n" not in str(refusal.value)
    assert "_0.png" not in str(refusal.value)


RAMP = np.linspace(0, 255, 24 * 16).round().astype(np.uint8).reshape(16, 24)


def seen(path, **options) -> np.ndarray:
    image = decoded(path, **options)
    assert image.mode == "RGB"
    return np.array(image)


def saved(image, path, **options):
    image.save(path, **options)
    return path


@pytest.mark.parametrize("suffix", [".png", ".tif", ".pgm"])
def test_grey_values_of_16_bits_are_scaled_by_their_bit_depth(tmp_path, suffix):
    path = saved(Image.fromarray(RAMP.astype(np.uint16) * 257), tmp_path / f"x{suffix}")
    assert (seen(path) == RAMP[..., None]).all()


def test_a_declared_bit_depth_says_how_many_of_16_bits_are_used(tmp_path):
    values = np.array([[0, 1000, 2047, 4095]], np.uint16)
    path = saved(Image.fromarray(values), tmp_path / "x.png")
    assert seen(path, bit_depth=12)[0, :, 0].tolist() == [0, 62, 127, 255]
    assert seen(path)[0, :, 0].tolist() == [0, 4, 8, 16]
    with pytest.raises(InputError, match=r"x\.png has values above 1023, the largest with bit_depth = 10"):
        decoded(path, 10)


def test_a_dark_and_a_bright_image_are_not_stretched_to_the_same(tmp_path):
    """A minimum or maximum of private pixels scales nothing."""
    for value in (300 * 257 // 10, 200 * 257):
        path = saved(Image.fromarray(np.full((4, 4), value, np.uint16)), tmp_path / "x.png")
        assert (seen(path) == round(value / 257)).all()


def test_palettes_show_their_colours(tmp_path):
    image = Image.fromarray(RAMP).convert("P")
    image.putpalette([channel for value in range(256) for channel in (255 - value, value, 7)])
    found = seen(saved(image, tmp_path / "x.png"))
    assert (found == np.stack([255 - RAMP, RAMP, np.full_like(RAMP, 7)], 2)).all()


@pytest.mark.parametrize("kind", ["RGBA", "LA", "palette"])
def test_transparent_pixels_are_laid_over_white(tmp_path, kind):
    hidden = np.zeros((4, 4, 4), np.uint8)
    hidden[..., 3] = [[255, 255, 0, 0]] * 4
    image = Image.fromarray(hidden)
    options = {}
    if kind == "LA":
        image = image.convert("LA")
    if kind == "palette":
        image = Image.fromarray(np.array([[0, 0, 1, 1]] * 4, np.uint8)).convert("P")
        image.putpalette([0, 0, 0, 9, 9, 9])
        options = {"transparency": 1}
    assert seen(saved(image, tmp_path / "x.png", **options))[0, :, 0].tolist() == [0, 0, 255, 255]


def test_photographs_are_turned_upright(tmp_path):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255  # the upper left quarter is white
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(Image.fromarray(np.ascontiguousarray(np.rot90(upright))), tmp_path / "x.jpg", exif=exif, quality=100)
    assert np.abs(seen(path).astype(int) - upright).max() < 8


def test_cmyk_and_one_bit_become_rgb(tmp_path):
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(seen(saved(image, tmp_path / "x.jpg", quality=100))[0, 0].astype(int) - [255, 0, 0]).max() < 4
    assert seen(saved(image, tmp_path / "x.tif"))[0, 0].tolist() == [255, 0, 0]
    assert set(np.unique(seen(saved(Image.fromarray(RAMP > 99), tmp_path / "x.png")))) == {0, 255}


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".tif"])
def test_animations_and_several_pages_are_refused_by_name(tmp_path, suffix):
    frames = [Image.fromarray(np.full((8, 8), value, np.uint8)).convert("RGB") for value in (0, 90, 200)]
    path = saved(frames[0], tmp_path / f"x{suffix}", save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match=rf"x\{suffix} has 3 frames; save the one that is meant"):
        decoded(path)
    assert seen(saved(frames[1], tmp_path / f"one{suffix}", lossless=True))[0, 0].tolist() == [90, 90, 90]


@pytest.mark.parametrize(("kind", "message"), [("I", "has 32 bits per pixel, whose"), ("F", "floating-point numbers, whose")])
def test_pixels_of_unknown_range_are_refused_by_name(tmp_path, kind, message):
    with pytest.raises(InputError, match=rf"x\.tif has .*{message.removeprefix('has ')} range is unknown"):
        decoded(saved(Image.fromarray(RAMP).convert(kind), tmp_path / "x.tif"))


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp", ".tif", ".ppm"])
def test_a_file_cut_short_is_refused_by_name(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = saved(Image.fromarray(noise), tmp_path / f"x{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(InputError, match=rf"x\{suffix} cannot be decoded as an image"):
        decoded(path)
    path.write_text("some notes")
    with pytest.raises(InputError, match=rf"x\{suffix} cannot be decoded as an image \(it holds none\)"):
        decoded(path)
