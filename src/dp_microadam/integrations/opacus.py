"""Opacus' books in ours: a ledger, and ε by both of our accountants, from what its accountant recorded.

Opacus draws noise and samples from torch's global generator, or from one it is given, unless its secure mode is on. On a CPU
that generator is a Mersenne twister whose state follows from 32 bits of its seed, whoever set it: few enough to try them all.
So a run is private by our words if it drew from the secure mode or from generators that :func:`use_system_entropy` filled.
"""

from __future__ import annotations

import math
import os
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dp_microadam.accounting.costs import DEFAULT_ACCOUNTANT, SubsampledGaussian
from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.ledger.ledger import LedgerRecord, RunSettings, read_ledger, write_past_steps
from dp_microadam.ledger.statement import write_privacy_files
from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.training.torch_randomness import random_seed, random_state
from dp_microadam.validation import public, require_integer

_given: WeakKeyDictionary[Any, tuple[tuple[torch.Generator, int], ...]] = WeakKeyDictionary()
"""Of each optimizer that was given unpredictable generators: those of noise and sampling with the seeds they then had."""


@public
def use_system_entropy(privacy_engine: Any, optimizer: Any, data_loader: Any) -> None:
    """Let Opacus draw noise and samples from the operating system's entropy; called once, after ``make_private``.

    On a CPU all 624 words of the generators' states are random, on a GPU all bits that a seed has there. Torch's global
    generator, from which dropout draws, is filled anew too. Seeds that were set before have no effect on what is drawn after.

    Formal guarantees: noise and samples of the steps that follow cannot be predicted by anyone who does not know the state, if
    nothing seeds these generators or puts an earlier state back. :func:`ledger_from_opacus` notices a seed, and another
    generator; a state that was put back it cannot see.

    Raises:
        InputError: for objects that are not Opacus'.
        PrivacyError: if steps were taken already.
    """
    _refuse_other_objects(privacy_engine, optimizer)
    if len(privacy_engine.accountant.history):
        raise PrivacyError(
            "the accountant has recorded steps already, and their noise stays as predictable as it was; call "
            "use_system_entropy right after make_private"
        )
    sampler = _sampler_of(data_loader)
    if _is_secure(privacy_engine, optimizer, data_loader):
        return
    device = next(parameter.device for group in optimizer.param_groups for parameter in group["params"])
    noise, sampling = _unpredictable(device), _unpredictable(torch.device("cpu"))
    optimizer.generator, sampler.generator, data_loader.generator = noise, sampling, sampling
    torch.set_rng_state(random_state())
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(random_seed())
    _given[optimizer] = tuple((generator, generator.initial_seed()) for generator in (noise, sampling))


def _unpredictable(device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    if device.type == "cpu":
        generator.set_state(random_state())
    else:
        generator.manual_seed(random_seed())
    return generator


def _is_secure(privacy_engine: Any, optimizer: Any, data_loader: Any) -> bool:
    """Whether Opacus' secure mode draws noise and samples."""
    secure = getattr(privacy_engine, "secure_rng", None) if getattr(privacy_engine, "secure_mode", False) else None
    return secure is not None and optimizer.generator is secure and _sampler_of(data_loader).generator is secure


def _randomness(privacy_engine: Any, optimizer: Any, data_loader: Any) -> tuple[bool, str]:
    """Whether noise and samples were unpredictable, and what they were drawn from, in the words of our own runs."""
    if _is_secure(privacy_engine, optimizer, data_loader):
        return True, "Opacus' secure mode"
    given = _given.get(optimizer)
    used = optimizer.generator, _sampler_of(data_loader).generator
    if given is None:
        which = "torch's global generator" if used == (None, None) else "a generator that was handed to Opacus"
        return False, f"{which}, which follows from a seed of 32 bits on CPU, whoever set it: not private"
    if any(generator is not now for (generator, _), now in zip(given, used, strict=True)):
        return False, "another generator than use_system_entropy gave to Opacus: not private"
    if any(generator.initial_seed() != seed for generator, seed in given):
        return False, "a generator that was seeded after use_system_entropy: not private"
    kind = "Mersenne twister" if used[0].device.type == "cpu" else "torch's generator on the GPU"
    return True, f"operating system's entropy, statistical generator ({kind}) in Opacus"


def _sampler_of(data_loader: Any) -> Any:
    if not hasattr(data_loader, "sample_rate"):
        raise PrivacyError(
            f"data_loader is a {type(data_loader).__name__} that does not draw Poisson samples, so the history understates "
            "what was spent; train with poisson_sampling=True and pass the loader that make_private returned"
        )
    return data_loader.batch_sampler


@public
def spent_in_opacus(accountant: Any) -> tuple[SubsampledGaussian, ...]:
    """What an Opacus accountant recorded, as our accountants take it: ``accounting.epsilon(spent, delta, "pld")``.

    Takes ``privacy_engine.accountant``, or its ``history`` of (noise multiplier, sample rate, steps).

    >>> spent_in_opacus([(1.0, 0.01, 400)])
    (SubsampledGaussian(sample_rate=0.01, noise_multiplier=1.0, steps=400),)

    Formal guarantees: an upper bound of what was spent if the history is that of Poisson-subsampled Gaussian steps, which
    :func:`ledger_from_opacus` checks on the objects that made it.

    Raises:
        InputError: for entries that are no such step.
    """
    found = []
    for entry in getattr(accountant, "history", accountant):
        try:
            noise_multiplier, sample_rate, steps = entry
            found.append(SubsampledGaussian(float(sample_rate), float(noise_multiplier), require_integer("steps", steps, 1)))
        except (TypeError, ValueError):  # an InputError is one
            raise InputError(
                f"history holds {entry!r}, which is no Gaussian step on a Poisson sample; entries must be (noise multiplier "
                "above 0, sample rate in (0, 1], number of steps)"
            ) from None
    return tuple(found)


@public
def ledger_from_opacus(
    privacy_engine: Any,
    optimizer: Any,
    data_loader: Any,
    *,
    delta: float,
    run_dir: str | os.PathLike[str],
    accountant: str = DEFAULT_ACCOUNTANT,
) -> LedgerRecord:
    """Write our ledger and privacy statement of a model that was trained with Opacus into the new folder ``run_dir``.

    ``optimizer`` and ``data_loader`` are those that ``make_private`` returned. ``dp-microadam budget`` then adds the run to
    others. The run is stamped "not private" unless its noise and samples were unpredictable: call :func:`use_system_entropy`
    before training, or use Opacus' secure mode.

    Formal guarantees: ε as the ledger says holds for the steps in the accountant's history if Opacus clipped, sampled and added
    noise as they say, and the ledger is stamped private. Unlike a ledger written ahead, it knows nothing of steps that a crash
    took from that history, and each call makes another ledger of the same steps.

    Raises:
        InputError: if nothing was recorded, or for a folder that has a ledger already.
        PrivacyError: if what was trained is not the Poisson-subsampled Gaussian: batches that were shuffled instead of sampled,
            accumulated over several samples, or clipped adaptively.
    """
    _refuse_other_objects(privacy_engine, optimizer)
    if any(kind.__name__ == "AdaClipDPOptimizer" for kind in type(optimizer).__mro__):
        raise PrivacyError(
            "the clipping norm was adaptive, which spends more than the Gaussian steps; train with clipping='flat'"
        )
    _sampler_of(data_loader)
    spent = spent_in_opacus(privacy_engine.accountant)
    if not spent:
        raise InputError("the accountant's history is empty; train first, then write the ledger")
    rate = data_loader.sample_rate
    for part in spent:
        if not math.isclose(part.sample_rate, rate, rel_tol=1e-9):
            raise PrivacyError(
                f"the history has sample rate {part.sample_rate:g} and the loader {rate:g}: gradients of several samples were "
                "added up, in which an example may be twice; call step after every batch, BatchMemoryManager cuts large ones"
            )
    size = len(data_loader.dataset)
    plan = PrivacyPlan(
        dataset_size=size,
        # Opacus' rate is one over the number of batches, which need not divide the data: the steps carry it exactly.
        batch_size=math.ceil(size * rate * (1 - 1e-12)),
        noise_multiplier=min(part.noise_multiplier for part in spent),
        steps=sum(part.steps for part in spent),
        delta=delta,
        accountant=accountant,
    )
    private, randomness = _randomness(privacy_engine, optimizer, data_loader)
    settings = RunSettings(
        private=private,
        randomness=randomness,
        sensitivity=optimizer.max_grad_norm,
        clipping="the gradient of each example, by Opacus, in L2 norm",
        public=("clipping norm", "normalization constants of the input"),
    )
    write_past_steps(run_dir, plan, settings, spent)
    record = read_ledger(run_dir)
    write_privacy_files(run_dir, record)
    return record


def _refuse_other_objects(privacy_engine: Any, optimizer: Any) -> None:
    if not hasattr(getattr(privacy_engine, "accountant", None), "history"):
        raise InputError(f"privacy_engine is a {type(privacy_engine).__name__}; it must be an opacus.PrivacyEngine")
    if not hasattr(optimizer, "noise_multiplier"):
        raise InputError(f"optimizer is a {type(optimizer).__name__}; it must be the one that make_private returned")
