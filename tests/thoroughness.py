"""How much of a property test runs: the same few examples in every ``make test``, a search among more in ``make test-all``."""

import os

from hypothesis import HealthCheck, settings

THOROUGH = os.environ.get("DP_MICROADAM_THOROUGH") == "1"
"""Set by ``make test-all``."""


def examples(count: int, *, quick: int | None = None) -> settings:
    """Settings of a property test: ``count`` examples where time is no matter, else ``quick``, by default a fifth."""
    chosen = count if THOROUGH else max(3, count // 5) if quick is None else quick
    return settings(max_examples=chosen, deadline=None, suppress_health_check=list(HealthCheck))
