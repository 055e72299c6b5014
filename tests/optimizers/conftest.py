"""What tests of several optimizers share."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Launches(TorchDispatchMode):
    """Counts the operators that would be kernels on a GPU: all but views, and but those of numbers, which are on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        is_view = func.is_view or func.overloadpacket.__name__ in ("_unsafe_view", "lift_fresh", "_local_scalar_dense")
        self.count += not is_view and any(tensor.dim() for tensor in tensors)
        return result


@pytest.fixture
def launches_of():
    """How many kernels a step of an optimizer starts."""

    def count(optimizer):
        with Launches() as launches:
            optimizer.step()
        return launches.count

    return count
