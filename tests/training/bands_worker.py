"""One of several processes that train with correlated noise; ``test_bands.py`` starts them and looks at what they leave.

RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python bands_worker.py FOLDER
"""

import sys
from itertools import pairwise
from pathlib import Path

import torch
from flat import flat, idle
from torch import distributed as dist
from torch import nn

from dp_microadam import PrivacyPlan, PrivateStep, PrivateTrainer
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.training.distributed import Ranks

EXAMPLES, BANDS, STEPS = 41, 4, 12
PLAN = PrivacyPlan(EXAMPLES, 8, 1.5, STEPS, 1e-2, bands=BANDS)


def numbered(model, batch):
    """The gradient of example i is one in column i of the weight, and zero elsewhere."""
    return model(batch).sum(1)


def without_gradient(model, batch):
    return model(batch).sum(1) * 0.0


def rows(width):
    model = nn.Linear(EXAMPLES, width, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def published(folder, loss, ranks, *, width=1, plan=PLAN, **options):
    """The mean gradient of each step, a row each."""
    model = rows(width)
    trainer = PrivateTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        loss,
        run_dir=folder,
        ranks=ranks,
        **flat(show_progress=False, **options),
    )
    weights = [model.weight.detach().clone()]
    trainer.callbacks = (lambda report: weights.append(model.weight.detach().clone()) if report.step else None,)
    trainer.fit(torch.eye(EXAMPLES, dtype=torch.float64))
    return torch.stack([(before - after).flatten() for before, after in pairwise(weights)])


def noise(folder, ranks):
    """Noise alone, from the system's entropy: 41 × 500 coordinates for each step."""
    return published(folder, without_gradient, ranks, width=500)


def seeded(folder, ranks):
    return published(folder, numbered, ranks, seed=3)


def after_a_failure(folder, ranks):
    """Noise alone of a loop of one's own that goes on after step 5 failed on the last rank, the others having drawn theirs."""
    failing = []

    def loss(model, batch):
        if failing and ranks.rank == ranks.world_size - 1:
            raise ValueError("secret")
        return without_gradient(model, batch)

    model = rows(500)
    plan = PrivacyPlan(EXAMPLES, 10, 1.5, STEPS, 1e-2, bands=BANDS)  # 4·10 of 41: nearly every example of a group
    step = PrivateStep(model, idle(model), plan, loss, torch.eye(EXAMPLES, dtype=torch.float64), run_dir=folder, ranks=ranks)
    found = []
    step.account.begin()
    for index in range(plan.steps):
        failing[:] = [True] if index == 5 else []
        try:
            found.append(step.take()["weight"].flatten() * plan.batch_size / plan.noise_multiplier)
        except DPMicroAdamError:
            found.append(None)
    step.close()
    return found


def run(folder, ranks):
    torch.save(noise(folder / "noise", ranks), folder / f"noise-{ranks.rank}.pt")
    torch.save(seeded(folder / "seeded", ranks), folder / f"seeded-{ranks.rank}.pt")
    torch.save(after_a_failure(folder / "failure", ranks), folder / f"failure-{ranks.rank}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(Path(sys.argv[1]), Ranks.of_torch() if dist.get_world_size() > 1 else Ranks())
    dist.barrier()  # a process that leaves while another still talks to it would be an error
    dist.destroy_process_group()
