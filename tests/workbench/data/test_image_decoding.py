"""Image files of every kind, written by Pillow: each is read as it is meant to be seen, or refused by name."""

import numpy as np
import pytest
import torch
from PIL import Image

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.image_decoding import ResizedCentre, decoded, resized_centre

RAMP = np.linspace(0, 255, 24 * 16).round().astype(np.uint8).reshape(16, 24)


def pixels_of(path, **options) -> np.ndarray:
    image = decoded(path, **options)
    assert image.mode == "RGB"
    return np.array(image)


def save(image, path, **options):
    image.save(path, **options)
    return path


@pytest.mark.parametrize("suffix", [".png", ".tif", ".pgm"])
def test_grey_values_of_16_bits_are_scaled_by_their_bit_depth(tmp_path, suffix):
    path = save(Image.fromarray(RAMP.astype(np.uint16) * 257), tmp_path / f"x{suffix}")
    assert (pixels_of(path) == RAMP[..., None]).all()


def test_a_declared_bit_depth_says_how_many_of_16_bits_are_used(tmp_path):
    values = np.array([[0, 1000, 2047, 4095]], np.uint16)
    path = save(Image.fromarray(values), tmp_path / "x.png")
    assert pixels_of(path, bit_depth=12)[0, :, 0].tolist() == [0, 62, 127, 255]
    assert pixels_of(path)[0, :, 0].tolist() == [0, 4, 8, 16]
    with pytest.raises(InputError, match=r"x\.png has values above 1023, the largest with bit_depth = 10"):
        decoded(path, 10)


def test_a_dark_and_a_bright_image_are_not_stretched_to_the_same(tmp_path):
    """A minimum or maximum of private pixels scales nothing."""
    for value in (300 * 257 // 10, 200 * 257):
        path = save(Image.fromarray(np.full((4, 4), value, np.uint16)), tmp_path / "x.png")
        assert (pixels_of(path) == round(value / 257)).all()


def test_palettes_show_their_colours(tmp_path):
    image = Image.fromarray(RAMP).convert("P")
    image.putpalette([channel for value in range(256) for channel in (255 - value, value, 7)])
    found = pixels_of(save(image, tmp_path / "x.png"))
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
    assert pixels_of(save(image, tmp_path / "x.png", **options))[0, :, 0].tolist() == [0, 0, 255, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(tmp_path, orientation):
    upright = np.zeros((16, 32, 3), np.uint8)
    upright[:8, :16] = 255  # the upper left quarter is white
    back = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: np.rot90(x, 1),
        7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
        8: lambda x: np.rot90(x, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(Image.fromarray(np.ascontiguousarray(back(upright))), tmp_path / "x.jpg", exif=exif, quality=100)
    assert np.abs(pixels_of(path).astype(int) - upright).max() < 8


def test_cmyk_and_one_bit_become_rgb(tmp_path):
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(pixels_of(save(image, tmp_path / "x.jpg", quality=100))[0, 0].astype(int) - [255, 0, 0]).max() < 4
    assert pixels_of(save(image, tmp_path / "x.tif"))[0, 0].tolist() == [255, 0, 0]
    assert set(np.unique(pixels_of(save(Image.fromarray(RAMP > 99), tmp_path / "x.png")))) == {0, 255}


@pytest.mark.parametrize("suffix", [".gif", ".png", ".webp", ".tif"])
def test_animations_and_several_pages_are_refused_by_name(tmp_path, suffix):
    frames = [Image.fromarray(np.full((8, 8), value, np.uint8)).convert("RGB") for value in (0, 90, 200)]
    path = save(frames[0], tmp_path / f"x{suffix}", save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match=rf"x\{suffix} has 3 frames; save the one that is meant"):
        decoded(path)
    assert pixels_of(save(frames[1], tmp_path / f"one{suffix}", lossless=True))[0, 0].tolist() == [90, 90, 90]


@pytest.mark.parametrize(("kind", "message"), [("I", "has 32 bits per pixel, whose"), ("F", "floating-point numbers, whose")])
def test_pixels_of_unknown_range_are_refused_by_name(tmp_path, kind, message):
    with pytest.raises(InputError, match=rf"x\.tif has .*{message.removeprefix('has ')} range is unknown"):
        decoded(save(Image.fromarray(RAMP).convert(kind), tmp_path / "x.tif"))


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp", ".tif", ".ppm"])
def test_a_file_cut_short_is_refused_by_name(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = save(Image.fromarray(noise), tmp_path / f"x{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(InputError, match=rf"x\{suffix} cannot be decoded as an image"):
        decoded(path)
    path.write_text("some notes")
    with pytest.raises(InputError, match=rf"x\{suffix} cannot be decoded as an image \(it holds none\)"):
        decoded(path)


@pytest.mark.parametrize("size", [(37, 190), (190, 37), (28, 28), (32, 32), (3, 5), (1, 1), (64, 300), (131, 77)])
@pytest.mark.parametrize("kind", ["noise", "black and white"])
def test_the_resized_centre_in_torch_is_pillow_s_to_the_byte(size, kind):
    """For deployed models, the same bytes as in evaluation."""
    drawn = np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    pixels = drawn if kind == "noise" else (drawn // 128 * 255).astype(np.uint8)
    by_pillow = torch.from_numpy(np.array(resized_centre(Image.fromarray(pixels), 28))).permute(2, 0, 1)
    by_torch = ResizedCentre(28)(torch.from_numpy(pixels).permute(2, 0, 1)[None])[0]
    assert by_torch.dtype == torch.uint8
    assert torch.equal(by_pillow, by_torch)
