"""Who takes part in a step: indices only."""
