"""Checks of users as the unit of privacy: who is drawn, what they bring, and what it may add.

The proof needs three things of a step. Each user takes part with the plan's rate, however many examples they have. What a user
brings comes from their own examples, at most k of them. And all of it together adds at most the clipping norm to the sum: the
mean of the examples' gradients is clipped, not each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.sampling.poisson import PoissonSampler
from dp_microadam.sampling.users import Units
from dp_microadam.workbench.audit.check import FALSE_ALARM, Check, count_range, mean_square_range
from dp_microadam.workbench.audit.published import published_steps
from dp_microadam.workbench.audit.sampling_checks import Drawn, drawing_checks

MOST = 4
"""k, the largest number of a user's examples in a step."""

_SIZES = (1, 2, 3, 5, 9)
_USERS = 2_000
_BATCH = 300
# Few users for the trainer, each with directions of their own, and so little noise that what they add can be read.
_USERS_OF_RUN = 60
_BATCH_OF_RUN = 20
_NOISE_OF_RUN = 0.02
_CLIPPING_NORM = 0.7


def user_checks(steps: int, published: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check the sampler for ``steps`` steps of users, and ``PrivateTrainer`` for ``published`` steps."""
    return [*drawn_user_checks(steps, advance), *contribution_checks(published, advance)]


def drawn_user_checks(steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check that the sampler draws a Poisson sample of users, and of each user examples of their own, all equally often."""
    sizes = np.resize(_SIZES, _USERS)
    owner = np.repeat(np.arange(_USERS), sizes)
    plan = PrivacyPlan(_USERS, _BATCH, 1.0, steps, 1e-5, unit="user", examples_per_user=MOST)
    sampler = PoissonSampler.from_plan(plan, physical_batch_size=64, units=Units(owner, MOST))
    users: Drawn = np.zeros((steps, _USERS), dtype=np.uint8)
    first = np.cumsum(sizes) - sizes
    seen: Drawn = np.zeros((steps, _USERS), dtype=np.uint8)
    foreign = most = 0
    for step in sampler:
        for rows, weights in step.chunks:
            own, present = rows.view_as(weights).numpy(), weights.numpy() > 0
            who = owner[own[:, 0]]
            foreign += int(np.count_nonzero(owner[own] != who[:, None]))
            most = max(most, int(present.sum(1).max()))
            np.add.at(users[step.index], who, 1)
            seen[step.index, who] = ((own == first[who, None]) & present).any(1)
        advance(1)
    size = f"{steps:,} steps, {_USERS:,} users with 1 to {max(_SIZES)} examples"

    def exact(name: str, question: str, statistic: str, value: float, high: float) -> Check:
        return Check("sampling", f"users: {name}", question, statistic, value, 0, high, 0.0, size)

    return [
        *drawing_checks("users", users, plan.sample_rate),
        exact("own examples", "does a user bring their own examples only?", "rows of others", foreign, 0),
        exact("at most k", "does a user bring at most k examples?", "most examples of a user in a step", most, MOST),
        *_within_users(users[:, sizes == max(_SIZES)], seen[:, sizes == max(_SIZES)], size),
    ]


def _within_users(users: Drawn, seen: Drawn, size: str) -> list[Check]:
    """Check of users with more than k examples that the first is drawn as often as the others, and anew in each step."""
    rate = MOST / max(_SIZES)
    often = [column[present > 0] for column, present in zip(seen.T, users.T, strict=True)]
    once, twice = sum(map(len, often)), sum(len(own) // 2 for own in often)
    both = sum(int((own[0:-1:2] & own[1::2]).sum()) for own in often if len(own) > 1)

    def share(name: str, question: str, statistic: str, found: int, trials: int, probability: float) -> Check:
        low, high = (edge / (trials * probability) for edge in count_range(trials, probability))
        value = found / (trials * probability)
        return Check("sampling", f"users: {name}", question, statistic, value, low, high, FALSE_ALARM, size)

    return [
        share(
            "each example",
            "is every example of a user with many drawn equally often?",
            "draws of their first example over the expectation",
            sum(int(own.sum()) for own in often),
            once,
            rate,
        ),
        share(
            "drawn anew",
            "are a user's examples drawn anew each time they take part?",
            "repeated draws of their first example over the expectation",
            both,
            twice,
            rate**2,
        ),
    ]


def contribution_checks(steps: int, advance: Callable[[int], None] = lambda steps: None) -> list[Check]:
    """Check what each user adds to what ``PrivateTrainer`` publishes.

    Each example's gradient is ten times the clipping norm in a direction of its own. So a user with m examples in a step adds
    the mean of m orthogonal vectors, clipped to the clipping norm: 1/√m in each of their directions, in units of C/B. Examples
    that are clipped one by one, and then averaged or summed, would add 1/m or 1.
    """
    sizes = np.resize(_SIZES, _USERS_OF_RUN)
    owner = np.repeat(np.arange(_USERS_OF_RUN), sizes)
    plan = PrivacyPlan(_USERS_OF_RUN, _BATCH_OF_RUN, _NOISE_OF_RUN, steps, delta=1e-5, unit="user", examples_per_user=MOST)
    seen: list[Tensor] = []

    def observe(gradients: dict[str, Tensor]) -> None:
        seen.append(gradients["weight"].flatten().double() * (plan.batch_size / _CLIPPING_NORM))
        advance(1)

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return 10 * _CLIPPING_NORM * model(batch[0]).squeeze(1)

    model = nn.Linear(len(owner), 1, bias=False)
    published_steps(
        model,
        loss,
        (torch.eye(len(owner)),),
        plan,
        observe,
        max_grad_norm=_CLIPPING_NORM,
        physical_batch_size=16,
        users=owner,
    )
    values = torch.stack(seen).numpy()
    present = values > 0.25
    counts = np.stack([present[:, owner == user].sum(1) for user in range(_USERS_OF_RUN)], 1)
    along = np.stack([np.where(present, values, 0)[:, owner == user].sum(1) for user in range(_USERS_OF_RUN)], 1)
    excess = (along / np.sqrt(np.maximum(counts, 1)) - 1)[counts > 0] / _NOISE_OF_RUN
    return [
        Check(
            "clipping",
            "users: contributions",
            "does each user add the clipping norm over the expected number of users, however many examples they have?",
            "mean square of what users add beyond 1, over its variance",
            float(np.mean(excess**2)) if len(excess) else float("nan"),
            *mean_square_range(max(1, len(excess))),
            FALSE_ALARM,
            f"{steps:,} steps, {_USERS_OF_RUN:,} users with 1 to {max(_SIZES)} examples",
        )
    ]
