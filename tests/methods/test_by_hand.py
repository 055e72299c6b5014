"""Each method against its formula, written out in numpy and float64 on a problem small enough to do by hand.

Nothing here uses the methods' own code: gradients, clipping, moments, scales, scores and updates are computed anew, with the
sample and the noise that the run's seed gives. Without privacy the same formulas hold without clip and noise.
"""

import numpy as np
import pytest

from dp_microadam.methods import (
    PublicExamples,
    dp_adam,
    dp_adambc,
    dp_adamw,
    dp_bitfit,
    dp_sgd,
    scale_then_privatize,
    sparta,
)
from dp_microadam.methods.registry import build

LR, BETA_1, BETA_2 = 0.05, 0.9, 0.999
SIGMA_C_OVER_B = 0.8 * 0.6 / 4

with_and_without_privacy = pytest.mark.parametrize("private", [True, False], ids=["private", "non-private"])


@pytest.fixture
def check(hand, tmp_path):
    """Run ``make`` through the trainer and compare its weights with what ``by_hand(problem)`` leaves in ``problem.weights``."""

    def compare(make, by_hand, *, steps, private, tolerance=1e-12):
        run = hand.train(make, tmp_path / "run", steps=steps, private=private)
        run.trainer.fit(run.data)
        problem = hand.ByHand(private, steps)
        start = {name: value.copy() for name, value in problem.weights.items()}
        by_hand(problem)
        with run.trainer.method.last_weights(run.model):
            weights = {name: value.clone() for name, value in run.model.state_dict().items()}
        for name, value in weights.items():
            np.testing.assert_allclose(value.numpy(), problem.weights[name], rtol=0, atol=tolerance)
        assert any(np.abs(problem.weights[name] - start[name]).max() > 0.01 for name in start)

    return compare


class Moments:
    """Adam's, bias-corrected."""

    def __init__(self):
        self.first, self.second, self.steps = 0.0, 0.0, 0

    def take(self, gradient):
        self.steps += 1
        self.first = BETA_1 * self.first + (1 - BETA_1) * gradient
        self.second = BETA_2 * self.second + (1 - BETA_2) * gradient**2
        return self.first / (1 - BETA_1**self.steps), self.hat

    @property
    def hat(self):
        return self.second / (1 - BETA_2**self.steps)


@with_and_without_privacy
def test_dp_sgd_with_momentum(check, private):
    def by_hand(problem):
        velocity = dict.fromkeys(problem.weights, 0.0)
        for step in range(4):
            for name, gradient in problem.mean(step).items():
                velocity[name] = 0.9 * velocity[name] + gradient
                problem.weights[name] -= LR * velocity[name]

    check(lambda model: dp_sgd(model, lr=LR, momentum=0.9), by_hand, steps=4, private=private)


@with_and_without_privacy
@pytest.mark.parametrize("make", [dp_adam, dp_adamw])
def test_dp_adam_and_dp_adamw(check, private, make):
    decay = 0.1 if make is dp_adamw else 0.0

    def by_hand(problem):
        moments = {name: Moments() for name in problem.weights}
        for step in range(4):
            for name, gradient in problem.mean(step).items():
                first, second = moments[name].take(gradient)
                problem.weights[name] *= 1 - LR * decay
                problem.weights[name] -= LR * first / (np.sqrt(second) + 1e-8)

    check(lambda model: make(model, lr=LR, weight_decay=decay), by_hand, steps=4, private=private)


@with_and_without_privacy
def test_dp_adambc_subtracts_the_noise_of_the_plan(check, private):
    floor = 2e-3 if private else 1.0
    noise_variance = SIGMA_C_OVER_B**2 if private else 0.0
    floored = []

    def by_hand(problem):
        moments = {name: Moments() for name in problem.weights}
        for step in range(5):
            for name, gradient in problem.mean(step).items():
                first, second = moments[name].take(gradient)
                floored.extend((second - noise_variance < floor).ravel())
                problem.weights[name] -= LR * first / np.sqrt(np.maximum(second - noise_variance, floor))

    check(lambda model: dp_adambc(model, lr=LR, floor=floor), by_hand, steps=5, private=private)
    assert any(floored)
    assert not all(floored)


@with_and_without_privacy
def test_dp_threshold_up_to_its_rounding(check, private):
    # Gradients gather in units of their tensor's size until they exceed the threshold, which is low here so that all do.
    def by_hand(problem):
        second = dict.fromkeys(problem.weights, 0.0)
        for step in range(4):
            for name, gradient in problem.mean(step).items():
                second[name] = BETA_2 * second[name] + (1 - BETA_2) * (gradient**2).mean()
                gathered = gradient / (np.sqrt(second[name] / (1 - BETA_2 ** (step + 1))) + 1e-8)
                problem.weights[name] -= LR * gathered

    def make(model):
        return build("dp-threshold", model, {"threshold": 1e-7}, lr=LR)

    check(make, by_hand, steps=4, private=private, tolerance=2e-6)


def adam_on_scaled_gradients(steps, eps):
    """Adam on g̃ that was clipped and noised after scaling by 1/(√v̂ + eps), v̂ that of the step before."""

    def by_hand(problem):
        moments = {name: Moments() for name in problem.weights}
        for step in range(steps):
            scale = {
                name: 1 / (np.sqrt(moments[name].hat) + eps) if step else np.ones_like(value)
                for name, value in problem.weights.items()
            }
            for name, scaled in problem.mean(step, scale).items():
                first, second = moments[name].take(scaled / scale[name])
                problem.weights[name] -= LR * first / (np.sqrt(second) + 1e-8)

    return by_hand


@with_and_without_privacy
def test_scale_then_privatize_with_adam(check, private):
    by_hand = adam_on_scaled_gradients(steps=5, eps=0.01)
    check(lambda model: scale_then_privatize(model, lr=LR, scale_eps=0.01), by_hand, steps=5, private=private)


@with_and_without_privacy
def test_scale_then_privatize_with_microadam(check, private):
    # MicroAdam at full density, without error and with a long window: its moments are sums over all rows so far.
    options = {"base_optimizer": "microadam", "density": 1.0, "quantize": False}
    check(
        lambda model: scale_then_privatize(model, lr=LR, scale_eps=0.05, **options),
        adam_on_scaled_gradients(steps=3, eps=0.05),
        steps=3,
        private=private,
        tolerance=3e-6,
    )


@with_and_without_privacy
@pytest.mark.parametrize("base_optimizer", ["sgd", "adam"])
def test_scale_then_privatize_delayed_is_dp_squared(check, private, base_optimizer):
    # Stretches of two steps. Scaled ones clip to 0.5·C and step with 0.1·lr; the second plain stretch updates v once more.
    eps, gamma, norm_ratio, rate_ratio = 0.1, 0.8, 0.5, 0.1

    def by_hand(problem):
        variance = dict.fromkeys(problem.weights, 0.0)
        total = dict.fromkeys(problem.weights, 0.0)
        moments = {name: Moments() for name in problem.weights}
        for step in range(7):
            plain = step % 4 < 2
            # clip(x, rC) = r·clip(x/r, C), and noise of deviation σrC is r times noise of deviation σC.
            ratio = 1.0 if plain else norm_ratio
            scale = {
                name: np.ones_like(value) if plain else 1 / (np.sqrt(variance[name]) + eps)
                for name, value in problem.weights.items()
            }
            answers = problem.mean(step, {name: factor / ratio for name, factor in scale.items()})
            for name, answer in answers.items():
                scaled = ratio * answer
                direction = scaled if base_optimizer == "sgd" else scaled / scale[name]
                if base_optimizer == "adam":
                    first, second = moments[name].take(direction)
                    direction = first / (np.sqrt(second) + 1e-8)
                problem.weights[name] -= LR * (1.0 if plain else rate_ratio) * direction
                if plain:
                    total[name] = total[name] + answer
                    if step % 4 == 1:
                        variance[name] = gamma * variance[name] + (1 - gamma) * (total[name] / 2) ** 2
                        total[name] = 0.0

    options = {"scale_eps": eps, "interval": 2, "decay": gamma, "norm_ratio": norm_ratio, "rate_ratio": rate_ratio}
    check(
        lambda model: scale_then_privatize(model, lr=LR, source="delayed", base_optimizer=base_optimizer, **options),
        by_hand,
        steps=7,
        private=private,
    )


@with_and_without_privacy
@pytest.mark.parametrize("base_optimizer", ["sgd", "adam"])
def test_scale_then_privatize_public_is_adadps(check, hand, private, base_optimizer):
    # Five public examples in batches of two: two, two, one, and again.
    eps, gamma = 0.2, 0.7
    public = hand.examples(5, seed=9)

    def by_hand(problem):
        variance = dict.fromkeys(problem.weights, 0.0)
        moments = {name: Moments() for name in problem.weights}
        for step in range(4):
            batch = [range(2), range(2, 4), range(4, 5)][step % 3]
            found = [problem.gradient(public[0][i].numpy(), float(public[1][i])) for i in batch]
            for name in variance:
                gradient = sum(one[name] for one in found) / len(found)
                variance[name] = gamma * variance[name] + (1 - gamma) * gradient**2
            scale = {name: 1 / (np.sqrt(value) + eps) for name, value in variance.items()}
            for name, scaled in problem.mean(step, scale).items():
                direction = scaled
                if base_optimizer == "adam":
                    first, second = moments[name].take(scaled / scale[name])
                    direction = first / (np.sqrt(second) + 1e-8)
                problem.weights[name] -= LR * direction

    given = PublicExamples(public, hand.half_squared_error, batch_size=2)
    check(
        lambda model: scale_then_privatize(
            model, lr=LR, source="public", public=given, base_optimizer=base_optimizer, scale_eps=eps, decay=gamma
        ),
        by_hand,
        steps=4,
        private=private,
    )


@with_and_without_privacy
def test_dp_bitfit(check, private):
    def by_hand(problem):
        chosen = {name: np.ones_like(problem.weights[name]) for name in ("0.bias", "1.weight", "1.bias")}
        velocity = dict.fromkeys(chosen, 0.0)
        for step in range(4):
            for name, gradient in problem.mean(step, chosen).items():
                velocity[name] = 0.9 * velocity[name] + gradient
                problem.weights[name] -= LR * velocity[name]

    check(lambda model: dp_bitfit(model, lr=LR), by_hand, steps=4, private=private)


@with_and_without_privacy
@pytest.mark.parametrize("rows_only", [False, True], ids=["all go on", "rows only"])
@pytest.mark.parametrize("scores", ["sum", "norms"])
def test_sparta(check, private, scores, rows_only):
    # Ten steps: two for head and biases, two of scoring (an epoch of 8/4 steps), six for one row of three.
    first = ("0.bias", "1.weight", "1.bias")

    def by_hand(problem):
        velocity = dict.fromkeys(problem.weights, 0.0)

        def update(gradients):
            for name, gradient in gradients.items():
                velocity[name] = 0.9 * velocity[name] + gradient
                problem.weights[name] -= LR * velocity[name]

        ones = {name: np.ones_like(value) for name, value in problem.weights.items()}
        for step in (0, 1):
            update(problem.mean(step, {name: ones[name] for name in first}))
        scored = {"0.weight": ones["0.weight"]}
        if scores == "sum":
            total = sum(problem.mean(step, scored)["0.weight"] for step in (2, 3))
            found = np.sqrt((total**2).sum(1))
        else:
            rows = [problem.mean(step, scored, of=lambda part: np.sqrt((part**2).sum(1)))["0.weight"] for step in (2, 3)]
            found = sum(rows)
        best = int(np.argmax(found))
        mask = np.zeros((3, 1))
        mask[best] = 1.0
        for step in range(4, 10):
            factors = {"0.weight": ones["0.weight"] * mask}
            if not rows_only:
                factors.update({name: ones[name] for name in first})
            # The noise that the seed gives is drawn for the selected row alone.
            noise, problem.draw = problem.draw, lambda name, step, shape: np.zeros(shape)
            gradients = problem.mean(step, factors)
            problem.draw = noise
            for name in gradients:
                if name == "0.weight":
                    gradients[name][best] += noise(name, step, (1, 2))[0] / 4
                else:
                    gradients[name] = gradients[name] + noise(name, step, gradients[name].shape) / 4
            update(gradients)

    options = {"keep": 0.3, "scores": scores, "rows_only": rows_only, "first_phase": 0.2}
    check(lambda model: sparta(model, lr=LR, **options), by_hand, steps=10, private=private)
