"""What the methods promise about privacy, and about what they leave alone."""

import json
import weakref

import pytest
import torch
from flat import flat as settings
from torch import nn

from dp_microadam import ClippedGradients, PrivacyPlan, PrivateTrainer
from dp_microadam.ledger.ledger import read_ledger
from dp_microadam.methods import dp_adambc, dp_bitfit, scale_then_privatize, sparta
from dp_microadam.methods.fine_tuning import ROWS, SCORING, Sparta, top_rows


def flat(tensors):
    return torch.cat([part.flatten() for part in tensors.values()])


def keep_received(run):
    """A list that fills with what the method is given, and the phase, while a run goes on."""
    received, receive = [], run.method.receive

    def watched(means):
        received.append((run.trainer.step.phase.name, {name: mean.clone() for name, mean in means.items()}))
        return receive(means)

    run.method.receive = watched
    return received


@pytest.mark.parametrize("base_optimizer", ["adam", "microadam"])
def test_the_sensitivity_is_the_bound_in_the_scaled_space(hand, tmp_path, base_optimizer):
    """The worst example there is, beside none: the sums that noise is added to differ by C, and never by more.

    Its gradient is scaled up to 1e9 along whatever direction the scale magnifies most; without scaling before the clip it would
    move the unscaled sum by C·s, a hundred times the noise's unit.
    """
    run = hand.train(
        lambda model: scale_then_privatize(model, lr=0.1, base_optimizer=base_optimizer), tmp_path / "run", steps=6
    )
    run.trainer.fit(run.data)
    scale = run.method.scale()
    assert scale.keys() == set(hand.names)
    assert float(flat(scale).max() / flat(scale).min()) > 1.5
    bound = 0.6
    engine = ClippedGradients(run.model, hand.half_squared_error, max_grad_norm=bound, scale=scale)
    neighbours = run.data[0][:5], run.data[1][:5]
    engine.accumulate(neighbours)
    without = {name: total.clone() for name, total in engine.sums.items()}
    largest = 0.0
    for direction in (*torch.eye(2).double(), -torch.ones(2).double(), torch.tensor([1e-9, 1.0]).double()):
        for size in (1e-3, 1.0, 1e9):
            engine.reset()
            engine.accumulate(neighbours)
            engine.accumulate(((size * direction)[None], torch.tensor([-size]).double()))
            moved = float(flat({name: total - without[name] for name, total in engine.sums.items()}).norm())
            assert moved <= engine.sensitivity * (1 + 1e-5)
            largest = max(largest, moved)
    assert engine.sensitivity == bound
    assert largest == pytest.approx(bound, rel=1e-6)


def test_the_scale_of_a_step_does_not_depend_on_its_own_examples(hand, tmp_path):
    """Two runs on different data: the first step's scale is one in both, and the next follows from the released gradient."""
    scales = []
    for name, shift in (("a", 0.0), ("b", 100.0)):
        run = hand.train(lambda model: scale_then_privatize(model, lr=0.1), tmp_path / name, steps=2)
        seen, scale = [], run.method.scale
        run.method.scale = lambda seen=seen, scale=scale: seen.append(scale()) or seen[-1]
        received = keep_received(run)
        run.trainer.fit((run.data[0] + shift, run.data[1]))
        scales.append(seen)
        # v̂ after one step is the released gradient squared.
        for parameter, released in received[0][1].items():
            torch.testing.assert_close(seen[1][parameter], 1 / (released.abs() + 1e-2))
    assert scales[0][0] == scales[1][0] == {}


def test_the_correction_of_adambc_is_the_noise_of_the_plan(hand, tmp_path):
    run = hand.train(lambda model: dp_adambc(model), tmp_path / "run", steps=3)
    deviation = run.trainer.plan.noise_deviation(0.6)
    assert deviation == pytest.approx(0.8 * 0.6 / 4)
    assert [group["noise_variance"] for group in run.method.optimizer.param_groups] == [pytest.approx(deviation**2)]
    bare = hand.train(lambda model: dp_adambc(model), tmp_path / "bare", steps=3, private=False)
    assert bare.method.optimizer.param_groups[0]["noise_variance"] == 0.0


@pytest.mark.parametrize("scores", ["sum", "norms"])
def test_selection_sees_only_noisy_scores(hand, tmp_path, scores):
    """With data whose gradients vanish, the chosen row follows from the noise; and what is received is what is chosen from."""
    choices = set()
    for seed in range(6):
        run = hand.train(lambda model: sparta(model, scores=scores, keep=0.3, first_phase=0.0), tmp_path / f"{seed}", steps=4)
        with torch.no_grad():
            run.model[1].weight.zero_()
            run.model[1].bias.zero_()
        run.trainer.step.randomness = type(run.trainer.step.randomness).seeded(seed)
        run.trainer.step.mechanism._randomness = run.trainer.step.randomness
        received = keep_received(run)
        run.trainer.fit((run.data[0], torch.zeros(8).double()))
        answers = [means["0.weight"] for phase, means in received if phase == SCORING]
        assert len(answers) == 2
        noise = [
            run.trainer.step.randomness.normals("noise 0.weight", step, answers[0].numel(), torch.float64) for step in (0, 1)
        ]
        for answer, drawn in zip(answers, noise, strict=True):
            torch.testing.assert_close(answer.flatten(), drawn * 0.8 * 0.6 / 4)
        total = sum(answers)
        expected = int((total.norm(dim=1) if scores == "sum" else total).argmax())
        (chosen,) = run.method.row_masks()["0.weight"].nonzero().flatten().tolist()
        assert chosen == expected
        choices.add(chosen)
    assert len(choices) > 1


@pytest.mark.parametrize("base_optimizer", ["sgd", "adamw", "microadam"])
def test_unselected_rows_receive_no_noise_and_do_not_move(hand, tmp_path, base_optimizer):
    """Neither momentum, nor weight decay, nor an error carried along moves them: they end bit for bit where they began."""
    options = {"weight_decay": 0.1, **({"density": 0.5} if base_optimizer == "microadam" else {})}
    weights = []
    run = hand.train(
        lambda model: sparta(model, lr=0.1, keep=0.3, base_optimizer=base_optimizer, **options),
        tmp_path / "run",
        steps=12,
        callbacks=[lambda report: weights.append(run.model[0].weight.detach().clone())],
    )
    before = run.model[0].weight.detach().clone()
    received = keep_received(run)
    run.trainer.fit(run.data)
    mask = run.method.row_masks()["0.weight"]
    assert mask.sum() == 1
    released = [means["0.weight"] for phase, means in received if phase == ROWS]
    assert len(released) == 8
    for mean in released:
        assert not mean[~mask].any()
        assert mean[mask].all()
    assert torch.equal(weights[-1][~mask], before[~mask])
    assert (weights[-1][mask] != before[mask]).all()


def test_scoring_moves_no_weight(hand, tmp_path):
    states, rates = [], []

    def watch(report):
        if report.step:
            states.append(flat({name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}))
            rates.append(report.learning_rate)

    run = hand.train(lambda model: sparta(model, lr=0.1, keep=0.3), tmp_path / "run", steps=10, callbacks=[watch])
    run.trainer.fit(run.data)
    assert rates == [0.1] * 2 + [0.0] * 2 + [0.1] * 6
    assert torch.equal(states[1], states[3])
    assert not torch.equal(states[3], states[4])


def test_one_plan_covers_all_phases_and_the_ledger_shows_them(hand, tmp_path):
    run = hand.train(lambda model: sparta(model), tmp_path / "run", steps=10)
    result = run.trainer.fit(run.data)
    record = read_ledger(tmp_path / "run")
    assert record.phases == {"head, biases, norms": 2, "scoring": 2, "selected rows": 6}
    events = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert [event["phase"] for event in events] == ["head, biases, norms"] * 2 + ["scoring"] * 2 + ["selected rows"] * 6
    # One mechanism, ten times: what the plan said before anything began.
    assert {(event["sample_rate"], event["noise_multiplier"]) for event in events} == {(0.5, 0.8)}
    assert record.epsilon() == pytest.approx(run.trainer.plan.epsilon)
    assert result.epsilon == pytest.approx(run.trainer.plan.epsilon)
    report = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert report["phases"] == record.phases
    assert any("scoring 2" in item for item in report["public_by_declaration"])
    assert "scoring 2" in (tmp_path / "run" / "privacy.txt").read_text()


def test_a_crash_costs_the_last_phase_its_steps_and_never_the_scores(hand, tmp_path):
    """Steps that were recorded and lost stay spent; the phases before the last are still whole."""
    make = lambda model: sparta(model, lr=0.1)  # noqa: E731
    first = hand.train(make, tmp_path / "run", steps=10, max_steps=1)
    first.trainer.fit(first.data)
    second = hand.train(make, tmp_path / "run", steps=10, checkpoint_every=100)
    second.trainer.resume()
    for _ in range(3):  # a process that recorded three steps and was killed before its next checkpoint
        second.trainer.step.account._ledger.record_step("head, biases, norms")
    second.trainer.step.account._ledger.close()
    third = hand.train(make, tmp_path / "run", steps=10)
    received = keep_received(third)
    third.trainer.resume()
    third.trainer.fit(third.data)
    assert [phase for phase, _ in received] == ["head, biases, norms", "scoring", "scoring", *["selected rows"] * 3]
    assert read_ledger(tmp_path / "run").steps == 10


def test_frozen_parameters_are_neither_summed_nor_noised_nor_moved(hand, tmp_path):
    run = hand.train(lambda model: dp_bitfit(model, lr=0.5), tmp_path / "run", steps=4)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    received = keep_received(run)
    run.trainer.fit(run.data)
    assert all(means.keys() == {"0.bias", "1.weight", "1.bias"} for _, means in received)
    assert torch.equal(run.model[0].weight, before["0.weight"])
    assert not torch.equal(run.model[0].bias, before["0.bias"])
    assert run.model[0].weight.requires_grad


@pytest.mark.parametrize(("method", "kept"), [("dp-bitfit", [False, False, True]), ("dp-sgd", [True, True, True])])
def test_no_activation_is_kept_for_frozen_weights(tmp_path, method, kept):
    """The inputs of linear layers are gone by the time the loss is there, but for those of layers whose weight trains.

    GELU keeps its own input for the backward pass and not its output, so nothing but the next layer's weight could need it.
    """
    from dp_microadam.methods.registry import build

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3))
    alive, references = [], {}
    for layer in (model[2], model[4], model[6]):
        layer.register_forward_pre_hook(
            lambda layer, args: references.__setitem__(layer, weakref.ref(args[0].untyped_storage()))
        )

    def loss(model, batch):
        losses = model(batch).square().sum(1)
        alive.append([references[layer]() is not None for layer in (model[2], model[4], model[6])])
        return losses

    wired = build(method, model, {}, lr=0.1)
    plan = PrivacyPlan(20, 10, 1.0, 2, 1e-2)
    trainer = PrivateTrainer(model, wired, plan, loss, run_dir=tmp_path / "run", **settings(show_progress=False))
    data = torch.randn(20, 4)
    trainer.step.attach(data)
    alive.clear()
    trainer.step.clip._engine.accumulate(data)
    assert alive == [kept]


def test_of_equal_rows_the_first_are_taken():
    assert top_rows(torch.zeros(5), 0.4).tolist() == [True, True, False, False, False]
    assert top_rows(torch.tensor([1.0, 2.0, 2.0, 2.0]), 0.5).tolist() == [False, True, True, False]
    assert top_rows(torch.arange(100.0), 0.07).nonzero().flatten().tolist() == list(range(93, 100))
    assert top_rows(torch.tensor([-3.0, -1.0]), 1e-9).tolist() == [False, True]
    assert top_rows(torch.zeros(3), 1.0).all()


def test_rows_are_chosen_within_each_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 10, 3), nn.Flatten(), nn.Linear(40, 20), nn.Linear(20, 2))
    method = Sparta(model, lr=0.1, keep=0.2)
    phases = {phase.name: phase for phase in method.phases(PrivacyPlan(100, 10, 1.0, 100, 1e-2))}
    assert method.scored == {"0.weight", "2.weight"}
    assert method.first == {"0.bias", "2.bias", "3.weight", "3.bias"}
    method.enter(phases[SCORING])
    method.receive({"0.weight": 100 * torch.rand(10, 1, 3, 3), "2.weight": torch.rand(20, 40)})
    method.enter(phases[ROWS])
    assert {name: int(mask.sum()) for name, mask in method.row_masks().items()} == {"0.weight": 2, "2.weight": 4}
