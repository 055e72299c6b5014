"""Opacus' books in ours: a ledger, and ε by both of our accountants, from what its accountant recorded."""

from __future__ import annotations

import math
import os
from typing import Any

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.privacy.accounting import SubsampledGaussian
from dp_microadam.privacy.ledger import LedgerRecord, RunSettings, read_ledger, write_past_steps
from dp_microadam.privacy.plan import PrivacyPlan
from dp_microadam.privacy.statement import write_privacy_files

_ADAPTIVE = "AdaClipDPOptimizer"


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
    return tuple(_step_of(entry) for entry in getattr(accountant, "history", accountant))


def _step_of(entry: Any) -> SubsampledGaussian:
    try:
        noise_multiplier, sample_rate, steps = float(entry[0]), float(entry[1]), int(entry[2])
        usable = len(entry) == 3 and 0 < noise_multiplier < math.inf and 0 < sample_rate <= 1 and steps == entry[2] > 0
    except (TypeError, ValueError, IndexError, KeyError):
        usable = False
    if not usable:
        raise InputError(
            f"history holds {entry!r}, which is no Gaussian step on a Poisson sample; entries must be (noise multiplier above "
            "0, sample rate in (0, 1], number of steps)"
        )
    return SubsampledGaussian(sample_rate, noise_multiplier, steps)


def ledger_from_opacus(
    privacy_engine: Any,
    optimizer: Any,
    data_loader: Any,
    *,
    delta: float,
    run_dir: str | os.PathLike[str],
    accountant: str = "rdp",
) -> LedgerRecord:
    """Write our ledger and privacy statement of a model that was trained with Opacus into the new folder ``run_dir``.

    ``optimizer`` and ``data_loader`` are those that ``make_private`` returned. ``dp-microadam budget`` then adds the run to
    others.

    Formal guarantees: ε as the ledger says holds for the steps in the accountant's history if Opacus clipped, sampled and added
    noise as they say. Unlike a ledger written ahead, it knows nothing of steps that a crash took from that history.

    Raises:
        InputError: if nothing was recorded, or for a folder that has a ledger already.
        PrivacyError: if what was trained is not the Poisson-subsampled Gaussian: batches that were shuffled instead of sampled,
            accumulated over several samples, or clipped adaptively.
    """
    _refuse_other_mechanisms(privacy_engine, optimizer, data_loader)
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
    secure = bool(getattr(privacy_engine, "secure_mode", False))
    settings = RunSettings(
        private=optimizer.generator is None or secure,
        randomness="Opacus' secure mode" if secure else _describe(optimizer),
        sensitivity=optimizer.max_grad_norm,
        clipping="the gradient of each example, by Opacus, in L2 norm",
        public=("clipping norm", "normalization constants of the input"),
    )
    write_past_steps(run_dir, plan, settings, spent)
    record = read_ledger(run_dir)
    write_privacy_files(run_dir, record)
    return record


def _refuse_other_mechanisms(privacy_engine: Any, optimizer: Any, data_loader: Any) -> None:
    if not hasattr(getattr(privacy_engine, "accountant", None), "history"):
        raise InputError(f"privacy_engine is a {type(privacy_engine).__name__}; it must be an opacus.PrivacyEngine")
    if not hasattr(optimizer, "noise_multiplier"):
        raise InputError(f"optimizer is a {type(optimizer).__name__}; it must be the one that make_private returned")
    if any(kind.__name__ == _ADAPTIVE for kind in type(optimizer).__mro__):
        raise PrivacyError(
            "the clipping norm was adaptive, which spends more than the Gaussian steps; train with clipping='flat'"
        )
    if not hasattr(data_loader, "sample_rate"):
        raise PrivacyError(
            f"data_loader is a {type(data_loader).__name__} that does not draw Poisson samples, so the history understates "
            "what was spent; train with poisson_sampling=True and pass the loader that make_private returned"
        )


def _describe(optimizer: Any) -> str:
    if optimizer.generator is None:
        return "torch's own generator, as Opacus uses it; unpredictable only if no seed was set, and then by 32 bits on CPU"
    return "a generator that was handed to Opacus, which may have been seeded"
