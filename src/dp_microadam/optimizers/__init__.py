"""Optimizers. Each is a plain ``torch.optim.Optimizer`` in one file and knows nothing of privacy."""
