"""A training step waits for the device no more often, and launches no more, than the budget allows."""

import pytest
from pretend_cuda.budget import LAUNCHES_PER_TENSOR, SYNCHRONISATIONS
from pretend_cuda.start import NoDevice, failures, start


@pytest.mark.slow
def test_a_step_stays_within_its_budget():
    try:
        outcomes = start("budgets", timeout=1500)
    except NoDevice as reason:
        pytest.skip(str(reason))
    assert not failures(outcomes)
    found = {outcome.case: outcome.said for outcome in outcomes}
    assert found.keys() == SYNCHRONISATIONS.keys()
    for network, said in found.items():
        for part in ("chunk", "step"):
            lines = "\n".join(f"{count:6.1f} × {line}" for line, count in sorted(said[part].items(), key=lambda one: -one[1]))
            waits, launches = sum(said[part].values()), said[f"launches of a {part}"]
            assert waits <= SYNCHRONISATIONS[network][part], f"a {part} of {network} waits {waits} times:\n{lines}"
            assert launches <= LAUNCHES_PER_TENSOR[part] * said["tensors"], f"a {part} of {network} launches {launches} kernels"
