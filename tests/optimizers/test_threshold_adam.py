"""ThresholdAdam against a plain twin, closed forms and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_microadam import InputError
from dp_microadam.optimizers import threshold_adam
from dp_microadam.optimizers.tensor_adam import TensorAdam
from dp_microadam.optimizers.threshold_adam import LEVELS, THRESHOLD, ThresholdAdam

SHAPES = [(4, 3), (7,), (1,), (5, 2, 3), (0,)]


def parameters(shapes=SHAPES, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) + 0.2).to(parameter.dtype)


class Twin:
    """The docstring's three lines in float64, one coordinate after the other."""

    def __init__(self, start, lr, threshold, beta=0.999, eps=1e-8):
        self.p, self.v, self.t = [float(x) for x in start], 0.0, 0
        self.level = [0] * len(self.p)
        self.lr, self.c, self.beta, self.eps = lr, threshold, beta, eps

    def step(self, gradient):
        self.t += 1
        self.v = self.beta * self.v + (1 - self.beta) * sum(g * g for g in gradient) / len(gradient)
        root = math.sqrt(self.v / (1 - self.beta**self.t)) + self.eps
        for i, g in enumerate(gradient):
            a = g / root + self.level[i] * self.c / LEVELS
            self.level[i] = 0 if abs(a) > self.c else round(a * LEVELS / self.c)
            self.p[i] -= self.lr * (a - self.level[i] * self.c / LEVELS)


@pytest.mark.parametrize("threshold", [THRESHOLD, 0.7])
def test_a_step_is_the_three_lines_of_the_docstring(threshold):
    params = parameters()
    twins = [Twin(parameter.detach().flatten().tolist(), 0.1, threshold) for parameter in params]
    optimizer = ThresholdAdam(params, lr=0.1, threshold=threshold)
    for step in range(20):
        give(params, step)
        optimizer.step()
        for parameter, twin in zip(params, twins, strict=True):
            if parameter.numel():
                twin.step(parameter.grad.flatten().tolist())
    for parameter, twin in zip(params, twins, strict=True):
        assert torch.allclose(parameter.flatten(), torch.tensor(twin.p), atol=1e-5)
        expected = torch.tensor(twin.level, dtype=torch.float32) * threshold / LEVELS
        assert torch.allclose(optimizer.residual(parameter).flatten(), expected)


@given(
    shapes=st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    threshold=st.sampled_from([0.5, THRESHOLD]),
)
@settings(max_examples=20, deadline=None)
def test_tensors_updated_together_and_one_by_one_agree(shapes, dtype, threshold):
    together, alone = parameters(shapes, dtype=dtype), parameters(shapes, dtype=dtype)
    one = ThresholdAdam(together, threshold=threshold, weight_decay=0.1)
    many = [ThresholdAdam([parameter], threshold=threshold, weight_decay=0.1) for parameter in alone]
    for step in range(4):
        give(together, step)
        give(alone, step)
        one.step()
        for optimizer in many:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


@pytest.mark.skipif(threshold_adam._compiled() is None, reason="torch.compile needs a C++ compiler")
def test_the_compiled_update_is_the_plain_one(monkeypatch):
    plain, compiled = parameters([(31, 5), (64,)]), parameters([(31, 5), (64,)])
    one, other = ThresholdAdam(plain, lr=0.1), ThresholdAdam(compiled, lr=0.1)
    for step in range(6):
        give(plain, step)
        give(compiled, step)
        one.step()
        with monkeypatch.context() as patched:
            patched.setattr(threshold_adam, "_WORTH_COMPILING", 1)
            patched.setattr(threshold_adam, "_COMPILED_FROM", 2)
            other.step()
    for a, b in zip(plain, compiled, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
        assert torch.equal(one.state[a]["residual"], other.state[b]["residual"])


@pytest.mark.parametrize("lr", [0.1, 1.0])
def test_weights_are_those_of_tensor_adam_plus_the_residual_whatever_becomes_of_the_second_moment(lr):
    """Exactly, not in expectation: what four bits cannot hold is in the weights. Gradients change their size a hundredfold."""
    ours, dense = (torch.nn.Parameter(torch.zeros(4001, dtype=torch.float64)) for _ in range(2))
    optimizers = ThresholdAdam([ours], lr=lr, beta=0.5), TensorAdam([dense], lr=lr, beta=0.5)
    generator = torch.Generator().manual_seed(1)
    for step in range(300):
        ours.grad = torch.randn(4001, generator=generator, dtype=torch.float64) * 10 ** (step % 3)
        dense.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours - lr * optimizers[0].residual(ours), dense, rtol=0, atol=1e-9)
    assert optimizers[0].residual(ours).abs().max() <= THRESHOLD + 1e-12
    assert (ours - dense).abs().mean() > 0.5 * lr  # the residual is not nothing


def test_a_signal_far_below_a_level_is_not_lost():
    """A coordinate whose gradient is a thousandth of its tensor's, without noise: rounding alone would lose all of it."""
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = ThresholdAdam([weight], lr=1.0)
    for _ in range(200):
        weight.grad = torch.ones(1000)
        weight.grad[0] = 1e-3
        optimizer.step()
    assert weight[0].item() == pytest.approx(-0.2, rel=1e-3)


def test_under_noise_a_tenth_of_the_coordinates_moves_and_steps_have_the_size_of_adams():
    """Closed form: of a walk that leaves ±c, a crossing needs about (c + 0.583)² steps; 0.583 is the mean overshoot of Gaussian
    steps (Siegmund, 1985)."""
    size, steps = 20_000, 60
    weight = torch.nn.Parameter(torch.zeros(size))
    optimizer = ThresholdAdam([weight], lr=1.0)
    generator = torch.Generator().manual_seed(0)
    moved, squares = [], []
    for _ in range(steps):
        before = weight.detach().clone()
        weight.grad = torch.randn(size, generator=generator)
        optimizer.step()
        change = weight.detach() - before
        moved.append(float((change.abs() > THRESHOLD).float().mean()))
        squares.append(float(change.square().mean()))
    settled = slice(20, None)
    assert np.mean(moved[settled]) == pytest.approx(1 / (THRESHOLD + 0.583) ** 2, rel=0.05)
    assert np.mean(moved[settled]) == pytest.approx(0.1, rel=0.06)
    assert math.sqrt(np.mean(squares[settled])) == pytest.approx(1.0, rel=0.05)


def test_the_state_is_half_a_byte_per_parameter():
    weight = torch.nn.Parameter(torch.zeros(1000, 100))
    weight.grad = torch.ones_like(weight)
    optimizer = ThresholdAdam([weight])
    optimizer.step()
    assert optimizer.state_bytes() <= 0.501 * weight.numel()


def test_launches_do_not_grow_with_the_number_of_tensors_and_are_at_most_twenty(launches_of):
    counts = []
    for tensors in (2, 40):
        params = parameters([(3, 5)] * tensors)
        optimizer = ThresholdAdam(params)
        give(params, 0)
        optimizer.step()
        counts.append(launches_of(optimizer))
    assert counts[0] == counts[1] <= 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state.pop("residual"), "ThresholdAdam's has residual, second_moment, step"),
        (lambda state: state.update(residual=torch.zeros(3, dtype=torch.int8)), "has shape (3,)"),
        (lambda state: state.update(residual=torch.zeros(6)), "torch.float32"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, sentence):
    params = parameters([(4, 3)])
    optimizer = ThresholdAdam(params)
    give(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    change(saved["state"][0])
    with pytest.raises(InputError, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        ThresholdAdam(params).load_state_dict(saved)
