"""A recipe: all settings of a training run. It is validated completely before any data is loaded or anything is written."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

import tomli_w

from dp_microadam.errors import InputError
from dp_microadam.methods.table import DEFAULT, METHODS
from dp_microadam.plan.learning_rate import ADAPTER_DISTANCE
from dp_microadam.workbench.data.catalogue import takes_columns
from dp_microadam.workbench.data.columns import declaration
from dp_microadam.workbench.recipes import checks, texts, tuning, vocabulary
from dp_microadam.workbench.recipes.hints import hint_for_key, refuse_unknown_options
from dp_microadam.workbench.recipes.kept_features import refuse_changing_features


def _key(check: checks.Check, **default: Any) -> Any:
    return field(metadata={"check": check}, **default)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of one training run. Every setting is public and must not be derived from private data.

    Exactly two of ``epsilon``, ``noise_multiplier`` and ``steps`` are given, and the third is solved. A non-private run needs
    only ``steps`` and ignores the other two, so that any recipe with ``steps`` can also be run without privacy.

    >>> Recipe(name="mine", data="digits", model="mlp", epsilon=8, steps=1000, batch_size=256).resolved_learning_rate
    1.5
    >>> Recipe.from_toml('name = "mine"\\nmodle = "mlp"')
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: recipe key modle = 'mlp' is unknown; the nearest known key is model
    """

    name: str = _key(checks.name)
    method: str = _key(checks.one_of(*vocabulary.METHODS), default=DEFAULT)
    base: str | None = _key(checks.optional(checks.one_of(*vocabulary.BASES)), default=None)
    """For method ``"non-private"``: the method to run without clipping and noise. None: dp-threshold."""

    data: str = _key(checks.one_of(*vocabulary.DATA_SETS))
    data_folder: str = _key(checks.text, default="")
    """Folder of the data files. Empty: search the default folders."""
    verify_data: bool = _key(checks.flag, default=True)
    """Refuse files whose digests differ from the published ones; false for your own data in the same format."""
    data_memory_gib: float = _key(checks.positive, default=2.0)
    """Files larger than this are memory-mapped instead of read."""
    num_workers: int = _key(checks.count_or_zero, default=0)
    """Worker processes that load and decode data that is not in memory."""
    validation_fraction: float = _key(checks.below_one, default=0.1)
    """Fraction of the training part held out for validation; not protected by the guarantee. 0: none is held out."""
    validation_size: int | None = _key(checks.optional(checks.count), default=None)
    """Number of held-out examples, instead of a fraction."""
    train_size: int | None = _key(checks.optional(checks.count), default=None)
    """Number of training examples, drawn with ``split_seed``. None: all that are not held out."""
    test_size: int | None = _key(checks.optional(checks.count), default=None)
    """Number of test examples, drawn with ``split_seed``. None: all."""
    split_seed: int = _key(checks.seed, default=0)

    image_size: int | None = _key(checks.optional(checks.count), default=None)
    """Height and width that images are resized to. None: unchanged, or 224 for folders of image files."""
    crop_padding: int = _key(checks.count_or_zero, default=0)
    """Pixels of padding before a random crop of training images; 0: no random crop."""
    flip: bool = _key(checks.flag, default=False)
    """Random horizontal flips of training images."""
    resized_crop: bool = _key(checks.flag, default=False)
    """Random resized crops of training images, of 8 to 100 % of their area."""
    multiplicity: int = _key(checks.count, default=1)
    """Augmented views per training image; their gradients are averaged before clipping (augmentation multiplicity)."""

    model: str = _key(checks.one_of(*vocabulary.MODELS))
    cache_features: bool = _key(checks.flag, default=False)
    """Compute what comes before the head once for each example, and keep it, if ``model_options.trainable`` is ``"head"``."""

    epsilon: float | None = _key(checks.optional(checks.positive), default=None)
    noise_multiplier: float | None = _key(checks.optional(checks.positive), default=None)
    steps: int | None = _key(checks.optional(checks.count), default=None)
    plan: str | None = _key(checks.optional(checks.one_of("auto")), default=None)
    """``"auto"``: batch size, steps and bands are chosen by predicted noise, for as many processed examples as the recipe's own
    steps and batch size have."""
    delta: float = _key(checks.inside_unit_interval, default=1e-5)
    accountant: str | None = _key(checks.optional(checks.one_of("rdp", "pld")), default=None)
    """None: ``"pld"``, the tighter one, but ``"rdp"`` for a search."""
    bands: int | str | None = _key(checks.optional(checks.count_or("auto")), default=None)
    """Bands of correlated noise: a number, 1 for independent noise; or ``"auto"``, a few where they leave much less noise.
    None: ``"auto"``."""
    unit: str = _key(checks.one_of("example", "user"), default="example")
    """Whom the guarantee is for: one example, or one user with all their examples. With users, sizes count users."""
    examples_per_user: int | None = _key(checks.optional(checks.count), default=None)
    """For unit ``"user"``: the largest number of a user's examples that enter a step."""
    unit_name: str | None = _key(checks.optional(checks.noun), default=None)
    """What the unit is called in the privacy statement, such as patient. For unit ``"example"``: each has one example."""
    noise_history: str | None = _key(checks.optional(checks.one_of("device", "cpu")), default=None)
    """Where several bands keep the noise of the last steps: beside the model or in main memory. None: ``"device"``."""
    noise_memory_gib: float | None = _key(checks.optional(checks.positive), default=None)
    """The largest size of that noise. None: 2."""

    batch_size: int = _key(checks.count)
    """Expected size of a Poisson batch."""
    max_batch_size: int | None = _key(checks.optional(checks.count), default=None)
    """The most examples in a step; of a larger sample, so many are kept at random. None: no cap."""
    physical_batch_size: int = _key(checks.count, default=256)
    """Examples per forward and backward pass; affects only memory and speed."""
    class_weights: tuple[float, ...] | None = _key(checks.optional(checks.weights), default=None)
    """Weight of each class in the training loss: public numbers, not computed from the labels. None: all alike."""
    max_grad_norm: float = _key(checks.positive, default=1.0)
    clipping: str = _key(checks.one_of("flat", "per-layer"), default="flat")

    learning_rate: float | None = _key(checks.optional(checks.positive), default=None)
    """None: the default of the method."""
    distance: float | None = _key(checks.optional(checks.positive), default=None)
    """In place of a learning rate: how far the noise of the run walks. None: the default of the method, if it has one."""
    schedule: str = _key(checks.one_of("constant", "cosine", "linear"), default="constant")
    warmup: float = _key(checks.below_one, default=0.0)
    """Fraction of the steps over which the learning rate rises linearly."""
    ema_decay: float | None = _key(checks.optional(checks.below_one), default=None)
    """Decay of an exponential moving average of the weights; 0: none is kept. None: the default of the method."""

    max_steps: int | None = _key(checks.optional(checks.count), default=None)
    """Stop after this many steps; schedule and noise stay those of the full run."""
    evaluate_every: int = _key(checks.count, default=100)
    diagnostics_every: int | None = _key(checks.optional(checks.count), default=None)
    """Steps between measurements of MicroAdam's diagnostics; None: off."""
    checkpoint_every: int = _key(checks.count, default=100)
    checkpoint_minutes: float = _key(checks.positive, default=5.0)
    keep_checkpoints: int = _key(checks.count, default=2)

    secure: bool = _key(checks.flag, default=False)
    """Draw the noise from a cryptographically secure generator."""
    seed: int | None = _key(checks.optional(checks.seed), default=None)
    """Fixes all randomness, for tests; the run is then not private."""

    audit_canaries: int | None = _key(checks.optional(checks.canary_count), default=None)
    """Synthetic examples that take places in the training data, about half of them filled, for ``dp-microadam audit RUN``."""
    canary_key: str | None = _key(checks.optional(checks.random_key), default=None)
    """Decides which canaries take part. None: a new one for each run, which is kept in its configuration."""

    data_options: dict[str, Any] = field(default_factory=dict, metadata={"check": checks.table})
    columns: dict[str, Any] = field(default_factory=dict, metadata={"check": declaration})
    """What the columns of a table are: kinds, ranges and values, which are public."""
    model_options: dict[str, Any] = field(default_factory=dict, metadata={"check": checks.table})
    optimizer: dict[str, Any] = field(default_factory=dict, metadata={"check": checks.table})
    tune: dict[str, Any] = field(default_factory=dict, metadata={"check": tuning.table})
    """What ``dp-microadam tune`` chooses among; empty for a single run."""

    def __post_init__(self) -> None:
        for known in fields(self):
            value = getattr(self, known.name)
            object.__setattr__(self, known.name, known.metadata["check"](known.name, value))
        if self.base is not None and self.protected:
            raise InputError(
                f"base is {self.base!r}, but method is {self.method!r}; leave it out, it is only for method 'non-private'"
            )
        if self.learning_rate is not None and self.distance is not None:
            raise InputError(
                f"learning_rate is {self.learning_rate:g} and distance is {self.distance:g}; a method has one of the two"
            )
        texts.refuse_misfits(self)
        for table, given, known_options, owner in (
            ("optimizer", self.optimizer, vocabulary.OPTIMIZER_OPTIONS, self.algorithm),
            ("model_options", self.model_options, vocabulary.MODEL_OPTIONS, self.model),
            ("data_options", self.data_options, vocabulary.DATA_OPTIONS, self.data),
        ):
            refuse_unknown_options(table, given, known_options[owner], owner, [key.name for key in fields(self)])
        if self.columns and not takes_columns(self.data):
            raise InputError(f"columns are declared, but data is {self.data!r}; they are for tables, leave them out")
        refuse_changing_features(self)
        self._refuse_canaries_out_of_place()
        self._refuse_unsolvable_budget()
        self._refuse_unknown_users()

    @property
    def private(self) -> bool:
        """Whether the run has a privacy guarantee: not with method ``"non-private"``, and not with a fixed seed."""
        return self.protected and self.seed is None

    @property
    def protected(self) -> bool:
        """Whether the run clips and adds noise."""
        return self.method != vocabulary.NON_PRIVATE

    @property
    def predicts_tokens(self) -> bool:
        """Whether the model is a language model, whose texts need no labels."""
        return self.model == vocabulary.LANGUAGE_MODEL

    @property
    def algorithm(self) -> str:
        """The method that is run, with or without privacy."""
        return self.method if self.protected else self.base or DEFAULT

    @property
    def resolved_accountant(self) -> str:
        """``accountant``, or the tighter one that knows what the recipe declares."""
        return self.accountant or ("rdp" if self.tune else "pld")

    @property
    def resolved_learning_rate(self) -> float | None:
        """``learning_rate``, or the method's default; None where a distance takes its place."""
        if self.learning_rate is not None or self.resolved_distance is not None:
            return self.learning_rate
        method = "dp-sgd" if self._scales_gradients_for_sgd() else self.algorithm
        default = METHODS[method].learning_rate
        return default if self.protected else vocabulary.NON_PRIVATE_LEARNING_RATES.get(method, default)

    @property
    def resolved_distance(self) -> float | None:
        """``distance``, or the method's default; None where there is a learning rate."""
        if self.distance is not None or self.learning_rate is not None:
            return self.distance
        far = METHODS[self.algorithm].distance
        return ADAPTER_DISTANCE if far is not None and self.model_options.get("lora_rank") else far

    @property
    def resolved_ema_decay(self) -> float:
        """``ema_decay``, or the method's default."""
        return METHODS[self.algorithm].average if self.ema_decay is None else self.ema_decay

    def _scales_gradients_for_sgd(self) -> bool:
        """Whether this is scale-then-privatize followed by SGD, the default of all its sources but ``"previous"``."""
        base_optimizer = self.optimizer.get(
            "base_optimizer", "adam" if self.optimizer.get("source", "previous") == "previous" else "sgd"
        )
        return self.algorithm == "scale-then-privatize" and base_optimizer == "sgd"

    def to_toml(self) -> str:
        """The recipe as TOML text that :meth:`from_toml` reads back equal.

        Keys that are None (TOML has no such value) and empty tables are left out.

        >>> recipe = Recipe(name="mine", data="digits", model="mlp", epsilon=8, steps=9, batch_size=16, optimizer={"eps": 1e-6})
        >>> print(recipe.to_toml())
        name = "mine"
        ...
        [optimizer]
        eps = 1e-06
        """
        return tomli_w.dumps({key: value for key, value in asdict(self).items() if value is not None and value != {}})

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """The recipe in ``text``.

        Raises:
            InputError: if it is not TOML, or for a key or value that cannot be used.
        """
        return cls.from_dict(parse_toml(text, "the recipe"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe with these keys.

        Raises:
            InputError: for a key that is unknown or missing, or a value that cannot be used.
        """
        known = [known.name for known in fields(cls)]
        for key, value in values.items():
            if key not in known:
                raise InputError(f"recipe key {key} = {value!r} is unknown; {hint_for_key(key, known)}")
        for needed in fields(cls):
            if needed.default is MISSING and needed.default_factory is MISSING and needed.name not in values:
                raise InputError(f"the recipe lacks the key {needed.name}; it must be given")
        return cls(**values)

    def _refuse_canaries_out_of_place(self) -> None:
        if self.audit_canaries is None:
            return
        for other, unsuitable in (
            (f"method is {self.method!r}", not self.protected),
            (f"unit is {self.unit!r}", self.unit == "user"),
            ("class_weights are given", self.class_weights is not None),
            ("[tune] is given", bool(self.tune)),
        ):
            if unsuitable:
                raise InputError(
                    f"audit_canaries is {self.audit_canaries}, but {other}; leave one of them out: canaries are for single "
                    "private runs whose unit is an example, without weights of classes"
                )

    def _refuse_unsolvable_budget(self) -> None:
        budget = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier, "steps": self.steps}
        given = [f"{key} = {value}" for key, value in budget.items() if value is not None]
        if not self.protected:
            if self.steps is None:
                raise InputError("steps is not given; a non-private run needs it, since no budget decides when to stop")
        elif len(given) != 2:
            raise InputError(
                f"exactly two of epsilon, noise_multiplier and steps must be given; got {', '.join(given) or 'none'} "
                "(KEY=none removes one)"
            )

    def _refuse_unknown_users(self) -> None:
        if (self.unit == "user") != (self.examples_per_user is not None):
            raise InputError(
                f"unit is {self.unit!r} and examples_per_user is {self.examples_per_user}; unit = 'user' needs it, the largest "
                "number of a user's examples in a step, and without it there must be none"
            )
        if self.unit == "user" and self.audit_canaries is not None:
            raise InputError(
                f"audit_canaries is {self.audit_canaries}, but unit is 'user'; canaries are examples, leave them out"
            )
        if self.unit == "user" and not any(option in self.data_options for option in vocabulary.USER_OPTIONS):
            known = [option for option in vocabulary.DATA_OPTIONS[self.data] if option in vocabulary.USER_OPTIONS]
            right = " or ".join(f"data_options.{option}" for option in known) or "data 'table' or 'image-folder', which can"
            raise InputError(f"unit is 'user', but nothing says whose each example of {self.data} is; use {right}")


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The content of a TOML file; ``name`` is what messages call it.

    Raises:
        InputError: if it is not TOML.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid TOML ({error}); write keys as steps = 100, and strings in quotes") from None
