"""Studies: the paper's experiments have its hyperparameters, and a study file means what it says."""

import json
from dataclasses import replace

import pytest
import torch
from research.experiments.study import known_studies, load_study, parse_study

from dp_microadam.errors import InputError
from dp_microadam.methods.registry import build
from dp_microadam.workbench.recipes.assemble import plan_of

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


def cells(name, **labels):
    found = [cell for cell in load_study(name, "paper").cells if labels.items() <= cell.labels.items()]
    assert found
    return found


def test_all_experiments_of_the_paper_are_there():
    known = known_studies()
    for name in ("sigma-sweep", "epsilon-sweep", "validation-curves", "imagenet", "finetune"):
        assert known[name] == ("paper", "cpu")
    assert "paper" in known["runtime"]


@pytest.mark.parametrize(("sigma", "updates"), [(3, 2480), (4, 4556), (5, 7227), (6, 10492), (8, 18803)])
def test_the_noise_sweep_takes_the_papers_number_of_updates(sigma, updates):
    """But for σ = 8, where the paper has 18,798 and exact accounting allows five more."""
    for cell in cells("sigma-sweep", **{"noise multiplier σ": sigma}):
        assert plan_of(cell.recipe, CIFAR10_TRAINING).steps == updates


@pytest.mark.parametrize(("name", "labels", "size", "updates"), [
    ("imagenet", {"method": "DP-MicroAdam"}, IMAGENET_TRAINING, 71_587),
    ("finetune", {"data": "CIFAR-10", "model": "DeiT-Tiny", "method": "DP-MicroAdam"}, CIFAR10_TRAINING, 536),
    ("finetune", {"data": "CIFAR-100", "model": "DeiT-Base", "method": "DP-MicroAdam"}, CIFAR10_TRAINING, 998),
])  # fmt: skip
def test_imagenet_and_fine_tuning_take_the_steps_that_the_budget_allows(name, labels, size, updates):
    [cell] = cells(name, **labels)
    assert plan_of(cell.recipe, size).steps == updates


def test_selection_methods_spend_no_more_than_the_budget_that_fifty_epochs_slightly_exceed():
    for method in ("SPARTA", "DP-BiTFiT"):
        cell = cells("finetune", model="DeiT-Small", method=method)[0]
        steps = plan_of(cell.recipe, CIFAR10_TRAINING).steps
        assert 0.99 * 4500 < steps < 4500


@pytest.mark.parametrize("name", ["sigma-sweep", "epsilon-sweep", "validation-curves"])
def test_cifar_hyperparameters_are_those_of_the_papers_table(name):
    for cell in load_study(name, "paper").cells:
        recipe = cell.recipe
        assert (recipe.batch_size, recipe.max_grad_norm, recipe.delta) == (4096, 1.0, 1e-5)
        assert (recipe.schedule, recipe.resolved_ema_decay, recipe.physical_batch_size) == ("constant", 0.0, 128)
        assert (recipe.crop_padding, recipe.flip) == (4, True)
        assert recipe.resolved_learning_rate == (4.0 if recipe.method == "dp-sgd" else 1e-3)
        assert recipe.optimizer.get("betas", [0.9, 0.999]) == [0.9, 0.999]


def test_fine_tuning_hyperparameters_are_those_of_the_papers_table():
    for cell in load_study("finetune", "paper").cells:
        recipe, method = cell.recipe, cell.labels["method"]
        assert (recipe.schedule, recipe.warmup, recipe.max_grad_norm) == ("cosine", 0.02, 1.0)
        assert recipe.resolved_learning_rate == 1e-3
        assert recipe.batch_size == (500 if method in ("SPARTA", "DP-BiTFiT") else 4096)
        assert recipe.image_size == 224
        sigma = {"DP-MicroAdam": 1.56 if recipe.data == "cifar10" else 2.0, "SPARTA": 0.8, "DP-BiTFiT": 0.8}.get(method)
        assert sigma is None or recipe.noise_multiplier == sigma


def test_imagenet_hyperparameters_are_those_of_the_papers_table():
    study = load_study("imagenet", "paper")
    assert {(cell.labels["method"], cell.labels["model"]) for cell in study.cells} >= {
        ("DP-MicroAdam", "WRN-16-4"),
        ("DP-SGD", "NF-ResNet-50"),
    }
    for cell in study.cells:
        recipe = cell.recipe
        assert (recipe.batch_size, recipe.noise_multiplier, recipe.delta) == (16_384, 2.5, 8e-7)
        assert recipe.ema_decay == 0.99999
        assert recipe.multiplicity == (4 if recipe.method == "dp-sgd" else 1)


@pytest.mark.parametrize("name", ["sigma-sweep", "epsilon-sweep", "validation-curves", "imagenet", "finetune"])
def test_the_authors_variant_and_blocks_of_4_bits_stand_side_by_side(name):
    labels = [str(cell.labels["method"]) for cell in load_study(name).cells]
    label = "DP-MicroAdam, paper" if "DP-MicroAdam, paper" in labels else "DP-MicroAdam"
    [authors] = {json.dumps(cell.recipe.optimizer) for cell in cells(name, method=label)}
    [packed] = {json.dumps(cell.recipe.optimizer) for cell in cells(name, method=f"{label}, 4-bit")}
    paper = {"density": 0.01, "window": 10, "second_moment": "coordinate", "bias_correction": "paper"}
    assert json.loads(authors) == {**paper, "scope": "tensor", "quantize": False}
    assert json.loads(packed) == paper
    for cell in cells(name, method=label):
        assert (cell.recipe.resolved_learning_rate, cell.recipe.resolved_lr_unit) == (1e-3, "absolute")


def test_each_method_meets_the_budgets_at_its_best_noise_of_the_first_table():
    sweep, budgets = load_study("sigma-sweep"), load_study("epsilon-sweep")
    for method in ("DP-Adam", "DP-AdamBC", "Scale-then-privatize", "DP-MicroAdam", "DP-SGD"):
        best = max((one for one in sweep.published if one.labels["method"] == method), key=lambda one: one.value)
        used = {cell.recipe.noise_multiplier for cell in budgets.cells if cell.labels["method"] == method}
        assert used == {best.labels["noise multiplier σ"]}


def test_the_notes_name_the_papers_cells_that_do_not_fit():
    """At ε = 8 the two tables of the paper should agree; the note names exactly the methods for which they do not."""
    sweep, budgets = load_study("sigma-sweep"), load_study("epsilon-sweep")
    for one in budgets.published:
        if one.labels["budget ε"] == 8:
            method = str(one.labels["method"])
            fits = one.value == max(other.value for other in sweep.published if other.labels["method"] == method)
            assert fits == (method not in ("DP-AdamBC", "Scale-then-privatize"))
    assert "DP-AdamBC (65.7" in " ".join(budgets.notes)


def test_every_study_loads_and_its_published_cells_are_cells():
    for name, scales in known_studies().items():
        for scale in scales:
            study = load_study(name, scale)
            places = [cell.labels for cell in study.cells]
            assert all(one.labels in places for one in study.published)
            assert len({json.dumps(place) for place in places}) == len(places)


def test_cells_are_the_product_of_the_axes_with_tables_merged():
    study = parse_study(SMALL, "small", "own")
    assert [cell.labels for cell in study.cells] == [
        {"noise": 1, "method": "DP-SGD"},
        {"noise": 1, "method": "DP-Adam"},
        {"noise": 2.5, "method": "DP-SGD"},
        {"noise": 2.5, "method": "DP-Adam"},
    ]
    assert study.cells[0].recipe.optimizer == {"weight_decay": 0.1, "momentum": 0.5}
    assert study.cells[3].recipe.noise_multiplier == 2.5
    [published] = study.published
    assert (published.labels, published.value, published.spread) == ({"noise": 2.5, "method": "DP-SGD"}, 70.0, 0.5)


def test_overrides_reach_every_cell_and_no_other_study():
    study = parse_study(SMALL, "small", "own", ["optimizer.weight_decay=0.2", "max_steps=3"])
    assert {cell.recipe.optimizer["weight_decay"] for cell in study.cells} == {0.2}
    assert {cell.recipe.max_steps for cell in study.cells} == {3}
    assert {cell.recipe.optimizer["weight_decay"] for cell in parse_study(SMALL, "small", "own").cells} == {0.1}


def test_a_cells_key_follows_what_is_trained_and_nothing_else():
    cell = parse_study(SMALL, "small", "own").cells[0]
    same = replace(
        cell, recipe=replace(cell.recipe, name="other", evaluate_every=7, data_folder="/elsewhere", learning_rate=4.0)
    )
    assert same.key == cell.key
    assert replace(cell, recipe=replace(cell.recipe, learning_rate=3.0)).key != cell.key
    assert replace(cell, recipe=replace(cell.recipe, max_steps=3)).key != cell.key


def test_only_keeps_the_cells_asked_for():
    study = parse_study(SMALL, "small", "own")
    assert [cell.labels for cell in study.only(["noise=2.5", "method=DP-Adam"]).cells] == [{"noise": 2.5, "method": "DP-Adam"}]
    assert len(study.only(["method=DP-Adam", "method=DP-SGD"]).cells) == 4
    with pytest.raises(InputError, match=r"only is 'noise=7'.*noise=1\|2.5; method=DP-Adam\|DP-SGD"):
        study.only(["noise=7"])


@pytest.mark.parametrize(("change", "message"), [
    ('rows = ["noise"]', "rows = []\n"),
    ("[recipe]", "[receipt]"),
    ('data = "digits"', 'data = "digit"'),
    ('"2.5" = { "DP-SGD" = [70.0, 0.5] }', '"9" = { "DP-SGD" = 1.0 }'),
    ("title", "titel"),
    ("[axes.noise]", "[axes.noise]\n[[adjust]]\ncell = { nose = 1 }\nset = { steps = 1 }\n[axes.noise2]"),
    ("question =", "question ="[:-1]),
])  # fmt: skip
def test_a_study_that_cannot_be_meant_is_refused_in_one_sentence(change, message):
    text = SMALL.replace(change, message)
    assert text != SMALL
    with pytest.raises(InputError) as caught:
        parse_study(text, "small", "own")
    assert "\n" not in str(caught.value)


def test_an_unknown_study_or_scale_is_refused():
    with pytest.raises(InputError, match=r"there is no study 'sigma'; known are .*sigma-sweep"):
        load_study("sigma")
    with pytest.raises(InputError, match="scale is 'paper'; bands is known at scale cpu"):
        load_study("bands", "paper")


def test_the_phases_of_every_study_fit_its_steps():
    phased = [
        (cell.recipe, name)
        for name, scales in known_studies().items()
        for scale in scales
        for cell in load_study(name, scale).cells
        if cell.recipe.method == "sparta"
    ]
    assert {name for _, name in phased} == {"finetune"}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 10))
    for recipe, _ in phased:
        method = build(recipe.algorithm, model, recipe.resolved_learning_rate, recipe.optimizer)
        plan = plan_of(recipe, 45_000)
        assert sum(phase.steps for phase in method.phases(plan)) == plan.steps
