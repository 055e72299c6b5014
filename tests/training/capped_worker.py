"""One of several processes that train with a cap on the batch; ``test_capped.py`` starts them and looks at what they leave.

RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python capped_worker.py FOLDER
"""

import sys
from pathlib import Path

import torch
from flat import flat
from torch import distributed as dist
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.training.distributed import Ranks

SIZE, CAP = 24, 13
PLAN = PrivacyPlan(SIZE, 12, 0.01, 16, 1e-2, max_batch_size=CAP)
"""Hardly any noise: what a step publishes shows who was in it."""


def loss(model, batch):
    """Example i has the gradient e_i, times ten."""
    return 10 * model(batch).flatten()


def trainer(folder, ranks, *, observe, plan=PLAN, loss=loss, **options):
    model = nn.Linear(SIZE, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: observe(model.weight.grad.flatten().clone()))
    options = {"show_progress": False, "physical_batch_size": 4, **options}
    return PrivateTrainer(model, optimizer, plan, loss, run_dir=folder, ranks=ranks, **flat(**options))


def who_took_part(folder, ranks, **options):
    """For each step and example, how often it was in it."""
    seen = []
    trainer(folder, ranks, observe=lambda gradient: seen.append(gradient * PLAN.batch_size), **options).fit(
        torch.eye(SIZE, dtype=torch.float64)
    )
    return torch.stack(seen).round().long()


def failing(folder, ranks):
    """What each rank says if the last one cannot process its examples: all stop, none waits for the others."""

    taken = []

    def wrong(model, batch):
        if ranks.rank == ranks.world_size - 1 and len(taken) > 3:
            raise ValueError("made up")
        return loss(model, batch)

    try:
        trainer(folder, ranks, observe=taken.append, loss=wrong).fit(torch.eye(SIZE, dtype=torch.float64))
    except DPMicroAdamError as error:
        return str(error)


def run(folder, ranks):
    for name, options in (("seeded", {"seed": 3}), ("private", {})):
        torch.save(who_took_part(folder / name, ranks, **options), folder / f"{name}-{ranks.rank}.pt")
    torch.save(failing(folder / "failing", ranks), folder / f"failing-{ranks.rank}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(Path(sys.argv[1]), Ranks.of_torch())
    dist.barrier()  # a process that leaves while another still talks to it would be an error
    dist.destroy_process_group()
