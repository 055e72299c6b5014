"""Compositions as events of Google's dp-accounting library, for comparison with its accountants."""

import dp_accounting


def as_dp_event(spent):
    """The same composition as an event of Google's dp-accounting library, for use with its accountants."""
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(part.sample_rate, dp_accounting.GaussianDpEvent(part.noise_multiplier))
                if part.cap is None
                else dp_accounting.TruncatedSubsampledGaussianDpEvent(
                    part.cap.population, part.sample_rate, part.cap.units, part.noise_multiplier
                ),
                part.steps,
            )
            for part in spent
        ]
    )
