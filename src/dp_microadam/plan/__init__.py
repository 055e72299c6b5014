"""What a run does and what it may cost: one frozen, public object. No torch."""
