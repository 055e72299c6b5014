"""TensorAdam: its formula by hand, its state, and the steps that private training needs of it."""

import numpy as np
import torch

from dp_microadam.optimizers.tensor_adam import TensorAdam


def test_its_steps_are_those_of_the_formula():
    generator = np.random.default_rng(3)
    start, gradients = generator.normal(size=(4, 5)), generator.normal(size=(6, 4, 5))
    lr, beta, eps, decay = 0.1, 0.9, 1e-3, 0.2
    expected, second = start.copy(), 0.0
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = TensorAdam([weight], lr=lr, beta=beta, eps=eps, weight_decay=decay)
    for step, gradient in enumerate(gradients, start=1):
        second = beta * second + (1 - beta) * np.mean(gradient**2)
        expected = expected * (1 - lr * decay) - lr * gradient / (np.sqrt(second / (1 - beta**step)) + eps)
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-6)


def test_its_state_is_one_number_and_a_counter_for_each_tensor():
    model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 10))
    optimizer = TensorAdam(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert optimizer.state_bytes() == 4 * (4 + 8)


def test_a_step_is_linear_in_the_gradient_of_the_tensor():
    """What is added to a gradient in one step and taken from the next is gone: correlated noise cancels."""
    weight = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = TensorAdam([weight], lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        noise = torch.randn(10_000, generator=generator)
        for gradient in (noise, -noise):
            weight.grad = gradient
            optimizer.step()
    # A hundred steps of independent noise would move coordinates by 1e-2·√100 = 0.1. What is left are changes of v̂, whose
    # estimate from 10,000 coordinates varies by 1.4 %.
    assert float(weight.detach().square().mean().sqrt()) < 2e-3


def test_the_step_does_not_depend_on_the_unit_of_the_gradient():
    ends = []
    for unit in (1e-6, 1.0, 1e6):
        weight = torch.nn.Parameter(torch.zeros(50))
        optimizer = TensorAdam([weight], lr=0.1, eps=1e-20)
        for step in range(5):
            weight.grad = unit * torch.randn(50, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ends[2], ends[1], rtol=1e-5, atol=1e-7)
