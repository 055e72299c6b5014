"""A recipe says what is wrong before anything is loaded, and comes back from its file as it was."""

import contextlib
import inspect
import re
import tomllib
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes import Recipe, keys, known_recipes, load_recipe
from dp_microadam.workbench.recipes.assemble import assemble, bands_of

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| `\[?(\w+)\]?` \| (.*?) \|", PAGE, re.MULTILINE))

MINIMAL = {"name": "mine", "data": "digits", "model": "mlp", "epsilon": 8.0, "steps": 100, "batch_size": 64}


def make(**changes):
    return Recipe.from_dict({**MINIMAL, **changes})


def test_recipes_in_the_box_load_and_are_named_after_their_file():
    assert {"demo", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagenet"} <= set(known_recipes())
    for name in known_recipes():
        assert load_recipe(name).name == name
        assert load_recipe(name).private
        assert not load_recipe(name, ["method=non-private"]).private


def rate_of(recipe):
    return recipe.resolved_learning_rate, recipe.resolved_distance, recipe.resolved_ema_decay


@pytest.mark.parametrize(("settings", "expected"), [
    (["method=dp-walk"], (None, 1.5, 0.99)),
    (["method=dp-sgd"], (4.0, None, 0.0)),
    (["method=dp-adam"], (1e-3, None, 0.0)),
    (["method=dp-sgd", "distance=2"], (None, 2.0, 0.0)),
    (["learning_rate=1e-3"], (1e-3, None, 0.99)),
    (["distance=0.5"], (None, 0.5, 0.99)),
    (["method=non-private"], (None, 1.5, 0.99)),
    (["method=non-private", "base=dp-sgd"], (0.1, None, 0.0)),
    (["method=dp-microadam"], (1e-3, None, 0.0)),
    (["ema_decay=0"], (None, 1.5, 0.0)),
])  # fmt: skip
def test_a_rate_is_the_optimizer_s_own_or_follows_from_a_distance(settings, expected):
    assert rate_of(load_recipe("demo", settings)) == expected


def test_adapters_walk_half_as_far_by_default():
    assert rate_of(load_recipe("sms-spam")) == (None, 0.75, 0.99)
    assert rate_of(load_recipe("sms-spam", ["model_options.lora_rank=0"])) == (None, 1.5, 0.99)
    assert rate_of(load_recipe("sms-spam", ["method=dp-adam"])) == (1e-3, None, 0.0)


@pytest.mark.parametrize(
    ("name", "size", "noise"), [("cifar10", 45_000, 5.0), ("cifar100", 45_000, 5.0), ("imagenet", 1_271_167, 2.5)]
)
def test_steps_of_the_large_recipes_are_what_the_noise_of_the_paper_allows(name, size, noise):
    from dp_microadam.plan.plan import PrivacyPlan

    recipe = load_recipe(name)
    budget = {"dataset_size": size, "batch_size": recipe.batch_size, "delta": recipe.delta, "epsilon": recipe.epsilon}
    budget["accountant"] = recipe.accountant
    assert PrivacyPlan.solve(**budget, noise_multiplier=noise).steps == recipe.steps
    assert PrivacyPlan.solve(**budget, steps=recipe.steps).noise_multiplier == pytest.approx(noise, rel=1e-4)


def test_the_recipes_of_the_paper_have_its_settings():
    cifar, imagenet = load_recipe("cifar10"), load_recipe("imagenet")
    assert (cifar.model, cifar.batch_size, cifar.delta, cifar.crop_padding, cifar.flip) == ("wide-resnet", 4096, 1e-5, 4, True)
    assert (imagenet.model, imagenet.batch_size, imagenet.delta) == ("wide-resnet", 16_384, 8e-7)
    assert (imagenet.validation_size, imagenet.ema_decay, imagenet.resized_crop) == (10_000, 0.99999, True)
    for recipe in (cifar, imagenet):
        assert (recipe.method, *rate_of(recipe)[:2]) == ("dp-microadam", 1e-3, None)
        assert (recipe.accountant, recipe.bands, recipe.max_grad_norm) == ("rdp", 1, 1.0)
        assert recipe.optimizer == {}


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("bach_size=3", "bach_size = 3 is unknown; the nearest known key is batch_size"),
        ("epsilonn=1.0", "epsilonn = 1.0 is unknown; the nearest known key is epsilon"),
        ("optimiser={}", "optimiser = {} is unknown; the nearest known key is optimizer"),
        ("lr=0.1", "lr = 0.1 is unknown; the learning rate is the recipe's own key learning_rate"),
        ("optimizer.lr=0.1", "optimizer.lr = 0.1 is unknown; the learning rate is the recipe's own key learning_rate"),
        ("optimizer.batch_size=3", "batch_size is a key of the recipe itself"),
        ("optimizer.weight_deca=0.1", "the nearest known option of dp-threshold is weight_decay"),
        ("optimizer.xyz=1", "known options of dp-threshold are threshold, beta, eps, weight_decay"),
        ("model_options.xyz=3", "tanh-cnn has none"),
        ("data_options.xyz=3", "digits has none"),
        ("density=0.1", "it is an option, optimizer.density"),
        ("xyz=1", "known keys are name, method, base"),
    ],
)
def test_an_unknown_key_is_refused_with_its_value_and_what_was_meant(override, hint):
    with pytest.raises(InputError, match=re.escape(hint)) as refusal:
        load_recipe("demo", [override])
    assert "\n" not in str(refusal.value)


WRONG_VALUES = {
    "name": [" ", 3, "../elsewhere", ".hidden", "two\nlines", "x" * 101],
    "method": ["dp-sdg"],
    "base": ["non-private"],
    "data": ["svhn"],
    "data_folder": [7, "\udcff"],
    "verify_data": ["yes"],
    "num_workers": [-1],
    "validation_fraction": [-0.1, 1.0],
    "validation_size": [0],
    "train_size": [0],
    "test_size": [0],
    "split_seed": [-1],
    "image_size": [0],
    "crop_padding": [-1],
    "flip": [1],
    "resized_crop": ["no"],
    "multiplicity": [0],
    "model": ["resnet"],
    "cache_features": [1],
    "epsilon": [1e308, 0.0, "8", True, float("nan"), float("inf"), 10**400],
    "steps": [0, 10.0, True],
    "plan": ["best"],
    "delta": [0.0, 1.0],
    "accountant": ["moments"],
    "bands": [0, 2.0, "all"],
    "unit": ["patient"],
    "unit_name": ["", "p4", " patient", "two\nlines", "x" * 41, 3],
    "examples_per_user": [0],
    "noise_memory_gib": [0.0, 1e308],
    "batch_size": [0, 2**64],
    "max_batch_size": [0],
    "physical_batch_size": [0],
    "class_weights": [[1.0], [1.0, 0.0], [1.0, float("inf")], "balanced"],
    "max_grad_norm": [0.0, 1e308],
    "clipping": ["layer"],
    "learning_rate": [-1.0],
    "distance": [0],
    "schedule": ["step"],
    "warmup": [1.0, -0.1],
    "ema_decay": [1.0],
    "max_steps": [0],
    "evaluate_every": [0],
    "checkpoint_every": [1.5],
    "checkpoint_minutes": [0.0],
    "keep_checkpoints": [0],
    "secure": [1],
    "seed": [-1, 1.0],
    "audit_canaries": [99],
    "canary_key": ["8a23"],
    "data_options": [3],
    "columns": [3],
    "optimizer": [3],
    "model_options": [[]],
    "tune": [3],
}


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_a_wrong_value_is_refused_with_its_key_and_what_would_be_right(key):
    for value in WRONG_VALUES[key]:
        with pytest.raises(InputError) as refusal:
            make(**{key: value})
        assert str(refusal.value).startswith(f"{key} is ")
        assert " must " in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_every_key_has_a_wrong_value_in_the_test_above():
    assert set(WRONG_VALUES) | {"noise_multiplier"} == set(Recipe.__dataclass_fields__)
    with pytest.raises(InputError, match=r"^noise_multiplier is -1\.0; it must"):
        make(steps=None, noise_multiplier=-1.0)


@pytest.mark.parametrize("key", ["name", "data", "model", "batch_size"])
def test_a_missing_key_is_named(key):
    with pytest.raises(InputError, match=f"lacks the key {key}"):
        Recipe.from_dict({other: value for other, value in MINIMAL.items() if other != key})


@pytest.mark.parametrize(
    "given", [(), ("epsilon",), ("steps",), ("epsilon", "steps"), ("epsilon", "noise_multiplier", "steps")]
)
def test_exactly_two_of_the_budget_are_given_and_steps_without_privacy(given):
    budget = {"epsilon": 8.0, "noise_multiplier": 1.0, "steps": 10}
    values = {key: value for key, value in MINIMAL.items() if key not in budget} | {key: budget[key] for key in given}
    said = "exactly two of epsilon, noise_multiplier and steps"
    with contextlib.nullcontext() if len(given) == 2 else pytest.raises(InputError, match=said):
        Recipe.from_dict(values)
    with contextlib.nullcontext() if "steps" in given else pytest.raises(InputError, match="steps is not given"):
        Recipe.from_dict({**values, "method": "non-private"})


def test_a_non_private_run_takes_the_options_of_its_base():
    recipe = make(method="non-private", base="sparta", optimizer={"keep": 0.5})
    assert (recipe.algorithm, recipe.private, recipe.protected) == ("sparta", False, False)
    assert make(method="non-private").algorithm == "dp-threshold"
    assert make().private
    assert not make(seed=0).private
    with pytest.raises(InputError, match=r"optimizer.keep = 0.5 is unknown; .* of dp-adam"):
        make(method="non-private", base="dp-adam", optimizer={"keep": 0.5})
    with pytest.raises(InputError, match="base is 'dp-sgd', but method is 'dp-adam'"):
        make(method="dp-adam", base="dp-sgd")


def test_methods_and_their_options_of_the_vocabulary_are_those_of_the_code():
    import torch

    from dp_microadam import MicroAdam
    from dp_microadam.methods.registry import at_path
    from dp_microadam.methods.table import METHODS
    from dp_microadam.optimizers.adam_bc import AdamBC
    from dp_microadam.optimizers.tensor_adam import TensorAdam
    from dp_microadam.optimizers.threshold_adam import ThresholdAdam

    base_optimizer = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, MicroAdam]
    optimizers = {
        "dp-threshold": [ThresholdAdam],
        "dp-walk": [TensorAdam],
        "dp-microadam": [MicroAdam],
        "dp-sgd": [torch.optim.SGD],
        "dp-adam": [torch.optim.Adam],
        "dp-adamw": [torch.optim.AdamW],
        "dp-adambc": [AdamBC],
    }
    for method in keys.BASES:
        path = METHODS[method].path
        parameters = {} if path is None else inspect.signature(at_path(path)).parameters
        own = {name for name, parameter in parameters.items() if parameter.kind.name == "KEYWORD_ONLY"}
        its = {name for optimizer in optimizers.get(method, base_optimizer) for name in inspect.signature(optimizer).parameters}
        assert own - {"lr"} <= set(keys.OPTIMIZER_OPTIONS[method]) <= own | its
    for optimizer, method in ((MicroAdam, "dp-microadam"), (ThresholdAdam, "dp-threshold")):
        rest = set(inspect.signature(optimizer).parameters) - set(keys.OPTIMIZER_OPTIONS[method])
        assert rest == {"params", "lr"}, "the step size has a key of its own"


def test_models_of_the_vocabulary_are_those_of_the_code():
    from dp_microadam.workbench.models import registry

    assert {name: registry.options_of(name) for name in registry.BUILDERS} == keys.MODEL_OPTIONS


options = {
    "density": st.floats(0.001, 1),
    "window": st.integers(1, 50),
    "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    "quantize": st.booleans(),
    "scope": st.text(),
}
recipes = st.builds(
    Recipe,
    name=st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters="/\\."), min_size=1, max_size=100),
    data=st.sampled_from([name for name in keys.DATA_SETS if name not in keys.TEXT_SETS]),
    data_folder=st.text(),
    model=st.just("mlp"),
    model_options=st.fixed_dictionaries({}, optional={"hidden": st.lists(st.integers(1, 512)) | st.integers(1, 9)}),
    method=st.just("dp-microadam"),
    optimizer=st.fixed_dictionaries({}, optional=options),
    epsilon=st.floats(1e-300, 1e30),
    steps=st.integers(1, 10**12),
    delta=st.floats(1e-38, 0.5, exclude_min=True),
    batch_size=st.integers(1, 10**12),
    learning_rate=st.none() | st.floats(0.02, 1e12) | st.integers(1, 9),
    max_steps=st.none() | st.integers(1, 10**6),
    secure=st.booleans(),
    seed=st.none() | st.integers(0, 2**63 - 1),
)


@examples(200)
@given(recipes)
def test_a_recipe_comes_back_from_its_toml_as_it_was(recipe):
    assert Recipe.from_toml(recipe.to_toml()) == recipe


@examples(200)
@given(st.sampled_from(sorted(Recipe.__dataclass_fields__)), st.text())
def test_any_override_gives_a_recipe_that_comes_back_or_is_refused(key, value):
    with contextlib.suppress(InputError):
        recipe = load_recipe("demo", [f"{key}={value}"])
        assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_overrides_are_toml_or_bare_strings_and_reach_into_tables():
    recipe = load_recipe(
        "demo",
        [
            "method=dp-sgd",
            'name="quoted name"',
            "optimizer.momentum = 0.9",
            "data_folder=2024",
            "learning_rate=2",
            "secure=true",
            "steps=7",
            "steps=8",
        ],
    )
    assert (recipe.method, recipe.name, recipe.data_folder) == ("dp-sgd", "quoted name", "2024")
    assert recipe.optimizer == {"momentum": 0.9}
    assert (recipe.learning_rate, recipe.secure, recipe.steps) == (2.0, True, 8)


def test_none_takes_a_key_or_an_option_back(tmp_path):
    recipe = load_recipe("demo", ["steps=none", "noise_multiplier=2.0"])
    assert (recipe.steps, recipe.noise_multiplier) == (None, 2.0)
    path = tmp_path / "mine.toml"
    path.write_text(make(method="dp-microadam", optimizer={"density": 0.5, "window": 3}).to_toml())
    assert load_recipe(str(path), ["optimizer.density=none"]).optimizer == {"window": 3}
    assert load_recipe(str(path), ["optimizer={}"]).optimizer == {}
    with pytest.raises(InputError, match="batch_size is 'none'"):
        load_recipe("demo", ["batch_size=none"])


@pytest.mark.parametrize("override", ["steps", "=3", "", "model.depth=3", "steps=7\nseed = 1"])
def test_an_override_that_addresses_nothing_or_two_keys_is_refused(override):
    with pytest.raises(InputError, match=r"key=value|not a table|steps is '7"):
        load_recipe("demo", [override])


def test_a_recipe_file_is_read_by_its_path_and_named_after_itself(tmp_path):
    path = tmp_path / "my-run.toml"
    path.write_text("\n".join(line for line in make().to_toml().splitlines() if not line.startswith("name")))
    assert load_recipe(str(path)) == replace(make(), name="my-run")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"steps = ", "not valid TOML"), (b"\xff\xfe", "not UTF-8"), (b"a = 1\na = 2", "not valid TOML"), (b"", "lacks the key")],
)
def test_an_unreadable_recipe_file_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as refusal:
        load_recipe(str(path))
    assert "\n" not in str(refusal.value)


def test_a_recipe_that_does_not_exist_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(InputError, match=r"no recipe 'demmo'; known are .*nearest: demo"):
        load_recipe("demmo")
    with pytest.raises(InputError, match="No such file"):
        load_recipe(str(tmp_path / "missing.toml"))
    with pytest.raises(InputError, match="directory"):
        load_recipe(str(tmp_path))


SMALL = ["model=mlp", "model_options.hidden=[8]", "steps=200", "batch_size=16", "epsilon=20.0"]


def assembled(tmp_path, *settings):
    return assemble(load_recipe("demo", [*SMALL, *settings]), tmp_path / "run", show_progress=False)


@pytest.mark.parametrize(("settings", "bands"), [
    ([], "auto"),
    (["bands=4"], 4),
    (["method=dp-adambc"], 1),
    (["method=dp-microadam"], 1),
    (["tune={expected_runs=4, distance=[0.5, 1.5]}"], 1),
])  # fmt: skip
def test_bands_are_automatic_for_methods_that_gain_from_them(settings, bands):
    assert bands_of(load_recipe("demo", settings)) == bands


def test_a_run_states_its_defaults_so_that_it_goes_on_as_it_began(tmp_path):
    """A large network walks farther from scratch."""
    made = assembled(tmp_path)
    stated = Recipe.from_toml(made.recipe.to_toml())
    assert stated == made.recipe
    assert (stated.distance, stated.learning_rate, stated.ema_decay, stated.accountant) == (1.5, None, 0.99, "pld")
    assert stated.bands == made.trainer.plan.bands > 1
    wide = "model_options.hidden=[400, 256]"  # 419,226 parameters
    assert assembled(tmp_path, "bands=1", wide).recipe.distance == pytest.approx(1.5 * (419_226 / 250_000) ** (1 / 6))
    assert assembled(tmp_path, "bands=1", wide, "distance=1.5").recipe.distance == 1.5


def test_an_automatic_plan_is_stated_in_numbers_and_processes_no_more_examples(tmp_path):
    made = assembled(tmp_path, "batch_size=1024", "plan=auto")
    again, plan = made.recipe, made.trainer.plan
    assert again.plan is None
    assert (again.batch_size, again.steps, again.bands) == (plan.batch_size, plan.steps, plan.bands)
    assert plan.batch_size * plan.steps <= 200 * 1024
    assert plan.batch_size < 1024, "a batch of a third of the data leaves too few steps"
    assert plan.epsilon <= 20.0


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("method=non-private", "plan is 'auto', but method is 'non-private': a proposal needs epsilon"),
        ("bands=4", "plan is 'auto', but bands is 4"),
        ("max_batch_size=2000", "plan is 'auto', but max_batch_size is 2000"),
        ("epsilon=none", "exactly two of"),
    ],
)
def test_an_automatic_plan_that_has_nothing_to_choose_is_refused(setting, sentence):
    with pytest.raises(InputError) as refused:
        load_recipe("demo", [*SMALL, "plan=auto", setting])
    assert str(refused.value).startswith(sentence)


def test_every_key_is_explained_with_its_default():
    assert {key.name for key in fields(Recipe)} <= ROWS.keys()
    for key in fields(Recipe):
        if key.default not in (MISSING, None):
            assert tomllib.loads(f"value = {ROWS[key.name].strip('`')}")["value"] == key.default, key.name
    shown = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
    assert Recipe.from_toml(shown).optimizer == {"weight_decay": 0.01}


def test_every_word_of_the_vocabulary_and_every_recipe_is_mentioned():
    tables = (*keys.MODEL_OPTIONS.values(), *keys.DATA_OPTIONS.values())
    options = [option for names in tables for option in names]
    for word in (keys.NON_PRIVATE, *keys.MODELS, *keys.DATA_SETS):
        assert f'"{word}"' in PAGE
    for word in (*options, *known_recipes(), *keys.DATA_SETS):
        assert f"`{word}`" in PAGE


def test_the_recipe_shown_trains_on_such_a_table(tmp_path):
    shown = re.search(r"## Your own table\n\n```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    table = tmp_path / "patients.csv"
    people = (
        f"{20 + n % 60},{n if n % 5 else ''},{('never', '?')[n % 2]},{('north', 'east')[n % 2]},{n},"
        f"{('healthy', 'ill')[n % 2]}\n"
        for n in range(500)
    )
    table.write_text("age,income,smoker,region,record,outcome\n" + "".join(people))
    recipe = Recipe.from_toml(shown.replace("patients.csv", str(table)).replace("steps = 500", "steps = 2"))
    assert assemble(recipe, tmp_path / "run", show_progress=False).fit().steps_done == 2
