"""What a test file does when it is one of the processes that ``run_group(name, size, __file__)`` starts."""

import sys
from pathlib import Path

import torch
from torch import distributed as dist

from dp_microadam.training.distributed import Ranks


def run_here(checks):
    """Call every check with a folder and the ranks, and save what it returns as FOLDER/<check>-<rank>.pt."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    ranks = Ranks.of_torch()
    for name, check in checks.items():
        torch.save(check(folder / name, ranks), folder / f"{name}-{ranks.rank}.pt")
    dist.barrier()  # a process that leaves while another still talks to it would be an error
    dist.destroy_process_group()
