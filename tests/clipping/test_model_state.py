"""A snapshot of the model's state finds any change of it, and undoes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dp_microadam import InputError
from dp_microadam.clipping.model_state import StateSnapshot, refuse_state_changes


class _Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("missing", torch.tensor([float("nan"), -0.0, 1.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("bf16", torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex128))
        self.register_buffer("large", torch.zeros(300, 300))
        self.register_buffer("absent", None)


CHANGES: dict[str, Callable[[_Keeper], object]] = {
    "weight": lambda keeper: keeper.weight.data.add_(1),
    "missing": lambda keeper: keeper.missing.nan_to_num_(),
    "count": lambda keeper: keeper.count.add_(1),
    "mask": lambda keeper: keeper.mask.logical_not_(),
    "bf16": lambda keeper: keeper.bf16.mul_(2),
    "sparse": lambda keeper: setattr(keeper, "sparse", (torch.eye(3) * 2).to_sparse()),
    "wave": lambda keeper: keeper.wave.mul_(1j),
    "large": lambda keeper: keeper.large[299].neg_(),  # to -0, which only bits tell
    "absent": lambda keeper: setattr(keeper, "absent", torch.zeros(1)),
    "weight, exchanged for another shape": lambda keeper: setattr(keeper.weight, "data", torch.ones(2, 3)),
    "count, exchanged for another type": lambda keeper: setattr(keeper, "count", torch.tensor(3.0)),
    "bf16, deleted": lambda keeper: delattr(keeper, "bf16"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_of_state_is_refused_by_name_and_undone(what: str) -> None:
    keeper = _Keeper()
    with pytest.raises(InputError, match=repr(what.partition(",")[0])), refuse_state_changes(keeper):
        CHANGES[what](keeper)
    fresh = _Keeper()
    assert StateSnapshot(fresh, copy_large=True).changed() is None
    for (name, found), (_, wanted) in zip(keeper.state_dict().items(), fresh.state_dict().items(), strict=True):
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found.to_dense().nan_to_num(), wanted.to_dense().nan_to_num()), name


def test_equal_values_in_another_tensor_are_no_change() -> None:
    keeper = _Keeper()
    with refuse_state_changes(keeper):
        keeper.bf16 = keeper.bf16.clone()
        keeper.weight.data = keeper.weight.data.clone()


def test_a_change_stays_on_the_device_until_it_is_read() -> None:
    keeper = _Keeper()
    snapshot = StateSnapshot(keeper, copy_large=False)
    assert not snapshot.altered()
    keeper.count += 1
    assert snapshot.altered()
