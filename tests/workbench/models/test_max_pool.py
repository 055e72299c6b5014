"""Tests of maximum pooling with the channels side by side."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dp_microadam.workbench.models.small import ChannelsLastMaxPool2d


@given(
    images=st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(3, 9), st.integers(3, 9)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
)
def test_values_and_gradients_are_those_of_torch(images: tuple[int, int, int, int], kernel: int, stride: int) -> None:
    ours, theirs = ChannelsLastMaxPool2d(kernel, stride), nn.MaxPool2d(kernel, stride)
    some = torch.randn(images, dtype=torch.float64)
    found = some.clone().requires_grad_(), some.clone().requires_grad_()
    pooled = ours(found[0]), theirs(found[1])
    assert torch.equal(pooled[0], pooled[1])
    weights = torch.randn_like(pooled[1])
    for result in pooled:
        (result * weights).sum().backward()
    torch.testing.assert_close(found[0].grad, found[1].grad)


def test_single_examples_can_be_vectorised_over() -> None:
    pool, some = ChannelsLastMaxPool2d(2, 1), torch.randn(3, 2, 5, 5)
    assert torch.equal(torch.func.vmap(pool)(some), nn.MaxPool2d(2, 1)(some))
