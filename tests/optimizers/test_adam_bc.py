"""AdamBC: Adam with the noise taken out of its second moment."""

import pytest
import torch

from dp_microadam.optimizers.adam_bc import AdamBC


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_without_noise_and_with_a_floor_out_of_reach_it_is_adamw_without_eps(decay):
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(40, dtype=torch.float64))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = AdamBC([ours], lr=0.1, floor=1e-300, weight_decay=decay)
    adamw = torch.optim.AdamW([theirs], lr=0.1, eps=0.0, weight_decay=decay)
    for _ in range(20):
        ours.grad = torch.randn(40, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_under_noise_it_finds_the_scale_of_the_signal_where_adam_sees_the_noise():
    # Gradients 1 and 0.01 with noise of deviation 1: Adam sees second moments 2 and 1, AdamBC 1 and nothing. Over 4,000 steps
    # with β₂ = 0.9995 the estimate of v̂ has a deviation of about 0.04; the band below is ten such.
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = AdamBC([param], lr=1.0, betas=(0.9, 0.9995), noise_variance=1.0, floor=0.25)
    for _ in range(4_000):
        param.grad = torch.tensor([1.0, 0.01]) + torch.randn(2)
        optimizer.step()
    state = optimizer.state[param]
    signal = state["second_moment"] / (1 - 0.9995**4_000) - 1.0
    assert signal.tolist() == pytest.approx([1.0, 0.0], abs=0.4)
