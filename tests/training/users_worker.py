"""One of several processes that train on users; ``test_users.py`` starts them and looks at what they leave.

RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python users_worker.py FOLDER
Run alone with ``--kill-me`` it trains slowly, to be killed.
"""

import sys
import time
from pathlib import Path

import torch
from flat import flat
from torch import distributed as dist
from torch import nn

from dp_microadam import PrivacyPlan, PrivateTrainer
from dp_microadam.errors import InputError
from dp_microadam.training.distributed import Ranks

SIZES = [1, 5, 2, 1, 9, 3, 1, 4, 2, 6]
IDS = [f"user {number}" for number, size in enumerate(SIZES) for _ in range(size)]
PLAN = PrivacyPlan(len(SIZES), 4, 1.5, 12, 1e-2, examples_per_user=4)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(IDS), 6, generator=generator), torch.randint(0, 3, (len(IDS),), generator=generator)


def trainer(folder, ranks, *, loss=loss, plan=PLAN, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"show_progress": False, "physical_batch_size": 7, "prepare": doubled, **options}
    return PrivateTrainer(model, optimizer, plan, loss, run_dir=folder, ranks=ranks, **flat(**options))


def doubled(batch):
    return batch[0].double(), batch[1]


def seeded(folder, ranks):
    """The weights after a run with a fixed seed."""
    run = trainer(folder, ranks, seed=3)
    run.fit(data(), users=IDS)
    return [parameter.detach().clone() for parameter in run.model.parameters()]


def differing(folder, ranks):
    """What a rank is told whose examples belong to other users than the first rank's."""
    try:
        trainer(folder, ranks).fit(data(), users=IDS if ranks.main else IDS[::-1])
    except InputError as error:
        return str(error)


def slowly(folder):
    def slow(model, batch):
        time.sleep(0.02)
        return loss(model, batch)

    trainer(folder, Ranks(), loss=slow, checkpoint_every=2).fit(data(), users=IDS)


def run(folder, ranks):
    torch.save(seeded(folder / "seeded", ranks), folder / f"seeded-{ranks.rank}.pt")
    torch.save(differing(folder / "differing", ranks), folder / f"differing-{ranks.rank}.pt")


if __name__ == "__main__":
    if "--kill-me" in sys.argv:
        slowly(Path(sys.argv[1]))
        sys.exit()
    dist.init_process_group("gloo")
    run(Path(sys.argv[1]), Ranks.of_torch())
    dist.barrier()  # a process that leaves while another still talks to it would be an error
    dist.destroy_process_group()
