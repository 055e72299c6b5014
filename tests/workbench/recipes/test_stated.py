"""What runs say about the defaults that they took."""

import pytest

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes.advice import bands_of
from dp_microadam.workbench.recipes.assemble import assemble, plan_of
from dp_microadam.workbench.recipes.recipe import Recipe
from dp_microadam.workbench.recipes.recipe_files import known_recipes, load_recipe

SMALL = ["method=dp-threshold", "model=mlp", "model_options.hidden=[8]", "steps=200", "batch_size=16", "epsilon=20.0"]


def test_a_run_states_accountant_bands_and_bias_correction_and_reads_back_as_the_same_plan(tmp_path):
    settings = [*SMALL, "method=dp-microadam", "optimizer.quantize=false"]
    made = assemble(load_recipe("demo", settings), tmp_path / "run", show_progress=False)
    again = Recipe.from_toml(made.recipe.to_toml())
    assert (again.accountant, again.bands, again.optimizer) == ("pld", made.trainer.plan.bands, {"quantize": False})
    assert made.trainer.plan.bands > 1
    assert plan_of(again, 3600) == made.trainer.plan
    assert made.trainer.optimizer.defaults["bias_correction"] == "paper"


def test_another_method_forgets_options_that_the_file_gave_to_its_own():
    assert load_recipe("cifar10", ["method=dp-sgd", "optimizer.momentum=0.9"]).optimizer == {"momentum": 0.9}
    with pytest.raises(InputError, match=r"optimizer\.density"):
        load_recipe("cifar10", ["method=dp-sgd", "optimizer.density=0.1"])


@pytest.mark.parametrize(
    ("settings", "bands"),
    [
        ([], "auto"),
        (["method=dp-threshold"], "auto"),
        (["method=dp-microadam"], 1),
        (["method=dp-adam"], "auto"),
        (["bands=4"], 4),
        (["method=dp-microadam", "optimizer.quantize=false"], "auto"),
        (["method=dp-microadam", "optimizer.quantize=true"], 1),
        (["method=scale-then-privatize"], 1),
        (["method=sparta"], 1),
        (["method=dp-adambc"], 1),
        (["tune={expected_runs=4, learning_rate=[0.5, 1.5]}"], 1),
    ],
)
def test_bands_are_automatic_for_methods_that_gain_from_them(settings, bands):
    assert bands_of(load_recipe("demo", settings)) == bands


def test_every_recipe_without_pins_has_the_defaults_of_the_library():
    for name in set(known_recipes()) - {"cifar10", "cifar100", "imagenet"}:
        recipe = load_recipe(name)
        assert (recipe.resolved_accountant, recipe.bands, recipe.optimizer) == ("pld", None, {})


def test_wide_networks_from_scratch_walk_farther_and_runs_state_how_far(tmp_path):
    def rate(*settings):
        made = assemble(load_recipe("demo", [*SMALL, *settings]), tmp_path / str(len(settings)), show_progress=False)
        again = Recipe.from_toml(made.recipe.to_toml())
        assert again.distance == made.recipe.distance == made.trainer.optimizer.param_groups[0]["distance"]
        return again.distance

    wide = "model_options.hidden=[400, 256]"  # 419,226 parameters
    assert rate("bands=1") == 1.5
    assert rate("bands=1", wide) == pytest.approx(1.5 * (419_226 / 250_000) ** (1 / 6))
    assert rate("bands=1", wide, "distance=1.5") == 1.5


def test_an_automatic_plan_is_stated_in_numbers_and_processes_no_more_examples(tmp_path):
    recipe = load_recipe("demo", [*SMALL, "batch_size=1024", "plan=auto"])
    made = assemble(recipe, tmp_path / "run", show_progress=False)
    again = made.recipe
    plan = made.trainer.plan
    assert again.plan is None
    assert (again.batch_size, again.steps, again.bands) == (plan.batch_size, plan.steps, plan.bands)
    assert plan.batch_size * plan.steps <= 200 * 1024
    assert plan.batch_size < 1024, "a batch of a third of the data leaves too few steps"
    assert plan.epsilon <= 20.0


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("method=non-private", "method is 'non-private', but plan is 'auto'"),
        ("bands=4", "bands is 4, but plan is 'auto'"),
        ("max_batch_size=2000", "max_batch_size is 2000, but plan is 'auto'"),
        ("epsilon=none", "exactly two of"),
    ],
)
def test_an_automatic_plan_that_has_nothing_to_choose_is_refused(tmp_path, setting, sentence):
    with pytest.raises(InputError) as refused:
        assemble(load_recipe("demo", [*SMALL, "plan=auto", setting]), tmp_path / "run", show_progress=False)
    assert str(refused.value).startswith(sentence)
    assert not (tmp_path / "run").exists()
