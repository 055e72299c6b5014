"""One of several processes that hold a model together (FSDP2); ``test_sharded.py`` starts them and looks at what they leave.

RANK=… WORLD_SIZE=… MASTER_ADDR=… MASTER_PORT=… python sharded_worker.py FOLDER [FOLDER OF A CHECKPOINT TO LOAD]
"""

import sys
import warnings
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from dp_microadam import InputError, MicroAdam, ThresholdAdam

OPTIONS = {
    "kernel": {"density": 0.1, "weight_decay": 0.01},
    "plain": {"density": 0.1, "window": 3, "bias_correction": "steady", "fused": False},
    "tensor": {"density": 0.1, "scope": "tensor", "quantize": False},
}


def network():
    """Weights of 37, 2 and 1 rows: parts of unequal length, and processes without any."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(50, 37), nn.Tanh(), nn.Linear(37, 2), nn.Tanh(), nn.Linear(2, 1))


def sharded():
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def give(model, step):
    """The same gradients in every process, and for whole and divided models alike."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in model.parameters():
        gradient = torch.randn(param.shape, generator=generator)
        divided = hasattr(param, "device_mesh")
        param.grad = distribute_tensor(gradient, param.device_mesh, param.placements) if divided else gradient


def own_parts(model):
    return [param.to_local().detach().clone() for param in model.parameters()]


def whole(model):
    return [param.full_tensor().detach() for param in model.parameters()]


def steps(options):
    """Own parts before, after 12 steps, and what MicroAdam on these parts alone makes of them; messages sent meanwhile."""
    model = sharded()
    before = own_parts(model)
    optimizer = MicroAdam(model.parameters(), lr=0.1, **options)
    alone = [nn.Parameter(part.clone()) for part in before]
    twin = MicroAdam(alone, lr=0.1, **options)
    messages = 0
    for step in range(12):
        give(model, step)
        for param, part in zip(model.parameters(), alone, strict=True):
            part.grad = param.grad.to_local().clone()
        with CommDebugMode() as watched:
            optimizer.step()
        messages += watched.get_total_counts()
        twin.step()
    with CommDebugMode() as watched:
        together = whole(model)
    return {
        "messages": messages,
        "messages to put it together": watched.get_total_counts(),
        "before": before,
        "after": own_parts(model),
        "twin": [part.detach() for part in alone],
        "whole": together,
    }


def bytes_of_a_large_layer(kind):
    """State that this process keeps of a layer of 1000 × 1000, at the optimizer's defaults."""
    layer = fully_shard(nn.Linear(1000, 1000), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = kind(layer.parameters())
    give(layer, 0)
    optimizer.step()
    return optimizer.state_bytes()


def saved_and_loaded(kind, folder):
    """A run of 6 steps goes on for 6 more, directly and from a distributed checkpoint."""
    model = sharded()
    optimizer = kind(model.parameters(), lr=0.1)
    for step in range(6):
        give(model, step)
        optimizer.step()
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=folder)
    other = sharded()
    with torch.no_grad():
        for param, source in zip(other.parameters(), model.parameters(), strict=True):
            param.to_local().copy_(source.to_local())
    fresh = load(kind, other, folder)
    for step in range(6, 12):
        for each, each_optimizer in ((model, optimizer), (other, fresh)):
            give(each, step)
            each_optimizer.step()
    return {"went on": own_parts(model), "loaded": own_parts(other)}


def load(kind, model, folder):
    optimizer = kind(model.parameters(), lr=0.1)
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    checkpoint.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optim"])
    return optimizer


def refusal_of_a_checkpoint(folder):
    """What loading the checkpoint of another number of processes says."""
    try:
        load(MicroAdam, sharded(), folder)
    except CheckpointException as error:
        return str(error)
    return "accepted"


def refusal_of_a_whole_state():
    """What loading the state of a single process says."""
    model = network()
    single = MicroAdam(model.parameters())
    give(model, 0)
    single.step()
    try:
        MicroAdam(sharded().parameters()).load_state_dict(single.state_dict())
    except InputError as error:
        return str(error)
    return "accepted"


def behind_opacus():
    """Two steps of MicroAdam behind Opacus' ghost clipping of a model that FSDP2 divides."""
    from opacus import PrivacyEngine
    from opacus.utils.fsdp_utils import FSDP2Wrapper
    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    model = FSDP2Wrapper(nn.Sequential(nn.Linear(50, 37), nn.Tanh(), nn.Linear(37, 3)))
    optimizer = MicroAdam(model.parameters(), lr=0.05, density=0.1)
    own = TensorDataset(torch.randn(12, 50), torch.randint(3, (12,)))
    private, wrapped, loss, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(own, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost_fsdp",
    )
    before = [param.clone() for param in whole(model)]
    for batch, targets in loader:
        wrapped.zero_grad()
        loss(private(batch), targets).backward()
        wrapped.step()
    after = whole(model)
    moved = [float((one != other).float().mean()) for one, other in zip(before, after, strict=True)]
    return {"moved": moved, "steps": {int(state["step"]) for state in optimizer.state.values()}, "whole": after}


def threshold_adam():
    """What ThresholdAdam makes of the divided model, put together, and of the whole one."""
    models = sharded(), network()
    for model in models:
        optimizer = ThresholdAdam(model.parameters(), lr=0.1, threshold=1e-6)
        for step in range(5):
            give(model, step)
            optimizer.step()
    return {"divided": whole(models[0]), "whole": [param.detach() for param in models[1].parameters()]}


def main(folder, foreign):
    dist.init_process_group("gloo")
    found = {name: steps(options) for name, options in OPTIONS.items()}
    found["checkpoints"] = [saved_and_loaded(kind, folder / kind.__name__) for kind in (MicroAdam, ThresholdAdam)]
    found["opacus"] = behind_opacus()
    found["threshold"] = threshold_adam()
    found["large"] = [bytes_of_a_large_layer(kind) for kind in (MicroAdam, ThresholdAdam)]
    found["refusal of a whole state"] = refusal_of_a_whole_state()
    found["refusal"] = None if foreign is None else refusal_of_a_checkpoint(foreign)
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
