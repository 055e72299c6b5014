"""Models by name: each takes the images it says it takes, and each trains privately."""

import pytest
import torch
import torch.nn.functional as F

from dp_microadam.clipping.engine import ClippedGradients
from dp_microadam.errors import InputError
from dp_microadam.workbench import models
from dp_microadam.workbench.models import registry

SMALL = {
    "mlp": ((1, 28, 28), {"hidden": [16, 8]}),
    "tanh-cnn": ((1, 28, 28), {}),
    "small-cnn": ((1, 28, 28), {"width": 4}),
    "wide-resnet": ((3, 8, 8), {"depth": 10, "width": 1}),
    "nf-resnet-50": ((3, 32, 32), {"width": 1}),
    "deit-tiny": ((3, 8, 8), {"resolution": 32}),
    "vit-tiny": ((3, 32, 32), {"resolution": 16}),
}
"""Larger transformers differ from the tiny one by three numbers."""


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("num_classes", [1, 7])
def test_a_model_gives_one_score_per_class(name, num_classes):
    shape, options = SMALL[name]
    assert models.build(name, num_classes, shape, **options)(torch.randn(3, *shape)).shape == (3, num_classes)


# Others of their kind are clipped in test_private_training.py.
LARGE = ("nf-resnet-50", "deit-tiny", "vit-tiny")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in SMALL])
def test_per_example_gradients_of_a_model_can_be_clipped(name):
    shape, options = SMALL[name]
    model = models.build(name, 10, shape, **options)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    engine = ClippedGradients(model, loss, max_grad_norm=1.0)
    norms = engine.accumulate((torch.randn(4, *shape), torch.arange(4)))
    assert norms.shape == (4,)
    assert sum(total.square().sum() for total in engine.sums.values()).sqrt() <= 4 * (1 + 1e-5)


def test_every_kind_of_model_is_tried():
    kinds = {name.partition("-")[0] for name in registry.BUILDERS} - {"hugging"}  # tests/workbench/recipes/test_texts.py
    assert kinds == {name.partition("-")[0] for name in SMALL}


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 8, 8), (2, 9, 31)])
def test_the_five_layer_network_takes_any_channels_and_sizes_from_eight(shape):
    model = models.build("small-cnn", 10, shape, width=4)
    assert model(torch.randn(2, *shape)).shape == (2, 10)
    with_weights = [module for module in model if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(with_weights) == 5


def test_the_network_of_papernot_et_al_has_its_26010_parameters():
    assert sum(p.numel() for p in models.build("tanh-cnn", 10, (1, 28, 28)).parameters()) == 26_010


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tanh-cnn", (3, 32, 32)),
        ("tanh-cnn", (3, 28, 28)),
        ("small-cnn", (3, 7, 32)),
        ("wide-resnet", (1, 28, 28)),
        ("nf-resnet-50", (3, 31, 64)),
        ("nf-resnet-50", (1, 64, 64)),
        ("deit-tiny", (1, 28, 28)),
        ("vit-base", (3, 32, 48)),
    ],
)
def test_images_a_model_cannot_take_are_refused(name, shape):
    with pytest.raises(InputError, match=rf"model {name} takes .*; these are {shape[1]}×{shape[2]} with {shape[0]} channels"):
        models.build(name, 10, shape)


def test_an_unknown_model_or_option_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"model is 'resnet'; it must be one of 'mlp', 'tanh-cnn'"):
        models.build("resnet", 10, (1, 28, 28))
    with pytest.raises(InputError, match="model mlp does not take hiden; did you mean hidden"):
        models.build("mlp", 10, (1, 28, 28), hiden=3)
    with pytest.raises(InputError, match="model tanh-cnn does not take width; it takes no keyword arguments"):
        models.build("tanh-cnn", 10, (1, 28, 28), width=3)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("mlp", "hidden", 0),
        ("mlp", "hidden", [16, 0]),
        ("mlp", "hidden", "16"),
        ("mlp", "hidden", 16.0),
        ("mlp", "hidden", True),
        ("small-cnn", "width", "wide"),
        ("wide-resnet", "depth", 12),
        ("wide-resnet", "groups", 3),
        ("wide-resnet", "weight_standardization", "yes"),
        ("nf-resnet-50", "alpha", "0.2"),
        ("nf-resnet-50", "skip_gain", True),
        ("nf-resnet-50", "stochastic_depth", 1.5),
        ("nf-resnet-50", "gain", 1),
        ("vit-tiny", "resolution", "large"),
        ("vit-tiny", "patch_size", 0.5),
        ("vit-tiny", "trainable", "none"),
        ("vit-tiny", "pretrained", 3),
    ],
)
def test_a_wrong_option_is_refused_by_name(name, option, value):
    with pytest.raises(InputError, match=f"^{option} is "):
        models.build(name, 10, SMALL[name][0] if name != "small-cnn" else (3, 32, 32), **{option: value})


@pytest.mark.parametrize(("hidden", "widths"), [(32, [32]), ([32, 16], [32, 16]), ([], [])])
def test_an_mlp_has_the_hidden_layers_asked_for(hidden, widths):
    layers = [layer for layer in models.mlp(12, hidden, 3) if isinstance(layer, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [*widths, 3]
    assert layers[0].in_features == 12
