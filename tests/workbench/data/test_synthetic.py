"""Made-up images have the published shapes, so that whatever is measured with them holds for the real ones."""

import pytest
import torch

from dp_microadam.errors import InputError
from dp_microadam.workbench.data.catalogue import KNOWN_DATA, known
from dp_microadam.workbench.data.synthetic import synthetic_images

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)
SHAPES = {"mnist": MNIST, "fashion-mnist": MNIST, "cifar10": CIFAR, "cifar100": CIFAR, "imagenet": (3, 224, 224)}


@pytest.mark.parametrize("name", SHAPES)
def test_synthetic_images_have_the_published_shape_and_classes(name):
    data = synthetic_images(name, 50)
    images, labels = data.train
    assert (images.shape, images.dtype) == ((50, *SHAPES[name]), torch.uint8)
    assert data.example_shape == SHAPES[name]
    assert data.num_classes == known(name).num_classes
    assert labels.min() >= 0
    assert labels.max() < data.num_classes
    assert not torch.equal(images, data.validation[0])


def test_the_size_the_model_sees_can_differ_from_that_of_the_images():
    data = synthetic_images("cifar10", 2, image_size=224)
    assert (data.example_shape, tuple(data.train[0].shape)) == ((3, 224, 224), (2, 3, 32, 32))


def test_coarse_labels_are_of_twenty_classes():
    assert synthetic_images("cifar100", 1, labels="coarse").num_classes == 20


@pytest.mark.parametrize("name", [name for name in KNOWN_DATA if known(name).num_classes is None])
def test_own_data_have_no_synthetic_images(name):
    with pytest.raises(InputError, match="your own"):
        synthetic_images(name, 1)
