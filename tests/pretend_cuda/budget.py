"""How often a training step may wait for the device, and how much it may launch there.

The goal is one synchronisation for each physical chunk, three for each logical step, and none for each layer or tensor. The
tables say what is allowed today; they are lowered, and were raised once, for second moments of tensors, which MicroAdam reads.
:mod:`pretend_cuda.cases.budgets` counts, by line.
"""

from __future__ import annotations

SYNCHRONISATIONS = {
    "wrn-10-1": {"chunk": 1, "step": 3},
    "vit": {"chunk": 1, "step": 3},
}
"""By network."""

LAUNCHES_PER_TENSOR = {"chunk": 19, "step": 84}
"""By parameter tensor, of both networks: forward and backward pass and clipping; noise and MicroAdam in plain torch."""
