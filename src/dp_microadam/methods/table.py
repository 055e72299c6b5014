"""The table of optimizers and methods: import path, options and default learning rate of each.

Registry, recipes, command line and documentation are generated from it. It does not import torch, so that recipes are checked
quickly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dp_microadam.plan.learning_rate import DISTANCE


@dataclass(frozen=True)
class OptimizerEntry:
    """A base optimizer of methods: the import path of its class, and the options that a recipe may set.

    ``state`` are the bytes that it keeps between steps for each parameter, with its default options.
    """

    path: str
    options: tuple[str, ...]
    state: float


@dataclass(frozen=True)
class MethodEntry:
    """A method: a one-sentence summary, its defaults, and how it is built.

    The default is a ``learning_rate`` or, where it is None, a ``distance``; ``average`` is the decay of an average of the
    weights, 0 for none.
    With ``optimizer`` the method is that optimizer alone, with its options. Otherwise ``path`` is a function that builds the
    method for a model, ``options`` are its own options, and ``base_optimizers`` lists those it can use, whose options it
    accepts too.
    """

    summary: str
    learning_rate: float | None
    optimizer: str | None = None
    path: str | None = None
    options: tuple[str, ...] = ()
    base_optimizers: tuple[str, ...] = ()
    distance: float | None = None
    average: float = 0.0

    @property
    def all_options(self) -> tuple[str, ...]:
        """Its own options, and those of the base optimizers it can use."""
        names = self.base_optimizers if self.optimizer is None else (self.optimizer,)
        theirs = (option for name in names for option in OPTIMIZERS[name].options)
        return tuple(dict.fromkeys((*self.options, *theirs)))


_ADAM_OPTIONS = ("betas", "eps", "weight_decay", "amsgrad")
_MICRO_ADAM_OPTIONS = (
    "betas",
    "eps",
    "weight_decay",
    "density",
    "window",
    "scope",
    "quantize",
    "bias_correction",
    "fused",
)

DEFAULT = "dp-threshold"
"""The method of ``methods.default``."""

AVERAGE = 0.99
"""The average of methods whose rate follows from the plan: larger steps than the last ones can be averaged out."""

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "sgd": OptimizerEntry("torch.optim:SGD", ("momentum", "dampening", "weight_decay", "nesterov"), 0.0),
    "adam": OptimizerEntry("torch.optim:Adam", _ADAM_OPTIONS, 8.0),
    "adamw": OptimizerEntry("torch.optim:AdamW", _ADAM_OPTIONS, 8.0),
    "adambc": OptimizerEntry("dp_microadam.optimizers.adam_bc:AdamBC", ("floor", "betas", "weight_decay"), 8.0),
    "microadam": OptimizerEntry("dp_microadam.optimizers.micro_adam:MicroAdam", _MICRO_ADAM_OPTIONS, 0.96),
    "threshold": OptimizerEntry(
        "dp_microadam.optimizers.threshold_adam:ThresholdAdam", ("threshold", "beta", "eps", "weight_decay"), 0.5
    ),
    "tensor-adam": OptimizerEntry("dp_microadam.optimizers.tensor_adam:TensorAdam", ("beta", "eps", "weight_decay"), 0.0),
}

BASE_OPTIMIZERS = ("sgd", "adam", "adamw", "microadam")  # of methods that are more than an optimizer

METHODS: Mapping[str, MethodEntry] = {
    "dp-threshold": MethodEntry(
        "ThresholdAdam on privatized gradients: a coordinate moves once what has gathered on it exceeds a threshold",
        None,
        optimizer="threshold",
        distance=DISTANCE,
        average=AVERAGE,
    ),
    "dp-walk": MethodEntry(
        "the same with dense steps, proportional to the privatized gradient",
        None,
        optimizer="tensor-adam",
        distance=DISTANCE,
        average=AVERAGE,
    ),
    "dp-microadam": MethodEntry("the paper's: MicroAdam on privatized gradients", 1e-3, optimizer="microadam"),
    "dp-sgd": MethodEntry("p ← p − lr·g̃ (Abadi et al., 2016), by torch's SGD", 4.0, optimizer="sgd"),
    "dp-adam": MethodEntry("torch's Adam on privatized gradients", 1e-3, optimizer="adam"),
    "dp-adamw": MethodEntry("torch's AdamW on privatized gradients", 1e-3, optimizer="adamw"),
    "dp-adambc": MethodEntry(
        "Adam with the noise variance subtracted from its second moment",
        1e-3,
        path="dp_microadam.methods.adam_bc:dp_adambc",
        base_optimizers=("adambc",),
    ),
    "scale-then-privatize": MethodEntry(
        "gradients are scaled before clipping and noise, and scaled back afterwards; includes DP² and AdaDPS",
        1e-3,
        path="dp_microadam.methods.scaling:scale_then_privatize",
        options=("source", "base_optimizer", "scale_eps", "interval", "decay", "norm_ratio", "rate_ratio", "public"),
        base_optimizers=BASE_OPTIMIZERS,
    ),
    "dp-bitfit": MethodEntry(
        "only biases and the head train",
        1e-3,
        path="dp_microadam.methods.fine_tuning:dp_bitfit",
        options=("base_optimizer", "head"),
        base_optimizers=BASE_OPTIMIZERS,
    ),
    "sparta": MethodEntry(
        "trains the rows of weights with the highest noisy scores",
        1e-3,
        path="dp_microadam.methods.fine_tuning:Sparta",
        options=("keep", "scores", "first_phase", "scoring_epochs", "rows_only", "head", "base_optimizer"),
        base_optimizers=BASE_OPTIMIZERS,
    ),
}


def kept_bytes(method: str, bands: int, average: float | None = None) -> dict[str, float]:
    """What a run keeps beside weights and gradients, in bytes for each trained parameter, by what it is for.

    >>> kept_bytes("dp-threshold", bands=4)
    {'optimizer': 0.5, 'average': 4.0, 'noise of the last steps': 12.0}
    """
    entry = METHODS[method]
    name = entry.optimizer or entry.base_optimizers[0]
    averages = entry.average if average is None else average
    return {
        "optimizer": OPTIMIZERS[name].state,
        "average": 4.0 if averages else 0.0,
        "noise of the last steps": 4.0 * (bands - 1),
    }


def as_markdown() -> str:
    """The table of methods, for the documentation.

    >>> print(as_markdown().splitlines()[5])
    | `"dp-sgd"` | p ← p − lr·g̃ (Abadi et al., 2016), by torch's SGD | rate 4 |
    """
    rows = [f'| `"{name}"` | {entry.summary} | {_default_in_words(entry)} |' for name, entry in METHODS.items()]
    return "\n".join(["| method | what it does | default |", "|---|---|---|", *rows])


def _default_in_words(entry: MethodEntry) -> str:
    if entry.learning_rate is not None:
        return f"rate {entry.learning_rate:g}"
    return f"distance {entry.distance:g}, average {entry.average:g}"
