"""Augmentation of whole batches: equal to its twin for the same choices, and random ones are uniform and independent."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.clipping import per_example
from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.errors import InputError
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.data.augmentation import SMALLEST_AREA, WIDEST_RATIO, Augmentation, random_box, random_crop, shifted
from dp_microadam.workbench.recipes.assemble import over_views

# The slow twin: one image and one random number at a time.


def shifted_one(image, top, left, flipped, padding):
    """The crop of the padded image [C, H, W] that starts at (top, left), mirrored if ``flipped``."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
    padded[:, padding : padding + height, padding : padding + width] = image
    part = padded[:, top : top + height, left : left + width]
    return part.flip(2) if flipped else part


def random_images(count, channels=3, height=7, width=6):
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)


@examples(40)
@given(
    count=st.integers(1, 4),
    views=st.integers(1, 3),
    channels=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_shifts_and_flips_of_a_batch_are_those_of_each_image(count, views, channels, height, width, padding, seed):
    torch.manual_seed(seed)
    images = random_images(count, channels, height, width)
    top, left = torch.randint(2 * padding + 1, (2, count * views))
    flipped = torch.rand(count * views) < 0.5
    ours = shifted(images, top, left, flipped, padding)
    for row in range(count * views):  # example-major: the views of image 0 come first
        theirs = shifted_one(images[row // views], int(top[row]), int(left[row]), bool(flipped[row]), padding)
        assert torch.equal(ours[row], theirs)
    assert ours.dtype == torch.uint8


@pytest.mark.parametrize(("height", "width"), [(32, 32), (200, 60), (3, 40), (1, 1)])
def test_random_boxes_lie_inside_the_image_and_their_areas_are_uniform(height, width):
    torch.manual_seed(0)
    boxes = torch.tensor([random_box(height, width) for _ in range(4000)])
    top, left, tall, wide = boxes.T
    assert (boxes >= torch.tensor([0, 0, 1, 1])).all()
    assert (top + tall <= height).all()
    assert (left + wide <= width).all()
    if height == width == 32:  # where nearly all fit: eight standard errors of a uniform share
        share = (tall * wide / (height * width)).mean()
        assert abs(float(share) - (1 + SMALLEST_AREA) / 2) < 8 * 0.27 / math.sqrt(4000) + 0.03
        assert (tall / wide).max() < WIDEST_RATIO * 1.2
        assert len(set(top.tolist())) > 20


def test_a_random_crop_is_a_part_of_its_image_in_its_size():
    torch.manual_seed(0)
    rows = torch.arange(20.0).view(1, 20, 1).expand(2, 20, 30)
    for _ in range(20):
        crop = random_crop(rows)
        assert crop.shape == rows.shape
        assert (crop.diff(dim=1) >= -1e-4).all()  # in order, within the image
        assert (crop >= 0).all()
        assert (crop <= 19).all()


def test_views_of_an_image_and_images_of_a_batch_are_drawn_independently():
    # 5 · 5 · 2 equally likely views: two are equal with probability 1/50. Binomial tails beyond 8 standard deviations: < 1e-14.
    torch.manual_seed(0)
    image = torch.arange(1, 50, dtype=torch.uint8).view(1, 1, 7, 7).expand(20_000, -1, -1, -1)
    views, _ = Augmentation(crop_padding=2, flip=True, multiplicity=2)((image, torch.zeros(20_000)))
    spread = 8 * math.sqrt(20_000 * 0.02 * 0.98)
    within = int((views[:, 0] == views[:, 1]).flatten(1).all(1).sum())
    between = int((views[1:, 0] == views[:-1, 0]).flatten(1).all(1).sum())
    assert abs(within - 400) < spread
    assert abs(between - 400) < spread
    _, counts = views[:, 0].flatten(1).unique(dim=0, return_counts=True)
    assert len(counts) == 5 * 5 * 2  # all shifts, each mirrored and not
    assert (counts - 400).abs().max() < spread


@pytest.mark.parametrize(
    "options", [{"crop_padding": 2}, {"flip": True}, {"resized_crop": True}, {"flip": True, "crop_padding": 1}]
)
@pytest.mark.parametrize("views", [1, 3])
def test_views_keep_their_label_and_come_example_major(options, views):
    images = (torch.arange(4, dtype=torch.uint8) * 50 + 50).view(4, 1, 1, 1).expand(4, 2, 9, 9)
    labels = torch.arange(4)
    seen, kept = Augmentation(**options, multiplicity=views)((images, labels))
    assert torch.equal(kept, labels)
    assert seen.shape == ((4, 2, 9, 9) if views == 1 else (4, views, 2, 9, 9))
    middle = seen[..., 4, 4].float().flatten(1)
    torch.testing.assert_close(middle, (labels * 50.0 + 50).view(4, 1).expand_as(middle))


def test_images_are_resized_first_and_an_empty_batch_stays_empty():
    seen, _ = Augmentation(crop_padding=4, size=(24, 24))((random_images(2), torch.zeros(2)))
    assert seen.shape == (2, 3, 24, 24)
    for options in ({"crop_padding": 1, "flip": True}, {"resized_crop": True}, {}):
        for views in (1, 2):
            assert len(Augmentation(**options, multiplicity=views)((random_images(0), torch.zeros(0)))[0]) == 0


def test_randomness_is_torchs_own():
    batch = (random_images(16), torch.zeros(16))
    for options in ({"crop_padding": 2, "flip": True}, {"resized_crop": True, "flip": True}):
        augment = Augmentation(**options)
        torch.manual_seed(1)
        first, other = augment(batch)[0], augment(batch)[0]
        torch.manual_seed(1)
        assert torch.equal(augment(batch)[0], first)
        assert not torch.equal(other, first)


def test_wrong_settings_are_refused():
    for wrong in ({"crop_padding": -1}, {"multiplicity": 0}, {"crop_padding": 4, "resized_crop": True}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Augmentation(**wrong)


def small_network():
    first, last = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4 * 6 * 6, 4)
    return torch.nn.Sequential(first, torch.nn.GroupNorm(2, 4), torch.nn.ReLU(), torch.nn.Flatten(), last)


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_views_are_averaged_inside_the_clip_as_the_slow_twin_does(clipping):
    torch.manual_seed(0)
    model = small_network().double()
    images, labels = Augmentation(crop_padding=2, flip=True, multiplicity=3)(
        (random_images(3, 3, 8, 8), torch.tensor([0, 1, 3]))
    )
    batch = (images.double() / 255, labels)
    loss = over_views(class_loss, (3, 8, 8))
    engine = ClippedGradients(model, loss, max_grad_norm=0.5, clipping=clipping)
    norms = engine.accumulate(batch)
    expected, expected_norms = per_example.clipped_sum(model, loss, batch, max_grad_norm=0.5)
    if clipping == "per-layer":
        assert sum(float(total.square().sum()) for total in engine.sums.values()) ** 0.5 <= 3 * 0.5 * (1 + 1e-5)
        return
    torch.testing.assert_close(norms, torch.tensor(expected_norms, dtype=norms.dtype))
    for name, total in engine.sums.items():
        torch.testing.assert_close(total, expected[name])
    # And from its definition: the mean of the gradients of the views, each view an example of its own.
    alone = (batch[0].flatten(0, 1), labels.repeat_interleave(3))
    by_view = per_example.per_example_gradients(model, class_loss, alone)
    for example in range(3):
        parts = by_view[3 * example : 3 * example + 3]
        mean = {name: sum(part[name] for part in parts) / 3 for name in parts[0]}
        assert per_example.norm(mean) == pytest.approx(expected_norms[example])
