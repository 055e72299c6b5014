"""Training with correlated noise: groups, chains and their restarts, through the trainer. Alarm rates are below 1e-6."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from flat import flat, idle
from processes import run_here
from scipy import stats
from torch import nn

from dp_microadam import InputError, PrivacyPlan, PrivateStep, PrivateTrainer, methods
from dp_microadam.errors import DPMicroAdamError
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.training.checkpoint import CheckpointFolder
from dp_microadam.training.distributed import Ranks
from dp_microadam.training.evaluation import class_loss
from dp_microadam.workbench.command_line.cli import main

ALARM = 1e-8
EXAMPLES, BANDS, STEPS = 41, 4, 12
PLAN = PrivacyPlan(EXAMPLES, 8, 1.5, STEPS, 1e-2, bands=BANDS)


def numbered(model, batch):
    """The gradient of example i is one in column i of the weight, and zero elsewhere."""
    return model(batch).sum(1)


def without_gradient(model, batch):
    return model(batch).sum(1) * 0.0


def rows(width):
    model = nn.Linear(EXAMPLES, width, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def published(folder, loss, ranks, *, width=1, plan=PLAN, **options):
    """The mean gradient of each step, a row each."""
    model = rows(width)
    trainer = PrivateTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        plan,
        loss,
        run_dir=folder,
        ranks=ranks,
        **flat(show_progress=False, **options),
    )
    weights = [model.weight.detach().clone()]
    trainer.callbacks = (lambda report: weights.append(model.weight.detach().clone()) if report.step else None,)
    trainer.fit(torch.eye(EXAMPLES, dtype=torch.float64))
    return torch.stack([(before - after).flatten() for before, after in pairwise(weights)])


def noise(folder, ranks):
    """Noise alone, from the system's entropy: 41 × 500 coordinates for each step."""
    return published(folder, without_gradient, ranks, width=500)


def seeded(folder, ranks):
    return published(folder, numbered, ranks, seed=3)


def after_a_failure(folder, ranks):
    """Noise alone of a loop of one's own that goes on after step 5 failed on the last rank, the others having drawn theirs."""
    failing = []

    def loss(model, batch):
        if failing and ranks.rank == ranks.world_size - 1:
            raise ValueError("secret")
        return without_gradient(model, batch)

    model = rows(500)
    plan = PrivacyPlan(EXAMPLES, 10, 1.5, STEPS, 1e-2, bands=BANDS)  # 4·10 of 41: nearly every example of a group
    step = PrivateStep(model, idle(model), plan, loss, torch.eye(EXAMPLES, dtype=torch.float64), run_dir=folder, ranks=ranks)
    found = []
    step.account.begin()
    for index in range(plan.steps):
        failing[:] = [True] if index == 5 else []
        try:
            found.append(step.take()["weight"].flatten() * plan.batch_size / plan.noise_multiplier)
        except DPMicroAdamError:
            found.append(None)
    step.close()
    return found


SIZES = [1, 2, pytest.param(3, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def left(run_group):
    """What so many processes left under a name; one process trains here."""

    def find(size, name, folder):
        if size == 1:
            return [globals()[name](folder / name, Ranks())]
        group = run_group("bands", size, __file__)
        return [torch.load(group / f"{name}-{rank}.pt") for rank in range(size)]

    return find


def whitened(noise, coefficients):
    """C·noise for rows of successive steps, a chain that begins with the first."""
    found = torch.zeros_like(noise)
    for age, coefficient in enumerate(coefficients.tolist()[: len(noise)]):
        found[age:] += coefficient * noise[: len(noise) - age]
    return found


def require_white(numbers):
    """Standard normal, and independent from step to step."""
    flat = numbers.flatten().numpy()
    assert stats.kstest(flat, "norm").pvalue > ALARM
    assert abs(np.mean(flat**2) - 1) < stats.norm.isf(ALARM / 2) * (2 / flat.size) ** 0.5
    for lag in range(1, min(BANDS + 1, len(numbers))):
        products = (numbers[lag:] * numbers[:-lag]).flatten()
        assert abs(float(products.mean())) < stats.norm.isf(ALARM / 2) / len(products) ** 0.5


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.slow) if size == 2 else size for size in SIZES])
def test_c_times_what_a_run_publishes_is_white_however_many_processes_make_the_noise(left, size, tmp_path):
    plan = PLAN
    first, *others = left(size, "noise", tmp_path)
    assert all(torch.equal(first, other) for other in others)
    require_white(whitened(first, plan.noise_coefficients) * plan.batch_size / plan.noise_multiplier)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES[1:])
def test_a_seeded_run_of_several_processes_is_that_of_one(left, size, tmp_path):
    alone = seeded(tmp_path / "alone", Ranks())
    for found in left(size, "seeded", tmp_path):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)


def test_each_example_reaches_only_the_steps_of_its_group(tmp_path):
    """With C and the seed known, the noise can be subtracted: what is left are the examples of each step."""
    plan = PLAN
    independent = PrivacyPlan(EXAMPLES, plan.batch_size, plan.noise_multiplier, plan.steps, 1e-2)
    white = published(tmp_path / "white", without_gradient, Ranks(), plan=independent, seed=3)
    both = published(tmp_path / "both", numbered, Ranks(), seed=3)
    noise = published(tmp_path / "noise", without_gradient, Ranks(), seed=3)
    torch.testing.assert_close(whitened(noise, plan.noise_coefficients), white, rtol=0, atol=1e-6)
    members = (both - noise) * plan.batch_size
    assert torch.allclose(members, members.round(), atol=1e-9)
    steps, numbers = np.nonzero(members.round().numpy())
    assert len(steps) > 50
    assert (steps % BANDS == numbers % BANDS).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_step_that_fails_begins_a_new_chain_on_all_ranks(left, size, tmp_path):
    """Otherwise the steps before and after it would be one step closer in C than their numbers, and columns could overlap."""
    for found in left(size, "after_a_failure", tmp_path):
        assert [step for step, noise in enumerate(found) if noise is None] == [5]
        coefficients = PLAN.noise_coefficients
        before, after = torch.stack(found[:5]), torch.stack(found[6:])
        require_white(whitened(before, coefficients))
        require_white(whitened(after, coefficients))


def digits_step(folder, plan, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    data = torch.randn(60, 5), torch.randint(0, 3, (60,))
    return PrivateStep(model, idle(model), plan, class_loss, data, run_dir=folder, **flat(**options)), model


def test_nothing_of_the_noise_is_in_what_a_run_writes(tmp_path):
    """Neither the bytes of a noise vector nor anything of its size appear in checkpoints and other files."""
    plan = PrivacyPlan(60, 6, 1.0, 8, 1e-3, bands=8)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    trainer = PrivateTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        class_loss,
        run_dir=tmp_path / "run",
        **flat(show_progress=False),
    )
    kept = []
    chain = trainer.step.mechanism._correlation
    trainer.callbacks = (lambda report: kept.extend(part.clone() for part in chain._kept.values()),)
    trainer.fit((torch.randn(60, 5), torch.randint(0, 3, (60,))))
    rows = [row.numpy().tobytes() for part in kept for row in part if row.any()]
    assert len(rows) > 20
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not any(row in content for row in rows), file
    _, content, _ = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert set(content) == {"updates", "ledger_head", "model", "method"}
    statistics = json.loads((tmp_path / "run" / "run.json").read_text())
    assert statistics["noise_memory_bytes"] == 7 * 18 * 4
    assert chain.memory == 0, "forgotten when the run is over"


def test_more_memory_than_allowed_is_refused_before_anything_is_written(tmp_path):
    plan = PrivacyPlan(60, 6, 1.0, 8, 1e-3, bands=8)
    with pytest.raises(InputError, match=r"bands is 8, which keeps .* for 39 parameters, more than noise_memory_gib = 1e-07"):
        digits_step(tmp_path / "run", plan, noise_memory_gib=1e-7)
    assert not (tmp_path / "run").exists()


def test_phases_with_other_tensors_begin_a_new_chain(tmp_path):
    """Methods with phases, rows that train or scales need nothing but the plan."""
    plan = PrivacyPlan(60, 10, 1.0, 24, 1e-3, bands=4)
    for name, make in {
        "sparta": lambda model: methods.sparta(model, lr=0.1, keep=0.5, scoring_epochs=1.0),
        "norms": lambda model: methods.sparta(model, lr=0.1, keep=0.5, scores="norms"),
        "previous": lambda model: methods.scale_then_privatize(model, lr=0.05),
    }.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        trainer = PrivateTrainer(model, make(model), plan, class_loss, run_dir=tmp_path / name, **flat(show_progress=False))
        result = trainer.fit((torch.randn(60, 5), torch.randint(0, 3, (60,))))
        assert result.steps_done == 24
        assert result.epsilon == plan.epsilon == read_ledger(tmp_path / name).epsilon()


@pytest.mark.parametrize("name", ["dp_sgd", "dp_adambc", "dp_adam", "dp_adamw", "dp_microadam"])
def test_rates_of_methods_that_divide_by_noisy_gradients_grow_with_the_noise_of_single_steps(tmp_path, name):
    """So that a rate chosen for one band serves any number; a step of the weights shows it, and the optimizer keeps its own."""
    setting = {"dataset_size": 60, "batch_size": 6, "delta": 1e-3, "steps": 20}
    plan = PrivacyPlan.solve(**setting, epsilon=8.0, bands=8)
    one = PrivacyPlan.solve(**setting, epsilon=plan.epsilon)
    growth = plan.noise_multiplier / one.noise_multiplier * plan.noise_ratios.single_step
    assert plan.single_step_growth == pytest.approx(growth)
    assert growth > 1.5 > one.single_step_growth == 1
    expected = {"dp_adam": growth, "dp_adamw": growth, "dp_microadam": growth**0.5}.get(name, 1.0)
    moved = {}
    for each, factor in ((plan, expected), (one, 1.0)):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        torch.nn.init.zeros_(model.weight)
        method = getattr(methods, name)(model, lr=1e-3)
        data = torch.randn(60, 5), torch.zeros(60).long()
        PrivateStep(model, method, each, class_loss, data, run_dir=tmp_path / f"{each.bands}").close()
        assert method.learning_rate == pytest.approx(1e-3 * factor)
        method.update(model, {name: torch.ones_like(p) for name, p in model.named_parameters()})
        moved[each.bands] = float(model.weight.detach().abs().max())
        assert [group["lr"] for group in method.optimizer.param_groups] == [1e-3]
    if name != "dp_adambc":  # whose v̂ is freed of the noise
        assert moved[8] / moved[1] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("how", ["resumed", "attached"])
def test_data_in_another_order_after_every_step_spends_no_more_than_the_ledger_says(tmp_path, how):
    """Everybody takes part in the steps of their group, and the first example is always given the number of the next one's."""
    plan = PrivacyPlan(8, 1, 5.0, 64, 1e-2, bands=8)
    seen = []

    def loss(model, batch):
        seen.append(int((batch[:, 0] == 1.0).sum()))
        return numbered(model, batch)

    model, state = torch.nn.Linear(8, 1, bias=False), None
    step = PrivateStep(model, idle(model), plan, loss, run_dir=tmp_path)
    taken = 0
    while state is None or step.account.remaining:
        if how == "resumed":
            step.close()
            step = PrivateStep(model, idle(model), plan, loss, run_dir=tmp_path)
        step.attach(torch.eye(8).roll(taken, 0))
        if state is None:
            step.account.begin()
        elif how == "resumed":
            step.load_state_dict(state)
        if not step.account.remaining:
            break
        seen.clear()
        step.take()
        assert sum(seen) == 1, "the first example is in every step"
        taken, state = taken + 1, step.state_dict()
        record = read_ledger(tmp_path)
        assert record.spent[0].steps == taken
        assert step.epsilon() == record.epsilon() == plan.epsilon_after(taken, range(1, taken)) <= plan.epsilon
    assert taken == 8
    step.close()


def test_the_chain_of_noise_begins_anew_with_data_that_is_attached_between_steps(tmp_path):
    plan = PrivacyPlan(60, 6, 1.0, 8, 1e-3, bands=8)
    step, _ = digits_step(tmp_path, plan)
    for _ in range(2):
        step.account.begin() if not step.account.begun else None
        step.take()
    assert step.mechanism.noise_memory
    step.attach((torch.randn(60, 5), torch.randint(0, 3, (60,))))
    assert not step.mechanism.noise_memory
    step.close()


def test_users_with_bands_count_each_session_too(tmp_path):
    plan = PrivacyPlan(20, 4, 2.0, 12, 1e-2, bands=4, examples_per_user=2)
    data, ids = (torch.randn(60, 5), torch.randint(0, 3, (60,))), [number % 20 for number in range(60)]
    state = None
    for session in range(3):
        model = torch.nn.Linear(5, 3)
        step = PrivateStep(
            model,
            idle(model),
            plan,
            class_loss,
            data,
            users=ids[::-1] if session else ids,
            run_dir=tmp_path,
        )
        step.account.begin() if state is None else step.load_state_dict(state)
        step.take()
        state = step.state_dict()
        assert step.epsilon() == plan.epsilon_after(session + 1, range(1, session + 1)) <= plan.epsilon
        step.close()
    assert read_ledger(tmp_path).epsilon() == plan.epsilon


RECIPE = """
name = "bands"
data = "digits"
model = "mlp"
epsilon = 8.0
steps = 60
batch_size = 64
bands = 8
checkpoint_every = 7
evaluate_every = 50
"""


def test_a_recipe_that_goes_on_says_what_its_sessions_spend_and_where_it_ends(tmp_path, capsys):
    recipe, run = tmp_path / "bands.toml", tmp_path / "run"
    recipe.write_text(RECIPE.replace("steps = 60", "steps = 16"))
    assert main(["train", str(recipe), "--set", "max_steps=3", "--run-dir", str(run)]) == 0
    config = run / "config.toml"
    config.write_text(config.read_text().replace("max_steps = 3", "max_steps = 16"))
    capsys.readouterr()
    assert main(["resume", str(run)]) == 0
    assert "to stay within ε, the run ends at step 11 instead of 16" in capsys.readouterr().err
    record = read_ledger(run)
    assert (record.steps, record.resumed_at) == (11, (3,))
    report = json.loads((run / "privacy.json").read_text())
    assert report["epsilon"] == report["epsilon_planned"] == record.plan.epsilon
    assert report["composition"]["sessions"] == 2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["epsilon"] == record.plan.epsilon
    assert main(["budget", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] == record.plan.epsilon


if __name__ == "__main__":
    run_here({"noise": noise, "seeded": seeded, "after_a_failure": after_a_failure})
