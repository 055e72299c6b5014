"""The whole algorithm once more, in plain torch: with a fixed seed the library's weights are these, to the bit.

Nothing of the library is used but the plan, whose public numbers say what is sampled, how much noise is added and how far it
may walk. What is here is slow and short; it is where to read what a run of the default method does.
"""

import hashlib
import math

import numpy as np
import pytest
import torch

from dp_microadam import PrivacyPlan

EXAMPLES, FEATURES, HIDDEN, CLASSES = 200, 6, 9, 3
SEED, CHUNK, NORM, DISTANCE, AVERAGE = 7, 16, 0.8, 1.5, 0.99


def examples():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


def network():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, CLASSES))


# The random source: words that are a function of seed, step, purpose, and block of 65,536 numbers.


def random_words(purpose, step, count):
    secret = hashlib.sha256(b"seed %d" % SEED).digest()
    key = hashlib.blake2b(f"0\0{step}\0000\0{purpose}".encode(), key=secret, digest_size=32).digest()
    return np.random.SFC64(np.random.SeedSequence(int.from_bytes(key, "little"), pool_size=8)).random_raw(count)


def uniforms(words):
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(purpose, step, count):
    """Box–Muller in double, rounded to float32; the first half of the words gives radii, the second angles."""
    half = (count + 1) // 2
    words = random_words(purpose, step, 2 * half)
    radius = torch.from_numpy((~words[:half] >> np.uint64(1)).astype(np.float64) * 2.0**-63).log().mul(-2).sqrt()
    angle = torch.from_numpy(uniforms(words[half:])) * (2 * math.pi)
    return torch.cat([angle.cos() * radius, angle.sin() * radius])[:count].float()


# One step: sample, clip, add noise.


def sampled(plan, step):
    """Poisson sampling from the group of the step: every member with the same probability, independently of all others."""
    group = np.arange(step % plan.bands, EXAMPLES, plan.bands)
    rate = plan.bands * plan.batch_size / plan.dataset_size
    return torch.from_numpy(group[uniforms(random_words("sampling", step, len(group))) < rate])


def clipped_sum(model, inputs, labels, rows):
    """Σᵢ min(1, C/‖gᵢ‖)·gᵢ, with every example's gradient formed and kept."""
    total = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in model.named_parameters()}
    first, _, last = model
    for part in rows.split(CHUNK) if len(rows) else ():
        hidden = first(inputs[part])
        middle = torch.tanh(hidden)
        logits = last(middle)
        losses = torch.nn.functional.cross_entropy(logits, labels[part], reduction="none")
        of_first, of_last = torch.autograd.grad(losses.sum(), (hidden, logits))
        gradients = {
            "0.weight": of_first.unsqueeze(2) * inputs[part].unsqueeze(1),
            "0.bias": of_first,
            "2.weight": of_last.unsqueeze(2) * middle.detach().unsqueeze(1),
            "2.bias": of_last,
        }
        squares = {name: squared_norm(gradient) for name, gradient in gradients.items()}
        norms = ((squares["0.bias"] + squares["0.weight"]) + (squares["2.bias"] + squares["2.weight"])).sqrt()
        factors = NORM / norms.clamp(min=NORM)
        for name, gradient in gradients.items():
            flat = gradient.flatten(1)
            if name.endswith("bias"):
                total[name] += torch.tensordot(factors, flat, dims=1)
            else:
                total[name] += torch.zeros(flat.shape[1]).addmv_(flat.t(), factors).view_as(total[name])
    return total


def squared_norm(gradients):
    lengths = torch.linalg.vector_norm(gradients, dim=-1).square()
    return lengths.sum(1) if gradients.dim() > 2 else lengths


class Noise:
    """Normal numbers z of which C·z is white: each step takes back a part of the noise of the steps before."""

    def __init__(self, plan):
        self.coefficients = plan.noise_coefficients.tolist()
        self.kept = {}

    def __call__(self, name, step, count):
        first, *others = self.coefficients
        numbers = normals(f"noise {name}", step, count)
        if not others:
            return numbers.div_(first)
        # In the places of a ring, as the order of a sum decides how it is rounded.
        ring = self.kept.setdefault(name, torch.zeros(len(others), count))
        slot = step % len(others)
        ages = [(slot - place - 1) % len(others) for place in range(len(others))]
        weights = torch.tensor([others[age] for age in ages])
        numbers.addmv_(ring.t(), weights, beta=1 / first, alpha=-1 / first)
        ring[slot] = numbers
        return numbers


def privatized_mean(plan, noise, total, step):
    deviation = plan.noise_multiplier * NORM
    return {
        name: (noise(name, step, value.numel()).view_as(value) * deviation + value) / plan.batch_size
        for name, value in total.items()
    }


# The update: a coordinate moves once what has gathered on it exceeds a threshold; then the average of the weights.


class ThresholdSteps:
    THRESHOLD, LEVELS, BETA, EPS = 2.54, 7, 0.999, 1e-8

    def __init__(self, model):
        self.moments = dict.fromkeys(dict(model.named_parameters()), 0.0)
        self.gathered = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in model.named_parameters()}

    def __call__(self, model, means, step, rate):
        level = self.THRESHOLD / self.LEVELS
        for name, parameter in model.named_parameters():
            mean_square = float(torch.linalg.vector_norm(means[name])) ** 2 / parameter.numel()
            moment = self.BETA * self.moments[name] + (1 - self.BETA) * mean_square
            self.moments[name] = float(torch.tensor(moment))  # kept in float32
            size = math.sqrt(self.moments[name] / (1 - self.BETA ** (step + 1))) + self.EPS
            counted = means[name] * (1 / size / level) + self.gathered[name]
            self.gathered[name] = torch.where(counted.abs() > self.LEVELS, 0.0, counted.round())
            with torch.no_grad():
                parameter.add_(counted - self.gathered[name], alpha=-rate * level)


def reference_run(plan):
    """Weights, and their average, after all steps of the plan."""
    model, (inputs, labels) = network(), examples()
    noise, steps = Noise(plan), ThresholdSteps(model)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Noise alone walks the weights by DISTANCE·d^−¼ in a run, whatever its steps and bands.
    ratios = plan.noise_ratios
    effective = plan.steps * (ratios.running_sum / ratios.single_step) ** 2
    rate = DISTANCE * (parameters**-0.25 / math.sqrt(effective))
    for step in range(plan.steps):
        total = clipped_sum(model, inputs, labels, sampled(plan, step))
        steps(model, privatized_mean(plan, noise, total, step), step, rate)
        decay = min(AVERAGE, (2 + step) / (11 + step))
        for name, parameter in model.named_parameters():
            average[name].lerp_(parameter.detach(), 1 - decay)
    return model.state_dict(), average


@pytest.mark.parametrize(("batch_size", "bands"), [(20, 1), (20, 4), (1, 1)], ids=["one band", "bands", "empty steps"])
def test_a_seeded_run_is_that_of_plain_torch_to_the_bit(tmp_path, batch_size, bands):
    from dp_microadam import PerformanceSettings, PrivacySettings, PrivateStep, methods

    plan = PrivacyPlan.solve(dataset_size=EXAMPLES, batch_size=batch_size, delta=1e-4, epsilon=8.0, steps=40, bands=bands)
    assert any(len(sampled(plan, step)) == 0 for step in range(plan.steps)) == (batch_size == 1)
    model = network()
    method = methods.dp_threshold(model, distance=DISTANCE, average=AVERAGE)
    step = PrivateStep(
        model,
        method,
        plan,
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"),
        examples(),
        run_dir=tmp_path,
        privacy=PrivacySettings(max_grad_norm=NORM, seed=SEED),
        performance=PerformanceSettings(physical_batch_size=CHUNK, strategy="keep"),
    )
    for gradients in step:
        method.update(model, gradients)
    step.close()
    weights, average = reference_run(plan)
    before = network().state_dict()
    for name, value in model.state_dict().items():
        assert not torch.equal(value, before[name])
        assert torch.equal(value, weights[name]), name
        assert torch.equal(method.average.state_dict()[name], average[name]), name
