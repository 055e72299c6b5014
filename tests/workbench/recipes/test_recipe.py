"""A recipe says what is wrong before anything is loaded, and comes back from its file as it was."""

import contextlib
import inspect
import re
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import examples

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes import Recipe, known_recipes, load_recipe, vocabulary

MINIMAL = {"name": "mine", "data": "digits", "model": "mlp", "epsilon": 8.0, "steps": 100, "batch_size": 64}


def make(**changes):
    return Recipe.from_dict({**MINIMAL, **changes})


def test_recipes_in_the_box_load_and_are_named_after_their_file():
    assert {"demo", "mnist", "fashion-mnist", "cifar10", "cifar100", "imagenet"} <= set(known_recipes())
    for name in known_recipes():
        assert load_recipe(name).name == name


@pytest.mark.parametrize("name", known_recipes())
def test_recipes_in_the_box_are_private_and_can_be_compared_with_their_non_private_run(name):
    assert load_recipe(name).private
    assert not load_recipe(name, ["method=non-private"]).private


def test_adapters_walk_half_as_far_by_default():
    adapted = load_recipe("sms-spam")
    assert (adapted.method, adapted.distance, adapted.resolved_distance) == ("dp-threshold", None, 0.75)
    assert load_recipe("sms-spam", ["model_options.lora_rank=0"]).resolved_distance == 1.5
    assert load_recipe("sms-spam", ["method=dp-adam"]).resolved_learning_rate == 1e-3
    assert load_recipe("sms-spam", ["distance=2"]).resolved_distance == 2.0


def test_the_demo_and_fashion_mnist_leave_everything_at_its_defaults():
    for name in ("demo", "fashion-mnist"):
        recipe = load_recipe(name)
        assert (recipe.method, recipe.optimizer, recipe.resolved_distance) == ("dp-threshold", {}, 1.5)
        assert recipe.resolved_ema_decay == 0.99
        assert (recipe.max_grad_norm, recipe.secure, recipe.seed) == (1.0, False, None)


def test_budgets_of_the_recipes_in_the_box():
    demo, fashion = load_recipe("demo"), load_recipe("fashion-mnist")
    assert (demo.epsilon, demo.data) == (8.0, "digits")
    assert demo.delta <= 1e-5
    assert (fashion.epsilon, fashion.delta, fashion.steps, fashion.batch_size) == (3.0, 1e-5, 2500, 1024)
    assert (fashion.data, fashion.model) == ("fashion-mnist", "tanh-cnn")


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
        assert (recipe.method, recipe.resolved_learning_rate, recipe.max_grad_norm) == ("dp-microadam", 1e-3, 1.0)
        assert (recipe.accountant, recipe.bands, recipe.resolved_distance) == ("rdp", 1, None)
        assert recipe.optimizer == {}


def test_options_of_the_data_are_checked():
    assert make(data="cifar100", data_options={"labels": "coarse"}).data_options == {"labels": "coarse"}
    with pytest.raises(InputError, match="cifar10 has no options"):
        make(data="cifar10", data_options={"labels": "coarse"})
    with pytest.raises(InputError, match=r"data_options.lable = 'x' is unknown; .* of table is label"):
        make(data="table", data_options={"lable": "x"})


def test_loading_a_recipe_does_not_import_torch():
    code = (
        "import sys; from dp_microadam.workbench.recipes import load_recipe; load_recipe('demo'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [
        ("bach_size", 3, "batch_size"),
        ("lr", 0.1, "learning_rate"),
        ("epsilonn", 1.0, "epsilon"),
        ("optimiser", {}, "optimizer"),
    ],
)
def test_an_unknown_key_is_refused_with_its_value_and_the_nearest_known_key(key, value, nearest):
    with pytest.raises(InputError) as refusal:
        make(**{key: value})
    assert f"{key} = {value!r} is unknown" in str(refusal.value)
    assert str(refusal.value).endswith(f" {nearest}")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optimizer.lr=0.1", "the learning rate is the recipe's own key learning_rate"),
        ("optimizer.batch_size=3", "batch_size is a key of the recipe itself"),
        ("optimizer.weight_deca=0.1", "the nearest known option of dp-threshold is weight_decay"),
        ("optimizer.xyz=1", "known options of dp-threshold are threshold, beta, eps, weight_decay"),
        ("model_options.depth=3", "tanh-cnn has no options"),
        ("density=0.1", "it is an option, optimizer.density"),
        ("xyz=1", "known keys are name, method, base"),
    ],
)
def test_hints_point_to_what_was_meant_or_list_what_is_known(override, hint):
    with pytest.raises(InputError, match=re.escape(hint)):
        load_recipe("demo", [override])


def test_a_recipe_name_that_resembles_none_gets_no_nearest():
    with pytest.raises(InputError, match=r"known are .*, or give the path") as refusal:
        load_recipe("zzz")
    assert "nearest" not in str(refusal.value)


WRONG_VALUES = [
    ("epsilon", 1e308),
    ("noise_memory_gib", 1e308),
    ("max_grad_norm", 1e308),
    ("data_memory_gib", 1e308),
    ("name", " "),
    ("name", 3),
    ("name", "../elsewhere"),
    ("name", ".hidden"),
    ("name", "two\nlines"),
    ("name", "x" * 101),
    ("method", "dp-sdg"),
    ("data", "svhn"),
    ("data_folder", 7),
    ("data_folder", "\udcff"),
    ("base", "non-private"),
    ("validation_fraction", -0.1),
    ("validation_fraction", 1.0),
    ("cache_features", 1),
    ("columns", 3),
    ("split_seed", -1),
    ("validation_size", 0),
    ("train_size", 0),
    ("test_size", 0),
    ("verify_data", "yes"),
    ("data_memory_gib", 0.0),
    ("num_workers", -1),
    ("image_size", 0),
    ("crop_padding", -1),
    ("flip", 1),
    ("resized_crop", "no"),
    ("multiplicity", 0),
    ("data_options", 3),
    ("model", "resnet"),
    ("epsilon", 0.0),
    ("epsilon", "8"),
    ("epsilon", True),
    ("epsilon", float("nan")),
    ("epsilon", float("inf")),
    ("epsilon", 10**400),
    ("steps", 0),
    ("steps", 10.0),
    ("steps", True),
    ("delta", 0.0),
    ("delta", 1.0),
    ("accountant", "moments"),
    ("plan", "best"),
    ("bands", 0),
    ("bands", 2.0),
    ("bands", "all"),
    ("unit", "patient"),
    ("unit_name", "two\nlines"),
    ("examples_per_user", 0),
    ("noise_history", "disk"),
    ("noise_memory_gib", 0.0),
    ("batch_size", 0),
    ("batch_size", 2**64),
    ("max_batch_size", 0),
    ("physical_batch_size", 0),
    ("class_weights", [1.0]),
    ("class_weights", [1.0, 0.0]),
    ("class_weights", [1.0, float("inf")]),
    ("class_weights", "balanced"),
    ("max_grad_norm", 0.0),
    ("clipping", "layer"),
    ("learning_rate", -1.0),
    ("distance", 0.0),
    ("schedule", "step"),
    ("warmup", 1.0),
    ("warmup", -0.1),
    ("ema_decay", 1.0),
    ("max_steps", 0),
    ("evaluate_every", 0),
    ("diagnostics_every", 0),
    ("checkpoint_every", 1.5),
    ("checkpoint_minutes", 0.0),
    ("keep_checkpoints", 0),
    ("secure", 1),
    ("seed", -1),
    ("seed", 1.0),
    ("audit_canaries", 99),
    ("canary_key", "8a23"),
    ("optimizer", 3),
    ("model_options", []),
    ("tune", 3),
]


@pytest.mark.parametrize(("key", "value"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_its_key_and_what_would_be_right(key, value):
    with pytest.raises(InputError) as refusal:
        make(**{key: value})
    assert str(refusal.value).startswith(f"{key} is ")
    assert " must " in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_every_key_has_a_wrong_value_in_the_test_above():
    assert {key for key, _ in WRONG_VALUES} | {"noise_multiplier"} == set(Recipe.__dataclass_fields__)
    with pytest.raises(InputError, match=r"^noise_multiplier is -1\.0; it must"):
        make(steps=None, noise_multiplier=-1.0)


@pytest.mark.parametrize("key", ["name", "data", "model", "batch_size"])
def test_a_missing_key_is_named(key):
    with pytest.raises(InputError, match=f"lacks the key {key}"):
        Recipe.from_dict({other: value for other, value in MINIMAL.items() if other != key})


@pytest.mark.parametrize(
    ("budget", "fits"),
    [
        ({"epsilon": 8.0, "steps": 10}, True),
        ({"epsilon": 8.0, "noise_multiplier": 1.0}, True),
        ({"noise_multiplier": 1.0, "steps": 10}, True),
        ({}, False),
        ({"epsilon": 8.0}, False),
        ({"noise_multiplier": 1.0}, False),
        ({"steps": 10}, False),
        ({"epsilon": 8.0, "noise_multiplier": 1.0, "steps": 10}, False),
    ],
)
def test_exactly_two_of_the_budget_are_given(budget, fits):
    values = {**{key: value for key, value in MINIMAL.items() if key not in ("epsilon", "steps")}, **budget}
    for method in vocabulary.METHODS:
        if method == "non-private":
            continue
        if fits:
            Recipe.from_dict({**values, "method": method})
        else:
            with pytest.raises(InputError, match="exactly two of epsilon, noise_multiplier and steps"):
                Recipe.from_dict({**values, "method": method})


@pytest.mark.parametrize("budget", [{}, {"epsilon": 8.0}, {"noise_multiplier": 1.0}, {"epsilon": 8.0, "noise_multiplier": 1.0}])
def test_a_non_private_run_needs_steps_and_takes_the_rest_of_the_budget(budget):
    values = {key: value for key, value in MINIMAL.items() if key not in ("epsilon", "steps")}
    assert Recipe.from_dict({**values, **budget, "method": "non-private", "steps": 10}).steps == 10
    with pytest.raises(InputError, match="steps is not given"):
        Recipe.from_dict({**values, **budget, "method": "non-private"})


def test_a_fixed_seed_makes_a_recipe_not_private():
    assert make().private
    assert not make(seed=0).private


def test_learning_rates_default_by_method():
    rates = {method: make(method=method).resolved_learning_rate for method in vocabulary.METHODS}
    assert [rates.pop(method) for method in ("dp-sgd", "dp-walk", "dp-threshold", "non-private")] == [
        4.0,
        None,
        None,
        None,
    ]
    assert set(rates.values()) == {1e-3}
    assert make(method="non-private", base="dp-sgd").resolved_learning_rate == 0.1
    assert make(method="dp-sgd", learning_rate=1).resolved_learning_rate == 1.0


def test_a_recipe_has_a_rate_or_a_distance_and_never_both():
    for method in ("dp-walk", "dp-threshold"):
        recipe = make(method=method)
        assert (recipe.resolved_learning_rate, recipe.resolved_distance, recipe.resolved_ema_decay) == (None, 1.5, 0.99)
        own = make(method=method, learning_rate=1e-3)
        assert (own.resolved_learning_rate, own.resolved_distance) == (1e-3, None)
    walking = make(method="dp-sgd", distance=2.0)
    assert (walking.resolved_learning_rate, walking.resolved_distance, walking.resolved_ema_decay) == (None, 2.0, 0.0)
    with pytest.raises(InputError, match=r"learning_rate is 1 and distance is 2; a method has one of the two"):
        make(learning_rate=1, distance=2)


def test_options_are_checked_against_the_method_and_the_model():
    with pytest.raises(InputError, match=r"optimizer.densty = 0.05 is unknown; .* of dp-microadam is density"):
        make(method="dp-microadam", optimizer={"densty": 0.05})
    with pytest.raises(InputError, match=r"optimizer.density = 0.05 is unknown; .* of dp-sgd"):
        make(method="dp-sgd", optimizer={"density": 0.05})
    with pytest.raises(InputError, match=r"model_options.hiden = 3 is unknown; .* of mlp is hidden"):
        make(model_options={"hiden": 3})
    with pytest.raises(InputError, match="tanh-cnn has no options"):
        make(model="tanh-cnn", model_options={"width": 3})
    with pytest.raises(InputError, match=r"optimizer.betas is \[\[0.9\]\]; it must be"):
        make(method="dp-microadam", optimizer={"betas": [[0.9]]})


def test_a_non_private_run_takes_the_options_of_its_base():
    recipe = make(method="non-private", base="sparta", optimizer={"keep": 0.5})
    assert (recipe.algorithm, recipe.private, recipe.protected) == ("sparta", False, False)
    assert make(method="non-private").algorithm == "dp-threshold"
    with pytest.raises(InputError, match=r"optimizer.keep = 0.5 is unknown; .* of dp-adam"):
        make(method="non-private", base="dp-adam", optimizer={"keep": 0.5})
    with pytest.raises(InputError, match="base is 'dp-sgd', but method is 'dp-adam'"):
        make(method="dp-adam", base="dp-sgd")


def test_methods_and_their_options_of_the_vocabulary_are_those_of_the_code():
    import torch

    from dp_microadam import MicroAdam, TensorAdam
    from dp_microadam.methods.registry import builder_of
    from dp_microadam.methods.step_optimizers import at_path
    from dp_microadam.methods.table import METHODS
    from dp_microadam.optimizers.adam_bc import AdamBC
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
    for method in vocabulary.BASES:
        entry = METHODS[method]
        function = builder_of(method) if entry.path is None else at_path(entry.path)
        own = {
            name
            for name, parameter in inspect.signature(inspect.unwrap(function)).parameters.items()
            if parameter.kind.name == "KEYWORD_ONLY"
        }
        its = {name for optimizer in optimizers.get(method, base_optimizer) for name in inspect.signature(optimizer).parameters}
        assert own - {"lr", "distance", "schedule", "average"} <= set(vocabulary.OPTIMIZER_OPTIONS[method]) <= own | its
    for optimizer, method in ((MicroAdam, "dp-microadam"), (ThresholdAdam, "dp-threshold")):
        rest = set(inspect.signature(optimizer).parameters) - set(vocabulary.OPTIMIZER_OPTIONS[method])
        assert rest == {"params", "lr"}, "the step size has a key of its own"


def test_models_of_the_vocabulary_are_those_of_the_code():
    from dp_microadam.workbench.models import registry

    assert {name: registry.options_of(name) for name in registry.BUILDERS} == vocabulary.MODEL_OPTIONS


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
    data=st.sampled_from([name for name in vocabulary.DATA_SETS if name not in vocabulary.TEXT_SETS]),
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
@given(st.text())
def test_any_text_is_a_recipe_or_is_refused(text):
    with pytest.raises(InputError):
        Recipe.from_toml(text)


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


@pytest.mark.parametrize("override", ["steps", "=3", "", "model.depth=3"])
def test_an_override_that_addresses_nothing_is_refused(override):
    with pytest.raises(InputError, match=r"key=value|not a table"):
        load_recipe("demo", [override])


def test_an_override_cannot_smuggle_in_a_second_key():
    with pytest.raises(InputError, match="steps is '7"):
        load_recipe("demo", ["steps=7\nseed = 1"])


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


def test_the_written_recipe_is_flat_keys_and_then_tables():
    written = make(method="dp-microadam", optimizer={"window": 3}, model_options={"hidden": [5, 4]}).to_toml()
    parsed = tomllib.loads(written)
    assert parsed["optimizer"] == {"window": 3}
    assert parsed["model_options"] == {"hidden": [5, 4]}
    assert "seed" not in parsed
    assert "data_options" not in parsed, "empty tables are left out"
    assert written.index("batch_size") < written.index("[model_options]") < written.index("[optimizer]")
