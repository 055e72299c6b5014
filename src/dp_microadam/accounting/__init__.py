"""What a run costs: ε of subsampled Gaussian steps, their composition, and what it means. Numbers only, no torch."""
