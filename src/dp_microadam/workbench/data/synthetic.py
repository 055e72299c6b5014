"""Random images in the shape of a published data set, for measuring time and memory without the data."""

from __future__ import annotations

import torch
from torch import Tensor

from dp_microadam.errors import InputError
from dp_microadam.workbench.data import cifar, images
from dp_microadam.workbench.data.catalogue import known
from dp_microadam.workbench.data.dataset import LabelledData


def synthetic_images(name: str, count: int, *, image_size: int | None = None, labels: str = "fine") -> LabelledData:
    """``count`` random training, validation and test examples each, in the shape of the data set called ``name``.

    >>> synthetic_images("cifar100", 8).train[0].shape
    torch.Size([8, 3, 32, 32])

    Raises:
        InputError: if it is the user's own data, whose shape is not published.
    """
    data = known(name)
    if data.num_classes is None:
        raise InputError(f"data is {name!r}, which is your own and has no published shape; give its data_folder")
    if data.kind == "text":
        raise InputError(f"data is {name!r}, texts, for which no images can stand; give its data_folder")
    size = image_size or images.SIZE
    shape = data.shape or (3, size, size)
    classes = cifar.num_classes(name, labels) if data.kind == "cifar" else data.num_classes

    def part() -> tuple[Tensor, Tensor]:
        return torch.randint(0, 256, (count, *shape), dtype=torch.uint8), torch.randint(0, classes, (count,))

    seen = shape if image_size is None else (shape[0], image_size, image_size)
    return LabelledData(name, classes, seen, data.mean, data.std, train=part(), validation=part(), test=part())
