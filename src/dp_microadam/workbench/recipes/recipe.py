"""A recipe: all settings of a training run. It is validated completely before any data is loaded or anything is written."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

import tomli_w

from dp_microadam.errors import InputError
from dp_microadam.methods.table import DEFAULT, METHODS
from dp_microadam.plan.learning_rate import ADAPTER_DISTANCE
from dp_microadam.workbench.data.columns import declaration
from dp_microadam.workbench.recipes import keys, tuning
from dp_microadam.workbench.recipes.keys import Canaries, Count, Name, Noun, Positive, Probability, Share, Whole

_NON_PRIVATE_SGD_RATE = 0.1
"""DP-SGD's 4.0 is tuned for gradients of norm at most one."""

_EXCLUSIVE: Mapping[str, tuple[Any, ...]] = {
    "audit_canaries": (
        "canaries are images or rows of numbers, in single private runs whose unit is an example, without weights of classes",
        ("method", lambda method: method != keys.NON_PRIVATE),
        ("unit", lambda unit: unit == "example"),
        ("class_weights", lambda weights: weights is None),
        ("tune", lambda tune: not tune),
        ("data", lambda data: data not in keys.TEXT_SETS),
    ),
    "cache_features": (
        "features are kept of a frozen backbone alone, and must not change from step to step",
        ("model_options", lambda options: options.get("trainable") == "head" and not options.get("lora_rank")),
        *((key, lambda changes: not changes) for key in ("crop_padding", "flip", "resized_crop", "tune")),
    ),
    "plan": (
        "a proposal needs epsilon, is for a single private run, and chooses batch size, steps and bands itself",
        ("method", lambda method: method != keys.NON_PRIVATE),
        ("epsilon", lambda epsilon: epsilon is not None),
        ("bands", lambda bands: bands in (None, "auto", 1)),
        ("max_batch_size", lambda most: most is None),
        ("tune", lambda tune: not tune),
    ),
}
"""Keys with what others must be beside them, and why."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of one training run, which docs/recipes.md explains. All are public: none may be derived from private data.

    Exactly two of ``epsilon``, ``noise_multiplier`` and ``steps`` are given, and the third is solved. A non-private run needs
    only ``steps`` and ignores the other two, so that any recipe with ``steps`` can also be run without privacy.

    >>> Recipe(name="mine", data="digits", model="mlp", epsilon=8, steps=1000, batch_size=256).resolved_distance
    1.5
    >>> Recipe.from_toml('name = "mine"\\nmodle = "mlp"')
    Traceback (most recent call last):
        ...
    dp_microadam.errors.InputError: recipe key modle = 'mlp' is unknown; the nearest known key is model
    """

    name: Name
    method: Annotated[str, keys.one_of(*keys.METHODS)] = DEFAULT
    base: Annotated[str, keys.one_of(*keys.BASES)] | None = None

    data: Annotated[str, keys.one_of(*keys.DATA_SETS)]
    data_folder: str = ""
    verify_data: bool = True
    num_workers: Whole = 0
    validation_fraction: Share = 0.1
    validation_size: Count | None = None
    train_size: Count | None = None
    test_size: Count | None = None
    split_seed: Whole = 0

    image_size: Count | None = None
    crop_padding: Whole = 0
    flip: bool = False
    resized_crop: bool = False
    multiplicity: Count = 1

    model: Annotated[str, keys.one_of(*keys.MODELS)]
    cache_features: bool = False

    epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    steps: Count | None = None
    plan: Literal["auto"] | None = None
    delta: Probability = 1e-5
    accountant: Literal["rdp", "pld"] | None = None
    bands: Count | Literal["auto"] | None = None
    unit: Literal["example", "user"] = "example"
    examples_per_user: Count | None = None
    unit_name: Noun | None = None
    noise_memory_gib: Positive | None = None

    batch_size: Count
    max_batch_size: Count | None = None
    physical_batch_size: Count = 256
    class_weights: keys.Weights | None = None
    max_grad_norm: Positive = 1.0
    clipping: Literal["flat", "per-layer"] = "flat"

    learning_rate: Positive | None = None
    distance: Positive | None = None
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: Share = 0.0
    ema_decay: Share | None = None

    max_steps: Count | None = None
    evaluate_every: Count = 100
    checkpoint_every: Count = 100
    checkpoint_minutes: Positive = 5.0
    keep_checkpoints: Count = 2

    secure: bool = False
    seed: Whole | None = None

    audit_canaries: Canaries | None = None
    canary_key: keys.Key | None = None

    data_options: keys.Table = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    model_options: keys.Table = field(default_factory=dict)
    optimizer: keys.Table = field(default_factory=dict)
    tune: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        readers = {"columns": declaration, "tune": tuning.table}
        for key, kind in kinds().items():
            given = getattr(self, key)
            found = readers[key](key, given) if key in readers else keys.read(key, kind, given)
            object.__setattr__(self, key, found)
        for sentence in self._conflicts():
            raise InputError(sentence)
        owners = {"optimizer": self.algorithm, "model_options": self.model, "data_options": self.data}
        for name, owner in owners.items():
            for option, value in getattr(self, name).items():
                refuse_unknown(f"{name}.{option}", value, keys.TABLES[name][owner], owner)

    def _conflicts(self) -> Iterator[str]:
        """Settings that exclude each other, in a sentence each."""
        if self.base is not None and self.protected:
            yield f"base is {self.base!r}, but method is {self.method!r}; leave it out, it is only for method 'non-private'"
        if self.learning_rate is not None and self.distance is not None:
            yield (
                f"learning_rate is {self.learning_rate:g} and distance is {self.distance:g}, from which a rate follows; leave "
                "one of them out"
            )
        is_text, takes_text = self.data in keys.TEXT_SETS, self.model in keys.TEXT_MODELS
        if is_text != takes_text:
            right = [name for name in keys.MODELS if (name in keys.TEXT_MODELS) == is_text]
            of = f"but {self.data} are texts" if is_text else f"which takes texts, and data is {self.data!r}"
            yield f"model is {self.model!r}, {of}; it must be one of {', '.join(map(repr, right))}"
        if self.predicts_tokens and self.class_weights is not None:
            yield "class_weights are given, but a language model has no classes; leave them out"
        budget = {"epsilon": self.epsilon, "noise_multiplier": self.noise_multiplier, "steps": self.steps}
        given = [f"{key} = {value}" for key, value in budget.items() if value is not None]
        if not self.protected and self.steps is None:
            yield "steps is not given; a non-private run needs it, since no budget decides when to stop"
        if self.protected and len(given) != 2:
            yield (
                f"exactly two of epsilon, noise_multiplier and steps must be given; got {', '.join(given) or 'none'} "
                "(KEY=none removes one)"
            )
        if self.unit == "user" and not any(option in self.data_options for option in keys.USER_OPTIONS):
            known = [option for option in keys.DATA_OPTIONS[self.data] if option in keys.USER_OPTIONS]
            use = " or ".join(f"data_options.{option}" for option in known) or "data 'table' or 'image-folder', which can"
            yield f"unit is 'user', but nothing says whose each example of {self.data} is; use {use}"
        if self.unit == "user" and self.examples_per_user is None:
            yield (
                "unit is 'user', but examples_per_user is missing; give the largest number of a user's examples that enter a "
                "step"
            )
        if self.unit == "example" and self.examples_per_user is not None:
            yield f"examples_per_user is {self.examples_per_user}, but unit is 'example'; set unit = \"user\", or leave it out"
        for key, (why, *unsuitable) in _EXCLUSIVE.items():
            value = getattr(self, key)
            for other, suits in unsuitable if value else ():
                if not suits(found := getattr(self, other)):
                    yield f"{key} is {value!r}, but {other} is {found!r}: {why}; change one of them"

    @property
    def private(self) -> bool:
        """Whether the run has a privacy guarantee: not with method ``"non-private"``, and not with a fixed seed."""
        return self.protected and self.seed is None

    @property
    def protected(self) -> bool:
        """Whether the run clips and adds noise."""
        return self.method != keys.NON_PRIVATE

    @property
    def predicts_tokens(self) -> bool:
        """Whether the model is a language model, whose texts need no labels."""
        return self.model == keys.LANGUAGE_MODEL

    @property
    def algorithm(self) -> str:
        """The method that is run, with or without privacy."""
        return self.method if self.protected else self.base or DEFAULT

    @property
    def resolved_accountant(self) -> Literal["rdp", "pld"]:
        """``accountant``, or the tighter one that knows what the recipe declares."""
        return self.accountant or ("rdp" if self.tune else "pld")

    @property
    def resolved_distance(self) -> float | None:
        """``distance``, or the default of methods whose rate follows from the plan; None for a rate of the optimizer."""
        if self.distance is not None or self.learning_rate is not None:
            return self.distance
        far = METHODS[self.algorithm].distance
        return ADAPTER_DISTANCE if far is not None and self.model_options.get("lora_rank") else far

    @property
    def resolved_learning_rate(self) -> float | None:
        """``learning_rate``, or the default of methods that have one; None where it follows from the plan."""
        if self.learning_rate is not None or self.resolved_distance is not None:
            return self.learning_rate
        by_sgd = self.algorithm == "scale-then-privatize" and self._base_optimizer == "sgd"
        if (by_sgd or self.algorithm == "dp-sgd") and not self.protected:
            return _NON_PRIVATE_SGD_RATE
        return METHODS["dp-sgd" if by_sgd else self.algorithm].learning_rate

    @property
    def resolved_ema_decay(self) -> float:
        """``ema_decay``, or the method's default."""
        return METHODS[self.algorithm].average if self.ema_decay is None else self.ema_decay

    @property
    def resolved_model_options(self) -> dict[str, Any]:
        """``model_options``; features are brought to a fixed norm before the head of a vision transformer that is frozen."""
        options = self.model_options
        frozen = options.get("trainable") in ("biases", "head") or bool(options.get("lora_rank"))
        normalized = frozen and "normalize_features" in keys.MODEL_OPTIONS[self.model]
        return {"normalize_features": True, **options} if normalized else options

    @property
    def _base_optimizer(self) -> str:
        """Of scale-then-privatize: SGD is the default of all its sources but ``"previous"``."""
        previous = self.optimizer.get("source", "previous") == "previous"
        return str(self.optimizer.get("base_optimizer", "adam" if previous else "sgd"))

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
        """The recipe in ``text``."""
        return cls.from_dict(parse_toml(text, "the recipe"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe with these keys."""
        for key, value in values.items():
            refuse_unknown(key, value, list(kinds()))
        for needed in fields(cls):
            if needed.default is MISSING and needed.default_factory is MISSING and needed.name not in values:
                raise InputError(f"the recipe lacks the key {needed.name}; it must be given")
        return cls(**values)


@cache
def kinds() -> Mapping[str, Any]:
    """The types of all keys."""
    return get_type_hints(Recipe, include_extras=True)


def refuse_unknown(key: str, value: Any, known: Sequence[str], owner: str = "") -> None:
    """Raise an InputError for a key of the recipe, or an option of ``owner`` in a table, that is not ``known``."""
    inside, _, word = key.rpartition(".")
    what = f"option of {owner}" if inside else "key"
    homes = [name for name, owners in keys.TABLES.items() if any(word in options for options in owners.values())]
    if word in known:
        return
    if word in ("lr", "learning_rate", "step_size"):
        hint = "the learning rate is the recipe's own key learning_rate"
    elif inside and word in kinds():
        hint = f"{word} is a key of the recipe itself"
    elif not inside and homes:
        hint = f"it is an option, {homes[0]}.{word}"
    elif near := difflib.get_close_matches(word, known, n=1):
        hint = f"the nearest known {what} is {near[0]}"
    else:
        hint = (
            f"known {what.replace(' ', 's ', 1) if inside else 'keys'} are {', '.join(known)}" if known else f"{owner} has none"
        )
    raise InputError(f"recipe key {key} = {value!r} is unknown; {hint}")


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The content of a TOML file; ``name`` is what messages call it."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not valid TOML ({error}); write keys as steps = 100, and strings in quotes") from None
