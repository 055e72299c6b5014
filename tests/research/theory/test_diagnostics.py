"""What diagnostics report is what the optimizer did, and watching changes nothing."""

import numpy as np
import pytest
import torch
from research.theory.diagnostics import MicroAdamDiagnostics

from dp_microadam import MicroAdam
from dp_microadam.errors import InputError
from dp_microadam.optimizers.micro_adam_reference import MicroAdamReference

SHAPES = ((40, 30), (7,), (300,))
OPTIONS = {"lr": 1e-2, "eps": 1e-3, "density": 0.05, "window": 10}


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def give_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def dense(params, reference):
    """The reference's error and window, flat over all parameters."""
    options = reference.param_groups[0]
    states = [reference.state[param] for param in params]
    errors = [
        reference._error(state, options) if state else torch.zeros(p.numel()) for p, state in zip(params, states, strict=True)
    ]
    windows = [state["window"] if state else torch.zeros(10, p.numel()) for p, state in zip(params, states, strict=True)]
    return torch.cat(errors).double(), torch.cat(windows, dim=1).double()


@pytest.mark.parametrize("quantize", [True, False])
def test_every_figure_is_that_of_the_reference(quantize):
    """Steps 1, 2 … 14 are all measured, and each figure is computed again from the dense twin."""
    params, twins = parameters(), parameters()
    optimizer = MicroAdam(params, quantize=quantize, **OPTIONS)
    reference = MicroAdamReference(twins, quantize=quantize, **OPTIONS)
    diagnostics = MicroAdamDiagnostics(optimizer, every=1)
    ever = torch.zeros(sum(param.numel() for param in params), dtype=torch.bool)
    for step in range(1, 15):
        give_gradients(params, step)
        give_gradients(twins, step)
        error_before, window_before = dense(twins, reference)
        accumulator = torch.cat([twin.grad.view(-1) for twin in twins]).double() + error_before
        optimizer.step()
        reference.step()
        (found,) = diagnostics.take()
        error, window = dense(twins, reference)
        newest = window[(step - 1) % 10]
        selected = newest != 0
        left = accumulator * ~selected
        ever |= selected
        contraction = float(left.norm() / accumulator.norm())
        quantization = float((error - left).norm() / left.norm())
        assert found["contraction"] == pytest.approx(contraction, rel=1e-5)
        assert found["quantization_error"] == pytest.approx(quantization, rel=1e-4, abs=1e-7)
        assert found["joint_contraction"] == pytest.approx((1 + quantization) * contraction, rel=1e-4)
        assert found["condition_holds"] == (found["joint_contraction"] < 1)
        assert found["share_updated"] == pytest.approx(float(ever.double().mean()))
        previous = window_before[(step - 2) % 10] != 0
        assert found["overlap"] == pytest.approx(float((previous & selected).sum() / selected.sum()))
        ages = torch.tensor([(step - 1 - slot) % 10 for slot in range(10)])
        v_hat = (0.999 ** ages.double()) @ window.square() * (0.001 / (1 - 0.999**step))
        sizes = np.sort((1e-2 / (1e-3 + v_hat[selected].sqrt())).numpy())
        assert found["effective_step_size"] == pytest.approx(sizes[(len(sizes) - 1) // 2], rel=1e-4)


def test_the_optimizer_of_the_paper_breaks_the_theorems_condition():
    """1 % density and 4 bits on noise: q above 0.9, ω about 0.1."""
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.zeros(32_768))
    optimizer = MicroAdam([param])
    diagnostics = MicroAdamDiagnostics(optimizer, every=20)
    for _ in range(20):
        param.grad = torch.randn(32_768)
        optimizer.step()
    (found,) = diagnostics.take()
    assert 0.9 < found["contraction"] < 1
    assert 0.07 < found["quantization_error"] < 0.13
    assert not found["condition_holds"]


def test_no_selection_between_samples_is_missed_and_groups_are_apart():
    params = parameters()
    optimizer = MicroAdam([{"params": params[:1]}, {"params": params[1:], "window": 4, "density": 0.5}], **OPTIONS)
    twins = parameters()
    watched = MicroAdam([{"params": twins[:1]}, {"params": twins[1:], "window": 4, "density": 0.5}], **OPTIONS)
    sparse, every = MicroAdamDiagnostics(optimizer, every=37), MicroAdamDiagnostics(watched, every=1)
    for step in range(37):
        give_gradients(params, step)
        give_gradients(twins, step)
        optimizer.step()
        watched.step()
        always = every.take()
        found = sparse.take()
        assert (found is not None) == (step == 36)
    assert found == always
    assert [entry["group"] for entry in found] == [0, 1]
    assert sparse.take() is None


def test_watching_changes_no_step_and_ends():
    params, twins = parameters(), parameters()
    optimizer, plain = MicroAdam(params, **OPTIONS), MicroAdam(twins, **OPTIONS)
    diagnostics = MicroAdamDiagnostics(optimizer, every=2)
    for step in range(8):
        if step == 7:
            diagnostics.take()
            diagnostics.close()
        give_gradients(params, step)
        give_gradients(twins, step)
        optimizer.step()
        plain.step()
    assert all(torch.equal(one, other) for one, other in zip(params, twins, strict=True))
    assert diagnostics.take() is None


def test_other_optimizers_are_refused():
    with pytest.raises(InputError, match="the optimizer is SGD; diagnostics are those of MicroAdam"):
        MicroAdamDiagnostics(torch.optim.SGD(parameters(), lr=0.1), every=5)
