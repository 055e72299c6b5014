"""Studies: the paper's experiments have its hyperparameters, and a study file means what it says."""

import json
from dataclasses import replace

import pytest
from research.experiments.study import known_studies, load_study, parse_study

from dp_microadam.errors import InputError
from dp_microadam.workbench.recipes.assemble import plan_of
from dp_microadam.workbench.recipes.tuning import refuse_unsearchable

CIFAR10_TRAINING, IMAGENET_TRAINING = 45_000, 1_271_167

SMALL = """
title = "Small"
question = "Which is better?"
rows = ["noise"]
columns = ["method"]

[recipe]
data = "digits"
model = "mlp"
epsilon = 8.0
batch_size = 64
optimizer = { weight_decay = 0.1 }

[axes.noise]
"1" = { noise_multiplier = 1.0 }
"2.5" = { noise_multiplier = 2.5 }

[axes.method]
"DP-SGD" = { method = "dp-sgd", optimizer = { momentum = 0.5 } }
"DP-Adam" = { method = "dp-adam" }

[paper.values]
"2.5" = { "DP-SGD" = [70.0, 0.5] }
"""


def test_all_experiments_of_the_paper_are_there_and_every_study_loads():
    known = known_studies()
    assert {name for name in known if known[name] == ("paper", "cpu")} >= {
        *("sigma-sweep", "epsilon-sweep", "validation-curves", "imagenet", "finetune"),
    }
    assert (known["runtime"], known["robustness"]) == (("paper",), ("cpu",))
    for study in (load_study(name, scale) for name, scales in known.items() for scale in scales):
        places = [cell.labels for cell in study.cells]
        assert all(one.labels in places for one in study.published)
        assert len({json.dumps(place) for place in places}) == len(places)


@pytest.mark.parametrize(("name", "labels", "size", "updates"), [
    # But for σ = 8, where the paper has 18,798 and exact accounting allows five more.
    *(("sigma-sweep", {"noise multiplier σ": sigma, "method": "DP-SGD"}, CIFAR10_TRAINING, updates)
      for sigma, updates in ((3, 2480), (4, 4556), (5, 7227), (6, 10492), (8, 18803))),
    ("imagenet", {"method": "DP-MicroAdam"}, IMAGENET_TRAINING, 71_587),
    ("finetune", {"data": "CIFAR-10", "model": "DeiT-Tiny", "method": "DP-MicroAdam"}, CIFAR10_TRAINING, 536),
    ("finetune", {"data": "CIFAR-100", "model": "DeiT-Base", "method": "DP-MicroAdam"}, CIFAR10_TRAINING, 998),
])  # fmt: skip
def test_runs_take_the_papers_number_of_updates(name, labels, size, updates):
    [cell] = [cell for cell in load_study(name, "paper").cells if labels.items() <= cell.labels.items()]
    assert plan_of(cell.recipe, size).steps == updates


@pytest.mark.parametrize("name", ["sigma-sweep", "epsilon-sweep", "validation-curves"])
def test_cifar_hyperparameters_are_those_of_the_papers_table(name):
    for cell in load_study(name, "paper").cells:
        recipe = cell.recipe
        assert (recipe.batch_size, recipe.max_grad_norm, recipe.delta) == (4096, 1.0, 1e-5)
        assert (recipe.schedule, recipe.resolved_ema_decay, recipe.physical_batch_size) == ("constant", 0.0, 128)
        assert (recipe.crop_padding, recipe.flip) == (4, True)
        assert recipe.resolved_learning_rate == (4.0 if recipe.method == "dp-sgd" else 1e-3)
        assert recipe.optimizer.get("betas", [0.9, 0.999]) == [0.9, 0.999]


def test_fine_tuning_and_imagenet_hyperparameters_are_those_of_the_papers_tables():
    for cell in load_study("finetune", "paper").cells:
        recipe, method = cell.recipe, cell.labels["method"]
        assert (recipe.schedule, recipe.warmup, recipe.max_grad_norm) == ("cosine", 0.02, 1.0)
        assert (recipe.resolved_learning_rate, recipe.image_size) == (1e-3, 224)
        assert recipe.batch_size == (500 if method in ("SPARTA", "DP-BiTFiT") else 4096)
        sigma = {"DP-MicroAdam": 1.56 if recipe.data == "cifar10" else 2.0, "SPARTA": 0.8, "DP-BiTFiT": 0.8}.get(method)
        assert sigma is None or recipe.noise_multiplier == sigma
    for cell in load_study("imagenet", "paper").cells:
        recipe = cell.recipe
        assert (recipe.batch_size, recipe.noise_multiplier, recipe.delta, recipe.ema_decay) == (16_384, 2.5, 8e-7, 0.99999)
        assert recipe.multiplicity == (4 if recipe.method == "dp-sgd" else 1)


@pytest.mark.parametrize("name", ["sigma-sweep", "epsilon-sweep", "validation-curves", "imagenet", "finetune"])
def test_the_authors_variant_and_blocks_of_4_bits_stand_side_by_side(name):
    cells = load_study(name, "paper").cells
    options = {cell.labels["method"]: cell.recipe.optimizer for cell in cells if "MicroAdam" in str(cell.labels["method"])}
    assert options["DP-MicroAdam"] == {**options["DP-MicroAdam, 4-bit"], "scope": "tensor", "quantize": False}
    assert {cell.recipe.resolved_learning_rate for cell in cells if cell.labels["method"] in options} == {1e-3}


def test_each_method_meets_the_budgets_at_its_best_noise_and_notes_name_the_cells_that_do_not_fit():
    sweep, budgets = load_study("sigma-sweep"), load_study("epsilon-sweep")
    for method in ("DP-Adam", "DP-AdamBC", "Scale-then-privatize", "DP-MicroAdam", "DP-SGD"):
        values = {one.value: one for one in sweep.published if one.labels["method"] == method}
        used = {cell.recipe.noise_multiplier for cell in budgets.cells if cell.labels["method"] == method}
        assert used == {values[max(values)].labels["noise multiplier σ"]}
        [at_8] = [one for one in budgets.published if one.labels == {"budget ε": 8, "method": method}]
        assert (at_8.value == max(values)) == (method not in ("DP-AdamBC", "Scale-then-privatize"))
    assert "DP-AdamBC (65.7" in " ".join(budgets.notes)


def test_cells_are_the_product_of_the_axes_with_tables_merged():
    study = parse_study(SMALL, "small", "own")
    labels = [(noise, method) for noise in (1, 2.5) for method in ("DP-SGD", "DP-Adam")]
    assert [tuple(cell.labels.values()) for cell in study.cells] == labels
    assert study.cells[0].recipe.optimizer == {"weight_decay": 0.1, "momentum": 0.5}
    [published] = study.published
    assert (published.labels, published.value, published.spread) == ({"noise": 2.5, "method": "DP-SGD"}, 70.0, 0.5)


def test_overrides_reach_every_cell_and_no_other_study():
    study = parse_study(SMALL, "small", "own", ["optimizer.weight_decay=0.2", "max_steps=3"])
    assert {(cell.recipe.optimizer["weight_decay"], cell.recipe.max_steps) for cell in study.cells} == {(0.2, 3)}
    assert {cell.recipe.optimizer["weight_decay"] for cell in parse_study(SMALL, "small", "own").cells} == {0.1}


def test_a_cells_key_follows_what_is_trained_and_nothing_else():
    cell = parse_study(SMALL, "small", "own").cells[0]
    same = {"name": "other", "evaluate_every": 7, "data_folder": "/elsewhere", "learning_rate": 4.0}
    assert replace(cell, recipe=replace(cell.recipe, **same)).key == cell.key
    for change in ({"learning_rate": 3.0}, {"max_steps": 3}, {"optimizer": {"momentum": 0.9}}):
        assert replace(cell, recipe=replace(cell.recipe, **change)).key != cell.key


def test_only_keeps_the_cells_asked_for():
    study = parse_study(SMALL, "small", "own")
    assert [cell.labels for cell in study.only(["noise=2.5", "method=DP-Adam"]).cells] == [{"noise": 2.5, "method": "DP-Adam"}]
    assert len(study.only(["method=DP-Adam", "method=DP-SGD"]).cells) == 4
    with pytest.raises(InputError, match=r"only is 'noise=7'.*noise=1\|2.5; method=DP-Adam\|DP-SGD"):
        study.only(["noise=7"])


@pytest.mark.parametrize(("change", "instead"), [
    ('rows = ["noise"]', "rows = []\n"),
    ("[recipe]", "[receipt]"),
    ('data = "digits"', 'data = "digit"'),
    ('"2.5" = { "DP-SGD" = [70.0, 0.5] }', '"9" = { "DP-SGD" = 1.0 }'),
    ("[axes.noise]", "[axes.noise]\n[[adjust]]\ncell = { nose = 1 }\nset = { steps = 1 }\n[axes.noise2]"),
    ("question =", "question"),
])  # fmt: skip
def test_a_study_that_cannot_be_meant_is_refused_in_one_sentence(change, instead):
    assert change in SMALL
    with pytest.raises(InputError) as caught:
        parse_study(SMALL.replace(change, instead), "small", "own")
    assert "\n" not in str(caught.value)


def test_an_unknown_study_or_scale_is_refused():
    with pytest.raises(InputError, match=r"there is no study 'sigma'; known are .*sigma-sweep"):
        load_study("sigma")
    with pytest.raises(InputError, match="scale is 'paper'; bands is known at scale cpu"):
        load_study("bands", "paper")


def test_every_search_of_the_study_of_tuning_can_be_made():
    cells = load_study("tuning", "cpu").cells
    assert len(cells) == 48
    for cell in cells:
        assert bool(cell.recipe.tune) == (cell.labels["hyperparameters"] == "tuned")
        if cell.recipe.tune:
            refuse_unsearchable(cell.recipe)
            assert replace(cell, recipe=replace(cell.recipe, tune={})).key != cell.key
