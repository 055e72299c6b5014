"""The one table of optimizers and methods: where each is, its options and its learning rate.

Registry, recipes, command line and documentation are made from it. It imports no torch, so that a recipe is checked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that methods step with: where its class is, and what a recipe may set of it."""

    path: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class MethodEntry:
    """A method: what it does in one sentence, the learning rate of recipes that name none, and where it is built.

    With ``optimizer`` it is that optimizer alone, with its options. Else ``path`` is a function of the model, ``options`` are
    its own, and it steps with one of the optimizers ``behind`` it, whose options it takes too.
    """

    summary: str
    learning_rate: float
    optimizer: str | None = None
    path: str | None = None
    options: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()

    @property
    def all_options(self) -> tuple[str, ...]:
        """Its own, and those of the optimizers it may step with."""
        names = self.behind if self.optimizer is None else (self.optimizer,)
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
    "error_feedback",
    "block_size",
    "bucket_size",
    "window_dtype",
    "bias_correction",
    "rounding",
    "fused",
)

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "sgd": OptimizerEntry("torch.optim:SGD", ("momentum", "dampening", "weight_decay", "nesterov")),
    "adam": OptimizerEntry("torch.optim:Adam", _ADAM_OPTIONS),
    "adamw": OptimizerEntry("torch.optim:AdamW", _ADAM_OPTIONS),
    "adambc": OptimizerEntry("dp_microadam.optimizers.adam_bc:AdamBC", ("floor", "betas", "weight_decay")),
    "microadam": OptimizerEntry("dp_microadam.optimizers.micro_adam:MicroAdam", _MICRO_ADAM_OPTIONS),
}

_ANY = ("sgd", "adam", "adamw", "microadam")

METHODS: Mapping[str, MethodEntry] = {
    "dp-microadam": MethodEntry("MicroAdam on privatized gradients", 1e-3, optimizer="microadam"),
    "dp-sgd": MethodEntry("p ← p − lr·g̃ (Abadi et al., 2016), by torch's SGD", 4.0, optimizer="sgd"),
    "dp-adam": MethodEntry("torch's Adam on privatized gradients", 1e-3, optimizer="adam"),
    "dp-adamw": MethodEntry("torch's AdamW on privatized gradients", 1e-3, optimizer="adamw"),
    "dp-adambc": MethodEntry(
        "Adam whose second moment is freed of the noise's part",
        1e-3,
        path="dp_microadam.methods.adam_bc:dp_adambc",
        behind=("adambc",),
    ),
    "scale-then-privatize": MethodEntry(
        "gradients are scaled before clip and noise, and back afterwards; DP² and AdaDPS too",
        1e-3,
        path="dp_microadam.methods.scale_then_privatize:scale_then_privatize",
        options=("source", "behind", "scale_eps", "interval", "decay", "norm_ratio", "rate_ratio", "public"),
        behind=_ANY,
    ),
    "dp-bitfit": MethodEntry(
        "biases and the head train, the rest is frozen",
        1e-3,
        path="dp_microadam.methods.bitfit:dp_bitfit",
        options=("behind", "head"),
        behind=_ANY,
    ),
    "sparta": MethodEntry(
        "noisy scores choose the rows of weights that train",
        1e-3,
        path="dp_microadam.methods.sparta:sparta",
        options=("keep", "scores", "first_phase", "scoring_epochs", "rows_only", "head", "behind"),
        behind=_ANY,
    ),
}


def as_markdown() -> str:
    """The table of methods, for the documentation.

    >>> print(as_markdown().splitlines()[2])
    | `"dp-microadam"` | MicroAdam on privatized gradients | 0.001 |
    """
    rows = [f'| `"{name}"` | {entry.summary} | {entry.learning_rate:g} |' for name, entry in METHODS.items()]
    return "\n".join(["| method | what it does | learning rate |", "|---|---|---|", *rows])
