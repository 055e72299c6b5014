"""What happens to a batch before the model sees it is refused where examples meet, and accepted where they do not."""

import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from thoroughness import THOROUGH
from torch import Tensor, nn

from dp_microadam import InputError
from dp_microadam.clipping.checks.transform import check_transform
from dp_microadam.workbench.data.augmentation import Augmentation

Batch = tuple[Tensor, Tensor]


def images(count: int = 9, dtype: torch.dtype = torch.uint8) -> Batch:
    pixels = torch.randint(256, (count, 3, 12, 12), dtype=torch.uint8)
    return pixels.to(dtype) / 255 if dtype.is_floating_point else pixels, torch.randint(10, (count,))


MODEL = nn.Linear(1, 1)


def check(transform: Callable, batch: object = None, seed: int | None = None) -> None:
    check_transform(transform, images() if batch is None else batch, MODEL, what="augment", seed=seed)


def on_pixels(change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    return lambda batch: (change(batch[0].float()), batch[1])


def mixup(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def cutmix(batch: Batch) -> Batch:
    pixels, labels = batch[0].clone(), batch[1]
    pixels[:, :, :4, :4] = pixels.roll(1, 0)[:, :, :4, :4]
    return pixels, labels


def mixed_labels(batch: Batch) -> Batch:
    labels = F.one_hot(batch[1], 10).float()
    return batch[0], 0.9 * labels + 0.1 * labels.roll(1, 0)


class MovingMean:
    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def __call__(self, batch: Batch) -> Batch:
        self.mean = 0.9 * self.mean + 0.1 * batch[0].float().mean()
        return batch[0].float() - self.mean, batch[1]


def without_contradictions(batch: Batch) -> Batch:
    """Examples that occur with another label are blank."""
    pixels = batch[0].flatten(1).float()
    contradicted = ((pixels[:, None] == pixels).all(2) & (batch[1][:, None] != batch[1])).any(1)
    return batch[0] * ~contradicted.view(-1, 1, 1, 1), batch[1]


def without_near_copies(x: Tensor) -> Tensor:
    apart = (x.flatten(1)[:, None] - x.flatten(1)).abs().sum(2)
    return x * ~(apart < 2).tril(-1).any(1).view(-1, 1, 1, 1)


MIXING = {
    "without contradictions": without_contradictions,
    "without near copies": on_pixels(without_near_copies),
    "mixup by NumPy": on_pixels(lambda x: x + np.random.beta(0.2, 0.2) * (x[np.random.permutation(len(x))] - x)),  # noqa: NPY002
    "cutmix": cutmix,
    "labels of neighbours": mixed_labels,
    "standardized by channel": on_pixels(lambda x: F.batch_norm(x, None, None, training=True)),
    "divided by the largest": on_pixels(lambda x: x / x.max()),
    "padded to the largest label": lambda b: (b[0], F.one_hot(b[1]).float()),
    "large batches only": on_pixels(lambda x: x - x.mean(0) if len(x) > 5 else x),
    "if bright": on_pixels(lambda x: x - x.mean(0) if x.max() > 200 else x),
    "pairs only": on_pixels(lambda x: x - x.mean(0) if len(x) == 2 else x),
}


@pytest.mark.parametrize("kind", MIXING)
def test_a_transform_that_mixes_examples_is_refused(kind):
    with pytest.raises(InputError, match="augment mixes examples"):
        check(MIXING[kind])


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_a_transform_that_mixes_at_random_is_refused(draw):
    # Each of 33 seeds finds it with probability 1/2 · 5/6; all miss it with less than 2e-8.
    with pytest.raises(InputError, match="augment mixes examples"):
        check(on_pixels(lambda x: mixup(x) if draw() < 0.5 else x))


ROWS = {
    "a copy of each": lambda b: torch.cat([b, 0.99 * b]),
    "two views as rows": lambda b: b.repeat_interleave(2, 0),
    "without the last": lambda b: b[:-1],
}


@pytest.mark.parametrize("kind", ROWS)
def test_more_or_fewer_rows_than_examples_are_refused(kind):
    with pytest.raises(InputError, match=r"makes \d rows of 3 examples.*\[B, K, \.\.\.\]"):
        check(ROWS[kind], torch.rand(9, 4))


def test_a_transform_that_keeps_something_of_earlier_batches_is_refused():
    with pytest.raises(InputError, match="keeps something of batches"):
        check(MovingMean())


def test_a_generator_that_cannot_be_rewound_is_refused():
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(InputError, match="generator of its own"):
        check(on_pixels(lambda x: x + torch.rand(x.shape, generator=generator)))


def test_a_transform_that_takes_no_synthetic_examples_is_refused_with_a_sentence():
    def picky(batch: Batch) -> Batch:
        raise KeyError("nothing of this is shown")

    with pytest.raises(InputError, match="augment cannot be checked: it raises KeyError") as refusal:
        check(picky)
    assert "nothing of this" not in str(refusal.value)


def image_by_image(change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    return lambda batch: (torch.stack([change(image) for image in batch[0]]), batch[1])


def cropped(image: Tensor) -> Tensor:
    top, left = (int(torch.randint(4, ())) for _ in range(2))
    return image[:, top : top + 8, left : left + 8].float() * (0.5 + torch.rand(1))


def until_bright_enough(image: Tensor) -> Tensor:
    while torch.rand(()) < 0.5:
        image = image / 2
    return image.float()


FROZEN = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.Flatten(), nn.Linear(800, 16)).eval()

APART = {
    "flip and crop": Augmentation(crop_padding=4, flip=True),
    "views in a dimension of their own": Augmentation(crop_padding=2, flip=True, multiplicity=4),
    "resized views": Augmentation(resized_crop=True, multiplicity=3, size=(8, 8)),
    "by the largest pixel of each": on_pixels(lambda x: x / x.amax((1, 2, 3), keepdim=True).clamp(min=1)),
    "standardized one by one": on_pixels(lambda x: F.layer_norm(x, x.shape[1:])),
    "by public constants": on_pixels(lambda x: (x / 255 - 0.5) / 0.25),
    "dropout of pixels": on_pixels(lambda x: F.dropout(x, 0.3)),
    "one coin for the batch": on_pixels(lambda x: x.flip(3) if torch.rand(()) < 0.5 else x),
    "one by one by torch": image_by_image(cropped),
    "one by one by Python": image_by_image(lambda x: x.flip(2) if random.random() < 0.5 else x),
    "one by one by NumPy": on_pixels(lambda x: x * torch.as_tensor(np.random.rand(len(x), 1, 1, 1))),  # noqa: NPY002
    "as long as it takes": image_by_image(until_bright_enough),
    "features of a frozen network": on_pixels(lambda x: FROZEN(F.pad(x, (0, 0)) / 255)),
    "smoothed labels": lambda b: (b[0], 0.9 * F.one_hot(b[1], 10).float() + 0.01),
    "written in place": lambda b: (b[0].float().mul_(2), b[1].add_(1)),
}


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("dtype", [torch.uint8, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_transform_that_treats_examples_one_by_one_is_accepted(kind, dtype):
    for seed in (None, 0, 1) if THOROUGH else (None,):
        with torch.no_grad():
            check(APART[kind], images(dtype=dtype), seed)


def test_texts_are_made_up_and_checked():
    def lengths(batch: dict) -> Tensor:
        return torch.tensor([[float(ord(letter)) for letter in text[:4]] for text in batch["text"]])

    batch = {"text": ["some", "words", "about", "people"], "label": torch.zeros(4)}
    check(lengths, batch)
    check(lengths, {"text": batch["text"]})
    with pytest.raises(InputError, match="mixes examples"):
        check(lambda b: lengths(b) - lengths(b).mean(0), batch)


FILLED_IN = {
    "NaN by the mean": (lambda x: torch.where(x.isnan(), x.nanmean(0).expand_as(x), x), True),
    "all zero if one is NaN": (lambda x: x * 0 if x.isnan().any() else x, True),
    "by the example's mean": (lambda x: torch.where(x.isnan(), x.nanmean(1, keepdim=True), x), False),
    "by a constant": (torch.nan_to_num, False),
    "dropout": (lambda x: F.dropout(x.nan_to_num(), 0.3), False),
}


@pytest.mark.parametrize("kind", FILLED_IN)
def test_missing_numbers_filled_in_from_the_batch_are_refused(kind):
    change, mixes = FILLED_IN[kind]
    batch = torch.rand(8, 6), torch.randint(3, (8,))
    with pytest.raises(InputError, match="augment mixes examples") if mixes else nullcontext():
        check(lambda b: (change(b[0]), b[1]), batch)


def test_columns_of_booleans_and_complex_numbers_can_be_checked():
    batch = torch.rand(5, 4), torch.rand(5, 4) > 0.5, torch.rand(5, 2, dtype=torch.complex64)
    check(lambda b: (b[0] * b[1], b[1], b[2].abs()), batch)
    with pytest.raises(InputError, match="augment mixes examples"):
        check(lambda b: (b[0] * b[1].any(0), b[1]), batch)


def test_the_check_uses_no_value_and_leaves_all_random_streams_as_they_were():
    def noisy(batch: Tensor) -> Tensor:
        assert not (batch == 7.25).any(), "a value of the batch"
        return batch + torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002

    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    check(noisy, torch.full((5, 3), 7.25))
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert (np.random.get_state()[1] == streams[2]).all()  # noqa: NPY002
