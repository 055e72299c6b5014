"""The experiments of the two-world audit: which steps are repeated, and which statistics of their outputs are tested.

Each plan is small enough that its ε is known exactly, and chosen so that the faults its probes test for would contradict it
within a thousand repetitions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dp_microadam.plan.plan import PrivacyPlan
from dp_microadam.workbench.audit.two_world import Probe, change, contrast, echo, ever, quiet, strength


@dataclass(frozen=True)
class Experiment:
    """One or two steps on two examples or users, one of which is the target, and the probes applied to their outputs."""

    name: str
    plan: PrivacyPlan
    probes: tuple[Probe, ...]

    def claim(self, probe: Probe) -> float:
        """The ε of the plan at the probe's δ, by the PLD accountant, which is tight and errs upwards."""
        return replace(self.plan, delta=probe.delta, accountant="pld").epsilon


# Everybody takes part in the only step: the Gaussian mechanism itself, whose trade-off between errors has a closed form.
NOISE = Experiment(
    "noise",
    PrivacyPlan(dataset_size=2, batch_size=2, noise_multiplier=0.6, steps=1, delta=1e-5),
    (
        Probe("noise scale", "is the noise as large as the sum's sensitivity demands?", strength, delta=0.3),
        Probe("batch size", "does the scale of the result betray how many took part?", quiet, delta=0.3),
        Probe("coordinates", "does noise in one coordinate cancel against another's?", contrast, delta=0.3),
    ),
)

# Half of the examples in each of two steps.
COMPOSITION = Experiment(
    "composition",
    PrivacyPlan(dataset_size=2, batch_size=1, noise_multiplier=1.0, steps=2, delta=1e-5),
    (Probe("repeated noise", "does noise in one step cancel against another's?", change, delta=0.1),),
)

# Hardly any noise, to see the sampling. The target misses both steps with probability ¼, so no test whatsoever may tell the
# worlds apart with an advantage above ¾; at this δ the claim is that ε is zero.
SAMPLING = Experiment(
    "sampling",
    PrivacyPlan(dataset_size=2, batch_size=1, noise_multiplier=0.15, steps=2, delta=1e-5),
    (Probe("sampling", "does each step draw its examples independently of the other?", ever, delta=0.76),),
)

# Two bands, and everybody of a group in its step: the target is in one of the two steps, as in the first experiment.
BANDS = Experiment(
    "bands",
    PrivacyPlan(dataset_size=2, batch_size=1, noise_multiplier=0.6, steps=2, delta=1e-5, bands=2),
    (Probe("correlated noise", "does taking back noise reveal more than one participation?", echo, delta=0.3),),
)

# Users with several examples that all pull the same way: together they may add no more than one example alone.
USERS = Experiment(
    "users",
    PrivacyPlan(dataset_size=2, batch_size=2, noise_multiplier=0.6, steps=1, delta=1e-5, unit="user", examples_per_user=3),
    (Probe("users", "does all that a user has together weigh more than the clipping norm?", strength, delta=0.3),),
)

EXPERIMENTS = (NOISE, COMPOSITION, SAMPLING, BANDS, USERS)
